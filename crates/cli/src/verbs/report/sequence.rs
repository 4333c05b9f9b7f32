//! TCP time-sequence graph of the main connection, from the kernel's statistics at every sample.

use seikan_diagnose::Evidence;
use seikan_observe::path::SocketFacts;
use seikan_observe::{Subject, metric};
use seikan_ui::axis::{Frame, Scale, format_number};
use seikan_ui::palette::{BAD, KINDS, OWN, SECOND};
use seikan_ui::svg::Svg;

use super::trace::seconds;
use super::{Drawing, Scene};

/// Ratio above which the window is not drawn, because it would flatten the rest.
const FAR: f64 = 4.0;

/// Statistics of a connection at one sample, in bytes since it began.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Reading {
    at: f64,
    /// Bytes sent, each byte counted once.
    sent: f64,
    acknowledged: f64,
    /// End of the receiver's window.
    window: Option<f64>,
    /// The congestion window.
    congestion: Option<f64>,
    /// Retransmitted segments since the previous reading.
    retransmitted: f64,
}

/// Draws the picture.
pub fn draw(scene: &Scene<'_>) -> Result<Drawing, String> {
    let evidence = &scene.recording.evidence;
    let flow = evidence
        .main_flow()
        .ok_or("no TCP connection of this host sent through the tunnel (record at the sender)")?;
    let readings = readings(evidence, flow);
    let [first, .., last] = &readings[..] else {
        return Err("the connection did not last long enough".into());
    };
    let x = Scale::new(0.0, seconds(evidence).last().copied().unwrap_or(1.0));
    let mut svg = Svg::default();
    let base = first.acknowledged;
    let megabytes = |bytes: f64| (bytes - base) / 1e6;
    let has_far_window = far_window(&readings);
    let line = |of: &dyn Fn(&Reading) -> Option<f64>| -> Vec<(f64, f64)> {
        let seen = readings.iter();
        seen.filter_map(|reading| Some((reading.at, of(reading)?)))
            .collect()
    };
    let tops = readings.iter().map(|reading| {
        let window = reading.window.filter(|_| has_far_window.is_none());
        reading.sent.max(window.unwrap_or(0.0))
    });
    let top = megabytes(tops.fold(0.0, f64::max));
    let frame = Frame::wide(60.0, 300.0, x, Scale::from_zero(top, 5));
    legend(&mut svg, 18.0, has_far_window, &readings);
    frame.title(&mut svg, "sequence numbers since the recording began", "MB");
    frame.y_axis(&mut svg, 5);
    if has_far_window.is_none() {
        let window = line(&|reading| reading.window.map(megabytes));
        svg.path(&frame.positions(&window), KINDS[2], 1.6, "");
    }
    let acknowledged = line(&|reading| Some(megabytes(reading.acknowledged)));
    svg.path(&frame.positions(&acknowledged), SECOND, 1.8, "");
    let sent = line(&|reading| Some(megabytes(reading.sent)));
    svg.path(&frame.positions(&sent), OWN, 1.8, "");
    marks(&mut svg, &frame, &readings, &|reading| {
        megabytes(reading.sent)
    });
    frame.x_axis(&mut svg, None);

    let ahead = |of: Option<f64>, reading: &Reading| of.map(|of| (of - reading.acknowledged) / 1e3);
    let in_flight = line(&|reading| ahead(Some(reading.sent), reading));
    let congestion = line(&|reading| reading.congestion.map(|bytes| bytes / 1e3));
    let window = match has_far_window {
        Some(_) => Vec::new(),
        None => line(&|reading| ahead(reading.window, reading)),
    };
    let all = in_flight.iter().chain(&congestion).chain(&window);
    let max = all.map(|(_, value)| *value).fold(0.0, f64::max);
    let lower = Frame::wide(frame.bottom + 50.0, 180.0, x, Scale::from_zero(max, 4));
    lower.title(&mut svg, "beyond the acknowledged bytes", "kB");
    lower.y_axis(&mut svg, 4);
    svg.path(&lower.positions(&window), KINDS[2], 1.6, "");
    svg.path(&lower.positions(&congestion), KINDS[0], 1.6, "");
    svg.path(&lower.positions(&in_flight), OWN, 1.8, "");
    marks(&mut svg, &lower, &readings, &|reading| {
        (reading.sent - reading.acknowledged) / 1e3
    });
    lower.x_axis(&mut svg, Some("seconds since the recording began"));
    let retransmitted: f64 = readings.iter().map(|reading| reading.retransmitted).sum();
    let remote = flow.remote.map(|remote| format!(" to {remote}"));
    let acknowledged = (last.acknowledged - first.acknowledged) / 1e6;
    Ok(Drawing {
        svg: svg.finish(lower.bottom + 46.0, "TCP time-sequence graph"),
        caption: format!(
            "The receiver of the connection{} acknowledged {} MB; {} segments were retransmitted (marked). Above, the slope is the throughput. \
             Below, a sender at the advertised window is limited by the receiver; one at its congestion window is limited by loss or \
             delay. Lines are readings of tcp_info; sent bytes count once.",
            remote.unwrap_or_default(),
            format_number(acknowledged),
            format_number(retransmitted)
        ),
    })
}

