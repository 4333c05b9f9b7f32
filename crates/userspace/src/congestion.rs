//! The congestion window: slow start that ends before the queue of the path is full (HyStart++, RFC 9406), then CUBIC (RFC
//! 9438).

use std::time::{Duration, Instant};

/// CUBIC's multiplicative decrease and scaling constant.
const BETA: f64 = 0.7;
const C: f64 = 0.4;
/// Growth of the Reno-friendly window, in segments per round trip (RFC 9438 section 4.3).
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);
/// Initial window in segments (RFC 6928).
const INITIAL: f64 = 10.0;
/// Bounds of the increase of the round-trip time that ends slow start, and the number of samples in
/// a round that this needs. RFC 9406 uses 8 samples; super-packets cause fewer acknowledgements.
const DELAY_MIN: Duration = Duration::from_millis(4);
const DELAY_MAX: Duration = Duration::from_millis(16);
const SAMPLES: u32 = 3;
/// Conservative slow start: divisor of the growth, and number of rounds.
const CSS_DIVISOR: f64 = 4.0;
const CSS_ROUNDS: u32 = 5;

/// The congestion window of a connection, in bytes.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    mss: f64,
    bytes: f64,
    threshold: f64,
    /// Window before the last reduction in bytes, and CUBIC's time in seconds to grow back to it.
    max: f64,
    k: f64,
    epoch: Option<Instant>,
    /// Window that a Reno flow would have, in bytes.
    reno: f64,
    prior: f64,
    round: Round,
}

/// The round-trip times of the current round of slow start, and of the previous round.
#[derive(Clone, Debug, Default)]
struct Round {
    least: Option<Duration>,
    samples: u32,
    last: Option<Duration>,
    conservative: Option<Conservative>,
}

/// State of conservative slow start, after the delay has grown.
#[derive(Clone, Copy, Debug)]
struct Conservative {
    /// A later round-trip time below this one means that the delay had grown only by chance.
    baseline: Duration,
    /// Number of remaining rounds.
    rounds: u32,
}

impl Window {
    pub fn new(mss: u16) -> Window {
        let mss = f64::from(mss);
        Window {
            mss,
            bytes: INITIAL * mss,
            threshold: f64::INFINITY,
            max: 0.0,
            k: 0.0,
            epoch: None,
            reno: 0.0,
            prior: 0.0,
            round: Round::default(),
        }
    }

    /// Returns the number of bytes that may be in flight.
    pub fn bytes(&self) -> usize {
        self.bytes as usize
    }

    pub fn is_slow_start(&self) -> bool {
        self.bytes < self.threshold
    }

    /// Grows the window after an acknowledgement of `acked` bytes. `limited`: the window has
    /// limited the sender.
    pub fn on_ack(&mut self, acked: usize, limited: bool, rtt: Duration, now: Instant) {
        if !limited {
            // CUBIC's clock stands still while the sender has nothing to send.
            self.epoch = None;
        } else if self.is_slow_start() {
            let divisor = self.round.conservative.map_or(1.0, |_| CSS_DIVISOR);
            self.bytes += acked as f64 / divisor;
        } else {
            self.avoid(acked as f64, rtt, now);
        }
    }

    fn avoid(&mut self, acked: f64, rtt: Duration, now: Instant) {
        let c = C * self.mss;
        let epoch = *self.epoch.get_or_insert_with(|| {
            self.max = self.max.max(self.bytes);
            self.k = ((self.max - self.bytes) / c).cbrt();
            self.reno = self.bytes;
            now
        });
        let t = now.saturating_duration_since(epoch).as_secs_f64();
        let cubic = |t: f64| c * (t - self.k).powi(3) + self.max;
        let alpha = if self.reno >= self.prior { 1.0 } else { ALPHA };
        self.reno += alpha * self.mss * acked / self.bytes;
        let target = cubic(t + rtt.as_secs_f64()).clamp(self.bytes, 1.5 * self.bytes);
        if cubic(t) < self.reno {
            self.bytes = self.bytes.max(self.reno);
        } else {
            self.bytes += (target - self.bytes) * acked / self.bytes;
        }
    }

    /// Records a round-trip time. It matters only in slow start.
    pub fn on_sample(&mut self, rtt: Duration) {
        if !self.is_slow_start() {
            return;
        }
        let round = &mut self.round;
        round.least = Some(round.least.map_or(rtt, |least| least.min(rtt)));
        round.samples += 1;
        let Some(least) = round.least.filter(|_| round.samples >= SAMPLES) else {
            return;
        };
        match (round.conservative, round.last) {
            (Some(Conservative { baseline, .. }), _) if least < baseline => {
                round.conservative = None;
            }
            (None, Some(last)) if least >= last + (last / 8).clamp(DELAY_MIN, DELAY_MAX) => {
                round.conservative = Some(Conservative {
                    baseline: least,
                    rounds: CSS_ROUNDS,
                });
            }
            _ => {}
        }
    }

