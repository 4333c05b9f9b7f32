//! A handful of echo requests through the tunnel, while it is watched: how long an answer takes, and which sizes pass.
//!
//! First five small ones over a second. If any is answered, one of the interface's MTU; if that is lost twice, sizes
//! between are tried, three times each, for two seconds at most, and then the MTU once more. All of it in a thread of its own.

use std::cell::Cell;
use std::io;
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use seikan_diagnose::{MtuProbe, OwnTraffic};
use seikan_observe::path::Unseen;
use seikan_sys::echo::{Echo, Outcome};
use seikan_ui::Interrupt;

/// Small requests.
const COUNT: u16 = 5;
/// From one of them to the next.
const PAUSE: Duration = Duration::from_millis(200);
/// Bytes of a small one: `ping`'s default.
const SMALL: usize = 84;
/// For an answer to a small one; longer is no better than none.
const PATIENCE: Duration = Duration::from_secs(1);
/// For the search among sizes.
const SEARCH: Duration = Duration::from_secs(2);
/// For an answer to a large one, beside two of the longest round trips of small ones.
const LEAST: Duration = Duration::from_millis(50);
/// Tries for the interface's MTU, and for each size of the search: a single loss says nothing under load.
const TRIES: [u16; 2] = [2, 3];
/// The search ends when it is as exact as this, bytes.
const EXACT: usize = 8;

/// What came out.
#[derive(Debug, Default)]
pub struct Found {
    /// Who was asked.
    pub target: Option<IpAddr>,
    /// Median round trip, microseconds.
    pub rtt_us: Option<f64>,
    /// Sizes that pass.
    pub mtu: Option<MtuProbe>,
    /// Why there is nothing.
    pub unseen: Option<Unseen>,
    /// What was sent and what came back.
    pub own: OwnTraffic,
}

impl Found {
    fn nothing(why: String) -> Self {
        Found {
            unseen: Some(Unseen {
                what: "round trips through the tunnel, and sizes that pass".into(),
                why,
            }),
            ..Found::default()
        }
    }

    /// There was nobody to ask.
    pub fn nobody() -> Self {
        let why = "nobody at the far end is known: no point-to-point address, no connection of this host \
                   through it; let something run through the tunnel";
        Found::nothing(why.into())
    }
}

/// The thread that asks.
#[derive(Debug)]
pub struct Prober {
    thread: JoinHandle<Found>,
    answers: Receiver<u64>,
    stop: Interrupt,
}

impl Prober {
    /// Begins to ask the first of `targets` that answers, through `link` with its `mtu`.
    pub fn start(link: String, mtu: u32, targets: Vec<IpAddr>) -> Self {
        let (sender, answers) = channel();
        let stop = Interrupt::new();
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let asking = Asking {
                link,
                mtu: mtu as usize,
                sender,
                stop: stopped,
            };
            asking.first_that_answers(&targets)
        });
        Prober {
            thread,
            answers,
            stop,
        }
    }

    /// Round trips that were measured since it was last asked, microseconds.
    pub fn answers(&self) -> impl Iterator<Item = u64> {
        self.answers.try_iter()
    }

    /// Waits until it is through; `hurry`: ends it as soon as it can.
    pub fn finish(self, hurry: bool) -> Found {
        if hurry {
            self.stop.raise();
        }
        self.thread.join().unwrap_or_default()
    }
}

/// Counts what is sent, and what comes back.
struct Counting {
    echo: Echo,
    own: Cell<OwnTraffic>,
}

impl Counting {
    /// As [`Echo::ping`].
    fn ask(&self, sequence: u16, size: usize, patience: Duration) -> io::Result<Outcome> {
        let outcome = self.echo.ping(sequence, size, patience)?;
        let bytes = size.max(self.echo.smallest()) as u64;
        let mut own = self.own.get();
        own += match outcome {
            Outcome::Answered(_) => OwnTraffic {
                packets_out: 1,
                bytes_out: bytes,
                packets_in: 1,
                bytes_in: bytes,
            },
            Outcome::Silent => OwnTraffic {
                packets_out: 1,
                bytes_out: bytes,
                ..OwnTraffic::default()
            },
            Outcome::TooBig => OwnTraffic::default(),
        };
        self.own.set(own);
        Ok(outcome)
    }
}

struct Asking {
    link: String,
    mtu: usize,
    sender: Sender<u64>,
    stop: Interrupt,
}

