//! The latency that an application sees: small datagrams at a steady pace, as of a call or a game,
//! which the far application sends back. Each is sent at its time, whether or not earlier datagrams
//! have been answered.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::time::Instant;

use seikan_ui::{Interrupt, Stop};

use crate::error::{Doing, LoadError, Result};
use crate::latency::{LatencyOptions, LatencyReport};
use crate::{Ends, IO_TIMEOUT, is_timeout, join};

/// Payload: 20 ms of G.711 (RFC 3551, section 4.5.14) behind the header of RTP (RFC 3550, section
/// 5.1).
const PAYLOAD: usize = 160 + 12;
/// Bytes of the sequence number, which the payload begins with.
const NUMBER: usize = 4;

/// Measures round trips of datagrams from the client's application to the server's and back.
///
/// # Errors
/// [`LoadError::Interrupted`]; sockets that cannot be opened.
pub fn paced(
    ends: &Ends<'_>,
    options: &LatencyOptions,
    interrupt: &Interrupt,
) -> Result<LatencyReport> {
    let [far, near] = ends.datagrams()?;
    let stop = Interrupt::new();
    std::thread::scope(|scope| {
        let answering = scope.spawn(|| answer(&far, &stop));
        let times = {
            let _stop = Stop(&stop);
            round_trips(&near, options, interrupt)
        };
        join(answering)?;
        times
    })
}

/// Echoes received datagrams until `stop` is set, cut to the length that [`round_trips`] uses. A
/// connected socket receives only datagrams of its other end.
pub fn answer(socket: &UdpSocket, stop: &Interrupt) {
    let mut datagram = [0; PAYLOAD];
    while !stop.is_raised() {
        // The error is the time-out, or reports an earlier answer. A lost answer is counted by the
        // sender.
        if let Ok((length, from)) = socket.recv_from(&mut datagram) {
            let _ = socket.send_to(&datagram[..length], from);
        }
    }
}

/// Measures round trips over a connected socket whose other end [`answer`]s.
///
/// # Errors
/// [`LoadError::Interrupted`]; the socket fails.
pub fn round_trips(
    socket: &UdpSocket,
    options: &LatencyOptions,
    interrupt: &Interrupt,
) -> Result<LatencyReport> {
    let start = Instant::now();
    let mut sent: Vec<Instant> = Vec::new();
    let mut times = Vec::new();
    let mut answered: Vec<bool> = Vec::new();
    loop {
        let next = options.interval * sent.len() as u32;
        let over = sent.len() as u32 >= options.count
            || options.within.is_some_and(|time| start.elapsed() > time);
        let until = match (over, sent.last()) {
            (true, Some(last)) => *last + options.timeout,
            (true, None) => return Ok(LatencyReport::of(0, times)),
            (false, _) => start + next,
        };
        receive_until(socket, until, interrupt, &mut |number, at| {
            let Some(started_at) = sent.get(number).filter(|_| !answered[number]) else {
                return;
            };
            let took = at.duration_since(*started_at);
            answered[number] = true;
            if took <= options.timeout {
                times.push(took.as_secs_f64() * 1e6);
            }
        })?;
        if over {
            return Ok(LatencyReport::of(sent.len() as u32, times));
        }
        let mut datagram = [0x55; PAYLOAD];
        datagram[..NUMBER].copy_from_slice(&(sent.len() as u32).to_be_bytes());
        sent.push(Instant::now());
        answered.push(false);
        // A datagram that the socket refuses counts as lost.
        let _ = socket.send(&datagram);
    }
}

/// Reports every answer that arrives before `until`: its number, and its time of arrival.
fn receive_until(
    socket: &UdpSocket,
    until: Instant,
    interrupt: &Interrupt,
    come: &mut dyn FnMut(usize, Instant),
) -> Result<()> {
    let mut datagram = [0; PAYLOAD];
    loop {
        interrupt.check()?;
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        socket
            .set_read_timeout(Some(left.min(IO_TIMEOUT)))
            .doing("set a read time-out")?;
        match socket.recv(&mut datagram) {
            Ok(PAYLOAD) => {
                let number = datagram
                    .first_chunk()
                    .copied()
                    .map_or(0, u32::from_be_bytes);
                come(number as usize, Instant::now());
            }
            // A foreign datagram: its length differs.
            Ok(_) => {}
            Err(e) if is_timeout(&e) => {}
            // An ICMP error about an earlier datagram.
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => {}
            Err(e) => return Err(LoadError::io("receive an echoed datagram")(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn pair() -> (UdpSocket, UdpSocket) {
        let [a, b] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        a.connect(b.local_addr().unwrap()).unwrap();
        (a, b)
    }

    fn options(count: u32) -> LatencyOptions {
        LatencyOptions {
            count,
            interval: Duration::from_millis(2),
            timeout: Duration::from_millis(500),
            within: None,
        }
    }

    #[test]
    fn an_answer_counts_once_and_a_missing_one_is_lost() {
        let (near, far) = pair();
        let result = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut datagram = [0; PAYLOAD];
                for number in 0..10 {
                    let (length, from) = far.recv_from(&mut datagram).unwrap();
                    // Echoes every second datagram, and that twice, with an invalid short one.
                    if number % 2 == 0 {
                        far.send_to(&datagram[..length], from).unwrap();
                        far.send_to(&datagram[..length], from).unwrap();
                        far.send_to(&datagram[..NUMBER], from).unwrap();
                    }
                }
            });
            round_trips(&near, &options(10), &Interrupt::new()).unwrap()
        });
        assert_eq!((result.sent, result.received), (10, 5));
    }

    #[test]
    fn an_answer_that_waits_does_not_hold_up_the_pace() {
        let (near, _far) = pair();
        let begin = Instant::now();
        let result = round_trips(&near, &options(20), &Interrupt::new()).unwrap();
        assert_eq!((result.sent, result.received), (20, 0));
        // This takes 19 intervals and one timeout; one request at a time would take 20 timeouts.
        assert!(begin.elapsed() < Duration::from_secs(5), "{begin:?}");
    }
}
