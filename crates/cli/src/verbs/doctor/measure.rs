//! Measures a tunnel: finds its path, then samples it while probes run, and returns a
//! [`Recording`]. Samples go to a sink: a diagnosis keeps them in memory, a long recording writes
//! them to a file.

use std::collections::HashMap;
use std::net::IpAddr;
use std::ops::ControlFlow;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{anyhow, bail};
use clap::Args;
use ipnet::IpNet;
use seikan_diagnose::{Cost, Evidence, Probes, Recording};
use seikan_node::control::{RuntimeDirs, ask};
use seikan_observe::path::{PathMap, SocketFacts, Unseen};
use seikan_observe::{Key, Kind, Sample, Series, Subject, metric};
use seikan_sys::discover;
use seikan_sys::netlink::{Address, Netlink};
use seikan_sys::process::own_cpu_time;
use seikan_sys::profile::{self, Profiler};
use seikan_sys::sample::Sampler;
use seikan_ui::{Interrupt, Progress, ProgressBar};

use super::probe::{Found, Prober};

/// Shortest measurement that can be diagnosed.
const SHORTEST: Duration = Duration::from_secs(1);
/// Routes with a shorter prefix replace the default route: they split it in two or four to take precedence.
const DEFAULT_ROUTE: u8 = 4;
/// Samples between two searches for a target of probes.
const SEARCH_EVERY: u32 = 5;
/// Targets that are probed, one after the other, until one answers.
const TARGETS: usize = 2;

/// Time after which the profiler's rings are emptied: with call stacks they hold four seconds.
const DRAIN: Duration = Duration::from_secs(1);

/// Arguments that select the tunnel.
#[derive(Debug, Args)]
pub struct TunnelArguments {
    /// Interface of the tunnel [default: the tunnel that carries most]
    #[arg(long, value_name = "INTERFACE", conflicts_with = "pid")]
    iface: Option<String>,
    /// Process of the tunnel
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,
    /// Expected throughput in Mbit/s; more than a tenth below it is slow
    #[arg(long, value_name = "MBIT", value_parser = megabits)]
    expect: Option<f64>,
}

/// Parses megabits per second of the command line.
pub fn megabits(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err("must be above 0, such as 900".into())
    }
}

impl TunnelArguments {
    /// The interface of `--iface`.
    pub fn interface(&self) -> Option<&str> {
        self.iface.as_deref()
    }

    /// Finds the path of the interface, of the process, or of the tunnel that carries most.
    pub fn path(&self) -> anyhow::Result<PathMap> {
        self.path_or(None)
    }

    /// Finds the path as [`Self::path`] does. `other` is the interface to use if the command line
    /// names neither an interface nor a process.
    pub fn path_or(&self, other: Option<String>) -> anyhow::Result<PathMap> {
        let subject = match (&self.iface, self.pid, other) {
            (Some(name), ..) => discover::Subject::Interface(name.clone()),
            (None, Some(pid), _) => discover::Subject::Process(pid),
            (None, None, Some(name)) => discover::Subject::Interface(name),
            (None, None, None) => discover::Subject::Anything,
        };
        discover::path(&subject).map_err(|error| match self.without_interface() {
            Some(name) => anyhow!(
                "`{name}` runs without root: it has no interface to diagnose; `seikan status {name}` shows its counters and drops, and `seikan bench` measures the path to \
                 another host"
            ),
            None => error.into(),
        })
    }

    /// Returns the name of the chosen tunnel if it has no interface.
    fn without_interface(&self) -> Option<String> {
        let dirs = RuntimeDirs::for_client(self.interface());
        let names = match &self.iface {
            Some(name) => vec![name.clone()],
            None => ask::running(&dirs).unwrap_or_default(),
        };
        let is_chosen = |name: &String| {
            let pid = self.pid;
            pid.is_none_or(|pid| ask::pid(&dirs, name).is_ok_and(|own| own == pid))
        };
        let has_none =
            |name: &String| ask::status(&dirs, name).is_ok_and(|status| status.userspace.is_some());
        names
            .into_iter()
            .find(|name| is_chosen(name) && has_none(name))
    }

