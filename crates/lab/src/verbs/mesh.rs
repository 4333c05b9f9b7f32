//! `seikan lab mesh`: one coordinator and many simulated members on this machine.
//!
//! 1. all join at once: the time until each has its addresses, and the number of duplicate addresses;
//! 2. all report an endpoint and request changes, until all members know each other;
//! 3. some change every second: the time until all others have received each change, and the
//!    coordinator's cost.
//!
//! The coordinator is a process of `seikan` with a folder of its own, on the loopback interface.

use std::collections::HashMap;
use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use seikan_lab::arguments::whole;
use seikan_proto::mesh::{Cursor, Membership};
use seikan_sys::process;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::exit_code;
use super::members::{Coordinator, Crowd, Member, change_all, join_all, quantile, with_many_files};

/// Time for which a request for changes waits.
const WAIT: Duration = Duration::from_secs(50);
/// Time until all members must know each other.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time to receive the last changes.
const REST: Duration = Duration::from_secs(10);

/// Options of `lab mesh`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan lab mesh --members 1000 --changes 100    needs no root; a minute on two cores")]
pub struct MeshArguments {
    #[command(flatten)]
    crowd: Crowd,
    /// Duration of the changes
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = whole(1..=600))]
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
    /// Time until all members knew each other.
    known: f64,
    /// Number of acknowledged changes.
    changes: u64,
    /// Duration of the changes.
    changing: f64,
    /// Time from the acknowledgement of a change until a member received it: median and 99th
    /// percentile.
    delays: [f64; 2],
    /// Number of members whose last change some other member had missed at the end.
    missed: u64,
    /// Processor time of the coordinator divided by the duration of the changes.
    processors: f64,
    /// Memory of the coordinator at the end, in bytes.
    memory: u64,
}

/// The receipt of another member's change.
struct Received {
    member: u16,
    change: u16,
    at: Instant,
}

/// A change that the coordinator acknowledged.
struct Acknowledged {
    member: u16,
    change: u16,
    at: Instant,
}

/// Runs the measurements and prints the results.
pub fn run(arguments: &MeshArguments) -> anyhow::Result<ExitCode> {
    let figures = with_many_files(|| measure(arguments))?;
    show(&figures)?;
    arguments.crowd.json.write(&figures)?;
    let good = figures.duplicates == 0 && figures.missed == 0;
    Ok(exit_code(!good))
}

async fn measure(arguments: &MeshArguments) -> anyhow::Result<Figures> {
    let folder = seikan_lab::cleanup::private_directory()?;
    let coordinator = Coordinator::start(folder.path(), &[])?;
    let token = coordinator.token()?;

    let access = [coordinator.access.clone()];
    let joined = join_all(
        0..arguments.crowd.members,
        &access,
        &token,
        &[],
        Duration::ZERO,
    )
    .await?;
    let (join_time, duplicates) = (joined.seconds, joined.duplicates());
    let members = joined.members;
    let others = members.len() - 1;

    let started_at = Instant::now();
    for member in &members {
        member.report(0).await?;
    }
    let (changes, mut received) = mpsc::unbounded_channel();
    let (complete, mut completed) = mpsc::unbounded_channel();
    let mut followers = JoinSet::new();
    for member in &members {
        followers.spawn(follow(
            member.clone(),
            others,
            complete.clone(),
            changes.clone(),
        ));
    }
    let all_complete = async {
        for _ in 0..members.len() {
            completed.recv().await;
        }
    };
    if tokio::time::timeout(PATIENCE, all_complete).await.is_err() {
        bail!(
            "not all members know each other after {} s",
            PATIENCE.as_secs()
        );
    }
    let known = started_at.elapsed().as_secs_f64();
    while received.try_recv().is_ok() {}

    let cpu_time = || Ok::<_, anyhow::Error>(process::cpu_time(coordinator.pid())?.total());
    let (cpu_before, started_at) = (cpu_time()?, Instant::now());
    let made = change_all(
        &members,
        arguments.crowd.changes,
        arguments.seconds,
        |member, change| async move {
            member.report(change).await?;
            Ok(Acknowledged {
                member: member.number,
                change,
                at: Instant::now(),
            })
        },
    )
    .await?;
    let changing = started_at.elapsed();
    let (delays, missed) = settle(&made, others, &mut received).await;
    let spent = cpu_time()? - cpu_before;
    followers.abort_all();
    Ok(Figures {
        members: arguments.crowd.members,
        joined: join_time,
        duplicates,
        known,
        changes: made.len() as u64,
        changing: changing.as_secs_f64(),
        delays: [quantile(&delays, 0.5), quantile(&delays, 0.99)],
        missed,
        processors: spent.as_secs_f64() / changing.as_secs_f64(),
        memory: process::memory(coordinator.pid())?.resident,
    })
}

