//! Options of `seikan coordinator` and its verbs.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};
use seikan_proto::mesh::{DeviceName, Name, PartyName, Pin, RelayAddress};
use zeroize::Zeroizing;

use super::{DIRECTORY, policy, serve, snapshot};

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
    pub verb: Option<CoordinatorVerb>,
    #[command(flatten)]
    pub serve: serve::ServeArguments,
}

/// The directory of a coordinator.
#[derive(Clone, Debug, Args)]
pub struct Directory {
    /// Directory of the coordinator
    #[arg(long, value_name = "DIR", default_value = DIRECTORY, value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
}

/// Verbs of an administrator.
#[derive(Debug, Subcommand)]
pub enum CoordinatorVerb {
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
    /// Remove a member from the mesh, or withdraw the approval of a device
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
    /// Import a mesh from an exported file into etcd or a file
    Import(Box<snapshot::ImportArguments>),
    /// Write the whole mesh to a file
    Export(snapshot::ExportArguments),
}

/// Options of `coordinator token`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator token                        for one host, within a day\n  \
    sudo seikan coordinator token --reusable --tag web   for any number of hosts, with the tag `web`")]
pub struct TokenArguments {
    /// Number of hosts that may join with it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub uses: u32,
    /// Admit any number of hosts
    #[arg(long, conflicts_with = "uses")]
    pub reusable: bool,
    /// Lifetime: 90m, 24h, 7d, or `never`
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = expiry)]
    pub expires: Expiry,
    /// Tag of the hosts that join with it (repeatable)
    #[arg(long = "tag", value_name = "TAG")]
    pub tags: Vec<Name>,
    /// Approve the devices behind hosts that join with it, with the tags of their gateway
    #[arg(long)]
    pub devices: bool,
    /// Label in the list of tokens
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
    /// Host name or address of this coordinator in the printed command [default: this host's name]
    #[arg(long, value_name = "HOST[:PORT]")]
    pub host: Option<String>,
    #[command(flatten)]
    pub directory: Directory,
}

/// Options of a list.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator members --json\n  \
    sudo seikan coordinator devices --json\n  \
    sudo seikan coordinator tokens --json\n  \
    sudo seikan coordinator relays --json")]
pub struct List {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub directory: Directory,
}

/// Options of `coordinator withdraw`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan coordinator withdraw 3    withdraw number 3 of `seikan coordinator tokens`")]
pub struct Withdraw {
    /// Number of the token
    #[arg(value_name = "NUMBER")]
    pub id: i64,
    #[command(flatten)]
    pub directory: Directory,
}

/// Options of `coordinator approve-device`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator approve-device plc.site-a               with the tags of its gateway\n  \
    sudo seikan coordinator approve-device plc.site-a --tag plcs    with the tag `plcs`\n  \
    sudo seikan coordinator approve-device plc.site-b --from plc.site-a\n      \
    the device that was at `site-a`: it keeps its addresses and tags")]
pub struct ApproveDevice {
    /// Name of the device and of its gateway, as `seikan coordinator devices` lists it
    #[arg(value_name = "DEVICE.GATEWAY")]
    pub name: DeviceName,
    /// Tag of the device (repeatable) [default: the tags of its gateway]
    #[arg(long = "tag", value_name = "TAG")]
    pub tags: Vec<Name>,
    /// Former name of the device, whose addresses and tags it keeps
    #[arg(long, value_name = "DEVICE.GATEWAY")]
    pub from: Option<DeviceName>,
    #[command(flatten)]
    pub directory: Directory,
}

/// Options of `coordinator revoke`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator revoke laptop        its peers close their sessions within seconds\n  \
    sudo seikan coordinator revoke plc.site-a    the device loses its address")]
pub struct Revoke {
    /// Name of the member or device
    pub name: PartyName,
    #[command(flatten)]
    pub directory: Directory,
}

/// Options of `coordinator relay`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan coordinator relay add relay.example.org:3478 --secret skr_...\n\n\
    `seikan relay secret`, on the host of the relay, prints this command.")]
pub struct RelayArguments {
    #[command(subcommand)]
    pub verb: RelayVerb,
}

#[derive(Debug, Subcommand)]
pub enum RelayVerb {
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
pub struct AddRelay {
    /// Address of the relay, over UDP; with --turn also over TCP, with --turns over TLS
    #[arg(value_name = "HOST:PORT")]
    pub address: RelayAddress,
    /// Secret that the relay shares with the coordinator
    #[arg(
        long,
        value_name = "SECRET",
        env = "SEIKAN_RELAY_SECRET",
        hide_env_values = true
    )]
    pub secret: Zeroizing<String>,
    /// Use a TURN server that accepts coturn's time-limited credentials (static-auth-secret), over
    /// UDP and TCP
    #[arg(long)]
    pub turn: bool,
    /// Use a TURN server as with --turn, but over TLS; the members' systems have to trust its
    /// certificate
    #[arg(long, conflicts_with = "turn")]
    pub turns: bool,
    /// TCP port at which the relay also listens for TLS
    #[arg(long, value_name = "PORT", conflicts_with_all = ["turn", "turns"])]
    pub tls: Option<NonZeroU16>,
    /// Pin of the relay's certificate, unless the members' systems trust it
    #[arg(long, value_name = "PIN", requires = "tls")]
    pub pin: Option<Pin>,
    #[command(flatten)]
    pub directory: Directory,
}

/// Options of `coordinator relay remove`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan coordinator relay remove relay.example.org:3478    members leave it within seconds")]
pub struct RemoveRelay {
    /// Address of the relay, as `seikan coordinator relays` lists it
    #[arg(value_name = "HOST:PORT")]
    pub address: RelayAddress,
    #[command(flatten)]
    pub directory: Directory,
}

/// Options of `coordinator audit`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan coordinator audit --last 20    the newest 20 entries, newest first")]
pub struct Audit {
    /// Maximum number of entries
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub last: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub directory: Directory,
}

/// Lifetime of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    Never,
    After(Duration),
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
