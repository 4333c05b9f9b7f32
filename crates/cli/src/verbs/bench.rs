//! `seikan bench HOST`: measures the path to another host outside of the tunnel, through it, and
//! through the kernel's WireGuard, and has the doctor name the cause of the difference.
//!
//! [`near`] starts the far end ([`far`]) by SSH and asks for one [`phase`] after the other by
//! [`control`]; [`target`] has the addresses, [`kernel`] the interfaces for comparison, [`figures`]
//! the results, and [`page`] writes them.

mod control;
mod far;
pub mod figures;
mod kernel;
mod near;
mod page;
mod phase;
mod target;

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use seikan_diagnose::exchange::Token;
use seikan_diagnose::{Evidence, Recording};
use seikan_sys::discover::{self, Subject};
use seikan_ui::{Interrupt, Progress, ProgressBar};

use self::control::{KernelRequest, Kind, Phase};
pub use self::figures::Report;
use self::figures::{Diagnosis, Direction, Figures, PathReport, Udp};
use self::kernel::Kernel;
use self::near::{Far, Measured, Path};
use crate::output;
use crate::screen::printable;
use crate::verbs::doctor;
use crate::verbs::doctor::text::Page;

/// Share of the highest rate of datagrams at which their loss is measured.
const SHARE: f64 = 0.8;
/// Duration of the measurements of idle round trips, and of the highest rate of datagrams, seconds.
const SHORT: f64 = 1.0;

/// Arguments of `seikan bench`.
#[derive(Debug, Args)]
#[command(override_usage = "seikan bench [OPTIONS] <HOST>")]
#[command(after_help = "Examples:\n  \
    sudo seikan bench root@hub.example.org     the path to a host, and the tunnel to it\n  \
    sudo seikan bench hub --ssh 'ssh -p 2222' --program 'sudo -n seikan'\n  \
    sudo seikan bench hub --load-rate 200 --json\n\n\
    Takes at most two minutes and prints a page: throughput, loss, round trips with and without load, and processor time, \
    of the path outside of the tunnel, of the tunnel, and of the kernel's WireGuard if its module is loaded on both hosts; \
    then the doctor's verdict on the tunnel, from both ends. Starts `seikan bench --serve` on HOST by SSH; nothing else \
    has to run there. Without --load-rate the load uses the whole capacity of the path, which others on it notice. It goes to HOST alone, \
    which takes it on one port, for the time of each measurement. As root on both hosts, the doctor sees more.\n\
    Exit status: 0 if a path was measured, 1 if none was.")]
pub struct Arguments {
    /// Host to measure the path to, as SSH takes it: a name, USER@NAME, or an entry of ssh_config(5)
    #[arg(value_name = "HOST", required_unless_present = "serve", value_parser = destination)]
    host: Option<String>,
    /// SSH command with its options, separated by spaces
    #[arg(long, value_name = "COMMAND", default_value = "ssh")]
    ssh: String,
    /// Command that runs Seikan on HOST
    #[arg(long, value_name = "COMMAND", default_value = "seikan")]
    program: String,
    /// Interface of the tunnel [default: the one that leads to HOST]
    #[arg(long, value_name = "INTERFACE")]
    iface: Option<String>,
    /// Address of HOST outside of the tunnel [default: that of its SSH server, or another of its addresses]
    #[arg(long, value_name = "ADDRESS")]
    address: Option<IpAddr>,
    /// Port that HOST opens for the load, TCP and UDP
    #[arg(long, value_name = "PORT", default_value_t = 9588, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Duration of each measurement of throughput
    #[arg(long, value_name = "SECONDS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=6))]
    seconds: u32,
    /// Maximum rate of the load in Mbit/s
    #[arg(long, value_name = "MBIT", value_parser = doctor::measure::megabits)]
    load_rate: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Serve a bench of another host on standard input and output
    #[arg(long, hide = true, exclusive = true)]
    serve: bool,
}

/// Parses a destination of SSH, which must not be taken for an option.
fn destination(text: &str) -> Result<String, String> {
    if text.is_empty() || text.starts_with('-') || text.contains(char::is_whitespace) {
        return Err("expected a host, such as hub.example.org or root@192.0.2.1".into());
    }
    Ok(text.to_owned())
}

