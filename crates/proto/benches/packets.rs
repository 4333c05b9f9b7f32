//! Sends packets through two tunnels without clocks and sockets, to count instructions for each
//! packet: `scripts/instructions.sh`.
//!
//! Arguments: `native` or `wireguard`; `udp` (batches of 64 datagrams) or `tcp` (two super packets
//! of 60,000 bytes); the number of batches. Prints the number of packets.
#![forbid(unsafe_code)]

#[path = "../tests/sim/mod.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod sim;

use seikan_proto::batch::PacketBatch;
use seikan_proto::noise::Protocol;
use seikan_proto::tunnel::Datagram;
use sim::World;
use sim::packets::Flow;

/// Payload of a UDP datagram and of a TCP segment, in bytes.
const PAYLOAD: usize = 1348;
/// Payload of a super packet, in bytes.
const SUPER_PACKET: usize = 60_000;

fn main() {
    // Cargo adds `--bench`.
    let arguments: Vec<String> = std::env::args().filter(|a| a != "--bench").collect();
    let [_, protocol, kind, batches] = &arguments[..] else {
        println!("arguments: native|wireguard udp|tcp BATCHES");
        return;
    };
    let protocol = match protocol.as_str() {
        "native" => Protocol::Native,
        _ => Protocol::WireGuard,
    };
    let (reads, packets) = match kind.as_str() {
        "udp" => {
            let flow = Flow::udp(0);
            let reads: Vec<_> = (0..64).map(|n| flow.datagram(n, PAYLOAD)).collect();
            (reads, 64)
        }
        _ => {
            let read = Flow::tcp(0).segments(0, SUPER_PACKET, PAYLOAD);
            (vec![read; 2], 2 * SUPER_PACKET.div_ceil(PAYLOAD))
        }
    };
    let batches: usize = batches.parse().expect("a number of batches");
    let mut world = World::new(protocol, 1);
    world.establish();
    let mut batch = PacketBatch::new(4 << 20, 512);
    for _ in 0..batches {
        world.time += 1_000_000;
        cross(&mut world, &mut batch, &reads);
    }
    println!("{}", batches * packets);
}

/// Passes one batch from the device of side 0 to that of side 1.
fn cross(world: &mut World, batch: &mut PacketBatch, reads: &[Vec<u8>]) {
    batch.clear();
    for read in reads {
        batch.space().expect("a batch fits")[..read.len()].copy_from_slice(read);
        batch.commit(read.len());
    }
    let [now, later] = [world.now(0), world.now(1)];
    let [from, to] = &mut world.sides;
    from.tunnel
        .outbound(now, batch, &mut from.outbox, &mut from.inbox);
    let (mut arena, mut datagrams) = (Vec::new(), Vec::new());
    for run in from.outbox.runs() {
        let start = arena.len();
        arena.extend_from_slice(from.outbox.bytes(run));
        datagrams.push(Datagram {
            source: from.address,
            destination: Some(to.address.ip()),
            traffic_class: run.destination.traffic_class,
            range: start..arena.len(),
            segment_size: run.segment_size,
            truncated: false,
        });
        from.tunnel.sent(run, Ok(()));
    }
    from.outbox.clear();
    from.inbox.clear();
    let datagrams = datagrams.into_iter();
    to.tunnel
        .inbound(later, datagrams, &mut arena, &mut to.inbox, &mut to.outbox);
    for write in to.inbox.writes() {
        to.tunnel.delivered(write, Ok(()));
    }
    for run in to.outbox.runs() {
        to.tunnel.sent(run, Ok(()));
    }
    to.inbox.clear();
    to.outbox.clear();
}
