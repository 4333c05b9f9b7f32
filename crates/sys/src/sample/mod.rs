//! Samples of everything about a path that can be read cheaply.
//!
//! A [`Sampler`] opens its files and sockets once, for the interfaces, program and sockets of a
//! path. [`Sampler::sample`] then reads everything, about ten times a second: [`host`] (protocol
//! counters, pressure, connection tracking), [`cpu`], [`link`] (interfaces and queueing
//! disciplines), [`program`] (process, threads, control group), [`socket`] (UDP sockets, TCP
//! connections), [`switch`] (the datapath of Open vSwitch), [`drops`] (dropped packets by reason),
//! and, on request, [`calls`] (calls of kernel functions). Values that cannot be read are missing
//! from the sample, never zero, and [`Sampler::missing`] lists each once with its reason.
//!
//! Files of `/proc` and netlink sockets belong to the network namespace of the thread that called
//! [`Sampler::new`], whichever thread samples. Processors, pressure, drops by reason and calls are
//! those of the machine.

mod calls;
mod cpu;
mod drops;
mod file;
mod host;
mod link;
mod program;
mod socket;
mod switch;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::io;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use seikan_observe::path::{PathMap, SocketFacts, Unseen};
use seikan_observe::{Key, Kind, Sample, Subject};

/// Maximum number of reasons that are kept.
const MISSING_MAX: usize = 256;

/// Why samples are not possible at all.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// The counters that every Linux has cannot be read.
    #[error("cannot read {path}: {source}; is /proc mounted?")]
    Proc {
        /// The file.
        path: String,
        /// The cause.
        source: io::Error,
    },
}

/// Reads samples of a path.
#[derive(Debug)]
pub struct Sampler {
    first: Option<Instant>,
    output: Output,
    host: host::Host,
    cpu: cpu::Cpu,
    link: link::Links,
    program: Option<program::Program>,
    socket: socket::Sockets,
    switch: Option<switch::Switch>,
    drops: Option<drops::Drops>,
    calls: Option<calls::Counted>,
}

impl Sampler {
    /// Opens the available files and sockets, in the calling thread's network namespace.
    ///
    /// # Errors
    /// `/proc` lacks the protocol counters. Everything else that is missing is listed by
    /// [`Self::missing`].
    pub fn new(map: &PathMap) -> Result<Self, SampleError> {
        let mut sampler = Self::of_counters(map)?;
        sampler.drops = Some(drops::Drops::open(&mut sampler.output));
        Ok(sampler)
    }

    /// Like [`Self::new`] without tracepoints: only values that every user may read.
    ///
    /// # Errors
    /// Like [`Self::new`].
    pub fn of_counters(map: &PathMap) -> Result<Self, SampleError> {
        let mut output = Output::default();
        Ok(Sampler {
            first: None,
            host: host::Host::open(&mut output)?,
            cpu: cpu::Cpu::open(&mut output),
            link: link::Links::open(map, &mut output),
            program: program::Program::open(map, &mut output),
            socket: socket::Sockets::open(map, &mut output),
            switch: switch::Switch::open(map, &mut output),
            drops: None,
            calls: None,
            output,
        })
    }

    /// From now on, also samples the calls of kernel functions, where they can be counted. Each
    /// such call costs the machine time until the sampler is dropped.
    pub fn count_calls(&mut self) {
        self.calls = calls::Counted::open(&mut self.output);
    }

    /// From now on, also samples every TCP connection with a local or remote address in one of
    /// these networks (an address is a network of one), in addition to those of the path.
    pub fn follow<A: Copy + Into<IpNet>>(&mut self, addresses: &[A]) {
        self.socket
            .follow(addresses.iter().map(|address| (*address).into()));
    }

    /// Takes a sample.
    pub fn sample(&mut self) -> Sample {
        let now = Instant::now();
        let first = *self.first.get_or_insert(now);
        let expected = self.output.values.capacity();
        let output = &mut self.output;
        self.host.sample(output);
        self.cpu.sample(output);
        self.link.sample(now, output);
        if let Some(program) = &mut self.program {
            program.sample(now, output);
        }
        self.socket.sample(now, output);
        if let Some(switch) = &mut self.switch {
            switch.sample(now, output);
        }
        if let Some(drops) = &mut self.drops {
            drops.sample(output);
        }
        if let Some(calls) = &mut self.calls {
            calls.sample(output);
        }
        Sample {
            at: now - first,
            values: std::mem::replace(&mut output.values, Vec::with_capacity(expected)),
        }
    }

    /// Returns the TCP connections through the inner interface: those of the path, and those found
    /// since by [`Self::follow`], including those that have ended.
    pub fn flows(&self) -> Vec<SocketFacts> {
        self.socket.flows()
    }

    /// Returns the threads of the program by id, with their names: those of the path, and those
    /// found since.
    pub fn threads(&self) -> Vec<(u32, String)> {
        let program = self.program.as_ref();
        program.map(program::Program::threads).unwrap_or_default()
    }

    /// Returns the values that could not be read so far, with the reasons.
    pub fn missing(&self) -> &[Unseen] {
        &self.output.missing
    }
}

/// The values of one sample, and the missing ones.
#[derive(Debug, Default)]
struct Output {
    values: Vec<(Key, Kind, u64)>,
    missing: Vec<Unseen>,
}

impl Output {
    fn push(
        &mut self,
        subject: &Subject,
        name: impl Into<Cow<'static, str>>,
        kind: Kind,
        value: u64,
    ) {
        let key = Key::new(subject.clone(), name);
        self.values.push((key, kind, value));
    }

    fn counter(&mut self, subject: &Subject, name: &'static str, value: impl Into<u64>) {
        self.push(subject, name, Kind::Counter, value.into());
    }

    fn gauge(&mut self, subject: &Subject, name: &'static str, value: impl Into<u64>) {
        self.push(subject, name, Kind::Gauge, value.into());
    }

    /// Keeps the first reason why a value is missing.
    fn missing(&mut self, name: &str, why: impl std::fmt::Display) {
        let known = self.missing.iter().any(|unseen| unseen.what == name);
        if !known && self.missing.len() < MISSING_MAX {
            self.missing.push(Unseen {
                what: name.to_owned(),
                why: why.to_string(),
            });
        }
    }

    /// Keeps the reason of a failure, and returns the value of a success.
    fn keep<T, E: std::fmt::Display>(&mut self, name: &str, outcome: Result<T, E>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                self.missing(name, error);
                None
            }
        }
    }
}

/// Decides when a search is due: immediately, and then from time to time.
#[derive(Debug)]
struct Again {
    every: Duration,
    last: Option<Instant>,
}

impl Again {
    /// Interval between two searches for new threads and recreated interfaces.
    const SECOND: Duration = Duration::from_secs(1);

    fn every(every: Duration) -> Self {
        Again { every, last: None }
    }

    fn due(&mut self, now: Instant) -> bool {
        let due = self.last.is_none_or(|last| now - last >= self.every);
        if due {
            self.last = Some(now);
        }
        due
    }
}
