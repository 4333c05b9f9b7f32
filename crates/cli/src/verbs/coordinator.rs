//! `seikan coordinator`: who belongs to a mesh. Alone it runs the service; its verbs look into the same folder and change it,
//! whether a coordinator runs on it or not.

mod etcd;
mod moving;
mod policy;
mod serve;
mod view;

use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::folder;
use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueHint};
use seikan_coordinator::{Actor, NewToken, RelayInfo, Store, StoreError, TokenId, Whom};
use seikan_node::node::SystemRandom;
use seikan_proto::mesh::{Name, Pin, RelayAddress, RelayKind, RelaySecret, RelayTls, Token};
use zeroize::Zeroizing;

/// Where it keeps what it knows.
const FOLDER: &str = "/var/lib/seikan-coordinator";
/// Its port, TCP.
const PORT: u16 = 7443;
/// The file in the folder that has the port where it listened last, and the pin.
const NOTED: &str = "listens";
/// The database in the folder.
pub const DATABASE: &str = "mesh.db";

/// What `coordinator` is told.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  \
    seikan coordinator                  run it, until Ctrl-C\n  \
    seikan coordinator token            a token for one host, and what that is to run\n  \
    seikan coordinator members          who belongs to the mesh?\n  \
    seikan coordinator revoke laptop    take a member out\n  \
    seikan coordinator relays           where members go that do not reach each other\n  \
    seikan coordinator policy set FILE  who may talk to whom?\n\n\
    Needs no privileges, only its folder. No packet of a member's passes through it, and when it stops, members go on \
    with what they know."
)]
pub struct Arguments {
    #[command(subcommand)]
    verb: Option<CoordinatorVerb>,
    #[command(flatten)]
    serve: serve::ServeArguments,
}

/// Where its folder is.
#[derive(Clone, Debug, Args)]
struct Folder {
    /// Folder of what it knows
    #[arg(long, value_name = "DIR", default_value = FOLDER, value_hint = ValueHint::DirPath)]
    dir: PathBuf,
}

/// What an administrator does.
#[derive(Debug, Subcommand)]
enum CoordinatorVerb {
    /// Make a token, and print what a host runs to join
    Token(TokenArguments),
    /// Show tokens
    Tokens(List),
    /// Take a token back: nobody joins with it any more
    Withdraw(Withdraw),
    /// Show members
    Members(List),
    /// Take a member out of the mesh
    Revoke(Revoke),
    /// Show relays
    Relays(List),
    /// Add a relay, or remove one
    Relay(RelayArguments),
    /// Set the tags of a member
    Tag(policy::TagArguments),
    /// Set, show or explain who may talk to whom
    Policy(policy::PolicyArguments),
    /// Show who did what
    Audit(Audit),
    /// Move the mesh of this folder into etcd, which several coordinators share
    Import(Box<moving::ImportArguments>),
    /// Copy the whole mesh to a file
    Export(moving::ExportArguments),
}

/// What a token is to be good for.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    seikan coordinator token                        for one host, within a day\n  \
    seikan coordinator token --reusable --tag web   for any number of hosts, which get the tag `web`")]
struct TokenArguments {
    /// Hosts that it admits
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    uses: u32,
    /// Admits as many hosts as come
    #[arg(long, conflicts_with = "uses")]
    reusable: bool,
    /// Until when: 90m, 24h, 7d, or `never`
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = expiry)]
    expires: Expiry,
    /// Tag of the hosts that it admits; may be given again
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<Name>,
    /// What people know it by
    #[arg(long)]
    label: Option<String>,
    /// Host under which members reach this coordinator, for the line that is printed [default: this host's name]
    #[arg(long, value_name = "HOST[:PORT]")]
    host: Option<String>,
    #[command(flatten)]
    folder: Folder,
}

/// A list, for people or programs.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    seikan coordinator members --json   for programs\n  \
    seikan coordinator tokens --json\n  \
    seikan coordinator relays --json")]
struct List {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    folder: Folder,
}

/// Which token.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  seikan coordinator withdraw 3      the number is that of `coordinator tokens`"
)]
struct Withdraw {
    /// Its number
    id: i64,
    #[command(flatten)]
    folder: Folder,
}

/// Which member.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  seikan coordinator revoke laptop    its peers forget it within seconds"
)]
struct Revoke {
    /// Its name
    name: Name,
    #[command(flatten)]
    folder: Folder,
}

/// What becomes of a relay.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan coordinator relay add relay.example.org:3478 --secret skr_...    as `seikan relay secret` prints it")]
struct RelayArguments {
    #[command(subcommand)]
    verb: RelayVerb,
}

#[derive(Debug, Subcommand)]
enum RelayVerb {
    /// Send members that do not reach each other to a relay
    Add(AddRelay),
    /// Send nobody to it any more
    Remove(RemoveRelay),
}

