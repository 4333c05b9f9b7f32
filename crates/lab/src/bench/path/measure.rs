//! One tunnel over one path: a load, voice beside it, and the emulator's counts of both.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use seikan_load::{
    Ends, LatencyOptions, LatencyReport, LiveKind, LiveOptions, Meter, TcpOptions, join, paced,
    tcp_bulk, web,
};
use seikan_sys::process::CpuClock;
use seikan_ui::Interrupt;

use super::cell::Cell;
use super::figures::{Figure, Figures, PathRound, PathRoundLoad};
use crate::bench::{Load, RAW};
use crate::error::{LabError, Result, in_words, setup, usage};
use crate::load::live;
use crate::site::{Host, Hosts, Link, network};
use crate::tunnel::{self, Running, Started, Tunnel};
use crate::wire::{Faults, Wire, WireCounts, WireFaults};

/// Interval of voice: 50 datagrams a second.
const VOICE: Duration = Duration::from_millis(20);
/// Time after which an answer of voice counts as lost.
const VOICE_TIMEOUT: Duration = Duration::from_secs(1);
/// Payload bytes of a datagram of voice, as in [`paced()`].
const VOICE_BYTES: usize = 172;
/// Number of datagrams of voice before any load.
const IDLE: u32 = 50;
/// Time of a stream before it is measured, for slow start over a long path.
const WARMUP: Duration = Duration::from_secs(2);
/// Pause between loads, in which queues drain.
const SETTLE: Duration = Duration::from_millis(500);
/// Maximum of the TCP buffers, in bytes: twice the product of 1 Gbit/s and 100 ms, with a queue of
/// the same length, and the kernel's own share.
const TCP_BUFFER: u32 = 128 << 20;
/// Time for which an answer of a neighbour stays valid, in milliseconds: an hour.
const NEIGHBOUR_MS: u32 = 3_600_000;
/// Address of host A after it has moved.
const MOVED: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 101));
/// Time without a path around a change of address.
const MOVE: Duration = Duration::from_millis(500);
/// Rate of the TCP stream through an outage, in Mbit/s.
const OUTAGE_RATE: f64 = 5.0;
/// Interval of checks whether something has arrived.
const LOOK: Duration = Duration::from_millis(1);
/// Time after an outage within which a tunnel must work again. After an outage of a minute, TCP
/// retries only a minute later (RFC 6298, section 5.5).
const PATIENCE: Duration = Duration::from_secs(75);

/// The plan of a run.
#[derive(Clone, Copy)]
pub(super) struct Plan<'a> {
    pub(super) loads: &'a [Load],
    pub(super) seconds: f64,
    /// Whether the NICs have their offloads.
    pub(super) offload: bool,
    pub(super) interrupt: &'a Interrupt,
}

/// A tunnel that runs over a path.
struct Site<'a> {
    hosts: &'a Hosts,
    wire: &'a Wire,
    ends: Ends<'a>,
    faults: WireFaults,
    /// Whether there is no tunnel.
    raw: bool,
    plan: Plan<'a>,
}

/// Measures a tunnel over a path, and calls `step` before each load. Only an interruption is an
/// error.
pub(super) fn measure(
    tunnel: &Arc<dyn Tunnel>,
    cell: &Cell,
    seed: u64,
    plan: Plan<'_>,
    step: &mut dyn FnMut(&str),
) -> Result<PathRound> {
    let mut round = PathRound::default();
    let faults = WireFaults {
        seed,
        ..cell.faults()
    };
    let link = Link {
        congestion: cell.congestion,
        ..Link::with_faults(faults).offload(plan.offload)
    };
    step("starting");
    let outcome = tunnel::start(tunnel, link, plan.interrupt).and_then(|running| {
        let Running {
            hosts, mut started, ..
        } = running;
        let Some(wire) = &hosts.wire else {
            return Err(setup("the tunnel has no emulated path"));
        };
        hosts.both().into_iter().try_for_each(prepare)?;
        let site = Site {
            hosts: &hosts,
            wire,
            ends: tunnel.ends(&hosts),
            faults,
            raw: tunnel.name() == RAW,
            plan,
        };
        site.measure(&mut started, &mut round, step)
    });
    round.error = in_words(outcome)?.err();
    Ok(round)
}

