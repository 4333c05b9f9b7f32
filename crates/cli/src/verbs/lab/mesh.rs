//! `seikan lab mesh`: one coordinator and many members on this machine, which say to it what real ones say.
//!
//! 1. all join at once: how long until every one has its addresses, and whether any two have the same;
//! 2. all tell where they may be reached, and ask for changes, until everybody knows everybody;
//! 3. some change every second: how long until all others have heard of each change, and what the coordinator needs for it.
//!
//! The coordinator is this program, in a process and a folder of its own, on the loopback interface. Members are the client of
//! the daemon, without tunnels.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use ipnet::IpNet;
use seikan_config::CoordinatorUrl;
use seikan_coordinator::{Actor, NewToken, Store};
use seikan_node::mesh::client::Client;
use seikan_node::node::SystemRandom;
use seikan_proto::keys::PrivateKey;
use seikan_proto::mesh::{
    Credential, Cursor, Endpoints, JoinRequest, Joined, Membership, Pin, Token,
};
use seikan_sys::process;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// How long a member waits for changes.
const WAIT: Duration = Duration::from_secs(50);
/// How long everybody may take to know everybody.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long changes may take to be heard of, once there are no more.
const REST: Duration = Duration::from_secs(10);

/// What `lab mesh` is told.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan lab mesh --members 1000 --changes 100    needs no root; a minute on two cores")]
pub struct MeshArguments {
    /// Members
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..=10_000))]
    pub members: u32,
    /// Changes in a second
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub changes: u32,
    /// How long there are changes
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<std::path::PathBuf>,
}

/// What came of it. Times in seconds.
#[derive(Debug, Serialize)]
struct Figures {
    members: u32,
    /// Until all had joined.
    joined: f64,
    /// Members with an address that another one has as well.
    duplicates: usize,
    /// Until everybody knew everybody.
    known: f64,
    /// Changes that were made and acknowledged.
    changes: u64,
    /// The time in which they were.
    changing: f64,
    /// From the acknowledgement of a change until a member had heard of it: median and 99th percentile.
    heard: [f64; 2],
    /// Changes that some member had not heard of at the end.
    unheard: u64,
    /// Processors that the coordinator kept busy meanwhile.
    processors: f64,
    /// Memory that it has at the end, in bytes.
    memory: u64,
}

/// A member.
pub(super) struct Member {
    client: Client,
    number: u16,
}

/// A member has heard of one's change number.
struct Heard {
    of: u16,
    change: u16,
    at: Instant,
}

