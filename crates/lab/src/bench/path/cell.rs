//! The paths of a comparison: delay, rate, queue, loss, reordering and congestion control, each with
//! one value.

use std::fmt;
use std::str::FromStr;

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::error::{Result, usage};
use crate::site::Congestion;
use crate::wire::{Faults, WireFaults};

/// Rate of the hosts' NICs in bit/s: bursts reach the path's queue at this rate.
const NIC_BITS: u64 = 10_000_000_000;
/// Bytes of a full frame with its Ethernet header.
const FRAME: f64 = 1514.0;
/// Minimum size of a queue in bytes, in full frames.
const LEAST_QUEUE: f64 = 2.0;
/// Size of a policer's bucket, as time at its rate in seconds; at least [`LEAST_BUCKET`].
const BUCKET_SECONDS: f64 = 0.02;
/// The smallest bucket, in full frames.
const LEAST_BUCKET: f64 = 32.0;
/// Number of later full frames after which a frame that is held back arrives.
const HELD_BACK: f64 = 8.0;

/// The queue before the slowest link of a path.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Queue {
    /// A number of frames of any length.
    Frames(u32),
    /// A multiple of the bandwidth-delay product.
    Bdp(f64),
    /// No queue: a token bucket that holds 20 ms at the rate drops frames beyond the rate.
    Policer,
}

impl FromStr for Queue {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let refused =
            || "use BDPs such as 0.25, packets such as 32p (1 to 100000), or `policer`".to_owned();
        if text == "policer" {
            return Ok(Self::Policer);
        }
        if let Some(frames) = text.strip_suffix('p') {
            let frames = frames.parse().ok();
            let frames = frames.filter(|frames| (1..=100_000).contains(frames));
            return frames.map(Self::Frames).ok_or_else(refused);
        }
        let times = text.parse().ok();
        let times = times.filter(|times| (0.01..=100.0).contains(times));
        times.map(Self::Bdp).ok_or_else(refused)
    }
}

impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frames(frames) => write!(f, "queue of {frames} packets"),
            Self::Bdp(times) => write!(f, "queue of {times} BDP"),
            Self::Policer => f.write_str("policer"),
        }
    }
}

/// A path, the same in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Round trip of an empty path, in milliseconds.
    pub rtt_ms: f64,
    /// Rate of the slowest link, in Mbit/s of Ethernet frames.
    pub rate_mbit: f64,
    /// The queue before the slowest link.
    pub queue: Queue,
    /// Lost frames in each direction, in percent.
    pub loss_percent: f64,
    /// Mean number of consecutive lost frames.
    pub loss_burst: f64,
    /// Share of frames that later ones overtake, in percent.
    pub reorder_percent: f64,
    /// Congestion control of both hosts.
    pub congestion: Congestion,
}

impl Default for Cell {
    fn default() -> Self {
        Self {
            rtt_ms: 40.0,
            rate_mbit: 300.0,
            queue: Queue::Bdp(1.0),
            loss_percent: 0.0,
            loss_burst: 1.0,
            reorder_percent: 0.0,
            congestion: Congestion::Cubic,
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rtt, rate, queue) = (self.rtt_ms, self.rate_mbit, self.queue);
        write!(f, "{rtt} ms, {rate} Mbit/s, {queue}")?;
        if self.loss_percent > 0.0 {
            write!(f, ", {} % loss", self.loss_percent)?;
        }
        if self.loss_percent > 0.0 && self.loss_burst > 1.0 {
            write!(f, " in bursts of {}", self.loss_burst)?;
        }
        if self.reorder_percent > 0.0 {
            write!(f, ", {} % reordered", self.reorder_percent)?;
        }
        write!(f, ", {}", self.congestion.name().to_uppercase())
    }
}

impl Cell {
    /// Returns the faults of the wire that emulates the path.
    pub(super) fn faults(&self) -> WireFaults {
        let bytes_per_second = self.rate_mbit * 1e6 / 8.0;
        let bdp = bytes_per_second * self.rtt_ms / 1e3;
        let (bytes, frames) = match self.queue {
            Queue::Frames(frames) => (u64::MAX, frames),
            Queue::Bdp(times) => ((bdp * times).max(LEAST_QUEUE * FRAME) as u64, 0),
            Queue::Policer => {
                let bucket = bytes_per_second * BUCKET_SECONDS;
                (bucket.max(LEAST_BUCKET * FRAME) as u64, 0)
            }
        };
        WireFaults {
            punctual: true,
            ..WireFaults::both(Faults {
                delay_us: (self.rtt_ms * 500.0) as u64,
                loss: self.loss_percent / 100.0,
                loss_burst: self.loss_burst,
                reorder: self.reorder_percent / 100.0,
                reorder_us: (HELD_BACK * FRAME / bytes_per_second * 1e6) as u64,
                nic_bits: NIC_BITS,
                nic_jitter_us: (FRAME / bytes_per_second * 1e6) as u64,
                rate_bits: (self.rate_mbit * 1e6) as u64,
                queue_bytes: bytes,
                queue_frames: frames,
                policed: self.queue == Queue::Policer,
                ..Faults::default()
            })
        }
    }

