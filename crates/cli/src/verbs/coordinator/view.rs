//! Output of the coordinator's verbs, as tables and as JSON.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};

use seikan_coordinator::{AuditEntry, DeviceInfo, MemberInfo, NewToken, RelayInfo, TokenInfo};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Name, Pin, RelayAddress, RelayKind, RelayTls, Token};
use serde::Serialize;

use crate::output::{self, counted};
use crate::screen::Align::{self, Left, Right};
use crate::screen::{DIM, RESET, Screen, Table, ago, joined, printable};

/// A join token; the token itself is not stored.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TokenRow<'a> {
    /// Its number.
    id: i64,
    /// Its label for operators.
    label: Option<&'a str>,
    /// Number of hosts that it admits; null if it is unlimited.
    uses: Option<u32>,
    /// Number of hosts that it has admitted.
    used: u64,
    /// Time of creation, in seconds since 1970.
    created: u64,
    /// Time at which it expires, in seconds since 1970; null if it does not.
    expires: Option<u64>,
    /// Time of withdrawal, in seconds since 1970.
    withdrawn: Option<u64>,
    /// Tags of members that it admits.
    #[cfg_attr(test, schemars(with = "Vec<String>"))]
    tags: &'a [Name],
    /// Whether devices behind members that it admits need no approval.
    devices: bool,
    /// Whether it admits hosts now.
    valid: bool,
}

/// A member of the mesh.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct MemberRow<'a> {
    /// Its name.
    #[cfg_attr(test, schemars(with = "String"))]
    name: &'a Name,
    /// Its public key, in Base64.
    #[cfg_attr(test, schemars(with = "String"))]
    public_key: &'a PublicKey,
    /// Its addresses in the mesh.
    addresses: &'a [IpAddr],
    /// Its endpoints, as it reported them.
    endpoints: &'a [SocketAddr],
    /// Its tags.
    #[cfg_attr(test, schemars(with = "Vec<String>"))]
    tags: &'a [Name],
    /// Time of joining, in seconds since 1970.
    joined: u64,
    /// Time of its latest activity, in seconds since 1970; up to a minute early.
    seen: u64,
    /// Address of the coordinator that it polls now; null if it polls none, or with a single coordinator.
    at: Option<&'a str>,
}

/// A device behind a member.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DeviceRow<'a> {
    /// Name of the device, without that of its member.
    #[cfg_attr(test, schemars(with = "String"))]
    name: &'a Name,
    /// Name of the member.
    #[cfg_attr(test, schemars(with = "String"))]
    gateway: &'a Name,
    /// Whether an operator or a token has approved it.
    approved: bool,
    /// Its addresses in the mesh; empty before the approval.
    addresses: &'a [IpAddr],
    /// Its tags.
    #[cfg_attr(test, schemars(with = "Vec<String>"))]
    tags: &'a [Name],
}

/// A relay; its secret is not printed.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RelayRow<'a> {
    /// Its host and UDP port.
    #[cfg_attr(test, schemars(with = "String"))]
    address: &'a RelayAddress,
    /// Its protocol.
    kind: RelayKind,
    /// Its access by TLS; absent if it has none, and for TURN servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<RelayTls>,
}

/// A change of the mesh.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct AuditRow<'a> {
    /// Time, in seconds since 1970.
    time: u64,
    /// Kind of the change, such as `joined` or `token created`.
    change: &'a str,
    /// Object of the change, such as the name of a member.
    subject: &'a str,
    /// Author of the change: `operator NAME`, or the address of a host.
    actor: &'a str,
}

/// Prints a new token, with the command that uses it.
pub fn token(host: &str, pin: Option<Pin>, token: &Token, new: &NewToken) -> anyhow::Result<()> {
    let hosts = match new.uses {
        Some(1) => "one host".to_owned(),
        Some(uses) => counted(uses as usize, "host"),
        None => "any number of hosts".to_owned(),
    };
    let lifetime = if new.expires.is_some() {
        ""
    } else {
        " without expiry"
    };
    let pin = pin.map_or(String::new(), |pin| format!(" --pin {pin}"));
    let mut out = anstream::stdout();
    writeln!(
        out,
        "{DIM}# Token for {hosts}{lifetime}, shown only once. Run on the host that joins:{RESET}"
    )?;
    writeln!(
        out,
        "sudo seikan join https://{}{pin} --token {}",
        printable(host),
        *token.reveal()
    )?;
    Ok(())
}

/// Prints all tokens.
pub fn tokens(tokens: &[TokenInfo], now: u64, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        return print_rows(tokens.iter().map(|token| TokenRow {
            id: token.id.0,
            label: token.label.as_deref(),
            uses: token.uses,
            used: token.used,
            created: token.created,
            expires: token.expires,
            withdrawn: token.withdrawn,
            tags: &token.tags,
            devices: token.devices,
            valid: token.is_good(now),
        }));
    }
    let rows = tokens.iter().map(|token| {
        let uses = token.uses.map_or("any".to_owned(), |uses| uses.to_string());
        let state = match (token.withdrawn, token.expires) {
            (Some(_), _) => "withdrawn".to_owned(),
            (None, Some(end)) if end <= now => "expired".to_owned(),
            _ if !token.is_good(now) => "used up".to_owned(),
            (None, Some(end)) => format!("valid for {} min", (end - now).div_ceil(60)),
            (None, None) => "valid".to_owned(),
        };
        vec![
            token.id.0.to_string(),
            printable(token.label.as_deref().unwrap_or("")),
            format!("{} of {uses}", token.used),
            since(token.created, now),
            state,
            joined(&token.tags, " "),
        ]
    });
    print_table(
        &[
            ("number", Right),
            ("label", Left),
            ("used", Right),
            ("created", Left),
            ("state", Left),
            ("tags", Left),
        ],
        rows,
        "token",
    )
}

