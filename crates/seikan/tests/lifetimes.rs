//! Ends of tunnels, also in the middle of something.

use crate::bytes::MEBIBYTE;
use crate::pair::{Hosts, PATIENCE, PORT, configs, runtime, skip, start, with_pair};
use seikan::{Config, Error, Tunnel};
use std::future::{Future, poll_fn};
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::join;
use tokio::time::{sleep, timeout};

const MOMENT: Duration = Duration::from_millis(30);

#[test]
fn dropping_a_tunnel_resets_its_connections_at_both_ends() {
    with_pair(|left, right| async move {
        let mut listener = right.tcp_listen(80).await.expect("a port");
        let (near, far) = join!(left.tcp_connect(("right", 80)), listener.accept());
        let (mut near, mut far) = (near.expect("connected"), far.expect("accepted"));
        let socket = left.udp_bind(7).await.expect("a port");
        let sender = tokio::spawn(async move {
            let chunk = vec![7; 65_536];
            loop {
                if let Err(error) = near.write_all(&chunk).await {
                    return (near, error.kind());
                }
            }
        });
        let mut chunk = vec![0; MEBIBYTE as usize];
        far.read_exact(&mut chunk).await.expect("it runs");
        drop(left);
        let received = loop {
            match far.read(&mut chunk).await {
                Ok(0) => panic!("a clean end in the middle of a transfer"),
                Ok(_) => {}
                Err(error) => break error.kind(),
            }
        };
        assert_eq!(received, ErrorKind::ConnectionReset);
        let (mut near, sent) = sender.await.expect("no panic");
        assert!(
            matches!(sent, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset),
            "{sent}"
        );
        let read = near.read(&mut chunk).await.expect_err("an end");
        assert_eq!(read.kind(), ErrorKind::ConnectionReset);
        let read = socket.recv_from(&mut chunk).await.expect_err("an end");
        assert_eq!(read.kind(), ErrorKind::NotConnected);
    });
}

#[test]
fn closing_delivers_what_dropped_streams_have_written() {
    with_pair(|left, right| async move {
        let mut listener = right.tcp_listen(80).await.expect("a port");
        let send = async {
            let mut near = left.tcp_connect(("right", 80)).await.expect("connected");
            near.write_all(&vec![7; 8 * MEBIBYTE as usize])
                .await
                .expect("sent");
            drop(near);
            left.close().await;
        };
        let receive = async {
            let mut far = listener.accept().await.expect("accepted");
            let mut received = Vec::new();
            far.read_to_end(&mut received).await.expect("a clean end");
            received.len() as u64
        };
        let ((), received) = join!(send, receive);
        assert_eq!(received, 8 * MEBIBYTE);
    });
}

#[test]
fn closing_delivers_what_was_written_before_a_stream_was_shut_down() {
    with_pair(|left, right| async move {
        let mut listener = right.tcp_listen(80).await.expect("a port");
        let (near, far) = join!(left.tcp_connect(("right", 80)), listener.accept());
        let (mut near, mut far) = (near.expect("connected"), far.expect("accepted"));
        let chunk = vec![7; 65_536];
        let mut written = 0;
        // Until all buffers are full, so that the stack reads the end of the stream later.
        while let Ok(sent) = timeout(Duration::from_secs(1), near.write(&chunk)).await {
            written += sent.expect("sent");
        }
        near.shutdown().await.expect("the end");
        let mut received = Vec::new();
        let ((), read) = join!(left.close(), far.read_to_end(&mut received));
        assert_eq!(read.expect("a clean end"), written);
    });
}

#[test]
fn what_waits_ends_with_the_tunnel() {
    with_pair(|left, right| async move {
        let mut listener = left.tcp_listen(80).await.expect("a port");
        let sockets = async {
            // Nothing has this address: the attempt lasts 30 seconds.
            join!(left.tcp_connect("10.80.0.99:80"), listener.accept())
        };
        let waited = tokio::time::timeout(Duration::from_millis(200), sockets).await;
        assert!(waited.is_err());
        left.close().await;
        let accepted = listener.accept().await;
        assert!(matches!(accepted, Err(Error::Ended)), "{accepted:?}");
        right.close().await;
    });
}

