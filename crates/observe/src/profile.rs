//! Where processor time went, by function: what a clock that looks at every processor some hundred times a second saw.
//!
//! [`Functions`] are the counts, with the functions' names; [`Profile`] is what a diagnosis reads: shares, each with
//! its [`Stage`].

use serde::{Deserialize, Serialize};

use crate::path::Unseen;

/// Where processor time went (sampled by a clock).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// Samples taken.
    pub samples: u64,
    /// Functions of the tunnel's program, and of the kernel on its behalf, with their share of its time; largest first.
    pub program: Vec<Share>,
    /// The same of the whole machine, of the time it was not idle.
    pub machine: Vec<Share>,
}

/// The share of a function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// The function's symbol, or `[module]` where it has none.
    pub symbol: String,
    /// What it is for.
    pub stage: Stage,
    /// 0 to 1.
    pub share: f64,
}

/// What a function is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Encryption, authentication.
    Crypto,
    /// Copies between kernel and user, and within.
    Copy,
    /// Checksums.
    Checksum,
    /// Entering and leaving the kernel.
    Syscall,
    /// Wake-ups, locks, the scheduler.
    Schedule,
    /// The kernel's network stack.
    Network,
    /// Memory for packets.
    Memory,
    /// Anything else.
    Other,
}

/// What was sampled, by function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Functions {
    /// Samples in which a processor was busy.
    pub samples: u64,
    /// Of these, the ones of the program: its own code, and the kernel's while the program was running.
    pub program: u64,
    /// Samples in which a processor was idle.
    pub idle: u64,
    /// Samples that found no room and are not in any of the counts.
    pub lost: u64,
    /// Whether all of the machine was sampled, or the program alone.
    pub machine: bool,
    /// The functions; the ones with most samples first.
    pub functions: Vec<Function>,
    /// Call stacks, outermost function first, with their samples, for flame graphs; empty unless asked for.
    pub stacks: Vec<(Vec<String>, u64)>,
    /// What could not be seen.
    pub unseen: Vec<Unseen>,
}

/// The samples of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// Its symbol, demangled; `[module]` where it has none.
    pub symbol: String,
    /// What it is part of: `kernel` or the name of the kernel's module, otherwise the name of the program's or
    /// library's file.
    pub module: String,
    /// Samples of the program.
    pub program: u64,
    /// Samples of the machine, the program's among them.
    pub machine: u64,
}
