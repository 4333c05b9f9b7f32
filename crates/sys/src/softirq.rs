//! The processors on which the kernel handles received packets: `/proc/softirqs` counts the runs of
//! `NET_RX` for each, `/sys/devices/system/cpu/online` lists them, and
//! `/sys/class/net/IF/queues/rx-N/rps_cpus` has the processors over which the packets of a queue
//! are spread (receive packet steering, Documentation/networking/scaling.rst).
//!
//! `/proc/softirqs` is that of the machine. `/sys/class/net` belongs to the network namespace in
//! which it was mounted, which may not be the caller's. Therefore information on an interface is
//! used only if index and hardware address match.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::netlink::LinkInfo;

const SOFTIRQS: &str = "/proc/softirqs";
const ONLINE: &str = "/sys/devices/system/cpu/online";
const NET: &str = "/sys/class/net";
/// Maximum depth of lower interfaces, as for a VLAN on a bridge on a bond on a NIC.
const DEPTH: usize = 4;
/// Maximum number of lower interfaces that are read.
const LOWER_MAX: usize = 16;

/// The receive softirqs of a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetRx {
    /// Number of the processor.
    pub cpu: u32,
    /// Runs of the receive softirq since boot; each handles up to some hundred packets.
    pub runs: u64,
}

/// The processors over which the packets of a receive queue are spread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Steering {
    /// Name of the queue, such as `rx-0`.
    pub queue: String,
    /// The processors in ascending order. If empty, the processor that takes the interrupt handles
    /// all packets.
    pub cpus: Vec<u32>,
}

/// Returns the processors that are online, with their counts.
///
/// # Errors
/// `/proc/softirqs` cannot be read, or has no line `NET_RX` (`InvalidData`).
pub fn net_rx() -> io::Result<Vec<NetRx>> {
    let mut all = parse_softirqs(&fs::read_to_string(SOFTIRQS)?).ok_or_else(|| {
        let text = format!("no NET_RX in {SOFTIRQS}");
        io::Error::new(io::ErrorKind::InvalidData, text)
    })?;
    // Processors that are possible but absent are listed as well.
    if let Ok(online) = fs::read_to_string(ONLINE) {
        let online = parse_cpu_list(&online);
        if !online.is_empty() {
            all.retain(|count| online.contains(&count.cpu));
        }
    }
    Ok(all)
}

/// Returns how the receive queues of an interface are spread, in the order of their numbers; `None`
/// if that cannot be read.
pub fn steering(link: &LinkInfo) -> Option<Vec<Steering>> {
    let queues = directory(link)?.join("queues");
    let mut found = Vec::new();
    for entry in fs::read_dir(&queues).ok()?.flatten() {
        let queue = entry.file_name().to_string_lossy().into_owned();
        if let Some(number) = queue.strip_prefix("rx-")
            && let Ok(number) = number.parse::<u32>()
            && let Ok(mask) = fs::read_to_string(entry.path().join("rps_cpus"))
        {
            let cpus = parse_mask(&mask);
            found.push((number, Steering { queue, cpus }));
        }
    }
    found.sort_by_key(|(number, _)| *number);
    Some(found.into_iter().map(|(_, steering)| steering).collect())
}

/// Like [`steering`], also if `/sys` belongs to another network namespace, for a caller that may
/// mount one temporarily (CAP_SYS_ADMIN).
pub fn steering_anywhere(link: &LinkInfo) -> Option<Vec<Steering>> {
    steering(link).or_else(|| with_own_sysfs(|| steering(link))?)
}

