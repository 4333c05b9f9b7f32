//! `seikan ping`: measures the round trip to a peer inside the tunnel, and shows the path of each
//! request.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use seikan_config::InterfaceName;
use seikan_node::control::RuntimeDirs;
use seikan_node::control::ask::{self, AskError};
use seikan_node::control::ping::{PATIENCE, Path, Pong, Silence};
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::signal::Signals;
use serde::Serialize;

use crate::output;
use crate::screen::{BOLD, CYAN, DIM, GREEN, RED, RESET, YELLOW, printable};

/// Options of `ping`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan ping db-1                      once a second until Ctrl-C\n  \
    sudo seikan ping 100.80.0.7 -c 3 --json    three requests, printed as JSON\n\n\
    The daemons exchange the requests inside the tunnel, so that firewalls and routes of the hosts do not matter. \
    Like any packet, a request starts a handshake and the search for a direct path. Native protocol only.\n\
    Exit status: 0 if a request was answered, 1 if none was, 2 wrong usage.")]
pub struct Arguments {
    /// Name of the peer (with or without .seikan), its address inside the tunnel, or its public key
    #[arg(value_name = "PEER")]
    peer: String,
    /// Interface [default: the only one that has this peer]
    #[arg(long, value_name = "IFACE")]
    iface: Option<String>,
    /// Number of requests [default: until Ctrl-C]
    #[arg(short, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Interval between requests, in seconds
    #[arg(short, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// Print a line of JSON for each request, each change of the path, and the summary
    #[arg(long)]
    json: bool,
}

/// Parses an interval from 0.01 s to an hour.
fn seconds(text: &str) -> Result<Duration, String> {
    let invalid = || "expected seconds from 0.01 to 3600".to_owned();
    let seconds: f64 = text.parse().map_err(|_| invalid())?;
    let possible = (0.01..=3600.0).contains(&seconds);
    possible
        .then(|| Duration::from_secs_f64(seconds))
        .ok_or_else(invalid)
}

/// Sends requests until there were enough or Ctrl-C is pressed.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let failed = || format!("cannot ping `{}`", printable(&arguments.peer));
    let places = RuntimeDirs::for_client(arguments.iface.as_deref());
    let mut events = Events::new().with_context(failed)?;
    let Some((interface, mut pong)) =
        first_reply(&places, arguments, &mut events).with_context(failed)?
    else {
        return Ok(ExitCode::FAILURE);
    };
    let mut out = output::stdout();
    let mut summary = Summary::default();
    let mut due = Instant::now();
    loop {
        for line in summary.add(&pong) {
            print(&mut out, arguments.json, &line)?;
        }
        if arguments.count.is_some_and(|count| summary.sent >= count) {
            break;
        }
        due = (due + arguments.interval).max(Instant::now());
        if events.interrupted_before(due)? {
            break;
        }
        let request = ask::ping(&places, &interface, &arguments.peer).with_context(failed)?;
        match events.reply(&request).with_context(failed)? {
            Some(next) => pong = next,
            None => break,
        }
    }
    print(&mut out, arguments.json, &Line::Summary(summary.line()))?;
    Ok(if summary.rtts.is_empty() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Returns the interface that has the peer, and the first reply; `None` after Ctrl-C.
fn first_reply(
    places: &RuntimeDirs,
    arguments: &Arguments,
    events: &mut Events,
) -> anyhow::Result<Option<(String, Pong)>> {
    let names = match &arguments.iface {
        Some(name) => vec![name.parse::<InterfaceName>()?.to_string()],
        None => ask::running(places)?,
    };
    let several = names.len() > 1;
    let (mut found, mut refusal) = (None, None);
    for name in names {
        let request = ask::ping(places, &name, &arguments.peer)?;
        match events.reply(&request) {
            Ok(Some(_)) if found.is_some() => {
                bail!("several interfaces have this peer; name one with --iface")
            }
            Ok(Some(pong)) => found = Some((name, pong)),
            Ok(None) => return Ok(None),
            // Another interface may have the peer.
            Err(error @ AskError::Refused { .. }) if several => refusal = Some(error),
            Err(error) => return Err(error.into()),
        }
    }
    match (found, refusal) {
        (Some(found), _) => Ok(Some(found)),
        (None, Some(refusal)) => Err(refusal.into()),
        (None, None) => bail!("no tunnel runs here; start one with `seikan up`"),
    }
}

/// Waits for replies, and for SIGINT and SIGTERM.
struct Events {
    epoll: Epoll,
    signals: Signals,
}

const SIGNAL: u64 = 0;
const REPLY: u64 = 1;

impl Events {
    fn new() -> io::Result<Events> {
        let (epoll, signals) = (Epoll::new(2)?, Signals::block()?);
        epoll.add(&signals, SIGNAL, Interest::Read)?;
        Ok(Events { epoll, signals })
    }

    /// Waits until `due`; returns whether a signal came first.
    fn interrupted_before(&mut self, due: Instant) -> io::Result<bool> {
        let left = due.saturating_duration_since(Instant::now());
        self.interrupted_within(left)
    }

    /// Waits for the reply to a request; returns `None` if a signal came first.
    fn reply(&mut self, request: &ask::PendingPing) -> Result<Option<Pong>, AskError> {
        // If this fails, the reply is still awaited below, without signals.
        let watched = self.epoll.add(request, REPLY, Interest::Read).is_ok();
        let interrupted = watched && self.interrupted_within(2 * PATIENCE).unwrap_or(false);
        let _ = self.epoll.delete(request);
        if interrupted {
            return Ok(None);
        }
        request.pong().map(Some)
    }

    fn interrupted_within(&mut self, time: Duration) -> io::Result<bool> {
        let mut events = self.epoll.wait(Some(time))?;
        let signalled = events.any(|event| event.token == SIGNAL);
        // The signal is taken from the queue: otherwise it ends the process once signals are
        // unblocked.
        Ok(signalled && self.signals.next()?.is_some())
    }
}

/// A line of the output.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Line<'a> {
    /// The outcome of a request.
    Ping {
        /// Number of the request, counted from 1.
        number: u64,
        #[serde(flatten)]
        pong: &'a Pong,
    },
    /// The path has changed.
    PathChanged {
        /// The path of this request.
        to: Path,
        /// The path of the requests before.
        from: Path,
    },
    /// The last line.
    Summary(SummaryLine<'a>),
}

/// Counts of all requests, as printed.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SummaryLine<'a> {
    /// Name of the peer, or its key.
    name: &'a str,
    /// Number of requests.
    sent: u64,
    /// Number of replies.
    answered: usize,
    /// Shortest round trip in microseconds; null without a reply.
    min_us: Option<u64>,
    /// Median round trip in microseconds.
    median_us: Option<u64>,
    /// Longest round trip in microseconds.
    max_us: Option<u64>,
    /// Replies by path.
    paths: &'a [PathReplies],
}

