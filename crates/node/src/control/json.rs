//! Seikan's own control protocol: a request is a line of JSON, and so is its reply.
//!
//! | request | reply |
//! |---|---|
//! | `{"cmd":"status"}` | `{"ok":true,"status":{...}}`, see [`crate::status::Status`] |
//! | `{"cmd":"metrics"}` | `{"ok":true,"metrics":"..."}`: the text that [`crate::metrics`] serves |
//! | `{"cmd":"stop"}` | `{"ok":true,"pid":N}`; the connection ends when the process does |
//! | `{"cmd":"ping","peer":"NAME, address or key"}` | `{"ok":true,"ping":{...}}` once it has answered or not, see [`super::ping::Pong`] |
//! | `{"cmd":"rotate","private_key":"..."}` | `{"ok":true}`: a member has another key, and its sessions stay |
//! | anything else | `{"ok":false,"error":"..."}` |

use super::ping::{Pinging, Pong};
use crate::metrics;
use crate::output::Output;
use crate::output::Phase;
use crate::status::gateway::{self as gateway, GatewayStatus};
use crate::status::{self, Status};
use crate::subject::Subject;
use crate::system::now;
use crate::worker::ControlFlow;
use seikan_config::parse_private_key;
use seikan_proto::gateway::DeviceId;
use seikan_proto::indices::PeerId;
use seikan_proto::tunnel::Now;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::Write;
use zeroize::Zeroize as _;

/// Longest request in bytes.
pub const MAX_LINE: usize = 4096;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// Return the status.
    Status,
    /// Return the metrics.
    Metrics,
    /// Stop the tunnel.
    Stop,
    /// Ping a peer.
    Ping {
        /// Its name, address or key.
        peer: String,
    },
    /// Adopt another private key, and keep all sessions.
    Rotate {
        /// The new private key in base64.
        private_key: Secret,
    },
}

/// A text that is never displayed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps a text.
    pub fn new(text: &str) -> Secret {
        Secret(text.to_owned())
    }

    /// The text.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// A reply, as the client parses it.
#[derive(Debug, Deserialize)]
pub struct Reply {
    /// Whether the request succeeded.
    pub ok: bool,
    /// Reason of a failure.
    pub error: Option<String>,
    /// Process id of the instance that was asked to stop.
    pub pid: Option<u32>,
    /// The requested status.
    pub status: Option<Status>,
    /// The requested metrics, in the OpenMetrics text format.
    pub metrics: Option<String>,
    /// Result of the ping.
    pub ping: Option<Pong>,
}

/// One client.
#[derive(Debug, Default)]
pub struct Dialogue {
    state: State,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Idle,
    /// A status is being sent.
    Status(Box<StatusReply>),
    /// Metrics are being sent; the number of the next family.
    Metrics(usize),
    /// A peer was pinged.
    Pinging(Pinging),
    /// The client waits until this process ends.
    Stopping,
    Over,
}

/// The rest of a status that is being sent.
#[derive(Debug)]
struct StatusReply {
    peers: std::vec::IntoIter<PeerId>,
    /// The gateway without its devices, until it was sent; it follows the peers.
    gateway: Option<Box<GatewayStatus>>,
    devices: std::ops::Range<u32>,
    /// No element of the current list was sent yet.
    first: bool,
    /// End of the reply, sent after the last list.
    end: &'static [u8],
}

impl crate::dialogue::Dialogue for Dialogue {
    fn take(&mut self, input: &[u8], subject: &mut Subject<'_>, output: &mut Output) -> usize {
        if matches!(self.state, State::Stopping) {
            return input.len();
        }
        let Some(end) = input.iter().take(MAX_LINE).position(|b| *b == b'\n') else {
            if input.len() >= MAX_LINE {
                refuse(
                    &format!("the request is longer than {MAX_LINE} bytes"),
                    output,
                );
                self.state = State::Over;
            }
            return 0;
        };
        match serde_json::from_slice(&input[..end]) {
            Ok(Request::Status) => self.state = begin_status(subject, output),
            Ok(Request::Metrics) => {
                output.push(b"{\"ok\":true,\"metrics\":\"");
                self.state = State::Metrics(0);
            }
            Ok(Request::Stop) => {
                let _ = writeln!(output, "{{\"ok\":true,\"pid\":{}}}", std::process::id());
                subject.flow = ControlFlow::Stop;
                self.state = State::Stopping;
            }
            Ok(Request::Ping { peer }) => match Pinging::begin(subject, &peer) {
                Ok(pinging) => self.state = State::Pinging(pinging),
                Err(error) => refuse(&error, output),
            },
            Ok(Request::Rotate { private_key }) => match rotate(subject, &private_key) {
                Ok(()) => output.push(b"{\"ok\":true}\n"),
                Err(error) => refuse(error, output),
            },
            Err(error) => refuse(
                &format!(
                    "{error}; a request is {{\"cmd\":\"status\"}}, {{\"cmd\":\"stop\"}} or \
                     {{\"cmd\":\"ping\",\"peer\":\"NAME\"}}"
                ),
                output,
            ),
        }
        end + 1
    }

