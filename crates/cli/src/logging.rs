//! Log of the daemons on standard error: events with a level, a target and fields.
//!
//! Events of libraries are left out, because those of HTTP/2 contain credentials. Each event is
//! printed at most [`PER_MINUTE`] times a minute, because peers and unknown hosts can cause some of
//! them.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::{Format, Full, Json, JsonFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime as Clock};
use tracing_subscriber::fmt::{self as text, FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;

/// Targets of events.
const TARGETS: [&str; 5] = ["tunnel", "mesh", "gateway", "coordinator", "relay"];
/// Maximum number of times that an event is printed in a minute.
const PER_MINUTE: u32 = 60;
/// Size in bytes at which the first half of the log file of a background process is removed.
const MAX_SIZE: u64 = 1 << 20;

/// Options of the log.
#[derive(Clone, Debug, Default, Args)]
pub struct LogArguments {
    /// Log events of this level and above: error, warn, info, debug, trace or off; TARGET=LEVEL for one
    /// of tunnel, mesh, gateway, coordinator and relay; several, separated by commas [env:
    /// SEIKAN_LOG] [default: info]
    #[arg(long, value_name = "LEVEL")]
    log: Option<Levels>,
    /// Format of the log: text, a line for each event, or json, an object for each event
    #[arg(
        long,
        value_name = "FORMAT",
        value_enum,
        default_value_t,
        hide_possible_values = true
    )]
    log_format: LogFormat,
}

/// Format of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// A line for each event; for the journal of systemd if that reads it
    #[default]
    Text,
    /// A JSON object for each event
    Json,
}

/// Levels of the targets.
#[derive(Clone, Debug)]
struct Levels(Targets);

impl Levels {
    /// Returns levels that are the same for all targets.
    fn at(level: LevelFilter) -> Levels {
        Levels(Targets::new().with_targets(TARGETS.map(|target| (target, level))))
    }
}

impl FromStr for Levels {
    type Err = String;

    fn from_str(text: &str) -> Result<Levels, String> {
        let mut levels = Levels::at(LevelFilter::INFO).0;
        for part in text.split(',').map(str::trim) {
            let (target, level) = part.split_once('=').unwrap_or(("", part));
            let level = LevelFilter::from_str(level).map_err(|_| {
                format!("`{level}` is no level; use error, warn, info, debug, trace or off")
            })?;
            levels = match target {
                "" => levels.with_targets(TARGETS.map(|target| (target, level))),
                _ if TARGETS.contains(&target) => levels.with_target(target, level),
                _ => {
                    let all = TARGETS.join(", ");
                    return Err(format!("`{target}` is no target; use one of {all}"));
                }
            };
        }
        Ok(Levels(levels))
    }
}

impl LogArguments {
    /// Returns the options for events of this level and above, as text.
    pub fn at(level: LevelFilter) -> LogArguments {
        LogArguments {
            log: Some(Levels::at(level)),
            ..LogArguments::default()
        }
    }

    /// Starts the log of this process. `keeps_file`: standard error is a log file that this program
    /// has opened, for reading too, and keeps below [`MAX_SIZE`].
    ///
    /// # Errors
    /// If `SEIKAN_LOG` cannot be parsed, or the log was started before.
    pub fn start(&self, keeps_file: bool) -> anyhow::Result<()> {
        let lines = match self.log_format {
            LogFormat::Json => Lines::Json(text::format().json()),
            LogFormat::Text if is_journal() => {
                Lines::Journal(text::format().without_time().with_level(false))
            }
            LogFormat::Text => Lines::Text(text::format()),
        };
        let lines = Limited {
            lines,
            counts: Mutex::default(),
        };
        let layer = text::layer().with_ansi(false).event_format(lines);
        let layer = layer.with_writer(move || LogWriter { keeps_file });
        let levels = match (&self.log, std::env::var("SEIKAN_LOG")) {
            (Some(levels), _) => levels.clone(),
            (None, Ok(text)) => text
                .parse()
                .map_err(|error| anyhow!("cannot use SEIKAN_LOG: {error}"))?,
            (None, Err(_)) => Levels::at(LevelFilter::INFO),
        };
        // The type of the layer depends on the format of its fields.
        let layer = match self.log_format {
            LogFormat::Json => layer.fmt_fields(JsonFields::new()).boxed(),
            LogFormat::Text => layer.boxed(),
        };
        let subscriber = tracing_subscriber::registry().with(layer.with_filter(levels.0));
        tracing::subscriber::set_global_default(subscriber)
            .map_err(|error| anyhow!("cannot start the log: {error}"))
    }

    /// Whether warnings are for a reader at a terminal.
    pub fn is_for_reader(&self) -> bool {
        self.log_format == LogFormat::Text && io::stderr().is_terminal()
    }
}

/// Whether standard error is read by the journal of systemd (systemd.exec(5), `$JOURNAL_STREAM`).
pub fn is_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").ok();
    let stderr = io::stderr().as_fd().try_clone_to_owned().map(File::from);
    let metadata = stderr.and_then(|file| file.metadata()).ok();
    let ours = metadata.map(|metadata| format!("{}:{}", metadata.dev(), metadata.ino()));
    stream.is_some() && stream == ours
}

/// Lines of the log.
enum Lines {
    Text(Format<Full>),
    /// With the prefix of sd-daemon(3) that states the level; the journal adds the time.
    Journal(Format<Full, ()>),
    Json(Format<Json>),
}

