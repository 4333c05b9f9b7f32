//! Remedies: exact changes of this host, or requests to other people.

use serde::{Deserialize, Serialize};

/// A remedy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Remedy {
    /// Description, beginning with a verb.
    pub what: String,
    /// Location of the change.
    #[serde(rename = "where")]
    pub location: Location,
    /// Changes of this host that can be reverted; empty for manual or remote remedies.
    pub actions: Vec<Action>,
    /// Commands to show: the commands of the actions, or manual ones.
    pub commands: Vec<String>,
    /// Expected gain, in words.
    pub expected_gain: String,
}

impl Remedy {
    /// Creates a remedy on this host that can be applied and reverted.
    pub fn here(
        what: impl Into<String>,
        actions: Vec<Action>,
        expected_gain: impl Into<String>,
    ) -> Self {
        Remedy {
            what: what.into(),
            location: Location::Here,
            commands: actions.iter().map(Action::command).collect(),
            actions,
            expected_gain: expected_gain.into(),
        }
    }

    /// Creates a manual remedy, with commands or words for it.
    pub fn ask(
        location: Location,
        what: impl Into<String>,
        commands: Vec<String>,
        expected_gain: impl Into<String>,
    ) -> Self {
        Remedy {
            location,
            commands,
            ..Remedy::here(what, Vec::new(), expected_gain)
        }
    }
}

/// Location of a remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Location {
    /// This host.
    Here,
    /// The settings of the tunnel, at one or both ends, with a restart.
    Tunnel,
    /// The host at the far end.
    FarEnd,
    /// The operator of the network or the machine.
    Provider,
    /// The application.
    Application,
}

/// A change of this host that can be reverted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Action {
    /// Queue length of an interface.
    QueueLength {
        /// The interface.
        link: String,
        /// Number of packets.
        packets: u32,
    },
    /// MTU of an interface.
    Mtu {
        /// The interface.
        link: String,
        /// MTU in bytes.
        bytes: u32,
    },
    /// An offload of an interface, by its name for `ethtool -K`.
    Offload {
        /// The interface.
        link: String,
        /// `gro`, `tso` or another.
        feature: String,
        /// On or off.
        on: bool,
    },
    /// A setting below `/proc/sys`.
    Sysctl {
        /// Name with dots: `net.core.rmem_default`.
        name: String,
        /// The new value.
        value: String,
    },
    /// Processors that share a receive queue.
    Rps {
        /// The interface.
        link: String,
        /// Number of the queue.
        queue: u32,
        /// The processors.
        cpus: Vec<u32>,
    },
    /// Replaces the root queueing discipline by `noqueue` or the default one.
    RemoveQdisc {
        /// The interface.
        link: String,
    },
    /// Nice value of a process with all its threads.
    Nice {
        /// The process.
        pid: u32,
        /// -20 to 19.
        nice: i32,
    },
    /// Processors on which a process may run.
    Affinity {
        /// The process.
        pid: u32,
        /// The processors.
        cpus: Vec<u32>,
    },
    /// Processor limit of a control group.
    CpuLimit {
        /// Directory of the group.
        group: String,
        /// Limit in processors; `None`: no limit.
        cpus: Option<f64>,
    },
    /// Limits the segment size of TCP connections through an interface, by an nftables rule in a
    /// table of its own.
    ClampMss {
        /// The interface.
        link: String,
        /// Segment size in bytes.
        bytes: u32,
    },
}

impl Action {
    /// Returns the equivalent command.
    pub fn command(&self) -> String {
        let list = |cpus: &[u32]| {
            let words: Vec<String> = cpus.iter().map(u32::to_string).collect();
            words.join(",")
        };
        match self {
            Action::QueueLength { link, packets } => {
                format!("ip link set dev {} txqueuelen {packets}", word(link))
            }
            Action::Mtu { link, bytes } => format!("ip link set dev {} mtu {bytes}", word(link)),
            Action::Offload { link, feature, on } => {
                let state = if *on { "on" } else { "off" };
                format!("ethtool -K {} {feature} {state}", word(link))
            }
            Action::Sysctl { name, value } => format!("sysctl -w {name}=\"{value}\""),
            Action::Rps { link, queue, cpus } => {
                let mask = cpus.iter().fold(0u128, |mask, cpu| mask | 1 << (cpu & 127));
                let file = format!("/sys/class/net/{link}/queues/rx-{queue}/rps_cpus");
                format!("echo {mask:x} > {}", word(&file))
            }
            Action::RemoveQdisc { link } => format!("tc qdisc del dev {} root", word(link)),
            Action::Nice { pid, nice } => {
                format!("renice -n {nice} -p $(ls /proc/{pid}/task)")
            }
            Action::Affinity { pid, cpus } => format!("taskset -a -p -c {} {pid}", list(cpus)),
            Action::CpuLimit { group, cpus } => {
                // Version 2 of control groups, or else version 1 with its usual period.
                let (second, first) = match cpus {
                    Some(cpus) => {
                        let quota = (cpus * 100_000.0).round();
                        (format!("{quota} 100000"), quota.to_string())
                    }
                    None => ("max".to_owned(), "-1".to_owned()),
                };
                format!(
                    "echo {second} > {} || echo {first} > {}",
                    word(&format!("{group}/cpu.max")),
                    word(&format!("{group}/cpu.cfs_quota_us"))
                )
            }
            Action::ClampMss { link, bytes } => format!("nft {}", word(&clamp(link, *bytes))),
        }
    }
}

/// Returns the argument for nft(8) that limits the segment size of TCP connections through an
/// interface. The size in SYNs that leave by the interface limits the received segments; the size in
/// SYNs that enter by it limits the sent segments. The name must be [plain](is_plain).
pub fn clamp(link: &str, bytes: u32) -> String {
    let chain = |hook: &str, direction: &str| {
        format!(
            "chain {hook} {{ type filter hook {hook} priority mangle; \
             {direction} {link} tcp flags syn tcp option maxseg size set {bytes}; }};"
        )
    };
    let leaving = chain("postrouting", "oifname");
    let entering = chain("prerouting", "iifname");
    format!("table inet seikan_doctor {{ {leaving} {entering} }}")
}

/// Whether a name is a single plain word for a shell and for nft. The kernel allows interfaces
/// almost any name.
pub fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:@".contains(c);
    !name.is_empty() && name.chars().all(plain)
}

/// Quotes a text as one word for a shell.
fn word(text: &str) -> String {
    if is_plain(text) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn longer(link: &str) -> String {
        let link = link.into();
        Action::QueueLength { link, packets: 9 }.command()
    }

    #[test]
    fn a_name_is_one_word_for_a_shell() {
        assert_eq!(longer("tun0"), "ip link set dev tun0 txqueuelen 9");
        let quoted = r"ip link set dev 'a'\'';id' txqueuelen 9";
        assert_eq!(longer("a';id"), quoted);
    }
}
