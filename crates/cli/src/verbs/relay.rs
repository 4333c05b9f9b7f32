//! `seikan relay`: sends sealed datagrams on between members of a mesh that do not reach each other. Alone it runs the service;
//! `relay secret` prints what a coordinator is to be told.

use std::io::Write;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::PoisonError;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueHint};
use sd_notify::NotifyState;
use seikan_node::node::SystemRandom;
use seikan_proto::mesh::{Pin, RelaySecret};
use seikan_relay::{Limits, Options, Relay, TlsOptions, metrics, secret};
use seikan_sys::privilege;
use seikan_sys::signal::Signals;
use seikan_tls::Certificate;

use super::coordinator::own_name;
use crate::folder::{as_owner_or_new, confine_to, settle};
use crate::manager::Manager;
use crate::screen::{DIM, RESET, printable};

/// Where it keeps its secret.
const FOLDER: &str = "/var/lib/seikan-relay";
/// Its main port: that of STUN (RFC 8489, section 18.6).
const PORT: u16 = 3478;
/// The file in its folder that has the port at which it listened for TLS last, and the pin of a certificate of its own.
const NOTED: &str = "tls";
/// Slowest rate in bits per second: a quarter of a second of it is many datagrams.
const MIN_RATE: u64 = 1_000_000;
/// Descriptors that are not of pairs: the main sockets, signals, metrics, the standard ones.
const OTHER_FILES: u64 = 32;

/// What `relay` is told.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  \
    seikan relay                        run it, until Ctrl-C\n  \
    seikan relay --tls-listen [::]:443  the same, and by TLS for members whose networks pass no UDP\n  \
    seikan relay secret                 what to run at the coordinator, so that members use it\n  \
    seikan relay --rate 100M            no member sends more than 100 Mbit/s through it\n\n\
    Needs no privileges, only its folder, and cannot read what it forwards. A firewall before it has to \
    let in UDP to port 3478 and to those of --ports, and TCP to that of --tls-listen."
)]
pub struct Arguments {
    #[command(subcommand)]
    verb: Option<RelayVerb>,
    #[command(flatten)]
    serve: ServeArguments,
}

/// What an administrator does.
#[derive(Debug, Subcommand)]
enum RelayVerb {
    /// Print what makes a coordinator send its members here
    Secret(SecretArguments),
}

/// Where its folder is.
#[derive(Debug, Args)]
struct Folder {
    /// Folder of its secret and its certificate
    #[arg(long, value_name = "DIR", default_value = FOLDER, value_hint = ValueHint::DirPath)]
    dir: PathBuf,
}

/// How it is to run.
#[derive(Debug, Args)]
struct ServeArguments {
    /// Where to listen [default: port 3478 of every address]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Where to listen for TLS as well, usually at port 443: for members that have no answer by UDP
    #[arg(long, value_name = "ADDRESS:PORT")]
    tls_listen: Option<SocketAddr>,
    /// Certificate that systems trust, PEM, with those it is signed by; without it, one of its own
    #[arg(long, value_name = "FILE", requires_all = ["key", "tls_listen"], value_hint = ValueHint::FilePath)]
    cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE", requires = "cert", value_hint = ValueHint::FilePath)]
    key: Option<PathBuf>,
    /// Connections by TLS at a time; a quarter of them may be of who has shown no ticket yet
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=65_535))]
    streams: u32,
    /// Pairs of members at a time
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=65_535))]
    pairs: u32,
    /// Pairs at a time that one member asks for
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_535))]
    pairs_per_member: u32,
    /// Ports for pairs, one for each
    #[arg(long, value_name = "FIRST-LAST", default_value = "49152-65535", value_parser = ports)]
    ports: RangeInclusive<u16>,
    /// Bits a second that a member may send, such as 100M or 1G
    #[arg(long, value_name = "RATE", default_value = "1G", value_parser = rate)]
    rate: u64,
    /// Serve Prometheus metrics there, such as 127.0.0.1:9587
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    #[command(flatten)]
    folder: Folder,
}

/// Where members reach it.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan relay secret --host relay.example.org    for members that know this host by that name")]
struct SecretArguments {
    /// Host under which members reach this relay [default: this host's name]
    #[arg(long, value_name = "HOST[:PORT]")]
    host: Option<String>,
    #[command(flatten)]
    folder: Folder,
}

/// Does what was asked for.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.verb {
        None => serve(&arguments.serve),
        Some(RelayVerb::Secret(arguments)) => print_secret(arguments),
    }
}

