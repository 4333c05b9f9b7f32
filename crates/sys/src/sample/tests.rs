use super::*;
use crate::netns::NetNs;
use crate::testing::skip;
use seikan_observe::metric;
use seikan_observe::path::{LinkFacts, ProgramFacts};
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};

/// Returns two namespaces with a veth between them, 10.77.0.1 and 10.77.0.2.
fn pair() -> Option<(NetNs, NetNs)> {
    let (near, far) = match (NetNs::create(), NetNs::create()) {
        (Ok(near), Ok(far)) => (near, far),
        (Err(error), _) | (_, Err(error)) => {
            skip(&error.to_string());
            return None;
        }
    };
    let netlink = near.netlink().unwrap();
    use std::os::fd::AsFd;
    netlink
        .create_veth("samp0", "samp1", Some(far.as_fd()))
        .unwrap();
    for (space, name, address) in [
        (&near, "samp0", "10.77.0.1/24"),
        (&far, "samp1", "10.77.0.2/24"),
    ] {
        let netlink = space.netlink().unwrap();
        let index = netlink.link(name).unwrap().index;
        netlink
            .add_address(index, address.parse().unwrap())
            .unwrap();
        netlink.set_up(index).unwrap();
    }
    Some((near, far))
}

fn path() -> PathMap {
    let name = |name: &str| LinkFacts {
        name: name.into(),
        ..LinkFacts::default()
    };
    PathMap {
        inner: Some("samp0".into()),
        links: vec![name("samp0")],
        program: Some(ProgramFacts {
            pid: std::process::id(),
            ..ProgramFacts::default()
        }),
        ..PathMap::default()
    }
}

fn value(sample: &Sample, subject: &Subject, name: &str) -> Option<u64> {
    let of = |(key, _, _): &&(Key, Kind, u64)| key.subject == *subject && key.name == name;
    sample.values.iter().find(of).map(|(_, _, value)| *value)
}

/// Sends `length` bytes from the near to the far end and waits until they are acknowledged.
fn transfer(near: &NetNs, far: &NetNs, length: usize) -> (TcpStream, TcpStream) {
    let listener = far
        .run(|| TcpListener::bind("10.77.0.2:0").unwrap())
        .unwrap();
    let address = listener.local_addr().unwrap();
    let mut client = near.run(|| TcpStream::connect(address).unwrap()).unwrap();
    let mut server = listener.accept().unwrap().0;
    std::thread::scope(|scope| {
        scope.spawn(|| client.write_all(&vec![1; length]).unwrap());
        server.read_exact(&mut vec![0; length]).unwrap();
    });
    (client, server)
}

/// Processor time of this thread.
fn processor_time() -> Duration {
    let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
    nix::time::clock_gettime(clock).unwrap().into()
}

#[test]
fn a_transfer_shows_at_the_link_the_queue_and_the_connection() {
    let Some((near, far)) = pair() else { return };
    let mut sampler = near.run(|| Sampler::new(&path()).unwrap()).unwrap();
    sampler.follow(&["10.77.0.1".parse::<IpAddr>().unwrap()]);
    let before = sampler.sample();
    assert!(sampler.flows().is_empty());

    let (client, _server) = transfer(&near, &far, 1_000_000);
    let after = sampler.sample();

    let link = Subject::Link("samp0".into());
    let sent = |sample: &Sample| value(sample, &link, metric::TX_BYTES).unwrap();
    assert!(sent(&after) - sent(&before) > 1_000_000);
    let segments = |sample: &Sample| value(sample, &Subject::Host, "Tcp.OutSegs").unwrap();
    assert!(segments(&after) > segments(&before));

    let flows = sampler.flows();
    assert_eq!(flows.len(), 1, "{flows:?}");
    assert_eq!(flows[0].local, client.local_addr().unwrap());
    assert!(flows[0].send_buffer > 0 && flows[0].congestion.is_some());
    let flow = Subject::Tcp(flows[0].inode);
    let acknowledged = value(&after, &flow, metric::TCP_BYTES_ACKED).unwrap();
    assert!(acknowledged > 900_000, "{acknowledged}");
    assert!(value(&after, &flow, metric::TCP_RTT_US).unwrap() > 0);
}