/// Measures and shows.
pub fn run(arguments: &MeshArguments) -> anyhow::Result<ExitCode> {
    // Two connections for each member, at both ends.
    process::allow_more_files().context("cannot have more files open")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let figures = runtime.block_on(measure(arguments))?;
    show(&figures)?;
    if let Some(file) = &arguments.json {
        let text = serde_json::to_string_pretty(&figures)?;
        crate::output::write_file(file, &(text + "\n"))?;
    }
    let good = figures.duplicates == 0 && figures.unheard == 0;
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn measure(arguments: &MeshArguments) -> anyhow::Result<Figures> {
    let folder = tempfile::TempDir::with_prefix("seikan-lab-")?;
    let coordinator = Coordinator::start(folder.path(), &[])?;
    let token = coordinator.token(folder.path())?;

    let begun = Instant::now();
    let (members, addresses) = join_all(
        0..arguments.members,
        &coordinator.url,
        coordinator.pin,
        &token,
    )
    .await?;
    let joined = begun.elapsed().as_secs_f64();
    let different: BTreeSet<IpNet> = addresses.iter().flatten().copied().collect();
    let duplicates = addresses.iter().map(Vec::len).sum::<usize>() - different.len();

    let begun = Instant::now();
    let (said, mut heard) = mpsc::unbounded_channel();
    let mut followers = JoinSet::new();
    for member in &members {
        member.tell(0).await?;
    }
    let (know, mut knowing) = mpsc::unbounded_channel();
    for member in &members {
        let follower = follow(
            member.clone(),
            members.len() - 1,
            know.clone(),
            said.clone(),
        );
        followers.spawn(follower);
    }
    let everybody = async {
        for _ in 0..members.len() {
            knowing.recv().await;
        }
    };
    if tokio::time::timeout(PATIENCE, everybody).await.is_err() {
        bail!(
            "not everybody knows everybody after {} s",
            PATIENCE.as_secs()
        );
    }
    let known = begun.elapsed().as_secs_f64();
    while heard.try_recv().is_ok() {}

    let spent = process::cpu_time(coordinator.child.id())?.total();
    let begun = Instant::now();
    let made = change(arguments, &members).await?;
    let changing = begun.elapsed();
    let (delays, unheard) = settle(&made, members.len() - 1, &mut heard).await;
    let spent = process::cpu_time(coordinator.child.id())?.total() - spent;
    followers.abort_all();
    Ok(Figures {
        members: arguments.members,
        joined,
        duplicates,
        known,
        changes: made.len() as u64,
        changing: changing.as_secs_f64(),
        heard: [quantile(&delays, 0.5), quantile(&delays, 0.99)],
        unheard,
        processors: spent.as_secs_f64() / changing.as_secs_f64(),
        memory: process::memory(coordinator.child.id())?.resident,
    })
}

/// All at once, each over a connection of its own.
pub(super) async fn join_all(
    numbers: std::ops::Range<u32>,
    url: &CoordinatorUrl,
    pin: Pin,
    token: &Token,
) -> anyhow::Result<(Vec<Arc<Member>>, Vec<Vec<IpNet>>)> {
    let mut joining = JoinSet::new();
    for number in numbers {
        let request = JoinRequest {
            token: token.clone(),
            name: format!("m{number}").parse()?,
            public_key: PrivateKey::generate(&mut SystemRandom).public(),
            credential: Credential::generate(&mut SystemRandom),
        };
        let url = url.clone();
        joining.spawn(async move {
            let client = Client::new(&url, Some(pin), None)?;
            let joined: Joined = client.join(&request).await?;
            let client = Client::new(&url, Some(pin), Some(request.credential))?;
            let number = number as u16;
            anyhow::Ok((Arc::new(Member { client, number }), joined.addresses))
        });
    }
    let mut all = (Vec::new(), Vec::new());
    while let Some(joined) = joining.join_next().await {
        let (member, addresses) = joined??;
        all.0.push(member);
        all.1.push(addresses);
    }
    Ok(all)
}

impl Member {
    /// An endpoint that says who it is and how often it has changed.
    pub(super) async fn tell(&self, change: u16) -> anyhow::Result<()> {
        let [a, b] = self.number.to_be_bytes();
        // A port is never 0.
        let endpoint = SocketAddr::from(([198, 18, a, b], change + 1));
        let endpoints = Endpoints {
            endpoints: vec![endpoint],
            relayed: Vec::new(),
        };
        Ok(self.client.tell(&endpoints).await?)
    }
}

/// Asks for changes for ever; says once that it knows everybody with an endpoint, and of whatever it hears.
async fn follow(
    member: Arc<Member>,
    others: usize,
    know: mpsc::UnboundedSender<()>,
    said: mpsc::UnboundedSender<Heard>,
) {
    let mut membership = Membership::default();
    let mut known = Cursor::default();
    let mut knows = false;
    loop {
        let wait = if known.revision == 0 {
            Duration::ZERO
        } else {
            WAIT
        };
        let Ok(changes) = member.client.changes(known, wait).await else {
            tokio::time::sleep(Duration::from_millis(200)).await;
            continue;
        };
        let at = Instant::now();
        for endpoint in changes.members.iter().flat_map(|member| &member.endpoints) {
            if let SocketAddr::V4(v4) = endpoint {
                let [_, _, a, b] = v4.ip().octets();
                let (of, change) = (u16::from_be_bytes([a, b]), v4.port() - 1);
                let _ = said.send(Heard { of, change, at });
            }
        }
        known = changes.cursor();
        membership.take(changes);
        let members = membership.members();
        if !knows && members.len() == others && members.values().all(|m| !m.endpoints.is_empty()) {
            knows = true;
            let _ = know.send(());
        }
    }
}

/// Members change, one after the other, so many a second; who, and when it was acknowledged.
async fn change(
    arguments: &MeshArguments,
    members: &[Arc<Member>],
) -> anyhow::Result<Vec<(u16, u16, Instant)>> {
    let mut tick = tokio::time::interval(Duration::from_secs(1) / arguments.changes);
    let mut changing = JoinSet::new();
    let count = arguments.changes * arguments.seconds;
    for number in 0..count as usize {
        tick.tick().await;
        let member = members[number % members.len()].clone();
        let change = (number / members.len() + 1) as u16;
        changing.spawn(async move {
            member.tell(change).await?;
            anyhow::Ok((member.number, change, Instant::now()))
        });
    }
    let mut made = Vec::new();
    while let Some(changed) = changing.join_next().await {
        made.push(changed??);
    }
    Ok(made)
}

/// Waits until all have heard of all; the delays, and how many were not heard of by somebody.
async fn settle(
    made: &[(u16, u16, Instant)],
    others: usize,
    heard: &mut mpsc::UnboundedReceiver<Heard>,
) -> (Vec<f64>, u64) {
    let at: std::collections::HashMap<(u16, u16), Instant> = made
        .iter()
        .map(|(of, change, at)| ((*of, *change), *at))
        .collect();
    // A change that came again before somebody asked is told with it, as the newer one.
    let mut newest = std::collections::HashMap::new();
    for (of, change, _) in made {
        let last = newest.entry(*of).or_insert(*change);
        *last = (*last).max(*change);
    }
    let mut missing: std::collections::HashMap<u16, usize> =
        newest.keys().map(|of| (*of, others)).collect();
    let mut delays = Vec::new();
    let until = tokio::time::Instant::now() + REST;
    while missing.values().any(|count| *count > 0) {
        let Ok(Some(one)) = tokio::time::timeout_at(until, heard.recv()).await else {
            break;
        };
        if let Some(acknowledged) = at.get(&(one.of, one.change)) {
            // Some hear of it before who made it does.
            delays.push(
                one.at
                    .saturating_duration_since(*acknowledged)
                    .as_secs_f64(),
            );
        }
        if newest.get(&one.of) == Some(&one.change) {
            let count = missing.entry(one.of).or_default();
            *count = count.saturating_sub(1);
        }
    }
    let unheard = missing.values().filter(|count| **count > 0).count();
    delays.sort_by(f64::total_cmp);
    (delays, unheard as u64)
}

pub(super) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted
        .get((last as f64 * share).round() as usize)
        .copied()
        .unwrap_or(f64::NAN)
}

