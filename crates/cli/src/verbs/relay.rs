//! `seikan relay`: forwards sealed datagrams between members without a direct path; `relay secret`
//! prints the command that registers the relay with a coordinator.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::PoisonError;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueHint};
use seikan_config::BitRate;
use seikan_node::system::SystemRandom;
use seikan_proto::mesh::RelaySecret;
use seikan_relay::{Limits, Options, Relay, TlsOptions, metrics, secret};
use seikan_sys::privilege;
use seikan_sys::signal::Signals;
use seikan_tls::{Certificate, TlsError};
use tracing::{info, warn};

use crate::logging::LogArguments;
use crate::manager::Manager;
use crate::screen::{DIM, RESET, joined, printable};
use crate::service::{self, Listener};

/// Default directory.
pub const DIRECTORY: &str = "/var/lib/seikan-relay";
/// Default UDP port: the port of STUN (RFC 8489, section 18.6).
const PORT: u16 = 3478;
/// File with the TLS port of the last start and the pin of a self-signed certificate, for `relay
/// secret`.
const TLS_FILE: &str = "tls";
/// Names of the files in the directory begin with one of these.
const FILES: [&str; 2] = ["secret", "tls"];
/// Minimum rate of a member, in bits per second. A member may send the amount of a quarter of a
/// second at once, which must be many datagrams.
const MIN_RATE: u64 = 1_000_000;
/// Number of open files besides those of pairs and streams: main sockets, signals, metrics,
/// standard streams.
const OTHER_FILES: u64 = 32;

/// Options of `relay`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  \
    sudo seikan relay                        run it until Ctrl-C\n  \
    sudo seikan relay --tls-listen [::]:443  serve members over TLS as well, if UDP is blocked\n  \
    sudo seikan relay --rate 100M            limit each member to 100 Mbit/s\n  \
    sudo seikan relay secret                 print the command that registers this relay\n\n\
    It needs no privileges, only its directory; started by root it becomes user `seikan`. It cannot read what it \
    forwards. A firewall has to admit UDP to port 3478 and to --ports, and TCP to the port of --tls-listen."
)]
pub struct Arguments {
    #[command(subcommand)]
    verb: Option<RelayVerb>,
    #[command(flatten)]
    serve: ServeArguments,
}

/// Verbs of an administrator.
#[derive(Debug, Subcommand)]
enum RelayVerb {
    /// Print the command that registers this relay with a coordinator
    Secret(SecretArguments),
}

/// The directory of a relay.
#[derive(Debug, Args)]
struct Directory {
    /// Directory of the relay
    #[arg(long, value_name = "DIR", default_value = DIRECTORY, value_hint = ValueHint::DirPath)]
    dir: PathBuf,
}

/// Options of the relay itself.
#[derive(Debug, Args)]
struct ServeArguments {
    /// Address to listen on [default: port 3478 of all addresses]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Address to listen on for TLS, usually with port 443, for members whose network blocks UDP
    #[arg(long, value_name = "ADDRESS:PORT")]
    tls_listen: Option<SocketAddr>,
    /// PEM certificate chain, read again within a minute after it was renewed [default: self-signed]
    #[arg(long, value_name = "FILE", requires_all = ["key", "tls_listen"], value_hint = ValueHint::FilePath)]
    cert: Option<PathBuf>,
    /// PEM private key of the certificate
    #[arg(long, value_name = "FILE", requires = "cert", value_hint = ValueHint::FilePath)]
    key: Option<PathBuf>,
    /// Maximum TLS connections; at most a quarter may be unauthenticated
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=65_535))]
    streams: u32,
    /// Maximum pairs of members
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=65_535))]
    pairs: u32,
    /// Maximum pairs that one member requests
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_535))]
    pairs_per_member: u32,
    /// UDP ports for pairs, one for each
    #[arg(long, value_name = "FIRST-LAST", default_value = "49152-65535", value_parser = ports)]
    ports: RangeInclusive<u16>,
    /// Maximum rate of one member in bits per second, for example 100M
    #[arg(long, value_name = "RATE", default_value = "1G", value_parser = rate)]
    rate: u64,
    /// Address that serves Prometheus metrics, for example 127.0.0.1:9585
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    #[command(flatten)]
    log: LogArguments,
    #[command(flatten)]
    directory: Directory,
}

