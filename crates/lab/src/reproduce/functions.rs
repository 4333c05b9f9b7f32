//! Counts the calls of functions and their time, first of the driver and then of the program, and
//! records each packet that the driver drops with the length of its queue.
//!
//! Functions of the program are those that it calls in the C library and in OpenSSL (uprobes).
//! Without kprobes, functions of the driver are seen by tracepoints around them: the kernel reports
//! each packet before `tun_net_xmit` and after it, and the program's calls of read(2) and write(2)
//! begin and end with `tun_chr_read_iter` and `tun_chr_write_iter`.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use seikan_load::LiveOptions;
use seikan_sys::perf::Tracepoint;
use seikan_sys::softirq;
use seikan_sys::trace::{Hit, Probe, Trace, exported};

use super::figures::{cell, named, quantile};
use super::{Bench, Experiment, List};
use crate::error::{Doing, Result, setup};
use crate::load::live;
use crate::tunnel::Running;

/// Libraries of the program, by the beginning of their files' names, and functions in them.
const LIBRARIES: [(&str, &[&str]); 2] = [
    (
        "libc.so",
        &[
            "epoll_wait",
            "poll",
            "read",
            "write",
            "recvfrom",
            "recvmsg",
            "sendto",
            "sendmsg",
        ],
    ),
    (
        "libcrypto.so",
        &[
            "EVP_CipherInit",
            "EVP_CipherInit_ex",
            "EVP_CipherUpdate",
            "EVP_CipherFinal",
            "EVP_CIPHER_CTX_ctrl",
            "EVP_CIPHER_CTX_get_iv_length",
        ],
    ),
];
/// Functions of the driver: their names, and the tracepoints before and after them.
const DRIVER: [(&str, [(&str, &str); 2]); 3] = [
    (
        "tun_net_xmit",
        [("net", "net_dev_start_xmit"), ("net", "net_dev_xmit")],
    ),
    (
        "tun_chr_read_iter",
        [
            ("syscalls", "sys_enter_read"),
            ("syscalls", "sys_exit_read"),
        ],
    ),
    (
        "tun_chr_write_iter",
        [
            ("syscalls", "sys_enter_write"),
            ("syscalls", "sys_exit_write"),
        ],
    ),
];
/// Positions in [`DRIVER`].
const XMIT: usize = 0;
const READ: usize = 1;
/// Interval at which the records are taken from the kernel.
const EVERY: Duration = Duration::from_millis(10);
/// Maximum number of records.
const MAX_HITS: usize = 500_000;
/// Number of dropped packets that are listed.
const LISTED: usize = 12;

/// Meaning of a probe's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A function begins.
    Begin(usize),
    /// A function ends.
    End(usize),
    /// The driver drops a packet because its queue is full.
    Dropped,
    /// The driver copies a packet from its queue to the program.
    Copied,
}

/// Calls of a function, and the time until they return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Calls {
    count: u64,
    nanoseconds: u64,
}

/// A packet that the driver drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dropped {
    nanoseconds: u64,
    bytes: Option<u32>,
    /// Number of packets in the queue then.
    waiting: i64,
}

/// Records the functions while a connection runs through the tunnel.
pub(super) fn traced(
    bench: &mut Bench<'_>,
    running: &Running,
    row: &str,
    found: &mut Experiment,
) -> Result<()> {
    let device = running.device(&running.hosts.a);
    let program = running.started.processes.iter().find(|of| of.host() == "A");
    let pid = program
        .map(|program| program.pid())
        .ok_or_else(|| setup("the tunnel has no program: this is a bug"))?;
    let probes = Probes::of(pid, &device)?;
    let cpus = softirq::net_rx().doing("list the processors")?;
    let cpus: Vec<u32> = cpus.iter().map(|of| of.cpu).collect();
    let ends = running.ends();
    let time = bench.time();
    // Start before the load, while the queue is empty.
    let mut trace = Trace::start(&probes.list, &cpus).map_err(setup)?;
    // The probes start one after the other, so a packet that only some of them saw would appear to
    // wait.
    trace.take(&mut Vec::new());
    let (hits, lost) = live(&ends, &LiveOptions::default(), bench.interrupt, |_| {
        let (begin, mut hits) = (Instant::now(), Vec::new());
        while begin.elapsed() < time && hits.len() < MAX_HITS {
            bench.interrupt.sleep(EVERY)?;
            trace.take(&mut hits);
        }
        Ok((hits, trace.lost()))
    })?;
    let (calls, dropped) = count(hits, &probes);
    let seconds = time.as_secs_f64();
    let calls = functions(row, seconds, &probes.names, &calls);
    found.lists.extend([calls, drops(row, seconds, &dropped)]);
    if lost > 0 {
        found.notes.push(format!(
            "{row}: {lost} records of functions were lost, so their counts are too small."
        ));
    }
    Ok(())
}