    /// Expected throughput, bits per second.
    pub fn expected(&self) -> Option<f64> {
        self.expect.map(|megabits| megabits * 1e6)
    }
}

/// Arguments that select the tunnel and the depth of the measurement.
#[derive(Debug, Args)]
pub struct SamplingArguments {
    /// The tunnel.
    #[command(flatten)]
    pub tunnel: TunnelArguments,
    /// Time between two samples, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(10..=1000))]
    interval: u32,
    /// Depth: 0 counters that every user may read, 1 also drops by reason, 2 also processor time by
    /// function, 3 also calls of kernel functions, which slows them down
    #[arg(long, value_name = "LEVEL", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=3))]
    level: u32,
    /// Send no probes
    #[arg(long)]
    no_probe: bool,
}

impl SamplingArguments {
    /// Returns the options of a measurement of `seconds`; `stacks`: with call stacks.
    pub fn options(&self, seconds: u32, stacks: bool) -> Options {
        Options {
            length: Duration::from_secs(seconds.into()),
            interval: Duration::from_millis(self.interval.into()),
            probe: !self.no_probe,
            expected: self.tunnel.expected(),
            level: self.level,
            stacks,
        }
    }
}

/// Options of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Duration.
    pub length: Duration,
    /// Time between two samples.
    pub interval: Duration,
    /// Whether probes are sent.
    pub probe: bool,
    /// Expected throughput, bits per second.
    pub expected: Option<f64>,
    /// 0 counters, 1 also tracepoints, 2 also processor time by function, 3 also calls of kernel functions.
    pub level: u32,
    /// Whether samples of processor time include call stacks.
    pub stacks: bool,
}

/// Consumes samples; `Break` ends the measurement.
pub type Sink<'a> = &'a mut dyn FnMut(Sample) -> anyhow::Result<ControlFlow<()>>;

/// Samples the path and keeps every sample. Ctrl-C ends it with the samples so far.
///
/// # Errors
/// Those of [`measure`].
pub fn whole(map: PathMap, options: &Options, interrupt: &Interrupt) -> anyhow::Result<Recording> {
    let mut series = Series::default();
    let mut keep = |sample| {
        series.push(sample);
        Ok(ControlFlow::Continue(()))
    };
    let mut recording = measure(map, options, interrupt, &mut keep)?;
    recording.evidence.series = series;
    Ok(recording)
}

/// Samples the path for a time, without probes.
///
/// # Errors
/// The path cannot be sampled, or the interrupt was raised.
pub fn watch(map: &PathMap, length: Duration, interrupt: &Interrupt) -> anyhow::Result<Evidence> {
    /// Short enough for means of gauges, long enough to cost little.
    const INTERVAL: Duration = Duration::from_millis(250);
    let mut sampler = Sampler::of_counters(map)?;
    sampler.follow(&through(map));
    let mut series = Series::default();
    let started = Instant::now();
    loop {
        series.push(sampler.sample());
        let left = length.saturating_sub(started.elapsed());
        if left.is_zero() {
            break;
        }
        interrupt.sleep(left.min(INTERVAL))?;
    }
    let mut evidence = Evidence {
        map: map.clone(),
        series,
        ..Evidence::default()
    };
    evidence.map.flows = sampler.flows();
    Ok(evidence)
}

