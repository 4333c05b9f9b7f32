//! Processors: use of their time, and received packets.

use seikan_observe::Subject;
use seikan_observe::metric;

use super::Output;
use super::file::Counters;

/// The files.
#[derive(Debug)]
pub(super) struct Cpu {
    stat: Option<Counters>,
    softnet: Option<Counters>,
    softirqs: Option<Counters>,
    tick_ns: u64,
    /// The processors that are online, as in `/proc/stat`.
    online: Vec<u32>,
}

const STAT: &str = "processor time";
const SOFTNET: &str = "the processors' receive queues";
const SOFTIRQS: &str = "runs of the receive softirq";

impl Cpu {
    /// Opens the files that exist.
    pub(super) fn open(output: &mut Output) -> Self {
        let mut open = |what: &str, path: &str| output.keep(what, Counters::open_readable(path));
        Cpu {
            stat: open(STAT, "/proc/stat"),
            softnet: open(SOFTNET, "/proc/thread-self/net/softnet_stat"),
            softirqs: open(SOFTIRQS, "/proc/softirqs"),
            tick_ns: super::program::tick_ns(),
            online: Vec::new(),
        }
    }

    /// Samples the times and packet counts of all online processors.
    pub(super) fn sample(&mut self, output: &mut Output) {
        if let Some(file) = &mut self.stat
            && let Some(text) = output.keep(STAT, file.read())
        {
            self.online.clear();
            for (cpu, times) in text.lines().filter_map(parse_times) {
                self.online.push(cpu);
                let subject = Subject::Cpu(cpu);
                for (name, ticks) in times {
                    output.counter(&subject, name, ticks.saturating_mul(self.tick_ns));
                }
            }
        }
        if let Some(file) = &mut self.softnet
            && let Some(text) = output.keep(SOFTNET, file.read())
        {
            for (row, line) in text.lines().enumerate() {
                let Some(softnet) = parse_softnet(line) else {
                    continue;
                };
                let Some(cpu) = softnet.cpu.or_else(|| self.online.get(row).copied()) else {
                    continue;
                };
                let subject = Subject::Cpu(cpu);
                output.counter(&subject, metric::SOFTNET_PROCESSED, softnet.processed);
                output.counter(&subject, metric::SOFTNET_DROPPED, softnet.dropped);
                output.counter(&subject, metric::SOFTNET_TIME_SQUEEZE, softnet.time_squeeze);
                if let Some(received) = softnet.received_rps {
                    output.counter(&subject, metric::SOFTNET_RECEIVED_RPS, received);
                }
            }
        }
        if let Some(file) = &mut self.softirqs
            && let Some(text) = output.keep(SOFTIRQS, file.read())
        {
            parse_net_rx(&text, |cpu, runs| {
                // Processors that are possible but absent are listed as well.
                if self.online.is_empty() || self.online.contains(&cpu) {
                    output.counter(&Subject::Cpu(cpu), metric::NET_RX, runs);
                }
            });
        }
    }
}