/// Lines of the log, each event at most [`PER_MINUTE`] times a minute.
struct Limited {
    lines: Lines,
    counts: Mutex<HashMap<Identifier, Count>>,
}

/// Number of times that an event occurred since `since`.
struct Count {
    since: Instant,
    count: u32,
}

impl Limited {
    /// Counts an event. Returns whether it is printed, and how many were left out in the minute
    /// before.
    fn count(&self, event: Identifier, now: Instant) -> (bool, u32) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Count {
            since: now,
            count: 0,
        };
        let entry = counts.entry(event).or_insert_with(new);
        let mut left_out = 0;
        if now.duration_since(entry.since) >= Duration::from_secs(60) {
            left_out = entry.count.saturating_sub(PER_MINUTE);
            *entry = new();
        }
        entry.count = entry.count.saturating_add(1);
        (entry.count <= PER_MINUTE, left_out)
    }

    fn note_left_out(&self, out: &mut Writer<'_>, of: &Metadata<'_>, count: u32) -> fmt::Result {
        let message = format!("{count} further events like the next were left out");
        match self.lines {
            Lines::Text(_) => {
                Clock.format_time(out)?;
                writeln!(out, "  {} {}: {message}", of.level(), of.target())
            }
            Lines::Journal(_) => writeln!(out, "{}{}: {message}", prefix(of.level()), of.target()),
            Lines::Json(_) => {
                let mut time = String::new();
                Clock.format_time(&mut Writer::new(&mut time))?;
                let line = serde_json::json!({
                    "timestamp": time,
                    "level": of.level().as_str(),
                    "fields": { "message": message },
                    "target": of.target(),
                });
                writeln!(out, "{line}")
            }
        }
    }
}

impl<S, F> FormatEvent<S, F> for Limited
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    F: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, F>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let (is_printed, left_out) = self.count(metadata.callsite(), Instant::now());
        if left_out > 0 {
            self.note_left_out(&mut out, metadata, left_out)?;
        }
        match &self.lines {
            _ if !is_printed => Ok(()),
            Lines::Text(format) => format.format_event(context, out, event),
            Lines::Json(format) => format.format_event(context, out, event),
            Lines::Journal(format) => {
                out.write_str(prefix(metadata.level()))?;
                format.format_event(context, out, event)
            }
        }
    }
}

/// Returns the prefix of a line for the journal (sd-daemon(3)).
fn prefix(level: &Level) -> &'static str {
    match *level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        _ => "<7>",
    }
}

/// Standard error.
struct LogWriter {
    keeps_file: bool,
}

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut stderr = io::stderr().lock();
        if self.keeps_file && !bytes.is_empty() {
            let file = File::from(stderr.as_fd().try_clone_to_owned()?);
            // A log that is too long is better than none.
            let _ = shorten(&file, MAX_SIZE);
        }
        stderr.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Removes the first half of a file that is not shorter than `max` bytes, to the end of a line. The file
/// has to be open for reading and appending.
fn shorten(mut file: &File, max: u64) -> io::Result<()> {
    let length = file.metadata()?.len();
    if length < max {
        return Ok(());
    }
    let mut kept = Vec::new();
    file.seek(SeekFrom::Start(length - max / 2))?;
    file.take(max / 2).read_to_end(&mut kept)?;
    let line = kept.iter().position(|byte| *byte == b'\n');
    file.set_len(0)?;
    file.write_all(&kept[line.map_or(0, |end| end + 1)..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_parsed_or_refused_by_name() {
        let levels = |text: &str| text.parse::<Levels>().map(|levels| levels.0.to_string());
        assert!(levels("warn,mesh=debug").unwrap().contains("mesh=debug"));
        assert!(levels("warn,mesh=debug").unwrap().contains("tunnel=warn"));
        assert!(levels("loud").unwrap_err().contains("`loud` is no level"));
        assert!(
            levels("h2=trace")
                .unwrap_err()
                .contains("`h2` is no target")
        );
    }

    #[test]
    fn an_event_is_printed_sixty_times_a_minute() {
        struct Site;
        impl tracing::callsite::Callsite for Site {
            fn set_interest(&self, _: tracing::subscriber::Interest) {}
            fn metadata(&self) -> &Metadata<'_> {
                unreachable!("not asked for")
            }
        }
        static SITE: Site = Site;
        let limited = Limited {
            lines: Lines::Text(text::format()),
            counts: Mutex::default(),
        };
        let start = Instant::now();
        let count = |seconds| {
            let now = start + Duration::from_secs(seconds);
            limited.count(Identifier(&SITE), now)
        };
        let printed = (0..100).filter(|_| count(0).0).count();
        assert_eq!(printed, 60);
        assert_eq!(count(59), (false, 0));
        assert_eq!(count(60), (true, 41));
        assert_eq!(count(61), (true, 0));
    }

    #[test]
    fn a_long_log_keeps_its_last_lines() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut options = File::options();
        let log = options.read(true).append(true).open(file.path()).unwrap();
        for n in 0..30 {
            writeln!(&log, "line {n:02}").unwrap();
            shorten(&log, 100).unwrap();
        }
        let text = std::fs::read_to_string(file.path()).unwrap();
        assert!(text.len() < 100, "{text}");
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.last(), Some(&"line 29"));
        let first: usize = lines[0][5..].parse().unwrap();
        assert_eq!(lines.len(), 30 - first);
    }
}
