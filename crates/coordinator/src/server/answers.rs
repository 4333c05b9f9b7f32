//! Limits of answers to members: memory of unread answers, and the work of making them.
//!
//! An answer may have 8 MiB, and its client may not read it. Each answer counts against its member,
//! its source, and the total, from before it is made until the connection has taken all of it.
//! Further answers wait, and are refused after [`MAX_WAIT`]. The connection's own buffers stay
//! small. Each member also has a long-term rate of bytes. Rows that were examined and not sent
//! count, too.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use futures_util::stream;
use seikan_proto::mesh::MAX_ANSWER;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::limit::Source;
use crate::lock;
use crate::store::MemberId;

/// Unit of the counters, in bytes.
const UNIT: usize = 1024;
/// Units of the longest answer, which are reserved until the answer's length is known.
const MAX_UNITS: u32 = (MAX_ANSWER / UNIT) as u32;
/// Maximum units of one member: three of the longest answers.
const MEMBER_UNITS: usize = 3 * MAX_UNITS as usize;
/// Maximum units of all members of one source.
const SOURCE_UNITS: usize = 8 * MAX_UNITS as usize;
/// Maximum units of all members.
const TOTAL_UNITS: usize = 32 * MAX_UNITS as usize;
/// Maximum time for which an answer waits until the limits allow it.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Bytes that the connection takes at a time.
const CHUNK: usize = 16 << 10;
/// Long-term rate of one member, in bytes per second. In a mesh of 1,000 members that changes 100
/// times a second, a member receives a thirtieth of it.
const RATE: usize = 1 << 20;
/// Bytes that an examined row (a member or a removal) counts as.
const ROW_BYTES: usize = 64;
/// Burst of one member: all members of a mesh of 100,000, twice.
const BURST: Duration = Duration::from_secs(64);

/// Counters of answers.
#[derive(Debug)]
pub(super) struct Answers {
    all: Arc<Semaphore>,
    by_source: Mutex<HashMap<Source, Arc<Semaphore>>>,
    by_member: Mutex<HashMap<MemberId, MemberUsage>>,
    /// See [`MAX_WAIT`].
    max_wait: Duration,
}

/// Counters of one member.
#[derive(Debug)]
struct MemberUsage {
    unread: Arc<Semaphore>,
    /// When the answers so far are paid for at [`RATE`].
    paid_until: Instant,
}

/// Share of the limits for one answer, released on drop.
#[derive(Debug)]
pub(super) struct Reservation([OwnedSemaphorePermit; 3]);

impl Answers {
    pub fn new() -> Answers {
        Answers {
            all: Arc::new(Semaphore::new(TOTAL_UNITS)),
            by_source: Mutex::default(),
            by_member: Mutex::default(),
            max_wait: MAX_WAIT,
        }
    }

    /// Reserves the longest answer. Returns `None` if the member has exceeded its rate, or if too
    /// much is unread for [`MAX_WAIT`].
    pub async fn reserve(&self, member: MemberId, from: IpAddr) -> Option<Reservation> {
        let now = Instant::now();
        let own = {
            let mut all = lock(&self.by_member);
            let usage = all.entry(member).or_insert_with(|| MemberUsage {
                unread: Arc::new(Semaphore::new(MEMBER_UNITS)),
                paid_until: now,
            });
            if usage.paid_until > now + BURST {
                return None;
            }
            Arc::clone(&usage.unread)
        };
        let source = {
            let mut all = lock(&self.by_source);
            let new = || Arc::new(Semaphore::new(SOURCE_UNITS));
            Arc::clone(all.entry(Source::of(from)).or_insert_with(new))
        };
        let reservation = async {
            let own = own.acquire_many_owned(MAX_UNITS).await.ok()?;
            let source = source.acquire_many_owned(MAX_UNITS).await.ok()?;
            let all = Arc::clone(&self.all).acquire_many_owned(MAX_UNITS);
            Some(Reservation([own, source, all.await.ok()?]))
        };
        timeout(self.max_wait, reservation).await.ok()?
    }

