//! The far end: started by SSH, it answers requests on its standard input until that ends.
//!
//! It opens its port for one phase at a time, at the addresses of the request, and takes only flows
//! that begin with the request's token.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use seikan_diagnose::exchange::Measurement;
use seikan_sys::discover::{self, Subject};
use seikan_sys::netlink::Netlink;
use seikan_ui::Interrupt;

use super::control::{
    Address, Control, Done, GREETING, Host, Kind, LONGEST_REQUEST, Phase, Reply, Request, Run,
};
use super::kernel::{self, Kernel};
use super::phase::{self, End};
use crate::ssh;

/// Maximum time to wait for a request.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum measured time of a phase, in seconds.
const LONGEST_PHASE: f64 = 10.0;
/// Maximum number of addresses at which the port is opened.
const MOST_ADDRESSES: usize = 16;

/// Serves the other end on standard input and output.
///
/// # Errors
/// The connection fails; it is silent.
pub fn serve() -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    println!("{GREETING}{}", env!("CARGO_PKG_VERSION"));
    let ended = interrupt.clone();
    let mut control = Control::<Request>::start(
        std::io::stdin(),
        std::io::stdout(),
        LONGEST_REQUEST,
        move || ended.raise(),
    );
    control.send(&Reply::Host(host()?))?;
    let mut kernel = None;
    while !interrupt.is_raised() {
        let request = match control.receive(PATIENCE, &interrupt) {
            Ok(request) => request,
            Err(_) if interrupt.is_raised() => break,
            Err(error) => return Err(error),
        };
        let reply = match request {
            Request::Run(run) => self::run(&run, kernel.as_ref(), &mut control, &interrupt),
            Request::Kernel(request) => Kernel::far(&request).map(|(made, public_key)| {
                kernel = Some(made);
                Reply::Kernel(public_key)
            }),
        };
        if interrupt.is_raised() {
            break;
        }
        control.send(&reply.unwrap_or_else(|error| Reply::Failed(format!("{error:#}"))))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the facts of this host.
///
/// # Errors
/// Its interfaces cannot be listed.
pub fn host() -> anyhow::Result<Host> {
    let netlink = Netlink::open()?;
    let tunnels = tunnels()?;
    let mut addresses = Vec::new();
    for address in netlink.all_addresses()? {
        let ip = address.net.addr();
        let is_local = match ip {
            std::net::IpAddr::V4(ip) => ip.is_link_local(),
            std::net::IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        if ip.is_loopback() || is_local {
            continue;
        }
        let interface = netlink.link_by_index(address.index)?.name;
        addresses.push(Address {
            ip,
            is_tunnel: tunnels.contains(&interface),
            interface,
        });
    }
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    Ok(Host {
        name: name.trim().to_owned(),
        addresses,
        ssh: ssh::session().map(|session| session.server),
        no_kernel_wireguard: kernel::missing(),
    })
}

/// Returns the tunnels of this host.
///
/// # Errors
/// They cannot be listed.
pub fn tunnels() -> anyhow::Result<BTreeSet<String>> {
    // A network card that a program reads, and a bridge, are no tunnels.
    let is_tunnel = |kind: &str| !["", "bridge", "veth"].contains(&kind);
    let found = discover::candidates()?.into_iter();
    Ok(found
        .filter(|candidate| is_tunnel(&candidate.kind))
        .map(|candidate| candidate.interface)
        .collect())
}

fn check(phase: &Phase) -> anyhow::Result<()> {
    let fits = (0.1..=LONGEST_PHASE).contains(&phase.seconds)
        && phase
            .rate
            .is_none_or(|rate| (phase::SLOWEST..=1e12).contains(&rate));
    if !fits {
        bail!("a time or a rate is out of range");
    }
    Ok(())
}

fn run(
    run: &Run,
    kernel: Option<&Kernel>,
    control: &mut Control<Request>,
    interrupt: &Interrupt,
) -> anyhow::Result<Reply> {
    check(&run.phase)?;
    if run.at.is_empty() || run.at.len() > MOST_ADDRESSES {
        bail!(
            "cannot open the port at {} addresses; use 1 to {MOST_ADDRESSES}",
            run.at.len()
        );
    }
    let map = run.tunnel.clone().map(Subject::Interface);
    let map = map.map(|subject| discover::path(&subject)).transpose()?;
    let sinks = || phase::listen(&run.at, run.port);
    let accept = |sinks| phase::accept(sinks, &run.token.0, interrupt);
    let flows = match (run.kernel, kernel) {
        (false, _) => {
            let sinks = sinks()?;
            control.send(&Reply::Listening)?;
            accept(sinks)?
        }
        (true, Some(kernel)) => {
            let sinks = kernel.namespace().run(sinks)??;
            control.send(&Reply::Listening)?;
            kernel.namespace().run(|| accept(sinks))??
        }
        (true, None) => bail!("there is no interface of the kernel's WireGuard"),
    };
    let seed = super::seed(&run.token);
    let outcome = phase::carry(&flows, &run.phase, End::Far, seed, map, interrupt);
    let outcome = outcome.context(match run.phase.kind {
        Kind::Idle => "the round trips failed",
        Kind::Tcp | Kind::Udp => "the load failed",
    })?;
    let evidence = outcome.recording.map(|recording| recording.evidence);
    Ok(Reply::Done(Box::new(Done {
        counts: outcome.counts,
        measurement: evidence.as_ref().map(Measurement::of),
    })))
}
