//! `seikan ping`: whether a peer answers through the tunnel, how fast, and by which way, which may change meanwhile.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use seikan_config::InterfaceName;
use seikan_node::control::Places;
use seikan_node::control::ask::{self, AskError};
use seikan_node::control::ping::{PATIENCE, Path, Pong, Silence};
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::signal::Signals;
use serde::Serialize;

use crate::screen::{BOLD, CYAN, DIM, GREEN, RED, RESET, YELLOW, printable};

/// What `ping` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan ping db-1               until Ctrl-C, once a second\n  \
    sudo seikan ping 100.80.0.7 -c 3 --json\n\n\
    The daemon asks the peer's daemon inside of the tunnel: no host's firewall or routing is in the way, nor anything behind the \
    peer. Like any packet it has a handshake begun and a better way looked for. Native protocol only.\n\
    Exit status: 0 there was an answer, 1 there was none, 2 wrong usage.")]
pub struct Arguments {
    /// Its name, with or without .seikan, an address inside of the tunnel, or its public key
    #[arg(value_name = "PEER")]
    peer: String,
    /// Interface; may be left out where one alone has such a peer
    #[arg(long, value_name = "IFACE")]
    iface: Option<String>,
    /// Stop after so many questions
    #[arg(short, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Seconds from one question to the next
    #[arg(short, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// Print a line of JSON for each question, each change of the way, and the sum
    #[arg(long)]
    json: bool,
}

/// From ten milliseconds to an hour.
fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a number of seconds from 0.01 to 3600");
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    let possible = (0.01..=3600.0).contains(&seconds);
    possible
        .then(|| Duration::from_secs_f64(seconds))
        .ok_or_else(wrong)
}

/// Asks until there were enough questions or Ctrl-C was pressed.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let failed = || format!("cannot ask `{}`", printable(&arguments.peer));
    let places = Places::default();
    let mut waiting = Waiting::new().with_context(failed)?;
    let Some((interface, mut pong)) =
        first(&places, arguments, &mut waiting).with_context(failed)?
    else {
        return Ok(ExitCode::FAILURE);
    };
    let mut out = anstream::AutoStream::auto(io::stdout()).lock();
    let mut tally = Tally::default();
    let mut due = Instant::now();
    loop {
        for line in tally.take(&pong) {
            say(&mut out, arguments.json, &line)?;
        }
        if arguments.count.is_some_and(|count| tally.sent >= count) {
            break;
        }
        due = (due + arguments.interval).max(Instant::now());
        if waiting.until(due)? {
            break;
        }
        let asked = ask::ping(&places, &interface, &arguments.peer).with_context(failed)?;
        match waiting.reply(&asked).with_context(failed)? {
            Some(next) => pong = next,
            None => break,
        }
    }
    say(&mut out, arguments.json, &Line::Sum(&tally))?;
    Ok(match tally.answered() {
        0 => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    })
}

/// The first answer, and the interface that has such a peer; nothing after Ctrl-C.
fn first(
    places: &Places,
    arguments: &Arguments,
    waiting: &mut Waiting,
) -> anyhow::Result<Option<(String, Pong)>> {
    let names = match &arguments.iface {
        Some(name) => vec![name.parse::<InterfaceName>()?.to_string()],
        None => ask::running(places)?,
    };
    let several = names.len() > 1;
    let (mut found, mut refusal) = (None, None);
    for name in names {
        let asked = ask::ping(places, &name, &arguments.peer)?;
        match waiting.reply(&asked) {
            Ok(Some(_)) if found.is_some() => {
                bail!("more than one interface has such a peer: say which (--iface)")
            }
            Ok(Some(pong)) => found = Some((name, pong)),
            Ok(None) => return Ok(None),
            // Another one may have it.
            Err(error @ AskError::Refused { .. }) if several => refusal = Some(error),
            Err(error) => return Err(error.into()),
        }
    }
    match (found, refusal) {
        (Some(found), _) => Ok(Some(found)),
        (None, Some(refusal)) => Err(refusal.into()),
        (None, None) => bail!("no tunnel runs here: `seikan up` starts one"),
    }
}

/// Waits for answers and for the next question, and for whoever wants it to stop.
struct Waiting {
    epoll: Epoll,
    signals: Signals,
}

