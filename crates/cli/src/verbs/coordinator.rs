//! `seikan coordinator`: runs the coordinator of a mesh; its verbs read and change the same
//! directory, beside a running coordinator or without one.

mod etcd;
mod policy;
mod serve;
mod snapshot;
pub mod view;

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::num::NonZeroU16;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand, ValueHint};
use nix::unistd::Uid;
use seikan_coordinator::{Actor, MemberRef, NewToken, RelayInfo, Store, StoreError, TokenId};
use seikan_node::system::SystemRandom;
use seikan_proto::mesh::{
    DeviceName, Name, PartyName, Pin, RelayAddress, RelayKind, RelaySecret, RelayTls, Token,
};
use zeroize::Zeroizing;

use crate::service;

/// Default directory.
const DIRECTORY: &str = "/var/lib/seikan-coordinator";
/// Default TCP port.
const PORT: u16 = 7443;
/// File with the port of the last start and the pin of the certificate, for `token`.
const LISTENER_FILE: &str = "listens";
/// Database file of a mesh that is not in etcd.
pub const DATABASE: &str = "mesh.db";

/// Options of `coordinator`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  \
    sudo seikan coordinator                  run it until Ctrl-C\n  \
    sudo seikan coordinator token            print the command that joins a host\n  \
    sudo seikan coordinator members          list members\n  \
    sudo seikan coordinator revoke laptop    remove a member\n  \
    sudo seikan coordinator policy set FILE  set who may talk to whom\n\n\
    It needs no privileges, only its directory; started by root it becomes user `seikan`. No packet of a \
    member passes through it. While it is stopped, members keep their tunnels."
)]
pub struct Arguments {
    #[command(subcommand)]
    verb: Option<CoordinatorVerb>,
    #[command(flatten)]
    serve: serve::ServeArguments,
}

/// The directory of a coordinator.
#[derive(Clone, Debug, Args)]
struct Directory {
    /// Directory of the coordinator
    #[arg(long, value_name = "DIR", default_value = DIRECTORY, value_hint = ValueHint::DirPath)]
    dir: PathBuf,
}

/// Verbs of an administrator.
#[derive(Debug, Subcommand)]
enum CoordinatorVerb {
    /// Create a join token and print the command that uses it
    Token(TokenArguments),
    /// List join tokens
    Tokens(List),
    /// Withdraw a join token
    Withdraw(Withdraw),
    /// List members
    Members(List),
    /// List devices behind members
    Devices(List),
    /// Approve a device, which gives it an address in the mesh
    ApproveDevice(ApproveDevice),
    /// Remove a member from the mesh, or take the approval of a device back
    Revoke(Revoke),
    /// List relays
    Relays(List),
    /// Add or remove a relay
    Relay(RelayArguments),
    /// Set the tags of a member or device
    Tag(policy::TagArguments),
    /// Set, show or explain the policy of the mesh
    Policy(policy::PolicyArguments),
    /// Show the log of changes
    Audit(Audit),
    /// Make the mesh from an exported file, in etcd or in a file
    Import(Box<snapshot::ImportArguments>),
    /// Write the whole mesh to a file
    Export(snapshot::ExportArguments),
}

/// Options of `coordinator token`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator token                        for one host, within a day\n  \
    sudo seikan coordinator token --reusable --tag web   for any number of hosts, with the tag `web`")]
struct TokenArguments {
    /// Number of hosts that may join with it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    uses: u32,
    /// Admit any number of hosts
    #[arg(long, conflicts_with = "uses")]
    reusable: bool,
    /// Lifetime: 90m, 24h, 7d, or `never`
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = expiry)]
    expires: Expiry,
    /// Tag of the hosts that join with it (repeatable)
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<Name>,
    /// Approve the devices behind hosts that join with it, with the tags of their gateway
    #[arg(long)]
    devices: bool,
    /// Label in the list of tokens
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
    /// Host name or address of this coordinator in the printed command [default: this host's name]
    #[arg(long, value_name = "HOST[:PORT]")]
    host: Option<String>,
    #[command(flatten)]
    directory: Directory,
}

/// Options of a list.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator members --json\n  \
    sudo seikan coordinator devices --json\n  \
    sudo seikan coordinator tokens --json\n  \
    sudo seikan coordinator relays --json")]
struct List {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    directory: Directory,
}

/// Options of `coordinator withdraw`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan coordinator withdraw 3    withdraw number 3 of `seikan coordinator tokens`")]
struct Withdraw {
    /// Number of the token
    #[arg(value_name = "NUMBER")]
    id: i64,
    #[command(flatten)]
    directory: Directory,
}

/// Options of `coordinator approve-device`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator approve-device plc.site-a               with the tags of its gateway\n  \
    sudo seikan coordinator approve-device plc.site-a --tag plcs    with the tag `plcs`\n  \
    sudo seikan coordinator approve-device plc.site-b --from plc.site-a\n      \
    the device that was at `site-a`: it keeps its addresses and tags")]