    /// Returns the goodput in Mbit/s that RFC 9438 predicts for one flow of CUBIC with segments of
    /// 1,448 bytes, at most 95 % of the rate; `None` for paths whose losses are not single and
    /// independent.
    ///
    /// The average window is the larger one of CUBIC's own region (section 5.1, with C = 0.4 and
    /// beta = 0.7) and of the Reno-friendly region (section 4.3: sqrt(3 / 2p)).
    pub fn predicted_mbit(&self) -> Option<f64> {
        let p = self.loss_percent / 100.0;
        let plain = self.loss_burst <= 1.0 && self.reorder_percent <= 0.0;
        if p <= 0.0 || !plain || self.congestion != Congestion::Cubic {
            return None;
        }
        let rtt = self.rtt_ms / 1e3;
        let own = 1.054 * rtt.powf(0.75) / p.powf(0.75);
        let shared = (1.5 / p).sqrt();
        let rate = own.max(shared) * 1448.0 * 8.0 / rtt / 1e6;
        Some(rate.min(0.95 * self.rate_mbit))
    }
}

/// Options of a comparison over emulated paths. Lists are combined: there is one path for each
/// combination of their values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, Args)]
pub struct PathOptions {
    /// Measure over emulated paths: seven, or all combinations of the options below
    #[arg(long)]
    pub path: bool,
    /// Round-trip times [default: 40]
    #[arg(long, value_name = "MS,...", value_delimiter = ',', requires = "path")]
    pub rtt: Vec<f64>,
    /// Rates of the slowest link [default: 300]
    #[arg(
        long,
        value_name = "MBIT/S,...",
        value_delimiter = ',',
        requires = "path"
    )]
    pub rate: Vec<f64>,
    /// Queues before the slowest link, in bandwidth-delay products (0.25), packets (32p), or
    /// `policer` [default: 1]
    #[arg(
        long,
        value_name = "QUEUE,...",
        value_delimiter = ',',
        requires = "path"
    )]
    pub queue: Vec<Queue>,
    /// Loss in each direction [default: 0]
    #[arg(
        long,
        value_name = "PERCENT,...",
        value_delimiter = ',',
        requires = "path"
    )]
    pub loss: Vec<f64>,
    /// Mean number of consecutive lost packets [default: 1, independent losses]
    #[arg(
        long,
        value_name = "PACKETS,...",
        value_delimiter = ',',
        requires = "path"
    )]
    pub burst: Vec<f64>,
    /// Share of packets that eight later packets overtake [default: 0]
    #[arg(
        long,
        value_name = "PERCENT,...",
        value_delimiter = ',',
        requires = "path"
    )]
    pub reorder: Vec<f64>,
}

impl PathOptions {
    /// Returns the paths to measure.
    ///
    /// # Errors
    /// A value is invalid.
    pub fn cells(&self, congestion: Option<Congestion>) -> Result<Vec<Cell>> {
        check("--rtt", &self.rtt, 0.1, 2000.0)?;
        check("--rate", &self.rate, 0.1, 10_000.0)?;
        check("--loss", &self.loss, 0.0, 50.0)?;
        check("--burst", &self.burst, 1.0, 1000.0)?;
        check("--reorder", &self.reorder, 0.0, 50.0)?;
        let given = [
            &self.rtt,
            &self.rate,
            &self.loss,
            &self.burst,
            &self.reorder,
        ];
        let named = self.queue.is_empty() && given.iter().all(|list| list.is_empty());
        let mut cells = if named {
            default_cells()
        } else {
            let start = vec![Cell::default()];
            let cells = each(start, &self.rtt, |cell, value| cell.rtt_ms = value);
            let cells = each(cells, &self.rate, |cell, value| cell.rate_mbit = value);
            let cells = each(cells, &self.queue, |cell, value| cell.queue = value);
            let cells = each(cells, &self.loss, |cell, value| cell.loss_percent = value);
            let cells = each(cells, &self.burst, |cell, value| cell.loss_burst = value);
            each(cells, &self.reorder, |cell, value| {
                cell.reorder_percent = value;
            })
        };
        if let Some(congestion) = congestion {
            for cell in &mut cells {
                cell.congestion = congestion;
            }
            let mut seen: Vec<Cell> = Vec::new();
            cells.retain(|cell| {
                let new = !seen.contains(cell);
                seen.push(*cell);
                new
            });
        }
        Ok(cells)
    }
}

