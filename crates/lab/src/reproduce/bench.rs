//! Common parts of the experiments: links and tunnels, steps, and interleaved rounds.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use seikan_ui::{Interrupt, Progress};

use super::figures::Row;
use super::source::{GIGABIT, Source};
use super::{Experiment, ReproduceOptions};
use crate::error::Result;
use crate::scenario::lookup;
use crate::site::Link;
use crate::tunnel::{self, Changes, Running, Tunnel};

/// Common parts of the experiments.
pub(super) struct Bench<'a> {
    pub(super) desk: Desk<'a>,
    pub(super) progress: &'a mut dyn FnMut(Progress),
    /// Number of steps so far, and approximate number of all steps ([`Source::steps`]).
    pub(super) steps: (f64, f64),
}

/// Parts that a diagnosis needs. Other threads may use them.
#[derive(Clone, Copy)]
pub(super) struct Desk<'a> {
    pub(super) options: &'a ReproduceOptions,
    pub(super) interrupt: &'a Interrupt,
    pub(super) source: Source,
}

impl<'a> Deref for Bench<'a> {
    type Target = Desk<'a>;

    fn deref(&self) -> &Desk<'a> {
        &self.desk
    }
}

impl Bench<'_> {
    /// Returns the duration of a load's measurement.
    pub(super) fn time(&self) -> Duration {
        Duration::from_secs_f64(self.options.seconds)
    }

    /// Returns a link of this rate in bit/s.
    pub(super) fn link(&self, rate: Option<u64>) -> Link {
        Link {
            rate,
            congestion: self.options.congestion,
            ..Link::default()
        }
    }

    /// Returns the rates of the links for the main rows: without a limit, and the published rate.
    pub(super) fn rates(&self) -> [Option<u64>; 2] {
        [None, Some(self.source.rate())]
    }

    /// Starts a tunnel as it is, over a link of this rate.
    pub(super) fn start(&self, tunnel: &str, rate: Option<u64>) -> Result<Running> {
        self.start_over(&plain(tunnel)?, self.link(rate))
    }

    /// Starts a tunnel over a link.
    pub(super) fn start_over(&self, tunnel: &Arc<dyn Tunnel>, link: Link) -> Result<Running> {
        tunnel::start(tunnel, link, self.interrupt)
    }

    /// Reports the start of a step.
    pub(super) fn step(&mut self, what: impl fmt::Display) -> Result<()> {
        self.interrupt.check()?;
        let (done, all) = self.steps;
        let step = format!("{}: {what}", self.source);
        (self.progress)(Progress {
            fraction: (done / all).min(1.0),
            step,
        });
        self.steps.0 += 1.0;
        Ok(())
    }
}

/// Returns a title with the rate of the link, if it is limited.
pub(super) fn titled(title: &str, rate: Option<u64>) -> String {
    match rate {
        Some(rate) => format!("{title}, link of {} Gbit/s", rate / GIGABIT),
        None => title.to_owned(),
    }
}

/// Returns the tunnel with this name, without changes.
pub(super) fn plain(name: &str) -> Result<Arc<dyn Tunnel>> {
    lookup(name, &Changes::default())
}

/// Sets the tunnel's interface in both hosts.
pub(super) fn set_both(running: &Running, words: &str) -> Result<()> {
    let mut hosts = running.hosts.both().into_iter();
    hosts.try_for_each(|host| host.set_link(&running.device(host), words))
}

/// Results of rows that were measured in interleaved rounds; `None` where a measurement failed.
pub(super) struct Measured<'a, R, T> {
    pub(super) rows: &'a [R],
    pub(super) results: Vec<Vec<Option<T>>>,
}

impl<'a, R, T> Measured<'a, R, T> {
    /// The rows with their results.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&'a R, &Vec<Option<T>>)> {
        self.rows.iter().zip(&self.results)
    }

    /// Rows of figures, with a value of each result.
    pub(super) fn rows(
        &self,
        row: impl Fn(&R) -> Row,
        value: impl Fn(&T) -> Option<f64>,
    ) -> impl Iterator<Item = Row> {
        let value = move |result: &Option<T>| value(result.as_ref()?);
        self.iter()
            .map(move |(of, results)| row(of).with(results.iter().map(&value)))
    }
}

impl Bench<'_> {
    /// Measures rows in interleaved rounds. Failures are added to the experiment.
    pub(super) fn rounds<'a, R, T, N: fmt::Display>(
        &mut self,
        rows: &'a [R],
        name: impl Fn(&'a R) -> N,
        found: &mut Experiment,
        measure: impl FnMut(&mut Bench<'_>, &'a R) -> Result<T>,
    ) -> Result<Measured<'a, R, T>> {
        let rounds = self.options.rounds;
        self.so_many_rounds(rounds, (rows, name), found, measure)
    }

    /// Measures rows in a given number of interleaved rounds.
    pub(super) fn so_many_rounds<'a, R, T, N: fmt::Display>(
        &mut self,
        rounds: u32,
        (rows, name): (&'a [R], impl Fn(&'a R) -> N),
        found: &mut Experiment,
        mut measure: impl FnMut(&mut Bench<'_>, &'a R) -> Result<T>,
    ) -> Result<Measured<'a, R, T>> {
        let mut results: Vec<Vec<Option<T>>> = rows.iter().map(|_| Vec::new()).collect();
        for round in 1..=rounds {
            for (row, results) in rows.iter().zip(&mut results) {
                let name = name(row);
                self.step(format!("{name}, round {round}/{rounds}"))?;
                let context = format!("{name}, round {round}");
                results.push(found.unless_failed(&context, measure(self, row))?);
            }
        }
        Ok(Measured { rows, results })
    }
}