    /// Counts an answer: its bytes, or the rows that were examined for it, whichever is more.
    pub fn count(&self, member: MemberId, bytes: usize, rows: usize) {
        let bytes = bytes.max(rows.saturating_mul(ROW_BYTES));
        let mut all = lock(&self.by_member);
        if let Some(usage) = all.get_mut(&member) {
            let time = Duration::from_secs_f64(bytes as f64 / RATE as f64);
            usage.paid_until = usage.paid_until.max(Instant::now()) + time;
        }
    }

    /// Whether no answer is unread.
    #[cfg(test)]
    pub fn is_free(&self) -> bool {
        self.all.available_permits() == TOTAL_UNITS
    }

    /// Forgets members and sources that have nothing unread and their full burst.
    pub fn sweep(&self) {
        let now = Instant::now();
        let mut members = lock(&self.by_member);
        members.retain(|_, usage| Arc::strong_count(&usage.unread) > 1 || usage.paid_until > now);
        members.shrink_to_fit();
        let mut sources = lock(&self.by_source);
        sources.retain(|_, source| Arc::strong_count(source) > 1);
        sources.shrink_to_fit();
    }
}

impl Reservation {
    /// Releases what an answer of this many bytes does not need.
    pub fn shrink(&mut self, bytes: usize) {
        let units = bytes.div_ceil(UNIT);
        for permit in &mut self.0 {
            drop(permit.split(permit.num_permits().saturating_sub(units)));
        }
    }
}

/// Body that keeps `guard` until the connection has taken all of it or is closed.
pub(super) fn body<T: Send + 'static>(answer: Box<[u8]>, guard: T) -> Body {
    let chunks = stream::unfold((answer, 0, guard), |(answer, at, guard)| async move {
        let rest = answer.get(at..).filter(|rest| !rest.is_empty())?;
        let chunk = Bytes::copy_from_slice(&rest[..rest.len().min(CHUNK)]);
        let at = at + chunk.len();
        Some((
            Ok::<_, std::convert::Infallible>(chunk),
            (answer, at, guard),
        ))
    });
    Body::from_stream(chunks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    #[tokio::test]
    async fn a_member_may_have_three_long_or_many_short_answers_unread() {
        let mut answers = Answers::new();
        answers.max_wait = Duration::from_millis(50);
        let member = MemberId(1);
        let mut long = Vec::new();
        for _ in 0..3 {
            long.push(
                answers
                    .reserve(member, from(1))
                    .await
                    .expect("a reservation"),
            );
        }
        assert!(answers.reserve(member, from(1)).await.is_none());
        assert!(answers.reserve(MemberId(2), from(1)).await.is_some());
        long.truncate(1);
        let mut short = Vec::new();
        for _ in 0..8 {
            let mut reservation = answers
                .reserve(member, from(1))
                .await
                .expect("a reservation");
            reservation.shrink(1000);
            short.push(reservation);
            // A sweep keeps members with unread answers.
            answers.sweep();
        }
    }

    #[tokio::test]
    async fn members_of_one_source_share_a_limit() {
        let mut answers = Answers::new();
        answers.max_wait = Duration::from_millis(50);
        let mut unread = Vec::new();
        for n in 0..8 {
            unread.push(
                answers
                    .reserve(MemberId(n), from(1))
                    .await
                    .expect("a reservation"),
            );
        }
        assert!(
            answers.reserve(MemberId(8), from(1)).await.is_none(),
            "the source has no units left"
        );
        assert!(answers.reserve(MemberId(9), from(2)).await.is_some());
        answers.max_wait = MAX_WAIT;
        let (ninth, ()) = tokio::join!(answers.reserve(MemberId(8), from(1)), async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            unread.pop();
        });
        assert!(ninth.is_some());
    }

    #[tokio::test]
    async fn a_member_that_exceeds_its_rate_is_refused() {
        let answers = Answers::new();
        let member = MemberId(1);
        for _ in 0..9 {
            drop(
                answers
                    .reserve(member, from(1))
                    .await
                    .expect("a reservation"),
            );
            answers.count(member, MAX_ANSWER, 0);
            answers.sweep();
        }
        assert!(answers.reserve(member, from(1)).await.is_none());
        assert!(answers.reserve(MemberId(2), from(1)).await.is_some());
    }
}
