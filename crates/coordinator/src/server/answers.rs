//! What answers for members take: memory from when one is made until it is read, and the work of making it.
//!
//! An answer may have 8 MiB, and who asked for it may not read it. So each is counted from before it is made until the last of it is handed
//! to the connection: for the member, for its source, and for all together. The next one waits for its turn, and is refused if that does not
//! come in time. A connection's buffers then hold little. A member is told only so much in the long run, and looking at members
//! of whom it is told nothing counts as well.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use futures_util::stream;
use seikan_proto::mesh::MAX_ANSWER;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::limit::Source;
use crate::store::MemberId;

/// What is counted in, in bytes.
const UNIT: usize = 1024;
/// Units of the longest answer: so many are taken until it is known how long one is.
const LONGEST: u32 = (MAX_ANSWER / UNIT) as u32;
/// Units of one member: three of the longest answers.
const OF_MEMBER: usize = 3 * LONGEST as usize;
/// Units of all members from one source.
const OF_SOURCE: usize = 8 * LONGEST as usize;
/// Units of everybody.
const OF_ALL: usize = 32 * LONGEST as usize;
/// How long an answer waits for its turn.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes that are handed to a connection at a time.
const PIECE: usize = 16 << 10;
/// What one member is told, in bytes a second: a mesh of 1,000 members that changes 100 times a second tells a thirtieth of it.
const RATE: usize = 1 << 20;
/// Bytes that looking at one member or removal counts as.
const ROW: usize = 64;
/// How much of that may come at once: all of a mesh of 100,000 members, twice.
const AT_ONCE: Duration = Duration::from_secs(64);

/// Counts answers.
#[derive(Debug)]
pub(super) struct Answers {
    all: Arc<Semaphore>,
    by_source: Mutex<HashMap<Source, Arc<Semaphore>>>,
    by_member: Mutex<HashMap<MemberId, Told>>,
    /// How long one waits for its turn.
    patience: Duration,
}

/// What one member has.
#[derive(Debug)]
struct Told {
    unread: Arc<Semaphore>,
    /// Until when telling it what it was told takes at [`RATE`].
    until: Instant,
}

/// Room for one answer, which is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Room([OwnedSemaphorePermit; 3]);

impl Answers {
    pub fn new() -> Answers {
        Answers {
            all: Arc::new(Semaphore::new(OF_ALL)),
            by_source: Mutex::default(),
            by_member: Mutex::default(),
            patience: PATIENCE,
        }
    }

    /// Room for an answer of any length; `None` if the member has too much unread or was told too much, or if it had to be waited for too
    /// long.
    pub async fn room(&self, member: MemberId, from: IpAddr) -> Option<Room> {
        let now = Instant::now();
        let own = {
            let mut all = self
                .by_member
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let told = all.entry(member).or_insert_with(|| Told {
                unread: Arc::new(Semaphore::new(OF_MEMBER)),
                until: now,
            });
            if told.until > now + AT_ONCE {
                return None;
            }
            Arc::clone(&told.unread)
        };
        let source = {
            let mut all = self
                .by_source
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let new = || Arc::new(Semaphore::new(OF_SOURCE));
            Arc::clone(all.entry(Source::of(from)).or_insert_with(new))
        };
        let room = async {
            let own = own.acquire_many_owned(LONGEST).await.ok()?;
            let source = source.acquire_many_owned(LONGEST).await.ok()?;
            let all = Arc::clone(&self.all).acquire_many_owned(LONGEST);
            Some(Room([own, source, all.await.ok()?]))
        };
        timeout(self.patience, room).await.ok()?
    }

    /// Counts what a member is told: bytes, or the rows that were looked at for them, whichever is more.
    pub fn count(&self, member: MemberId, bytes: usize, rows: usize) {
        let bytes = bytes.max(rows.saturating_mul(ROW));
        let mut all = self
            .by_member
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(told) = all.get_mut(&member) {
            let time = Duration::from_secs_f64(bytes as f64 / RATE as f64);
            told.until = told.until.max(Instant::now()) + time;
        }
    }

    /// Whether nobody has anything unread.
    #[cfg(test)]
    pub fn is_free(&self) -> bool {
        self.all.available_permits() == OF_ALL
    }

    /// Forgets members and sources that have nothing unread, and their whole share again.
    pub fn sweep(&self) {
        let now = Instant::now();
        let mut members = self
            .by_member
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        members.retain(|_, told| Arc::strong_count(&told.unread) > 1 || told.until > now);
        members.shrink_to_fit();
        let mut sources = self
            .by_source
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        sources.retain(|_, source| Arc::strong_count(source) > 1);
        sources.shrink_to_fit();
    }
}

impl Room {
    /// Gives back what an answer of so many bytes does not take.
    pub fn shrink(&mut self, bytes: usize) {
        let units = bytes.div_ceil(UNIT);
        for permit in &mut self.0 {
            drop(permit.split(permit.num_permits().saturating_sub(units)));
        }
    }
}

/// An answer that keeps `held` until the last of it is handed over, or nobody reads it any more.
pub(super) fn body<T: Send + 'static>(answer: Box<[u8]>, held: T) -> Body {
    let pieces = stream::unfold((answer, 0, held), |(answer, at, held)| async move {
        let rest = answer.get(at..).filter(|rest| !rest.is_empty())?;
        let piece = Bytes::copy_from_slice(&rest[..rest.len().min(PIECE)]);
        let at = at + piece.len();
        Some((Ok::<_, std::convert::Infallible>(piece), (answer, at, held)))
    });
    Body::from_stream(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    #[tokio::test]
    async fn a_member_has_three_long_answers_unread_or_many_short_ones() {
        let mut answers = Answers::new();
        answers.patience = Duration::from_millis(50);
        let member = MemberId(1);
        let mut long = Vec::new();
        for _ in 0..3 {
            long.push(answers.room(member, from(1)).await.expect("room"));
        }
        assert!(answers.room(member, from(1)).await.is_none());
        assert!(answers.room(MemberId(2), from(1)).await.is_some());
        long.truncate(1);
        let mut short = Vec::new();
        for _ in 0..8 {
            let mut room = answers.room(member, from(1)).await.expect("room");
            room.shrink(1000);
            short.push(room);
            // What is unread is not forgotten.
            answers.sweep();
        }
    }

    #[tokio::test]
    async fn the_members_of_a_source_wait_for_each_other_and_for_nobody_else() {
        let mut answers = Answers::new();
        answers.patience = Duration::from_millis(50);
        let mut unread = Vec::new();
        for n in 0..8 {
            unread.push(answers.room(MemberId(n), from(1)).await.expect("room"));
        }
        assert!(
            answers.room(MemberId(8), from(1)).await.is_none(),
            "in time"
        );
        assert!(answers.room(MemberId(9), from(2)).await.is_some());
        answers.patience = PATIENCE;
        let (ninth, ()) = tokio::join!(answers.room(MemberId(8), from(1)), async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            unread.pop();
        });
        assert!(ninth.is_some());
    }

    #[tokio::test]
    async fn who_is_told_too_much_is_told_no_more_for_a_while() {
        let answers = Answers::new();
        let member = MemberId(1);
        for _ in 0..9 {
            drop(answers.room(member, from(1)).await.expect("room"));
            answers.count(member, MAX_ANSWER, 0);
            answers.sweep();
        }
        assert!(answers.room(member, from(1)).await.is_none());
        assert!(answers.room(MemberId(2), from(1)).await.is_some());
    }
}
