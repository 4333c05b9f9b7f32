//! Counts of events in the kernel: calls of functions and of system calls, by its tracepoints.
//!
//! A tracepoint is at one point of one function, so it counts the function's calls that reach this
//! point. Every kernel with `CONFIG_PERF_EVENTS` has tracepoints, even without kprobes.

use std::ffi::CStr;

use seikan_sys::calls::{self, Calls};
use seikan_sys::perf::{Tracepoint, TracepointCounters};
use seikan_sys::softirq;

use crate::error::{Doing, Result, setup};
use crate::process::{Process, threads};

/// A filter that every event passes.
const ANY: &str = "common_pid >= 0";
/// Number of the receive softirq (include/linux/interrupt.h).
const NET_RX: &str = "vec == 3";

/// A function with a tracepoint: its purpose, system and event of the tracepoint, filter.
struct Function {
    name: &'static str,
    event: [&'static str; 2],
    filter: &'static str,
}

const fn function(name: &'static str, event: [&'static str; 2], filter: &'static str) -> Function {
    Function {
        name,
        event,
        filter,
    }
}

/// Functions on the path of a packet, and others. The source's `handle_tx` passes packets of a
/// guest on, as the first function does here; its `handle_rx` passes packets to a guest, as the
/// second does.
const FUNCTIONS: [Function; 6] = [
    function(
        "transmit function of a NIC (net_dev_start_xmit)",
        ["net", "net_dev_start_xmit"],
        ANY,
    ),
    function(
        "receive function (netif_receive_skb)",
        ["net", "netif_receive_skb"],
        ANY,
    ),
    function("poll function (napi_poll)", ["napi", "napi_poll"], ANY),
    function(
        "receive softirq (net_rx_action)",
        ["irq", "softirq_entry"],
        NET_RX,
    ),
    function(
        "system calls (sys_enter)",
        ["raw_syscalls", "sys_enter"],
        ANY,
    ),
    function("scheduler (sched_switch)", ["sched", "sched_switch"], ANY),
];

/// Functions of virtual machines and virtual switches that the source names, and those that stand
/// for them here, counted by kprobes where the kernel has them.
const PROBED: [&CStr; 7] = [
    c"vcpu_enter_guest",
    c"kvm_vcpu_block",
    c"handle_tx",
    c"handle_rx",
    c"br_handle_frame",
    c"packet_sendmsg",
    c"packet_recvmsg",
];

/// Counters of the machine's calls that are open.
pub(super) struct Counted {
    names: Vec<String>,
    points: Vec<TracepointCounters>,
    probes: Option<Calls>,
}

impl Counted {
    /// Starts to count the calls of functions. Functions that this kernel lacks are left out.
    ///
    /// # Errors
    /// No function can be counted; the error has the reason.
    pub(super) fn functions() -> Result<Self> {
        let cpus = cpus()?;
        let (mut names, mut points, mut refused) = (Vec::new(), Vec::new(), None);
        for function in FUNCTIONS {
            match open(function.event, function.filter, &cpus) {
                Ok(counters) => {
                    names.push(function.name.to_owned());
                    points.push(counters);
                }
                Err(error) => refused = Some(error),
            }
        }
        let possible = calls::can_be_counted();
        let probes = possible.then(|| Calls::open(&PROBED, &cpus).ok()).flatten();
        let probed = probes.iter().flat_map(Calls::functions);
        names.extend(probed.map(|name| name.to_string_lossy().into_owned()));
        match refused {
            Some(error) if names.is_empty() => Err(error),
            _ => Ok(Self {
                names,
                points,
                probes,
            }),
        }
    }

    /// Names of the functions, in the order of [`Self::read`].
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the number of calls of each function so far.
    pub(super) fn read(&mut self) -> Result<Vec<u64>> {
        let mut read = || -> std::io::Result<Vec<u64>> {
            let mut all = Vec::with_capacity(self.names.len());
            for counters in &mut self.points {
                all.extend(counters.read()?);
            }
            if let Some(probes) = &mut self.probes {
                all.extend(probes.read()?);
            }
            Ok(all)
        };
        read().doing("read the counts of calls")
    }
}

/// Counts the system calls of programs.
pub(super) struct SystemCalls(TracepointCounters);

impl SystemCalls {
    /// Starts to count the system calls of all threads that these programs have now.
    ///
    /// # Errors
    /// The kernel refuses; a program has ended.
    pub(super) fn of(programs: &[Process]) -> Result<Self> {
        let mut of_threads = Vec::new();
        for program in programs {
            let threads = threads(program.pid()).doing("list the threads of a program")?;
            of_threads.extend(threads.iter().map(|tid| format!("common_pid == {tid}")));
        }
        let event = ["raw_syscalls", "sys_enter"];
        open(event, &of_threads.join(" || "), &cpus()?).map(Self)
    }

    /// Returns the number of system calls so far.
    pub(super) fn read(&mut self) -> Result<u64> {
        let counts = self.0.read();
        let counts = counts.doing("read the count of system calls")?;
        Ok(counts.into_iter().sum())
    }
}

fn open([system, event]: [&str; 2], filter: &str, cpus: &[u32]) -> Result<TracepointCounters> {
    let tracepoint = Tracepoint::find(system, event).map_err(setup)?;
    TracepointCounters::open(&tracepoint, &[filter.to_owned()], cpus).map_err(setup)
}

/// All processors.
fn cpus() -> Result<Vec<u32>> {
    let counts = softirq::net_rx().map_err(setup)?;
    Ok(counts.iter().map(|count| count.cpu).collect())
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::reproduce::{Source, testing};
    use crate::site::Host;

    #[test]
    fn packets_are_calls_of_the_transmit_and_receive_functions() {
        const PACKETS: u64 = 100;
        testing::short(Source::Profile, |_| {
            let host = Host::create("A", 1)?;
            host.set_up("lo")?;
            let mut counted = Counted::functions()?;
            let before = counted.read()?;
            let sent = host.run(|| -> std::io::Result<()> {
                let socket = UdpSocket::bind("127.0.0.1:0")?;
                let to = socket.local_addr()?;
                (0..PACKETS).try_for_each(|_| socket.send_to(&[0], to).map(drop))
            })?;
            sent.doing("send datagrams")?;
            let after = counted.read()?;
            for name in ["net_dev_start_xmit", "netif_receive_skb", "sys_enter"] {
                let index = counted
                    .names()
                    .iter()
                    .position(|known| known.contains(name));
                let index = index.expect(name);
                let calls = after[index] - before[index];
                assert!(calls >= PACKETS, "{name}: {calls}");
            }
            Ok(())
        });
    }

    #[test]
    fn system_calls_are_those_of_one_program() {
        testing::short(Source::Batch, |bench| {
            let host = Host::create("A", 1)?;
            let dir = crate::cleanup::private_directory()?;
            let start = |name: &str, line: &str| {
                let mut command = std::process::Command::new("sh");
                command.args(["-c", line]);
                Process::start(&host, name, command, dir.path())
            };
            // One asks the kernel for a file again and again, the other spins.
            let calling = [start("calling", "while :; do [ -e / ]; done")?];
            let spinning = [start("spinning", "while :; do :; done")?];
            let mut both = [SystemCalls::of(&calling)?, SystemCalls::of(&spinning)?];
            bench.interrupt.sleep(bench.time())?;
            let [calling, spinning] = &mut both;
            let (many, none) = (calling.read()?, spinning.read()?);
            assert!(many > 100 && many > 10 * none, "{many} {none}");
            Ok(())
        });
    }
}