const SIGNAL: u64 = 0;
const REPLY: u64 = 1;

impl Waiting {
    fn new() -> io::Result<Waiting> {
        let (epoll, signals) = (Epoll::new(2)?, Signals::block()?);
        epoll.add(&signals, SIGNAL, Interest::Read)?;
        Ok(Waiting { epoll, signals })
    }

    /// True if it is to stop instead.
    fn until(&mut self, due: Instant) -> io::Result<bool> {
        let left = due.saturating_duration_since(Instant::now());
        self.stopped_within(left)
    }

    /// What became of a question; nothing if it is to stop.
    fn reply(&mut self, asked: &ask::Asked) -> Result<Option<Pong>, AskError> {
        // Without this the answer is waited for all the same.
        let watched = self.epoll.add(asked, REPLY, Interest::Read).is_ok();
        let stopped = watched && self.stopped_within(2 * PATIENCE).unwrap_or(false);
        let _ = self.epoll.delete(asked);
        match stopped {
            true => Ok(None),
            false => asked.pong().map(Some),
        }
    }

    fn stopped_within(&mut self, time: Duration) -> io::Result<bool> {
        let mut events = self.epoll.wait(Some(time))?;
        let stopped = events.any(|event| event.token == SIGNAL);
        // Taken, or it would end the process as soon as it is not blocked any more.
        Ok(stopped && self.signals.next()?.is_some())
    }
}

/// What is told.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Line<'a> {
    /// What became of a question.
    Ping {
        number: u64,
        #[serde(flatten)]
        pong: &'a Pong,
    },
    /// From here on questions go by another way.
    Moved { to: Path, from: Path },
    /// The end.
    Sum(&'a Tally),
}

/// What was seen.
#[derive(Debug, Default)]
struct Tally {
    name: String,
    sent: u64,
    /// Microseconds of each answer.
    rtts: Vec<u64>,
    /// The latest way, and how many answers came by each.
    path: Option<Path>,
    paths: Vec<(Path, u64)>,
}

impl Tally {
    /// Takes in what became of a question: what is to be told.
    fn take<'a>(&mut self, pong: &'a Pong) -> Vec<Line<'a>> {
        let mut lines = Vec::new();
        self.sent += 1;
        self.name = pong.name.clone().unwrap_or_else(|| pong.public_key.clone());
        if let Some(to) = &pong.path {
            if let Some(from) = self.path.replace(to.clone()).filter(|from| from != to) {
                lines.push(Line::Moved {
                    to: to.clone(),
                    from,
                });
            }
            if let Some(us) = pong.rtt_us {
                self.rtts.push(us);
                match self.paths.iter_mut().find(|(path, _)| path == to) {
                    Some((_, count)) => *count += 1,
                    None => self.paths.push((to.clone(), 1)),
                }
            }
        }
        lines.push(Line::Ping {
            number: self.sent,
            pong,
        });
        lines
    }

    fn answered(&self) -> usize {
        self.rtts.len()
    }

    /// Least, median and largest of the answers' times, in microseconds.
    fn spread(&self) -> Option<[u64; 3]> {
        let mut sorted = self.rtts.clone();
        sorted.sort_unstable();
        Some([
            *sorted.first()?,
            *sorted.get((sorted.len() - 1) / 2)?,
            *sorted.last()?,
        ])
    }
}

impl Serialize for Tally {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Sum<'a> {
            name: &'a str,
            sent: u64,
            answered: usize,
            min_us: Option<u64>,
            median_us: Option<u64>,
            max_us: Option<u64>,
            paths: Vec<Used<'a>>,
        }
        #[derive(Serialize)]
        struct Used<'a> {
            #[serde(flatten)]
            path: &'a Path,
            answered: u64,
        }
        let spread = self.spread();
        let paths = self.paths.iter();
        Sum {
            name: &self.name,
            sent: self.sent,
            answered: self.answered(),
            min_us: spread.map(|[min, _, _]| min),
            median_us: spread.map(|[_, median, _]| median),
            max_us: spread.map(|[_, _, max]| max),
            paths: paths
                .map(|(path, answered)| Used {
                    path,
                    answered: *answered,
                })
                .collect(),
        }
        .serialize(serializer)
    }
}

