//! `coordinator policy` and `coordinator tag`: the policy of the mesh, and the tags of its members.

mod changes;

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand, ValueHint};
use seikan_coordinator::{Store, StoreError};
use seikan_proto::mesh::policy::{Selector, Traffic};
use seikan_proto::mesh::{Name, Party, PartyName, Policy};

use super::{Directory, now, unknown};
use crate::explain::Connection;
use crate::screen::printable_lines;
use changes::Changes;

/// Options of `coordinator policy`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator policy set rules.txt               members apply it within seconds\n  \
    sudo seikan coordinator policy explain laptop web tcp/443  is it allowed, and why?\n\n\
    A policy has one rule per line; `#` starts a comment:\n  \
    allow tag:ops -> *        *          all traffic to all members\n  \
    allow *       -> tag:web  tcp/443    one port; also udp/8000-8999, tcp, udp, icmp\n  \
    allow laptop  -> db-1     icmp       members by name\n  \
    allow laptop  -> plc.site-a tcp/502  a device, with the name of its gateway\n\n\
    Without rules, two members may talk if they share a tag or if neither has one. From the first rule on, \
    only rules allow traffic; shared tags no longer count.")]
pub struct PolicyArguments {
    #[command(subcommand)]
    verb: PolicyVerb,
}

