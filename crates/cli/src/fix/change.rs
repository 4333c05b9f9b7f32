//! A change of this host, which can be applied and reverted.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use seikan_diagnose::{Action, clamp, is_plain};
use seikan_node::journal::Undo;
use seikan_sys::ethtool::{Ethtool, Feature};
use seikan_sys::netlink::{LinkInfo, Netlink};
use seikan_sys::{schedule, softirq, sysctl};
use serde::{Deserialize, Serialize};

/// Seikan's nftables table that clamps segment sizes.
const CLAMP_TABLE: &str = "inet seikan_doctor";

/// A change with the state before it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// The change.
    pub action: Action,
    before: State,
    /// Start of the process that is changed: its number may belong to another one later.
    started: Option<u64>,
}

/// A former state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum State {
    Number(i64),
    Text(String),
    Bits(Vec<(String, bool)>),
    List(Vec<u32>),
    Absent,
}

impl Change {
    /// Reads the current state. Changes nothing.
    ///
    /// # Errors
    /// The state cannot be read or could not be restored.
    pub fn plan(action: Action) -> Result<Change> {
        let cannot = || format!("cannot prepare `{}`", action.command());
        let process = process(&action).map(schedule::start_time);
        let started = process.transpose().with_context(cannot)?;
        let before = read(&action).with_context(cannot)?;
        Ok(Change {
            action,
            before,
            started,
        })
    }

    /// Applies the change.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn apply(&self) -> Result<()> {
        let made = match &self.action {
            Action::QueueLength { packets: to, .. } | Action::Mtu { bytes: to, .. } => {
                self.write(&State::Number((*to).into()))
            }
            Action::Offload { link, feature, on } => {
                let feature: Feature = feature.parse().map_err(|error: String| anyhow!(error))?;
                Ok(Ethtool::open()?.set_feature(link, feature, *on)?)
            }
            Action::Sysctl { value, .. } => self.write(&State::Text(value.clone())),
            Action::Rps { cpus, .. } | Action::Affinity { cpus, .. } => {
                self.write(&State::List(cpus.clone()))
            }
            Action::RemoveQdisc { .. } => self.write(&State::Absent),
            Action::Nice { nice, .. } => self.write(&State::Number((*nice).into())),
            Action::CpuLimit { group, cpus } => {
                let value = limit_value(group, *cpus);
                self.write(&State::Text(value))
            }
            Action::ClampMss { link, bytes } => run("nft", &[&clamp(link, *bytes)]).map(drop),
        };
        made.with_context(|| format!("`{}` failed", self.action.command()))
    }

    fn write(&self, state: &State) -> Result<()> {
        if let Some(pid) = process(&self.action)
            && self.has_ended(pid)
        {
            bail!("process {pid} has ended");
        }
        match (&self.action, state) {
            (Action::QueueLength { link, .. }, State::Number(packets)) => {
                let netlink = Netlink::open()?;
                Ok(netlink.set_tx_queue_len(netlink.link(link)?.index, *packets as u32)?)
            }
            (Action::Mtu { link, .. }, State::Number(bytes)) => {
                let netlink = Netlink::open()?;
                Ok(netlink.set_mtu(netlink.link(link)?.index, *bytes as u32)?)
            }
            (Action::Offload { link, .. }, State::Bits(bits)) => {
                Ok(Ethtool::open()?.set_bits(link, bits)?)
            }
            (Action::Sysctl { name, .. }, State::Text(value)) => {
                Ok(sysctl::write(&components(name)?, value)?)
            }
            (Action::Rps { link, queue, .. }, State::List(cpus)) => {
                let link = Netlink::open()?.link(link)?;
                Ok(softirq::set_steering(&link, &format!("rx-{queue}"), cpus)?)
            }
            (Action::Affinity { pid, .. }, State::List(cpus)) => {
                Ok(schedule::set_affinity(*pid, cpus)?)
            }
            (Action::Nice { pid, .. }, State::Number(nice)) => {
                Ok(schedule::set_nice(*pid, *nice as i32)?)
            }
            (Action::CpuLimit { group, .. }, State::Text(value)) => {
                let file = limit_file(group);
                std::fs::write(&file, value).with_context(|| format!("cannot write {file}"))
            }
            (Action::RemoveQdisc { link }, State::Absent) => {
                run("tc", &["qdisc", "del", "dev", link, "root"]).map(drop)
            }
            (Action::RemoveQdisc { link }, State::Text(qdisc)) => {
                let mut words = vec!["qdisc", "replace", "dev", link, "root"];
                words.extend(qdisc.split_whitespace());
                run("tc", &words).map(drop)
            }
            (Action::ClampMss { .. }, State::Absent) => {
                run("nft", &["delete", "table", "inet", "seikan_doctor"]).map(drop)
            }
            (action, state) => bail!("{action:?} has no state {state:?}: the journal is damaged"),
        }
    }
}

impl Undo for Change {
    fn take_back(self) -> std::result::Result<(), String> {
        match self.write(&self.before) {
            Err(_) if self.is_gone() => Ok(()),
            other => other
                .map_err(|error| format!("cannot revert `{}`: {error:#}", self.action.command())),
        }
    }
}

