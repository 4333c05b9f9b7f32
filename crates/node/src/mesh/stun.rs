//! What this host looks like from outside: STUN binding requests (RFC 8489), asked from the socket of the tunnel.
//!
//! The worker sends what [`Question`] makes and hands back what [`is_answer`] recognises, before the tunnel sees it: in
//! neither protocol does a message begin like that.

use super::agent::{Gone, News, Worker};
use std::cell::RefCell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;
use stun_types::attribute::{AttributeStaticType as _, XorMappedAddress};
use stun_types::message::{
    BINDING, Message, MessageClass, MessageHeader, MessageWrite as _, MessageWriteVec,
    TransactionId,
};
use tokio::sync::oneshot;

/// The magic cookie (RFC 8489, section 5).
const COOKIE: [u8; 4] = [0x21, 0x12, 0xa4, 0x42];
/// A binding response, of success or failure (sections 5 and 18.2).
const RESPONSES: [[u8; 2]; 2] = [[0x01, 0x01], [0x01, 0x11]];
/// Bytes of a header.
const HEADER: usize = 20;
/// First byte of a binding response, and its minimum length in bytes.
pub(crate) const SHORTEST_ANSWER: (u8, u16) = (RESPONSES[0][0], HEADER as u16);
/// Longest answer that is looked at, in bytes.
const MAX_ANSWER: usize = 1500;

/// How often a server is asked that does not answer.
const ATTEMPTS: u32 = 3;
/// How long for the first time; twice as long each time after (RFC 8489, section 6.2.1).
const FIRST_PATIENCE: Duration = Duration::from_millis(500);

/// The transaction of a question, by which its answer is known.
type Transaction = [u8; 12];

/// What was asked from the tunnel's socket and waits for its answer.
#[derive(Default)]
pub(super) struct Questions {
    pending: RefCell<HashMap<Transaction, oneshot::Sender<Box<[u8]>>>>,
}

impl Questions {
    /// Asks a server, and once more each time it does not answer. The transaction is the message's.
    pub(super) async fn ask(
        &self,
        worker: &Worker,
        server: SocketAddr,
        message: &[u8],
    ) -> Result<Option<Box<[u8]>>, Gone> {
        let Some(id) = transaction(message) else {
            return Ok(None);
        };
        let (answer, mut answered) = oneshot::channel();
        self.pending.borrow_mut().insert(id, answer);
        // Who asked may not wait for the end.
        let _pending = Pending {
            questions: self,
            id,
        };
        let mut patience = FIRST_PATIENCE;
        for _ in 0..ATTEMPTS {
            worker.tell(News::Send {
                bytes: message.to_vec(),
                to: server,
            })?;
            if let Ok(Ok(answer)) = tokio::time::timeout(patience, &mut answered).await {
                return Ok(Some(answer));
            }
            patience *= 2;
        }
        Ok(None)
    }

    /// Hands an answer to who asked; nobody's is let go.
    pub(super) fn answered(&self, bytes: Box<[u8]>) {
        let asked = transaction(&bytes).and_then(|id| self.pending.borrow_mut().remove(&id));
        if let Some(asked) = asked {
            // Who asked may have given up.
            let _ = asked.send(bytes);
        }
    }
}

/// A question that is waited for.
struct Pending<'a> {
    questions: &'a Questions,
    id: Transaction,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.questions.pending.borrow_mut().remove(&self.id);
    }
}

/// The transaction of a message (section 5).
fn transaction(message: &[u8]) -> Option<Transaction> {
    message.get(8..HEADER)?.try_into().ok()
}

/// A question for this host's own address.
pub(super) struct Question {
    id: TransactionId,
    /// What is to be sent.
    pub bytes: Vec<u8>,
}

impl Question {
    /// A new one. Its transaction is 96 random bits: nobody answers in a server's place who does not see it.
    pub(super) fn new() -> Question {
        let request = Message::builder_request(BINDING, MessageWriteVec::new());
        let bytes = request.finish();
        let id = MessageHeader::from_bytes(&bytes).map(|header| header.transaction_id());
        Question {
            // What was just made has a header.
            id: id.unwrap_or_else(|_| TransactionId::generate()),
            bytes,
        }
    }

    /// The address that an answer to it tells; `None` if it is none, or tells none.
    pub(super) fn answered(&self, bytes: &[u8]) -> Option<SocketAddr> {
        let message = Message::from_bytes(bytes).ok()?;
        let fits = message.has_class(MessageClass::Success) && message.has_method(BINDING);
        if !fits || message.transaction_id() != self.id {
            return None;
        }
        let raw = message.raw_attribute(XorMappedAddress::TYPE)?;
        let told = XorMappedAddress::try_from(&raw).ok()?.addr(self.id);
        let usable = told.port() != 0 && !told.ip().is_unspecified() && !told.ip().is_multicast();
        usable.then_some(told)
    }
}

/// A binding indication, which nobody answers (section 6.3.2): what opens a NAT.
pub(crate) fn indication() -> Vec<u8> {
    Message::builder_indication(BINDING, MessageWriteVec::new()).finish()
}

/// Whether a datagram is an answer of a STUN server, by its first bytes.
pub(crate) fn is_answer(datagram: &[u8]) -> bool {
    (HEADER..=MAX_ANSWER).contains(&datagram.len())
        && RESPONSES.iter().any(|kind| datagram.starts_with(kind))
        && datagram[4..8] == COOKIE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(id: TransactionId, attribute: &[u8]) -> Vec<u8> {
        let id = u128::from(id).to_be_bytes();
        let length = (attribute.len() as u16).to_be_bytes();
        [&[1, 1], &length[..], &COOKIE, &id[4..], attribute].concat()
    }

    #[test]
    fn the_address_of_an_answer_is_the_one_that_it_tells() {
        // RFC 5769, section 2.2: 192.0.2.1 port 32853.
        let attribute = [0, 0x20, 0, 8, 0, 1, 0xa1, 0x47, 0xe1, 0x12, 0xa6, 0x43];
        let question = Question::new();
        assert_eq!(question.bytes.len(), HEADER);
        let good = answer(question.id, &attribute);
        assert!(is_answer(&good));
        let told = question.answered(&good).expect("an address");
        assert_eq!(told.to_string(), "192.0.2.1:32853");
        // Another's answer.
        assert_eq!(Question::new().answered(&good), None);
        for end in 0..good.len() {
            assert_eq!(question.answered(&good[..end]), None, "{end}");
        }
        // Nothing told, and port 0: 0x2112 xor 0x2112.
        assert_eq!(question.answered(&answer(question.id, &[])), None);
        let nowhere = [0, 0x20, 0, 8, 0, 1, 0x21, 0x12, 0xe1, 0x12, 0xa6, 0x43];
        assert_eq!(question.answered(&answer(question.id, &nowhere)), None);
    }

    #[test]
    fn neither_protocol_has_messages_that_look_like_an_answer() {
        // WireGuard's initiation begins with 1, 0, 0, 0; ours with 0x11.
        for kind in [1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14] {
            let mut message = [0; 148];
            message[0] = kind;
            message[4..8].copy_from_slice(&COOKIE);
            assert!(!is_answer(&message), "{kind}");
        }
    }
}
