//! Packets of a connection that several processors receive.

use std::time::Duration;

use seikan_lab::site::Link;
use seikan_lab::tunnel::{self, Changes};
use seikan_load::counters::segments_out_of_order;
use seikan_load::{LiveOptions, LoadError, live};
use seikan_sys::ethtool::Feature;
use seikan_sys::softirq::mask;
use seikan_ui::Interrupt;

/// Segments of a connection through the tunnel that arrive out of order while packets are steered
/// to both processors, and all segments that arrive.
fn late(name: &str) -> [u64; 2] {
    let tunnel = tunnel::named(name, &Changes::default()).expect("a tunnel");
    let interrupt = Interrupt::new();
    let running = tunnel::start(&tunnel, Link::default(), &interrupt).expect("a tunnel");
    let host = &running.hosts.b;
    host.set_features(&host.device, &[(Feature::Gro, false)])
        .expect("no receive offload");
    host.set_attribute(
        &format!("{}/queues/rx-0/rps_cpus", host.device),
        &mask(&[0, 1]),
    )
    .expect("steering");
    // No queue overflows: segments after a loss would be out of order, too.
    let load = LiveOptions {
        rate: Some(50.0),
        ..LiveOptions::default()
    };
    let ends = running.hosts.through_tunnel();
    let bytes = live(&ends, &load, &interrupt, |meter| {
        interrupt.sleep(Duration::from_secs(2))?;
        Ok::<_, LoadError>(meter.bytes())
    })
    .expect("a load");
    let late = host.run(segments_out_of_order).expect("the host");
    [late, bytes / 1_300]
}

#[test]
fn a_port_for_each_packet_reorders_a_connection() {
    if crate::common::host().is_none() {
        return;
    }
    if std::thread::available_parallelism().is_ok_and(|count| count.get() < 2) {
        return crate::common::skip("it needs two processors");
    }
    let [spread, of] = late("naive-host-to-host-spread");
    assert!(spread * 100 > of, "{spread} of {of}");
    let [by_flow, of] = late("naive-host-to-host");
    assert!(by_flow * 100 < of, "{by_flow} of {of}");
}
