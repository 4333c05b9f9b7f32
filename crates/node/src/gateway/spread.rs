//! Distribution of received packets over the processors, from two samples of the kernel's counters.

use seikan_sys::softirq;
use serde::{Deserialize, Serialize};

/// Softirqs per second below which one processor is enough.
const LOAD: f64 = 10_000.0;
/// Share from which on one processor counts as handling everything.
const SHARE: f64 = 0.9;

/// A sample of the kernel's counters and settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Softirqs {
    /// Runs of the receive softirq on each processor since the start of the machine.
    pub net_rx: Vec<Runs>,
    /// Processors to which the receive queues of the NICs on both sides are spread.
    pub queues: Vec<Queue>,
}

/// Runs of the receive softirq on one processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Runs {
    /// Number of the processor.
    pub cpu: u32,
    /// Number of runs.
    pub runs: u64,
}

/// A receive queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Queue {
    /// Its NIC.
    pub interface: String,
    /// The queue, such as `rx-0`.
    pub queue: String,
    /// Processors that packets are spread to (RPS). If empty, the processor that handles the
    /// interrupt processes them.
    pub cpus: Vec<u32>,
}

/// Result of two samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Spread {
    /// Runs of the receive softirq per second, of each processor.
    pub net_rx_per_s: Vec<f64>,
    /// The processor that handles everything, if one does.
    pub all_on: Option<u32>,
    /// Its share, 0 to 1; 0 without any runs.
    pub share: f64,
    /// Commands that spread them, if possible.
    pub commands: Vec<String>,
}

/// Compares two samples taken `seconds` apart; `None` if they are of different processors.
pub fn spread(before: &Softirqs, after: &Softirqs, seconds: f64) -> Option<Spread> {
    let same = before
        .net_rx
        .iter()
        .map(|r| r.cpu)
        .eq(after.net_rx.iter().map(|r| r.cpu));
    if !same || after.net_rx.is_empty() || seconds <= 0.0 {
        return None;
    }
    let pairs = before.net_rx.iter().zip(&after.net_rx);
    let rates: Vec<f64> = pairs
        .map(|(b, a)| a.runs.saturating_sub(b.runs) as f64 / seconds)
        .collect();
    let total: f64 = rates.iter().sum();
    let busiest = (0..rates.len()).max_by(|a, b| rates[*a].total_cmp(&rates[*b]))?;
    let share = if total > 0.0 {
        rates[busiest] / total
    } else {
        0.0
    };
    let all = rates.len() > 1 && total > LOAD && share > SHARE;
    Some(Spread {
        all_on: all.then(|| after.net_rx[busiest].cpu),
        share,
        commands: if all { commands(after) } else { Vec::new() },
        net_rx_per_s: rates,
    })
}

/// Returns commands that spread every queue over all processors, where that is not done yet.
fn commands(softirqs: &Softirqs) -> Vec<String> {
    let all: Vec<u32> = softirqs.net_rx.iter().map(|runs| runs.cpu).collect();
    let unspread = softirqs.queues.iter().filter(|queue| queue.cpus.len() < 2);
    unspread
        .map(
            |Queue {
                 interface, queue, ..
             }| {
                let mask = softirq::mask(&all);
                format!("echo {mask} > /sys/class/net/{interface}/queues/{queue}/rps_cpus")
            },
        )
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(runs: &[u64], cpus: &[u32]) -> Softirqs {
        Softirqs {
            net_rx: (0..)
                .zip(runs)
                .map(|(cpu, runs)| Runs { cpu, runs: *runs })
                .collect(),
            queues: vec![Queue {
                interface: "eth1".into(),
                queue: "rx-0".into(),
                cpus: cpus.to_vec(),
            }],
        }
    }

    fn result(runs: &[u64], cpus: &[u32]) -> Spread {
        let before = sample(&vec![1000; runs.len()], cpus);
        let after = runs.iter().map(|n| n + 1000).collect::<Vec<_>>();
        spread(&before, &sample(&after, cpus), 2.0).unwrap()
    }

    #[test]
    fn all_on_one_core_is_said_with_the_command_that_spreads_it() {
        let result = result(&[1000, 39_000, 0, 0], &[]);
        assert_eq!(result.net_rx_per_s, [500.0, 19_500.0, 0.0, 0.0]);
        assert_eq!((result.all_on, result.share), (Some(1), 0.975));
        assert_eq!(
            result.commands,
            ["echo f > /sys/class/net/eth1/queues/rx-0/rps_cpus"]
        );
    }

    #[test]
    fn one_core_is_enough_for_little() {
        assert_eq!(result(&[19_000, 0], &[]).all_on, None);
        assert_eq!(result(&[0, 0], &[]).share, 0.0);
    }

    #[test]
    fn spread_queues_need_no_command() {
        assert_eq!(result(&[30_000, 20_000], &[]).all_on, None);
    }

    #[test]
    fn a_machine_with_one_core_has_no_other() {
        assert_eq!(result(&[100_000], &[]).all_on, None);
    }

    #[test]
    fn where_packets_are_spread_already_there_is_no_command() {
        let result = result(&[100_000, 0], &[0, 1]);
        assert_eq!((result.all_on, result.commands.len()), (Some(0), 0));
    }

    #[test]
    fn samples_of_different_processors_have_no_result() {
        assert_eq!(spread(&sample(&[1], &[]), &sample(&[1, 2], &[]), 1.0), None);
        assert_eq!(spread(&sample(&[1], &[]), &sample(&[1], &[]), 0.0), None);
    }
}
