//! What two doctors tell each other: one asks, the other measures its own end and tells.
//!
//! ```text
//! asks                                                    listens
//! Ask (for how long, how, with which load)  -->
//!                                           <--  Ready (looks at this, load goes there), or Refused
//! Begin                                     -->
//! Alive, once a second                      <->  Alive
//! End, if it is to be over early            -->
//!                                           <--  Told (path, samples, processor time, probes)
//! ```
//!
//! A message is JSON with a version. Both ends know a common secret before the first one; what comes is bounded and checked
//! all the same: [`Message::read`] and [`Told::evidence`] give what the rules can work on, or an error.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use seikan_observe::path::PathMap;
use seikan_observe::{Column, Key, Kind, Series, Subject};
use serde::{Deserialize, Serialize};

use crate::{Evidence, Probes, Profile};

/// Version of the messages.
pub const VERSION: u32 = 1;
/// Bytes of a message that asks, at most.
pub const LONGEST_ASK: usize = 16 << 10;
/// Bytes of any message, at most.
pub const LONGEST: usize = 64 << 20;

/// Samples that are told, at most; of more, so many are told.
const SAMPLES: usize = 600;
/// Columns, interfaces, sockets, threads, functions: more of any are not taken.
const MANY: usize = 100_000;
/// Processors that a kernel can have (`CONFIG_NR_CPUS`).
pub(crate) const PROCESSORS: usize = 8192;
/// Counters are told as growth; nothing grows by more in an hour.
const GROWTH: u64 = 1 << 53;
/// Microseconds that a measurement may last.
const LONGEST_US: u64 = 2 * 3_600_000_000;

/// Why a message is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongMessage {
    /// Another version.
    #[error(
        "the other end speaks version {0} of what doctors tell each other, this one {VERSION}: use the same seikan at both ends"
    )]
    Version(u32),
    /// Not such a message.
    #[error("what the other end sent is no message of a doctor: {0}")]
    Syntax(String),
    /// Values that cannot be.
    #[error("what the other end told cannot be: {0}")]
    Impossible(&'static str),
}

/// Any message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    /// Measure.
    Ask(Ask),
    /// It can begin.
    Ready(Ready),
    /// Go.
    Begin,
    /// Still there.
    Alive,
    /// It is over, earlier than asked for.
    End,
    /// What was measured.
    Told(Box<Told>),
    /// No, and why.
    Refused(String),
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ask {
    /// For how long, 2 to 3600.
    pub seconds: u32,
    /// Milliseconds between samples, 10 to 1000.
    pub interval: u32,
    /// How deep to look, 0 to 2.
    pub level: u32,
    /// Whether echo requests may be sent.
    pub probe: bool,
    /// Load through the path, if it is to be made.
    pub load: Option<Load>,
}

/// A load between the two.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// Of which kind.
    pub kind: LoadKind,
    /// Mbit/s at most, 0.01 to 1,000,000; without, as much as goes (TCP only).
    pub rate: Option<f64>,
    /// From the end that listens to the one that asks.
    pub reverse: bool,
}

/// What a load is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LoadKind {
    /// One TCP connection.
    Tcp,
    /// UDP datagrams.
    Udp,
}

/// The listening end is ready.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ready {
    /// Where the load goes, if it was asked for.
    pub sink: Option<Sink>,
}

/// Where a load goes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sink {
    /// The port, at the address that the asking end came to.
    pub port: u16,
    /// What the load begins with, so that nobody else's is taken for it.
    pub token: Token,
}

/// Random bytes that only the two ends of a session know.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token(pub [u8; 16]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(...)")
    }
}

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Told {
    /// The path on that host.
    map: PathMap,
    /// When each sample was taken, microseconds since the first.
    times: Vec<u64>,
    columns: Vec<ToldColumn>,
    profile: Option<Profile>,
    probes: Probes,
}

/// The readings of one key: a counter's as growth since its first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToldColumn {
    subject: Subject,
    name: String,
    kind: Kind,
    points: Vec<(u32, u64)>,
}

#[derive(Serialize)]
struct Written<'a> {
    version: u32,
    message: &'a Message,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    #[serde(rename = "version")]
    _version: u32,
    message: Message,
}

impl Message {
    /// The bytes of the message.
    pub fn write(&self) -> Vec<u8> {
        let written = Written {
            version: VERSION,
            message: self,
        };
        // Maps have strings for keys and numbers are finite or null, so there is nothing that JSON cannot say.
        serde_json::to_vec(&written).unwrap_or_default()
    }

    /// The message that these bytes are.
    ///
    /// # Errors
    /// They are none, or of another version.
    pub fn read(bytes: &[u8]) -> Result<Message, WrongMessage> {
        let syntax = |error: serde_json::Error| WrongMessage::Syntax(error.to_string());
        let Version { version } = serde_json::from_slice(bytes).map_err(syntax)?;
        if version != VERSION {
            return Err(WrongMessage::Version(version));
        }
        let Read { message, .. } = serde_json::from_slice(bytes).map_err(syntax)?;
        if let Message::Ask(ask) = &message {
            ask.check()?;
        }
        Ok(message)
    }
}

