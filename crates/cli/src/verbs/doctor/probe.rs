//! Echo requests through the tunnel during a measurement: the round-trip time, and the sizes that pass.
//!
//! A thread sends five small requests over a second. If one is answered, the thread sends a request
//! with the size of the interface's MTU. If that is lost twice, it tries sizes in between, three
//! times each, for two seconds at most, and then the MTU once more.

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

/// Number of small requests.
const COUNT: u16 = 5;
/// Time between two small requests.
const PAUSE: Duration = Duration::from_millis(200);
/// Bytes of a small request, as of `ping` by default.
const SMALL: usize = 84;
/// Maximum time to wait for an answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum time to search for the sizes that pass.
const SEARCH: Duration = Duration::from_secs(2);
/// Time to wait for an answer to a large request, in addition to twice the longest round trip of
/// the small requests.
const LEAST: Duration = Duration::from_millis(50);
/// Tries for the interface's MTU: under load, a single loss proves nothing.
const MTU_TRIES: u16 = 2;
/// Tries for each size of the search.
const SEARCH_TRIES: u16 = 3;
/// Accuracy of the search, bytes.
const EXACT: usize = 8;

/// Results of the probes.
#[derive(Debug, Default)]
pub struct Found {
    /// The target.
    pub target: Option<IpAddr>,
    /// Median round trip, microseconds.
    pub rtt_us: Option<f64>,
    /// Sizes that pass.
    pub mtu: Option<MtuProbe>,
    /// Why there are no results.
    pub unseen: Option<Unseen>,
    /// Packets sent and received.
    pub own: OwnTraffic,
}

impl Found {
    fn nothing(why: String) -> Self {
        Found {
            unseen: Some(Unseen {
                what: "round-trip time and MTU of the tunnel".into(),
                why,
            }),
            ..Found::default()
        }
    }

    /// Returns the results for the case that no target was known.
    pub fn no_target() -> Self {
        let why = "no host at the far end is known: no point-to-point address, and no connection of this host \
                   through the tunnel; keep a connection open";
        Found::nothing(why.into())
    }
}

/// The thread that sends probes.
#[derive(Debug)]
pub struct Prober {
    thread: JoinHandle<Found>,
    round_trips: Receiver<u64>,
    stop: Interrupt,
}

impl Prober {
    /// Starts to probe the first of `targets` that answers, through `link` with its `mtu`.
    pub fn start(link: String, mtu: u32, targets: Vec<IpAddr>) -> Self {
        let (sender, round_trips) = channel();
        let stop = Interrupt::new();
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let probe = Probe {
                link,
                mtu: mtu as usize,
                sender,
                stop: stopped,
            };
            probe.first_that_answers(&targets)
        });
        Prober {
            thread,
            round_trips,
            stop,
        }
    }

    /// Returns the round trips since the last call, microseconds.
    pub fn round_trips(&self) -> impl Iterator<Item = u64> {
        self.round_trips.try_iter()
    }

    /// Waits until the probes have ended. `hurry`: ends them at once.
    pub fn finish(self, hurry: bool) -> Found {
        if hurry {
            self.stop.raise();
        }
        self.thread.join().unwrap_or_default()
    }
}

/// Counts packets sent and received.
struct Counting {
    echo: Echo,
    own: Cell<OwnTraffic>,
}

impl Counting {
    /// As [`Echo::ping`].
    fn ping(&self, sequence: u16, size: usize, patience: Duration) -> io::Result<Outcome> {
        let outcome = self.echo.ping(sequence, size, patience)?;
        let bytes = size.max(self.echo.smallest()) as u64;
        let mut own = self.own.get();
        let sent = OwnTraffic {
            packets_out: 1,
            bytes_out: bytes,
            ..OwnTraffic::default()
        };
        own += match outcome {
            Outcome::Answered(_) => OwnTraffic {
                packets_in: 1,
                bytes_in: bytes,
                ..sent
            },
            Outcome::Silent => sent,
            Outcome::TooBig => OwnTraffic::default(),
        };
        self.own.set(own);
        Ok(outcome)
    }
}

struct Probe {
    link: String,
    mtu: usize,
    sender: Sender<u64>,
    stop: Interrupt,
}

impl Probe {
    fn first_that_answers(&self, targets: &[IpAddr]) -> Found {
        let mut why = String::new();
        let mut own = OwnTraffic::default();
        for target in targets {
            match self.probe(*target) {
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
                Err(error) => why = format!("cannot probe {target}: {error}"),
            }
        }
        Found {
            own,
            ..Found::nothing(why)
        }
    }

    fn probe(&self, target: IpAddr) -> io::Result<Found> {
        let echo = Counting {
            echo: Echo::open(target, &self.link)?,
            own: Cell::default(),
        };
        let mut found = Found {
            target: Some(target),
            ..Found::default()
        };
        let mut times = Vec::new();
        let started = Instant::now();
        for sequence in 0..COUNT {
            if self
                .stop
                .sleep_until(started + PAUSE * sequence.into())
                .is_err()
            {
                break;
            }
            let size = SMALL.min(self.mtu);
            if let Outcome::Answered(time) = echo.ping(sequence, size, PATIENCE)? {
                times.push(time);
                // Nobody receives after the end of the sampling.
                let _ = self.sender.send(time.as_micros() as u64);
            }
            // After two seconds without an answer, try the next target.
            if times.is_empty() && started.elapsed() >= 2 * PATIENCE {
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

    /// Finds the sizes that pass; `None` if it was stopped before.
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
        if passes(self.mtu, MTU_TRIES)? {
            passed = self.mtu
        } else {
            lost = Some(self.mtu)
        }
        let until = Instant::now() + SEARCH;
        while let Some(large) = lost
            && large - passed > EXACT
            && Instant::now() < until
            && !self.stop.is_raised()
        {
            let middle = passed + (large - passed) / 2;
            if passes(middle, SEARCH_TRIES)? {
                passed = middle
            } else {
                lost = Some(middle)
            }
        }
        // A path with ordinary loss is no black hole: there, the size that was lost first passes now.
        if lost.is_some() && !reported.get() && passes(self.mtu, SEARCH_TRIES)? {
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

    use seikan_lab::site::{Hosts, Link};

    use super::*;

    fn skip(reason: &str) {
        assert!(
            std::env::var_os("SEIKAN_REQUIRE_ALL").is_none_or(|value| value != "1"),
            "{reason}"
        );
        eprintln!("SKIPPED: {reason}");
    }

    /// Probes B from A, where B drops packets that match `rule`.
    fn probed(rule: Option<&str>) -> Option<Found> {
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
        let Some(found) = probed(None) else { return };
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
        // The small requests and the request of the full length are answered.
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
        let Some(found) = probed(Some("ip length > 1200")) else {
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
    fn a_target_without_an_answer_is_reported() {
        let Some(found) = probed(Some("icmp type echo-request")) else {
            return;
        };
        let why = found.unseen.expect("a reason").why;
        assert!(why.contains("10.77.0.2 does not answer"), "{why}");
    }
}
