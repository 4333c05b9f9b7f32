//! A wire with faults: two TAP devices, one in each of two hosts, and a program that carries frames
//! between them.
//!
//! `Wire::between` starts the program (`seikan lab wire`: [`carry`]), which makes the devices;
//! [`Wire::set`] changes the faults while it runs. [`Wire::counts`] returns the fate of all frames,
//! with which a diagnosis is compared. A wire without faults passes super-packets on as a whole;
//! faults of the path apply to each frame of a super-packet. The program has a process of its own
//! ([`Wire::pid`]), which ends with the lab.

mod carrier;
mod direction;
mod frame;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use seikan_sys::netns::NetNs;
use serde::{Deserialize, Serialize};

use crate::error::{Doing, LabError, Result, setup, usage};
use crate::program;

pub use carrier::{CarrierOptions, carry};

/// Faults of one direction of an emulated link. The default is none; shares are 0 to 1 and drawn
/// for each frame.
///
/// In this order: the sending NIC's faults (`broken_*`), its delay and its rate, then the path's:
/// black hole, loss, rate, delay, holding back, duplication.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Delay of every frame, in microseconds, 0 to 10 s.
    pub delay_us: u64,
    /// Further delay, uniform from 0 to this many microseconds, that keeps the order.
    pub jitter_us: u64,
    /// Share of frames that are lost.
    pub loss: f64,
    /// Mean number of consecutive lost frames (Gilbert's model of 1960, whose bad state loses every
    /// frame). With 1 or less, losses are independent.
    pub loss_burst: f64,
    /// Share of frames that are held back by `reorder_us`, so that later ones overtake them.
    pub reorder: f64,
    /// Time for which frames are held back, in microseconds.
    pub reorder_us: u64,
    /// Share of frames that arrive twice.
    pub duplicate: f64,
    /// Rate of the sending NIC, in bits per second. Frames reach the path's queue no faster than
    /// this, and none is dropped before the queue. 0: no limit.
    pub nic_bits: u64,
    /// Maximum time for which the sending host holds back a packet (or super-packet) before the path,
    /// uniform from 0, in microseconds. It keeps the order. Without it, the acknowledgements of two
    /// flows arrive in a fixed pattern, and a full queue may drop packets of one flow only (S. Floyd
    /// and V. Jacobson, On Traffic Phase Effects in Packet-Switched Gateways, 1992). The time of a
    /// packet at the path's rate prevents that.
    pub nic_jitter_us: u64,
    /// Rate of the path in bits per second, counting frames with their Ethernet header; 0: no
    /// limit.
    pub rate_bits: u64,
    /// Size of the queue in bytes. A frame that does not fit is dropped.
    pub queue_bytes: u64,
    /// Size of the queue in frames of any length; 0: limited only by `queue_bytes`.
    pub queue_frames: u32,
    /// Whether the rate is a policer, with a bucket of `queue_bytes`: frames within the rate do not
    /// wait, others are dropped.
    pub policed: bool,
    /// Frames whose IP packet is longer than this many bytes are dropped silently.
    pub black_hole_bytes: Option<u32>,
    /// Share of the frames whose checksum is left to the NIC that leave it without a checksum. They
    /// arrive. There are none if the sender's `tx` offload is off.
    pub broken_checksum: f64,
    /// Share of the super-packets whose segmentation is left to the NIC that are lost. There are
    /// none if the sender's `tso` (and `tx-udp-segmentation`) is off.
    pub broken_segmentation: f64,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            delay_us: 0,
            jitter_us: 0,
            loss: 0.0,
            loss_burst: 1.0,
            reorder: 0.0,
            reorder_us: 3000,
            duplicate: 0.0,
            nic_bits: 0,
            nic_jitter_us: 0,
            rate_bits: 0,
            queue_bytes: 256 << 10,
            queue_frames: 0,
            policed: false,
            black_hole_bytes: None,
            broken_checksum: 0.0,
            broken_segmentation: 0.0,
        }
    }
}

impl Faults {
    /// Whether frames pass unchanged and without delay.
    fn is_none(&self) -> bool {
        // The fields that are kept have an effect only together with another fault.
        let healthy = Self {
            loss_burst: self.loss_burst,
            reorder_us: self.reorder_us,
            queue_bytes: self.queue_bytes,
            queue_frames: self.queue_frames,
            policed: self.policed,
            ..Self::default()
        };
        *self == healthy
    }