/// Replies by one path.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PathReplies {
    #[serde(flatten)]
    path: Path,
    /// Number of replies.
    answered: u64,
}

/// Counts of all requests.
#[derive(Debug, Default)]
struct Summary {
    name: String,
    sent: u64,
    /// Round trip of each reply, in microseconds.
    rtts: Vec<u64>,
    /// Path of the latest request.
    path: Option<Path>,
    paths: Vec<PathReplies>,
}

impl Summary {
    /// Adds the outcome of a request; returns the lines to print.
    fn add<'a>(&mut self, pong: &'a Pong) -> Vec<Line<'a>> {
        let mut lines = Vec::new();
        self.sent += 1;
        self.name = pong.name.clone().unwrap_or_else(|| pong.public_key.clone());
        if let Some(to) = &pong.path {
            if let Some(from) = self.path.replace(to.clone()).filter(|from| from != to) {
                lines.push(Line::PathChanged {
                    to: to.clone(),
                    from,
                });
            }
            if let Some(us) = pong.rtt_us {
                self.rtts.push(us);
                match self.paths.iter_mut().find(|replies| replies.path == *to) {
                    Some(replies) => replies.answered += 1,
                    None => self.paths.push(PathReplies {
                        path: to.clone(),
                        answered: 1,
                    }),
                }
            }
        }
        lines.push(Line::Ping {
            number: self.sent,
            pong,
        });
        lines
    }

    fn line(&self) -> SummaryLine<'_> {
        let mut sorted = self.rtts.clone();
        sorted.sort_unstable();
        SummaryLine {
            name: &self.name,
            sent: self.sent,
            answered: sorted.len(),
            min_us: sorted.first().copied(),
            median_us: sorted.get(sorted.len().saturating_sub(1) / 2).copied(),
            max_us: sorted.last().copied(),
            paths: &self.paths,
        }
    }
}

fn print(out: &mut impl Write, json: bool, line: &Line<'_>) -> anyhow::Result<()> {
    if json {
        writeln!(out, "{}", serde_json::to_string(line)?)?;
    } else {
        writeln!(out, "{line}")?;
    }
    Ok(out.flush()?)
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Line::Ping { pong, .. } => {
                let name = pong.name.as_ref().unwrap_or(&pong.public_key);
                write!(f, "{}: ", printable(name))?;
                match pong.rtt_us {
                    Some(us) => write!(f, "{BOLD}{}{RESET} {CYAN}ms{RESET}", ms(us))?,
                    None => {
                        let seconds = PATIENCE.as_secs();
                        write!(f, "{RED}no answer{RESET} within {seconds} s")?;
                    }
                }
                if let Some(path) = &pong.path {
                    write!(f, ", {}", ShownPath(path))?;
                }
                match pong.silence {
                    Some(silence) => write!(f, " {DIM}({}){RESET}", explain(silence)),
                    None => Ok(()),
                }
            }
            Line::PathChanged { to, from } => {
                write!(
                    f,
                    "{BOLD}path changed{RESET} to {}, formerly {}",
                    ShownPath(to),
                    ShownPath(from)
                )
            }
            Line::Summary(summary) => summary.fmt(f),
        }
    }
}

