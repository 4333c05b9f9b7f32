//! The datapath counters of Open vSwitch, queried from the switch itself.
//!
//! `ovs-vswitchd` accepts commands on a Unix socket, as JSON-RPC 1.0 without separators between
//! messages (`ovs-appctl(8)`, ovs/lib/unixctl.c). One command is sent here, `dpctl/show`, which
//! changes nothing. Its output is for people and has a line for each datapath, of the kernel or in
//! user space:
//!
//! ```text
//!   lookups: hit:1195177 missed:804 lost:369855
//! ```
//!
//! The switch answers in its own time, and sampling never waits: a sample uses the part of the last
//! answer that has arrived, and sends the next request.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use seikan_observe::path::PathMap;
use seikan_observe::{Subject, metric};
use serde::Deserialize;

use super::{Again, Output};
use crate::discover::listening;

/// The request, and the prefix of the program's name.
const REQUEST: &[u8] = br#"{"id":0,"method":"dpctl/show","params":[]}"#;
const PROGRAM: &str = "ovs-vswitchd";
/// Maximum length of an answer in bytes: that of some thousand ports.
const ANSWER_MAX: usize = 1 << 20;
/// Its name in the list of missing values.
const NAME: &str = "counts of the virtual switch's datapath";

/// A switch that is queried.
#[derive(Debug)]
pub(super) struct Switch {
    /// `None` after an error.
    stream: Option<UnixStream>,
    /// The part of an answer that has arrived; `None` if no request is pending.
    answer: Option<Vec<u8>>,
    again: Again,
}

/// The answer of the switch (the third field, `id`, is that of the request).
#[derive(Deserialize)]
struct Answer {
    result: Option<String>,
    error: Option<serde_json::Value>,
}

impl Switch {
    /// Connects to the switch if the path's program is one; `None` if it is another program.
    pub(super) fn open(map: &PathMap, output: &mut Output) -> Option<Self> {
        let program = map.program.as_ref()?;
        if !program.name.starts_with(PROGRAM) {
            return None;
        }
        let stream = output.keep(NAME, connected(program.pid))?;
        Some(Self::of(stream))
    }

    fn of(stream: UnixStream) -> Self {
        Self {
            stream: Some(stream),
            answer: None,
            again: Again::every(Again::SECOND),
        }
    }

    /// Reads the available part of the answer, and sends a request once a second.
    pub(super) fn sample(&mut self, now: Instant, output: &mut Output) {
        let outcome = self.step(now, output);
        if output.keep(NAME, outcome).is_none() {
            self.stream = None;
        }
    }

    fn step(&mut self, now: Instant, output: &mut Output) -> io::Result<()> {
        let Some(stream) = &mut self.stream else {
            return Ok(());
        };
        if let Some(answer) = &mut self.answer {
            receive(stream, answer)?;
            if let Some(text) = complete(answer)? {
                self.answer = None;
                for (name, value) in parse(&text) {
                    output.counter(&Subject::Host, name, value);
                }
            }
        }
        if self.answer.is_none() && self.again.due(now) {
            stream.write_all(REQUEST)?;
            self.answer = Some(Vec::new());
        }
        Ok(())
    }
}

/// Connects to the control socket of a process, in its view of the file system.
fn connected(pid: u32) -> io::Result<UnixStream> {
    let paths = listening(pid)?;
    let path = paths.iter().find(|path| path.ends_with(".ctl"));
    let path = path.ok_or_else(|| {
        io::Error::new(
            ErrorKind::NotFound,
            format!("process {pid} has no control socket (NAME.ctl)"),
        )
    })?;
    let address = UnixAddr::new(format!("/proc/{pid}/root{path}").as_str())?;
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket: OwnedFd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(socket.as_raw_fd(), &address)?;
    Ok(UnixStream::from(socket))
}