#[test]
fn a_connection_is_sampled_each_time_and_kept_when_it_has_ended() {
    let Some((near, far)) = pair() else { return };
    let mut sampler = near.run(|| Sampler::new(&path()).unwrap()).unwrap();
    sampler.follow(&["10.77.0.0/24".parse::<IpNet>().unwrap()]);
    let connection = transfer(&near, &far, 10_000);
    for _ in 0..5 {
        let sample = sampler.sample();
        let flow = Subject::Tcp(sampler.flows()[0].inode);
        assert!(value(&sample, &flow, metric::TCP_BYTES_ACKED).is_some());
    }
    drop(connection);
    let sample = sampler.sample();
    let tcp = |(key, _, _): &(Key, Kind, u64)| matches!(key.subject, Subject::Tcp(_));
    assert!(!sample.values.iter().any(tcp));
    assert_eq!(sampler.flows().len(), 1);
}

#[test]
fn a_thread_that_starts_later_is_found() {
    let mut sampler = Sampler::new(&path()).unwrap();
    sampler.sample();
    let (tell, told) = std::sync::mpsc::channel();
    let (end, wait) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::Builder::new()
        .name("latecomer".into())
        .spawn(move || {
            tell.send(nix::unistd::gettid().as_raw() as u32).unwrap();
            let _ = wait.recv();
        });
    let tid = told.recv().unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    let sample = sampler.sample();
    let subject = Subject::Thread {
        pid: std::process::id(),
        tid,
    };
    assert!(value(&sample, &subject, metric::THREAD_CPU).is_some());
    assert!(sampler.threads().contains(&(tid, "latecomer".into())));
    drop(end);
    thread.unwrap().join().unwrap();
    assert!(value(&sampler.sample(), &subject, metric::THREAD_CPU).is_none());
}

#[test]
fn a_connection_that_is_not_followed_is_not_sampled() {
    let Some((near, far)) = pair() else { return };
    let mut sampler = near.run(|| Sampler::new(&path()).unwrap()).unwrap();
    sampler.follow(&["10.78.0.0/16".parse::<IpNet>().unwrap()]);
    let _connection = transfer(&near, &far, 10_000);
    let sample = sampler.sample();
    assert!(sampler.flows().is_empty());
    let tcp = |(key, _, _): &(Key, Kind, u64)| matches!(key.subject, Subject::Tcp(_));
    assert!(!sample.values.iter().any(tcp));
}

#[test]
fn a_shaped_interface_counts_in_its_queueing_discipline() {
    let Some((near, far)) = pair() else { return };
    let mut shape = std::process::Command::new("tc");
    shape.args("qdisc add dev samp0 root tbf rate 20mbit burst 20kb limit 30kb".split(' '));
    match near.spawn_command(&mut shape).and_then(|mut tc| tc.wait()) {
        Ok(status) if status.success() => {}
        other => return skip(&format!("tc cannot shape: {other:?}")),
    }
    let mut sampler = near.run(|| Sampler::new(&path()).unwrap()).unwrap();
    sampler.sample();
    let _connection = transfer(&near, &far, 500_000);
    let sample = sampler.sample();
    let qdisc = Subject::Qdisc("samp0".into());
    assert!(value(&sample, &qdisc, metric::QDISC_BYTES).unwrap() > 500_000);
    assert!(value(&sample, &qdisc, metric::QDISC_OVERLIMITS).unwrap() > 0);
}

#[test]
fn a_full_socket_shows_its_queue_and_its_drops() {
    let Some((near, _far)) = pair() else { return };
    near.run(|| {
        let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let listed = crate::diag::udp_sockets().unwrap_or_default();
        let Some(ours) = listed.iter().find(|other| other.local == address) else {
            return skip("this kernel has no udp_diag");
        };
        let mut map = path();
        map.sockets.push(SocketFacts {
            inode: ours.inode,
            transport: seikan_observe::path::Transport::Udp,
            local: address,
            remote: None,
            receive_buffer: 0,
            send_buffer: 0,
            congestion: None,
            vnet_hdr: None,
        });
        let mut sampler = Sampler::new(&map).unwrap();
        sampler.sample();
        let sender = UdpSocket::bind("10.77.0.1:0").unwrap();
        let flood = || {
            for _ in 0..1000 {
                sender.send_to(&[0; 1000], address).unwrap();
            }
        };
        // From the first drops on, they are counted by reason.
        flood();
        let before = sampler.sample();
        flood();
        let sample = sampler.sample();
        let subject = Subject::Udp(ours.inode);
        assert!(value(&sample, &subject, metric::UDP_RX_QUEUE).unwrap() > 0);
        assert!(value(&sample, &subject, metric::UDP_DROPS).unwrap() > 0);
        let errors = |of: &Sample| value(of, &Subject::Host, "Udp.RcvbufErrors").unwrap();
        let errors = errors(&sample) - errors(&before);
        assert!(errors > 0);
        let reason = "drop.SOCKET_RCVBUFF";
        let (Some(first), Some(last)) = (
            value(&before, &Subject::Host, reason),
            value(&sample, &Subject::Host, reason),
        ) else {
            return skip(&format!("drops are not counted: {:?}", sampler.missing()));
        };
        // Each of them; the rest of the machine may add to it.
        assert!(last - first >= errors, "{first} to {last}, {errors}");
    })
    .unwrap();
}

