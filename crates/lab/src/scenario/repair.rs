//! Checks that the doctor's changes help and that it reverts them completely. It compares the state
//! of the host before and after, and does not rely on the doctor's report.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use seikan_diagnose::trial::{Attempt, Decision};
use seikan_sys::schedule;
use serde::{Deserialize, Serialize};

use crate::error::{LabError, Result};
use crate::process::threads;
use crate::site::Host;

/// Share of the healthy throughput from which it counts as restored.
pub const RESTORED: f64 = 0.9;
/// Settings of the network, of the namespace and of the machine.
const SYSCTLS: [&str; 4] = [
    "/proc/sys/net/core",
    "/proc/sys/net/ipv4",
    "/proc/sys/net/ipv6",
    "/proc/sys/net/netfilter",
];

/// Result of `seikan doctor --fix`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Repair {
    /// Remedies of this host that were tried.
    pub tried: u32,
    /// Commands of the last remedy tried.
    #[serde(default)]
    pub commands: Vec<String>,
    /// Whether the last remedy was kept.
    pub kept: bool,
    /// Why the last remedy was not kept.
    pub why: Option<String>,
    /// Throughput afterwards, in Mbit/s.
    pub throughput: f64,
    /// Throughput without the fault, in Mbit/s: the mean of the values before and after, because
    /// machines drift.
    #[serde(default)]
    pub healthy: f64,
    /// Whether `throughput` reached [`RESTORED`] of `healthy`.
    pub restored: bool,
    /// Differences from the state before that remain although nothing was kept or all was reverted.
    pub left: Vec<String>,
    /// Total duration of the doctor's run, in seconds.
    pub seconds: f64,
}

impl Repair {
    /// Creates a result whose remaining differences are not known yet.
    pub(super) fn new(fixes: &[Attempt], throughput: f64, healthy: f64, seconds: f64) -> Self {
        let possible =
            |attempt: &&Attempt| !matches!(attempt.trial.decision, Decision::NotPossible(_));
        let tried: Vec<&Attempt> = fixes.iter().filter(possible).collect();
        let last = tried.last().map(|attempt| &attempt.trial.decision);
        Self {
            tried: tried.len() as u32,
            commands: tried
                .last()
                .map(|attempt| attempt.remedy.commands.clone())
                .unwrap_or_default(),
            kept: last == Some(&Decision::Keep),
            why: match last {
                Some(Decision::TakeBack(why)) => Some(why.clone()),
                _ => None,
            },
            throughput,
            healthy,
            restored: throughput >= RESTORED * healthy,
            left: Vec::new(),
            seconds,
        }
    }

    /// Replaces the healthy throughput, in Mbit/s, and compares again.
    pub(super) fn compare(&mut self, healthy: f64) {
        self.healthy = healthy;
        self.restored = self.throughput >= RESTORED * healthy;
    }
}

/// All state of a host that the doctor may change: values as text, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct State(BTreeMap<String, String>);

impl State {
    /// Reads the state of `host` and of its processes `pids`.
    pub(super) fn of(host: &Host, pids: &[u32]) -> Result<Self> {
        let mut state = Self::default();
        state.interfaces(host)?;
        for pid in pids {
            state.program(*pid);
        }
        state.0.extend(host.run(|| {
            SYSCTLS
                .iter()
                .flat_map(|dir| sysctls(Path::new(dir)))
                .collect::<Vec<_>>()
        })?);
        Ok(state)
    }

    /// Returns the differences, as text.
    pub(super) fn differences(&self, after: &Self) -> Vec<String> {
        const NOTHING: &str = "nothing";
        let names = self.0.keys().chain(after.0.keys());
        let names: std::collections::BTreeSet<&String> = names.collect();
        let value = |state: &Self, name: &String| {
            let value = state.0.get(name).map(|text| text.trim().to_owned());
            value.unwrap_or_else(|| NOTHING.to_owned())
        };
        names
            .into_iter()
            .filter(|name| self.0.get(*name) != after.0.get(*name))
            // Threads start and end: only those that exist both before and after are compared.
            .filter(|name| {
                !name.starts_with("thread ")
                    || self.0.contains_key(*name) && after.0.contains_key(*name)
            })
            .map(|name| {
                format!(
                    "{name}: {} became {}",
                    value(self, name),
                    value(after, name)
                )
            })
            .collect()
    }

    fn interfaces(&mut self, host: &Host) -> Result<()> {
        let netlink = host.netlink()?;
        let ethtool = host.netns().ethtool()?;
        for link in netlink.links()? {
            let name = &link.name;
            self.0.insert(format!("{name} mtu"), link.mtu.to_string());
            self.0
                .insert(format!("{name} txqueuelen"), link.tx_queue_len.to_string());
            for feature in ethtool.features(name).unwrap_or_default() {
                self.0.insert(
                    format!("{name} {}", feature.name),
                    feature.active.to_string(),
                );
            }
        }
        let qdiscs = printed(host, &["tc", "qdisc", "show"])?;
        for (number, line) in qdiscs.lines().enumerate() {
            self.0.insert(format!("qdisc {number}"), qdisc(line));
        }
        self.0
            .insert("nft".to_owned(), printed(host, &["nft", "list", "tables"])?);
        Ok(())
    }