/// Reads the available bytes without waiting.
fn receive(stream: &mut UnixStream, answer: &mut Vec<u8>) -> io::Result<()> {
    let mut buffer = [0; 16_384];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "it hung up")),
            Ok(length) if answer.len() + length <= ANSWER_MAX => {
                answer.extend_from_slice(&buffer[..length]);
            }
            Ok(_) => {
                let text = format!("its answer is longer than {ANSWER_MAX} bytes");
                return Err(io::Error::new(ErrorKind::InvalidData, text));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns the text of an answer; `None` if it is incomplete.
fn complete(answer: &[u8]) -> io::Result<Option<String>> {
    match serde_json::from_slice::<Answer>(answer) {
        Ok(Answer {
            result: Some(text), ..
        }) => Ok(Some(text)),
        Ok(Answer { error, .. }) => {
            let said = error.unwrap_or_default().to_string();
            let said: String = said.chars().take(200).collect();
            Err(io::Error::other(format!(
                "it answered with an error: {said}"
            )))
        }
        Err(error) if error.is_eof() => Ok(None),
        Err(error) => Err(io::Error::new(ErrorKind::InvalidData, error)),
    }
}

/// Returns the sums over all datapaths; nothing if the text has no such line.
fn parse(text: &str) -> Vec<(&'static str, u64)> {
    const FIELDS: [(&str, &str); 3] = [
        ("hit:", metric::SWITCH_HITS),
        ("missed:", metric::SWITCH_MISSES),
        ("lost:", metric::SWITCH_LOST),
    ];
    let lines = || {
        text.lines()
            .filter_map(|line| line.trim().strip_prefix("lookups:"))
    };
    let sum = |label: &str| {
        let words = lines().flat_map(str::split_ascii_whitespace);
        let values = words.filter_map(|word| word.strip_prefix(label)?.parse().ok());
        values.reduce(u64::saturating_add)
    };
    let values = FIELDS
        .iter()
        .map(|(label, name)| Some((*name, sum(label)?)));
    values.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// The output of Open vSwitch 3.1, with a second datapath.
    const SAID: &str = "netdev@ovs-netdev:\n  lookups: hit:100 missed:7 lost:30\n  flows: 18\n  \
        port 0: ovs-netdev (tap)\nsystem@ovs-system:\n  lookups: hit:23 missed:1 lost:0\n  flows: 0\n  \
        masks: hit:4 total:0 hit/pkt:0.17\n";

    #[test]
    fn all_datapaths_count() {
        let expected = [
            (metric::SWITCH_HITS, 123),
            (metric::SWITCH_MISSES, 8),
            (metric::SWITCH_LOST, 30),
        ];
        assert_eq!(parse(SAID), expected);
        assert_eq!(parse("  flows: 18\n"), []);
        assert_eq!(parse("lookups: hit:-1 missed: lost:x"), []);
    }

    #[test]
    fn an_answer_in_pieces_is_taken_in_when_it_is_whole() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let (mut switch, mut output) = (Switch::of(ours), Output::default());
        let start = Instant::now();
        switch.sample(start, &mut output);
        let mut request = vec![0; REQUEST.len()];
        theirs.read_exact(&mut request).unwrap();
        assert_eq!(request, REQUEST);
        let text = serde_json::to_string(SAID).unwrap();
        let answer = format!(r#"{{"error":null,"id":0,"result":{text}}}"#);
        let (first, rest) = answer.split_at(40);
        theirs.write_all(first.as_bytes()).unwrap();
        switch.sample(start + Duration::from_millis(100), &mut output);
        assert!(output.values.is_empty());
        theirs.write_all(rest.as_bytes()).unwrap();
        switch.sample(start + Duration::from_millis(200), &mut output);
        assert_eq!(output.values.len(), 3);
        // Not before a second has passed.
        theirs.set_nonblocking(true).unwrap();
        assert!(theirs.read(&mut request).is_err());
        switch.sample(start + Duration::from_millis(1_100), &mut output);
        assert_eq!(theirs.read(&mut request).unwrap(), REQUEST.len());
        assert!(output.missing.is_empty());
    }

    #[test]
    fn an_invalid_answer_is_reported_once_and_ends_the_queries() {
        for wrong in ["[]", r#"{"error":"unknown","id":0,"result":null}"#, "\u{1}"] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            let (mut switch, mut output) = (Switch::of(ours), Output::default());
            let start = Instant::now();
            switch.sample(start, &mut output);
            theirs.write_all(wrong.as_bytes()).unwrap();
            for second in 1..4 {
                switch.sample(start + Duration::from_secs(second), &mut output);
            }
            assert_eq!(output.missing.len(), 1, "{wrong}");
            assert!(output.values.is_empty());
        }
    }

    #[test]
    fn an_endless_answer_is_not_kept() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut answer = vec![b' '; ANSWER_MAX];
        theirs.write_all(b" ").unwrap();
        assert!(receive(&mut ours, &mut answer).is_err());
        assert_eq!(answer.len(), ANSWER_MAX);
    }
}
