//! Interruptions of a pair that exchanges packets: NATs that restart, addresses that change,
//! outages, relays and coordinators that end, wrong clocks.

use std::time::{Duration, Instant};

use seikan_ui::{Interrupt, Progress};
use serde::{Deserialize, Serialize};

use super::flow::Flow;
use super::plan::{Cell, Event, Happening, PathKind};
use super::{ASK, NatOptions, PAIRS, PAIRS_EACH, Plan, Setting, Stage, clock, side_by_side};
use crate::error::{Result, usage};

/// Maximum time until the pair uses the path expected before the event.
const FIRST: Duration = Duration::from_secs(20);
/// Time for which the pair exchanges packets before the event.
const REST: Duration = Duration::from_secs(2);
/// Time for which the pair must use the expected path after the event: longer than a path that has
/// failed can still appear to be in use.
const STEADY: Duration = Duration::from_secs(4);
/// Time to wait beyond the limit for a late result.
const SLACK: Duration = Duration::from_secs(10);
/// Maximum time until TCP retransmits after an outage (RFC 6298: its timeout doubles each time).
const TCP: Duration = Duration::from_secs(40);

/// Result of an event. Times in seconds after the event.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EventRow {
    /// Its name in the file.
    pub event: String,
    /// The event, and the reason for its expected result.
    pub about: String,
    /// Paths that A and B used before the event.
    pub before: [PathKind; 2],
    /// Path that both were expected to use after the event.
    pub expected: PathKind,
    /// Paths that A and B used after the event; `None`: nothing arrived.
    pub found: [PathKind; 2],
    /// Longest time in which nothing arrived, and its limit.
    pub gap: [f64; 2],
    /// Time until both used the expected path; absent if they never did.
    pub settled: Option<f64>,
    /// Limit of `settled`.
    pub settled_within: f64,
    /// Longest pause of a TCP connection that existed before the event; absent if it ended, or was
    /// not expected to survive.
    pub tcp: Option<f64>,
    /// Differences from the expected result; empty if there are none.
    pub wrong: Vec<String>,
}

/// Results of all events.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EventReport {
    /// Each event.
    pub rows: Vec<EventRow>,
}

impl EventReport {
    /// Whether any result differs from the expected one.
    pub fn failed(&self) -> bool {
        self.rows.iter().any(|row| !row.wrong.is_empty())
    }
}