    fn give(&mut self, subject: &Subject<'_>, output: &mut Output) {
        let telling = match &mut self.state {
            State::Status(telling) => telling,
            State::Metrics(next) => {
                if !give_metrics(next, subject, output) {
                    self.state = State::Idle;
                }
                return;
            }
            State::Pinging(pinging) => {
                match pinging.outcome(subject) {
                    None => return,
                    Some(Ok(pong)) => {
                        let reply = serde_json::json!({ "ok": true, "ping": pong });
                        let _ = writeln!(output, "{reply}");
                    }
                    Some(Err(error)) => refuse(&error, output),
                }
                self.state = State::Idle;
                return;
            }
            _ => return,
        };
        let now = crate::system::now();
        while !output.is_full() {
            if !telling.give(subject, now, output) {
                self.state = State::Idle;
                return;
            }
        }
    }

    fn phase(&self) -> Phase {
        match self.state {
            State::Idle | State::Stopping => Phase::Idle,
            State::Status(..) | State::Metrics(_) => Phase::Replying,
            State::Pinging(_) => Phase::Waiting,
            State::Over => Phase::Over,
        }
    }
}

/// Only a member of a mesh can rotate its key, because only a coordinator can tell the peers.
fn rotate(subject: &mut Subject<'_>, private_key: &Secret) -> Result<(), &'static str> {
    let key = parse_private_key(&private_key.0).map_err(|_| "not a private key")?;
    let Some(mesh) = &mut subject.node.mesh else {
        return Err(
            "the tunnel is not a member of a mesh, so its peers would not learn the new key",
        );
    };
    if subject.node.gateway.is_some() {
        return Err(
            "a gateway's address on the local network is derived from its key: change the key in the configuration, \
             and restart",
        );
    }
    mesh.own_key = key.public();
    subject.node.tunnel.rotate_private_key(key, now().mono);
    subject.record.keyless = false;
    Ok(())
}

/// Sends everything up to the list of peers; peers and gateway follow in pieces.
fn begin_status(subject: &Subject<'_>, output: &mut Output) -> State {
    let status = status::without_peers(subject.node, subject.record);
    let text = serde_json::to_string(&status).unwrap_or_default();
    let head = text.strip_suffix("]}").unwrap_or(&text);
    let _ = write!(output, "{{\"ok\":true,\"status\":{head}");
    let peers: Vec<_> = subject.node.tunnel.peers().map(|peer| peer.id).collect();
    let gateway = subject.node.gateway.as_ref();
    let devices = gateway.map_or(0, |gateway| gateway.gateway.devices().count());
    State::Status(Box::new(StatusReply {
        peers: peers.into_iter(),
        gateway: gateway::without_devices(subject.node, subject.record).map(Box::new),
        devices: 0..devices as u32,
        first: true,
        end: b"]}}\n",
    }))
}

/// Appends metrics from family `next` on, within a string of JSON; returns false after the last.
fn give_metrics(next: &mut usize, subject: &Subject<'_>, output: &mut Output) -> bool {
    while !output.is_full() {
        let mut text = String::new();
        let is_family = metrics::write_family(*next, subject, &mut text);
        let json = serde_json::to_string(&text).unwrap_or_default();
        let inner = json
            .strip_prefix('"')
            .and_then(|json| json.strip_suffix('"'));
        output.push(inner.unwrap_or_default().as_bytes());
        if !is_family {
            output.push(b"\"}\n");
            return false;
        }
        *next += 1;
    }
    true
}

impl StatusReply {
    /// Appends the next piece; returns false after the last.
    fn give(&mut self, subject: &Subject<'_>, now: Now, output: &mut Output) -> bool {
        // Neither writing to memory nor these types can fail.
        if let Some(id) = self.peers.next() {
            if let Some(peer) = subject.node.tunnel.peer(id) {
                self.separate(output);
                let peer = status::peer(subject.node, subject.record, peer, now);
                let _ = serde_json::to_writer(output, &peer);
            }
            return true;
        }
        if let Some(gateway) = self.gateway.take() {
            let text = serde_json::to_string(&gateway).unwrap_or_default();
            let head = text.strip_suffix("]}").unwrap_or(&text);
            let _ = write!(output, "],\"gateway\":{head}");
            (self.first, self.end) = (true, b"]}}}\n");
            return true;
        }
        if let Some(id) = self.devices.next()
            && let Some(gateway) = &subject.node.gateway
        {
            if let Some(device) = gateway::device(gateway, DeviceId(id), now.mono) {
                self.separate(output);
                let _ = serde_json::to_writer(output, &device);
            }
            return true;
        }
        output.push(self.end);
        false
    }

    fn separate(&mut self, output: &mut Output) {
        if !std::mem::take(&mut self.first) {
            output.push(b",");
        }
    }
}

fn refuse(error: &str, output: &mut Output) {
    let reply = serde_json::json!({ "ok": false, "error": error });
    let _ = writeln!(output, "{reply}");
}
