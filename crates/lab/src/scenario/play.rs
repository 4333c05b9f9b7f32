//! One scenario played once: a tunnel; the load without the fault; the fault; the load again, and
//! the doctor meanwhile.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use seikan_diagnose::Cause;
use seikan_diagnose::trial::Attempt;
use seikan_load::stats::ratio;
use seikan_load::{Ends, LiveOptions, Meter};
use seikan_ui::Interrupt;
use serde::{Deserialize, Serialize};

use super::again::{self, Guesses};
use super::doctor::{self, Diagnosis, DoctorArguments};
use super::repair::{Repair, State};
use super::{Draw, End, FaultKind, Scenario, Site};
use crate::cleanup::private_directory;
use crate::error::{LabError, Result, setup, usage};
use crate::load::live;
use crate::site::Hosts;
use crate::tunnel::{self, Changes, Running, Tunnel, inner_device};

/// Share of the throughput that must be lost for a case to count. A control counts only if it is
/// not lost.
pub const LEAST_LOSS: f64 = 0.1;
/// Share of the offered rate that must get through without the fault. If it is less, something else
/// is wrong, such as a busy machine.
const LEAST_HEALTHY: f64 = 0.9;
/// Time for streams to find their rate.
const WARMUP: Duration = Duration::from_secs(1);

/// Options of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct RunOptions {
    /// Duration of each measurement of throughput, in seconds.
    pub measure: f64,
    /// Duration of the doctor's measurement, in seconds; `None`: it does not run.
    pub doctor: Option<f64>,
    /// Level of the doctor, 0 to 2; `None`: its own choice.
    pub level: Option<u32>,
    /// Let the doctor try remedies, and check their effect.
    pub fix: bool,
    /// File for the doctor's recording, if any.
    pub recording: Option<PathBuf>,
    /// Run the doctor even if throughput did not fall enough for the case to count.
    pub always: bool,
    /// Print how to enter the hosts, and keep tunnel, fault and load until an interrupt.
    pub keep: bool,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self {
            measure: 3.0,
            doctor: Some(10.0),
            level: None,
            fix: false,
            recording: None,
            always: false,
            keep: false,
        }
    }
}

/// Measurements and diagnosis of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The scenario.
    pub scenario: String,
    /// The cause of the slowness.
    pub cause: Cause,
    /// Other causes that are equally correct.
    #[serde(default)]
    pub also: Vec<Cause>,
    /// The cause of a second fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second: Option<Cause>,
    /// Whether a setting of the doctor's own host would help.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fixable: bool,
    /// The tunnel.
    pub tunnel: String,
    /// Severity of the fault.
    pub severity: Option<f64>,
    /// Unit of the severity.
    pub unit: String,
    /// Throughput without the fault, in Mbit/s.
    pub healthy: f64,
    /// Throughput expected with the fault, in Mbit/s; an argument of the doctor.
    pub expected: f64,
    /// Throughput with the fault, in Mbit/s.
    pub faulty: f64,
    /// Throughput during the doctor's measurement, in Mbit/s.
    pub examined: Option<f64>,
    /// Share of the expected throughput that was lost; negative if it rose.
    pub loss: f64,
    /// Whether the case counts. Without the fault, the offered load went through; with it, the
    /// throughput fell by a tenth. The throughput of a control did not fall, not even during the
    /// doctor's measurement.
    pub counts: bool,
    /// Diagnosis of the doctor.
    pub diagnosis: Option<Diagnosis>,
    /// Causes that naive tools would have named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guesses: Option<Guesses>,
    /// Result of the doctor's changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<Repair>,
    /// Why the doctor gave no diagnosis.
    pub problem: Option<String>,
}

impl Outcome {
    /// Returns the cause that the doctor named; a cause that is equally right is returned as the
    /// scenario's. `None` if the doctor gave no verdict.
    pub fn found(&self) -> Option<Cause> {
        let found = self.diagnosis.as_ref()?.cause;
        Some(self.folded(found))
    }