impl Change {
    /// Returns whether the changed object no longer exists, so that nothing needs to be reverted.
    fn is_gone(&self) -> bool {
        let link_is_gone = |link: &str| {
            let found = Netlink::open().and_then(|netlink| netlink.link_index(link));
            matches!(found, Ok(None))
        };
        match &self.action {
            Action::QueueLength { link, .. }
            | Action::Mtu { link, .. }
            | Action::Offload { link, .. }
            | Action::Rps { link, .. }
            | Action::RemoveQdisc { link } => link_is_gone(link),
            Action::Nice { pid, .. } | Action::Affinity { pid, .. } => self.has_ended(*pid),
            Action::CpuLimit { group, .. } => !std::path::Path::new(group).exists(),
            Action::ClampMss { .. } => {
                let tables = run("nft", &["list", "tables"]);
                tables.is_ok_and(|tables| !tables.contains(CLAMP_TABLE))
            }
            Action::Sysctl { .. } => false,
        }
    }

    /// Returns whether the changed process has ended, also if another one has its number.
    fn has_ended(&self, pid: u32) -> bool {
        match schedule::start_time(pid) {
            Ok(started) => self.started != Some(started),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        }
    }
}

/// Returns the process that an action changes.
fn process(action: &Action) -> Option<u32> {
    match action {
        Action::Nice { pid, .. } | Action::Affinity { pid, .. } => Some(*pid),
        _ => None,
    }
}

fn read(action: &Action) -> Result<State> {
    let link = |name: &str| -> Result<LinkInfo> { Ok(Netlink::open()?.link(name)?) };
    Ok(match action {
        Action::QueueLength { link: name, .. } => State::Number(link(name)?.tx_queue_len.into()),
        Action::Mtu { link: name, .. } => State::Number(link(name)?.mtu.into()),
        Action::Offload { link, .. } => {
            // All features are read: switching one off may switch others.
            let states = Ethtool::open()?.features(link)?;
            let changeable = states.into_iter().filter(|state| state.changeable);
            State::Bits(
                changeable
                    .map(|state| (state.name, state.requested))
                    .collect(),
            )
        }
        Action::Sysctl { name, .. } => {
            let parameter = components(name)?;
            sysctl::check_writable(&parameter)?;
            State::Text(sysctl::read(&parameter)?)
        }
        Action::Rps {
            link: name, queue, ..
        } => {
            let steering = softirq::steering_anywhere(&link(name)?);
            let queues = steering.context(
                "/sys shows another network namespace, and cannot be mounted for this one",
            )?;
            let queue = format!("rx-{queue}");
            let found = queues.into_iter().find(|steering| steering.queue == queue);
            State::List(
                found
                    .with_context(|| format!("{name} has no queue {queue}"))?
                    .cpus,
            )
        }
        Action::Affinity { pid, .. } => State::List(schedule::affinity(*pid)?),
        Action::Nice { pid, .. } => State::Number(schedule::nice(*pid)?.into()),
        Action::CpuLimit { group, .. } => {
            let file = limit_file(group);
            let text =
                std::fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
            State::Text(text.trim().to_owned())
        }
        Action::RemoveQdisc { link } => {
            let shown = run("tc", &["qdisc", "show", "dev", link, "root"])?;
            State::Text(token_bucket(&shown)?)
        }
        Action::ClampMss { link, .. } => {
            if !is_plain(link) {
                bail!(
                    "the name `{}` has characters that nft would interpret",
                    link.escape_debug()
                );
            }
            let tables = run("nft", &["list", "tables"])?;
            if tables.contains(CLAMP_TABLE) {
                bail!(
                    "the table `{CLAMP_TABLE}` already exists: `seikan doctor --undo` removes it"
                );
            }
            State::Absent
        }
    })
}

/// Returns the arguments that recreate the token bucket that `tc` shows. Other disciplines have
/// classes and filters, which could not be restored.
fn token_bucket(shown: &str) -> Result<String> {
    let mut lines = shown.lines().filter(|line| !line.trim().is_empty());
    let (line, more) = (lines.next().unwrap_or_default(), lines.next());
    let words: Vec<&str> = line.split_whitespace().collect();
    // "qdisc tbf 8001: root refcnt 2 rate 50Mbit burst 5000b lat 50ms"
    let (Some("qdisc"), Some("tbf"), None) = (words.first().copied(), words.get(1).copied(), more)
    else {
        bail!("cannot remove `{line}`: only a single token bucket (tbf) could be restored");
    };
    let from = words.iter().position(|word| *word == "rate");
    let from = from.with_context(|| format!("`{line}` shows no rate"))?;
    Ok(format!("tbf {}", words[from..].join(" ")))
}

/// Returns the components below `/proc/sys/net` of a dotted name.
fn components(name: &str) -> Result<Vec<&str>> {
    let below = name.strip_prefix("net.");
    let below = below.with_context(|| format!("`{name}` is not below net."))?;
    Ok(below.split('.').collect())
}

