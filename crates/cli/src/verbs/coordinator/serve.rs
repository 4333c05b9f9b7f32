//! The coordinator itself.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::ValueHint;
use ipnet::{Ipv4Net, Ipv6Net};
use seikan_coordinator::{Actor, Certificate, Etcd, Options, Server, Sockets, Store};
use seikan_proto::mesh::Networks;
use seikan_sys::privilege;

use super::etcd::{self, EtcdArguments};
use super::{DATABASE, Directory, LISTENER_FILE, PORT, lock, now, operator};
use crate::logging::LogArguments;
use crate::manager::Manager;
use crate::service::{self, Listener};

/// Names of the files in the directory begin with one of these.
const FILES: [&str; 4] = [DATABASE, "tls.pem", "etcd.", LISTENER_FILE];

/// Options of the coordinator itself.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArguments {
    /// Address to listen on [default: port 7443 of all addresses]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// PEM certificate chain, read again within a minute after it was renewed [default: self-signed]
    #[arg(long, value_name = "FILE", requires = "key", value_hint = ValueHint::FilePath)]
    cert: Option<PathBuf>,
    /// PEM private key of the certificate
    #[arg(long, value_name = "FILE", requires = "cert", value_hint = ValueHint::FilePath)]
    key: Option<PathBuf>,
    /// IPv4 network of the mesh, set at the first start [default: 100.80.0.0/12]
    #[arg(long, value_name = "PREFIX")]
    network: Option<Ipv4Net>,
    /// IPv6 network of the mesh, a /64, set at the first start [default: random in fd00::/8]
    #[arg(long, value_name = "PREFIX")]
    network6: Option<Ipv6Net>,
    #[command(flatten)]
    log: LogArguments,
    #[command(flatten)]
    etcd: EtcdArguments,
    #[command(flatten)]
    directory: Directory,
}

/// Runs the coordinator until Ctrl-C or SIGTERM.
pub fn run(arguments: &ServeArguments) -> anyhow::Result<ExitCode> {
    arguments.log.start(false)?;
    // Files on the command line are opened by the user of the command.
    let given = match (&arguments.cert, &arguments.key) {
        (Some(cert), Some(key)) => Some(Certificate::load(cert, key)?),
        _ => None,
    };
    let mut manager = Manager::connect();
    let port = arguments.listen.map_or(PORT, |listen| listen.port());
    let operator = operator();
    // The host name is read now, because the confined process cannot read it.
    let host_name = service::host_name();
    let dir = &arguments.directory.dir;
    service::drop_privileges(dir, &FILES, &[port])?;
    // Only binding takes a capability. Threads that are started later have none.
    let sockets = Sockets::bind(service::listen_address(arguments.listen, PORT)?)?;
    privilege::keep_only(&[], None)?;
    let _lock = lock(dir, false)?;
    let store = open(arguments)?;
    let networks = init_networks(arguments, &store, &operator)?;
    let certificate = match given {
        Some(given) => given,
        None => Certificate::own(dir, "seikan coordinator", &[host_name])?,
    };
    let pin = arguments.cert.is_none().then(|| certificate.pin());
    if let Some(own) = pin {
        let pin = store.agree_on_pin(own)?;
        if pin != own {
            bail!(
                "cannot use the certificate with pin {own}: members of this mesh expect {pin}; copy tls.pem from the directory of \
                 another coordinator, or use the same --cert and --key for all"
            );
        }
    }
    let server = Server::new(Options {
        sockets,
        store,
        certificate,
    })?;
    let port = server.address().port();
    let written = Listener { port, pin }.write(&dir.join(LISTENER_FILE));
    written.with_context(|| format!("cannot write to {}", dir.display()))?;
    let mut line = format!(
        "the coordinator of {} and {} listens on {}",
        networks.v4,
        networks.v6,
        server.address()
    );
    if let Some(pin) = pin {
        line += &format!(", pin {pin}");
    }
    // Each member keeps a connection open. If this fails, fewer members are served.
    let _ = seikan_sys::process::allow_more_files();
    server.run(|| {
        writeln!(anstream::stdout(), "{line}")?;
        manager.notify_ready(&line);
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Opens the mesh, in a file of the directory or in etcd, and confines the process.
fn open(arguments: &ServeArguments) -> anyhow::Result<Store> {
    let dir = &arguments.directory.dir;
    let stored = etcd::read_coordinator_settings(dir)?;
    let etcd = arguments.etcd.settings(stored.as_ref())?;
    // Confine before a store in etcd starts threads: they inherit the confinement.
    let mut files = etcd.as_ref().map(Etcd::files).unwrap_or_default();
    let (cert, key) = (arguments.cert.as_deref(), arguments.key.as_deref());
    files.extend(service::folders_of_certificate(cert, key));
    service::confine(dir, files)?;
    let Some(etcd) = etcd else {
        return Ok(Store::open(&dir.join(DATABASE))?);
    };
    etcd::refuse_both(dir, DATABASE)?;
    let store = Store::open_etcd(&etcd)?;
    let mesh = store.mesh();
    let etcd = Etcd { mesh, ..etcd };
    // Store the number of the mesh as well, so that a later start cannot create another mesh.
    if stored.as_ref() != Some(&etcd) {
        etcd::write_settings(dir, &etcd)?;
    }
    Ok(store)
}

/// Returns the networks of the mesh, which the first start sets.
fn init_networks(
    arguments: &ServeArguments,
    store: &Store,
    operator: &Actor,
) -> anyhow::Result<Networks> {
    let default = match store.networks()? {
        Some(known) => known,
        None => {
            let mut random = [0; 5];
            getrandom::fill(&mut random).context("cannot get random bytes from the kernel")?;
            Networks::from_random(random)
        }
    };
    let networks = Networks::new(
        arguments.network.unwrap_or(default.v4),
        arguments.network6.unwrap_or(default.v6),
    )?;
    store.init(networks, operator, now())?;
    Ok(networks)
}
