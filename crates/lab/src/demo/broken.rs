//! The doctor's part of the demo: a video stream through a tunnel, a queue that is too short for
//! it, a diagnosis without any hint, and the stream again.
//!
//! Load and measured quantity stay the same throughout: the rate that the receiving application
//! reads. A short queue drops parts of a bursty stream on every machine; queue and burst length are
//! found by trying. A run that is not convincing is repeated once; if the second run is not
//! convincing either, this is an error.

use std::time::Duration;

use seikan_diagnose::stats::Interval;
use seikan_diagnose::trial::{Attempt, Decision};
use seikan_diagnose::{Cause, Fact};
use seikan_load::{LiveKind, LiveOptions, Meter};
use seikan_ui::Interrupt;
use serde::Serialize;

use crate::cleanup::private_directory;
use crate::error::{Result, setup};
use crate::load::live;
use crate::scenario::doctor::{self, Diagnosis, DoctorArguments};
use crate::scenario::lookup;
use crate::site::{Host, Link};
use crate::tunnel::{self, Changes, inner_device};

/// The tunnel that is broken.
const TUNNEL: &str = "seikan-native";
/// Cause that the doctor should name.
const CAUSE: Cause = Cause::TunQueueOverflow;
/// Rate of the stream in Mbit/s: that of a 4K video.
const RATE: f64 = 25.0;
/// Payload bytes of each datagram.
const PAYLOAD: usize = 1_200;
/// Bytes of each datagram with its UDP and IPv4 headers, which the doctor counts too.
const PACKET: f64 = PAYLOAD as f64 + 28.0;
/// Datagrams of a picture, which are sent back to back; the larger number is tried if the smaller
/// has no effect.
const BURSTS: [usize; 2] = [64, 200];
/// Queue lengths in packets, tried one after the other until the stream suffers.
const QUEUES: [u32; 5] = [16, 8, 4, 2, 1];
/// Maximum share of the healthy throughput that remains in the broken stream: a third is lost.
const SUFFERS: f64 = 2.0 / 3.0;
/// Share of the healthy throughput down to which shorter queues are tried, so that a somewhat better
/// later measurement still counts as broken.
const LOOKED_FOR: f64 = 0.6;
/// Share of the healthy throughput that counts as repaired.
const REPAIRED: f64 = 0.9;
/// Share of the offered rate that must arrive before anything is broken.
const SOUND: f64 = 0.9;
/// Time for the stream to settle after a change.
const SETTLE: Duration = Duration::from_millis(300);
/// Duration of the measurement of a throughput that is shown.
const MEASURE: Duration = Duration::from_millis(1_500);
/// Duration of the measurement with one of the tried settings.
const TRY: Duration = Duration::from_millis(500);
/// Duration of the doctor's measurement in seconds, before it tries remedies.
const LOOK: f64 = 3.0;
/// Maximum number of runs until one convinces.
const PLAYED: u32 = 2;

/// Events in order. Throughputs are in Mbit/s of the same stream, as read by the receiving
/// application.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Chapter {
    /// The tunnel.
    pub tunnel: String,
    /// Offered rate in Mbit/s.
    pub offered: f64,
    /// Number of datagrams that are sent back to back.
    pub burst: usize,
    /// Throughput before anything was broken.
    pub healthy: f64,
    /// Queue lengths that were tried, in packets, each with its throughput.
    pub tried: Vec<(u32, f64)>,
    /// Chosen queue length in packets.
    pub queue: u32,
    /// Throughput with this queue.
    pub broken: f64,
    /// Diagnosis of the doctor.
    pub diagnosis: Option<Diagnosis>,
    /// The diagnosis in a sentence.
    pub sentence: String,
    /// Figures of the diagnosis, the most significant one first.
    pub evidence: Vec<Fact>,
    /// Commands that the doctor applied.
    pub commands: Vec<String>,
    /// Mean throughput without and with the commands, alternating, as measured by the doctor.
    pub turns: Option<(f64, f64)>,
    /// Gain by the commands.
    pub gain: Option<Interval>,
    /// Whether the change was kept.
    pub kept: bool,
    /// Why the change was not kept.
    pub why: Option<String>,
    /// Throughput afterwards.
    pub mended: f64,
}

impl Chapter {
    /// Whether the stream arrived before anything was broken.
    fn is_sound(&self) -> bool {
        self.healthy >= SOUND * self.offered
    }

    /// Whether the fault costs enough.
    fn is_felt(&self) -> bool {
        self.broken <= SUFFERS * self.healthy
    }