/// Returns the file with the limit of a control group, of either version.
fn limit_file(group: &str) -> String {
    let second = format!("{group}/cpu.max");
    if std::path::Path::new(&second).exists() {
        second
    } else {
        format!("{group}/cpu.cfs_quota_us")
    }
}

fn limit_value(group: &str, cpus: Option<f64>) -> String {
    let first = limit_file(group).ends_with("quota_us");
    let read = |file: &str| std::fs::read_to_string(format!("{group}/{file}")).ok();
    match (first, cpus) {
        (true, None) => "-1".to_owned(),
        (true, Some(cpus)) => {
            let period = read("cpu.cfs_period_us").and_then(|text| text.trim().parse().ok());
            format!("{:.0}", cpus * period.unwrap_or(100_000.0))
        }
        (false, None) => "max".to_owned(),
        (false, Some(cpus)) => format!("{:.0} 100000", cpus * 100_000.0),
    }
}

/// Returns the output of a program; its error output is the error.
fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}: install it"))?;
    if !output.status.success() {
        bail!(
            "{program}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_sys::netns::NetNs;

    #[test]
    fn a_token_bucket_is_brought_back_as_it_was_shown() {
        let shown = "qdisc tbf 8001: root refcnt 2 rate 50Mbit burst 5000b lat 50ms \n";
        let words = token_bucket(shown).expect("words");
        assert_eq!(words, "tbf rate 50Mbit burst 5000b lat 50ms");
    }

    #[test]
    fn unrestorable_disciplines_are_refused() {
        assert!(token_bucket("qdisc htb 1: root refcnt 2 r2q 10 default 0x1\n").is_err());
        assert!(token_bucket("").is_err());
    }

    #[test]
    fn only_settings_of_the_network_are_named() {
        assert_eq!(
            components("net.core.rmem_max").expect("name"),
            ["core", "rmem_max"]
        );
        assert!(components("kernel.panic").is_err());
    }

    #[test]
    fn another_process_with_the_same_number_is_left_alone() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("a process");
        let pid = child.id();
        let action = Action::Nice { pid, nice: 5 };
        let mut change = Change::plan(action).expect("plan");
        change.apply().expect("apply");
        let earlier = Change {
            started: change.started.map(|started| started - 1),
            ..change.clone()
        };
        assert!(earlier.apply().is_err());
        earlier.take_back().expect("nothing to do");
        let unchanged = schedule::nice(pid).expect("nice");
        // Only root may lower the value.
        change.before = State::Number(6);
        change.take_back().expect("take back");
        let reverted = schedule::nice(pid).expect("nice");
        child.kill().expect("kill");
        child.wait().expect("an end");
        assert_eq!((unchanged, reverted), (5, 6));
    }

    /// Returns the state of `veth0` and of the firewall as the tools show it.
    fn shown() -> Vec<String> {
        let all: [&[&str]; 4] = [
            &["ip", "link", "show", "veth0"],
            &["tc", "qdisc", "show", "dev", "veth0"],
            &["ethtool", "-k", "veth0"],
            &["nft", "list", "ruleset"],
        ];
        let show = |words: &&[&str]| match words[0] {
            // Read directly: the program may be missing.
            "ethtool" => format!("{:?}", Ethtool::open().expect("open").features("veth0")),
            program => run(program, &words[1..]).expect("shown"),
        };
        // The handle of a queueing discipline changes each time.
        let plain = |text: String| {
            let words = text.split_whitespace().filter(|word| !word.ends_with(':'));
            words.collect::<Vec<_>>().join(" ")
        };
        all.iter().map(show).map(plain).collect()
    }

    #[test]
    fn every_change_of_an_interface_is_made_and_taken_back() {
        if !nix::unistd::geteuid().is_root() {
            let required = std::env::var("SEIKAN_REQUIRE_ALL").is_ok_and(|value| value == "1");
            assert!(!required, "a network namespace needs root");
            eprintln!("SKIPPED: a network namespace needs root");
            return;
        }
        let link = || "veth0".to_owned();
        let actions = [
            Action::QueueLength {
                link: link(),
                packets: 77,
            },
            Action::Mtu {
                link: link(),
                bytes: 1300,
            },
            Action::Offload {
                link: link(),
                feature: "tx".into(),
                on: false,
            },
            Action::RemoveQdisc { link: link() },
            Action::ClampMss {
                link: link(),
                bytes: 1200,
            },
        ];
        let namespace = NetNs::create().expect("namespace");
        let tested = namespace.run(|| {
            let words = "link add veth0 type veth peer name veth1";
            run("ip", &words.split(' ').collect::<Vec<_>>()).expect("veth");
            let words = "qdisc add dev veth0 root tbf rate 50mbit burst 64kb latency 50ms";
            run("tc", &words.split(' ').collect::<Vec<_>>()).expect("tbf");
            let before = shown();
            for action in actions {
                let change = Change::plan(action.clone()).expect("plan");
                assert_eq!(shown(), before, "planning changes nothing");
                change.apply().expect("apply");
                assert_ne!(shown(), before, "{action:?}");
                change.take_back().expect("take back");
                assert_eq!(shown(), before, "{action:?}");
            }
        });
        tested.expect("namespace");
    }
}
