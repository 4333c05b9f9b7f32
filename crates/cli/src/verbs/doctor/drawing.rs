//! Draws the path as a column: applications, the tunnel's interface, program and sockets, the outer
//! interface, the network; with a mark where the cause is.

use std::collections::BTreeMap;
use std::fmt::Write;

use seikan_diagnose::{Action, PathStep, Verdict};
use seikan_observe::path::{LinkFacts, PathMap, ProgramFacts, SocketFacts, Transport};

use super::text::{Page, wrap};
use crate::output::counted;
use crate::screen::{BOLD, DIM, RED, RESET, joined, number, printable, width};

/// Widest label: a command's name with its number.
const LABEL: usize = 24;
/// Sockets, thread names or addresses shown before "and 3 more".
const MAX_LISTED: usize = 4;
/// Offloads that matter to a tunnel and that virtual interfaces have too: the common name, and the
/// names of the kernel.
const OFFLOADS: [(&str, &[&str]); 5] = [
    ("GRO", &["rx-gro"]),
    ("GSO", &["tx-generic-segmentation"]),
    ("TSO", &["tx-tcp-segmentation"]),
    ("UDP GSO", &["tx-udp-segmentation"]),
    ("checksums", &["tx-checksum-ip-generic", "tx-checksum-ipv4"]),
];

/// A step of the path, where a cause can be.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Spot {
    Applications,
    Link(String),
    Program,
    Sockets,
    Network,
    Host,
}

/// One step of the path.
struct Step {
    spot: Spot,
    label: String,
    lines: Vec<String>,
}

/// Draws the path, with a mark where the cause of the verdict is.
pub fn draw(map: &PathMap, verdict: Option<&Verdict>, page: &Page) -> String {
    column(steps(map, page), map, verdict, page)
}

/// Draws the path on the far host, from the network inwards: the continuation of [`draw`].
pub fn draw_far(map: &PathMap, verdict: Option<&Verdict>, page: &Page) -> String {
    let mut steps = steps(map, page);
    steps.retain(|step| step.spot != Spot::Network);
    let host = steps.pop();
    steps.reverse();
    steps.extend(host.map(|host| Step {
        label: "the far host".into(),
        ..host
    }));
    column(steps, map, verdict, page)
}

fn column(steps: Vec<Step>, map: &PathMap, verdict: Option<&Verdict>, page: &Page) -> String {
    let spot = verdict.and_then(|verdict| spot(verdict, map));
    let last = steps.len().saturating_sub(2);
    let labels = steps.iter().map(|step| width(&step.label));
    let label = labels.max().unwrap_or(0).min(LABEL);
    let mark = page.either("◀ here", "<== here");
    let mut out = String::new();
    for (position, step) in steps.iter().enumerate() {
        let marked = spot.as_ref() == Some(&step.spot);
        let space = page.width - label - 6 - if marked { width(mark) + 2 } else { 0 };
        let lines = step.lines.iter().flat_map(|line| wrap(line, space));
        for (row, text) in lines.enumerate() {
            let rail = match (&step.spot, position, row) {
                // Packets do not pass the host itself.
                (Spot::Host, ..) => " ",
                (_, 0, 0) => page.either("┬", "+"),
                (_, position, 0) if position == last => page.either("┴", "+"),
                (_, position, _) if position == last => " ",
                (_, _, 0) => page.either("├", "+"),
                _ => page.either("│", "|"),
            };
            let name = if row == 0 { &*step.label } else { "" };
            let pad = " ".repeat(label.saturating_sub(width(name)));
            let marker = if marked && row == 0 {
                format!("  {RED}{mark}{RESET}")
            } else {
                String::new()
            };
            let _ = writeln!(
                out,
                "  {DIM}{rail}{RESET} {BOLD}{name}{RESET}{pad}  {text}{marker}"
            );
        }
    }
    out
}