/// Which relay, and what it takes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    seikan coordinator relay add relay.example.org:3478 --secret skr_...      one of `seikan relay`\n  \
    seikan coordinator relay add turn.example.org:3478 --turn --secret north  coturn with use-auth-secret\n  \
    seikan coordinator relay add turn.example.org:443 --turns --secret north  the same by TLS\n\n\
    The same address again gives it another secret, or takes it from --tls.")]
struct AddRelay {
    /// Where members reach it: UDP; of a TURN server UDP or TCP, with --turns TLS
    #[arg(value_name = "HOST:PORT")]
    address: RelayAddress,
    /// What it shares with this coordinator
    #[arg(
        long,
        value_name = "SECRET",
        env = "SEIKAN_RELAY_SECRET",
        hide_env_values = true
    )]
    secret: Zeroizing<String>,
    /// It is a TURN server that takes tickets as coturn does (static-auth-secret), by UDP and TCP at that port
    #[arg(long)]
    turn: bool,
    /// The same by TLS, with a certificate that the members' systems trust
    #[arg(long, conflicts_with = "turn")]
    turns: bool,
    /// A relay of `seikan relay` is also there by TLS, at this port of TCP
    #[arg(long, value_name = "PORT", conflicts_with_all = ["turn", "turns"])]
    tls: Option<NonZeroU16>,
    /// What its certificate is known by, unless the members' systems trust it
    #[arg(long, value_name = "PIN", requires = "tls")]
    pin: Option<Pin>,
    #[command(flatten)]
    folder: Folder,
}

/// Which relay.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  seikan coordinator relay remove relay.example.org:3478    members leave it within seconds"
)]
struct RemoveRelay {
    /// Its address, as `coordinator relays` shows it
    #[arg(value_name = "HOST:PORT")]
    address: RelayAddress,
    #[command(flatten)]
    folder: Folder,
}

/// How much of the log.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  seikan coordinator audit --last 20  the newest first")]
struct Audit {
    /// Entries at most
    #[arg(long, default_value_t = 100)]
    last: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    folder: Folder,
}

/// How long a token is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expiry {
    Never,
    After(Duration),
}

/// Does what was asked for.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.verb {
        None => serve::run(&arguments.serve),
        Some(CoordinatorVerb::Token(arguments)) => token(arguments),
        Some(CoordinatorVerb::Tokens(list)) => {
            let tokens = list.folder.store()?.tokens()?;
            view::tokens(&tokens, now(), list.json)
        }
        Some(CoordinatorVerb::Withdraw(arguments)) => withdraw(arguments),
        Some(CoordinatorVerb::Members(list)) => {
            let members = list.folder.store()?.members()?;
            view::members(&members, now(), list.json)
        }
        Some(CoordinatorVerb::Revoke(arguments)) => revoke(arguments),
        Some(CoordinatorVerb::Relays(list)) => {
            let relays = list.folder.store()?.relays()?;
            view::relays(&relays, list.json)
        }
        Some(CoordinatorVerb::Relay(arguments)) => match &arguments.verb {
            RelayVerb::Add(arguments) => add_relay(arguments),
            RelayVerb::Remove(arguments) => remove_relay(arguments),
        },
        Some(CoordinatorVerb::Tag(arguments)) => policy::tag(arguments),
        Some(CoordinatorVerb::Policy(arguments)) => policy::run(arguments),
        Some(CoordinatorVerb::Audit(arguments)) => {
            let entries = arguments.folder.store()?.audit(arguments.last)?;
            view::audit(&entries, now(), arguments.json)
        }
        Some(CoordinatorVerb::Import(arguments)) => moving::import(arguments),
        Some(CoordinatorVerb::Export(arguments)) => moving::export(arguments),
    }
}

impl Folder {
    /// What is kept there; a coordinator has to have been started once. Files that only root may open have to be open before.
    fn store(&self) -> anyhow::Result<Store> {
        self.as_owner(store)
    }

    /// Works in it as who it belongs to, from then on.
    fn as_owner<T>(&self, work: impl FnOnce(&Path) -> anyhow::Result<T>) -> anyhow::Result<T> {
        folder::as_owner(&self.dir, work)
    }

    /// Notes both, for the line that is printed with a token.
    fn note(&self, port: u16, pin: Option<Pin>) -> std::io::Result<()> {
        let pin = pin.map_or(String::new(), |pin| pin.to_string());
        std::fs::write(self.dir.join(NOTED), format!("{port} {pin}\n"))
    }
}

