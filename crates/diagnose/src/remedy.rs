//! What helps against a cause: exact changes on this host, or what to ask of somebody else.

use serde::{Deserialize, Serialize};

/// A remedy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Remedy {
    /// In words.
    pub what: String,
    /// Where it has to be done.
    #[serde(rename = "where")]
    pub place: Place,
    /// The changes on this host, which can be taken back; none where it is to be done by hand or elsewhere.
    pub actions: Vec<Action>,
    /// Commands to show: those of the actions, or what to do by hand.
    pub commands: Vec<String>,
    /// What may be hoped for, in words.
    pub expected_gain: String,
}

impl Remedy {
    /// One on this host that can be applied and taken back.
    pub fn here(
        what: impl Into<String>,
        actions: Vec<Action>,
        expected_gain: impl Into<String>,
    ) -> Self {
        Remedy {
            what: what.into(),
            place: Place::Here,
            commands: actions.iter().map(Action::command).collect(),
            actions,
            expected_gain: expected_gain.into(),
        }
    }

    /// One that people have to see to, with commands or words for it.
    pub fn ask(
        place: Place,
        what: impl Into<String>,
        commands: Vec<String>,
        expected_gain: impl Into<String>,
    ) -> Self {
        Remedy {
            what: what.into(),
            place,
            actions: Vec::new(),
            commands,
            expected_gain: expected_gain.into(),
        }
    }
}

/// Where a remedy has to be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// On this host.
    Here,
    /// In the settings of the tunnel, at both ends or this one, with a restart of it.
    Tunnel,
    /// On the host at the other end.
    FarEnd,
    /// At whoever runs the network or the machine.
    Provider,
    /// In the application.
    Application,
}

/// A change of this host that can be taken back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Action {
    /// Length of an interface's queue.
    QueueLength {
        /// The interface.
        link: String,
        /// Packets.
        packets: u32,
    },
    /// MTU of an interface.
    Mtu {
        /// The interface.
        link: String,
        /// Bytes.
        bytes: u32,
    },
    /// An offload of an interface, by `ethtool -K`'s word for it.
    Offload {
        /// The interface.
        link: String,
        /// Such as `gro`, `tso`.
        feature: String,
        /// On or off.
        on: bool,
    },
    /// A setting below `/proc/sys`.
    Sysctl {
        /// With dots: `net.core.rmem_default`.
        name: String,
        /// The new value.
        value: String,
    },
    /// The processors to which a receive queue is spread.
    Rps {
        /// The interface.
        link: String,
        /// The number of the queue.
        queue: u32,
        /// The processors.
        cpus: Vec<u32>,
    },
    /// Another rate of a token bucket, or none: the root queueing discipline replaced by `noqueue` or the default one.
    RemoveQdisc {
        /// The interface.
        link: String,
    },
    /// The nice value of a process with all its threads.
    Nice {
        /// The process.
        pid: u32,
        /// -20 to 19.
        nice: i32,
    },
    /// The processors on which a process may run.
    Affinity {
        /// The process.
        pid: u32,
        /// The processors.
        cpus: Vec<u32>,
    },
    /// The limit of a control group.
    CpuLimit {
        /// Its directory.
        group: String,
        /// Processors' worth of time; none: no limit.
        cpus: Option<f64>,
    },
    /// Cuts the segment size that TCP connections through an interface agree on (an nftables rule in a table of its own).
    ClampMss {
        /// The interface.
        link: String,
        /// Bytes.
        bytes: u32,
    },
}

impl Action {
    /// The command that does the same.
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

/// Returns the argument for nft(8) that limits the segment size of TCP connections through an interface: the size in SYNs
/// that leave by it limits the received segments, the size in SYNs that enter by it the sent ones. The name must be
/// [plain](is_plain).
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

/// Whether a name means nothing but itself to a shell and to nft. The kernel allows interfaces almost any name.
pub fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:@".contains(c);
    !name.is_empty() && name.chars().all(plain)
}

/// A text as one word for a shell.
fn word(text: &str) -> String {
    match is_plain(text) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
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