fn steps(map: &PathMap, page: &Page) -> Vec<Step> {
    let step = |spot, label: &str, lines| Step {
        spot,
        label: printable(label),
        lines,
    };
    let link = |link: &LinkFacts| step(Spot::Link(link.name.clone()), &link.name, self::link(link));
    let is_inner = |link: &&LinkFacts| Some(&link.name) == map.inner.as_ref();
    let mut all = vec![step(
        Spot::Applications,
        "applications",
        vec![applications(&map.flows)],
    )];
    all.extend(map.links.iter().filter(is_inner).map(link));
    if let Some(program) = &map.program {
        let label = format!("{} ({})", program.name, program.pid);
        all.push(step(
            Spot::Program,
            &label,
            self::program(program, map, page),
        ));
    }
    if !map.sockets.is_empty() {
        all.push(step(Spot::Sockets, "sockets", sockets(&map.sockets, page)));
    }
    all.extend(map.links.iter().filter(|link| !is_inner(link)).map(link));
    all.push(step(Spot::Network, "the network", vec![network(map)]));
    all.push(step(Spot::Host, "this host", vec![host(map)]));
    all
}

fn applications(flows: &[SocketFacts]) -> String {
    if flows.is_empty() {
        return "no TCP connection of this host".into();
    }
    let far = flows
        .iter()
        .filter_map(|flow| Some(flow.remote?.ip().to_canonical().to_string()));
    let congestion = flows.iter().filter_map(|flow| flow.congestion.clone());
    let mut text = format!(
        "{} with {}",
        counted(flows.len(), "TCP connection"),
        distinct(far)
    );
    let congestion = distinct(congestion);
    if !congestion.is_empty() {
        let _ = write!(text, ", {congestion}");
    }
    text
}

fn link(link: &LinkFacts) -> Vec<String> {
    let mut parts = Vec::new();
    if !link.kind.is_empty() {
        parts.push(printable(&link.kind));
    }
    parts.push(format!("MTU {}", link.mtu));
    parts.push(format!(
        "queue of {} packets",
        number(link.queue_length.into())
    ));
    let rate = link
        .qdisc_rate
        .map(|bits| format!(" at {} Mbit/s", number(bits / 1_000_000)));
    if !link.qdisc.is_empty() {
        parts.push(format!(
            "{}{}",
            printable(&link.qdisc),
            rate.unwrap_or_default()
        ));
    }
    if let Some(master) = &link.master {
        parts.push(format!("port of {}", printable(master)));
    }
    match link.vnet_hdr {
        Some(true) => parts.push("carries super-packets".into()),
        Some(false) => parts.push("single packets only".into()),
        None => {}
    }
    let mut lines = vec![parts.join(", ")];
    let off = OFFLOADS.iter().filter(|(_, names)| {
        let mut states = names
            .iter()
            .filter_map(|name| link.features.get(*name))
            .peekable();
        states.peek().is_some() && states.all(|on| !on)
    });
    let off: Vec<_> = off.map(|(name, _)| *name).collect();
    if !off.is_empty() {
        lines.push(format!("off: {}", off.join(", ")));
    }
    if link.rps.iter().any(|cpus| !cpus.is_empty()) {
        let spread = link.rps.iter().map(|cpus| ranges(cpus));
        lines.push(format!("receives on processors {}", joined(spread, "; ")));
    }
    lines
}

fn program(program: &ProgramFacts, map: &PathMap, page: &Page) -> Vec<String> {
    let names = program.threads.iter().map(|(_, name)| name.clone());
    let mut lines = vec![match program.threads.len() {
        0 => "threads not readable".into(),
        count => format!("{}: {}", counted(count, "thread"), counts(names, page)),
    }];
    let mut parts = Vec::new();
    if !program.cpus.is_empty() && program.cpus != map.host.cpus {
        let (own, all) = (ranges(&program.cpus), ranges(&map.host.cpus));
        parts.push(format!("on processors {own} of {all}"));
    }
    if let Some(limit) = program.cpu_limit {
        parts.push(format!(
            "limited to {limit} processors by its control group"
        ));
    }
    if program.nice != 0 {
        parts.push(format!("nice {}", program.nice));
    }
    if !parts.is_empty() {
        lines.push(parts.join(", "));
    }
    lines
}

fn sockets(sockets: &[SocketFacts], page: &Page) -> Vec<String> {
    let of = |socket: &SocketFacts| {
        let transport = match socket.transport {
            Transport::Udp => "UDP",
            Transport::Tcp => "TCP",
            Transport::Raw => "raw",
        };
        let to = socket.remote.map(|remote| {
            let arrow = page.either("→", "->");
            format!(" {arrow} {remote}")
        });
        let kib = |bytes: u32| number((bytes / 1024).into());
        let congestion = socket
            .congestion
            .as_ref()
            .map(|name| format!(", {}", printable(name)));
        format!(
            "{transport} {}{}, buffers {}/{} KiB{}",
            socket.local,
            to.unwrap_or_default(),
            kib(socket.receive_buffer),
            kib(socket.send_buffer),
            congestion.unwrap_or_default()
        )
    };
    let mut lines: Vec<_> = sockets.iter().take(MAX_LISTED).map(of).collect();
    if sockets.len() > MAX_LISTED {
        lines.push(format!("and {} more", sockets.len() - MAX_LISTED));
    }
    lines
}