    fn program(&mut self, pid: u32) {
        // A process that has ended has no settings.
        let nice = schedule::nice(pid).map_or_else(|e| e.to_string(), |n| n.to_string());
        self.0.insert(format!("program {pid} nice"), nice);
        for tid in threads(pid).unwrap_or_default() {
            let status = std::fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
            let allowed = status.lines().find(|l| l.starts_with("Cpus_allowed_list:"));
            if let Some(allowed) = allowed {
                self.0.insert(format!("thread {tid}"), allowed.to_owned());
            }
        }
        for file in limits(pid) {
            if let Ok(text) = std::fs::read_to_string(&file) {
                self.0.insert(file.display().to_string(), text);
            }
        }
    }
}

/// Returns the comparable part of "qdisc tbf 8001: dev eth0 root ... burst 19998b ...". The handle
/// differs each time. A burst value that `tc` prints becomes some bytes smaller when it is set
/// again, because `tc` counts in ticks.
fn qdisc(line: &str) -> String {
    let mut kept = Vec::new();
    for word in line.split_whitespace().filter(|word| !word.ends_with(':')) {
        if kept.last() != Some(&"burst") {
            kept.push(word);
        } else {
            kept.pop();
        }
    }
    kept.join(" ")
}

/// Files with the processor limits of a process's control groups, of both versions.
fn limits(pid: u32) -> Vec<PathBuf> {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let group = |line: &str| -> Option<PathBuf> {
        // "0::/path" or "4:cpu,cpuacct:/path".
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        match controllers {
            "" => Some(Path::new("/sys/fs/cgroup").join(path).join("cpu.max")),
            many if many.split(',').any(|c| c == "cpu") => Some(
                Path::new("/sys/fs/cgroup/cpu")
                    .join(path)
                    .join("cpu.cfs_quota_us"),
            ),
            _ => None,
        }
    };
    groups.lines().filter_map(group).collect()
}

/// Returns the readable and writable files below a directory, with their content.
fn sysctls(directory: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(meta) = entry.metadata() else { continue };
        if meta.is_dir() {
            found.extend(sysctls(&path));
        } else if entry.file_name() == "stable_secret" {
            // The kernel changes this random value at any time.
        } else if meta.permissions().mode() & 0o600 == 0o600
            && let Ok(text) = std::fs::read_to_string(&path)
        {
            found.push((path.display().to_string(), text));
        }
    }
    found
}

/// Returns the output of a tool in a host.
fn printed(host: &Host, words: &[&str]) -> Result<String> {
    let mut command = std::process::Command::new(words[0]);
    match host.output(command.args(&words[1..]), "") {
        // The tool fails for an object that does not exist.
        Err(LabError::Setup(_)) => Ok(String::new()),
        listed => listed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(entries: &[(&str, &str)]) -> State {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        State(entries.iter().map(own).collect())
    }

    #[test]
    fn a_machine_that_has_drifted_is_compared_with_its_present_speed() {
        let mut repair = Repair::new(&[], 88.0, 100.0, 30.0);
        assert!(!repair.restored);
        repair.compare(100.0_f64.midpoint(90.0));
        assert!(repair.restored);
        repair.compare(98.0);
        assert!(!repair.restored);
    }

    #[test]
    fn a_handle_and_the_last_bytes_of_a_burst_are_not_compared() {
        let line = "qdisc tbf 8001: dev a root refcnt 2 rate 50Mbit burst 19998b lat 6.8ms";
        assert_eq!(
            qdisc(line),
            "qdisc tbf dev a root refcnt 2 rate 50Mbit lat 6.8ms"
        );
    }

    #[test]
    fn threads_that_come_and_go_are_not_left_behind() {
        let before = state(&[("thread 1", "0-1"), ("thread 2", "0-1")]);
        let after = state(&[("thread 1", "0"), ("thread 3", "0")]);
        assert_eq!(before.differences(&after), ["thread 1: 0-1 became 0"]);
    }

    #[test]
    fn remaining_changes_are_reported() {
        let before = state(&[("a mtu", "1500\n"), ("a txqueuelen", "3"), ("gone", "x")]);
        let after = state(&[("a mtu", "1500\n"), ("a txqueuelen", "1000"), ("new", "y")]);
        assert_eq!(
            before.differences(&after),
            [
                "a txqueuelen: 3 became 1000",
                "gone: x became nothing",
                "new: nothing became y"
            ]
        );
        assert!(before.differences(&before).is_empty());
    }
}
