//! Published experiments: their names, texts, and links.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::arguments;

/// Gigabit Ethernet, in bit/s.
pub(super) const GIGABIT: u64 = 1_000_000_000;

/// A published experiment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// A tunnel with a queue of three packets
    #[default]
    Queue,
    /// A gateway that encapsulates merged packets
    Offload,
    /// Many frames per system call
    Batch,
    /// Guests behind a virtual switch, some of them busy
    Profile,
    /// The MTU of a tunnel and its cipher
    MtuCipher,
}

impl Source {
    /// Returns its title.
    pub fn title(self) -> String {
        let value = self.to_possible_value();
        let help = value.and_then(|value| value.get_help().map(ToString::to_string));
        help.unwrap_or_default()
    }

    /// Returns where and how the experiment was published.
    pub const fn published(self) -> &'static str {
        match self {
            Self::Queue => {
                "A history of debugging the TUN/TAP driver of Solaris: OpenVPN over TAP between two guests of one \
                 hypervisor, netperf, gigabit."
            }
            Self::Offload => {
                "TCP over an overlay protocol of its own: a gateway in Go with a packet socket, between a device and a \
                 remote host, gigabit cards, iperf3."
            }
            Self::Batch => {
                "OpenVPN performance: its first bottleneck is the tun driver. A driver of Linux 2.6.32 changed so that a read \
                 returns as many packets as a buffer of 4 x 1,500 bytes holds; a program that only passes on, over TCP, \
                 gigabit cards, ApacheBench."
            }
            Self::Profile => {
                "Diagnosing a virtual network by profiling: two hosts on 10 Gbit/s, Open vSwitch, eight virtual machines that \
                 send (iperf3) or spin (yes); perf and ftrace."
            }
            Self::MtuCipher => {
                "Jan Just Keijser, Optimizing performance on gigabit networks (OpenVPN 2.1, two machines, iperf)."
            }
        }
    }

    /// Returns the differences of this machine's setup from the source's.
    pub const fn differs(self) -> &'static str {
        match self {
            Self::Queue => {
                "Here: Linux instead of Solaris, two network namespaces joined by a veth pair instead of two guests, so the \
                 link itself is far faster than a gigabit; both ends share the processors. Published figures are compared with \
                 OpenVPN over TAP; the rows over TUN are ours."
            }
            Self::Offload => {
                "Here: three network namespaces joined by veth pairs whose cards send packets of the MTU, as physical \
                 ones do; the naive gateway is ours, in Rust; all three hosts share the processors."
            }
            Self::Batch => {
                "Here: the driver is as it is, and N is how many segments the kernel puts at most into the super-packets that it hands \
                 out (44 of an MTU of 1,420 fill one). Only segments of one stream form one. The three hosts in a row are \
                 namespaces and share the processors; a token bucket stands for the gigabit NICs."
            }
            Self::Profile => {
                "Here: guests are network namespaces, not virtual machines, so there is no vhost thread and no handle_tx to \
                 count; Open vSwitch forwards in user space; who receives shares the processors, and they are two."
            }
            Self::MtuCipher => {
                "Here: two network namespaces joined by a veth pair instead of two machines with gigabit cards; OpenVPN \
                 of today; both ends share the processors, so encryption and decryption compete."
            }
        }
    }

    /// Returns the approximate number of steps of a run, for its progress bar: in each round, and
    /// in addition.
    pub(super) const fn steps(self) -> [f64; 2] {
        match self {
            Self::Queue => [16.0, 20.0],
            Self::Offload => [12.0, 20.0],
            Self::Batch => [42.0, 49.0],
            Self::Profile => [27.0, 13.0],
            Self::MtuCipher => [173.0, 4.0],
        }
    }

    /// Returns the number of slow setups that the doctor diagnoses.
    pub const fn looks(self) -> usize {
        match self {
            Self::Batch | Self::Profile => 1,
            Self::Queue => 2,
            Self::Offload | Self::MtuCipher => 3,
        }
    }

    /// Rate of the published links, in bit/s. [`Source::MtuCipher`] has one of 10 Gbit/s as well.
    pub(super) const fn rate(self) -> u64 {
        match self {
            Self::Profile => 10 * GIGABIT,
            _ => GIGABIT,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&arguments::name(self))
    }
}