struct ApproveDevice {
    /// Name of the device and of its gateway, as `seikan coordinator devices` lists it
    #[arg(value_name = "DEVICE.GATEWAY")]
    name: DeviceName,
    /// Tag of the device (repeatable) [default: the tags of its gateway]
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<Name>,
    /// Former name of the device, whose addresses and tags it keeps
    #[arg(long, value_name = "DEVICE.GATEWAY")]
    from: Option<DeviceName>,
    #[command(flatten)]
    directory: Directory,
}

/// Options of `coordinator revoke`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator revoke laptop        its peers close their sessions within seconds\n  \
    sudo seikan coordinator revoke plc.site-a    the device loses its address")]
struct Revoke {
    /// Name of the member or device
    name: PartyName,
    #[command(flatten)]
    directory: Directory,
}

/// Options of `coordinator relay`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan coordinator relay add relay.example.org:3478 --secret skr_...\n\n\
    `seikan relay secret`, on the host of the relay, prints this command.")]
struct RelayArguments {
    #[command(subcommand)]
    verb: RelayVerb,
}

#[derive(Debug, Subcommand)]
enum RelayVerb {
    /// Add a relay for members without a direct path
    Add(AddRelay),
    /// Remove a relay
    Remove(RemoveRelay),
}

/// Options of `coordinator relay add`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator relay add relay.example.org:3478 --secret skr_...\n      \
    a relay that runs `seikan relay`\n  \
    sudo seikan coordinator relay add turn.example.org:3478 --turn --secret north\n      \
    coturn with `use-auth-secret`\n  \
    sudo seikan coordinator relay add turn.example.org:443 --turns --secret north\n      \
    the same over TLS\n\n\
    For a known address, this replaces the secret and the TLS settings.")]
struct AddRelay {
    /// Address of the relay: UDP; for --turn UDP or TCP, for --turns TLS
    #[arg(value_name = "HOST:PORT")]
    address: RelayAddress,
    /// Secret that the relay shares with the coordinator
    #[arg(
        long,
        value_name = "SECRET",
        env = "SEIKAN_RELAY_SECRET",
        hide_env_values = true
    )]
    secret: Zeroizing<String>,
    /// Use a TURN server that accepts coturn's time-limited credentials (static-auth-secret), over
    /// UDP and TCP
    #[arg(long)]
    turn: bool,
    /// Use such a TURN server over TLS; its certificate has to be trusted by the members' systems
    #[arg(long, conflicts_with = "turn")]
    turns: bool,
    /// TCP port at which the relay also listens for TLS
    #[arg(long, value_name = "PORT", conflicts_with_all = ["turn", "turns"])]
    tls: Option<NonZeroU16>,
    /// Pin of its certificate [default: trusted by the members' systems]
    #[arg(long, value_name = "PIN", requires = "tls")]
    pin: Option<Pin>,
    #[command(flatten)]
    directory: Directory,
}

/// Options of `coordinator relay remove`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan coordinator relay remove relay.example.org:3478    members leave it within seconds")]
struct RemoveRelay {
    /// Address of the relay, as `seikan coordinator relays` lists it
    #[arg(value_name = "HOST:PORT")]
    address: RelayAddress,
    #[command(flatten)]
    directory: Directory,
}

/// Options of `coordinator audit`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan coordinator audit --last 20    the newest 20 entries, newest first")]
struct Audit {
    /// Maximum number of entries
    #[arg(long, value_name = "N", default_value_t = 100)]
    last: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    directory: Directory,
}

/// Lifetime of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expiry {
    Never,
    After(Duration),
}

/// Runs the coordinator or one of its verbs.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.verb {
        None => return serve::run(&arguments.serve),
        Some(CoordinatorVerb::Token(arguments)) => token(arguments)?,
        Some(CoordinatorVerb::Tokens(list)) => {
            let tokens = list.directory.open()?.store.tokens()?;
            view::tokens(&tokens, now(), list.json)?;
        }
        Some(CoordinatorVerb::Withdraw(arguments)) => withdraw(arguments)?,
        Some(CoordinatorVerb::Members(list)) => {
            let members = list.directory.open()?.store.members()?;
            view::members(&members, now(), list.json)?;
        }
        Some(CoordinatorVerb::Devices(list)) => {
            let members = list.directory.open()?.store.members()?;
            view::devices(&members, list.json)?;
        }
        Some(CoordinatorVerb::ApproveDevice(arguments)) => approve_device(arguments)?,
        Some(CoordinatorVerb::Revoke(arguments)) => revoke(arguments)?,
        Some(CoordinatorVerb::Relays(list)) => {
            let relays = list.directory.open()?.store.relays()?;
            view::relays(&relays, list.json)?;
        }
        Some(CoordinatorVerb::Relay(arguments)) => match &arguments.verb {
            RelayVerb::Add(arguments) => add_relay(arguments)?,
            RelayVerb::Remove(arguments) => remove_relay(arguments)?,
        },
        Some(CoordinatorVerb::Tag(arguments)) => policy::tag(arguments)?,
        Some(CoordinatorVerb::Policy(arguments)) => return policy::run(arguments),
        Some(CoordinatorVerb::Audit(arguments)) => {
            let entries = arguments.directory.open()?.store.audit(arguments.last)?;
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

    /// Writes the port and the pin, for `token`.
    fn write_listener(&self, port: u16, pin: Option<Pin>) -> io::Result<()> {
        let pin = pin.map_or(String::new(), |pin| pin.to_string());
        fs::write(self.dir.join(LISTENER_FILE), format!("{port} {pin}\n"))
    }
}