#[test]
fn a_tunnel_starts_again_on_the_same_port_after_it_was_closed() {
    let hosts = match Hosts::create() {
        Ok(hosts) => hosts,
        Err(reason) => return skip(&reason),
    };
    let config = configs().left.build().expect("a configuration");
    let again = config.clone();
    // Both start in the namespace of their thread.
    let thread = hosts.left.spawn_thread("starts", move || {
        runtime().block_on(async {
            for config in [config, again] {
                let tunnel = Tunnel::connect(config).await.expect("a tunnel");
                tunnel.close().await;
            }
        });
    });
    thread.expect("a thread").join().expect("no panic");
}

#[test]
fn a_tunnel_that_nobody_waits_for_any_more_ends() {
    let hosts = match Hosts::create() {
        Ok(hosts) => hosts,
        Err(reason) => return skip(&reason),
    };
    let config = configs().left.build().expect("a configuration");
    let again = config.clone();
    let thread = hosts.left.spawn_thread("starts", move || {
        runtime().block_on(async {
            let mut given_up = Box::pin(Tunnel::connect(config));
            poll_fn(|context| Poll::Ready(given_up.as_mut().poll(context).is_pending())).await;
            while UdpSocket::bind(("0.0.0.0", PORT)).is_ok() {
                sleep(MOMENT).await;
            }
            // It has started, and its future is dropped with it.
            sleep(10 * MOMENT).await;
            drop(given_up);
            let again = async {
                loop {
                    match Tunnel::connect(again.clone()).await {
                        Ok(tunnel) => break tunnel.close().await,
                        Err(_) => sleep(MOMENT).await,
                    }
                }
            };
            timeout(PATIENCE, again).await.expect("the port is free");
        });
    });
    thread.expect("a thread").join().expect("no panic");
}

#[test]
fn a_port_in_use_is_an_error_that_names_it() {
    let hosts = match Hosts::create() {
        Ok(hosts) => hosts,
        Err(reason) => return skip(&reason),
    };
    let [first, second] = [configs(), configs()].map(|c| c.left.build().expect("built"));
    let thread = hosts.left.spawn_thread("starts", move || {
        runtime().block_on(async {
            let _first = Tunnel::connect(first).await.expect("a tunnel");
            Tunnel::connect(second).await.map(drop)
        })
    });
    let second = thread.expect("a thread").join().expect("no panic");
    let error = second.expect_err("in use");
    assert!(matches!(error, Error::Start(_)), "{error}");
    assert!(error.to_string().contains("51820"), "{error}");
}

#[test]
fn a_member_needs_a_directory_for_its_state() {
    let text = "private-key = \"dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=\"\n\
                address = \"100.80.0.1/12\"\ncoordinator = \"https://192.0.2.9:7443\"\n\
                credential = \"skc_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\"\n";
    let config = Config::from_toml(text).expect("a configuration");
    let started = runtime().block_on(Tunnel::connect(config));
    assert!(matches!(started, Err(Error::NoStateDir)), "{started:?}");
}

#[test]
fn sockets_need_a_runtime_and_say_so() {
    let hosts = match Hosts::create() {
        Ok(hosts) => hosts,
        Err(reason) => return skip(&reason),
    };
    let config = configs().left.build().expect("a configuration");
    let [tunnel] = start([(&hosts.left, config)]);
    // An executor that knows nothing of tokio.
    let mut bind = std::pin::pin!(tunnel.udp_bind(0));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let bound = loop {
        if let std::task::Poll::Ready(bound) = bind.as_mut().poll(&mut context) {
            break bound;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(matches!(bound, Err(Error::NoRuntime)), "{bound:?}");
}