/// Parses a line `cpuN user nice system idle iowait irq softirq steal ...`, in ticks (proc(5)).
fn parse_times(line: &str) -> Option<(u32, Vec<(&'static str, u64)>)> {
    let mut words = line.strip_prefix("cpu")?.split_ascii_whitespace();
    // The line for all processors together has a space after `cpu`.
    if line.as_bytes().get(3).is_none_or(u8::is_ascii_whitespace) {
        return None;
    }
    let cpu = words.next()?.parse().ok()?;
    let ticks: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
    let at = |place: usize| ticks.get(place).copied();
    let mut times = vec![
        (metric::USER_NS, at(0)?.saturating_add(at(1)?)),
        (metric::SYSTEM_NS, at(2)?),
        (metric::IDLE_NS, at(3)?.saturating_add(at(4)?)),
        (metric::SOFTIRQ_NS, at(5)?.saturating_add(at(6)?)),
    ];
    times.extend(at(7).map(|steal| (metric::STEAL_NS, steal)));
    Some((cpu, times))
}

/// A line of `/proc/net/softnet_stat`.
#[derive(Debug, PartialEq, Eq)]
struct Softnet {
    processed: u64,
    dropped: u64,
    time_squeeze: u64,
    received_rps: Option<u64>,
    cpu: Option<u32>,
}

/// Parses hexadecimal columns (`softnet_seq_show()`, net/core/net-procfs.c): 9 at first,
/// received_rps as the 10th since Linux 2.6.35, the processor as the 13th since 5.10.
fn parse_softnet(line: &str) -> Option<Softnet> {
    let columns: Option<Vec<u64>> = line
        .split_ascii_whitespace()
        .map(|word| u64::from_str_radix(word, 16).ok())
        .collect();
    let columns = columns?;
    let at = |place: usize| columns.get(place).copied();
    Some(Softnet {
        processed: at(0)?,
        dropped: at(1)?,
        time_squeeze: at(2)?,
        received_rps: at(9),
        cpu: at(12).and_then(|cpu| cpu.try_into().ok()),
    })
}

/// Parses the line `NET_RX` below the line of processors.
fn parse_net_rx(text: &str, mut each: impl FnMut(u32, u64)) {
    let mut lines = text.lines();
    let Some(numbers) = lines.next() else {
        return;
    };
    let Some(counts) = lines.find_map(|line| line.trim_start().strip_prefix("NET_RX:")) else {
        return;
    };
    let numbers = numbers.split_ascii_whitespace();
    for (number, count) in numbers.zip(counts.split_ascii_whitespace()) {
        let number = number.strip_prefix("CPU").and_then(|n| n.parse().ok());
        if let (Some(number), Ok(count)) = (number, count.parse()) {
            each(number, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_grouped_by_purpose() {
        let (cpu, times) = parse_times("cpu3 10 2 30 40 5 6 7 8 0 0").unwrap();
        assert_eq!(cpu, 3);
        let expected = [
            (metric::USER_NS, 12),
            (metric::SYSTEM_NS, 30),
            (metric::IDLE_NS, 45),
            (metric::SOFTIRQ_NS, 13),
            (metric::STEAL_NS, 8),
        ];
        assert_eq!(times, expected);
    }

    #[test]
    fn only_lines_of_one_processor_are_taken() {
        for line in [
            "cpu  1 2 3 4 5 6 7 8",
            "intr 5",
            "cpu0 1 2",
            "cpux 1 2 3 4 5 6 7",
            "cpu",
            "",
        ] {
            assert_eq!(parse_times(line), None, "{line}");
        }
    }

    #[test]
    fn softnet_columns_of_old_and_new_kernels() {
        let oldest =
            "0000000f 00000002 00000003 00000000 00000000 00000000 00000000 00000000 00000000";
        let old = parse_softnet(oldest).unwrap();
        assert_eq!((old.processed, old.dropped, old.time_squeeze), (15, 2, 3));
        assert_eq!((old.received_rps, old.cpu), (None, None));
        let middle = format!("{oldest} 00000010 00000000");
        let middle = parse_softnet(&middle).unwrap();
        assert_eq!((middle.received_rps, middle.cpu), (Some(16), None));
        let new = format!("{oldest} 0001f305 00000000 00000000 00000007 00000000 00000000");
        let new = parse_softnet(&new).unwrap();
        assert_eq!((new.received_rps, new.cpu), (Some(0x1f305), Some(7)));
        for wrong in ["", "1 2", "x y z", "0000000f 2 3 \u{fffd}"] {
            assert_eq!(parse_softnet(wrong), None);
        }
    }

    #[test]
    fn the_receive_line_is_read_by_processor() {
        let text = "        CPU0       CPU2\n      NET_TX:   3   4\n      NET_RX:   62   12\n";
        let mut found = Vec::new();
        parse_net_rx(text, |cpu, runs| found.push((cpu, runs)));
        assert_eq!(found, [(0, 62), (2, 12)]);
        for wrong in [
            "",
            "CPU0\nTIMER: 1\n",
            "CPU0\nNET_RX: x\n",
            "no\nNET_RX: 1\n",
        ] {
            parse_net_rx(wrong, |_, _| panic!("{wrong}"));
        }
    }
}