    fn check(&self) -> Result<()> {
        let shares = [
            ("loss", self.loss),
            ("reorder", self.reorder),
            ("duplicate", self.duplicate),
            ("broken_checksum", self.broken_checksum),
            ("broken_segmentation", self.broken_segmentation),
        ];
        for (name, share) in shares {
            if !(0.0..=1.0).contains(&share) {
                return Err(usage(format!(
                    "{name} of a wire is {share}: use a share from 0 to 1"
                )));
            }
        }
        // The time in the good state is at least one frame.
        let most = 1.0 - 1.0 / (1.0 + self.loss_burst.max(1.0));
        if !self.loss_burst.is_finite() || (self.loss_burst > 1.0 && self.loss > most) {
            return Err(usage(format!(
                "a loss of {} in bursts of {} frames on a wire: use a finite length, and at most a share of {most}",
                self.loss, self.loss_burst
            )));
        }
        for (name, time) in [
            ("delay_us", self.delay_us),
            ("jitter_us", self.jitter_us),
            ("reorder_us", self.reorder_us),
        ] {
            if time > 10_000_000 {
                return Err(usage(format!(
                    "{name} of a wire is {time}: use at most 10 seconds"
                )));
            }
        }
        Ok(())
    }
}

/// Faults of an emulated link, by direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WireFaults {
    /// Faults from host A to host B, beginning with A's NIC.
    pub a_to_b: Faults,
    /// From host B to host A.
    pub b_to_a: Faults,
    /// Seed of the random faults; the same seed repeats them. Used only when the wire is made, not
    /// by [`Wire::set`].
    pub seed: u64,
    /// Whether the program has real-time priority, so that other load on this machine does not
    /// delay frames; used only when the wire is made. Without the privilege, the program has normal
    /// priority.
    pub punctual: bool,
}

impl WireFaults {
    /// Returns the same faults in both directions.
    pub fn both(faults: Faults) -> Self {
        Self {
            a_to_b: faults,
            b_to_a: faults,
            ..Self::default()
        }
    }
}

/// Counts of the frames of one direction since the link was made. A super-packet counts as its
/// frames.
///
/// `frames + duplicated = delivered + lost + overflowed + black_holed + unsegmented + refused +
/// shed + under_way`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectionCounts {
    /// Frames that the sending host put on the wire.
    pub frames: u64,
    /// Their bytes, with Ethernet headers.
    pub bytes: u64,
    /// Frames that the receiving host accepted.
    pub delivered: u64,
    /// Frames dropped by `loss`.
    pub lost: u64,
    /// Frames dropped because the queue was full.
    pub overflowed: u64,
    /// Frames dropped because they were longer than `black_hole_bytes`.
    pub black_holed: u64,
    /// Frames dropped by `broken_segmentation`.
    pub unsegmented: u64,
    /// Frames dropped because the receiving host's device refused them.
    pub refused: u64,
    /// Frames dropped because more than 256 MiB were in transit.
    pub shed: u64,
    /// Packets that never reached the wire, because the sending device's queue was full while the
    /// wire was too slow. Not part of `frames`; a super-packet counts once.
    pub missed: u64,
    /// Frames without a checksum, by `broken_checksum`. They arrive.
    pub unfilled: u64,
    /// Frames held back by `reorder`.
    pub held_back: u64,
    /// Frames made by `duplicate`.
    pub duplicated: u64,
    /// Frames in transit: neither delivered nor dropped so far.
    pub under_way: u64,
    /// Frames that arrived more than [`LATE`] after their time, because this machine was busy.
    pub late: u64,
    /// The longest delay of a frame beyond its time, in microseconds.
    pub late_us: u64,
}

/// Time after which a frame counts as late: 2 % of a delay of 10 ms.
pub const LATE: Duration = Duration::from_micros(200);

/// Counts of all frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireCounts {
    /// From host A to host B.
    pub a_to_b: DirectionCounts,
    /// From host B to host A.
    pub b_to_a: DirectionCounts,
}

/// Commands to the program, one JSON value per line; it answers each with a line of [`WireCounts`].
#[expect(
    clippy::large_enum_variant,
    reason = "one exists at a time, for as long as it is written"
)]
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Order {
    /// Change the faults.
    Set(WireFaults),
    /// Only answer with the counts.
    Count,
}

/// A wire between two hosts. Dropping it removes it with its devices.
#[derive(Debug)]
pub struct Wire {
    child: Mutex<Child>,
    pipes: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    pid: u32,
}

impl Wire {
    /// Checks whether emulated links are available here.
    ///
    /// # Errors
    /// The reason, for people.
    pub fn availability() -> Result<()> {
        program::need(&[program::LAB])
    }

