//! `seikan lab coordinators`: three coordinators over three members of etcd on this machine, of which some are killed.
//!
//! 1. many join at once, at all coordinators: how long until every one has its addresses, and whether any two have the same;
//! 2. some change every second, and ask the next coordinator when one does not answer, as members do; after a third of the time a
//!    coordinator is killed, after two thirds the member of etcd that leads: how long nothing was acknowledged at most, and how long one
//!    change took;
//! 3. whether everything that was acknowledged is there.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use ipnet::IpNet;
use seikan_coordinator::{Actor, ETCD_PREFIX, Etcd, NewToken, Store};
use seikan_lab::etcd::Cluster;
use seikan_node::mesh::client::Client;
use seikan_node::node::SystemRandom;
use seikan_proto::keys::PrivateKey;
use seikan_proto::mesh::{Credential, Endpoints, JoinRequest, Reason, RelayAddress, Token};
use seikan_sys::process;
use serde::Serialize;
use tokio::task::JoinSet;

use super::mesh::{Coordinator, quantile};

/// Coordinators.
const COORDINATORS: usize = 3;
/// Pause before something is asked of the next coordinator.
const PAUSE: Duration = Duration::from_millis(20);
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What `lab coordinators` is told.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan lab coordinators --members 1000 --changes 100    needs etcd and no root; a minute on two cores")]
pub struct CoordinatorsArguments {
    /// Members
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..=10_000))]
    pub members: u32,
    /// Changes in a second
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub changes: u32,
    /// How long there are changes
    #[arg(long, value_name = "SECONDS", default_value_t = 18, value_parser = clap::value_parser!(u32).range(3..=600))]
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
    /// Changes that were acknowledged.
    changes: usize,
    /// Of these, what is not there at the end.
    lost: usize,
    /// Members that were told that they are none.
    refused: usize,
    /// From one acknowledgement to the next, at most: while all are well, after a coordinator was killed, after etcd's leader was.
    gaps: [f64; 3],
    /// How long a change took: median, 99th percentile, the longest.
    took: [f64; 3],
}

/// A member.
struct Member {
    client: Client,
    number: u16,
    /// A member has one change told at a time, as a real one.
    turn: tokio::sync::Mutex<()>,
}

/// A change that was acknowledged.
struct Made {
    of: u16,
    change: u16,
    asked: Instant,
    at: Instant,
}

