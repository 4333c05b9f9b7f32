//! Changes of the network under a tunnel: traffic goes on within a second of the path being there
//! again. To repeat them: `scripts/tests.sh --workspace -E 'test(roaming)' --stress-count 20`.

use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crate::common::{
    ECHO_PORT, Host, PATIENCE, StopsAtEnd, TUNNEL_PORT, Tunnel, World, echo, in_world,
};

/// Maximum time without an answer after the path is there again.
const LIMIT: Duration = Duration::from_secs(1);
/// Interval of the datagrams.
const EVERY: Duration = Duration::from_millis(20);
/// Maximum attempts: other programs can only delay an answer. One attempt in each direction has to
/// be in time.
const TRIES: usize = 3;
/// Length of an outage.
const OUTAGE: Duration = Duration::from_secs(5);
/// An address of the right that both links lead to.
const FAR: &str = "198.51.100.1";

/// The right's address in the tunnel.
const INNER: &str = "10.80.0.2";

/// Returns the time until a datagram to the right that is sent from now on comes back.
fn until_answered(world: &World, to: &str) -> Duration {
    let ask = || {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
        socket.set_read_timeout(Some(EVERY)).expect("timeout");
        let to = (to, ECHO_PORT);
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            let _ = socket.send_to(b"there?", to);
            if socket.recv(&mut [0; 16]).is_ok() {
                break;
            }
        }
        begin.elapsed()
    };
    world.left.namespace.run(ask).expect("namespace")
}

/// Runs the test in a world whose left host sends to `endpoint`, in both protocols: `prepare` is
/// run before the tunnel is up, `change` each time with another number.
fn goes_on_after(
    endpoint: &str,
    prepare: impl Fn(&World),
    change: impl Fn(&World, &Tunnel, usize),
) {
    let peer = format!("AllowedIPs = 10.80.0.2/32\nEndpoint = {endpoint}:{TUNNEL_PORT}");
    for protocol in ["native", "wireguard"] {
        in_world(["", &peer], |world| {
            prepare(world);
            let [_right, left] = world.both_up_with(&["--protocol", protocol]);
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let (right, stop) = (&world.right.namespace, &stop);
                scope.spawn(move || right.run(|| echo(stop)));
                let _stopping = StopsAtEnd(stop);
                until_answered(world, INNER);
                let mut in_time = [false; 2];
                for number in 0..2 * TRIES {
                    if in_time == [true; 2] {
                        break;
                    }
                    change(world, &left, number);
                    // The kernel may take a second to find the neighbour again.
                    until_answered(world, endpoint);
                    let took = until_answered(world, INNER);
                    println!("{protocol}: {} ms", took.as_millis());
                    in_time[number % 2] |= took <= LIMIT;
                }
                assert_eq!(in_time, [true; 2], "{protocol}");
            });
        });
    }
}

fn ip(host: &Host, words: &str) {
    let mut command = Command::new("ip");
    command.args(words.split(' '));
    let ip = host.namespace.spawn_command(&mut command).expect("ip");
    let status = ip.wait_with_output().expect("an end").status;
    assert!(status.success(), "ip {words}");
}

#[test]
fn an_address_of_this_host_changes() {
    let addresses = ["192.0.2.1/24", "192.0.2.77/24"];
    goes_on_after(
        "192.0.2.2",
        |_| (),
        |world, _, number| {
            world.left.remove_address(addresses[number % 2]);
            world.left.add_address(addresses[(number + 1) % 2]);
        },
    );
}

#[test]
fn the_default_route_moves_to_another_interface() {
    let two_links = |world: &World| {
        let end = Some(world.right.namespace.as_fd());
        let link = world.left.netlink.create_veth("second", "second", end);
        link.expect("a link");
        for (host, address) in [(&world.left, "203.0.113.1"), (&world.right, "203.0.113.2")] {
            ip(host, &format!("address add {address}/24 dev second"));
            ip(host, "link set second up");
        }
        ip(&world.right, &format!("address add {FAR}/32 dev under"));
        ip(&world.left, "route add default via 192.0.2.2");
    };
    goes_on_after(FAR, two_links, |world, _, number| {
        let [old, new] = [["under", "second"], ["second", "under"]][number % 2];
        let gateway = ["203.0.113.2", "192.0.2.2"][number % 2];
        // As if its cable were pulled: answers cannot come by the old link either.
        ip(&world.left, &format!("link set {new} up"));
        ip(&world.left, &format!("link set {old} down"));
        ip(&world.left, &format!("route replace default via {gateway}"));
    });
}

#[test]
fn the_link_is_down_for_a_while() {
    goes_on_after(
        "192.0.2.2",
        |_| (),
        |world, _, _| {
            ip(&world.right, "link set under down");
            std::thread::sleep(OUTAGE);
            ip(&world.right, "link set under up");
        },
    );
}

#[test]
fn the_program_is_suspended_for_a_while() {
    goes_on_after(
        "192.0.2.2",
        |_| (),
        |_, left, _| {
            left.signal("STOP");
            std::thread::sleep(OUTAGE);
            left.signal("CONT");
        },
    );
}