    /// Whether the cause is among the first two that the doctor named.
    pub fn in_first_two(&self) -> bool {
        self.diagnosis.as_ref().is_some_and(|d| {
            std::iter::once(&d.cause)
                .chain(d.alternatives.first())
                .any(|cause| self.folded(*cause) == self.cause)
        })
    }

    /// For a double fault, returns whether the cause named first is one of the two, and whether
    /// both are among the first two named.
    pub fn of_both(&self) -> Option<[bool; 2]> {
        let both = [self.cause, self.second?];
        let Some(diagnosis) = &self.diagnosis else {
            return Some([false; 2]);
        };
        let mut named = vec![self.folded(diagnosis.cause)];
        // One cause may act through the other; then the chain has both.
        named.extend(diagnosis.chain.iter().skip(1).map(|c| self.folded(*c)));
        named.extend(diagnosis.alternatives.iter().map(|c| self.folded(*c)));
        let first_two = &named[..named.len().min(2)];
        Some([
            both.contains(&named[0]),
            both.iter().all(|cause| first_two.contains(cause)),
        ])
    }

    /// Returns the scenario's own cause in place of an equally correct one.
    pub fn folded(&self, found: Cause) -> Cause {
        if self.also.contains(&found) {
            self.cause
        } else {
            found
        }
    }
}

/// Plays `scenario` as drawn, and calls `step` before every step.
///
/// # Errors
/// [`LabError::Interrupted`]; the tunnel does not start; the fault cannot be made. Errors of the
/// doctor are in the outcome.
pub fn run(
    scenario: &Scenario,
    draw: &Draw,
    options: &RunOptions,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(&str),
) -> Result<Outcome> {
    let severity = draw.severity.unwrap_or_default();
    let fault = &scenario.fault;
    step("healthy throughput");
    let mut tunnel = lookup(&draw.tunnel, &fault.changes_without())?;
    let mut running = Some(start(scenario, severity, &tunnel, interrupt)?);
    let load = scenario.load.options();
    let healthy = match &running {
        Some(running) => measure(&running.ends(), &load, options, interrupt)?,
        None => 0.0,
    };
    if fault.needs_restart() {
        step("the tunnel again, with the fault");
        drop(running.take());
        tunnel = lookup(&draw.tunnel, &fault.changes(&draw.tunnel, severity))?;
        let _while_starting = fault.before_start(severity)?;
        running = Some(start(scenario, severity, &tunnel, interrupt)?);
    }
    let Some(mut running) = running else {
        return Err(setup("no tunnel runs: this is a bug"));
    };
    let expected = match fault.kind {
        FaultKind::Overload => severity,
        _ => healthy,
    };
    let case = Case {
        scenario,
        draw,
        options,
        interrupt,
        expected,
        sound: load.rate.is_none_or(|rate| healthy >= LEAST_HEALTHY * rate),
        load: fault.load(severity, load),
    };
    let mut outcome = case.with_fault(&running, severity, step)?;
    outcome.healthy = healthy;
    running.check_alive()?;
    if let Some(repair) = &mut outcome.repair
        && fault.kind != FaultKind::Overload
    {
        step("healthy throughput again");
        drop(running);
        let tunnel = lookup(&draw.tunnel, &fault.changes_without())?;
        let running = start(scenario, severity, &tunnel, interrupt)?;
        let load = scenario.load.options();
        let after = measure(&running.ends(), &load, options, interrupt)?;
        repair.compare(healthy.midpoint(after));
    }
    Ok(outcome)
}

/// The tunnel called `name`, if it can run here.
pub(crate) fn lookup(name: &str, changes: &Changes) -> Result<Arc<dyn Tunnel>> {
    let tunnel = tunnel::named(name, changes).ok_or_else(|| {
        usage(format!(
            "no tunnel is called `{name}`, or it cannot have this fault"
        ))
    })?;
    tunnel.availability()?;
    Ok(tunnel)
}

