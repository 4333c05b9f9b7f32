//! Counts how often a tunnel's programs cross between user space and kernel: system calls for each
//! MB, and frames in each read of a device and in each write.

use std::fmt;

use seikan_load::stats::Spread;
use seikan_sys::netlink::LinkStats;

use super::List;
use super::bench::Measured;
use super::figures::named;
use super::tracepoints::SystemCalls;
use crate::error::Result;
use crate::process::Process;
use crate::site::Host;

/// Headers of a segment of TCP with timestamps over IPv4, in bytes.
const HEADERS: f64 = 52.0;

/// The path of bulk data: read from one device, written to another.
#[derive(Clone, Copy)]
pub(super) struct Through<'a> {
    /// Host and device from which the sending program reads.
    pub(super) read: (&'a Host, &'a str),
    /// Host and device to which the receiving program writes.
    pub(super) written: (&'a Host, &'a str),
    /// The programs of both ends.
    pub(super) programs: &'a [Process],
}

/// Crossings of the programs during a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Crossings {
    /// System calls of both ends together for each 10^6 bytes of packets.
    pub(super) calls_per_megabyte: f64,
    /// Frames of the MTU in each read and in each write, on average.
    pub(super) frames: [f64; 2],
}

impl Through<'_> {
    /// Runs a load, and counts the calls of the programs meanwhile, if there are any.
    ///
    /// # Errors
    /// The error of the load; the kernel cannot count.
    pub(super) fn counting<T>(
        &self,
        load: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Option<Crossings>)> {
        if self.programs.is_empty() {
            return Ok((load()?, None));
        }
        let mut calls = SystemCalls::of(self.programs)?;
        let before = (calls.read()?, self.carried()?);
        let loaded = load()?;
        let after = (calls.read()?, self.carried()?);
        let (host, device) = self.read;
        let mtu = f64::from(host.netlink()?.link(device)?.mtu);
        let crossings = Crossings::of(after.0 - before.0, [before.1, after.1], mtu);
        Ok((loaded, Some(crossings)))
    }

    /// Returns the packets and bytes that were read, and those that were written.
    fn carried(&self) -> Result<[[u64; 2]; 2]> {
        let stats = |(host, device): (&Host, &str)| -> Result<LinkStats> {
            let netlink = host.netlink()?;
            Ok(netlink.link_stats(netlink.link(device)?.index)?)
        };
        let (read, written) = (stats(self.read)?, stats(self.written)?);
        Ok([
            [read.tx_packets, read.tx_bytes],
            [written.rx_packets, written.rx_bytes],
        ])
    }
}

impl Crossings {
    /// Computes the crossings from the number of system calls, and from the packets and bytes read
    /// and written before and after the load.
    fn of(calls: u64, [before, after]: [[[u64; 2]; 2]; 2], mtu: f64) -> Self {
        let grown = |side: usize, of: usize| (after[side][of] - before[side][of]) as f64;
        let frames = [0, 1].map(|side| {
            let bytes = grown(side, 1) / grown(side, 0).max(1.0);
            ((bytes - HEADERS) / (mtu - HEADERS)).max(0.0)
        });
        Self {
            calls_per_megabyte: calls as f64 / (grown(1, 1) / 1e6).max(1e-6),
            frames,
        }
    }
}

/// Returns a table of the crossings of each row: medians over the rounds. Rows without programs are
/// left out.
pub(super) fn list<R: fmt::Display, T>(
    title: String,
    measured: &Measured<'_, R, (T, Option<Crossings>)>,
) -> List {
    let rows = measured.iter().filter_map(|(name, rounds)| {
        let all = rounds.iter().filter_map(|round| round.as_ref()?.1);
        let all: Vec<Crossings> = all.collect();
        let median = |of: fn(&Crossings) -> f64| {
            Some(Spread::of(&all.iter().map(of).collect::<Vec<f64>>())?.median)
        };
        let calls = format!("{:.0}", median(|c| c.calls_per_megabyte)?);
        let frames = [median(|c| c.frames[0])?, median(|c| c.frames[1])?];
        let frames = frames.map(|of| format!("{of:.1}"));
        Some(named(name.to_string(), [calls].into_iter().chain(frames)))
    });
    let columns = [
        "frames at most",
        "system calls per MB, both ends",
        "frames in a read",
        "frames in a write",
    ];
    List::new(title, &columns, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: [[u64; 2]; 2] = [[7, 700], [9, 900]];

    #[test]
    fn frames_and_calls_are_those_of_the_load_alone() {
        // 10 reads of 4 full frames, 40 writes of one; 100 calls for 60,000 bytes.
        let reads = [7 + 10, 700 + 10 * (4 * 1_448 + 52)];
        let writes = [9 + 40, 900 + 40 * 1_500];
        let crossings = Crossings::of(100, [BEFORE, [reads, writes]], 1_500.0);
        assert_eq!(crossings.frames, [4.0, 1.0]);
        assert!((crossings.calls_per_megabyte - 100.0 / 0.06).abs() < 1e-6);
    }

    #[test]
    fn nothing_carried_is_no_division_by_zero() {
        let nothing = Crossings::of(0, [BEFORE, BEFORE], 1_500.0);
        assert_eq!(
            (nothing.calls_per_megabyte, nothing.frames),
            (0.0, [0.0; 2])
        );
    }

    #[test]
    fn rows_without_a_program_are_left_out() {
        let crossings = Crossings {
            calls_per_megabyte: 812.4,
            frames: [4.0, 0.96],
        };
        let measured = Measured {
            rows: &["bare", "read 4, write 1"],
            results: vec![
                vec![Some(((), None))],
                vec![Some(((), Some(crossings))), None],
            ],
        };
        let list = list("t".into(), &measured);
        assert_eq!(list.rows, [["read 4, write 1", "812", "4.0", "1.0"]]);
    }
}