impl Ask {
    fn check(&self) -> Result<(), WrongMessage> {
        let rate = self.load.and_then(|load| load.rate);
        let fits = (2..=3600).contains(&self.seconds)
            && (10..=1000).contains(&self.interval)
            && self.level <= 2
            && rate.is_none_or(|rate| (0.01..=1e6).contains(&rate));
        if !fits {
            return Err(WrongMessage::Impossible(
                "it asks for a time, an interval, a level or a rate out of range",
            ));
        }
        // Datagrams without a rate would have no brake.
        match self.load {
            Some(Load {
                kind: LoadKind::Udp,
                rate: None,
                ..
            }) => Err(WrongMessage::Impossible("a load of UDP without a rate")),
            _ => Ok(()),
        }
    }
}

impl Told {
    /// What is told of a measurement: every sample, or, of a long one, some hundreds.
    pub fn of(evidence: &Evidence) -> Told {
        let series = &evidence.series;
        let every = series.times.len().div_ceil(SAMPLES).max(1);
        let times = series.times.chunks(every);
        let times = times.filter_map(|part| Some(part.last()?.as_micros() as u64));
        let columns = series.columns.iter().map(|(key, column)| ToldColumn {
            subject: key.subject.clone(),
            name: key.name.clone().into_owned(),
            kind: column.kind,
            points: told(column, every as u32),
        });
        Told {
            map: evidence.map.clone(),
            times: times.collect(),
            columns: columns.collect(),
            profile: evidence.profile.clone(),
            probes: evidence.probes.clone(),
        }
    }

    /// The evidence that was told.
    ///
    /// # Errors
    /// Values that no measurement has.
    pub fn evidence(self) -> Result<Evidence, WrongMessage> {
        let check = |fits: bool, what| fits.then_some(()).ok_or(WrongMessage::Impossible(what));
        let count = self.times.len();
        check((1..=SAMPLES).contains(&count), "no samples, or too many")?;
        let ordered = self.times.windows(2).all(|pair| pair[0] <= pair[1]);
        let last = self.times.last().copied().unwrap_or(0);
        check(
            ordered && last <= LONGEST_US,
            "times that go backwards or take hours",
        )?;
        let map = &self.map;
        let program = map.program.as_ref();
        let threads = program.map_or(0, |program| program.threads.len());
        let functions = |profile: &Profile| profile.program.len() + profile.machine.len();
        let lists = [
            self.columns.len(),
            map.links.len(),
            map.sockets.len(),
            map.flows.len(),
            map.unseen.len(),
            threads,
            self.profile.as_ref().map_or(0, functions),
        ];
        check(lists.iter().all(|length| *length <= MANY), "too much of it")?;
        check(map.host.cpus.len() <= PROCESSORS, "too many processors")?;
        let mut columns = BTreeMap::new();
        for column in self.columns {
            let points = &column.points;
            let indices = points.windows(2).all(|pair| pair[0].0 < pair[1].0);
            let known = points.iter().all(|(index, _)| (*index as usize) < count);
            check(indices && known, "values of no sample")?;
            if column.kind == Kind::Counter {
                let grows = points.windows(2).all(|pair| pair[0].1 <= pair[1].1);
                let most = points.last().map_or(0, |(_, value)| *value);
                check(grows && most <= GROWTH, "a counter that falls or leaps")?;
            }
            columns.insert(
                Key::new(column.subject, column.name),
                Column {
                    kind: column.kind,
                    points: column.points,
                },
            );
        }
        let times = self.times.into_iter().map(Duration::from_micros);
        Ok(Evidence {
            map: self.map,
            series: Series {
                times: times.collect(),
                columns,
            },
            expected: None,
            profile: self.profile,
            probes: self.probes,
        })
    }
}

/// The points of a column: of every so many samples the last, and of what never changes the first and the last.
fn told(column: &Column, every: u32) -> Vec<(u32, u64)> {
    let mut grown = 0;
    let mut before = None;
    let mut points: Vec<(u32, u64)> = Vec::new();
    for (index, value) in &column.points {
        let told = match column.kind {
            Kind::Gauge => *value,
            Kind::Counter => {
                grown += value.saturating_sub(before.replace(*value).unwrap_or(*value));
                grown
            }
        };
        let slot = index / every;
        match points.last_mut() {
            Some(last) if last.0 == slot => last.1 = told,
            _ => points.push((slot, told)),
        }
    }
    if let (Some(first), Some(last)) = (points.first().copied(), points.last().copied())
        && points.len() > 2
        && points.iter().all(|(_, value)| *value == first.1)
    {
        return vec![first, last];
    }
    points
}

#[cfg(test)]
mod tests;