/// Requests changes until it is aborted. Notifies once when all other members are known with an
/// endpoint, and of every change.
async fn follow(
    member: Arc<Member>,
    others: usize,
    complete: mpsc::UnboundedSender<()>,
    received: mpsc::UnboundedSender<Received>,
) {
    let mut membership = Membership::default();
    let mut cursor = Cursor::default();
    let mut is_complete = false;
    loop {
        let wait = if cursor.revision == 0 {
            Duration::ZERO
        } else {
            WAIT
        };
        let Ok(changes) = member.client.changes(cursor, wait).await else {
            tokio::time::sleep(Duration::from_millis(200)).await;
            continue;
        };
        let at = Instant::now();
        for endpoint in changes.members.iter().flat_map(|member| &member.endpoints) {
            if let SocketAddr::V4(v4) = endpoint {
                let [_, _, a, b] = v4.ip().octets();
                let (member, change) = (u16::from_be_bytes([a, b]), v4.port() - 1);
                let _ = received.send(Received { member, change, at });
            }
        }
        cursor = changes.cursor();
        membership.take(changes);
        let members = membership.members();
        let has_endpoints = || members.values().all(|m| !m.endpoints.is_empty());
        if !is_complete && members.len() == others && has_endpoints() {
            is_complete = true;
            let _ = complete.send(());
        }
    }
}

/// Waits until all members have received all changes. Returns the sorted delays in seconds, and the
/// number of members whose last change some other member has missed.
async fn settle(
    made: &[Acknowledged],
    others: usize,
    received: &mut mpsc::UnboundedReceiver<Received>,
) -> (Vec<f64>, u64) {
    let acknowledged: HashMap<(u16, u16), Instant> = made
        .iter()
        .map(|change| ((change.member, change.change), change.at))
        .collect();
    // A change that is repeated before a member requests changes is sent with the newer one only.
    let mut newest = HashMap::new();
    for change in made {
        let last = newest.entry(change.member).or_insert(change.change);
        *last = (*last).max(change.change);
    }
    let mut missing: HashMap<u16, usize> = newest.keys().map(|member| (*member, others)).collect();
    let mut delays = Vec::new();
    let until = tokio::time::Instant::now() + REST;
    while missing.values().any(|count| *count > 0) {
        let Ok(Some(one)) = tokio::time::timeout_at(until, received.recv()).await else {
            break;
        };
        if let Some(at) = acknowledged.get(&(one.member, one.change)) {
            // Other members may receive a change before its acknowledgement arrives.
            delays.push(one.at.saturating_duration_since(*at).as_secs_f64());
        }
        if newest.get(&one.member) == Some(&one.change) {
            let count = missing.entry(one.member).or_default();
            *count = count.saturating_sub(1);
        }
    }
    let missed = missing.values().filter(|count| **count > 0).count();
    delays.sort_by(f64::total_cmp);
    (delays, missed as u64)
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
        delays: [median, late],
        missed,
        processors,
        memory,
    } = figures;
    writeln!(
        out,
        "{members} members joined at once in {joined:.1} s, {duplicates} with another's address"
    )?;
    writeln!(out, "all members knew each other after {known:.1} s")?;
    writeln!(
        out,
        "{changes} changes in {changing:.1} s: received after {median:.2} s (median), {late:.2} s (99 of 100); {missed} missed"
    )?;
    writeln!(
        out,
        "the coordinator kept {processors:.2} processors busy and has {} MB of memory",
        memory / 1_000_000
    )
}
