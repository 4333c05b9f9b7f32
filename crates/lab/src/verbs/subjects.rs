//! `seikan lab naive`, `wire`, `crude` and `pass-through`, hidden: processes that the lab starts for its
//! experiments.

use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueHint};
use ipnet::{IpNet, Ipv4Net};
use seikan_lab::gateway::naive::{Inside, Naive};
use seikan_lab::tunnel::crude::{CrudeEnd, CrudeOptions};
use seikan_lab::tunnel::pass_through::PassThrough;
use seikan_ui::Interrupt;

/// Options of `lab wire`.
#[derive(Debug, Args)]
pub struct WireArguments {
    /// Name of the TAP device to make here
    #[arg(long, value_name = "INTERFACE")]
    pub near: String,
    /// Name of the TAP device to make in the other namespace
    #[arg(long, value_name = "INTERFACE")]
    pub far: String,
    /// The other network namespace
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub far_namespace: PathBuf,
    /// Seed of the random faults
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub seed: u64,
    /// Run with real-time priority
    #[arg(long)]
    pub punctual: bool,
}

/// Carries frames until standard input ends; orders are read there, and answered.
pub fn wire(arguments: &WireArguments) -> anyhow::Result<ExitCode> {
    let WireArguments {
        near,
        far,
        far_namespace,
        seed,
        punctual,
    } = arguments;
    seikan_lab::wire::carry([near, far], far_namespace, *seed, *punctual)?;
    Ok(ExitCode::SUCCESS)
}

/// Options of `lab crude`.
#[derive(Debug, Args)]
pub struct CrudeArguments {
    /// Name of the TUN device to make
    #[arg(long, value_name = "INTERFACE")]
    pub device: String,
    /// Its addresses
    #[arg(
        long,
        value_name = "ADDRESS/LENGTH,...",
        value_delimiter = ',',
        required = true
    )]
    pub address: Vec<IpNet>,
    /// Own address outside
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// Address of the other end outside
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub peer: SocketAddr,
    /// MTU of the device
    #[arg(long, value_name = "BYTES", default_value_t = 1400, value_parser = clap::value_parser!(u32).range(68..=65535))]
    pub mtu: u32,
    /// Spend so much processor time on each packet, as a slow cipher does
    #[arg(long, value_name = "NANOSECONDS", default_value_t = 0)]
    pub burn: u64,
    /// Hand each packet on twice, from thread to thread
    #[arg(long)]
    pub handoff: bool,
    /// Copy each packet so often to memory and back
    #[arg(long, value_name = "TIMES", default_value_t = 0)]
    pub copy: u32,
    /// Receive buffer of the socket
    #[arg(long, value_name = "BYTES")]
    pub rcvbuf: Option<usize>,
    /// Send buffer of the socket
    #[arg(long, value_name = "BYTES")]
    pub sndbuf: Option<usize>,
    /// Packets that the device holds
    #[arg(long, value_name = "PACKETS")]
    pub queue: Option<u32>,
    /// Spread connections over so many outer flows
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    pub lanes: u8,
}

/// Runs one end of the crude tunnel until a signal, then says what became of packets.
pub fn crude(arguments: &CrudeArguments) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let options = CrudeOptions {
        mtu: arguments.mtu,
        burn_ns: arguments.burn,
        handoff: arguments.handoff,
        copy: arguments.copy,
        rcvbuf: arguments.rcvbuf,
        sndbuf: arguments.sndbuf,
        queue: arguments.queue,
        lanes: arguments.lanes,
    };
    let ends = [arguments.listen, arguments.peer];
    let end = CrudeEnd::open(&arguments.device, &arguments.address, ends, options)?;
    end.run(&interrupt)?;
    writeln!(
        io::stdout(),
        "{}",
        serde_json::to_string_pretty(&end.counts())?
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Options of `lab pass-through`.
#[derive(Debug, Args)]
pub struct PassThroughArguments {
    /// Name of the TUN device to make
    #[arg(long, value_name = "INTERFACE")]
    pub device: String,
    /// Its address
    #[arg(long, value_name = "ADDRESS/LENGTH")]
    pub address: Ipv4Net,
    /// Wait for the other end here
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        conflicts_with = "connect",
        required_unless_present = "connect"
    )]
    pub listen: Option<SocketAddr>,
    /// Connect to the other end there
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub connect: Option<SocketAddr>,
    /// MTU of the device
    #[arg(long, value_name = "BYTES", default_value_t = 1500, value_parser = clap::value_parser!(u32).range(68..=65535))]
    pub mtu: u32,
    /// Frames in each write to the device [default: as many as the other end has read at once]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub frames_per_write: Option<u32>,
}

/// Runs one end of the pass-through program until the other end goes.
pub fn pass_through(arguments: &PassThroughArguments) -> anyhow::Result<ExitCode> {
    let PassThroughArguments {
        device,
        address,
        mtu,
        frames_per_write,
        ..
    } = arguments;
    let (Some(other), listens) = (
        arguments.listen.or(arguments.connect),
        arguments.listen.is_some(),
    ) else {
        anyhow::bail!("either --listen or --connect");
    };
    PassThrough::open((device, *mtu), *address, other, listens)?
        .frames_per_write(*frames_per_write)
        .run()?;
    Ok(ExitCode::SUCCESS)
}

/// Options of `lab naive`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab naive --wan wan0 --peer 10.0.0.2 --lan lan0 --overlay 10.77.0.0/24\n  \
    sudo seikan lab naive --wan wan0 --peer 10.0.0.1 --tun naive0 --address 10.77.0.2/24 --network 192.168.1.0/24")]
pub struct NaiveArguments {
    /// Interface to the outside
    #[arg(long, value_name = "INTERFACE")]
    pub wan: String,
    /// Address of the other end
    #[arg(long, value_name = "ADDRESS")]
    pub peer: Ipv4Addr,
    /// Carry what machines on this nic send
    #[arg(
        long,
        value_name = "INTERFACE",
        requires = "overlay",
        conflicts_with = "tun",
        required_unless_present = "tun"
    )]
    pub lan: Option<String>,
    /// to these destinations
    #[arg(long, value_name = "NETWORK", default_value = "10.77.0.0/24")]
    pub overlay: Ipv4Net,
    /// Carry what this machine sends into a TUN device, which is made
    #[arg(long, value_name = "INTERFACE", requires = "address")]
    pub tun: Option<String>,
    /// with this address
    #[arg(long, value_name = "ADDRESS/LENGTH")]
    pub address: Option<Ipv4Net>,
    /// and these networks routed into it
    #[arg(long, value_name = "NETWORK,...", value_delimiter = ',')]
    pub network: Vec<Ipv4Net>,
    /// Send packets from this many ports by turns
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    pub ports: u8,
}

/// Runs one end of the naive encapsulator until a signal.
pub fn naive(arguments: &NaiveArguments) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let inside = match (&arguments.lan, &arguments.tun, arguments.address) {
        (Some(nic), ..) => Inside::Lan {
            nic: nic.clone(),
            overlay: arguments.overlay,
        },
        (None, Some(device), Some(address)) => Inside::Tun {
            device: device.clone(),
            address,
            networks: arguments.network.clone(),
        },
        _ => anyhow::bail!("either --lan, or --tun with --address"),
    };
    let naive = Naive::open(&arguments.wan, arguments.peer, &inside)?;
    let mut naive = naive.spread(arguments.ports)?;
    naive.run(&interrupt)?;
    writeln!(
        io::stdout(),
        "{}",
        serde_json::to_string_pretty(&naive.counts())?
    )?;
    Ok(ExitCode::SUCCESS)
}