/// Samples the path. Ctrl-C ends it with the samples so far. Samples go to the sink; the series of
/// the recording is empty.
///
/// # Errors
/// The path cannot be sampled, the interrupt was raised within the first second, or the sink failed.
pub fn measure(
    map: PathMap,
    options: &Options,
    interrupt: &Interrupt,
    sink: Sink,
) -> anyhow::Result<Recording> {
    let started = Instant::now();
    let spent = own_cpu_time()?.total();
    let mut sampler = match options.level {
        0 => Sampler::of_counters(&map)?,
        _ => Sampler::new(&map)?,
    };
    if options.level >= 3 {
        sampler.count_calls();
    }
    sampler.follow(&through(&map));
    let pid = map.program.as_ref().map(|program| program.pid);
    let clock = profile::Options {
        stacks: options.stacks,
        ..profile::Options::default()
    };
    let profiler = (options.level >= 2).then(|| Profiler::start(pid, clock));
    let (profiler, refused) = match profiler.transpose() {
        Ok(profiler) => (profiler, None),
        Err(error) => (None, Some(error)),
    };
    let mut sampling = Sampling {
        sampler,
        profiler,
        probing: Probing {
            wanted: options.probe,
            prober: None,
        },
        taken: 0,
        shortest: HashMap::new(),
    };
    let first = SystemTime::now();
    sampling.run(&map, options, interrupt, sink)?;
    let Sampling {
        sampler,
        profiler,
        probing,
        taken,
        shortest,
    } = sampling;
    let functions = profiler.map(|profiler| profiler.stop().functions());
    let found = probing.finish(interrupt.is_raised());
    let mut evidence = Evidence {
        expected: options.expected,
        map,
        ..Evidence::default()
    };
    evidence.map.flows = sampler.flows();
    if let Some(program) = &mut evidence.map.program {
        program.threads = sampler.threads();
    }
    evidence.map.unseen.extend_from_slice(sampler.missing());
    add_probes(found, &shortest, &mut evidence);
    if let Some(functions) = &functions {
        evidence.profile = seikan_diagnose::profile(functions);
        evidence.map.unseen.extend_from_slice(&functions.unseen);
    }
    evidence.map.unseen.extend(refused.map(|error| Unseen {
        what: "processor time by function".to_owned(),
        why: error.to_string(),
    }));
    let cost = Cost {
        seconds: started.elapsed().as_secs_f64(),
        cpu_seconds: own_cpu_time()?.total().saturating_sub(spent).as_secs_f64(),
        samples: taken,
    };
    Ok(Recording {
        started_at: first,
        evidence,
        functions,
        attempts: Vec::new(),
        cost,
    })
}

/// The parts of a measurement that run at the same time.
struct Sampling {
    sampler: Sampler,
    profiler: Option<Profiler>,
    probing: Probing,
    /// Samples so far.
    taken: u32,
    /// The shortest round trip that each TCP connection saw, microseconds, by its inode.
    shortest: HashMap<u64, u64>,
}

impl Sampling {
    fn run(
        &mut self,
        map: &PathMap,
        options: &Options,
        interrupt: &Interrupt,
        sink: Sink,
    ) -> anyhow::Result<()> {
        let bar = ProgressBar::new();
        let name = map.inner.as_deref().unwrap_or("the tunnel");
        let started = Instant::now();
        let mut next = started;
        let mut drained = started;
        loop {
            if sink(self.sample(map))?.is_break() {
                return Ok(());
            }
            let elapsed = started.elapsed();
            if let Some(profiler) = &mut self.profiler
                && drained.elapsed() >= DRAIN
            {
                profiler.drain();
                drained = Instant::now();
            }
            if elapsed >= options.length {
                return Ok(());
            }
            bar.show(Progress {
                fraction: elapsed.as_secs_f64() / options.length.as_secs_f64(),
                step: format!("measuring {name} (Ctrl-C to end)"),
            });
            // A late sample does not shorten the next intervals.
            next = (next + options.interval).max(Instant::now());
            if interrupt
                .sleep_until(next.min(started + options.length))
                .is_err()
            {
                if started.elapsed() >= SHORTEST {
                    return Ok(());
                }
                bail!(
                    "interrupted after {:.1} s: a diagnosis needs {} s",
                    started.elapsed().as_secs_f64(),
                    SHORTEST.as_secs()
                );
            }
        }
    }

    /// Takes the next sample, with the round trips of probes since the last one.
    fn sample(&mut self, map: &PathMap) -> Sample {
        let mut sample = self.sampler.sample();
        sample.values.extend(self.probing.newest_rtt().map(|rtt| {
            let key = Key::new(Subject::Probe, metric::PROBE_INNER_RTT_US);
            (key, Kind::Gauge, rtt)
        }));
        if self.taken.is_multiple_of(SEARCH_EVERY) {
            self.probing.find_target(map, &self.sampler.flows());
        }
        self.taken += 1;
        for (key, _, value) in &sample.values {
            if let Subject::Tcp(inode) = key.subject
                && key.name == metric::TCP_MIN_RTT_US
            {
                self.shortest.insert(inode, *value);
            }
        }
        sample
    }
}