/// Measures and shows.
pub fn run(arguments: &CoordinatorsArguments) -> anyhow::Result<ExitCode> {
    // Two connections for each member, at both ends.
    process::allow_more_files().context("cannot have more files open")?;
    let mut cluster = Cluster::start(None)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let figures = runtime.block_on(measure(arguments, &mut cluster))?;
    show(&figures)?;
    if let Some(file) = &arguments.json {
        let text = serde_json::to_string_pretty(&figures)?;
        crate::output::write_file(file, &(text + "\n"))?;
    }
    let good = figures.duplicates + figures.lost + figures.refused == 0;
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn measure(
    arguments: &CoordinatorsArguments,
    cluster: &mut Cluster,
) -> anyhow::Result<Figures> {
    let folder = tempfile::TempDir::with_prefix("seikan-lab-")?;
    // The coordinators, as the daemons' user, pass through to their own folders.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode)?;
    let urls = cluster.endpoints().join(",");
    let mut coordinators = Vec::new();
    for number in 0..COORDINATORS {
        let own = folder.path().join(number.to_string());
        std::fs::create_dir(&own)?;
        if number > 0 {
            std::fs::copy(folder.path().join("0/tls.pem"), own.join("tls.pem"))?;
        }
        coordinators.push(Coordinator::start(&own, &["--etcd", &urls])?);
    }
    let settings = Etcd {
        endpoints: cluster.endpoints(),
        prefix: ETCD_PREFIX.to_owned(),
        ca: None,
        identity: None,
        user: None,
        mesh: None,
        advertise: None,
    };
    let token = Token::generate(&mut SystemRandom);
    let lab = Actor::Operator("lab".into());
    Store::open_etcd(&settings)?.create_token(&token.digest(), &NewToken::default(), &lab, 0)?;

    let begun = Instant::now();
    let (members, addresses) = join_all(arguments.members, &coordinators, &token).await?;
    let joined = begun.elapsed().as_secs_f64();
    let different: BTreeSet<IpNet> = addresses.iter().flatten().copied().collect();
    let duplicates = addresses.iter().map(Vec::len).sum::<usize>() - different.len();

    let begun = Instant::now();
    let third = Duration::from_secs(arguments.seconds.into()) / 3;
    let kills = async {
        tokio::time::sleep(third).await;
        drop(coordinators.remove(0));
        tokio::time::sleep(third).await;
        if let Some(leader) = cluster.leader() {
            cluster.kill(leader);
        }
        coordinators
    };
    let (made, coordinators) = tokio::join!(change(arguments, &members), kills);
    let (made, refused) = made?;
    // Asked of etcd itself, through nobody that was there.
    let known = Store::open_etcd(&settings)?.members()?;
    drop(coordinators);
    let lost = made.iter().filter(|made| {
        let endpoint = |change| endpoint(made.of, change);
        let name = format!("m{}", made.of);
        let member = known
            .iter()
            .find(|known| known.member.name.as_str() == name);
        let there = member.and_then(|known| known.member.endpoints.first());
        // A later one took its place, or it is there itself.
        !there
            .is_some_and(|there| there.ip() == endpoint(0).ip() && *there >= endpoint(made.change))
    });
    let lost = lost.count();
    let mut acknowledged: Vec<Instant> = made.iter().map(|made| made.at).collect();
    acknowledged.sort_unstable();
    let mut gaps = [0.0f64; 3];
    for pair in acknowledged.windows(2) {
        let part = ((pair[1] - begun).as_secs_f64() / third.as_secs_f64()) as usize;
        let gap = (pair[1] - pair[0]).as_secs_f64();
        gaps[part.min(2)] = gaps[part.min(2)].max(gap);
    }
    let mut took: Vec<f64> = made
        .iter()
        .map(|made| (made.at - made.asked).as_secs_f64())
        .collect();
    took.sort_by(f64::total_cmp);
    Ok(Figures {
        members: arguments.members,
        joined,
        duplicates,
        changes: made.len(),
        lost,
        refused,
        gaps,
        took: [0.5, 0.99, 1.0].map(|share| quantile(&took, share)),
    })
}

/// All at once, spread over the coordinators.
async fn join_all(
    count: u32,
    coordinators: &[Coordinator],
    token: &Token,
) -> anyhow::Result<(Vec<Arc<Member>>, Vec<Vec<IpNet>>)> {
    let others: Vec<RelayAddress> = coordinators
        .iter()
        .map(|coordinator| Ok(coordinator.address.to_string().parse()?))
        .collect::<anyhow::Result<_>>()?;
    let mut joining = JoinSet::new();
    for number in 0..count {
        let request = JoinRequest {
            token: token.clone(),
            name: format!("m{number}").parse()?,
            public_key: PrivateKey::generate(&mut SystemRandom).public(),
            credential: Credential::generate(&mut SystemRandom),
        };
        let coordinator = &coordinators[number as usize % coordinators.len()];
        let (url, pin) = (coordinator.url.clone(), coordinator.pin);
        let others = others.clone();
        joining.spawn(async move {
            let client = Client::new(&url, Some(pin), None)?;
            let begun = Instant::now();
            let joined = loop {
                match client.join(&request).await {
                    Ok(joined) => break joined,
                    Err(error) if begun.elapsed() > PATIENCE => return Err(error.into()),
                    // As a person does who is told that it cannot be done now.
                    Err(_) => tokio::time::sleep(PAUSE).await,
                }
            };
            let client = Client::new(&url, Some(pin), Some(request.credential))?;
            client.know(&others);
            let number = number as u16;
            let turn = tokio::sync::Mutex::default();
            let member = Member {
                client,
                number,
                turn,
            };
            anyhow::Ok((Arc::new(member), joined.addresses))
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

/// An endpoint that says whose it is and how often it has changed.
fn endpoint(of: u16, change: u16) -> SocketAddr {
    let [a, b] = of.to_be_bytes();
    // A port is never 0.
    SocketAddr::from(([198, 18, a, b], change + 1))
}

/// Members change, one after the other, so many a second; what was acknowledged, and how many were told that they are none.
async fn change(
    arguments: &CoordinatorsArguments,
    members: &[Arc<Member>],
) -> anyhow::Result<(Vec<Made>, usize)> {
    let mut tick = tokio::time::interval(Duration::from_secs(1) / arguments.changes);
    let mut changing = JoinSet::new();
    let count = arguments.changes * arguments.seconds;
    for number in 0..count as usize {
        tick.tick().await;
        let member = members[number % members.len()].clone();
        let change = (number / members.len() + 1) as u16;
        changing.spawn(async move { member.change(change).await });
    }
    let (mut made, mut refused) = (Vec::new(), 0);
    while let Some(changed) = changing.join_next().await {
        match changed?? {
            Some(done) => made.push(done),
            None => refused += 1,
        }
    }
    Ok((made, refused))
}

impl Member {
    /// Says it until somebody acknowledges it; `None`: it was told that it is no member.
    async fn change(&self, change: u16) -> anyhow::Result<Option<Made>> {
        let endpoints = Endpoints {
            endpoints: vec![endpoint(self.number, change)],
            relayed: Vec::new(),
        };
        let asked = Instant::now();
        let _turn = self.turn.lock().await;
        loop {
            match self.client.tell(&endpoints).await {
                Ok(()) => {
                    return Ok(Some(Made {
                        of: self.number,
                        change,
                        asked,
                        at: Instant::now(),
                    }));
                }
                Err(error) if error.reason() == Some(Reason::NotAMember) => return Ok(None),
                Err(error) if asked.elapsed() > PATIENCE => bail!("not acknowledged: {error}"),
                Err(_) => {
                    self.client.turn();
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

fn show(figures: &Figures) -> std::io::Result<()> {
    let mut out = anstream::stdout();
    let Figures {
        members,
        joined,
        duplicates,
        changes,
        lost,
        refused,
        gaps: [well, coordinator, etcd],
        took: [median, late, longest],
    } = figures;
    writeln!(
        out,
        "{members} members joined at once, at three coordinators, in {joined:.1} s, {duplicates} with another's address"
    )?;
    writeln!(
        out,
        "{changes} changes acknowledged, {lost} of them lost, {refused} refused for good"
    )?;
    writeln!(
        out,
        "a change took {median:.3} s (median), {late:.2} s (99 of 100), {longest:.2} s (longest)"
    )?;
    writeln!(
        out,
        "longest time without one: {well:.2} s, {coordinator:.2} s after a coordinator was killed, {etcd:.2} s after etcd's leader was"
    )
}
