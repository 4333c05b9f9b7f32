//! The service itself: prepares the folder, says what it is known by, and answers until told to stop.

use std::io::Write;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::ValueHint;
use ipnet::{Ipv4Net, Ipv6Net};
use sd_notify::NotifyState;
use seikan_coordinator::{Certificate, Etcd, Options, Server, Sockets, Store};
use seikan_proto::mesh::{Networks, RelayAddress};
use seikan_sys::privilege;

use super::etcd::{self, EtcdArguments};
use crate::folder::{confine_to, settle};
use crate::manager::Manager;

use super::{DATABASE, Folder, PORT, now, operator, own_name};

/// How it is to run.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArguments {
    /// Where to listen [default: port 7443 of every address]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Certificate that systems trust, PEM, with those it is signed by; without it, one of its own
    #[arg(long, value_name = "FILE", requires = "key", value_hint = ValueHint::FilePath)]
    cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE", requires = "cert", value_hint = ValueHint::FilePath)]
    key: Option<PathBuf>,
    /// IPv4 network of the mesh, at the first start [default: 100.80.0.0/12]
    #[arg(long, value_name = "PREFIX")]
    network: Option<Ipv4Net>,
    /// IPv6 network of the mesh, a /64, at the first start [default: a random one of fd00::/8]
    #[arg(long, value_name = "PREFIX")]
    network6: Option<Ipv6Net>,
    /// Where members reach this coordinator: the others of its mesh tell them, so that they find it when theirs is gone. Noted in the
    /// folder
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<RelayAddress>,
    #[command(flatten)]
    etcd: EtcdArguments,
    #[command(flatten)]
    folder: Folder,
}

/// Runs it until Ctrl-C or SIGTERM.
pub fn run(arguments: &ServeArguments) -> anyhow::Result<ExitCode> {
    // Files that root names are opened by root.
    let given = match (&arguments.cert, &arguments.key) {
        (Some(cert), Some(key)) => Some(Certificate::load(cert, key)?),
        _ => None,
    };
    let mut manager = Manager::connect();
    let port = arguments.listen.map_or(PORT, |listen| listen.port());
    let mut arguments = arguments.clone();
    // Before it is confined: it cannot read that later.
    let own_name = own_name();
    let names = [DATABASE, "tls.pem", "etcd.", "listens"];
    arguments.folder.dir = settle(&arguments.folder.dir, &names, &[port])?;
    let arguments = &arguments;
    // Nothing later takes a capability, and threads that are started from now on have none.
    let sockets = Sockets::bind(address(arguments)?)?;
    privilege::keep_only(&[])?;
    let store = open(arguments)?;
    let networks = networks(arguments, &store)?;
    let certificate = match given {
        Some(given) => given,
        None => Certificate::own(&arguments.folder.dir, "seikan coordinator", &[own_name])?,
    };
    let pin = arguments.cert.is_none().then(|| certificate.pin());
    if let Some(own) = pin {
        let pin = store.agree_on_pin(own)?;
        if pin != own {
            bail!(
                "members of this mesh know its coordinators by another certificate ({pin}, not {own}): copy tls.pem from the folder of \
                 one that is there already, or give all of them the same --cert and --key"
            );
        }
    }
    let server = Server::new(Options {
        sockets,
        store,
        certificate,
    })?;
    let dir = &arguments.folder.dir;
    let noted = arguments.folder.note(server.address().port(), pin);
    noted.with_context(|| format!("cannot write to {}", dir.display()))?;
    let mut line = format!(
        "the coordinator of {} and {} listens on {}",
        networks.v4,
        networks.v6,
        server.address()
    );
    if let Some(pin) = pin {
        line += &format!(", pin {pin}");
    }
    // Each member keeps a connection. With fewer it serves as many as it can.
    let _ = seikan_sys::process::allow_more_files();
    server.run(|| {
        writeln!(anstream::stdout(), "{line}")?;
        manager.tell(&[NotifyState::Ready, NotifyState::Status(&line)]);
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// What it knows, in a file of the folder or in etcd.
fn open(arguments: &ServeArguments) -> anyhow::Result<Store> {
    let dir = &arguments.folder.dir;
    let noted = etcd::noted_coordinator(dir)?;
    let etcd = arguments.etcd.settings(noted.as_ref())?;
    // A store in etcd starts threads, which inherit the confinement if it comes first.
    let files = etcd.as_ref().map(Etcd::files).unwrap_or_default();
    confine_to(dir, files)?;
    let Some(etcd) = etcd else {
        if arguments.advertise.is_some() {
            bail!("--advertise is for several coordinators, which share --etcd");
        }
        return Ok(Store::open_held(etcd::hold_file(dir, DATABASE)?)?);
    };
    etcd::refuse_both(dir, DATABASE)?;
    let advertise = arguments.advertise.clone().or(etcd.advertise.clone());
    let etcd = Etcd { advertise, ..etcd };
    let store = Store::open_etcd(&etcd)?;
    let mesh = store.mesh();
    let etcd = Etcd { mesh, ..etcd };
    // With the mesh, so that a later start makes no other in its place.
    if noted.as_ref() != Some(&etcd) {
        etcd::note(dir, &etcd)?;
    }
    Ok(store)
}

/// Those that the mesh has, or at the first start is to have.
fn networks(arguments: &ServeArguments, store: &Store) -> anyhow::Result<Networks> {
    let known = store.networks()?;
    let wanted = match known {
        Some(known) => known,
        None => {
            let mut random = [0; 5];
            getrandom::fill(&mut random).context("the kernel gives no random bytes")?;
            Networks::from_random(random)
        }
    };
    let wanted = Networks::new(
        arguments.network.unwrap_or(wanted.v4),
        arguments.network6.unwrap_or(wanted.v6),
    )?;
    store.init(wanted, &operator(), now())?;
    Ok(wanted)
}

/// Where it listens: as it is told, or wherever this host can.
fn address(arguments: &ServeArguments) -> anyhow::Result<SocketAddr> {
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