impl Asking {
    fn first_that_answers(&self, targets: &[IpAddr]) -> Found {
        let mut why = String::new();
        let mut own = OwnTraffic::default();
        for target in targets {
            match self.ask(*target) {
                Ok(mut found) if found.rtt_us.is_some() => {
                    found.own += own;
                    return found;
                }
                Ok(found) => {
                    own += found.own;
                    why = format!("{target} does not answer ICMP echo");
                }
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    why = format!("ICMP echo is not allowed here ({error}); run it as root");
                }
                Err(error) => why = format!("{target} cannot be asked: {error}"),
            }
        }
        Found {
            own,
            ..Found::nothing(why)
        }
    }

    fn ask(&self, target: IpAddr) -> io::Result<Found> {
        let echo = Counting {
            echo: Echo::open(target, &self.link)?,
            own: Cell::default(),
        };
        let mut found = Found {
            target: Some(target),
            ..Found::default()
        };
        let mut times = Vec::new();
        let begun = Instant::now();
        for sequence in 0..COUNT {
            if self
                .stop
                .sleep_until(begun + PAUSE * sequence.into())
                .is_err()
            {
                break;
            }
            let size = SMALL.min(self.mtu);
            if let Outcome::Answered(time) = echo.ping(sequence, size, PATIENCE)? {
                times.push(time);
                // Nobody listens any more when the sampling is over.
                let _ = self.sender.send(time.as_micros() as u64);
            }
            // Two seconds of silence are enough to try somebody else.
            if times.is_empty() && begun.elapsed() >= 2 * PATIENCE {
                break;
            }
        }
        times.sort();
        let Some(median) = times.get(times.len() / 2) else {
            found.own = echo.own.get();
            return Ok(found);
        };
        found.rtt_us = Some(median.as_secs_f64() * 1e6);
        let longest = times.last().copied().unwrap_or_default();
        let patience = (2 * longest + LEAST).min(PATIENCE);
        found.mtu = self.sizes(&echo, patience)?;
        found.own = echo.own.get();
        Ok(found)
    }

    /// Which sizes pass; `None` if it was stopped before anything was known.
    fn sizes(&self, echo: &Counting, patience: Duration) -> io::Result<Option<MtuProbe>> {
        let mut sequence = COUNT;
        let reported = Cell::new(false);
        let mut passes = |size: usize, tries: u16| -> io::Result<bool> {
            for _ in 0..tries {
                sequence = sequence.wrapping_add(1);
                match echo.ping(sequence, size, patience)? {
                    Outcome::Answered(_) => return Ok(true),
                    Outcome::Silent => {}
                    Outcome::TooBig => {
                        reported.set(true);
                        return Ok(false);
                    }
                }
            }
            Ok(false)
        };
        if self.stop.is_raised() || self.mtu <= SMALL {
            return Ok(None);
        }
        let (mut passed, mut lost) = (SMALL.max(echo.echo.smallest()), None);
        match passes(self.mtu, TRIES[0])? {
            true => passed = self.mtu,
            false => lost = Some(self.mtu),
        }
        let until = Instant::now() + SEARCH;
        while let Some(large) = lost
            && large - passed > EXACT
            && Instant::now() < until
            && !self.stop.is_raised()
        {
            let middle = passed + (large - passed) / 2;
            match passes(middle, TRIES[1])? {
                true => passed = middle,
                false => lost = Some(middle),
            }
        }
        // A way that loses some of everything is no black hole: then the size that was lost first passes now.
        if lost.is_some() && !reported.get() && passes(self.mtu, TRIES[1])? {
            (passed, lost) = (self.mtu, None);
        }
        Ok(Some(MtuProbe {
            passed: Some(passed as u32),
            lost: lost.map(|size| size as u32),
            reported: reported.get(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use seikan_lab::link::{Hosts, Link};

    use super::*;

    fn skip(reason: &str) {
        assert!(
            std::env::var_os("SEIKAN_REQUIRE_ALL").is_none_or(|value| value != "1"),
            "{reason}"
        );
        eprintln!("SKIPPED: {reason}");
    }

    /// Asks B from A, where B drops what `rule` says.
    fn asked(rule: Option<&str>) -> Option<Found> {
        let hosts = match Hosts::create(Link::default()) {
            Ok(hosts) => hosts,
            Err(error) => {
                skip(&error.to_string());
                return None;
            }
        };
        if let Some(rule) = rule {
            let text = format!(
                "add table ip t; add chain ip t c {{ type filter hook input priority 0; }}; add rule ip t c {rule} drop"
            );
            let mut nft = Command::new("nft");
            let run = hosts.b.spawn(nft.arg(text).stderr(Stdio::null()));
            if !run.is_ok_and(|mut child| child.wait().is_ok_and(|status| status.success())) {
                skip("no nft that can drop by length");
                return None;
            }
        }
        let (link, target) = (hosts.a.device.clone(), hosts.b.address);
        let start = || Prober::start(link, 1500, vec![target]);
        Some(hosts.a.run(start).expect("namespace").finish(false))
    }

    #[test]
    fn a_link_carries_its_mtu() {
        let Some(found) = asked(None) else { return };
        assert!(
            found.rtt_us.is_some() && found.unseen.is_none(),
            "{found:?}"
        );
        let whole = MtuProbe {
            passed: Some(1500),
            lost: None,
            reported: false,
        };
        assert_eq!(found.mtu, Some(whole));
        // The small ones, and the one of the whole length, all of them answered.
        let bytes = u64::from(COUNT) * SMALL as u64 + 1500;
        let own = OwnTraffic {
            packets_out: u64::from(COUNT) + 1,
            bytes_out: bytes,
            packets_in: u64::from(COUNT) + 1,
            bytes_in: bytes,
        };
        assert_eq!(found.own, own);
    }

    #[test]
    fn sizes_that_vanish_are_found() {
        let Some(found) = asked(Some("ip length > 1200")) else {
            return;
        };
        let probe = found.mtu.expect("sizes");
        let (passed, lost) = (probe.passed.expect("passed"), probe.lost.expect("lost"));
        assert!(
            passed <= 1200 && lost > 1200 && lost - passed <= EXACT as u32,
            "{probe:?}"
        );
        assert!(!probe.reported);
    }

    #[test]
    fn who_does_not_answer_is_told_of() {
        let Some(found) = asked(Some("icmp type echo-request")) else {
            return;
        };
        let why = found.unseen.expect("a reason").why;
        assert!(why.contains("10.77.0.2 does not answer"), "{why}");
    }
}
