//! Processor time by function, from a sampling profiler that interrupts every processor some
//! hundred times a second.
//!
//! [`Functions`] holds the counts by function name. [`Profile`] is the input to a diagnosis:
//! shares, each with its [`Stage`].

use serde::{Deserialize, Serialize};

use crate::path::Unseen;

/// Processor time by function, sampled.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// Number of samples.
    pub samples: u64,
    /// Functions of the tunnel's program, and of the kernel on its behalf, with their share of the
    /// program's time; largest first.
    pub program: Vec<Share>,
    /// Functions of the whole machine, with their share of its busy time.
    pub machine: Vec<Share>,
}

/// The share of a function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// Its symbol, or `[module]` if it has none.
    pub symbol: String,
    /// Its purpose.
    pub stage: Stage,
    /// Share of the samples, 0 to 1.
    pub share: f64,
}

/// The purpose of a function.
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

/// Samples by function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Functions {
    /// Samples of busy processors.
    pub samples: u64,
    /// Samples of the program: its own code, and kernel code on its behalf.
    pub program: u64,
    /// Samples of idle processors.
    pub idle: u64,
    /// Samples that did not fit and are in none of the counts.
    pub lost: u64,
    /// Whether the whole machine was sampled, or only the program.
    pub machine: bool,
    /// The functions, those with most samples first.
    pub functions: Vec<Function>,
    /// Call stacks, outermost function first, with their sample counts, for flame graphs. Empty
    /// unless requested.
    pub stacks: Vec<(Vec<String>, u64)>,
    /// Facts that could not be read.
    pub unseen: Vec<Unseen>,
}

/// The samples of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// Its symbol, demangled; `[module]` if it has none.
    pub symbol: String,
    /// Its origin: `kernel`, the name of a kernel module, or the file name of the program or
    /// library.
    pub module: String,
    /// Samples of the program.
    pub program: u64,
    /// Samples of the machine, including those of the program.
    pub machine: u64,
}