/// What is kept in a folder.
fn store(folder: &Path) -> anyhow::Result<Store> {
    if let Some(etcd) = etcd::noted(folder)? {
        return Ok(Store::open_etcd(&etcd)?);
    }
    let file = folder.join(DATABASE);
    let held = etcd::hold_file(folder, DATABASE)?;
    // Opening makes it, and nobody wants an empty mesh in a folder that was mistyped.
    match file.try_exists() {
        Ok(true) => Ok(Store::open_held(held)?),
        Ok(false) => bail!(
            "there is no coordinator in {}: start one with `seikan coordinator`, or say --dir",
            folder.display()
        ),
        Err(error) => Err(error).with_context(|| format!("cannot look for {}", file.display())),
    }
}

/// Where the coordinator of a folder listened last, and by which pin it is known; none if systems trust its certificate.
fn noted(folder: &Path) -> (u16, Option<Pin>) {
    let noted = std::fs::read_to_string(folder.join(NOTED)).unwrap_or_default();
    let mut words = noted.split_whitespace();
    let port = words.next().and_then(|word| word.parse().ok());
    let pin = words.next().and_then(|word| word.parse().ok());
    (port.unwrap_or(PORT), pin)
}

fn token(arguments: &TokenArguments) -> anyhow::Result<ExitCode> {
    let both = |dir: &Path| Ok((store(dir)?, noted(dir)));
    let (store, (port, pin)) = arguments.folder.as_owner(both)?;
    let token = Token::generate(&mut SystemRandom);
    let new = NewToken {
        label: arguments.label.clone(),
        uses: (!arguments.reusable).then_some(arguments.uses),
        expires: match arguments.expires {
            Expiry::Never => None,
            Expiry::After(time) => Some(now().saturating_add(time.as_secs())),
        },
        tags: arguments.tags.clone(),
    };
    store.create_token(&token.digest(), &new, &operator(), now())?;
    let host = arguments.host.clone().unwrap_or_else(own_name);
    let host = match host.rsplit_once(':') {
        Some((_, port)) if port.parse::<u16>().is_ok() => host,
        _ => format!("{host}:{}", port),
    };
    view::token(&host, pin, &token, &new)
}

fn withdraw(arguments: &Withdraw) -> anyhow::Result<ExitCode> {
    let store = arguments.folder.store()?;
    match store.withdraw_token(TokenId(arguments.id), &operator(), now())? {
        true => Ok(ExitCode::SUCCESS),
        false => bail!(
            "there is no token {} to withdraw: see `seikan coordinator tokens`",
            arguments.id
        ),
    }
}

fn revoke(arguments: &Revoke) -> anyhow::Result<ExitCode> {
    let store = arguments.folder.store()?;
    let whom = Whom::Name(&arguments.name);
    match store.remove(whom, &operator(), now()) {
        Ok(true) => Ok(ExitCode::SUCCESS),
        Ok(false) | Err(StoreError::NotAMember) => bail!(
            "no member is called {}: see `seikan coordinator members`",
            arguments.name
        ),
        Err(error) => Err(error.into()),
    }
}

fn add_relay(arguments: &AddRelay) -> anyhow::Result<ExitCode> {
    let kind = match (arguments.turn, arguments.turns) {
        (true, _) => RelayKind::Turn,
        (_, true) => RelayKind::Turns,
        _ => RelayKind::Seikan,
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
    let store = arguments.folder.store()?;
    store.add_relay(&relay, &secret, &operator(), now())?;
    Ok(ExitCode::SUCCESS)
}

fn remove_relay(arguments: &RemoveRelay) -> anyhow::Result<ExitCode> {
    let store = arguments.folder.store()?;
    match store.remove_relay(&arguments.address, &operator(), now())? {
        true => Ok(ExitCode::SUCCESS),
        false => bail!(
            "there is no relay {}: see `seikan coordinator relays`",
            arguments.address
        ),
    }
}

/// Who is at the terminal, for the log.
fn operator() -> Actor {
    let user = ["SUDO_USER", "USER"]
        .iter()
        .find_map(|name| std::env::var(name).ok());
    Actor::Operator(user.unwrap_or_else(|| "unknown".to_owned()))
}

/// Seconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// What this host is called; others may know it by another name.
pub fn own_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    name.map_or_else(|_| "localhost".to_owned(), |name| name.trim().to_owned())
}

/// "90m", "24h", "7d", "never".
fn expiry(text: &str) -> Result<Expiry, String> {
    let wrong = || "write a number with s, m, h or d behind it, such as 24h, or `never`".to_owned();
    if text == "never" {
        return Ok(Expiry::Never);
    }
    let unit = text.chars().last().ok_or_else(wrong)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        _ => return Err(wrong()),
    };
    let count: u64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    let time = count.checked_mul(seconds).filter(|time| *time > 0);
    time.map(|time| Expiry::After(Duration::from_secs(time)))
        .ok_or_else(wrong)
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
