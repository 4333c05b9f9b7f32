//! Bounds: connections, memory, errors of set-up.

use crate::bytes;
use crate::world::{PATIENCE, PEER_V4, World, names, options};
use seikan_userspace::{Stack, StackError, packet_pair};
use std::net::TcpListener;

#[test]
fn thousands_of_connections_leave_nothing() {
    let world = World::new(options());
    let port = world.serve(PEER_V4, |socket| bytes::exchange(&socket, 2, 1, 100));
    let before = settled_descriptors();
    for round in 0..50 {
        std::thread::scope(|scope| {
            for _ in 0..40 {
                scope.spawn(|| {
                    let (socket, code) = world.socks(PEER_V4, port);
                    assert_eq!(code, 0, "{round}");
                    bytes::exchange(&socket, 1, 2, 100);
                });
            }
        });
    }
    world.until("all end", |c| c.socks.open == 0);
    assert_eq!(world.counters().socks.accepted, 2000);
    // The far end closes its last sockets meanwhile.
    let started = std::time::Instant::now();
    while descriptors() > before {
        assert!(started.elapsed() < PATIENCE, "{}", descriptors());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Returns the number of open files once threads that have just started have theirs.
fn settled_descriptors() -> usize {
    loop {
        let before = descriptors();
        std::thread::sleep(std::time::Duration::from_millis(300));
        if descriptors() == before {
            return before;
        }
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn connections_beyond_the_limit_are_refused() {
    let mut options = options();
    options.limits.connections = 2;
    let world = World::new(options);
    let (tell, told) = std::sync::mpsc::channel();
    let port = world.serve(PEER_V4, move |socket| tell.send(socket).unwrap());
    let held = [world.socks(PEER_V4, port), world.socks(PEER_V4, port)];
    let to = world.listener(
        seikan_userspace::Service::Socks,
        seikan_userspace::Transport::Tcp,
    );
    let mut third = std::net::TcpStream::connect(to).unwrap();
    assert!(matches!(
        std::io::Read::read(&mut third, &mut [0; 1]),
        Ok(0) | Err(_)
    ));
    drop(held);
    drop((told.recv().unwrap(), told.recv().unwrap()));
    world.until("they end", |c| c.socks.open == 0);
    assert_eq!(world.socks(PEER_V4, port).1, 0);
}

#[test]
fn an_address_in_use_is_an_error_that_names_it() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = options();
    options.socks = vec![taken.local_addr().unwrap()];
    let (_worker, device) = packet_pair().unwrap();
    let error = Stack::start(device, options, names()).unwrap_err();
    assert!(matches!(error, StackError::Listen { .. }));
    assert!(
        error
            .to_string()
            .contains(&taken.local_addr().unwrap().to_string()),
        "{error}"
    );
}

#[test]
fn options_out_of_range_are_errors() {
    let start = |change: fn(&mut seikan_userspace::Options)| {
        let mut options = options();
        change(&mut options);
        let (_worker, device) = packet_pair().unwrap();
        Stack::start(device, options, names())
            .map(drop)
            .unwrap_err()
    };
    assert!(matches!(
        start(|o| o.addresses.clear()),
        StackError::Addresses { count: 0, .. }
    ));
    assert!(matches!(
        start(|o| o.mtu = 1279),
        StackError::Mtu { min: 1280, .. }
    ));
    assert!(matches!(
        start(|o| o.addresses[0] = "224.0.0.1/32".parse().unwrap()),
        StackError::NotUnicast { .. }
    ));
}

/// The worker closes its end when the tunnel ends.
#[test]
fn the_stack_ends_with_its_device() {
    let (worker, device) = packet_pair().unwrap();
    let handle = Stack::start(device, options(), names()).unwrap();
    let to = handle.listeners()[0].address;
    drop(worker);
    let started = std::time::Instant::now();
    while std::net::TcpStream::connect(to).is_ok() {
        assert!(started.elapsed() < PATIENCE);
    }
}