    /// Returns the reason for which the run does not convince.
    fn objection(&self) -> Option<String> {
        let (healthy, broken, mended) = (self.healthy, self.broken, self.mended);
        if !self.is_sound() {
            return Some(format!(
                "cannot show a fault: only {healthy:.1} of {RATE:.0} Mbit/s arrive before anything is broken; run it again while the \
                 machine has less to do"
            ));
        }
        if !self.is_felt() {
            return Some(format!(
                "cannot break the tunnel: with a queue of one packet {broken:.1} of {RATE:.0} Mbit/s still arrive"
            ));
        }
        let named = self.diagnosis.as_ref().map(|diagnosis| diagnosis.cause);
        if named != Some(CAUSE) {
            let named = named.map_or("nothing", Cause::name);
            return Some(format!(
                "cannot show the cause: the doctor named {named}, not {CAUSE}; run it again while the machine has less to do"
            ));
        }
        let (true, Some((without, with))) = (self.kept, self.turns) else {
            let why = self.why.as_deref().unwrap_or("nothing was tried");
            return Some(format!(
                "cannot show the fix: the doctor reverted it: {why}"
            ));
        };
        if mended < REPAIRED * healthy {
            return Some(format!(
                "cannot show that the tunnel is repaired: {mended:.1} Mbit/s arrive, of {healthy:.1} before"
            ));
        }
        // The doctor's figures and the receiver's figures must agree.
        (without > SUFFERS * healthy || with < REPAIRED * healthy).then(|| format!(
            "cannot show the fix: the doctor measured {without:.1} Mbit/s without it and {with:.1} with it, the receiver {broken:.1} and \
             {mended:.1}; run it again while the machine has less to do"
        ))
    }

    /// Records the doctor's latest attempts.
    fn note(&mut self, fixes: &[Attempt]) {
        let Some(last) = fixes.last() else { return };
        self.commands = last.remedy.commands.clone();
        self.gain = last.trial.gain;
        self.kept = last.trial.decision == Decision::Keep;
        self.why = match &last.trial.decision {
            Decision::Keep => None,
            Decision::TakeBack(why) | Decision::NotPossible(why) => Some(why.clone()),
        };
        let pairs = &last.trial.pairs;
        let count = pairs.len().max(1) as f64;
        let payload = PAYLOAD as f64 / PACKET / 1e6 / count;
        let sum = pairs.iter().fold((0.0, 0.0), |(without, with), (a, b)| {
            (without + a.throughput, with + b.throughput)
        });
        self.turns = (!pairs.is_empty()).then_some((sum.0 * payload, sum.1 * payload));
    }
}

/// Repeats the run until it convinces.
///
/// # Errors
/// [`Interrupted`](crate::error::LabError::Interrupted); the tunnel does not start; [`Setup`](crate::error::LabError::Setup) with the reason why no
/// run convinces.
pub(super) fn play(interrupt: &Interrupt, step: &mut dyn FnMut(&str)) -> Result<Chapter> {
    let mut last = None;
    for _ in 0..PLAYED {
        let chapter = once(interrupt, step)?;
        match chapter.objection() {
            None => return Ok(chapter),
            objection => last = objection,
        }
    }
    Err(setup(last.unwrap_or_default()))
}

fn once(interrupt: &Interrupt, step: &mut dyn FnMut(&str)) -> Result<Chapter> {
    step("starting");
    let tunnel = lookup(TUNNEL, &Changes::default())?;
    let mut running = tunnel::start(&tunnel, Link::default(), interrupt)?;
    let mut chapter = Chapter {
        tunnel: TUNNEL.to_owned(),
        offered: RATE,
        ..Chapter::default()
    };
    for burst in BURSTS {
        let load = LiveOptions {
            kind: LiveKind::Udp,
            rate: Some(RATE),
            size: PAYLOAD,
            burst: Some(burst),
            ..LiveOptions::default()
        };
        chapter.burst = burst;
        chapter.tried.clear();
        let host = &running.hosts.a;
        let play = |meter: &Meter| under_load(&mut chapter, host, meter, interrupt, step);
        live(&running.ends(), &load, interrupt, play)?;
        // Longer bursts are tried only if the stream did not suffer.
        if !chapter.is_sound() || chapter.is_felt() {
            break;
        }
    }
    running.check_alive()?;
    Ok(chapter)
}

