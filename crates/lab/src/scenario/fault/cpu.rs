//! Faults that take processor time from the tunnel's program.

use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::Applied;
use crate::error::{Result, setup};
use crate::process::{Killed, silent, threads};
use crate::site::Host;

/// The processor that the programs and the hogs share.
const CROWDED: usize = 0;
/// Root directories of control groups, version 1 and version 2.
const VERSION_1: &str = "/sys/fs/cgroup/cpu";
const VERSION_2: &str = "/sys/fs/cgroup";
/// Length of an accounting period, in microseconds; the quota is a share of it. The kernel's
/// default.
const PERIOD: f64 = 100_000.0;
/// The smallest quota that the kernel takes, in microseconds (`min_cfs_quota_period`,
/// kernel/sched/core.c).
const SMALLEST_QUOTA: f64 = 1_000.0;

/// Restricts the programs to one processor, on which `hogs` spinning processes run as well.
pub(super) fn contend<'a>(
    host: &'a Host,
    pids: &[u32],
    hogs: usize,
    applied: &mut Applied<'a>,
) -> Result<()> {
    let mut one = CpuSet::new();
    one.set(CROWDED)
        .map_err(|e| setup(format!("cannot use processor {CROWDED}: {e}")))?;
    let tasks = pids.iter().filter_map(|pid| threads(*pid).ok());
    for task in tasks.flatten().map(Pid::from_raw) {
        let Ok(before) = sched_getaffinity(task) else {
            continue;
        };
        sched_setaffinity(task, &one)
            .map_err(|e| setup(format!("cannot pin the tunnel's thread {task}: {e}")))?;
        applied.then(move || {
            let _ = sched_setaffinity(task, &before);
        });
    }
    for _ in 0..hogs {
        let hog = Hog::start(host)?;
        let pinned = sched_setaffinity(Pid::from_raw(hog.0.0.id() as i32), &one);
        applied.then(move || drop(hog));
        pinned.map_err(|e| setup(format!("cannot pin a process that spins: {e}")))?;
    }
    Ok(())
}

/// A process that spins.
pub(crate) struct Hog(Killed);

impl Hog {
    pub(crate) fn start(host: &Host) -> Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", "while :; do :; done"]);
        Killed::start(host, silent(&mut command)).map(Self)
    }
}

/// Puts the programs into a control group with a quota in percent of one processor.
pub(super) fn quota(pids: &[u32], percent: f64, applied: &mut Applied<'_>) -> Result<()> {
    let version_1 = Path::new(VERSION_1).join("cpu.cfs_period_us").exists()
        || Path::new(VERSION_1).join("cgroup.procs").exists();
    let root = PathBuf::from(if version_1 { VERSION_1 } else { VERSION_2 });
    let group = root.join(format!("seikan-lab-{}", std::process::id()));
    let fail = |source: std::io::Error| {
        setup(format!(
            "cannot use the control group {}: {source}",
            group.display()
        ))
    };
    let quota = (PERIOD * percent / 100.0).max(SMALLEST_QUOTA);
    std::fs::create_dir(&group).map_err(fail)?;
    let (home, own, remove) = (root.join("cgroup.procs"), group.clone(), pids.to_vec());
    applied.then(move || {
        for pid in remove {
            // The process no longer exists if the tunnel has ended.
            let _ = std::fs::write(&home, pid.to_string());
        }
        let _ = std::fs::remove_dir(&own);
    });
    let written = if version_1 {
        std::fs::write(group.join("cpu.cfs_period_us"), format!("{PERIOD:.0}"))
            .and_then(|()| std::fs::write(group.join("cpu.cfs_quota_us"), format!("{quota:.0}")))
    } else {
        std::fs::write(root.join("cgroup.subtree_control"), "+cpu")
            .and_then(|()| std::fs::write(group.join("cpu.max"), format!("{quota:.0} {PERIOD:.0}")))
    };
    written.map_err(fail)?;
    pids.iter()
        .try_for_each(|pid| std::fs::write(group.join("cgroup.procs"), pid.to_string()))
        .map_err(fail)
}
