//! Everything that talks to the kernel: all system calls and all `unsafe` code of the workspace.
//!
//! A packet leaves by [`tun`] (one read gives a whole super-packet) and [`udp`] (one call sends a
//! batch of datagrams); it enters by [`udp`] (one call receives a batch) and [`tun`]. Frames of
//! other devices on a LAN come and go by [`packet`]. [`poll`] says when, [`clock`] says at what
//! time. What the kernel can do is found out by trying and kept as [`ability::Ability`], each
//! absence with its reason. Around the data path: [`netlink`], [`ethtool`] and [`sysctl`] set
//! interfaces up, [`softirq`] says on which processors packets are received, [`schedule`] where and how eagerly processes run, [`netns`] makes hosts out of namespaces, [`privilege`] drops what is not needed, [`mod@confine`] keeps most of the kernel out of reach, [`handover`] gives a folder to the user that is left, [`owner`] says as which user root works in a service's directory.
//! For a diagnosis, [`mod@sample`] reads everything about a path ten times a second, with the help of [`diag`] (sockets), [`perf`] (tracepoints) and [`calls`] (calls of kernel functions).
//! [`profile`] samples where the processors' time goes.

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
pub mod monitor;
pub mod netlink;
pub mod netns;
pub mod owner;
pub mod packet;
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
pub mod tun;
pub mod udp;

pub use netlink::diag;

#[cfg(test)]
mod test_namespace;
#[cfg(test)]
mod testing;
