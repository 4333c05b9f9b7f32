//! Messages between the two ends of a bench, over the standard input and output of the far end,
//! which SSH carries.
//!
//! ```text
//! here                                        far end
//!                                         <--  a line with the version (GREETING)
//!                                         <--  Host (name, addresses)
//! Run (one phase)                         -->
//!                                         <--  Listening (the port is open), or Failed
//!         the two flows are connected and carry the load
//!                                         <--  Done (counts), or Failed
//! Kernel (keys)                           -->
//!                                         <--  Kernel (the public key), or Failed
//! ```
//!
//! A message is four bytes of length (big-endian) and JSON. Both ends bound the length.

use std::io::{self, BufRead, Read, Write};
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use seikan_diagnose::exchange::{Measurement, Token};
use seikan_ui::Interrupt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Begins the line of the far end; the number changes with the messages. The version of the program follows.
pub const GREETING: &str = "seikan bench 1 ";
/// Maximum bytes of a login's own output before the greeting.
const NOISE: u64 = 64 << 10;
/// Largest request, bytes.
pub const LONGEST_REQUEST: usize = 64 << 10;
/// Largest reply, bytes: a measurement of the doctor.
pub const LONGEST_REPLY: usize = seikan_diagnose::exchange::LONGEST;
/// Interval at which a waiting end checks its flag.
const POLL: Duration = Duration::from_millis(50);

/// Message to the far end.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Measure a phase.
    Run(Run),
    /// Create a WireGuard interface of the kernel.
    Kernel(KernelRequest),
}

/// A phase of the measurement.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Addresses of the far end at which it opens the port.
    pub at: Vec<IpAddr>,
    /// The port, TCP and UDP.
    pub port: u16,
    /// Bytes that both flows begin with.
    pub token: Token,
    /// Whether the flows pass the kernel's WireGuard.
    pub kernel: bool,
    /// Interface of the tunnel at the far end, if the flows pass it.
    pub tunnel: Option<String>,
    /// The load.
    pub phase: Phase,
}

/// The load of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Kind of traffic.
    pub kind: Kind,
    /// Whether the load runs from the far end to this one.
    pub reverse: bool,
    /// Measured time, at most 10 seconds.
    pub seconds: f64,
    /// Maximum rate, bits per second; `None`: unlimited.
    pub rate: Option<f64>,
    /// Whether the doctors of both ends measure meanwhile.
    pub diagnose: bool,
}

/// Kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Round trips alone.
    Idle,
    /// One TCP connection, and round trips.
    Tcp,
    /// Numbered datagrams.
    Udp,
}

/// Request for an interface of the kernel's WireGuard.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelRequest {
    /// Public key of this end.
    pub public_key: [u8; 32],
    /// UDP port of the far end.
    pub port: u16,
}

/// Message of the far end.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Reply {
    /// The first message.
    Host(Host),
    /// The port of a phase is open.
    Listening,
    /// Result of a phase.
    Done(Box<Done>),
    /// Public key of the interface of the kernel's WireGuard.
    Kernel([u8; 32]),
    /// A request failed, for this reason.
    Failed(String),
}

/// Facts of a host.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Addresses of the host, except loopback and link-local ones.
    pub addresses: Vec<Address>,
    /// Address of the SSH server, if it is known.
    pub ssh: Option<IpAddr>,
    /// Why the kernel's WireGuard cannot be measured; `None` if it can.
    pub no_kernel_wireguard: Option<String>,
}

/// An address of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// Its interface.
    pub interface: String,
    /// Whether the interface belongs to a tunnel.
    pub is_tunnel: bool,
}

/// Result of a phase.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Done {
    /// Counts of this end.
    pub counts: Counts,
    /// Measurement of the doctor, if one was requested.
    pub measurement: Option<Measurement>,
}

/// Counts of one end in a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Measured time, seconds.
    pub seconds: f64,
    /// Bytes received within it.
    pub bytes: u64,
    /// Datagrams of the whole phase, sent or received.
    pub datagrams: u64,
    /// Processor time of the host within the measured time, seconds.
    pub host_cpu: f64,
    /// Processor time of the tunnel's process, seconds.
    pub tunnel_cpu: Option<f64>,
}

/// Sends and receives messages.
pub struct Control<In> {
    output: Box<dyn Write + Send>,
    received: Receiver<io::Result<In>>,
}

