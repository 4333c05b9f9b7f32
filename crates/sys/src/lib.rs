//! The interface to the kernel: all system calls and all `unsafe` code of the workspace.
//!
//! Data path: a packet leaves through [`tun`] (one read returns a whole super-packet) and [`udp`]
//! (one call sends a batch of datagrams), and enters through [`udp`] (one call receives a batch)
//! and [`tun`]. [`packet`] receives and sends frames of other devices on a LAN. [`poll`] waits for
//! events, [`clock`] reads the time. Abilities of the kernel are found by trying and kept as
//! [`ability::Ability`], each absence with its reason. Set-up: [`netlink`], [`ethtool`] and
//! [`sysctl`] configure interfaces, [`softirq`] assigns packet reception to processors,
//! [`schedule`] controls processor affinity and priority, [`netns`] creates network namespaces.
//! Security: [`privilege`] drops privileges, [`mod@confine`] restricts system calls and files,
//! [`handover`] gives a directory to the unprivileged user, [`inherited`] takes over descriptors of the program that
//! started this one, [`owner`] chooses the user for commands
//! that root runs in a service's directory. Diagnosis: [`mod@sample`] reads the counters of a path
//! ten times a second, using [`diag`] (sockets), [`perf`] (tracepoints) and [`calls`] (calls of
//! kernel functions). [`profile`] samples the use of the processors, [`trace`] records calls and
//! tracepoints with their times.

pub mod ability;
pub mod calls;
pub mod clock;
pub mod confine;
pub mod cpu;
pub mod discover;
pub mod dns;
pub mod echo;
pub mod ethtool;
pub mod handover;
pub mod inherited;
pub mod memory;
pub mod monitor;
pub mod netlink;
pub mod netns;
pub mod owner;
pub mod packet;
pub mod packet_pair;
pub mod perf;
pub mod poll;
pub mod privilege;
pub mod process;
pub mod profile;
pub mod random;
pub mod resolv_conf;
pub mod sample;
pub mod schedule;
pub mod signal;
pub mod softirq;
pub mod sysctl;
pub mod tcp;
pub mod timer;
pub mod trace;
pub mod tun;
pub mod udp;

pub use netlink::diag;

#[cfg(test)]
mod test_namespace;
#[cfg(test)]
mod testing;
