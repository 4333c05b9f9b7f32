//! A coordinator in a process of its own, and simulated members: the daemon's client without a
//! tunnel.

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use ipnet::IpNet;
use seikan_config::CoordinatorUrl;
use seikan_lab::arguments::whole;
use seikan_lab::program;
use seikan_mesh::client::Client;
use seikan_mesh::web_proxy::WebProxies;
use seikan_node::system::SystemRandom;
use seikan_proto::keys::PrivateKey;
use seikan_proto::mesh::{Credential, Endpoints, JoinRequest, Pin, RelayAddress, Token};
use seikan_sys::process;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use super::JsonFile;

/// Pause before a failed request is repeated.
pub const PAUSE: Duration = Duration::from_millis(20);

/// Simulated members, and where figures go.
#[derive(Debug, Args)]
pub struct Crowd {
    /// Number of members
    #[arg(long, default_value_t = 1000, value_parser = whole(2..=10_000))]
    pub members: u32,
    /// Number of changes per second
    #[arg(long, default_value_t = 100, value_parser = whole(1..=1000))]
    pub changes: u32,
    #[command(flatten)]
    pub(super) json: JsonFile,
}

/// Runs a measurement that has two connections for each member, at both ends.
pub fn with_many_files<T, F: Future<Output = anyhow::Result<T>>>(
    measure: impl FnOnce() -> F,
) -> anyhow::Result<T> {
    process::allow_more_files().context("cannot have more files open")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(measure())
}

/// The process of a coordinator; killed when dropped.
pub struct Coordinator {
    child: Child,
    folder: PathBuf,
    pub address: SocketAddr,
    pub access: Access,
}

/// Address of a coordinator, and the pin of its certificate.
#[derive(Clone)]
pub struct Access {
    pub url: CoordinatorUrl,
    pub pin: Pin,
}

impl Coordinator {
    /// Starts a coordinator on the loopback interface, with further options.
    pub fn start(folder: &Path, options: &[&str]) -> anyhow::Result<Coordinator> {
        let mut child = program::seikan_command()?
            .args(["coordinator", "--listen", "127.0.0.1:0", "--dir"])
            .arg(folder)
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a coordinator")?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
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
            folder: folder.to_owned(),
            address: address.parse()?,
            access: Access {
                url: format!("https://{address}").parse()?,
                pin: pin.parse()?,
            },
            child,
        })
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns a token for any number of members.
    pub fn token(&self) -> anyhow::Result<Token> {
        let printed = self.administer(&["token", "--reusable"])?;
        let mut words = printed.split_whitespace();
        words.find(|word| *word == "--token");
        Ok(words.next().context("cannot make a token")?.parse()?)
    }

    /// Runs `seikan coordinator` with these words in its folder, and returns the output.
    pub fn administer(&self, words: &[&str]) -> anyhow::Result<String> {
        let output = program::seikan_command()?
            .arg("coordinator")
            .args(words)
            .arg("--dir")
            .arg(&self.folder)
            .output()
            .context("cannot start seikan")?;
        if !output.status.success() {
            let complaint = String::from_utf8_lossy(&output.stderr);
            bail!(
                "seikan coordinator {}: {}",
                words.join(" "),
                complaint.trim()
            );
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        // Fails only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A simulated member.
pub struct Member {
    pub client: Client,
    pub number: u16,
    /// Held during a request: a member sends one at a time, as a real one does.
    pub request: Mutex<()>,
}

impl Member {
    /// Reports an endpoint that encodes this member and the number of its change.
    pub async fn report(&self, change: u16) -> anyhow::Result<()> {
        Ok(self
            .client
            .report_endpoints(&endpoints(self.number, change))
            .await?)
    }
}

/// Returns an endpoint that encodes the member in its address and the change in its port.
pub fn endpoint(member: u16, change: u16) -> SocketAddr {
    let [a, b] = member.to_be_bytes();
    // A port is never 0.
    SocketAddr::from(([198, 18, a, b], change + 1))
}

/// Returns the endpoints that a member reports.
pub fn endpoints(member: u16, change: u16) -> Endpoints {
    Endpoints {
        endpoints: vec![endpoint(member, change)],
        relayed: Vec::new(),
    }
}

/// Members that have joined, with the addresses of each.
pub struct Joined {
    pub members: Vec<Arc<Member>>,
    /// Time until all had joined, in seconds.
    pub seconds: f64,
    addresses: Vec<Vec<IpNet>>,
}

impl Joined {
    /// Returns the number of addresses that another member has as well.
    pub fn duplicates(&self) -> usize {
        let all = || self.addresses.iter().flatten();
        let different: std::collections::BTreeSet<&IpNet> = all().collect();
        all().count() - different.len()
    }
}

/// Joins all members at the same time, each over a connection of its own, alternating between
/// coordinators. A failed request is repeated for up to `patience`. Members get `others` as further
/// coordinators.
pub async fn join_all(
    numbers: Range<u32>,
    coordinators: &[Access],
    token: &Token,
    others: &[RelayAddress],
    patience: Duration,
) -> anyhow::Result<Joined> {
    let begin = Instant::now();
    let mut joining = JoinSet::new();
    for number in numbers {
        let request = JoinRequest {
            token: token.clone(),
            name: format!("m{number}").parse()?,
            public_key: PrivateKey::generate(&mut SystemRandom).public(),
            credential: Credential::generate(&mut SystemRandom),
        };
        let Access { url, pin } = coordinators[number as usize % coordinators.len()].clone();
        let others = others.to_vec();
        joining.spawn(async move {
            let client = Client::new(&url, Some(pin), None, WebProxies::default())?;
            let started_at = Instant::now();
            let joined = loop {
                match client.join(&request).await {
                    Ok(joined) => break joined,
                    Err(error) if started_at.elapsed() >= patience => return Err(error.into()),
                    Err(_) => tokio::time::sleep(PAUSE).await,
                }
            };
            let client = Client::new(
                &url,
                Some(pin),
                Some(request.credential),
                WebProxies::default(),
            )?;
            client.set_others(&others);
            let member = Member {
                client,
                number: number as u16,
                request: Mutex::default(),
            };
            anyhow::Ok((Arc::new(member), joined.addresses))
        });
    }
    let (mut members, mut addresses) = (Vec::new(), Vec::new());
    while let Some(joined) = joining.join_next().await {
        let (member, own) = joined??;
        members.push(member);
        addresses.push(own);
    }
    Ok(Joined {
        members,
        seconds: begin.elapsed().as_secs_f64(),
        addresses,
    })
}

/// Lets members change one after the other, `rate` a second for some seconds; returns the results
/// of `change`.
pub async fn change_all<T, F>(
    members: &[Arc<Member>],
    rate: u32,
    seconds: u32,
    change: impl Fn(Arc<Member>, u16) -> F,
) -> anyhow::Result<Vec<T>>
where
    T: Send + 'static,
    F: Future<Output = anyhow::Result<T>> + Send + 'static,
{
    let mut tick = tokio::time::interval(Duration::from_secs(1) / rate);
    let mut changing = JoinSet::new();
    for number in 0..(rate * seconds) as usize {
        tick.tick().await;
        let member = members[number % members.len()].clone();
        changing.spawn(change(member, (number / members.len() + 1) as u16));
    }
    let mut results = Vec::new();
    while let Some(changed) = changing.join_next().await {
        results.push(changed??);
    }
    Ok(results)
}

/// Returns the value below which `share` of the sorted values lie; NaN without values.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    seikan_load::stats::percentile(sorted, share).unwrap_or(f64::NAN)
}