/// The secret in a folder, made if there is none.
fn secret(folder: &Path) -> anyhow::Result<RelaySecret> {
    Ok(secret::load(folder, &mut SystemRandom)?)
}

fn print_secret(arguments: &SecretArguments) -> anyhow::Result<ExitCode> {
    let dir = &arguments.folder.dir;
    let (secret, noted) = as_owner_or_new(dir, |dir| Ok((secret(dir)?, noted(dir))))?;
    let host = arguments.host.clone().unwrap_or_else(own_name);
    let host = match host.rsplit_once(':') {
        Some((_, port)) if port.parse::<u16>().is_ok() => host,
        _ => format!("{host}:{PORT}"),
    };
    let mut out = anstream::stdout();
    writeln!(
        out,
        "{DIM}# Whoever has this secret can use the relay. On the host of the coordinator:{RESET}"
    )?;
    writeln!(
        out,
        "seikan coordinator relay add {} --secret {}{}",
        printable(&host),
        secret.reveal(),
        noted
    )?;
    Ok(ExitCode::SUCCESS)
}

/// What a coordinator is to be told of how the relay was reached by TLS when it was started last: nothing if it was not.
fn noted(folder: &Path) -> String {
    let noted = std::fs::read_to_string(folder.join(NOTED)).unwrap_or_default();
    let mut words = noted.split_whitespace();
    let port: Option<u16> = words.next().and_then(|word| word.parse().ok());
    let pin: Option<Pin> = words.next().and_then(|word| word.parse().ok());
    let port = port.map_or(String::new(), |port| format!(" --tls {port}"));
    port + &pin.map_or(String::new(), |pin| format!(" --pin {pin}"))
}

/// Notes that, for the line that is printed with the secret.
fn note(folder: &Path, tls: Option<(u16, Option<Pin>)>) -> std::io::Result<()> {
    let path = folder.join(NOTED);
    match tls {
        Some((port, Some(pin))) => std::fs::write(path, format!("{port} {pin}\n")),
        Some((port, None)) => std::fs::write(path, format!("{port}\n")),
        None if !path.exists() => Ok(()),
        None => std::fs::remove_file(path),
    }
}

/// How TLS is spoken, if it is; and by which pin the certificate is known if it is of the relay's own.
fn tls(
    listen: Option<SocketAddr>,
    given: Option<Certificate>,
    dir: &Path,
) -> anyhow::Result<Option<(TlsOptions, Option<Pin>)>> {
    let Some(listen) = listen else {
        return Ok(None);
    };
    let (certificate, pin) = match given {
        Some(given) => (given, None),
        None => {
            let own = Certificate::own(dir, "seikan relay", &[own_name()])?;
            let pin = own.pin();
            (own, Some(pin))
        }
    };
    let config = certificate.server_config()?;
    Ok(Some((TlsOptions { listen, config }, pin)))
}