fn legend(svg: &mut Svg, y: f64, far: Option<f64>, readings: &[Reading]) {
    let far = far.map(|bytes| {
        format!(
            "advertised window ({} kB, not drawn)",
            format_number(bytes / 1e3)
        )
    });
    let mut entries = vec![(OWN, "sent"), (SECOND, "acknowledged")];
    if readings.iter().any(|reading| reading.window.is_some()) {
        entries.push((KINDS[2], far.as_deref().unwrap_or("advertised window")));
    }
    entries.push((KINDS[0], "congestion window"));
    entries.push((BAD, "retransmitted"));
    svg.legend((0.0, y), &entries);
}

fn marks(svg: &mut Svg, frame: &Frame, readings: &[Reading], y: &dyn Fn(&Reading) -> f64) {
    for reading in readings
        .iter()
        .filter(|reading| reading.retransmitted > 0.0)
    {
        let label = format!(
            "{:.1} s: {} segments retransmitted",
            reading.at,
            format_number(reading.retransmitted)
        );
        svg.dot(frame.at(reading.at, y(reading)), 2.2, BAD, &label);
    }
}

/// Returns the median of the advertised window if it is too large to be drawn.
fn far_window(readings: &[Reading]) -> Option<f64> {
    let open = readings.iter();
    let open = open.filter_map(|reading| Some(reading.window? - reading.acknowledged));
    let mut open: Vec<f64> = open.collect();
    open.sort_by(f64::total_cmp);
    let most = readings.iter().map(|reading| {
        let in_flight = reading.sent - reading.acknowledged;
        in_flight.max(reading.congestion.unwrap_or(0.0))
    });
    let most = most.fold(0.0, f64::max);
    let is_far = open.first().is_some_and(|least| *least > FAR * most);
    is_far.then(|| open[open.len() / 2])
}