impl Site<'_> {
    fn measure(
        &self,
        started: &mut Started,
        round: &mut PathRound,
        step: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let Plan {
            loads, interrupt, ..
        } = self.plan;
        interrupt.sleep(SETTLE)?;
        step("idle");
        let idle = self.voice(IDLE)?;
        round.idle_ms = (idle.received > 0).then_some(idle.min_us / 1e3);
        for &load in loads {
            step(load.title());
            let outcome = in_words(self.run(load, started))?;
            round.loads.push(PathRoundLoad {
                load,
                error: outcome.as_ref().err().cloned(),
                figures: outcome.unwrap_or_default(),
            });
            started.check_alive()?;
            interrupt.sleep(SETTLE)?;
        }
        Ok(())
    }

    fn run(&self, load: Load, started: &Started) -> Result<Figures> {
        let duration = Duration::from_secs_f64(self.plan.seconds);
        let interrupt = self.plan.interrupt;
        match load {
            Load::Outage5 => self.come_back(Duration::from_secs(5), None),
            Load::Outage60 => self.come_back(Duration::from_secs(60), None),
            // Without a tunnel, every flow ends when its address changes.
            Load::Roam if self.raw => Ok(Figures::new()),
            Load::Roam => self.roam(),
            Load::Voice => {
                let voice = self.voice((self.plan.seconds / VOICE.as_secs_f64()) as u32)?;
                Ok(voice_figures(&voice).into_iter().collect())
            }
            Load::Web => {
                let (report, mut figures, watched) = self.run_with_voice(started, || {
                    Ok(web(&self.ends, WARMUP + duration, interrupt)?)
                })?;
                if report.pages == 0 {
                    return Err(setup("no web page arrived whole"));
                }
                figures.insert(Figure::PageMs, report.p50_ms);
                figures.insert(Figure::PageP99Ms, report.p99_ms);
                figures.extend(watched.per_gbit(report.gbit_per_second * self.plan.seconds));
                figures.insert(Figure::GoodputMbit, report.gbit_per_second * 1e3);
                Ok(figures)
            }
            Load::Beside => {
                let options = TcpOptions {
                    warmup: WARMUP,
                    duration,
                    ..TcpOptions::default()
                };
                let Hosts { a, b, .. } = self.hosts;
                let beside = a.to(b, b.address);
                let ((inside, outside), mut figures, _) = self.run_with_voice(started, || {
                    std::thread::scope(|scope| {
                        let inside = scope.spawn(|| tcp_bulk(&self.ends, &options, interrupt));
                        let outside = tcp_bulk(&beside, &options, interrupt);
                        Ok((join(inside)??, outside?))
                    })
                })?;
                figures.insert(Figure::GoodputMbit, outside.gbit_per_second * 1e3);
                figures.insert(Figure::InsideMbit, inside.gbit_per_second * 1e3);
                Ok(figures)
            }
            _ => {
                let options = TcpOptions {
                    warmup: WARMUP,
                    ..load.tcp(self.plan.seconds).ok_or_else(|| {
                        usage(format!("the load {load} cannot be measured over a path"))
                    })?
                };
                let (report, mut figures, watched) = self
                    .run_with_voice(started, || Ok(tcp_bulk(&self.ends, &options, interrupt)?))?;
                figures.insert(Figure::GoodputMbit, report.gbit_per_second * 1e3);
                figures.extend(watched.per_gbit(report.gbit_per_second * report.seconds));
                let again = report.retransmitted_share;
                figures.extend(again.map(|share| (Figure::ResentPercent, share * 100.0)));
                Ok(figures)
            }
        }
    }

    fn voice(&self, count: u32) -> Result<LatencyReport> {
        let options = LatencyOptions {
            count,
            interval: VOICE,
            timeout: VOICE_TIMEOUT,
            within: None,
        };
        Ok(paced(&self.ends, &options, self.plan.interrupt)?)
    }

    /// Runs a load that starts with [`WARMUP`]. After that, voice runs beside it and counters are
    /// read.
    fn run_with_voice<T: Send>(
        &self,
        started: &Started,
        load: impl FnOnce() -> Result<T> + Send,
    ) -> Result<(T, Figures, Watched)> {
        let Plan {
            seconds, interrupt, ..
        } = self.plan;
        let pids: Vec<u32> = started.processes.iter().map(|p| p.pid()).collect();
        std::thread::scope(|scope| {
            let load = scope.spawn(load);
            let watched = interrupt.sleep(WARMUP).map_err(LabError::from);
            let watched = watched.and_then(|()| {
                let voice = scope.spawn(|| self.voice((seconds / VOICE.as_secs_f64()) as u32));
                let (before, clock) = (self.wire.counts()?, CpuClock::start(pids)?);
                interrupt.sleep(Duration::from_secs_f64(seconds))?;
                let cpu = clock.elapsed()?.processes.total();
                let counts = self.wire.counts()?;
                Ok((join(voice)??, Watched::between(&before, &counts, cpu)))
            });
            let load = join(load)?;
            let (voice, mut watched) = watched?;
            watched.voice_bytes = u64::from(voice.received) * 2 * VOICE_BYTES as u64;
            let mut figures: Figures = voice_figures(&voice).into_iter().collect();
            figures.extend(watched.figures());
            Ok((load?, figures, watched))
        })
    }

    /// Measures the time until flows continue after a change of host A's address. Afterwards
    /// restores the old address, for the loads that follow.
    fn roam(&self) -> Result<Figures> {
        let old = self.hosts.a.address;
        let figures = self.come_back(MOVE, Some([old, MOVED]));
        readdress(&self.hosts.a, [MOVED, old])?;
        figures
    }

    /// Interrupts the path for a time, replaces an address of host A meanwhile if requested, and
    /// measures the time until flows continue.
    fn come_back(&self, outage: Duration, moves: Option<[IpAddr; 2]>) -> Result<Figures> {
        let interrupt = self.plan.interrupt;
        let to_a = if self.raw {
            self.hosts.a.address
        } else {
            self.hosts.a.inner
        };
        let back = self.hosts.b.to(&self.hosts.a, to_a);
        let voice = LiveOptions {
            kind: LiveKind::Udp,
            rate: Some(VOICE_BYTES as f64 * 8.0 / VOICE.as_secs_f64() / 1e6),
            size: VOICE_BYTES,
            burst: Some(1),
            ..LiveOptions::default()
        };
        let stream = LiveOptions {
            rate: Some(OUTAGE_RATE),
            ..LiveOptions::default()
        };
        live(&self.ends, &voice, interrupt, |there| {
            live(&back, &voice, interrupt, |here| {
                live(&self.ends, &stream, interrupt, |stream| {
                    interrupt.sleep(WARMUP)?;
                    self.interrupt_path(outage, moves)?;
                    wait_for_flows([there, here, stream], interrupt)
                })
            })
        })
    }

    fn interrupt_path(&self, outage: Duration, moves: Option<[IpAddr; 2]>) -> Result<()> {
        let nothing = Faults {
            loss: 1.0,
            ..Faults::default()
        };
        self.wire.set(WireFaults::both(nothing))?;
        self.plan.interrupt.sleep(outage)?;
        if let Some(addresses) = moves {
            readdress(&self.hosts.a, addresses)?;
        }
        self.wire.set(self.faults)
    }
}