/// Locks a directory and makes it if there is none. Coordinators and verbs share the lock; an import
/// has it `alone`.
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

/// Port of the coordinator's last start, and the pin of its certificate; `None` if systems trust
/// that.
struct Listener {
    port: u16,
    pin: Option<Pin>,
}

fn read_listener(directory: &Path) -> Listener {
    let text = fs::read_to_string(directory.join(LISTENER_FILE)).unwrap_or_default();
    let mut words = text.split_whitespace();
    let port = words.next().and_then(|word| word.parse().ok());
    let pin = words.next().and_then(|word| word.parse().ok());
    Listener {
        port: port.unwrap_or(PORT),
        pin,
    }
}

fn token(arguments: &TokenArguments) -> anyhow::Result<()> {
    let mesh = arguments.directory.open()?;
    let listener = read_listener(&arguments.directory.dir);
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
    mesh.store
        .create_token(&token.digest(), &new, &mesh.operator, now())?;
    let host = service::advertised_host(arguments.host.as_deref(), listener.port)?;
    view::token(&host, listener.pin, &token, &new)
}

fn withdraw(arguments: &Withdraw) -> anyhow::Result<()> {
    let Mesh {
        store,
        operator,
        _lock,
    } = arguments.directory.open()?;
    if !store.withdraw_token(TokenId(arguments.id), &operator, now())? {
        bail!(
            "cannot withdraw token {}: there is none; see `seikan coordinator tokens`",
            arguments.id
        );
    }
    Ok(())
}

fn revoke(arguments: &Revoke) -> anyhow::Result<()> {
    let Mesh {
        store,
        operator,
        _lock,
    } = arguments.directory.open()?;
    let name = &arguments.name;
    let removed = match name {
        PartyName::Member(name) => store.remove(MemberRef::Name(name), &operator, now()),
        // One that was pending already is as wanted.
        PartyName::Device(name) => store.revoke_device(name, &operator, now()).map(|_| true),
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
    let Mesh {
        store,
        operator,
        _lock,
    } = arguments.directory.open()?;
    let (name, tags) = (&arguments.name, arguments.tags.as_slice());
    let tags = (!tags.is_empty()).then_some(tags);
    let approved = match &arguments.from {
        Some(from) => store.move_device((from, name), tags, &operator, now()),
        None => store
            .approve_device(name, tags, &operator, now())
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
    let Mesh {
        store,
        operator,
        _lock,
    } = arguments.directory.open()?;
    store.add_relay(&relay, &secret, &operator, now())?;
    Ok(())
}

fn remove_relay(arguments: &RemoveRelay) -> anyhow::Result<()> {
    let Mesh {
        store,
        operator,
        _lock,
    } = arguments.directory.open()?;
    if !store.remove_relay(&arguments.address, &operator, now())? {
        bail!(
            "cannot remove relay {}: there is none; see `seikan coordinator relays`",
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

/// Returns the seconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Parses "90m", "24h", "7d" or "never".
fn expiry(text: &str) -> Result<Expiry, String> {
    let invalid = || "expected a number with s, m, h or d, for example 24h, or `never`".to_owned();
    if text == "never" {
        return Ok(Expiry::Never);
    }
    let unit = text.chars().last().ok_or_else(invalid)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        _ => return Err(invalid()),
    };
    let count: u64 = text[..text.len() - 1].parse().map_err(|_| invalid())?;
    let time = count.checked_mul(seconds).filter(|time| *time > 0);
    time.map(|time| Expiry::After(Duration::from_secs(time)))
        .ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let after = |seconds| Ok(Expiry::After(Duration::from_secs(seconds)));
        assert_eq!(expiry("90m"), after(5_400));
        assert_eq!(expiry("7d"), after(604_800));
        assert_eq!(expiry("never"), Ok(Expiry::Never));
        for bad in [
            "",
            "h",
            "24",
            "0h",
            "-1h",
            "1w",
            "99999999999999999999d",
            "1ä",
        ] {
            assert!(expiry(bad).is_err(), "{bad}");
        }
    }
}
