//! Seikan's own control protocol: a request is a line of JSON, and so is its reply.
//!
//! | request | reply |
//! |---|---|
//! | `{"cmd":"status"}` | `{"ok":true,"status":{...}}`, see [`crate::status::Status`] |
//! | `{"cmd":"stop"}` | `{"ok":true,"pid":N}`; the connection ends when the process does |
//! | anything else | `{"ok":false,"error":"..."}` |

use super::client::Phase;
use super::output::Output;
use super::subject::Subject;
use crate::status::{self, Status};
use crate::worker::Verdict;
use seikan_proto::indices::PeerId;
use serde::{Deserialize, Serialize};
use std::io::Write;

/// Longest request in bytes.
pub const MAX_LINE: usize = 4096;

/// What can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// How is it going?
    Status,
    /// End, in order.
    Stop,
}

/// A reply, as the asker reads it.
#[derive(Debug, Deserialize)]
pub struct Reply {
    /// Whether it was done.
    pub ok: bool,
    /// Why not.
    pub error: Option<String>,
    /// Who was asked to stop.
    pub pid: Option<u32>,
    /// What was asked for.
    pub status: Option<Status>,
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
    /// Peers still to be told of, and whether none was told of yet.
    Status(std::vec::IntoIter<PeerId>, bool),
    /// The client waits for our end.
    Stopping,
    Over,
}

impl super::client::Dialogue for Dialogue {
    fn take(&mut self, input: &[u8], subject: &mut Subject<'_>, output: &mut Output) -> usize {
        if matches!(self.state, State::Stopping) {
            return input.len();
        }
        let Some(end) = input.iter().take(MAX_LINE).position(|b| *b == b'\n') else {
            if input.len() >= MAX_LINE {
                refuse(&format!("a request has at most {MAX_LINE} bytes"), output);
                self.state = State::Over;
            }
            return 0;
        };
        match serde_json::from_slice(&input[..end]) {
            Ok(Request::Status) => self.state = begin_status(subject, output),
            Ok(Request::Stop) => {
                let _ = writeln!(output, "{{\"ok\":true,\"pid\":{}}}", std::process::id());
                subject.verdict = Verdict::Stop;
                self.state = State::Stopping;
            }
            Err(error) => refuse(
                &format!("{error}; a request is {{\"cmd\":\"status\"}} or {{\"cmd\":\"stop\"}}"),
                output,
            ),
        }
        end + 1
    }

    fn give(&mut self, subject: &Subject<'_>, output: &mut Output) {
        let State::Status(peers, first) = &mut self.state else {
            return;
        };
        let now = crate::node::now();
        while !output.is_full() {
            let Some(id) = peers.next() else {
                output.push(b"]}}\n");
                self.state = State::Idle;
                return;
            };
            if let Some(peer) = subject.node.tunnel.peer(id) {
                if !std::mem::take(first) {
                    output.push(b",");
                }
                let peer = status::peer(subject.node, subject.record, peer, now);
                // Neither writing to memory nor these types can fail.
                let _ = serde_json::to_writer(&mut *output, &peer);
            }
        }
    }

    fn phase(&self) -> Phase {
        match self.state {
            State::Idle | State::Stopping => Phase::Idle,
            State::Status(..) => Phase::Replying,
            State::Over => Phase::Over,
        }
    }
}

/// Everything up to the list of peers, which is the last field and follows in pieces.
fn begin_status(subject: &Subject<'_>, output: &mut Output) -> State {
    let status = status::without_peers(subject.node, subject.record);
    let text = serde_json::to_string(&status).unwrap_or_default();
    let head = text.strip_suffix("]}").unwrap_or(&text);
    let _ = write!(output, "{{\"ok\":true,\"status\":{head}");
    let peers: Vec<_> = subject.node.tunnel.peers().map(|peer| peer.id).collect();
    State::Status(peers.into_iter(), true)
}

fn refuse(error: &str, output: &mut Output) {
    let reply = serde_json::json!({ "ok": false, "error": error });
    let _ = writeln!(output, "{reply}");
}