/// Configures a host for a long and fast path. Neighbour entries stay valid, because a path over
/// routers does not resolve addresses after an outage.
fn prepare(host: &Host) -> Result<()> {
    for name in ["tcp_rmem", "tcp_wmem"] {
        let sizes = format!("4096 131072 {TCP_BUFFER}");
        host.write_sysctl(&format!("net/ipv4/{name}"), &sizes)?;
    }
    let name = format!("net/ipv4/neigh/{}/base_reachable_time_ms", host.device);
    host.write_sysctl(&name, &NEIGHBOUR_MS.to_string())
}

/// Replaces an address of a host on the link.
fn readdress(host: &Host, addresses: [IpAddr; 2]) -> Result<()> {
    host.replace_address(&host.device, addresses.map(network))
}

/// Waits until more has arrived on every meter: voice there and back, and the stream.
fn wait_for_flows(meters: [&Meter; 3], interrupt: &Interrupt) -> Result<Figures> {
    let start = Instant::now();
    let before = meters.map(Meter::bytes);
    let mut after: [Option<Duration>; 3] = [None; 3];
    while after.contains(&None) && start.elapsed() < PATIENCE {
        interrupt.sleep(LOOK)?;
        for ((meter, before), after) in meters.iter().zip(before).zip(&mut after) {
            if after.is_none() && meter.bytes() > before {
                *after = Some(start.elapsed());
            }
        }
    }
    let [there, here, stream] = after;
    let voice = there.zip(here).map(|(there, here)| there.max(here));
    let Some(voice) = voice else {
        let seconds = PATIENCE.as_secs_f64();
        return Err(LabError::Timeout {
            event: "coming back".to_owned(),
            seconds,
        });
    };
    let mut figures = Figures::from([(Figure::VoiceBackS, voice.as_secs_f64())]);
    figures.extend(stream.map(|time| (Figure::TcpBackS, time.as_secs_f64())));
    Ok(figures)
}

