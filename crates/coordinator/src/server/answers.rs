//! Limits of answers to members: memory of unread answers, and the work of making them.
//!
//! An answer may have 8 MiB, and its client may not read it. Each answer counts against its member,
//! its source, and the total, from before it is made until the connection has taken all of it. When
//! one of these limits is reached, a member still has a share of its own ([`SHARE`]): its answers
//! then come in short parts, but other members at the same address that read nothing cannot block
//! them. All shares together have a limit, too, for which answers wait in turn. The connection's own
//! buffers stay small. Each member also has a long-term rate of bytes. Rows that were examined and
//! not sent count, too.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use futures_util::stream;
use seikan_proto::mesh::MAX_ANSWER;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::limit::BySource;
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
/// Maximum bytes of unread answers of one member that are allowed even if the other limits are
/// reached. The longest policy fits, and some hundred members beside it.
const SHARE: usize = 512 << 10;
/// Maximum units of such answers of all members: a thousand that are not read at all.
const SHARED_UNITS: usize = 512 << 10;
/// Maximum time for which an answer waits until the member has read its earlier answers.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Bytes that the connection takes at a time.
const CHUNK: usize = 16 << 10;
/// Long-term rate of one member, in bytes per second. In a mesh of 1,000 members that changes 100
/// times a second, a member receives a thirtieth of this rate.
const RATE: usize = 1 << 20;
/// Bytes that an examined row (a member or a removal) counts as.
const ROW_BYTES: usize = 64;
/// Burst of one member, as a time at [`RATE`]: enough for all members of a mesh of 100,000, twice.
const BURST: Duration = Duration::from_secs(64);

/// Counters of answers.
#[derive(Debug)]
pub(super) struct Answers {
    all: Arc<Semaphore>,
    /// Answers within [`SHARE`] of all members.
    shared: Arc<Semaphore>,
    by_source: BySource,
    by_member: Mutex<HashMap<MemberId, MemberUsage>>,
    /// [`MAX_WAIT`], or a shorter time in tests.
    max_wait: Duration,
}

/// Counters of one member.
#[derive(Debug)]
struct MemberUsage {
    /// Answers within the limits of source and total.
    unread: Arc<Semaphore>,
    /// Answers within [`SHARE`].
    unread_share: Arc<Semaphore>,
    /// Time at which the answers so far have been paid for at [`RATE`].
    paid_until: Instant,
}

/// Memory for one answer, released on drop.
#[derive(Debug)]
pub(super) struct Reservation {
    /// Maximum bytes of the answer.
    pub bytes: usize,
    permits: Vec<OwnedSemaphorePermit>,
}

impl Answers {
    pub fn new() -> Answers {
        Answers {
            all: Arc::new(Semaphore::new(TOTAL_UNITS)),
            shared: Arc::new(Semaphore::new(SHARED_UNITS)),
            by_source: BySource::new(SOURCE_UNITS),
            by_member: Mutex::default(),
            max_wait: MAX_WAIT,
        }
    }

    /// Reserves the longest answer, or a short one if the limits do not allow it. Returns `None` if
    /// the member has exceeded its rate, or if for [`MAX_WAIT`] it has not read its other answers, or
    /// for three times as long a thousand members have not read theirs.
    pub async fn reserve(&self, member: MemberId, from: IpAddr) -> Option<Reservation> {
        let now = Instant::now();
        let (own, share) = {
            let mut all = lock(&self.by_member);
            let usage = all.entry(member).or_insert_with(|| MemberUsage {
                unread: Arc::new(Semaphore::new(MEMBER_UNITS)),
                unread_share: Arc::new(Semaphore::new(SHARE / UNIT)),
                paid_until: now,
            });
            if usage.paid_until > now + BURST {
                return None;
            }
            (Arc::clone(&usage.unread), Arc::clone(&usage.unread_share))
        };
        let limits = [own, self.by_source.of(from), Arc::clone(&self.all)];
        let longest = limits.map(|limit| limit.try_acquire_many_owned(MAX_UNITS).ok());
        if let Some(permits) = longest.into_iter().collect() {
            return Some(Reservation {
                bytes: MAX_ANSWER,
                permits,
            });
        }
        let units = (SHARE / UNIT) as u32;
        let own = timeout(self.max_wait, share.acquire_many_owned(units));
        let own = own.await.ok()?.ok()?;
        // The others' answers are no fault of this member.
        let shared = Arc::clone(&self.shared).acquire_many_owned(units);
        let shared = timeout(3 * self.max_wait, shared).await.ok()?.ok()?;
        Some(Reservation {
            bytes: SHARE,
            permits: vec![own, shared],
        })
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
        let unused = [&self.all, &self.shared].map(|limit| limit.available_permits());
        unused == [TOTAL_UNITS, SHARED_UNITS]
    }