/// Options of `relay secret`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan relay secret --host relay.example.org")]
struct SecretArguments {
    /// Host name or address of this relay in the printed command [default: this host's name]
    #[arg(long, value_name = "HOST[:PORT]")]
    host: Option<String>,
    #[command(flatten)]
    directory: Directory,
}

/// Runs the relay, or prints its secret.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.verb {
        None => serve(&arguments.serve)?,
        Some(RelayVerb::Secret(arguments)) => print_secret(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the secret of a directory, which is made if it is missing.
fn load_secret(directory: &Path) -> anyhow::Result<RelaySecret> {
    Ok(secret::load(directory, &mut SystemRandom)?)
}

fn print_secret(arguments: &SecretArguments) -> anyhow::Result<()> {
    let directory = &arguments.directory.dir;
    service::enter(directory)?;
    let secret = load_secret(directory)?;
    let mut options = String::new();
    if let Some(tls) = Listener::read(&directory.join(TLS_FILE)) {
        options += &format!(" --tls {}", tls.port);
        options += &tls.pin.map_or(String::new(), |pin| format!(" --pin {pin}"));
    }
    let host = service::advertised_host(arguments.host.as_deref(), PORT)?;
    let mut out = anstream::stdout();
    writeln!(
        out,
        "{DIM}# Anybody with this secret can use the relay. Run on the host of the coordinator:{RESET}"
    )?;
    writeln!(
        out,
        "sudo seikan coordinator relay add {} --secret {}{options}",
        printable(&host),
        secret.reveal(),
    )?;
    Ok(())
}

/// Writes the TLS listener of this start, if it has one.
fn write_tls_listener(directory: &Path, tls: Option<&Listener>) -> std::io::Result<()> {
    let path = directory.join(TLS_FILE);
    match tls {
        Some(listener) => listener.write(&path),
        None if !path.exists() => Ok(()),
        None => std::fs::remove_file(path),
    }
}

/// Runs the relay until Ctrl-C or SIGTERM.
fn serve(arguments: &ServeArguments) -> anyhow::Result<()> {
    arguments.log.start(false)?;
    // Signals are blocked before any thread starts, because threads inherit the mask.
    let signals = Signals::block().context("cannot block signals")?;
    let first_port = *arguments.ports.start();
    if first_port < 1024 {
        bail!(
            "cannot use port {first_port} for pairs: it is privileged; choose --ports from 1024 on"
        );
    }
    let streams = arguments.tls_listen.map_or(0, |_| arguments.streams);
    raise_file_limit(arguments.pairs, streams)?;
    // Files on the command line are opened as the user of the command.
    let given = match (&arguments.cert, &arguments.key) {
        (Some(cert), Some(key)) => Some(Certificate::load(cert, key)?),
        _ => None,
    };
    let mut manager = Manager::connect();
    let listen = service::listen_address(arguments.listen, PORT)?;
    let bound = [Some(listen), arguments.tls_listen, arguments.metrics];
    let ports: Vec<u16> = bound.iter().flatten().map(SocketAddr::port).collect();
    let directory = &arguments.directory.dir;
    service::drop_privileges(directory, &FILES, &ports)?;
    let secret = load_secret(directory)?;
    let mut tls = None;
    let mut pin = None;
    if let Some(listen) = arguments.tls_listen {
        let certificate = match given {
            Some(given) => given,
            None => {
                let own = Certificate::own(directory, "seikan relay", &[service::host_name()])?;
                pin = Some(own.pin());
                own
            }
        };
        let config = certificate.renewing_server_config(report_renewal)?;
        tls = Some(TlsOptions { listen, config });
    }
    let mut relay = Relay::bind(Options {
        listen,
        tls,
        secret,
        limits: Limits {
            pairs: arguments.pairs as usize,
            pairs_per_member: arguments.pairs_per_member as usize,
            ports: arguments.ports.clone(),
            rate: arguments.rate / 8,
            streams: arguments.streams as usize,
        },
    })?;
    let metrics = match arguments.metrics {
        Some(address) => {
            let listener = TcpListener::bind(address);
            Some(listener.with_context(|| format!("cannot serve metrics at {address}"))?)
        }
        None => None,
    };
    privilege::keep_only(&[], None)?;
    let (cert, key) = (arguments.cert.as_deref(), arguments.key.as_deref());
    service::confine(directory, service::folders_of_certificate(cert, key))?;
    if let Some(listener) = metrics {
        let address = listener.local_addr()?;
        metrics::serve(listener, relay.counters()).context("cannot serve metrics")?;
        if !address.ip().is_loopback() {
            writeln!(
                anstream::stderr(),
                "warning: the metrics at {address} are open to every host that reaches it"
            )?;
        }
    }
    let addresses = relay.addresses().context("cannot get the bound port")?;
    let mut line = format!(
        "the relay listens on {}, ports for pairs {first_port} to {}",
        joined(addresses, " and "),
        arguments.ports.end()
    );
    let tls_address = relay.tls_address().context("cannot get the TLS port")?;
    if let Some(address) = tls_address {
        line += &format!(", TLS on {address}");
    }
    let tls = tls_address.map(|address| Listener {
        port: address.port(),
        pin,
    });
    write_tls_listener(directory, tls.as_ref())
        .with_context(|| format!("cannot write to {}", directory.display()))?;
    writeln!(anstream::stdout(), "{line}")?;
    manager.notify_ready(&line);
    relay.run(&signals)?;
    let counters = relay.counters();
    let counters = counters.lock().unwrap_or_else(PoisonError::into_inner);
    writeln!(anstream::stdout(), "the relay has stopped: {counters}")?;
    Ok(())
}

/// Logs that the files of the certificate have changed, or cannot be read again.
fn report_renewal(outcome: Result<(), TlsError>) {
    match outcome {
        Ok(()) => info!(target: "relay", "renewed certificate in use"),
        Err(error) => warn!(
            target: "relay",
            "cannot read the certificate again: {error}; the former one stays until the files can be used, or until a restart"
        ),
    }
}

/// Raises the limit of open files to two sockets a pair, one for each address family, and one for
/// each connection; warns if the hard limit is lower.
fn raise_file_limit(pairs: u32, streams: u32) -> anyhow::Result<()> {
    let needed = 2 * u64::from(pairs) + u64::from(streams) + OTHER_FILES;
    let allowed = seikan_sys::process::allow_more_files();
    let allowed = allowed.context("cannot raise the limit of open files")?;
    if allowed < needed {
        writeln!(
            anstream::stderr(),
            "warning: {pairs} pairs and {streams} connections need up to {needed} open files, the limit is {allowed}; \
             raise it (`ulimit -Hn`, LimitNOFILE= of systemd), or lower --pairs"
        )?;
    }
    Ok(())
}

/// Parses "49152-65535".
fn ports(text: &str) -> Result<RangeInclusive<u16>, String> {
    let invalid = || {
        "expected the first and the last port, from 1 to 65535, for example 49152-65535".to_owned()
    };
    let (first, last) = text.split_once('-').ok_or_else(invalid)?;
    let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else {
        return Err(invalid());
    };
    if first == 0 || first > last {
        return Err(invalid());
    }
    Ok(first..=last)
}

/// Parses "1G" to bits per second.
fn rate(text: &str) -> Result<u64, String> {
    let invalid =
        || "expected bits per second with k, M or G, at least 1M, for example 100M".to_owned();
    let rate = text.parse().map(BitRate::bits_per_second).ok();
    rate.filter(|rate| *rate >= MIN_RATE).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_units_and_a_minimum() {
        assert_eq!(rate("1G"), Ok(1_000_000_000));
        assert_eq!(rate("1500k"), Ok(1_500_000));
        assert_eq!(rate("1000000"), Ok(1_000_000));
        for bad in ["", "G", "1T", "999k", "-1G", "1.5G", "99999999999G", "1 G"] {
            assert!(rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ports_are_an_ascending_range_without_0() {
        assert_eq!(ports("49152-65535"), Ok(49_152..=65_535));
        assert_eq!(ports("7-7"), Ok(7..=7));
        for bad in ["", "7", "0-7", "8-7", "1-65536", "-", "a-b"] {
            assert!(ports(bad).is_err(), "{bad}");
        }
    }
}