/// Spreads the packets of a receive queue over these processors. If empty, the processor that takes
/// the interrupt handles all packets. Mounts a `/sys` temporarily if necessary.
///
/// # Errors
/// `NotFound` if `/sys` does not belong to this network namespace or has no such queue; the errors
/// of writing.
pub fn set_steering(link: &LinkInfo, queue: &str, cpus: &[u32]) -> io::Result<()> {
    let is_queue = queue
        .strip_prefix("rx-")
        .is_some_and(|n| n.parse::<u32>().is_ok());
    if !is_queue {
        let text = format!("`{queue}` is not a receive queue");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let write = |directory: PathBuf| {
        let file = directory.join("queues").join(queue).join("rps_cpus");
        fs::write(file, mask(cpus))
    };
    let written = match directory(link) {
        Some(directory) => Some(write(directory)),
        None => with_own_sysfs(|| Some(write(directory(link)?))).flatten(),
    };
    written.unwrap_or_else(|| {
        let text = format!(
            "/sys shows another network namespace than that of {}",
            link.name
        );
        Err(io::Error::new(io::ErrorKind::NotFound, text))
    })
}

/// Runs `work` in a thread whose `/sys` belongs to its network namespace: it mounts one in a mount
/// namespace that ends with the thread. `None` if that is not permitted (CAP_SYS_ADMIN).
fn with_own_sysfs<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    let none: Option<&str> = None;
    let mounted = || {
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none)
    };
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || mounted().ok().map(|()| work()));
        thread.join().ok().flatten()
    })
}

/// Returns the NICs of an interface: the hardware interfaces below a bridge, a bond or a VLAN, or
/// the interface itself if there are none or they cannot be read.
pub fn nics(link: &LinkInfo) -> Vec<String> {
    let mut found = Vec::new();
    if directory(link).is_some() {
        lower(&link.name, DEPTH, &mut found);
    }
    if found.is_empty() {
        found.push(link.name.clone());
    }
    found.sort_unstable();
    found.truncate(LOWER_MAX);
    found
}

fn lower(name: &str, depth: usize, found: &mut Vec<String>) {
    let path = Path::new(NET).join(name);
    if path.join("device").exists() && !found.iter().any(|other| other == name) {
        return found.push(name.to_owned());
    }
    let Some(depth) = depth.checked_sub(1) else {
        return;
    };
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if let Some(below) = entry.file_name().to_string_lossy().strip_prefix("lower_") {
            lower(below, depth, found);
        }
    }
}

/// Returns the directory of the interface in `/sys`, if it is the same interface.
fn directory(link: &LinkInfo) -> Option<PathBuf> {
    // Names come from the kernel, which allows neither a slash nor `.` and `..`.
    let path = Path::new(NET).join(&link.name);
    let read = |file: &str| fs::read_to_string(path.join(file)).ok();
    let index: u32 = read("ifindex")?.trim().parse().ok()?;
    let address: Vec<String> = link.address.iter().map(|b| format!("{b:02x}")).collect();
    (index == link.index && read("address")?.trim() == address.join(":")).then_some(path)
}

/// Parses the line `NET_RX` below the line of processors.
fn parse_softirqs(text: &str) -> Option<Vec<NetRx>> {
    let mut lines = text.lines();
    let numbers = lines.next()?.split_whitespace();
    let numbers: Option<Vec<u32>> = numbers
        .map(|name| name.strip_prefix("CPU")?.parse().ok())
        .collect();
    let counts = lines.find_map(|line| line.trim_start().strip_prefix("NET_RX:"))?;
    let counts: Option<Vec<u64>> = counts.split_whitespace().map(|n| n.parse().ok()).collect();
    let (numbers, counts) = (numbers?, counts?);
    let pairs = numbers.into_iter().zip(counts);
    Some(pairs.map(|(cpu, runs)| NetRx { cpu, runs }).collect())
}

/// Parses a list such as `0-3,5` (Documentation/admin-guide/cputopology.rst). Malformed lists are
/// empty.
pub(crate) fn parse_cpu_list(text: &str) -> Vec<u32> {
    /// More processors than any machine has.
    const MOST: u32 = 1 << 16;
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else {
            return Vec::new();
        };
        cpus.extend(first..=last.min(MOST));
    }
    cpus
}