impl<In: DeserializeOwned + Send + 'static> Control<In> {
    /// Reads messages of at most `longest` bytes on a thread, which calls `ended` at the end of the input.
    pub fn start(
        mut input: impl Read + Send + 'static,
        output: impl Write + Send + 'static,
        longest: usize,
        ended: impl FnOnce() + Send + 'static,
    ) -> Self {
        // A message is answered before the next one is sent, so one slot suffices.
        let (sender, received) = sync_channel(1);
        std::thread::spawn(move || {
            read_all(&mut input, longest, &sender);
            ended();
        });
        Control {
            output: Box::new(output),
            received,
        }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn send(&mut self, message: &impl Serialize) -> anyhow::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        let length = u32::try_from(bytes.len()).context("a message of more than 4 GiB")?;
        self.output.write_all(&length.to_be_bytes())?;
        self.output.write_all(&bytes)?;
        Ok(self.output.flush()?)
    }

    /// Returns the next message, within `patience`.
    ///
    /// # Errors
    /// There is none in time, it is malformed, the connection ended, or the interrupt was raised.
    pub fn receive(&self, patience: Duration, interrupt: &Interrupt) -> anyhow::Result<In> {
        let until = Instant::now() + patience;
        loop {
            match self.received.recv_timeout(POLL) {
                Ok(message) => return Ok(message?),
                Err(RecvTimeoutError::Disconnected) => {
                    interrupt.check()?;
                    bail!("the connection to the far end was closed");
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            interrupt.check()?;
            if Instant::now() > until {
                bail!("the far end did not answer within {} s", patience.as_secs());
            }
        }
    }
}

fn read_all<In: DeserializeOwned>(
    input: &mut impl Read,
    longest: usize,
    to: &SyncSender<io::Result<In>>,
) {
    loop {
        match read_one(input, longest) {
            Ok(None) => return,
            Ok(Some(message)) => {
                if to.send(Ok(message)).is_err() {
                    return;
                }
            }
            Err(error) => {
                let _ = to.send(Err(error));
                return;
            }
        }
    }
}

/// Reads a message; `None` at the end of the input.
fn read_one<In: DeserializeOwned>(input: &mut impl Read, longest: usize) -> io::Result<Option<In>> {
    let wrong = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let mut length = [0; 4];
    match input.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let length = u32::from_be_bytes(length) as usize;
    if length > longest {
        return Err(wrong(format!(
            "the other end sent a message of more than {longest} bytes"
        )));
    }
    // Memory grows with the received bytes, not with the announced ones.
    let mut bytes = Vec::new();
    input.take(length as u64).read_to_end(&mut bytes)?;
    let message = serde_json::from_slice(&bytes);
    let message = message
        .map_err(|error| wrong(format!("the other end sent a malformed message: {error}")))?;
    Ok(Some(message))
}

/// Skips the output of a login up to the greeting; returns the version of the far end's program, or
/// `None` without a greeting of this version of the messages.
///
/// # Errors
/// The input fails.
pub fn read_greeting(input: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut input = input.take(NOISE);
    let mut line = Vec::new();
    while input.read_until(b'\n', &mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        if let Some(version) = text.strip_prefix(GREETING) {
            return Ok(Some(version.trim().to_owned()));
        }
        line.clear();
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greeting_is_found_behind_the_output_of_a_login() {
        let mut input = &b"Welcome\n\xff\nseikan bench 1 0.1.0\n\0\0\0\x01{"[..];
        let version = read_greeting(&mut input).expect("read");
        assert_eq!(version.as_deref(), Some("0.1.0"));
        assert_eq!(input, b"\0\0\0\x01{");
        assert_eq!(
            read_greeting(&mut &b"seikan bench 2 9.9\n"[..]).expect("read"),
            None
        );
        let endless = vec![b'x'; 1 << 20];
        assert_eq!(read_greeting(&mut &endless[..]).expect("read"), None);
    }

    #[test]
    fn messages_come_whole_and_bounded() {
        let bytes = serde_json::to_vec(&Reply::Failed("x".repeat(100))).expect("JSON");
        let mut input = (bytes.len() as u32).to_be_bytes().to_vec();
        input.extend(&bytes);
        let read = |longest| read_one::<Reply>(&mut &input[..], longest);
        assert!(matches!(read(1000), Ok(Some(Reply::Failed(text))) if text.len() == 100));
        assert!(read(50).is_err());
        assert!(read_one::<Reply>(&mut &input[..50], 1000).is_err());
        assert!(matches!(read_one::<Reply>(&mut &[][..], 1000), Ok(None)));
        assert!(read_one::<Reply>(&mut &b"\0\0\0\x02{}"[..], 1000).is_err());
    }
}