/// Plays all events, and calls `progress` before each.
///
/// # Errors
/// A program does not start, or the kernel refuses an operation; [`Usage`](crate::error::LabError::Usage);
/// [`Interrupted`](crate::error::LabError::Interrupted).
pub fn events(
    plan: &Plan,
    options: &NatOptions,
    interrupt: &Interrupt,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<EventReport> {
    for name in &options.only {
        if !plan.events.iter().any(|event| event.name == *name) {
            let all: Vec<&str> = plan.events.iter().map(|e| e.name.as_str()).collect();
            let all = all.join(", ");
            return Err(usage(format!(
                "no event is called `{name}`: use one of {all}"
            )));
        }
    }
    let wanted = |event: &&Event| options.only.is_empty() || options.only.contains(&event.name);
    let chosen: Vec<&Event> = plan.events.iter().filter(wanted).collect();
    let delay = Duration::from_secs_f64(plan.delay_ms / 1000.0);
    let rows = side_by_side(
        &chosen,
        options.jobs,
        progress,
        |number, event, progress| {
            interrupt.check()?;
            progress(event.name.clone());
            let cell = Cell {
                nats: [plan.nat(&event.nats[0])?, plan.nat(&event.nats[1])?],
                shared: Vec::new(),
                path: event.path,
                family: None,
                why: event.about.clone(),
                within: None,
            };
            let setting = Setting {
                relays: event.relays,
                clocks: event.clocks.clone(),
                ..Setting::of(&cell, delay, number)
            };
            Stage::set(&setting, interrupt)?.play_event(event, interrupt)
        },
    )?;
    Ok(EventReport { rows })
}

impl Stage {
    /// Starts B, makes the event happen, and observes the result.
    fn play_event(&mut self, event: &Event, interrupt: &Interrupt) -> Result<EventRow> {
        self.start_b(&clock::environment(event.clocks.b.as_deref())?)?;
        let flow = self.flow()?;
        self.settle(event.path, &flow, [FIRST, REST], interrupt)?;
        let before = self.paths(&flow)?;
        let connection = if event.tcp && event.path != PathKind::None {
            let [a, b] = &self.members;
            let connection = Flow::over_tcp(&b.host, &a.host, a.address)?;
            interrupt.sleep(REST)?;
            connection.reset();
            Some(connection)
        } else {
            None
        };
        flow.reset();
        let started_at = Instant::now();
        self.happen(&event.happens, interrupt)?;
        let expected = event.then.unwrap_or(event.path);
        let within = Duration::from_secs_f64(event.settled) + SLACK;
        let within = within.saturating_sub(started_at.elapsed());
        let settled = self.settle(expected, &flow, [within, STEADY], interrupt)?;
        let settled = settled.map(|at| at - started_at);
        let gap = match expected {
            // If nothing is expected to arrive, the gap never ends and does not count.
            PathKind::None => Duration::ZERO,
            _ => flow.seen().longest(),
        };
        let found = self.paths(&flow)?;
        let tcp = match connection {
            Some(connection) if expected != PathKind::None => resumed(&connection, interrupt)?,
            _ => None,
        };
        let mut row = EventRow {
            event: event.name.clone(),
            about: event.about.clone(),
            before,
            expected,
            found,
            gap: [gap.as_secs_f64(), event.gap],
            settled: settled.map(|time| time.as_secs_f64()),
            settled_within: event.settled,
            tcp: tcp.map(|time| time.as_secs_f64()),
            wrong: Vec::new(),
        };
        row.compare(event);
        if let Some(words) = &event.says
            && !self.status(1)?.to_string().contains(words)
        {
            row.wrong.push(format!("status does not say `{words}`"));
        }
        Ok(row)
    }

    /// Returns the path by which each end sends, if anything arrives.
    fn paths(&self, flow: &Flow) -> Result<[PathKind; 2]> {
        let lately = |at: Instant| at.elapsed() < Duration::from_millis(500);
        if !flow.seen().latest.is_some_and(lately) {
            return Ok([PathKind::None; 2]);
        }
        Ok([self.path(0)?, self.path(1)?])
    }

    /// Waits until both ends use this path, and have done so for a while. Returns since when.
    fn settle(
        &mut self,
        path: PathKind,
        flow: &Flow,
        [within, steady]: [Duration; 2],
        interrupt: &Interrupt,
    ) -> Result<Option<Instant>> {
        let started_at = Instant::now();
        let mut since = None;
        loop {
            self.check_alive()?;
            let now = Instant::now();
            let there = is(self.paths(flow)?, path);
            since = since.filter(|_| there).or(there.then_some(now));
            if since.is_some_and(|since| since.elapsed() >= steady) {
                return Ok(since);
            }
            if since.is_none() && started_at.elapsed() > within {
                return Ok(None);
            }
            interrupt.sleep(ASK)?;
        }
    }

    fn happen(&mut self, what: &Happening, interrupt: &Interrupt) -> Result<()> {
        match what {
            Happening::Nothing => {}
            Happening::RestartNat { source } => self.site.restart_nat(source.as_deref())?,
            Happening::ChangeAddress => self.site.change_address()?,
            Happening::Outage(seconds) => {
                self.site.cut(true)?;
                interrupt.sleep(Duration::from_secs_f64(*seconds))?;
                self.site.cut(false)?;
            }
            Happening::KillRelay => {
                // Identify the relay by the port. Both ends use the same one.
                let endpoint = &self.status(1)?["peers"][0]["path"]["endpoint"];
                let endpoint: Option<std::net::SocketAddr> =
                    endpoint.as_str().and_then(|text| text.parse().ok());
                let port = endpoint.map_or(PAIRS, |at| at.port()).max(PAIRS);
                let used = usize::from((port - PAIRS) / PAIRS_EACH);
                let last = self.relays.len().saturating_sub(1);
                self.relays.remove(used.min(last)).kill();
            }
            Happening::CoordinatorAway(seconds) => {
                if let Some(coordinator) = self.coordinator.take() {
                    coordinator.kill();
                }
                interrupt.sleep(Duration::from_secs_f64(*seconds))?;
                self.coordinator = Some(self.mesh.start_coordinator(self.site.internet().0)?);
            }
            Happening::RestartWithRightClock => {
                drop(self.tunnels.processes.pop());
                self.start_b(&[])?;
            }
        }
        Ok(())
    }
}

/// Returns the longest pause of a connection, after it has resumed.
fn resumed(connection: &Flow, interrupt: &Interrupt) -> Result<Option<Duration>> {
    let started_at = Instant::now();
    while started_at.elapsed() < TCP {
        let seen = connection.seen();
        if seen.latest.is_some_and(|at| at > started_at) {
            return Ok(Some(seen.gap));
        }
        interrupt.sleep(ASK)?;
    }
    Ok(None)
}

/// Whether both ends use this path. For a relay, one direction is enough.
fn is(ways: [PathKind; 2], path: PathKind) -> bool {
    match path {
        PathKind::Relay => ways.contains(&path),
        _ => ways == [path; 2],
    }
}

impl EventRow {
    /// Records the differences from the expectation.
    fn compare(&mut self, event: &Event) {
        if !is(self.before, event.path) {
            self.wrong.push("another path before".to_owned());
        }
        if !is(self.found, self.expected) {
            self.wrong.push("another path after".to_owned());
        }
        let [gap, most] = self.gap;
        if gap > most {
            self.wrong.push(format!("nothing arrived for {gap:.1} s"));
        }
        if self.settled.is_none_or(|time| time > event.settled) {
            self.wrong.push("late".to_owned());
        }
        let goes_on = event.tcp && event.path != PathKind::None && self.expected != PathKind::None;
        if goes_on && self.tcp.is_none() {
            self.wrong.push("TCP does not go on".to_owned());
        }
    }
}