fn voice_figures(voice: &LatencyReport) -> Vec<(Figure, f64)> {
    let mut figures = Vec::new();
    if voice.sent > 0 {
        let lost = f64::from(voice.sent - voice.received) / f64::from(voice.sent);
        figures.push((Figure::VoiceLostPercent, 100.0 * lost));
    }
    if voice.received > 0 {
        figures.push((Figure::RttMs, voice.p50_us / 1e3));
        figures.push((Figure::RttP99Ms, voice.p99_us / 1e3));
    }
    figures
}

/// Counts of the measured time.
#[derive(Clone, Copy, Debug)]
struct Watched {
    bytes: u64,
    frames: u64,
    lost: u64,
    overflowed: u64,
    late: u64,
    missed: u64,
    cpu: Duration,
    /// Payload of voice that arrived at either end.
    voice_bytes: u64,
}

impl Watched {
    fn between(before: &WireCounts, after: &WireCounts, cpu: Duration) -> Self {
        let sum = |of: fn(&crate::wire::DirectionCounts) -> u64| {
            let of = |counts: &WireCounts| of(&counts.a_to_b) + of(&counts.b_to_a);
            of(after) - of(before)
        };
        Self {
            bytes: sum(|c| c.bytes),
            frames: sum(|c| c.frames),
            lost: sum(|c| c.lost),
            overflowed: sum(|c| c.overflowed),
            late: sum(|c| c.late),
            missed: sum(|c| c.missed),
            cpu,
            voice_bytes: 0,
        }
    }

    fn figures(&self) -> [(Figure, f64); 4] {
        let percent = |count: u64| 100.0 * count as f64 / (self.frames as f64).max(1.0);
        [
            (Figure::QueueDropsPercent, percent(self.overflowed)),
            (Figure::PathLossPercent, percent(self.lost)),
            (Figure::LatePercent, percent(self.late)),
            (Figure::Missed, self.missed as f64),
        ]
    }

    /// Returns the figures for `gbit` Gbit of payload beside voice.
    fn per_gbit(&self, gbit: f64) -> Vec<(Figure, f64)> {
        if gbit <= 0.0 {
            return Vec::new();
        }
        let payload = gbit * 1e9 / 8.0 + self.voice_bytes as f64;
        vec![
            (Figure::WireBytesPerByte, self.bytes as f64 / payload),
            (Figure::CpuSecondsPerGbit, self.cpu.as_secs_f64() / gbit),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::DirectionCounts;

    #[test]
    fn both_directions_count_from_the_first_look_on() {
        let counts = |frames, overflowed, bytes| {
            let one = DirectionCounts {
                frames,
                overflowed,
                bytes,
                ..DirectionCounts::default()
            };
            WireCounts {
                a_to_b: one,
                b_to_a: one,
            }
        };
        let watched = Watched::between(
            &counts(100, 5, 1_000),
            &counts(300, 25, 51_000),
            Duration::from_millis(500),
        );
        assert!(
            watched
                .figures()
                .contains(&(Figure::QueueDropsPercent, 10.0))
        );
        // 100 kB on the wire for 80 kB of payload.
        let per_gbit = watched.per_gbit(80_000.0 * 8.0 / 1e9);
        assert!(
            per_gbit.contains(&(Figure::WireBytesPerByte, 1.25)),
            "{per_gbit:?}"
        );
    }

    #[test]
    fn voice_that_is_not_answered_has_no_round_trip() {
        let report = LatencyReport {
            sent: 4,
            ..LatencyReport::default()
        };
        assert_eq!(voice_figures(&report), [(Figure::VoiceLostPercent, 100.0)]);
    }
}