fn start(
    scenario: &Scenario,
    severity: f64,
    tunnel: &Arc<dyn Tunnel>,
    interrupt: &Interrupt,
) -> Result<Running> {
    let hosts = Hosts::create(tunnel.link(scenario.link()))?;
    scenario.fault.prepare(severity, &hosts)?;
    tunnel::start_between(tunnel, hosts, interrupt)
}

fn measure(
    ends: &Ends<'_>,
    load: &LiveOptions,
    options: &RunOptions,
    interrupt: &Interrupt,
) -> Result<f64> {
    live(ends, load, interrupt, |meter| {
        interrupt.sleep(WARMUP)?;
        Ok(meter.rate_over(Duration::from_secs_f64(options.measure), interrupt)?)
    })
}

/// A case once its healthy throughput is known.
struct Case<'a> {
    scenario: &'a Scenario,
    draw: &'a Draw,
    options: &'a RunOptions,
    interrupt: &'a Interrupt,
    expected: f64,
    /// Whether the tunnel was healthy before the fault.
    sound: bool,
    load: LiveOptions,
}

impl Case<'_> {
    fn with_fault(
        &self,
        running: &Running,
        severity: f64,
        step: &mut dyn FnMut(&str),
    ) -> Result<Outcome> {
        let site = Site {
            hosts: &running.hosts,
            tunnel: &self.draw.tunnel,
            started: &running.started,
        };
        step("the fault");
        let fault = &self.scenario.fault;
        // Apply the fault before the streams start: values that they learned without the fault
        // would look like a change of the path.
        let _fault = fault.apply(severity, site)?;
        let second = self.scenario.second.as_ref();
        let severity = self.draw.second.unwrap_or_default();
        let _second = second
            .map(|second| second.fault.apply(severity, site))
            .transpose()?;
        live(&running.ends(), &self.load, self.interrupt, |meter| {
            self.interrupt.sleep(fault.kind.settling())?;
            step("throughput with the fault");
            let time = Duration::from_secs_f64(self.options.measure);
            let faulty = meter.rate_over(time, self.interrupt)?;
            let mut outcome = self.outcome(faulty);
            if let Some(seconds) = self.options.doctor
                && (outcome.counts || self.options.always)
            {
                step("the doctor");
                self.examine(&site, seconds, meter, &mut outcome)?;
            }
            if self.options.keep {
                step(&whereabouts(&site));
                // An interrupt ends the wait.
                let _ = self.interrupt.sleep(Duration::MAX / 4);
            }
            Ok(outcome)
        })
    }

    /// The outcome as far as it is known before the doctor has looked.
    fn outcome(&self, faulty: f64) -> Outcome {
        let fault = &self.scenario.fault;
        let loss = 1.0 - ratio(faulty, self.expected).unwrap_or(1.0);
        Outcome {
            scenario: self.scenario.name.clone(),
            cause: self.scenario.cause,
            also: self.scenario.also.clone(),
            second: self.scenario.second.as_ref().map(|second| second.cause),
            fixable: self.scenario.fixable,
            tunnel: self.draw.tunnel.clone(),
            severity: self.draw.severity,
            unit: fault.kind.unit().to_owned(),
            healthy: self.expected,
            expected: self.expected,
            faulty,
            examined: None,
            loss,
            counts: self.sound && (loss >= LEAST_LOSS) != fault.is_none(),
            diagnosis: None,
            guesses: None,
            repair: None,
            problem: None,
        }
    }

    fn examine(
        &self,
        site: &Site<'_>,
        seconds: f64,
        meter: &Meter,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let host = match self.scenario.doctor {
            End::Sender => &site.hosts.a,
            End::Receiver => &site.hosts.b,
            End::Middle => site.hosts.middle.as_ref().unwrap_or(&site.hosts.a),
        };
        let interface = inner_device(site.tunnel, host);
        let scratch = private_directory()?;
        let thrown_away = scratch.path().join("recording.parquet");
        let kept = self.options.recording.as_deref();
        let record = kept.unwrap_or(&thrown_away);
        let arguments = DoctorArguments {
            host,
            interface: &interface,
            expected: expected_argument(self.scenario, self.expected),
            seconds,
            level: self.options.level,
            fix: self.options.fix && !self.scenario.fault.is_none(),
            record,
            run_dir: scratch.path(),
        };
        let pids = site.pids(host);
        let before = if arguments.fix {
            Some(State::of(host, &pids)?)
        } else {
            None
        };
        let (bytes, start) = (meter.bytes(), Instant::now());
        let answer = doctor::ask(&arguments, self.interrupt);
        let elapsed = start.elapsed();
        let rate = (meter.bytes() - bytes) as f64 * 8.0 / 1e6 / elapsed.as_secs_f64();
        outcome.examined = Some(rate);
        if self.scenario.fault.is_none() && rate < (1.0 - LEAST_LOSS) * self.expected {
            // This machine itself made the tunnel slow. A doctor that reports this raises no false
            // alarm.
            outcome.counts = false;
        }
        let repaired = match (&answer, &before) {
            (Ok(answer), Some(before)) => {
                self.look_after(&arguments, &answer.fixes, (before, &pids), elapsed, meter)
            }
            _ => Ok(None),
        };
        if arguments.fix {
            // Undo in any case: a change that was kept may affect the machine.
            doctor::undo(host, scratch.path(), &Interrupt::new())?;
        }
        outcome.repair = repaired?;
        if let (Some(before), Some(repair)) = (&before, &mut outcome.repair)
            && repair.kept
        {
            repair.left = before.differences(&State::of(host, &pids)?);
        }
        match answer {
            Ok(answer) => {
                outcome.diagnosis = Some(answer.diagnosis);
                again::note_guesses(outcome, record)?;
            }
            Err(LabError::Interrupted) => return Err(LabError::Interrupted),
            Err(problem) => outcome.problem = Some(problem.to_string()),
        }
        Ok(())
    }

    /// Returns the result of the doctor's changes.
    fn look_after(
        &self,
        arguments: &DoctorArguments<'_>,
        fixes: &[Attempt],
        (before, pids): (&State, &[u32]),
        elapsed: Duration,
        meter: &Meter,
    ) -> Result<Option<Repair>> {
        if fixes.is_empty() {
            return Ok(None);
        }
        self.interrupt.sleep(WARMUP)?;
        let time = Duration::from_secs_f64(self.options.measure);
        let throughput = meter.rate_over(time, self.interrupt)?;
        let mut repair = Repair::new(fixes, throughput, self.expected, elapsed.as_secs_f64());
        if !repair.kept {
            repair.left = before.differences(&State::of(arguments.host, pids)?);
        }
        Ok(Some(repair))
    }
}