/// Prints all members.
pub fn members(members: &[MemberInfo], now: u64, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        return print_rows(members.iter().map(|info| MemberRow {
            name: &info.member.name,
            public_key: &info.member.public_key,
            addresses: &info.member.addresses,
            endpoints: &info.member.endpoints,
            tags: &info.member.tags,
            joined: info.joined,
            seen: info.seen,
            at: info.coordinator.as_deref(),
        }));
    }
    let rows = members.iter().map(|info| {
        let member = &info.member;
        let at = match member.endpoints.split_first() {
            None => String::new(),
            Some((first, [])) => first.to_string(),
            Some((first, others)) => format!("{first} and {} more", others.len()),
        };
        vec![
            member.name.to_string(),
            joined(&member.addresses, " "),
            at,
            match &info.coordinator {
                Some(at) if at.is_empty() => "now".to_owned(),
                Some(at) => format!("now, at {at}"),
                None => since(info.seen, now),
            },
            joined(&member.tags, " "),
        ]
    });
    print_table(
        &[
            ("name", Left),
            ("addresses", Left),
            ("endpoints", Left),
            ("last seen", Left),
            ("tags", Left),
        ],
        rows,
        "member",
    )
}

/// Prints the devices behind all members.
pub fn devices(members: &[MemberInfo], as_json: bool) -> anyhow::Result<()> {
    let all = members.iter().flat_map(|info| {
        let gateway = &info.member.name;
        info.devices.iter().map(move |device| (gateway, device))
    });
    if as_json {
        return print_rows(all.map(|(gateway, device)| {
            let (approved, addresses, tags) = match device {
                DeviceInfo::Approved(device) => (true, &device.addresses[..], &device.tags[..]),
                DeviceInfo::Pending(_) => (false, &[][..], &[][..]),
            };
            DeviceRow {
                name: device.name(),
                gateway,
                approved,
                addresses,
                tags,
            }
        }));
    }
    let rows = all.map(|(gateway, device)| {
        let (addresses, state, tags) = match device {
            DeviceInfo::Approved(device) => (
                joined(&device.addresses, " "),
                "approved",
                joined(&device.tags, " "),
            ),
            DeviceInfo::Pending(_) => (String::new(), "pending", String::new()),
        };
        let name = format!("{}.{gateway}", device.name());
        vec![name, addresses, state.to_owned(), tags]
    });
    let columns = [
        ("name", Left),
        ("addresses", Left),
        ("state", Left),
        ("tags", Left),
    ];
    print_table(&columns, rows, "device")
}

/// Prints all relays, without their secrets.
pub fn relays(relays: &[RelayInfo], as_json: bool) -> anyhow::Result<()> {
    if as_json {
        return print_rows(relays.iter().map(|relay| RelayRow {
            address: &relay.address,
            kind: relay.kind,
            tls: relay.tls,
        }));
    }
    let rows = relays.iter().map(|relay| {
        vec![
            relay.address.to_string(),
            relay.kind.as_str().to_owned(),
            relay.tls.map_or(String::new(), |tls| match tls.pin {
                Some(_) => format!("port {}, pinned", tls.port),
                None => format!("port {}", tls.port),
            }),
        ]
    });
    let columns = [("address", Left), ("kind", Left), ("TLS", Left)];
    print_table(&columns, rows, "relay")
}

/// Prints the log of changes.
pub fn audit(entries: &[AuditEntry], now: u64, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        return print_rows(entries.iter().map(|entry| AuditRow {
            time: entry.time,
            change: &entry.change,
            subject: &entry.subject,
            actor: &entry.actor,
        }));
    }
    let rows = entries.iter().map(|entry| {
        vec![
            since(entry.time, now),
            printable(&entry.change),
            printable(&entry.subject),
            printable(&entry.actor),
        ]
    });
    print_table(
        &[
            ("when", Left),
            ("change", Left),
            ("subject", Left),
            ("by", Left),
        ],
        rows,
        "entry",
    )
}

fn print_table(
    columns: &[(&str, Align)],
    rows: impl Iterator<Item = Vec<String>>,
    noun: &str,
) -> anyhow::Result<()> {
    let mut rows = rows.peekable();
    let mut screen = Screen(String::new());
    if rows.peek().is_none() {
        screen.0.push_str(&format!("no {noun}\n"));
    } else {
        let mut table = Table::new(columns);
        rows.for_each(|row| table.row(row));
        table.write(&mut screen);
    }
    write!(anstream::stdout(), "{}", screen.0)?;
    Ok(())
}

fn print_rows(rows: impl Iterator<Item = impl Serialize>) -> anyhow::Result<()> {
    output::print_json(&rows.collect::<Vec<_>>())
}

fn since(time: u64, now: u64) -> String {
    ago(Some(now.saturating_sub(time) as f64))
}