/// Returns the readings of a connection from samples with sufficient values.
fn readings(evidence: &Evidence, flow: &SocketFacts) -> Vec<Reading> {
    let times = seconds(evidence);
    let of = |name: &str| {
        let column = evidence.column(&Subject::Tcp(flow.inode), name);
        move |index: u32| {
            let points = &column?.points;
            let found = points.binary_search_by_key(&index, |(index, _)| *index);
            Some(points[found.ok()?].1 as f64)
        }
    };
    let (sent, acknowledged) = (of(metric::TCP_BYTES_SENT), of(metric::TCP_BYTES_ACKED));
    let (retransmitted, mss) = (of(metric::TCP_RETRANS), of(metric::TCP_MSS));
    let (window, congestion) = (of(metric::TCP_SND_WND), of(metric::TCP_CWND));
    let in_flight = of(metric::TCP_UNACKED);
    let mut before = None;
    let mut all = Vec::new();
    for (index, at) in times.into_iter().enumerate() {
        let index = index as u32;
        let (Some(total), Some(acknowledged)) = (sent(index), acknowledged(index)) else {
            continue;
        };
        let size = mss(index).unwrap_or(0.0);
        let retransmitted = retransmitted(index).unwrap_or(0.0);
        // Retransmitted segments may be short. If the estimate is below the acknowledged bytes, the
        // bytes in flight are added to those instead.
        let once = total - retransmitted * size;
        let sent = if once >= acknowledged {
            once
        } else {
            acknowledged + in_flight(index).unwrap_or(0.0) * size
        };
        let congestion = congestion(index).map(|segments| segments * size);
        all.push(Reading {
            at,
            sent,
            acknowledged,
            window: window(index)
                .filter(|bytes| *bytes > 0.0)
                .map(|bytes| acknowledged + bytes),
            congestion: congestion.filter(|bytes| *bytes > 0.0),
            retransmitted: before.map_or(0.0, |before| f64::max(retransmitted - before, 0.0)),
        });
        before = Some(retransmitted);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::report::testing::*;

    fn connection() -> Evidence {
        let mut evidence = sampled(&[0.0, 1.0]);
        flow(&mut evidence, 5);
        let tcp = || Subject::Tcp(5);
        count(
            &mut evidence,
            tcp(),
            metric::TCP_BYTES_SENT,
            &[50_000, 100_000],
        );
        count(
            &mut evidence,
            tcp(),
            metric::TCP_BYTES_ACKED,
            &[40_000, 70_000],
        );
        count(&mut evidence, tcp(), metric::TCP_RETRANS, &[2, 12]);
        measure(&mut evidence, tcp(), metric::TCP_MSS, &[1000, 1000]);
        measure(&mut evidence, tcp(), metric::TCP_CWND, &[20, 30]);
        measure(&mut evidence, tcp(), metric::TCP_SND_WND, &[65_536, 65_536]);
        evidence
    }

    #[test]
    fn sent_bytes_count_once() {
        let evidence = connection();
        let readings = readings(&evidence, &evidence.map.flows[0]);
        let reading = |at, sent, acknowledged, congestion, retransmitted| Reading {
            at,
            sent,
            acknowledged,
            window: Some(acknowledged + 65_536.0),
            congestion: Some(congestion),
            retransmitted,
        };
        let expected = [
            reading(0.0, 48_000.0, 40_000.0, 20_000.0, 0.0),
            reading(1.0, 88_000.0, 70_000.0, 30_000.0, 10.0),
        ];
        assert_eq!(readings, expected);
    }

    #[test]
    fn sent_bytes_are_never_behind_the_acknowledged_ones() {
        let mut evidence = connection();
        count(
            &mut evidence,
            Subject::Tcp(5),
            metric::TCP_RETRANS,
            &[50, 60],
        );
        measure(&mut evidence, Subject::Tcp(5), metric::TCP_UNACKED, &[3, 4]);
        let readings = readings(&evidence, &evidence.map.flows[0]);
        let sent: Vec<_> = readings.iter().map(|reading| reading.sent).collect();
        assert_eq!(sent, [43_000.0, 74_000.0]);
    }

    #[test]
    fn a_far_window_is_in_the_legend_only() {
        let mut evidence = connection();
        let flow = evidence.map.flows[0].clone();
        assert_eq!(far_window(&readings(&evidence, &flow)), None);
        let wide = [6_000_000, 6_000_000];
        measure(&mut evidence, Subject::Tcp(5), metric::TCP_SND_WND, &wide);
        assert_eq!(far_window(&readings(&evidence, &flow)), Some(6e6));
    }
}