/// Runs it until Ctrl-C or SIGTERM.
fn serve(arguments: &ServeArguments) -> anyhow::Result<ExitCode> {
    // Before any thread is there: all of them inherit it.
    let signals = Signals::block().context("cannot take signals")?;
    let streams = arguments.tls_listen.map_or(0, |_| arguments.streams);
    if *arguments.ports.start() < 1024 {
        bail!(
            "cannot give pairs the ports from {}: take ports from 1024 on, as the relay has no capability for others",
            arguments.ports.start()
        );
    }
    allow_files(arguments.pairs, streams)?;
    // Files that root names are opened by root.
    let given = match (&arguments.cert, &arguments.key) {
        (Some(cert), Some(key)) => Some(Certificate::load(cert, key)?),
        _ => None,
    };
    let mut manager = Manager::connect();
    let bound = [
        Some(listen(arguments)?),
        arguments.tls_listen,
        arguments.metrics,
    ];
    let ports: Vec<u16> = bound.iter().flatten().map(SocketAddr::port).collect();
    let dir = &settle(&arguments.folder.dir, &["secret", "tls"], &ports)?;
    let secret = secret(dir)?;
    let (tls, pin) = tls(arguments.tls_listen, given, dir)?.unzip();
    let mut relay = Relay::bind(Options {
        listen: listen(arguments)?,
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
    let scraped = arguments.metrics.map(|address| {
        let listener = TcpListener::bind(address);
        let listener = listener.with_context(|| format!("cannot serve metrics at {address}"))?;
        anyhow::Ok((address, listener))
    });
    let scraped = scraped.transpose()?;
    privilege::keep_only(&[])?;
    confine_to(dir, Vec::new())?;
    if let Some((address, listener)) = scraped {
        metrics::serve(listener, relay.counters()).context("cannot serve metrics")?;
        if !address.ip().is_loopback() {
            writeln!(
                anstream::stderr(),
                "warning: whoever reaches {address} can read the metrics"
            )?;
        }
    }
    let addresses = relay.addresses().context("cannot ask for the port")?;
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let (first, last) = (arguments.ports.start(), arguments.ports.end());
    let mut line = format!(
        "the relay listens on {}, pairs get ports {first} to {last}",
        addresses.join(" and ")
    );
    let tls = relay.tls_address().context("cannot ask for the port")?;
    if let Some(address) = tls {
        line += &format!(", by TLS on {address}");
    }
    let noted = note(dir, tls.map(|at| (at.port(), pin.flatten())));
    noted.with_context(|| format!("cannot write to {}", dir.display()))?;
    writeln!(anstream::stdout(), "{line}")?;
    manager.tell(&[NotifyState::Ready, NotifyState::Status(&line)]);
    relay.run(&signals)?;
    let counters = relay.counters();
    let counters = counters.lock().unwrap_or_else(PoisonError::into_inner);
    writeln!(anstream::stdout(), "the relay has ended: {counters}")?;
    Ok(ExitCode::SUCCESS)
}

/// Makes room for two sockets a pair, one for each family, and for connections; says so if there is less.
fn allow_files(pairs: u32, streams: u32) -> anyhow::Result<()> {
    let needed = 2 * u64::from(pairs) + u64::from(streams) + OTHER_FILES;
    let allowed = seikan_sys::process::allow_more_files();
    let allowed = allowed.context("cannot raise the number of open files")?;
    if allowed < needed {
        writeln!(
            anstream::stderr(),
            "warning: this process may have {allowed} files open, and {pairs} pairs with {streams} connections take up to {needed}: \
             raise the limit (`ulimit -Hn`, systemd's LimitNOFILE), or say fewer --pairs"
        )?;
    }
    Ok(())
}

/// Where it is told, or wherever this host can.
fn listen(arguments: &ServeArguments) -> anyhow::Result<SocketAddr> {
    let listen = arguments.listen.unwrap_or_else(|| {
        // A host whose kernel has no IPv6 has no such file.
        match std::path::Path::new("/proc/net/if_inet6").exists() {
            true => (Ipv6Addr::UNSPECIFIED, PORT).into(),
            false => (Ipv4Addr::UNSPECIFIED, PORT).into(),
        }
    });
    if listen.ip().is_multicast() {
        bail!("nobody can listen on {listen}: it is a group's address");
    }
    Ok(listen)
}

/// "49152-65535".
fn ports(text: &str) -> Result<RangeInclusive<u16>, String> {
    let wrong =
        || "write the first and the last port, from 1 to 65535, such as 49152-65535".to_owned();
    let (first, last) = text.split_once('-').ok_or_else(wrong)?;
    let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else {
        return Err(wrong());
    };
    match first {
        1.. if first <= last => Ok(first..=last),
        _ => Err(wrong()),
    }
}

/// "1G": bits a second.
fn rate(text: &str) -> Result<u64, String> {
    let wrong = || {
        "write bits a second, at least 1M, with k, M or G behind the number, such as 100M"
            .to_owned()
    };
    let (number, unit) = match text.find(|c: char| !c.is_ascii_digit()) {
        Some(end) => text.split_at(end),
        None => (text, ""),
    };
    let unit = match unit {
        "" => 1,
        "k" | "K" => 1_000,
        "m" | "M" => 1_000_000,
        "g" | "G" => 1_000_000_000,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let rate = number.checked_mul(unit).filter(|rate| *rate >= MIN_RATE);
    rate.ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_units_and_are_not_too_slow() {
        assert_eq!(rate("1G"), Ok(1_000_000_000));
        assert_eq!(rate("1500k"), Ok(1_500_000));
        assert_eq!(rate("1000000"), Ok(1_000_000));
        for bad in ["", "G", "1T", "999k", "-1G", "1.5G", "99999999999G", "1 G"] {
            assert!(rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ports_are_a_range_upwards_without_0() {
        assert_eq!(ports("49152-65535"), Ok(49_152..=65_535));
        assert_eq!(ports("7-7"), Ok(7..=7));
        for bad in ["", "7", "0-7", "8-7", "1-65536", "-", "a-b"] {
            assert!(ports(bad).is_err(), "{bad}");
        }
    }
}