/// Parses a mask of processors: hexadecimal, the highest first, a comma between groups of 32 bits.
fn parse_mask(text: &str) -> Vec<u32> {
    let digits = text.trim().chars().rev().filter(|c| *c != ',');
    let mut cpus = Vec::new();
    for (place, digit) in (0u32..).zip(digits) {
        let Some(bits) = digit.to_digit(16) else {
            return Vec::new();
        };
        cpus.extend(
            (0..4)
                .filter(|bit| bits & 1 << bit != 0)
                .map(|b| 4 * place + b),
        );
    }
    cpus
}

/// Formats a mask of processors for `rps_cpus`, the inverse of the parsing in [`steering`].
pub fn mask(cpus: &[u32]) -> String {
    let words = cpus.iter().max().map_or(1, |highest| highest / 32 + 1);
    let mut mask = vec![0u32; words as usize];
    for cpu in cpus {
        mask[(cpu / 32) as usize] |= 1 << (cpu % 32);
    }
    let mut text = String::new();
    for word in mask.iter().rev() {
        text += &if text.is_empty() {
            format!("{word:x}")
        } else {
            format!(",{word:08x}")
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Netlink;
    use crate::testing::in_namespace;

    #[test]
    fn queues_are_steered_where_sys_shows_another_namespace() {
        in_namespace(|| {
            let netlink = Netlink::open().unwrap();
            netlink.create_veth("steered0", "steered1", None).unwrap();
            let link = netlink.link("steered0").unwrap();
            assert_eq!(steering(&link), None);
            let queue = |cpus: &[u32]| Steering {
                queue: "rx-0".into(),
                cpus: cpus.to_vec(),
            };
            assert_eq!(steering_anywhere(&link), Some(vec![queue(&[])]));
            set_steering(&link, "rx-0", &[0]).unwrap();
            assert_eq!(steering_anywhere(&link), Some(vec![queue(&[0])]));
            // The mount ended with its thread.
            assert_eq!(steering(&link), None);
        });
    }

    #[test]
    fn the_receive_line_is_read_by_processor() {
        let text = "                    CPU0       CPU2\n          HI:          1          0\n\
                    \x20     NET_TX:          3          4\n      NET_RX:    6294823     129482\n";
        let expected = [(0, 6_294_823), (2, 129_482)].map(|(cpu, runs)| NetRx { cpu, runs });
        assert_eq!(parse_softirqs(text).unwrap(), expected);
        for wrong in [
            "",
            "CPU0\nTIMER: 1\n",
            "CPU0\nNET_RX: x\n",
            "nothing\nNET_RX: 1\n",
        ] {
            assert_eq!(parse_softirqs(wrong), None);
        }
    }

    #[test]
    fn a_list_of_processors_has_ranges() {
        assert_eq!(parse_cpu_list("0-3,5\n"), [0, 1, 2, 3, 5]);
        assert_eq!(parse_cpu_list("0\n"), [0]);
        assert!(parse_cpu_list("\n").is_empty() && parse_cpu_list("a-b").is_empty());
    }

    #[test]
    fn a_mask_is_hexadecimal_in_words_of_32_bits() {
        // The examples of Documentation/core-api/irq/irq-affinity.rst and scaling.rst.
        assert_eq!(parse_mask("ffffffff\n").len(), 32);
        assert_eq!(parse_mask("00000001,00000000,00000006\n"), [1, 2, 64]);
        assert!(parse_mask("0\n").is_empty());
    }

    #[test]
    fn this_machine_counts() {
        let counts = net_rx().unwrap();
        let processors = std::thread::available_parallelism().unwrap().get();
        assert!(counts.len() >= processors, "{counts:?}");
    }

    #[test]
    fn another_interface_of_the_same_name_is_not_taken_for_it() {
        let mut link = Netlink::open().unwrap().link("lo").unwrap();
        link.index += 1000;
        assert_eq!(steering(&link), None);
        assert_eq!(nics(&link), ["lo"]);
    }
}
