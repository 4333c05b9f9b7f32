//! `seikan coordinator`: runs the coordinator of a mesh; its verbs read and change the same
//! directory, beside a running coordinator or without one.

mod arguments;
mod etcd;
mod policy;
mod serve;
mod snapshot;
pub mod view;

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::ops::Deref;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use nix::unistd::Uid;
use seikan_coordinator::{Actor, MemberRef, NewToken, RelayInfo, Store, StoreError, TokenId, now};
use seikan_node::system::SystemRandom;
use seikan_proto::mesh::{PartyName, RelayKind, RelaySecret, RelayTls, Token};

use crate::service::{self, Listener};
use arguments::{
    AddRelay, ApproveDevice, CoordinatorVerb, Directory, Expiry, RelayVerb, RemoveRelay, Revoke,
    TokenArguments, Withdraw,
};

pub use arguments::Arguments;

/// Default directory.
pub const DIRECTORY: &str = "/var/lib/seikan-coordinator";
/// Default TCP port.
const PORT: u16 = 7443;
/// File with the port of the last start and the pin of the certificate, for `token`.
const LISTENER_FILE: &str = "listens";
/// Database file of a mesh that is not in etcd.
pub const DATABASE: &str = "mesh.db";

/// Runs the coordinator or one of its verbs.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.verb {
        None => return serve::run(&arguments.serve),
        Some(CoordinatorVerb::Token(arguments)) => token(arguments)?,
        Some(CoordinatorVerb::Tokens(list)) => {
            let tokens = list.directory.open()?.tokens()?;
            view::tokens(&tokens, now(), list.json)?;
        }
        Some(CoordinatorVerb::Withdraw(arguments)) => withdraw(arguments)?,
        Some(CoordinatorVerb::Members(list)) => {
            let members = list.directory.open()?.members()?;
            view::members(&members, now(), list.json)?;
        }
        Some(CoordinatorVerb::Devices(list)) => {
            let members = list.directory.open()?.members()?;
            view::devices(&members, list.json)?;
        }
        Some(CoordinatorVerb::ApproveDevice(arguments)) => approve_device(arguments)?,
        Some(CoordinatorVerb::Revoke(arguments)) => revoke(arguments)?,
        Some(CoordinatorVerb::Relays(list)) => {
            let relays = list.directory.open()?.relays()?;
            view::relays(&relays, list.json)?;
        }
        Some(CoordinatorVerb::Relay(arguments)) => match &arguments.verb {
            RelayVerb::Add(arguments) => add_relay(arguments)?,
            RelayVerb::Remove(arguments) => remove_relay(arguments)?,
        },
        Some(CoordinatorVerb::Tag(arguments)) => policy::tag(arguments)?,
        Some(CoordinatorVerb::Policy(arguments)) => return policy::run(arguments),
        Some(CoordinatorVerb::Audit(arguments)) => {
            let entries = arguments.directory.open()?.audit(arguments.last)?;
            view::audit(&entries, now(), arguments.json)?;
        }
        Some(CoordinatorVerb::Import(arguments)) => snapshot::import(arguments)?,
        Some(CoordinatorVerb::Export(arguments)) => snapshot::export(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The mesh of a directory, open for a verb.
struct Mesh {
    store: Store,
    operator: Actor,
    _lock: File,
}

impl Deref for Mesh {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

impl Directory {
    /// Opens the mesh, with root's privileges dropped if the directory is the daemons'. A
    /// coordinator has to have been started once.
    fn open(&self) -> anyhow::Result<Mesh> {
        let operator = operator();
        service::enter_existing(&self.dir)?;
        let lock = lock(&self.dir, false)?;
        Ok(Mesh {
            store: open_store(&self.dir)?,
            operator,
            _lock: lock,
        })
    }
}

/// Locks a directory and makes it if there is none. Coordinators and verbs share the lock. An
/// import sets `alone` and has the lock for itself.
fn lock(directory: &Path, alone: bool) -> anyhow::Result<File> {
    let open = || {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(directory)?;
        let folder = File::open(directory)?;
        if alone {
            folder.try_lock()?
        } else {
            folder.try_lock_shared()?
        }
        Ok(folder)
    };
    open().map_err(|error: io::Error| match error.kind() {
        ErrorKind::WouldBlock => anyhow!(
            "{} is in use: stop its coordinator, or wait until the import ends",
            directory.display()
        ),
        _ => anyhow!(error).context(format!("cannot use {}", directory.display())),
    })
}

fn open_store(directory: &Path) -> anyhow::Result<Store> {
    if let Some(etcd) = etcd::read_settings(directory)? {
        return Ok(Store::open_etcd(&etcd)?);
    }
    let file = directory.join(DATABASE);
    // Opening would make an empty mesh, also in a mistyped directory.
    match file.try_exists() {
        Ok(true) => Ok(Store::open(&file)?),
        Ok(false) => bail!(
            "cannot find a mesh in {}: start `seikan coordinator` once, or name another directory with --dir",
            directory.display()
        ),
        Err(error) => Err(error).with_context(|| format!("cannot look for {}", file.display())),
    }
}

fn read_listener(directory: &Path) -> Listener {
    Listener::read(&directory.join(LISTENER_FILE)).unwrap_or(Listener {
        port: PORT,
        pin: None,
    })
}

fn token(arguments: &TokenArguments) -> anyhow::Result<()> {
    let mesh = arguments.directory.open()?;
    let listener = read_listener(&arguments.directory.dir);
    if !arguments.directory.dir.join(LISTENER_FILE).exists() {
        // It makes the database before its certificate.
        writeln!(
            anstream::stderr(),
            "warning: the coordinator has not listened yet, so this command has no pin and the usual port; \
             run `seikan coordinator token` again once it listens"
        )?;
    }
    let token = Token::generate(&mut SystemRandom);
    let new = NewToken {
        label: arguments.label.clone(),
        uses: (!arguments.reusable).then_some(arguments.uses),
        expires: match arguments.expires {
            Expiry::Never => None,
            Expiry::After(time) => Some(now().saturating_add(time.as_secs())),
        },
        tags: arguments.tags.clone(),
        devices: arguments.devices,
    };
    mesh.create_token(&token.digest(), &new, &mesh.operator, now())?;
    let host = service::advertised_host(arguments.host.as_deref(), listener.port)?;
    view::token(&host, listener.pin, &token, &new)
}

fn withdraw(arguments: &Withdraw) -> anyhow::Result<()> {
    let mesh = arguments.directory.open()?;
    if !mesh.withdraw_token(TokenId(arguments.id), &mesh.operator, now())? {
        bail!(
            "cannot withdraw token {}: there is no such token; see `seikan coordinator tokens`",
            arguments.id
        );
    }
    Ok(())
}

fn revoke(arguments: &Revoke) -> anyhow::Result<()> {
    let mesh = arguments.directory.open()?;
    let name = &arguments.name;
    let removed = match name {
        PartyName::Member(name) => mesh.remove(MemberRef::Name(name), &mesh.operator, now()),
        // A device that was pending already needs no change.
        PartyName::Device(name) => mesh
            .revoke_device(name, &mesh.operator, now())
            .map(|_| true),
    };
    match removed {
        Ok(true) => Ok(()),
        Ok(false) | Err(StoreError::NotAMember) => {
            Err(unknown(name)).with_context(|| format!("cannot revoke {name}"))
        }
        Err(error) => Err(error).with_context(|| format!("cannot revoke {name}")),
    }
}

fn approve_device(arguments: &ApproveDevice) -> anyhow::Result<()> {
    let mesh = arguments.directory.open()?;
    let (name, tags) = (&arguments.name, arguments.tags.as_slice());
    let tags = (!tags.is_empty()).then_some(tags);
    let approved = match &arguments.from {
        Some(from) => mesh.move_device((from, name), tags, &mesh.operator, now()),
        None => mesh
            .approve_device(name, tags, &mesh.operator, now())
            .map(|_| ()),
    };
    approved.with_context(|| format!("cannot approve {name}"))
}

fn add_relay(arguments: &AddRelay) -> anyhow::Result<()> {
    let kind = if arguments.turn {
        RelayKind::Turn
    } else if arguments.turns {
        RelayKind::Turns
    } else {
        RelayKind::Seikan
    };
    let secret = RelaySecret::parse(arguments.secret.trim(), kind)?;
    let relay = RelayInfo {
        address: arguments.address.clone(),
        kind,
        tls: arguments.tls.map(|port| RelayTls {
            port,
            pin: arguments.pin,
        }),
    };
    let mesh = arguments.directory.open()?;
    mesh.add_relay(&relay, &secret, &mesh.operator, now())?;
    Ok(())
}

fn remove_relay(arguments: &RemoveRelay) -> anyhow::Result<()> {
    let mesh = arguments.directory.open()?;
    if !mesh.remove_relay(&arguments.address, &mesh.operator, now())? {
        bail!(
            "cannot remove relay {}: there is no such relay; see `seikan coordinator relays`",
            arguments.address
        );
    }
    Ok(())
}

fn unknown(name: &PartyName) -> anyhow::Error {
    match name {
        PartyName::Member(name) => {
            anyhow!("no member is called {name}; see `seikan coordinator members`")
        }
        PartyName::Device(name) => {
            anyhow!("no approved device is called {name}; see `seikan coordinator devices`")
        }
    }
}

/// Returns the administrator for the log: the user that called sudo, else the user of this process.
fn operator() -> Actor {
    let user = std::env::var("SUDO_USER").unwrap_or_else(|_| service::user_name(Uid::current()));
    Actor::Operator(user)
}