    /// Starts a new round: everything that was in flight when the last round started has been
    /// acknowledged.
    pub fn on_round(&mut self) {
        let round = &mut self.round;
        let least = round.least.take().filter(|_| round.samples >= SAMPLES);
        round.last = least;
        round.samples = 0;
        if let Some(conservative) = &mut round.conservative {
            conservative.rounds -= 1;
            if conservative.rounds == 0 {
                round.conservative = None;
                self.threshold = self.bytes;
            }
        }
    }

    /// Reduces the window after a loss.
    pub fn on_loss(&mut self) {
        self.prior = self.bytes;
        // Fast convergence (RFC 9438 section 4.7).
        self.max = if self.bytes < self.max {
            self.bytes * (1.0 + BETA) / 2.0
        } else {
            self.bytes
        };
        self.threshold = (self.bytes * BETA).max(2.0 * self.mss);
        self.bytes = self.threshold;
        self.epoch = None;
    }

    /// Reduces the window to one segment after a retransmission timeout. `first`: this is the first
    /// timeout for this segment (RFC 5681 section 3.1).
    pub fn on_timeout(&mut self, first: bool) {
        if first {
            self.on_loss();
        }
        self.bytes = self.mss;
    }

    /// Restarts after a pause in which nothing was sent (RFC 5681 section 4.1).
    pub fn on_idle(&mut self) {
        if self.threshold.is_finite() {
            self.threshold = self.threshold.max(0.75 * self.bytes);
        }
        self.bytes = self.bytes.min(INITIAL * self.mss);
        self.epoch = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: usize = 1000;
    const RTT: Duration = Duration::from_millis(50);

    /// Plays round trips in which everything in the window is sent and acknowledged.
    fn play(window: &mut Window, rounds: u32, rtt: Duration, now: &mut Instant) {
        for _ in 0..rounds {
            let flight = window.bytes();
            for _ in 0..flight / MSS {
                window.on_sample(rtt);
                window.on_ack(MSS, true, rtt, *now);
            }
            window.on_round();
            *now += rtt;
        }
    }

    #[test]
    fn slow_start_doubles_until_the_delay_grows() {
        let mut window = Window::new(MSS as u16);
        let mut now = Instant::now();
        play(&mut window, 3, RTT, &mut now);
        assert_eq!(window.bytes(), 80 * MSS);
        // RFC 9406: for five rounds it grows by a quarter at most, then not exponentially.
        play(&mut window, 5, RTT + Duration::from_millis(8), &mut now);
        assert!(!window.is_slow_start());
        let (least, most) = (1.15f64.powi(5), 1.25f64.powi(5) + 1.0);
        let grown = window.bytes / (80 * MSS) as f64;
        assert!((least..most).contains(&grown), "{grown}");
    }

    /// RFC 9438, section 4.2: K seconds after the loss, the window has its former size again, with
    /// K = cbrt(W_max (1 - beta) / C).
    #[test]
    fn cubic_is_back_after_k_seconds() {
        let mut window = Window::new(MSS as u16);
        window.bytes = 1000.0 * MSS as f64;
        let mut now = Instant::now();
        window.on_loss();
        assert_eq!(window.bytes(), 700 * MSS);
        let k = (1000.0f64 * 0.3 / 0.4).cbrt();
        play(&mut window, (k / RTT.as_secs_f64()) as u32, RTT, &mut now);
        let bytes = window.bytes();
        assert!((985 * MSS..=1015 * MSS).contains(&bytes), "{bytes}");
    }

    /// Mathis et al.: about 1.2 / sqrt(p) segments; one loss in 1000 packets.
    #[test]
    fn regular_losses_leave_at_least_renos_window() {
        let mut window = Window::new(MSS as u16);
        window.on_loss();
        let (mut now, mut sent, mut sum, mut rounds) = (Instant::now(), 0, 0, 0);
        for round in 0..4000 {
            let before = sent / 1000;
            sent += window.bytes() / MSS;
            play(&mut window, 1, RTT, &mut now);
            if sent / 1000 > before {
                window.on_loss();
            }
            if round >= 1000 {
                (sum, rounds) = (sum + window.bytes() / MSS, rounds + 1);
            }
        }
        let mean = sum / rounds;
        assert!((33..50).contains(&mean), "{mean}");
    }

    #[test]
    fn a_timeout_leaves_a_segment_and_a_pause_the_initial_window() {
        let mut window = Window::new(MSS as u16);
        window.bytes = 100.0 * MSS as f64;
        window.on_timeout(true);
        assert_eq!((window.bytes(), window.threshold as usize), (MSS, 70 * MSS));
        window.on_timeout(false);
        assert_eq!(window.threshold as usize, 70 * MSS);
        window.bytes = 90.0 * MSS as f64;
        window.on_idle();
        assert_eq!(window.bytes(), 10 * MSS);
    }

    #[test]
    fn a_sender_with_little_to_send_does_not_grow() {
        let mut window = Window::new(MSS as u16);
        for _ in 0..100 {
            window.on_ack(MSS, false, RTT, Instant::now());
        }
        assert_eq!(window.bytes(), 10 * MSS);
    }
}