/// Returns the expected throughput that the doctor gets as an argument. For a healthy paced load
/// the doctor gets none: it would otherwise take the current rate for the healthy one.
fn expected_argument(scenario: &Scenario, expected: f64) -> Option<f64> {
    let paced = scenario.fault.is_none() && scenario.load.options().rate.is_some();
    (!paced).then_some(expected)
}

/// Returns text that explains how to enter the hosts.
fn whereabouts(site: &Site<'_>) -> String {
    let mut text = String::from("kept until Ctrl-C");
    let hosts = [&site.hosts.a, &site.hosts.b];
    for process in &site.started.processes {
        let mut all = hosts.into_iter().chain(&site.hosts.middle);
        let Some(host) = all.find(|host| host.name == process.host()) else {
            continue;
        };
        text += &format!(
            "\n  host {} (interface {}): nsenter --net=/proc/{}/ns/net",
            host.name,
            inner_device(site.tunnel, host),
            process.pid()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_doctor_of_a_healthy_paced_load_does_not_get_its_pace() {
        let argument = |name: &str| {
            let scenario = Scenario::find(name).expect("a scenario");
            expected_argument(&scenario, 100.0)
        };
        assert_eq!(argument("healthy-paced"), None);
        // Without the expected rate the doctor would not know that the tunnel is slow.
        assert_eq!(argument("healthy-bulk"), Some(100.0));
        assert_eq!(argument("tun-queue-overflow"), Some(100.0));
    }
}
