//! The machine a measurement ran on: versions for the report.

use serde::{Deserialize, Serialize};

/// Properties of a machine, for reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Kernel release, as `uname -r`.
    pub kernel: String,
    /// Architecture, as `uname -m`.
    pub arch: String,
    /// CPU model name.
    pub cpu: String,
    /// CPUs this process may use.
    pub cores: usize,
    /// Memory in bytes.
    pub memory: u64,
    /// Instruction sets that matter to the ciphers.
    pub features: Vec<String>,
}

impl Machine {
    /// Reads the properties of this machine; values that cannot be read stay empty.
    pub fn this() -> Self {
        let uname = nix::sys::utsname::uname().ok();
        let text = |s: &std::ffi::OsStr| s.to_string_lossy().into_owned();
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let flags: Vec<&str> = field(&cpuinfo, "flags")
            .or_else(|| field(&cpuinfo, "Features"))
            .unwrap_or_default()
            .split(' ')
            .collect();
        Self {
            kernel: uname
                .as_ref()
                .map(|u| text(u.release()))
                .unwrap_or_default(),
            arch: uname
                .as_ref()
                .map(|u| text(u.machine()))
                .unwrap_or_default(),
            cpu: field(&cpuinfo, "model name")
                .unwrap_or("unknown CPU")
                .to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory: field(&meminfo, "MemTotal")
                .and_then(|m| m.strip_suffix(" kB")?.parse::<u64>().ok())
                .map_or(0, |kib| kib * 1024),
            features: [
                "aes",
                "pclmulqdq",
                "avx2",
                "avx512f",
                "vaes",
                "vpclmulqdq",
                "pmull",
            ]
            .into_iter()
            .filter(|f| flags.contains(f))
            .map(str::to_owned)
            .collect(),
        }
    }
}

/// The value of the first `name : value` line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|l| {
        let (key, value) = l.split_once(':')?;
        (key.trim() == name).then_some(value.trim())
    })
}