#[test]
fn a_thread_that_works_shows_its_time() {
    let mut sampler = Sampler::new(&path()).unwrap();
    let before = sampler.sample();
    let start = processor_time();
    while processor_time() - start < Duration::from_millis(50) {
        std::hint::spin_loop();
    }
    let after = sampler.sample();
    let subject = Subject::Thread {
        pid: std::process::id(),
        tid: nix::unistd::gettid().as_raw() as u32,
    };
    let Some(then) = value(&before, &subject, metric::RUN_NS) else {
        return skip("this kernel has no schedstat");
    };
    let grown = value(&after, &subject, metric::RUN_NS).unwrap() - then;
    assert!(grown > 40_000_000, "{grown}");
    // Reported in ticks of 10 ms.
    let ticks = |sample: &Sample| {
        let of = |name: &str| value(sample, &subject, name).unwrap();
        of(metric::THREAD_USER_NS) + of(metric::THREAD_SYSTEM_NS)
    };
    assert!(ticks(&after) - ticks(&before) >= 20_000_000);
    assert!(value(&after, &subject, metric::THREAD_CPU).is_some());
    assert!(value(&after, &subject, metric::VOLUNTARY_SWITCHES).is_some());
    let process = Subject::Process(std::process::id());
    assert!(value(&after, &process, metric::IO_READS) > value(&before, &process, metric::IO_READS));
    assert!(after.at >= Duration::from_millis(50) && before.at == Duration::ZERO);
}

#[test]
fn missing_values_are_reported_once() {
    let mut map = path();
    map.program = Some(ProgramFacts {
        pid: u32::MAX,
        group: Some("/no/such/group".into()),
        ..ProgramFacts::default()
    });
    let mut sampler = Sampler::new(&map).unwrap();
    for _ in 0..3 {
        let sample = sampler.sample();
        let absent = |(key, _, _): &(Key, Kind, u64)| {
            matches!(
                key.subject,
                Subject::Process(_) | Subject::Thread { .. } | Subject::Group(_)
            )
        };
        assert!(!sample.values.iter().any(absent));
    }
    let about = |word: &str| {
        let missing = sampler.missing().iter();
        missing.filter(|unseen| unseen.what.contains(word)).count()
    };
    assert_eq!(about("/no/such/group"), 1);
    assert_eq!(about("reads and writes of process"), 1);
}

#[test]
fn a_sample_costs_little() {
    let Some((near, far)) = pair() else { return };
    let mut sampler = near.run(|| Sampler::new(&path()).unwrap()).unwrap();
    sampler.follow(&["10.77.0.1".parse::<IpAddr>().unwrap()]);
    let _connection = transfer(&near, &far, 10_000);
    sampler.sample();
    const TIMES: u64 = 50;
    let start = processor_time();
    let mut values = 0;
    for _ in 0..TIMES {
        values = sampler.sample().values.len();
    }
    let each = (processor_time() - start) / TIMES as u32;
    eprintln!(
        "a sample of {values} values: {each:?} of processor time; missing: {:?}",
        sampler.missing()
    );
    // Ten samples a second then use at most a hundredth of a processor; generous, for a build
    // without optimisation.
    assert!(each < Duration::from_millis(3), "{each:?}");
}

#[test]
fn a_control_group_shows_its_periods() {
    let mut map = path();
    let group = "/".to_owned();
    let program = map.program.as_mut().unwrap();
    program.group = Some(group.clone());
    let mut sampler = Sampler::new(&map).unwrap();
    let sample = sampler.sample();
    match value(&sample, &Subject::Group(group), metric::GROUP_PERIODS) {
        Some(_) => {}
        // The root of version 2 has no limit and therefore no periods.
        None => eprintln!("no periods at the root: {:?}", sampler.missing()),
    }
    let is_missing = sampler
        .missing()
        .iter()
        .any(|unseen| unseen.what.contains("control group"));
    let group = Subject::Group("/".into());
    assert_ne!(
        is_missing,
        value(&sample, &group, metric::GROUP_THROTTLED_US).is_some()
    );
}