/// Returns each cell with each value; without values, the cells as they are.
fn each<T: Copy>(cells: Vec<Cell>, values: &[T], set: impl Fn(&mut Cell, T)) -> Vec<Cell> {
    if values.is_empty() {
        return cells;
    }
    let with = |cell: &Cell, value: T| {
        let mut cell = *cell;
        set(&mut cell, value);
        cell
    };
    cells
        .iter()
        .flat_map(|cell| values.iter().map(move |value| (cell, *value)))
        .map(|(cell, value)| with(cell, value))
        .collect()
}

/// Returns the paths that are measured by default: a clean path, a short queue, loss with either
/// congestion control, a slow path and a fast one.
fn default_cells() -> Vec<Cell> {
    let usual = Cell::default();
    let short = Cell {
        queue: Queue::Frames(32),
        ..usual
    };
    let lossy = Cell {
        loss_percent: 0.1,
        ..usual
    };
    let bbr = |cell: Cell| Cell {
        congestion: Congestion::Bbr,
        ..cell
    };
    let slow = Cell {
        rtt_ms: 20.0,
        rate_mbit: 20.0,
        ..usual
    };
    let fast = Cell {
        rtt_ms: 20.0,
        rate_mbit: 1000.0,
        ..usual
    };
    let very_lossy = Cell {
        loss_percent: 1.0,
        ..usual
    };
    let cells = [usual, short, bbr(short), lossy, bbr(very_lossy), slow, fast];
    cells.to_vec()
}

fn check(option: &str, values: &[f64], least: f64, most: f64) -> Result<()> {
    match values.iter().find(|value| !(least..=most).contains(*value)) {
        Some(value) => Err(usage(format!(
            "{option} {value} is out of range: use {least} to {most}"
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_read() {
        assert_eq!("32p".parse(), Ok(Queue::Frames(32)));
        assert_eq!("0.25".parse(), Ok(Queue::Bdp(0.25)));
        assert_eq!("policer".parse(), Ok(Queue::Policer));
        for wrong in ["0p", "p", "-1", "nan", "1e9", ""] {
            assert!(wrong.parse::<Queue>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_value_is_combined_with_every_other() {
        let options = PathOptions {
            rtt: vec![1.0, 20.0],
            loss: vec![0.0, 0.1, 1.0],
            ..PathOptions::default()
        };
        let cells = options.cells(None).expect("cells");
        assert_eq!(cells.len(), 6);
        let last = Cell {
            rtt_ms: 20.0,
            loss_percent: 1.0,
            ..Cell::default()
        };
        assert_eq!(cells[5], last);
    }

    #[test]
    fn a_congestion_control_for_all_leaves_no_path_twice() {
        let options = PathOptions::default();
        let both = options.cells(None).expect("cells");
        let one = options.cells(Some(Congestion::Cubic)).expect("cells");
        assert_eq!((both.len(), one.len()), (7, 6));
    }

    #[test]
    fn a_value_without_meaning_is_named() {
        let options = PathOptions {
            loss: vec![101.0],
            ..PathOptions::default()
        };
        let error = options.cells(None).expect_err("refused").to_string();
        assert!(error.contains("--loss 101"), "{error}");
    }

    #[test]
    fn a_queue_is_bytes_or_frames() {
        let with = |queue| {
            Cell {
                queue,
                ..Cell::default()
            }
            .faults()
            .a_to_b
        };
        // 300 Mbit/s for 40 ms are 1.5 MB.
        assert_eq!(with(Queue::Bdp(0.25)).queue_bytes, 375_000);
        assert_eq!(with(Queue::Frames(32)).queue_frames, 32);
        let policer = with(Queue::Policer);
        assert_eq!((policer.queue_bytes, policer.policed), (750_000, true));
    }

    /// RFC 9438, section 5.1, for a round trip of 0.1 s: 5,926 packets at a loss of 10^-6, and 12,
    /// as with Reno, at 10^-2.
    #[test]
    fn predictions_are_those_of_the_rfc() {
        let cell = |rtt_ms: f64, loss_percent: f64| Cell {
            rtt_ms,
            loss_percent,
            rate_mbit: 10_000_000.0,
            ..Cell::default()
        };
        let window = |cell: Cell| {
            cell.predicted_mbit().expect("a prediction") * 1e6 / 8.0 / 1448.0 * cell.rtt_ms / 1e3
        };
        assert!((window(cell(100.0, 1e-4)) / 5926.0 - 1.0).abs() < 0.01);
        // sqrt(1.5 / 0.01) is 12.2.
        assert!((window(cell(100.0, 1.0)) / 12.2 - 1.0).abs() < 0.01);
        let bbr = Cell {
            congestion: Congestion::Bbr,
            ..cell(100.0, 1.0)
        };
        assert_eq!(bbr.predicted_mbit(), None);
    }
}
