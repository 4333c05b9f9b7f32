//! What a coordinator knows, for people and for programs.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use seikan_coordinator::{AuditEntry, MemberInfo, NewToken, RelayInfo, TokenInfo};
use seikan_proto::mesh::{Name, Pin, Token};
use serde_json::{Value, json};

use crate::output::counted;
use crate::screen::{Align, DIM, RESET, Screen, Table, ago, printable};

/// A new token: for people with the line that uses it.
pub fn token(
    host: &str,
    pin: Option<Pin>,
    token: &Token,
    new: &NewToken,
) -> anyhow::Result<ExitCode> {
    let good = match new.uses {
        Some(1) => "for one host".to_owned(),
        Some(uses) => format!("for {}", counted(uses as usize, "host")),
        None => "for any number of hosts".to_owned(),
    };
    let until = if new.expires.is_some() {
        ""
    } else {
        ", for ever"
    };
    let mut out = anstream::stdout();
    writeln!(
        out,
        "{DIM}# A token {good}{until}; it is shown this once. On the host that is to join:{RESET}"
    )?;
    writeln!(
        out,
        "sudo seikan join https://{}{} --token {}",
        printable(host),
        pin.map_or(String::new(), |pin| format!(" --pin {pin}")),
        *token.reveal()
    )?;
    Ok(ExitCode::SUCCESS)
}

/// All tokens.
pub fn tokens(tokens: &[TokenInfo], now: u64, as_json: bool) -> anyhow::Result<ExitCode> {
    if as_json {
        return print(tokens.iter().map(|token| {
            json!({
                "id": token.id.0, "label": token.label, "uses": token.uses, "used": token.used,
                "created": token.created, "expires": token.expires, "withdrawn": token.withdrawn,
                "tags": token.tags, "good": token.is_good(now),
            })
        }));
    }
    let mut table = Table::new(&[
        ("number", Align::Right),
        ("label", Align::Left),
        ("used", Align::Right),
        ("made", Align::Left),
        ("state", Align::Left),
        ("tags", Align::Left),
    ]);
    for token in tokens {
        let uses = token.uses.map_or("any".to_owned(), |uses| uses.to_string());
        let state = match (token.withdrawn, token.expires) {
            (Some(_), _) => "withdrawn".to_owned(),
            (None, Some(end)) if end <= now => "expired".to_owned(),
            _ if !token.is_good(now) => "used up".to_owned(),
            (None, Some(end)) => format!("good for {} min", (end - now).div_ceil(60)),
            (None, None) => "good".to_owned(),
        };
        table.row(vec![
            token.id.0.to_string(),
            printable(token.label.as_deref().unwrap_or("")),
            format!("{} of {uses}", token.used),
            since(token.created, now),
            state,
            names(&token.tags),
        ]);
    }
    show(&table, tokens.len(), "token")
}

/// All members.
pub fn members(members: &[MemberInfo], now: u64, as_json: bool) -> anyhow::Result<ExitCode> {
    if as_json {
        return print(members.iter().map(|info| {
            let member = &info.member;
            json!({
                "name": member.name, "public_key": member.public_key, "addresses": member.addresses,
                "endpoints": member.endpoints, "tags": member.tags, "joined": info.joined,
                "seen": info.seen, "at": info.at,
            })
        }));
    }
    let mut table = Table::new(&[
        ("name", Align::Left),
        ("addresses", Align::Left),
        ("reached at", Align::Left),
        ("seen", Align::Left),
        ("tags", Align::Left),
    ]);
    for info in members {
        let member = &info.member;
        let addresses: Vec<String> = member.addresses.iter().map(ToString::to_string).collect();
        let at = match member.endpoints.split_first() {
            None => String::new(),
            Some((first, [])) => first.to_string(),
            Some((first, others)) => format!("{first} and {} more", others.len()),
        };
        table.row(vec![
            member.name.to_string(),
            addresses.join(" "),
            at,
            match &info.at {
                Some(at) if at.is_empty() => "now".to_owned(),
                Some(at) => format!("now, at {at}"),
                None => since(info.seen, now),
            },
            names(&member.tags),
        ]);
    }
    show(&table, members.len(), "member")
}

/// All relays, without their secrets.
pub fn relays(relays: &[RelayInfo], as_json: bool) -> anyhow::Result<ExitCode> {
    if as_json {
        return print(relays.iter().map(|relay| match relay.tls {
            None => json!({"address": relay.address, "kind": relay.kind}),
            Some(tls) => json!({"address": relay.address, "kind": relay.kind, "tls": tls}),
        }));
    }
    let mut table = Table::new(&[
        ("address", Align::Left),
        ("kind", Align::Left),
        ("TLS", Align::Left),
    ]);
    for relay in relays {
        table.row(vec![
            relay.address.to_string(),
            relay.kind.as_str().to_owned(),
            relay.tls.map_or(String::new(), |tls| match tls.pin {
                Some(_) => format!("port {}, pinned", tls.port),
                None => format!("port {}", tls.port),
            }),
        ]);
    }
    show(&table, relays.len(), "relay")
}

/// The log.
pub fn audit(entries: &[AuditEntry], now: u64, as_json: bool) -> anyhow::Result<ExitCode> {
    if as_json {
        return print(entries.iter().map(|entry| {
            json!({
                "time": entry.time, "what": entry.what, "subject": entry.subject, "actor": entry.actor,
            })
        }));
    }
    let mut table = Table::new(&[
        ("when", Align::Left),
        ("what", Align::Left),
        ("whom", Align::Left),
        ("by", Align::Left),
    ]);
    for entry in entries {
        table.row(vec![
            since(entry.time, now),
            printable(&entry.what),
            printable(&entry.subject),
            printable(&entry.actor),
        ]);
    }
    show(&table, entries.len(), "entry")
}

fn show(table: &Table, count: usize, noun: &str) -> anyhow::Result<ExitCode> {
    let mut screen = Screen(String::new());
    match count {
        0 => screen.0.push_str(&format!("no {noun}\n")),
        _ => table.write(&mut screen),
    }
    write!(anstream::stdout(), "{}", screen.0)?;
    Ok(ExitCode::SUCCESS)
}

fn print(rows: impl Iterator<Item = Value>) -> anyhow::Result<ExitCode> {
    let rows: Vec<Value> = rows.collect();
    let text = serde_json::to_string_pretty(&rows).context("cannot write JSON")?;
    writeln!(anstream::stdout(), "{text}")?;
    Ok(ExitCode::SUCCESS)
}

fn since(time: u64, now: u64) -> String {
    ago(Some(now.saturating_sub(time) as f64))
}

fn names(all: &[Name]) -> String {
    all.iter().map(Name::as_str).collect::<Vec<_>>().join(" ")
}
