//! Who may talk to whom: the policy, and the tags that it speaks of.

mod changes;

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand, ValueHint};
use seikan_coordinator::{Store, StoreError};
use seikan_proto::mesh::policy::{Selector, Traffic};
use seikan_proto::mesh::{Name, Party, Policy};

use super::{Folder, now, operator};
use crate::explain::Question;
use crate::screen::printable_lines;
use changes::Changes;

/// What is done about the policy.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    seikan coordinator policy set rules.txt                       members apply it within seconds\n  \
    seikan coordinator policy explain laptop web-1 tcp/443        may it, and why?\n\n\
    One rule a line, `#` before a comment:\n  \
    allow tag:ops -> *       *              everything to everybody\n  \
    allow *       -> tag:web tcp/443        a port: tcp/443, udp/8000-8999, tcp, udp, icmp\n  \
    allow laptop  -> db-1    icmp           members by their names\n\n\
    Without rules, members may talk that have a tag in common, or neither of which has any. Once there\n\
    is a rule, only what a rule allows is allowed, with tags or without.")]
pub struct PolicyArguments {
    #[command(subcommand)]
    verb: PolicyVerb,
}

#[derive(Debug, Subcommand)]
enum PolicyVerb {
    /// Put the policy of a file in the place of the one that there is
    Set(Set),
    /// Print the policy as it was written
    Show(Show),
    /// Say whether one member may begin this with another, and why
    Explain(Explain),
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    seikan coordinator policy set rules.txt           prints who may talk to whom by it and could not, or may no more\n  \
    seikan coordinator policy set rules.txt --yes     asks nothing, also if it takes something from this host")]
struct Set {
    /// Its rules, one a line
    #[arg(value_hint = ValueHint::FilePath)]
    file: PathBuf,
    /// Set it without asking, also if it takes something from this host
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    folder: Folder,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  seikan coordinator policy show > rules.txt")]
struct Show {
    #[command(flatten)]
    folder: Folder,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan coordinator policy explain laptop web-1 tcp/443\n\n\
    Exit status: 0 if it is allowed, 1 if not.")]
struct Explain {
    /// Who begins
    from: Name,
    /// With whom
    to: Name,
    /// What: tcp/443, udp/53, icmp, or * for other protocols
    #[arg(value_name = "PORT")]
    traffic: Traffic,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    folder: Folder,
}

/// Whose tags, and which.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    seikan coordinator tag web-1 web eu     these, and no others any more\n  \
    seikan coordinator tag web-1 --none     none")]
pub struct TagArguments {
    /// The member
    name: Name,
    /// All that it is to have
    #[arg(value_name = "TAG", required_unless_present = "none")]
    tags: Vec<Name>,
    /// Take all from it
    #[arg(long, conflicts_with = "tags")]
    none: bool,
    #[command(flatten)]
    folder: Folder,
}

/// Does what was asked for.
pub fn run(arguments: &PolicyArguments) -> anyhow::Result<ExitCode> {
    match &arguments.verb {
        PolicyVerb::Set(arguments) => set(arguments),
        PolicyVerb::Show(arguments) => {
            let text = arguments.folder.store()?.policy()?;
            // A file gets it as it is.
            let text = match io::stdout().is_terminal() {
                true => printable_lines(&text),
                false => text,
            };
            write!(io::stdout(), "{text}")?;
            Ok(ExitCode::SUCCESS)
        }
        PolicyVerb::Explain(arguments) => explain(arguments),
    }
}

/// Gives a member its tags.
pub fn tag(arguments: &TagArguments) -> anyhow::Result<ExitCode> {
    let store = arguments.folder.store()?;
    match store.set_tags(&arguments.name, &arguments.tags, &operator(), now()) {
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(StoreError::NotAMember) => Err(nobody(&arguments.name)),
        Err(error) => Err(error.into()),
    }
}

fn set(arguments: &Set) -> anyhow::Result<ExitCode> {
    // Before it is the folder's owner who reads.
    let file = arguments.file.display();
    let text = std::fs::read_to_string(&arguments.file);
    let text = text.with_context(|| format!("cannot read {file}"))?;
    let store = arguments.folder.store()?;
    let policy = Policy::parse(&text).with_context(|| format!("{file} is no policy"))?;
    for warning in warnings(&store, &policy)? {
        writeln!(io::stderr(), "warning: {warning}")?;
    }
    let before = Policy::parse(&store.policy()?)?;
    let members = store.members()?;
    let changes = Changes::between(&before, &policy, &members);
    write!(io::stdout(), "{}", changes.words())?;
    if !changes.own.is_empty() && !arguments.yes && !confirmed(&changes)? {
        return Ok(ExitCode::FAILURE);
    }
    store.set_policy(&text, &operator(), now())?;
    Ok(ExitCode::SUCCESS)
}

/// Asks whether to take something from this host, which may be how the one that asks came here.
fn confirmed(changes: &Changes) -> anyhow::Result<bool> {
    let pairs = changes.own.join(", ");
    if !io::stdin().is_terminal() {
        anyhow::bail!(
            "cannot set the policy: it takes from this host what was open ({pairs}), and nobody can be asked; add --yes to set it anyway"
        );
    }
    write!(
        io::stderr(),
        "This takes from this host what was open: {pairs}. If you came by it, you may be cut off.\nSet it? [y/N] "
    )?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Whom the policy speaks of, and nobody is: they may come.
fn warnings(store: &Store, policy: &Policy) -> anyhow::Result<BTreeSet<String>> {
    let members = store.members()?;
    let tokens = store.tokens()?;
    let good = tokens.iter().filter(|token| token.is_good(now()));
    let tags = members.iter().map(|info| &info.member.tags);
    let tags: BTreeSet<&Name> = tags
        .chain(good.map(|token| &token.tags))
        .flatten()
        .collect();
    let names: BTreeSet<&Name> = members.iter().map(|info| &info.member.name).collect();
    let ends = policy
        .rules()
        .iter()
        .flat_map(|rule| [&rule.from, &rule.to]);
    let unknown = ends.filter_map(|selector| match selector {
        Selector::Tag(tag) if !tags.contains(tag) => Some(format!(
            "no member has the tag {tag}, and no token gives it"
        )),
        Selector::Member(name) if !names.contains(name) => Some(format!(
            "no member is called {name}; for a tag, write tag:{name}"
        )),
        _ => None,
    });
    Ok(unknown.collect())
}

fn explain(arguments: &Explain) -> anyhow::Result<ExitCode> {
    let store = arguments.folder.store()?;
    let policy = Policy::parse(&store.policy()?)?;
    let members = store.members()?;
    let party = |name: &Name| -> anyhow::Result<Party> {
        let info = members.iter().find(|info| info.member.name == *name);
        info.map(|info| info.member.party())
            .ok_or_else(|| nobody(name))
    };
    let question = Question {
        from: party(&arguments.from)?,
        to: party(&arguments.to)?,
        traffic: arguments.traffic,
    };
    question.answer(&policy, arguments.json)
}

/// An error about a name.
fn nobody(name: &Name) -> anyhow::Error {
    anyhow::anyhow!("no member is called {name}: see `seikan coordinator members`")
}