/// The coordinator; ended with this.
pub(super) struct Coordinator {
    child: Child,
    pub url: CoordinatorUrl,
    pub address: SocketAddr,
    pub pin: Pin,
}

impl Coordinator {
    /// With more options, if any.
    pub fn start(folder: &std::path::Path, options: &[&str]) -> anyhow::Result<Coordinator> {
        let mut child = Command::new("/proc/self/exe")
            .args(["coordinator", "--listen", "127.0.0.1:0", "--dir"])
            .arg(folder)
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a coordinator")?;
        let mut line = String::new();
        if let Some(said) = child.stdout.take() {
            BufReader::new(said).read_line(&mut line)?;
        }
        let after = |word: &str| {
            let mut words = line.split([' ', ',', '\n']).filter(|w| !w.is_empty());
            words.by_ref().find(|w| *w == word)?;
            words.next()
        };
        let (Some(address), Some(pin)) = (after("on"), after("pin")) else {
            let _ = child.kill();
            let _ = child.wait();
            bail!("the coordinator does not start: {line}");
        };
        Ok(Coordinator {
            url: format!("https://{address}").parse()?,
            address: address.parse()?,
            pin: pin.parse()?,
            child,
        })
    }

    fn token(&self, folder: &std::path::Path) -> anyhow::Result<Token> {
        let token = Token::generate(&mut SystemRandom);
        let store = Store::open(&folder.join(crate::verbs::coordinator::DATABASE))?;
        let lab = Actor::Operator("lab".into());
        store.create_token(&token.digest(), &NewToken::default(), &lab, 0)?;
        Ok(token)
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        // Fails only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn show(figures: &Figures) -> std::io::Result<()> {
    let mut out = anstream::stdout();
    let Figures {
        members,
        joined,
        duplicates,
        known,
        changes,
        changing,
        heard: [median, late],
        unheard,
        processors,
        memory,
    } = figures;
    writeln!(
        out,
        "{members} members joined at once in {joined:.1} s, {duplicates} with another's address"
    )?;
    writeln!(out, "everybody knew everybody after {known:.1} s")?;
    writeln!(
        out,
        "{changes} changes in {changing:.1} s: heard of after {median:.2} s (median), {late:.2} s (99 of 100); {unheard} not at all"
    )?;
    writeln!(
        out,
        "the coordinator kept {processors:.2} processors busy and has {} MB of memory",
        memory / 1_000_000
    )
}