/// Measures the paths and prints the page.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.serve {
        return far::serve();
    }
    let name = arguments.host.as_deref().context("HOST is missing")?;
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let here = far::host()?;
    let far = Far::start(&arguments.ssh, name, &arguments.program, &interrupt)?;
    let addresses = far.host.addresses.iter().map(|address| address.ip);
    let addresses = addresses.chain(far.host.ssh).chain(arguments.address);
    let routes = target::Routes::to(addresses)?;
    let raw = target::raw(&far.host, arguments.address, &routes);
    let tunnel = target::tunnel(&far.host, arguments.iface.as_deref(), &routes);
    let kernel = match (&here.no_kernel_wireguard, &far.host.no_kernel_wireguard) {
        (Some(reason), _) => Some(format!("on this host: {reason}")),
        (None, Some(reason)) => Some(format!("on {name}: {}", printable(reason))),
        (None, None) => None,
    };
    let paths = [raw.is_ok(), tunnel.is_ok(), raw.is_ok() && kernel.is_none()];
    let mut bench = Bench {
        far,
        arguments,
        interrupt: &interrupt,
        evidence: Vec::new(),
    };
    let count = paths.iter().filter(|there| **there).count() as f64;
    let rate = match arguments.load_rate {
        Some(megabits) => format!("at up to {megabits} Mbit/s"),
        None => "at full rate".to_owned(),
    };
    eprintln!(
        "bench loads the path to {name} {rate}, in both directions, for {:.0} s; Ctrl-C ends it",
        (bench.loaded() * count).ceil()
    );
    let raw = bench.raw(raw)?;
    let tunnel = match tunnel {
        Ok(path) => bench.report("tunnel", &path)?,
        Err(error) => PathReport::unavailable(&error),
    };
    let kernel = bench.kernel(kernel, &raw)?;
    let doctor = worst(std::mem::take(&mut bench.evidence), &raw, &tunnel);
    let report = Report {
        version: 1,
        host: name.to_owned(),
        here: here.name,
        far: bench.far.host.name.clone(),
        seconds: arguments.seconds,
        port: arguments.port,
        raw,
        tunnel,
        kernel_wireguard: kernel,
        doctor,
    };
    drop(bench);
    let all = [&report.raw, &report.tunnel, &report.kernel_wireguard];
    if all.iter().all(|path| path.figures.is_none()) {
        let reason = |path: &PathReport| path.unavailable.clone().unwrap_or_default();
        bail!(
            "cannot measure any path to {name}; raw: {}; tunnel: {}",
            reason(&report.raw),
            reason(&report.tunnel)
        );
    }
    if arguments.json {
        output::print_json(&report)?;
    } else {
        write!(
            output::stdout(),
            "{}",
            page::render(&report, &Page::of_stdout())
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the seed of numbered datagrams. Other hosts cannot know it, because it depends on the
/// token.
fn seed(token: &Token) -> u64 {
    let (bytes, _) = token.0.split_first_chunk().unwrap_or((&[0; 8], &[]));
    u64::from_be_bytes(*bytes)
}

/// Names the cause in the direction that the tunnel slows down most.
fn worst(evidence: Vec<Ends>, raw: &PathReport, tunnel: &PathReport) -> Option<Diagnosis> {
    let rate = |path: &PathReport, reverse: bool| {
        let figures = path.figures.as_ref()?;
        Some(figures.direction(reverse).tcp_bits_per_second)
    };
    let share = |reverse: bool| {
        let (raw, tunnel) = (rate(raw, reverse), rate(tunnel, reverse));
        raw.zip(tunnel).map_or(1.0, |(raw, tunnel)| tunnel / raw)
    };
    let worst = evidence
        .into_iter()
        .min_by(|one, other| share(one.0).total_cmp(&share(other.0)));
    let (reverse, mut recording, far) = worst?;
    recording.evidence.expected = rate(raw, reverse).filter(|rate| *rate > 0.0);
    Some(Diagnosis {
        reverse,
        verdict: doctor::verdict(&recording, Some(&far)),
    })
}

/// The doctors' measurements of both ends; `true`: while the load ran from the far end.
type Ends = (bool, Recording, Evidence);

/// A run.
struct Bench<'a> {
    far: Far,
    arguments: &'a Arguments,
    interrupt: &'a Interrupt,
    /// Measurements of the tunnel, by direction.
    evidence: Vec<Ends>,
}

impl Bench<'_> {
    fn phase(&self, kind: Kind, reverse: bool, seconds: f64) -> Phase {
        Phase {
            kind,
            reverse,
            seconds,
            rate: self.arguments.load_rate.map(|megabits| megabits * 1e6),
            diagnose: false,
        }
    }

    /// Returns the time for which a path is loaded, in seconds.
    fn loaded(&self) -> f64 {
        let seconds = f64::from(self.arguments.seconds);
        let phases = [
            self.phase(Kind::Tcp, false, seconds),
            self.phase(Kind::Udp, false, SHORT),
            self.phase(Kind::Udp, false, seconds / 2.0),
        ];
        let each: Duration = phases.iter().map(phase::loaded).sum();
        2.0 * each.as_secs_f64()
    }

    /// Measures the path outside of tunnels, over the first address that answers.
    fn raw(&mut self, paths: anyhow::Result<Vec<Path>>) -> anyhow::Result<PathReport> {
        let paths = match paths {
            Ok(paths) => paths,
            Err(error) => return Ok(PathReport::unavailable(&error)),
        };
        let mut report = PathReport::default();
        for path in paths {
            let measured = self.report("raw", &path)?;
            if measured.figures.is_some() {
                return Ok(measured);
            }
            // The address that is tried first is the most likely one.
            if report.unavailable.is_none() {
                report = measured;
            }
        }
        Ok(report)
    }

    /// Measures the kernel's WireGuard over the path outside of tunnels. `missing`: why it cannot be used.
    fn kernel(&mut self, missing: Option<String>, raw: &PathReport) -> anyhow::Result<PathReport> {
        let to = raw.address.filter(|_| raw.figures.is_some());
        let to = match (to, missing) {
            (Some(to), None) => to,
            (_, Some(reason)) => return Ok(PathReport::unavailable(reason)),
            (None, None) => return Ok(PathReport::unavailable("the raw path does not work")),
        };
        let created = self.create_kernel(to).and_then(|kernel| {
            let path = Path {
                to: kernel::far_address(),
                at: vec![kernel::far_address()],
                tunnel: None,
                namespace: Some(kernel.namespace().try_clone()?),
            };
            Ok((kernel, path))
        });
        match created {
            Ok((_kernel, path)) => self.report("kernel WireGuard", &path),
            Err(error) => {
                self.interrupt.check()?;
                Ok(PathReport::unavailable(&error))
            }
        }
    }

    fn create_kernel(&mut self, to: IpAddr) -> anyhow::Result<Kernel> {
        let port = self.arguments.port;
        let key = kernel::new_key()?;
        let request = KernelRequest {
            public_key: *key.public().as_bytes(),
            port,
        };
        let peer = self.far.create_kernel(request, self.interrupt)?;
        Kernel::near(&key, peer, SocketAddr::new(to, port))
    }

    /// Measures a path; only an interrupt ends the run.
    fn report(&mut self, name: &str, path: &Path) -> anyhow::Result<PathReport> {
        let measured = self.path(name, path);
        self.interrupt.check()?;
        let report = match measured {
            Ok(figures) => PathReport {
                figures: Some(figures),
                ..PathReport::default()
            },
            Err(error) => PathReport::unavailable(&error),
        };
        Ok(PathReport {
            address: Some(path.to),
            interface: path.tunnel.as_ref().map(|[here, _]| here.clone()),
            ..report
        })
    }

    fn path(&mut self, name: &str, path: &Path) -> anyhow::Result<Figures> {
        let idle = self.phase(Kind::Idle, false, SHORT);
        let idle = self.one(name, path, idle)?.round_trips;
        let to_far = self.direction(name, path, false)?;
        let from_far = self.direction(name, path, true)?;
        Ok(Figures {
            idle: idle.into(),
            to_far,
            from_far,
        })
    }

    fn direction(&mut self, name: &str, path: &Path, reverse: bool) -> anyhow::Result<Direction> {
        let seconds = f64::from(self.arguments.seconds);
        let tcp = Phase {
            diagnose: path.tunnel.is_some(),
            ..self.phase(Kind::Tcp, reverse, seconds)
        };
        let tcp = self.one(name, path, tcp)?;
        let most = self.phase(Kind::Udp, reverse, SHORT);
        let most = self.one(name, path, most)?;
        let most = figures::bits_per_second(&most, reverse);
        let udp = if most > 0.0 {
            let steady = Phase {
                rate: Some((most * SHARE).max(phase::SLOWEST)),
                ..self.phase(Kind::Udp, reverse, seconds / 2.0)
            };
            let measured = self.one(name, path, steady)?;
            Udp::of(most, &measured, reverse)
        } else {
            Udp::default()
        };
        let direction = Direction::of(&tcp, reverse, udp);
        self.evidence
            .extend(tcp.evidence.map(|(near, far)| (reverse, near, far)));
        Ok(direction)
    }

    /// Measures a phase.
    fn one(&mut self, name: &str, path: &Path, phase: Phase) -> anyhow::Result<Measured> {
        let map = path.tunnel.as_ref().map(|[here, _]| here.clone());
        let map = map.map(|here| discover::path(&Subject::Interface(here)));
        let map = map.transpose()?;
        // The doctor has a bar of its own.
        let bar = (!phase.diagnose).then(ProgressBar::new);
        if let Some(bar) = &bar {
            let kind = match phase.kind {
                Kind::Idle => "round trips",
                Kind::Tcp => "TCP",
                Kind::Udp => "UDP",
            };
            let direction = if phase.reverse { "from" } else { "to" };
            bar.show(Progress {
                fraction: 0.0,
                step: format!("{name}: {kind} {direction} the far end"),
            });
        }
        self.far
            .measure(path, self.arguments.port, phase, map, self.interrupt)
    }
}