    /// Forgets members that have nothing unread and their full burst.
    pub fn sweep(&self) {
        let now = Instant::now();
        let mut members = lock(&self.by_member);
        members.retain(|_, usage| {
            let unread = [&usage.unread, &usage.unread_share];
            unread.iter().any(|limit| Arc::strong_count(limit) > 1) || usage.paid_until > now
        });
        members.shrink_to_fit();
    }
}

impl Reservation {
    /// Releases the memory that an answer of this many bytes does not need.
    pub fn shrink(&mut self, bytes: usize) {
        let units = bytes.div_ceil(UNIT);
        for permit in &mut self.permits {
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

    /// Reserves memory for the next answer of a member behind an address; returns the maximum bytes
    /// of the answer, or `None` if it is refused.
    async fn reserve(
        answers: &Answers,
        member: i64,
        address: u8,
        unread: &mut Vec<Reservation>,
    ) -> Option<usize> {
        let reservation = answers.reserve(MemberId(member), from(address)).await?;
        let bytes = reservation.bytes;
        unread.push(reservation);
        Some(bytes)
    }

    #[tokio::test]
    async fn a_member_may_have_three_long_answers_unread_and_a_short_one() {
        let mut answers = Answers::new();
        answers.max_wait = Duration::from_millis(50);
        let mut unread = Vec::new();
        for bytes in [MAX_ANSWER, MAX_ANSWER, MAX_ANSWER, SHARE] {
            assert_eq!(reserve(&answers, 1, 1, &mut unread).await, Some(bytes));
        }
        // A sweep keeps members with unread answers.
        answers.sweep();
        assert_eq!(reserve(&answers, 1, 1, &mut unread).await, None);
        let mut others = Vec::new();
        assert_eq!(reserve(&answers, 2, 1, &mut others).await, Some(MAX_ANSWER));
        answers.max_wait = MAX_WAIT;
        let (next, ()) = tokio::join!(answers.reserve(MemberId(1), from(1)), async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            unread.pop();
        });
        assert_eq!(next.expect("a reservation").bytes, SHARE);
    }

    #[tokio::test]
    async fn a_member_may_have_many_short_answers_unread() {
        let answers = Answers::new();
        let mut unread = Vec::new();
        for _ in 0..64 {
            let bytes = reserve(&answers, 1, 1, &mut unread).await;
            assert_eq!(bytes, Some(MAX_ANSWER));
            unread.last_mut().expect("a reservation").shrink(1000);
        }
    }

    #[tokio::test]
    async fn a_member_has_a_share_when_others_behind_its_address_read_nothing() {
        let answers = Answers::new();
        let mut unread = Vec::new();
        // Three members are enough to use up the limit of the source.
        for n in 0..8 {
            let bytes = reserve(&answers, n / 3, 1, &mut unread).await;
            assert_eq!(bytes, Some(MAX_ANSWER));
        }
        for n in 3..15 {
            assert_eq!(reserve(&answers, n, 1, &mut unread).await, Some(SHARE));
        }
        // Members of other sources use up the total.
        for n in 15..39 {
            let address = 1 + (n / 8) as u8;
            let bytes = reserve(&answers, n, address, &mut unread).await;
            assert!(bytes.is_some(), "{n}");
        }
        assert_eq!(reserve(&answers, 40, 9, &mut unread).await, Some(SHARE));
    }

    #[tokio::test]
    async fn unread_answers_of_all_members_are_bounded() {
        let mut answers = Answers::new();
        answers.max_wait = Duration::from_millis(50);
        let mut unread = Vec::new();
        let mut bytes = 0;
        for n in 0..2000 {
            let Some(more) = reserve(&answers, n, (n / 8) as u8, &mut unread).await else {
                break;
            };
            bytes += more;
        }
        assert_eq!(bytes, (256 << 20) + (512 << 20));
        // Any that is read makes room for the next member.
        unread.pop();
        let next = reserve(&answers, 3000, 1, &mut unread).await;
        assert_eq!(next, Some(SHARE));
        // An answer counts as its bytes as soon as they are known.
        unread.last_mut().expect("a reservation").shrink(1024);
        assert_eq!(reserve(&answers, 3001, 1, &mut unread).await, None);
        for reservation in &mut unread {
            reservation.shrink(1024);
        }
        assert!(reserve(&answers, 3001, 1, &mut unread).await.is_some());
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