#[derive(Debug, Subcommand)]
enum PolicyVerb {
    /// Replace the policy by the rules of a file
    Set(Set),
    /// Print the policy
    Show(Show),
    /// Explain whether one member may open a connection to another
    Explain(Explain),
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator policy set rules.txt          print the pairs that it opens and closes\n  \
    sudo seikan coordinator policy set rules.txt --yes    do not ask before this host loses access")]
struct Set {
    /// File with the rules, one per line
    #[arg(value_hint = ValueHint::FilePath)]
    file: PathBuf,
    /// Set the policy without asking, even if this host loses access
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    directory: Directory,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  sudo seikan coordinator policy show > rules.txt")]
struct Show {
    #[command(flatten)]
    directory: Directory,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan coordinator policy explain laptop web-1 tcp/443\n\n\
    Exit status: 0 if the policy allows it, 1 if not.")]
struct Explain {
    /// Member or device that opens the connection
    from: PartyName,
    /// Member or device that accepts it
    to: PartyName,
    /// Traffic: tcp/443, udp/53, icmp, or * for other protocols
    #[arg(value_name = "PORT")]
    traffic: Traffic,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    directory: Directory,
}

/// Options of `coordinator tag`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator tag web-1 web eu       replace the tags by `web` and `eu`\n  \
    sudo seikan coordinator tag web-1 --none       remove all tags\n  \
    sudo seikan coordinator tag plc.site-a plcs    set the tags of a device")]
pub struct TagArguments {
    /// Name of the member or device
    name: PartyName,
    /// Tags, which replace the former ones
    #[arg(value_name = "TAG", required_unless_present = "none")]
    tags: Vec<Name>,
    /// Remove all tags
    #[arg(long, conflicts_with = "tags")]
    none: bool,
    #[command(flatten)]
    directory: Directory,
}

/// Runs a verb of the policy.
pub fn run(arguments: &PolicyArguments) -> anyhow::Result<ExitCode> {
    match &arguments.verb {
        PolicyVerb::Set(arguments) => set(arguments),
        PolicyVerb::Show(arguments) => {
            let mut text = arguments.directory.open()?.policy()?;
            // A terminal must not interpret control characters in the text; a file gets the text
            // unchanged.
            if io::stdout().is_terminal() {
                text = printable_lines(&text);
            }
            write!(io::stdout(), "{text}")?;
            Ok(ExitCode::SUCCESS)
        }
        PolicyVerb::Explain(arguments) => explain(arguments),
    }
}

/// Sets the tags of a member or device.
pub fn tag(arguments: &TagArguments) -> anyhow::Result<()> {
    let mesh = arguments.directory.open()?;
    let name = &arguments.name;
    let set = match name {
        PartyName::Member(name) => mesh.set_tags(name, &arguments.tags, &mesh.operator, now()),
        PartyName::Device(name) => {
            mesh.set_device_tags(name, &arguments.tags, &mesh.operator, now())
        }
    };
    match set {
        Ok(_) => Ok(()),
        Err(StoreError::NotAMember) => {
            Err(unknown(name)).with_context(|| format!("cannot tag {name}"))
        }
        Err(error) => Err(error).with_context(|| format!("cannot tag {name}")),
    }
}

fn set(arguments: &Set) -> anyhow::Result<ExitCode> {
    // The file is read as the user of the command, before the process becomes the coordinator's
    // user.
    let file = arguments.file.display();
    let text = std::fs::read_to_string(&arguments.file);
    let text = text.with_context(|| format!("cannot read {file}"))?;
    let mesh = arguments.directory.open()?;
    let policy = Policy::parse(&text).with_context(|| format!("cannot use the policy {file}"))?;
    for warning in warnings(&mesh, &policy)? {
        writeln!(io::stderr(), "warning: {warning}")?;
    }
    let before = Policy::parse(&mesh.policy()?)?;
    let members = mesh.members()?;
    let changes = Changes::between(&before, &policy, &members);
    write!(io::stdout(), "{}", changes.describe())?;
    if !changes.own.is_empty() && !arguments.yes && !confirmed(&changes)? {
        return Ok(ExitCode::FAILURE);
    }
    mesh.set_policy(&text, &mesh.operator, now())?;
    Ok(ExitCode::SUCCESS)
}

/// Asks whether this host may lose access: the administrator may be connected through it.
fn confirmed(changes: &Changes) -> anyhow::Result<bool> {
    let pairs = changes.own.join(", ");
    if !io::stdin().is_terminal() {
        anyhow::bail!(
            "cannot set the policy: this host would lose access ({pairs}), and there is no terminal to ask; add --yes to set it anyway"
        );
    }
    write!(
        io::stderr(),
        "This host would lose access: {pairs}. If you are connected through it, you may be cut off.\nSet it? [y/N] "
    )?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Returns a warning for each member and tag of the policy that does not exist (yet).
fn warnings(store: &Store, policy: &Policy) -> anyhow::Result<BTreeSet<String>> {
    let members = store.members()?;
    let tokens = store.tokens()?;
    let good = tokens.iter().filter(|token| token.is_good(now()));
    let parties: Vec<Party> = members
        .iter()
        .flat_map(|info| info.member.parties())
        .collect();
    let tags: BTreeSet<&Name> = parties
        .iter()
        .map(|party| &party.tags)
        .chain(good.map(|token| &token.tags))
        .flatten()
        .collect();
    let names: BTreeSet<PartyName> = parties.iter().map(Party::full_name).collect();
    let ends = policy
        .rules()
        .iter()
        .flat_map(|rule| [&rule.from, &rule.to]);
    let unknown = ends.filter_map(|selector| match selector {
        Selector::Tag(tag) if !tags.contains(tag) => Some(format!(
            "no member or device has the tag {tag}, and no token assigns it"
        )),
        Selector::Named(name) if !names.contains(name) => Some(match name {
            PartyName::Member(name) => {
                format!("no member is called {name}; for a tag, write tag:{name}")
            }
            PartyName::Device(name) => format!("no approved device is called {name}"),
        }),
        _ => None,
    });
    Ok(unknown.collect())
}

fn explain(arguments: &Explain) -> anyhow::Result<ExitCode> {
    let store = arguments.directory.open()?;
    let policy = Policy::parse(&store.policy()?)?;
    let members = store.members()?;
    let party = |name: &PartyName| -> anyhow::Result<Party> {
        let mut parties = members.iter().flat_map(|info| info.member.parties());
        let party = parties.find(|party| party.full_name() == *name);
        party.ok_or_else(|| unknown(name))
    };
    let connection = Connection {
        from: party(&arguments.from)?,
        to: party(&arguments.to)?,
        traffic: arguments.traffic,
    };
    connection.answer(&policy, arguments.json)
}