/// Probes with their meanings.
struct Probes {
    list: Vec<(Probe, Option<u32>)>,
    kinds: Vec<Kind>,
    /// Names of the functions, those of the driver first.
    names: Vec<String>,
    /// Position of the packet's length in a record of [`XMIT`].
    length: Option<Range<usize>>,
}

impl Probes {
    /// Returns the probes for a program with one thread and for its device.
    fn of(pid: u32, device: &str) -> Result<Self> {
        let mut all = Self {
            list: Vec::new(),
            kinds: Vec::new(),
            names: Vec::new(),
            length: None,
        };
        let find = |(system, event): (&str, &str)| Tracepoint::find(system, event).map_err(setup);
        for (index, (name, [before, after])) in DRIVER.into_iter().enumerate() {
            all.names.push(name.to_owned());
            // Any thread may send, but only the program reads and writes.
            let (filter, thread) = if index == XMIT {
                (format!("name == \"{device}\""), None)
            } else {
                (String::new(), Some(pid))
            };
            let before = find(before)?;
            if index == XMIT {
                all.length = before.field("len");
            }
            let after = Probe::Tracepoint(find(after)?, filter.clone());
            all.push(
                Kind::Begin(index),
                Probe::Tracepoint(before, filter),
                thread,
            );
            all.push(Kind::End(index), after, thread);
        }
        let free = find(("skb", "kfree_skb"))?;
        let full = free.symbol("FULL_RING");
        let full = full.ok_or_else(|| setup(free.lacks("reason FULL_RING")))?;
        let free = Probe::Tracepoint(free, format!("reason == {full}"));
        all.push(Kind::Dropped, free, None);
        let copy = Probe::Tracepoint(find(("skb", "skb_copy_datagram_iovec"))?, String::new());
        all.push(Kind::Copied, copy, Some(pid));
        let maps = format!("/proc/{pid}/maps");
        let maps = std::fs::read_to_string(&maps).doing(format!("read {maps}"))?;
        for (library, functions) in LIBRARIES {
            let Some(file) = mapped(&maps, library) else {
                continue;
            };
            let found = exported(&file, functions);
            for function in found.doing(format!("read {}", file.display()))? {
                let index = all.names.len();
                all.names.push(function.name.clone());
                all.push(Kind::Begin(index), Probe::Call(function.clone()), Some(pid));
                all.push(Kind::End(index), Probe::Return(function), Some(pid));
            }
        }
        Ok(all)
    }

    fn push(&mut self, kind: Kind, probe: Probe, thread: Option<u32>) {
        self.kinds.push(kind);
        self.list.push((probe, thread));
    }
}

/// The file of a library in `/proc/PID/maps`.
fn mapped(maps: &str, library: &str) -> Option<PathBuf> {
    let files: BTreeSet<&str> = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .collect();
    let is_it = |file: &&&str| {
        file.rsplit('/')
            .next()
            .is_some_and(|name| name.starts_with(library))
    };
    files.iter().find(is_it).map(PathBuf::from)
}