    /// Makes a device of this name in each namespace, down and without addresses, and joins them.
    ///
    /// # Errors
    /// There is no program or no TUN driver, a device of that name exists, or the faults are
    /// invalid.
    pub(crate) fn between(
        [(a, near), (b, far)]: [(&NetNs, &str); 2],
        faults: WireFaults,
    ) -> Result<Self> {
        Self::availability()?;
        let there = format!("/proc/{}/fd/{}", std::process::id(), b.as_fd().as_raw_fd());
        let mut command = program::lab_command()?;
        command
            .args(["wire", "--near", near, "--far", far])
            .args(["--far-namespace", &there])
            .args(["--seed", &faults.seed.to_string()])
            .args(faults.punctual.then_some("--punctual"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C reaches only the lab.
            .process_group(0);
        let mut child = a.spawn_command(&mut command).doing("start a wire")?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let Some(pipes) = stdin.zip(stdout) else {
            return Err(setup("the program of the wire has no pipes: this is a bug"));
        };
        let wire = Self {
            pid: child.id(),
            child: Mutex::new(child),
            pipes: Mutex::new((pipes.0, BufReader::new(pipes.1))),
        };
        wire.set(faults)?;
        Ok(wire)
    }

    /// Changes the faults from now on. Frames in transit are not affected.
    ///
    /// # Errors
    /// The faults are invalid; [`LabError::ChildExited`].
    pub fn set(&self, faults: WireFaults) -> Result<()> {
        faults.a_to_b.check()?;
        faults.b_to_a.check()?;
        self.order(Order::Set(faults)).map(drop)
    }

    /// Returns the frame counts so far.
    ///
    /// # Errors
    /// [`LabError::ChildExited`].
    pub fn counts(&self) -> Result<WireCounts> {
        self.order(Order::Count)
    }

    /// The carrying program's process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    fn order(&self, order: Order) -> Result<WireCounts> {
        let mut pipes = self.pipes.lock().unwrap_or_else(PoisonError::into_inner);
        let (stdin, stdout) = &mut *pipes;
        let line = serde_json::to_string(&order).map_err(setup)?;
        let mut answer = String::new();
        let talk = writeln!(stdin, "{line}").and_then(|()| stdout.read_line(&mut answer));
        match (talk, serde_json::from_str(&answer)) {
            (Ok(_), Ok(counts)) => Ok(counts),
            _ => Err(self.ended()),
        }
    }

    /// Returns the reason why the program does not answer.
    fn ended(&self) -> LabError {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        // It may have printed something other than an answer.
        let _ = child.kill();
        let mut log = String::new();
        if let Some(stderr) = &mut child.stderr {
            let _ = stderr.read_to_string(&mut log);
        }
        let status = child
            .wait()
            .map_or_else(|e| e.to_string(), |s| s.to_string());
        LabError::ChildExited {
            name: "the wire".to_owned(),
            status,
            log,
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        // This fails only if the program has ended.
        let _ = child.kill();
        let _ = child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_above_one_is_refused() {
        let faults = Faults {
            loss: 1.5,
            ..Faults::default()
        };
        assert!(matches!(faults.check(), Err(LabError::Usage(text)) if text.contains("loss")));
    }

    #[test]
    fn a_loss_that_no_good_state_leaves_room_for_is_refused() {
        let bursts = |loss, loss_burst| Faults {
            loss,
            loss_burst,
            ..Faults::default()
        };
        // One good frame between bursts of nine: nine tenths.
        assert!(bursts(0.9, 9.0).check().is_ok());
        assert!(bursts(0.91, 9.0).check().is_err());
        assert!(bursts(0.1, f64::NAN).check().is_err());
        assert!(bursts(1.0, 1.0).check().is_ok());
    }

    #[test]
    fn a_value_that_only_qualifies_a_fault_is_no_fault() {
        let qualified = Faults {
            loss_burst: 5.0,
            reorder_us: 1,
            queue_bytes: 1,
            queue_frames: 1,
            policed: true,
            ..Faults::default()
        };
        assert!(qualified.is_none());
        let slow = Faults {
            delay_us: 1,
            ..Faults::default()
        };
        assert!(!slow.is_none());
    }

    #[test]
    fn faults_are_written_as_differences_from_none() {
        let faults: WireFaults =
            serde_json::from_str(r#"{"a_to_b": {"loss": 0.01}, "seed": 3}"#).expect("faults");
        assert_eq!((faults.a_to_b.loss, faults.seed), (0.01, 3));
        assert_eq!(faults.b_to_a, Faults::default());
        assert!(serde_json::from_str::<Faults>(r#"{"los": 0.01}"#).is_err());
    }
}