/// Everything that happens while the stream flows.
fn under_load(
    chapter: &mut Chapter,
    host: &Host,
    meter: &Meter,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(&str),
) -> Result<()> {
    let interface = inner_device(TUNNEL, host);
    let netlink = host.netlink()?;
    let link = netlink.link(&interface)?;
    let set = |packets| netlink.set_tx_queue_len(link.index, packets);
    let over = |time| {
        interrupt.sleep(SETTLE)?;
        meter.rate_over(time, interrupt)
    };
    step("a video stream, as it should be");
    set(link.tx_queue_len)?;
    chapter.healthy = over(MEASURE)?;
    if !chapter.is_sound() {
        return Ok(());
    }
    step("a shorter and shorter queue, until the stream suffers");
    for packets in QUEUES {
        set(packets)?;
        let left = over(TRY)?;
        chapter.tried.push((packets, left));
        (chapter.queue, chapter.broken) = (packets, left);
        if left <= LOOKED_FOR * chapter.healthy {
            chapter.broken = over(MEASURE)?;
            if chapter.broken <= LOOKED_FOR * chapter.healthy {
                break;
            }
        }
    }
    if !chapter.is_felt() {
        return Ok(set(link.tx_queue_len)?);
    }
    step("`seikan doctor --fix` without hints");
    let scratch = private_directory()?;
    let arguments = DoctorArguments {
        host,
        interface: &interface,
        expected: Some(chapter.healthy),
        seconds: LOOK,
        level: None,
        fix: true,
        record: &scratch.path().join("recording.parquet"),
        run_dir: scratch.path(),
    };
    let answer = doctor::ask(&arguments, interrupt)?;
    chapter.note(&answer.fixes);
    chapter.diagnosis = Some(answer.diagnosis);
    chapter.sentence = answer.sentence;
    chapter.evidence = answer.evidence;
    step("the stream again");
    chapter.mended = over(MEASURE)?;
    doctor::undo(host, scratch.path(), interrupt)?;
    Ok(set(link.tx_queue_len)?)
}

#[cfg(test)]
mod tests {
    use seikan_diagnose::trial::{Block, Trial};
    use seikan_diagnose::{Remedy, stats};

    use super::*;

    fn good() -> Chapter {
        let mut chapter = Chapter {
            tunnel: TUNNEL.to_owned(),
            offered: RATE,
            burst: 64,
            healthy: 25.0,
            queue: 4,
            broken: 5.0,
            mended: 25.0,
            diagnosis: Some(Diagnosis {
                cause: CAUSE,
                level: "confirmed".to_owned(),
                alternatives: vec![],
                chain: vec![CAUSE],
                seconds: 3.0,
            }),
            ..Chapter::default()
        };
        let block = |mbit: f64| Block {
            throughput: mbit * 1e6 * PACKET / PAYLOAD as f64,
            ..Block::default()
        };
        chapter.note(&[Attempt {
            cause: CAUSE,
            remedy: Remedy::here("a longer queue", vec![], "all of it"),
            trial: Trial {
                pairs: vec![(block(5.0), block(25.0)); 4],
                gain: stats::paired_gain(&[(5.0, 25.0); 4]),
                decision: Decision::Keep,
            },
        }]);
        chapter
    }

    #[test]
    fn a_fault_that_bites_and_a_fix_that_helps_convince() {
        let chapter = good();
        assert_eq!(chapter.objection(), None);
        let turns = chapter.turns.expect("turns");
        assert!((turns.0 - 5.0).abs() < 1e-9 && (turns.1 - 25.0).abs() < 1e-9);
    }

    #[test]
    fn a_fault_that_is_not_felt_does_not_convince() {
        let chapter = Chapter {
            broken: 23.5,
            ..good()
        };
        let objection = chapter.objection().expect("an objection");
        assert!(
            objection.contains("23.5 of 25 Mbit/s still arrive"),
            "{objection}"
        );
    }

    #[test]
    fn another_cause_or_none_does_not_convince() {
        for cause in [Cause::Healthy, Cause::CpuContention] {
            let mut chapter = good();
            chapter.diagnosis.as_mut().expect("a diagnosis").cause = cause;
            let objection = chapter.objection().expect("an objection");
            assert!(
                objection.contains(&format!("named {cause},")),
                "{objection}"
            );
        }
    }

    #[test]
    fn a_fix_that_is_taken_back_does_not_convince() {
        let mut chapter = good();
        (chapter.kept, chapter.why) = (false, Some("the gain is +8 %".to_owned()));
        let objection = chapter.objection().expect("an objection");
        assert!(objection.contains("the gain is +8 %"), "{objection}");
    }

    #[test]
    fn figures_that_contradict_each_other_do_not_convince() {
        let chapter = Chapter {
            turns: Some((22.0, 24.0)),
            ..good()
        };
        let objection = chapter.objection().expect("an objection");
        assert!(
            objection.contains("the doctor measured 22.0"),
            "{objection}"
        );
        let chapter = Chapter {
            mended: 12.0,
            ..good()
        };
        let objection = chapter.objection().expect("an objection");
        assert!(
            objection.contains("12.0 Mbit/s arrive, of 25.0"),
            "{objection}"
        );
    }
}