/// Returns the networks whose connections go through the tunnel: those of its addresses and of its
/// routes. A default route is excluded: it would include the tunnel's own connection.
pub fn through(map: &PathMap) -> Vec<IpNet> {
    let Some(inner) = &map.inner else {
        return Vec::new();
    };
    // If the addresses cannot be listed, only the connections that exist at the start are known.
    let own = discover::addresses(inner).unwrap_or_default();
    let routed = discover::routed(inner).unwrap_or_default();
    let routed = routed
        .into_iter()
        .filter(|net| net.prefix_len() >= DEFAULT_ROUTE);
    own.into_iter().chain(routed).collect()
}

/// Probes, which start when a target is known.
struct Probing {
    wanted: bool,
    prober: Option<Prober>,
}

impl Probing {
    /// Starts the probes if a target is known: the far ends of connections through the tunnel, then
    /// the host at the other end of the interface.
    fn find_target(&mut self, map: &PathMap, flows: &[SocketFacts]) {
        let Some(link) = map
            .inner_link()
            .filter(|_| self.wanted && self.prober.is_none())
        else {
            return;
        };
        let remotes = flows.iter().filter_map(|flow| flow.remote);
        let mut targets: Vec<IpAddr> = remotes.map(|remote| remote.ip().to_canonical()).collect();
        targets.sort();
        targets.dedup();
        targets.truncate(TARGETS - 1);
        targets.extend(far_end(&link.name).unwrap_or_default());
        targets.dedup();
        targets.truncate(TARGETS);
        if !targets.is_empty() {
            self.prober = Some(Prober::start(link.name.clone(), link.mtu, targets));
        }
    }

    /// Returns the newest round trip since the last call, microseconds.
    fn newest_rtt(&self) -> Option<u64> {
        self.prober.as_ref()?.round_trips().last()
    }

    fn finish(self, hurry: bool) -> Found {
        match self.prober {
            Some(prober) => prober.finish(hurry),
            None if self.wanted => Found::no_target(),
            None => Found::default(),
        }
    }
}

/// Returns the other address of a point-to-point interface or of a network of two, and single hosts
/// that are routed there.
fn far_end(link: &str) -> anyhow::Result<Vec<IpAddr>> {
    let netlink = Netlink::open()?;
    let addresses = netlink.addresses(netlink.link(link)?.index)?;
    let of = |address: &Address| {
        let own = address.net.addr();
        let hosts = address.net.max_prefix_len() - address.net.prefix_len();
        let other = || address.net.hosts().find(|host| *host != own);
        let only = (1..=2).contains(&hosts).then(other).flatten();
        address.peer.or(only)
    };
    let single = |net: &IpNet| net.prefix_len() == net.max_prefix_len();
    let routed = discover::routed(link)?.into_iter().filter(single);
    let own = |host: &IpAddr| addresses.iter().any(|address| address.net.addr() == *host);
    let others = addresses
        .iter()
        .filter_map(of)
        .chain(routed.map(|net| net.addr()));
    Ok(others.filter(|host| !own(host)).collect())
}

/// Adds the results of the probes to the evidence.
fn add_probes(found: Found, shortest: &HashMap<u64, u64>, evidence: &mut Evidence) {
    evidence.map.unseen.extend(found.unseen);
    let times = evidence.map.flows.iter().filter_map(|flow| {
        let same = flow.remote.map(|remote| remote.ip().to_canonical()) == found.target;
        Some((!same, *shortest.get(&flow.inode)?))
    });
    // Prefer the connection to the probed target: others may be further away.
    let idle = times.filter(|(_, rtt)| *rtt > 0).min();
    evidence.probes = Probes {
        mtu: found.mtu,
        idle_rtt_us: idle.map(|(_, rtt)| rtt as f64),
        loaded_rtt_us: found.rtt_us,
        own: found.own,
    };
}