/// Counts calls and their time, and returns the packets that the driver dropped, with the number of
/// packets that waited then.
fn count(mut hits: Vec<Hit>, probes: &Probes) -> (Vec<Calls>, Vec<Dropped>) {
    hits.sort_by_key(|hit| hit.nanoseconds);
    let mut calls = vec![Calls::default(); probes.names.len()];
    let mut dropped = Vec::new();
    // Functions that have begun, by thread: when, and the length of the packet.
    let mut running: HashMap<(u32, usize), (u64, Option<u32>)> = HashMap::new();
    let mut waiting = 0_i64;
    // Packets that have entered the queue in all, and when each read began, by thread, unless it has
    // copied one since.
    let mut entered = 0_i64;
    let mut idle_reads: HashMap<u32, i64> = HashMap::new();
    for hit in &hits {
        let Some(kind) = probes.kinds.get(hit.probe) else {
            continue;
        };
        match *kind {
            Kind::Begin(function) => {
                let length = probes.length.as_ref().filter(|_| function == XMIT);
                let length = length.and_then(|field| hit.u32(field));
                running.insert((hit.tid, function), (hit.nanoseconds, length));
                if function == XMIT {
                    (waiting, entered) = (waiting + 1, entered + 1);
                } else if function == READ {
                    idle_reads.insert(hit.tid, entered);
                }
            }
            Kind::End(function) => {
                // The queue was empty, whatever was missed before.
                if function == READ
                    && let Some(before) = idle_reads.remove(&hit.tid)
                {
                    waiting = waiting.min((entered - before).max(0));
                }
                // A function that began before the records did is left out.
                if let Some((begin, _)) = running.remove(&(hit.tid, function)) {
                    calls[function].count += 1;
                    calls[function].nanoseconds += hit.nanoseconds - begin;
                }
            }
            Kind::Dropped => {
                // Other devices have such queues too.
                if let Some((_, bytes)) = running.get(&(hit.tid, XMIT)) {
                    (waiting, entered) = (waiting - 1, entered - 1);
                    dropped.push(Dropped {
                        nanoseconds: hit.nanoseconds,
                        bytes: *bytes,
                        waiting,
                    });
                }
            }
            Kind::Copied => {
                if running.contains_key(&(hit.tid, READ)) {
                    idle_reads.remove(&hit.tid);
                    // The number of packets that waited when the records began is unknown.
                    waiting = (waiting - 1).max(0);
                }
            }
        }
    }
    (calls, dropped)
}

/// Lists the driver's functions and then the program's, the longest time first.
fn functions(row: &str, seconds: f64, names: &[String], calls: &[Calls]) -> List {
    let all: Vec<(&String, &Calls)> = names.iter().zip(calls).collect();
    let (driver, program) = all.split_at(DRIVER.len());
    let mut program = program.to_vec();
    program.sort_by_key(|(_, calls)| Reverse(calls.nanoseconds));
    let all = driver.iter().map(|of| ("driver", of));
    let all = all.chain(program.iter().map(|of| ("program", of)));
    let called = all.filter(|(_, (_, calls))| calls.count > 0);
    let title = format!(
        "{row}: calls of functions in {seconds:.0} s, and the time until they return; traced calls take longer"
    );
    let rows = called.map(|(owner, (name, calls))| {
        let milliseconds = format!("{:.1}", calls.nanoseconds as f64 / 1e6);
        let count = calls.count.to_string();
        named(*name, [owner.to_owned(), count, milliseconds])
    });
    List::new(title, &["function", "of", "calls", "ms"], rows)
}

fn drops(row: &str, seconds: f64, dropped: &[Dropped]) -> List {
    let middle = quantile(dropped.iter().map(|of| of.waiting as f64), 0.5);
    let middle = middle.map_or_else(String::new, |packets| {
        format!("; packets in the queue then: {packets:.0} (median)")
    });
    let first = dropped.first().map_or(0, |of| of.nanoseconds);
    let title = format!(
        "{row}: {} packets dropped by the driver in {seconds:.0} s{middle}; the first ones",
        dropped.len()
    );
    let rows = dropped.iter().take(LISTED).map(|of| {
        let at = (of.nanoseconds - first) as f64 / 1e6;
        let cells = [cell(of.bytes.map(f64::from), 0), of.waiting.to_string()];
        named(format!("after {at:.3} ms"), cells)
    });
    let columns = ["dropping a frame", "bytes", "packets in the queue"];
    List::new(title, &columns, rows)
}

#[cfg(test)]
mod tests;
