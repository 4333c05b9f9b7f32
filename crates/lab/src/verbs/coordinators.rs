//! `seikan lab coordinators`: three coordinators over three members of etcd on this machine, some
//! of which are killed.
//!
//! 1. many members join at once, at all coordinators: the time until each has its addresses, and
//!    the duplicate addresses;
//! 2. some change every second, and turn to the next coordinator when one does not answer, as
//!    members do. After a third of the time a coordinator is killed, after two thirds the leader of
//!    etcd: the longest gap between acknowledgements, and the duration of a change;
//! 3. whether all acknowledged changes are stored.

use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use seikan_lab::arguments::whole;
use seikan_lab::etcd::Cluster;
use seikan_proto::mesh::{Reason, RelayAddress};
use serde::{Deserialize, Serialize};

use super::exit_code;
use super::members::{
    Access, Coordinator, Crowd, Member, PAUSE, change_all, endpoint, endpoints, join_all, quantile,
    with_many_files,
};

/// Coordinators.
const COORDINATORS: usize = 3;
/// Maximum time to wait for one event.
const PATIENCE: Duration = Duration::from_secs(60);

/// Options of `lab coordinators`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan lab coordinators --members 1000 --changes 100    needs etcd and no root; a minute on two cores")]
pub struct CoordinatorsArguments {
    #[command(flatten)]
    crowd: Crowd,
    /// Duration of the changes
    #[arg(long, value_name = "SECONDS", default_value_t = 18, value_parser = whole(3..=600))]
    pub seconds: u32,
}

/// Results. Times are in seconds.
#[derive(Debug, Serialize)]
struct Figures {
    members: u32,
    /// Time until all had joined.
    joined: f64,
    /// Number of members with an address that another member has as well.
    duplicates: usize,
    /// Number of acknowledged changes.
    changes: usize,
    /// Number of acknowledged changes that are missing at the end.
    lost: usize,
    /// Number of members that were refused as unknown.
    refused: usize,
    /// Longest time between two acknowledgements: without a failure, after a coordinator was
    /// killed, and after etcd's leader was killed.
    gaps: [f64; 3],
    /// Duration of a change: median, 99th percentile, maximum.
    took: [f64; 3],
}

/// A change that was acknowledged.
struct Made {
    member: u16,
    change: u16,
    requested: Instant,
    at: Instant,
}

/// A member, as `seikan coordinator members --json` prints it.
#[derive(Deserialize)]
struct Stored {
    name: String,
    endpoints: Vec<SocketAddr>,
}

/// Runs the measurements and prints the results.
pub fn run(arguments: &CoordinatorsArguments) -> anyhow::Result<ExitCode> {
    let mut cluster = Cluster::start(None)?;
    let figures = with_many_files(|| measure(arguments, &mut cluster))?;
    show(&figures)?;
    arguments.crowd.json.write(&figures)?;
    let good = figures.duplicates + figures.lost + figures.refused == 0;
    Ok(exit_code(!good))
}

async fn measure(
    arguments: &CoordinatorsArguments,
    cluster: &mut Cluster,
) -> anyhow::Result<Figures> {
    let folder = seikan_lab::cleanup::private_directory()?;
    // The coordinators run as the daemons' user and must be able to enter their directories below
    // it.
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
    let token = coordinators[0].token()?;
    let others: Vec<RelayAddress> = coordinators
        .iter()
        .map(|coordinator| Ok(coordinator.address.to_string().parse()?))
        .collect::<anyhow::Result<_>>()?;

    let access: Vec<Access> = coordinators.iter().map(|c| c.access.clone()).collect();
    let joined = join_all(
        0..arguments.crowd.members,
        &access,
        &token,
        &others,
        PATIENCE,
    )
    .await?;

    let started_at = Instant::now();
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
    let changes = change_all(
        &joined.members,
        arguments.crowd.changes,
        arguments.seconds,
        |member, change| async move { member.change(change).await },
    );
    let (results, coordinators) = tokio::join!(changes, kills);
    let results = results?;
    let refused = results.iter().filter(|result| result.is_none()).count();
    let made: Vec<Made> = results.into_iter().flatten().collect();
    // The command reads etcd, not a coordinator.
    let stored = coordinators[0].administer(&["members", "--json"])?;
    let stored: Vec<Stored> = serde_json::from_str(&stored)?;
    drop(coordinators);
    let is_lost = |made: &&Made| {
        let name = format!("m{}", made.member);
        let member = stored.iter().find(|stored| stored.name == name);
        let last = member.and_then(|member| member.endpoints.first());
        let expected = endpoint(made.member, made.change);
        // A later change may have replaced the change.
        !last.is_some_and(|last| last.ip() == expected.ip() && *last >= expected)
    };
    let mut acknowledged: Vec<Instant> = made.iter().map(|made| made.at).collect();
    acknowledged.sort_unstable();
    let mut gaps = [0.0f64; 3];
    for pair in acknowledged.windows(2) {
        let part = ((pair[1] - started_at).as_secs_f64() / third.as_secs_f64()) as usize;
        let gap = (pair[1] - pair[0]).as_secs_f64();
        gaps[part.min(2)] = gaps[part.min(2)].max(gap);
    }
    let mut took: Vec<f64> = made
        .iter()
        .map(|made| (made.at - made.requested).as_secs_f64())
        .collect();
    took.sort_by(f64::total_cmp);
    Ok(Figures {
        members: arguments.crowd.members,
        joined: joined.seconds,
        duplicates: joined.duplicates(),
        changes: made.len(),
        lost: made.iter().filter(is_lost).count(),
        refused,
        gaps,
        took: [0.5, 0.99, 1.0].map(|share| quantile(&took, share)),
    })
}

impl Member {
    /// Reports an endpoint until a coordinator acknowledges it; `None`: refused, because it is no
    /// member.
    async fn change(&self, change: u16) -> anyhow::Result<Option<Made>> {
        let requested = Instant::now();
        let _request = self.request.lock().await;
        loop {
            let endpoints = endpoints(self.number, change);
            match self.client.report_endpoints(&endpoints).await {
                Ok(()) => {
                    return Ok(Some(Made {
                        member: self.number,
                        change,
                        requested,
                        at: Instant::now(),
                    }));
                }
                Err(error) if error.reason() == Some(Reason::NotAMember) => return Ok(None),
                Err(error) if requested.elapsed() > PATIENCE => {
                    bail!("not acknowledged: {error}")
                }
                Err(_) => {
                    self.client.use_next();
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