fn network(map: &PathMap) -> String {
    let far = map.sockets.iter().filter_map(|socket| socket.remote);
    let far = distinct(far.map(|remote| remote.ip().to_canonical().to_string()));
    if far.is_empty() {
        "far end unknown".into()
    } else {
        format!("to {far}")
    }
}

fn host(map: &PathMap) -> String {
    let mut parts = Vec::new();
    if !map.host.cpus.is_empty() {
        parts.push(counted(map.host.cpus.len(), "processor"));
    }
    if !map.host.kernel.is_empty() {
        parts.push(format!("Linux {}", printable(&map.host.kernel)));
    }
    if map.host.conntrack {
        parts.push("connection tracking".into());
    }
    parts.join(", ")
}

/// Lists the first few distinct words, and the number of the others.
fn distinct(words: impl Iterator<Item = String>) -> String {
    let mut all: Vec<_> = words.map(|word| printable(&word)).collect();
    all.sort();
    all.dedup();
    let more = all.len().saturating_sub(MAX_LISTED);
    all.truncate(MAX_LISTED);
    match more {
        0 => all.join(", "),
        _ => format!("{} and {more} more", all.join(", ")),
    }
}

/// Lists each word once, with its count.
fn counts(words: impl Iterator<Item = String>, page: &Page) -> String {
    let mut all: BTreeMap<String, usize> = BTreeMap::new();
    for word in words {
        *all.entry(printable(&word)).or_default() += 1;
    }
    let times = page.either("×", "x");
    distinct(all.into_iter().map(|(word, count)| match count {
        1 => word,
        _ => format!("{word} {times}{count}"),
    }))
}

/// Numbers as `taskset -c` takes them: `0-3,7`.
fn ranges(numbers: &[u32]) -> String {
    if numbers.is_empty() {
        return "none".into();
    }
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*number) => *last = *number,
            _ => runs.push((*number, *number)),
        }
    }
    let runs = runs.iter().map(|(first, last)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    });
    joined(runs, ",")
}

/// Returns the step of the path where the cause is. If the first remedy changes an interface, this
/// is the interface.
fn spot(verdict: &Verdict, map: &PathMap) -> Option<Spot> {
    let changed = verdict.remedies.iter().flat_map(|remedy| &remedy.actions);
    let changed = changed.filter_map(|action| match action {
        Action::QueueLength { link, .. }
        | Action::Mtu { link, .. }
        | Action::Offload { link, .. }
        | Action::Rps { link, .. }
        | Action::RemoveQdisc { link }
        | Action::ClampMss { link, .. } => Some(link),
        _ => None,
    });
    let changed = changed.filter(|name| map.link(name).is_some());
    let inner = map.inner.clone().map(Spot::Link);
    let egress = map.egress.clone().map(Spot::Link);
    let changed = changed.map(|name| Spot::Link(name.clone())).next();
    match verdict.cause.spec().step? {
        PathStep::InnerLink => inner,
        PathStep::OuterLink => changed.or(egress),
        PathStep::Program if map.program.is_some() => Some(Spot::Program),
        PathStep::Program | PathStep::Host => Some(Spot::Host),
        PathStep::Sockets => Some(Spot::Sockets),
        PathStep::Applications => Some(Spot::Applications),
        PathStep::Network => Some(Spot::Network),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 3, 7]), "0-3,7");
        assert_eq!(ranges(&[]), "none");
    }

    #[test]
    fn the_same_is_listed_once() {
        let page = Page {
            width: 80,
            unicode: false,
        };
        let names = ["worker", "main", "worker"].map(str::to_owned);
        assert_eq!(counts(names.into_iter(), &page), "main, worker x2");
        let names = ["a", "b", "c", "d", "e", "f"].map(str::to_owned);
        assert_eq!(distinct(names.into_iter()), "a, b, c, d and 2 more");
    }
}