impl fmt::Display for SummaryLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, sent, answered) = (printable(self.name), self.sent, self.answered);
        write!(f, "\n{name}: {sent} sent, {answered} answered")?;
        if let [Some(min), Some(median), Some(max)] = [self.min_us, self.median_us, self.max_us] {
            let [min, median, max] = [min, median, max].map(ms);
            write!(
                f,
                "; round trip {min}/{median}/{max} {CYAN}ms{RESET} {DIM}(min/median/max){RESET}"
            )?;
        }
        for PathReplies { path, answered } in self.paths {
            write!(f, "\n  {answered} {}", ShownPath(path))?;
        }
        Ok(())
    }
}

/// A path, as text.
struct ShownPath<'a>(&'a Path);

impl fmt::Display for ShownPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Path {
            address,
            relayed,
            relay,
        } = self.0;
        match (relayed, relay) {
            (false, _) => write!(f, "{GREEN}direct{RESET}: {address}"),
            (true, Some(relay)) => {
                let relay = printable(relay);
                write!(f, "{YELLOW}through relay{RESET} {relay}: {address}")
            }
            (true, None) => write!(f, "{YELLOW}through a relay{RESET}: {address}"),
        }
    }
}

fn explain(silence: Silence) -> &'static str {
    match silence {
        Silence::NoAddress => "the peer has announced no address and has not connected",
        Silence::NoHandshake => {
            "no handshake was answered: the peer is down or unreachable; `seikan status` shows the candidates"
        }
        Silence::NoAnswer => "the peer or the path to it is gone; other candidates are checked",
    }
}

/// Returns milliseconds with at least three significant digits.
fn ms(us: u64) -> String {
    let digits = match us {
        0..10_000 => 3,
        10_000..100_000 => 2,
        _ => 1,
    };
    format!("{:.digits$}", us as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screen::plain;

    fn path(address: &str, relay: Option<&str>) -> Path {
        Path {
            address: address.parse().expect(address),
            relayed: relay.is_some(),
            relay: relay.map(str::to_owned),
        }
    }

    fn pong(rtt_us: Option<u64>, path: Option<Path>, silence: Option<Silence>) -> Pong {
        Pong {
            name: Some("db-1".to_owned()),
            public_key: "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=".to_owned(),
            rtt_us,
            path,
            silence,
        }
    }

    /// Returns replies through a relay, none, and twice directly.
    fn four_replies() -> [Pong; 4] {
        let relay = path("192.0.2.77:51002", Some("relay-a.example.org:3478"));
        let direct = path("198.51.100.9:51820", None);
        [
            pong(Some(17_104), Some(relay.clone()), None),
            pong(None, Some(relay), Some(Silence::NoAnswer)),
            pong(Some(8_400), Some(direct.clone()), None),
            pong(Some(912), Some(direct), None),
        ]
    }

    #[test]
    fn each_request_each_change_and_the_summary_is_a_line() {
        let (mut summary, mut text) = (Summary::default(), String::new());
        for pong in &four_replies() {
            for line in summary.add(pong) {
                text += &format!("{line}\n");
            }
        }
        text += &Line::Summary(summary.line()).to_string();
        assert_eq!(plain(&text) + "\n", include_str!("ping.txt"));
    }

    #[test]
    fn in_json_each_line_has_its_kind() {
        let (mut summary, pongs) = (Summary::default(), four_replies());
        summary.add(&pongs[0]);
        let lines = summary.add(&pongs[2]);
        let json = |line| serde_json::to_value(line).expect("JSON");
        let changed = json(&lines[0]);
        assert_eq!(
            changed["path_changed"]["from"]["relay"],
            "relay-a.example.org:3478"
        );
        assert_eq!(
            changed["path_changed"]["to"]["address"],
            "198.51.100.9:51820"
        );
        let ping = json(&lines[1]);
        assert_eq!(ping["ping"]["number"], 2);
        assert_eq!(ping["ping"]["rtt_us"], 8_400);
        assert_eq!(ping["ping"]["path"]["relayed"], false);
        let line = json(&Line::Summary(summary.line()));
        assert_eq!(line["summary"]["answered"], 2);
        assert_eq!(line["summary"]["max_us"], 17_104);
        assert_eq!(line["summary"]["paths"][1]["answered"], 1);
    }

    #[test]
    fn a_peer_without_address_has_no_path_and_no_round_trip() {
        let mut summary = Summary::default();
        let pong = pong(None, None, Some(Silence::NoAddress));
        assert_eq!(summary.add(&pong).len(), 1);
        assert_eq!(summary.line().median_us, None);
        assert_eq!(
            plain(&summary.line().to_string()),
            "\ndb-1: 1 sent, 0 answered"
        );
    }

    #[test]
    fn the_interval_has_bounds() {
        assert_eq!(seconds("0.2"), Ok(Duration::from_millis(200)));
        for invalid in ["0", "-1", "NaN", "inf", "3601", "x", ""] {
            assert!(seconds(invalid).is_err(), "{invalid}");
        }
    }
}
