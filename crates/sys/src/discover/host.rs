//! Facts about the host: kernel, processors, settings.

use std::collections::BTreeMap;

use seikan_observe::path::{HostFacts, Unseen};

use super::procfs;
use crate::netns::NetNs;
use crate::softirq::parse_cpu_list;
use crate::sysctl;

/// Instruction sets for ciphers, of x86 and of ARM.
const CIPHER_FEATURES: [&str; 15] = [
    "aes",
    "asimd",
    "avx",
    "avx2",
    "avx512f",
    "bmi2",
    "gfni",
    "pclmulqdq",
    "pmull",
    "sha_ni",
    "sse4_1",
    "ssse3",
    "sve",
    "vaes",
    "vpclmulqdq",
];
/// Settings of the machine. Some kernels show them in the first network namespace only.
const MACHINE: [&str; 7] = [
    "net.core.netdev_max_backlog",
    "net.core.netdev_budget",
    "net.core.netdev_budget_usecs",
    "net.core.rmem_default",
    "net.core.rmem_max",
    "net.core.wmem_default",
    "net.core.wmem_max",
];
/// Settings of the namespace.
const NAMESPACE: [&str; 8] = [
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_congestion_control",
    "net.ipv4.tcp_mtu_probing",
    "net.ipv4.ip_forward",
    "net.ipv4.ip_no_pmtu_disc",
    "net.netfilter.nf_conntrack_max",
    CONNTRACK_COUNT,
];
const CONNTRACK_COUNT: &str = "net.netfilter.nf_conntrack_count";

/// Maximum number of namespaces that are entered to find the first one.
const NAMESPACES_MAX: usize = 16;

/// Returns the facts, as seen from the network namespace of the calling thread.
pub(super) fn facts(unseen: &mut Vec<Unseen>) -> HostFacts {
    let mut sysctls = read_all(&MACHINE);
    let missing: Vec<&str> = MACHINE
        .into_iter()
        .filter(|name| !sysctls.contains_key(*name))
        .collect();
    if !missing.is_empty() {
        match from_elsewhere(&missing) {
            Some(found) => sysctls.extend(found),
            None => unseen.push(Unseen {
                what: missing.join(", "),
                why: "shown in the machine's first network namespace only, which cannot be \
                      entered; run the doctor there, as root"
                    .into(),
            }),
        }
    }
    sysctls.extend(read_all(&NAMESPACE));
    let tracked = sysctls
        .get(CONNTRACK_COUNT)
        .and_then(|count| count.parse::<u64>().ok());
    let online = procfs::read("/sys/devices/system/cpu/online").unwrap_or_default();
    let kernel = procfs::read("/proc/sys/kernel/osrelease").unwrap_or_default();
    HostFacts {
        kernel: kernel.trim().to_owned(),
        cpus: parse_cpu_list(&online),
        cpu_features: cipher_features(&procfs::read("/proc/cpuinfo").unwrap_or_default()),
        sysctls,
        conntrack: tracked.is_some_and(|count| count > 0),
    }
}

/// Returns settings of the machine as seen from the first network namespace. That is usually the
/// one of the first process, but it may have to be searched for.
fn from_elsewhere(names: &[&str]) -> Option<BTreeMap<String, String>> {
    let mut tried: Vec<u64> = procfs::namespace("thread-self").into_iter().collect();
    for pid in procfs::pids() {
        let namespace = procfs::namespace(pid).filter(|id| !tried.contains(id));
        let Some(id) = namespace.filter(|_| tried.len() <= NAMESPACES_MAX) else {
            continue;
        };
        tried.push(id);
        let there = NetNs::open(format!("/proc/{pid}/ns/net"));
        if let Ok(found) = there.and_then(|there| there.run(|| read_all(names)))
            && !found.is_empty()
        {
            return Some(found);
        }
    }
    None
}

fn read_all(names: &[&str]) -> BTreeMap<String, String> {
    let read = |name: &&str| {
        // None of these names contains an interface name, whose dots would not be separators.
        let components: Vec<&str> = name.split('.').skip(1).collect();
        let value = sysctl::read(&components).ok()?;
        Some(((*name).to_owned(), value.replace('\t', " ")))
    };
    names.iter().filter_map(read).collect()
}

/// Returns the features of the first processor: `flags` on x86, `Features` on ARM.
fn cipher_features(cpuinfo: &str) -> Vec<String> {
    let line = cpuinfo.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        matches!(key.trim(), "flags" | "Features").then_some(value)
    });
    let known = line.unwrap_or_default().split_whitespace();
    let mut known: Vec<String> = known
        .filter(|flag| CIPHER_FEATURES.contains(flag))
        .map(str::to_owned)
        .collect();
    known.sort_unstable();
    known
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_instructions_for_ciphers_are_picked_out() {
        let x86 = "processor\t: 0\nflags\t\t: fpu aes avx2 vaes\n\nprocessor\t: 1\nflags\t: x\n";
        assert_eq!(cipher_features(x86), ["aes", "avx2", "vaes"]);
        let arm = "processor\t: 0\nFeatures\t: fp asimd aes pmull\n";
        assert_eq!(cipher_features(arm), ["aes", "asimd", "pmull"]);
        assert!(cipher_features("nothing").is_empty());
    }

    #[test]
    fn the_settings_of_the_machine_are_known_in_a_new_namespace() {
        crate::testing::in_namespace(|| {
            let mut unseen = Vec::new();
            let facts = facts(&mut unseen);
            for name in MACHINE {
                assert!(facts.sysctls.contains_key(name), "{name}: {unseen:?}");
            }
            assert!(!facts.conntrack && facts.sysctls.contains_key("net.ipv4.tcp_rmem"));
            let processors = std::thread::available_parallelism().unwrap().get();
            assert!(facts.cpus.len() >= processors && facts.kernel.contains('.'));
        });
    }
}