fn say(out: &mut impl Write, json: bool, line: &Line<'_>) -> anyhow::Result<()> {
    match json {
        true => writeln!(out, "{}", serde_json::to_string(line)?)?,
        false => writeln!(out, "{line}")?,
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
                    write!(f, ", {}", Shown(path))?;
                }
                match pong.silence {
                    Some(silence) => write!(f, " {DIM}({}){RESET}", explained(silence)),
                    None => Ok(()),
                }
            }
            Line::Moved { to, from } => {
                write!(f, "{BOLD}now{RESET} {}, was {}", Shown(to), Shown(from))
            }
            Line::Sum(tally) => tally.fmt(f),
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, sent, answered) = (printable(&self.name), self.sent, self.answered());
        write!(f, "\n{name}: {sent} sent, {answered} answered")?;
        if let Some([min, median, max]) = self.spread() {
            let (min, median, max) = (ms(min), ms(median), ms(max));
            write!(
                f,
                "; round trip {min}/{median}/{max} {CYAN}ms{RESET} {DIM}(least, median, largest){RESET}"
            )?;
        }
        for (path, count) in &self.paths {
            write!(f, "\n  {count} {}", Shown(path))?;
        }
        Ok(())
    }
}

/// A way, for people.
struct Shown<'a>(&'a Path);

impl fmt::Display for Shown<'_> {
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
                write!(f, "{YELLOW}by relay{RESET} {relay}: {address}")
            }
            (true, None) => write!(f, "{YELLOW}by a relay{RESET}: {address}"),
        }
    }
}

fn explained(silence: Silence) -> &'static str {
    match silence {
        Silence::NoAddress => {
            "it is not known where the peer is; it has told nobody, and has not come here"
        }
        Silence::NoHandshake => {
            "no handshake was answered; it is down, or nothing gets through (`seikan status` says what was tried)"
        }
        Silence::NoAnswer => {
            "nothing came back; the peer or the way to it is gone, and others are tried if there are any"
        }
    }
}

/// Milliseconds, with three digits that count at least.
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

    /// By a relay, lost, and then twice directly.
    fn four() -> [Pong; 4] {
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
    fn each_question_each_change_and_the_sum_is_a_line() {
        let (mut tally, mut text) = (Tally::default(), String::new());
        for pong in &four() {
            for line in tally.take(pong) {
                text += &format!("{line}\n");
            }
        }
        text += &Line::Sum(&tally).to_string();
        assert_eq!(plain(&text) + "\n", include_str!("ping.txt"));
    }

    #[test]
    fn in_json_each_line_says_what_it_is() {
        let (mut tally, pongs) = (Tally::default(), four());
        tally.take(&pongs[0]);
        let lines = tally.take(&pongs[2]);
        let json = |line| serde_json::to_value(line).expect("JSON");
        let moved = json(&lines[0]);
        assert_eq!(moved["moved"]["from"]["relay"], "relay-a.example.org:3478");
        assert_eq!(moved["moved"]["to"]["address"], "198.51.100.9:51820");
        let ping = json(&lines[1]);
        assert_eq!(ping["ping"]["number"], 2);
        assert_eq!(ping["ping"]["rtt_us"], 8_400);
        assert_eq!(ping["ping"]["path"]["relayed"], false);
        let sum = json(&Line::Sum(&tally));
        assert_eq!(sum["sum"]["answered"], 2);
        assert_eq!(sum["sum"]["max_us"], 17_104);
        assert_eq!(sum["sum"]["paths"][1]["answered"], 1);
    }

    #[test]
    fn who_is_nowhere_has_no_way_and_no_time() {
        let mut tally = Tally::default();
        let pong = pong(None, None, Some(Silence::NoAddress));
        assert_eq!(tally.take(&pong).len(), 1);
        assert_eq!(tally.spread(), None);
        assert_eq!(plain(&tally.to_string()), "\ndb-1: 1 sent, 0 answered");
    }

    #[test]
    fn the_pause_has_bounds() {
        assert_eq!(seconds("0.2"), Ok(Duration::from_millis(200)));
        for wrong in ["0", "-1", "NaN", "inf", "3601", "x", ""] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
