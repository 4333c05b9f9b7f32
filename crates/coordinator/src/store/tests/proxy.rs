//! Proxies to etcd that can fail.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::store::Etcd;

/// Behaviour of a proxy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Open = 0,
    /// Closes all connections, and new ones at once.
    Cut = 1,
    /// Requests arrive; responses are dropped.
    Mute = 2,
    /// Delays responses.
    Slow = 3,
}

/// Delay of a response.
const DELAY: Duration = Duration::from_millis(200);

/// A proxy to one member of a cluster.
pub struct Proxy {
    address: SocketAddr,
    fate: Arc<AtomicU8>,
    /// Bytes sent to the member, plus the number of connections.
    pub requested: Arc<AtomicU64>,
}

impl Proxy {
    fn to(endpoint: &str) -> Proxy {
        let far: SocketAddr = endpoint["http://".len()..].parse().expect("an address");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("an address");
        let (fate, requested) = <(Arc<AtomicU8>, Arc<AtomicU64>)>::default();
        let proxy = Proxy {
            address,
            fate: Arc::clone(&fate),
            requested: Arc::clone(&requested),
        };
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                // Connection attempts count, too.
                requested.fetch_add(1, Ordering::Relaxed);
                if let Ok(far) = TcpStream::connect(far) {
                    let copy = |stream: &TcpStream| stream.try_clone().expect("a copy");
                    let there = (copy(&near), copy(&far), Some(Arc::clone(&requested)));
                    for (mut from, mut to, requested) in [there, (far, near, None)] {
                        let fate = Arc::clone(&fate);
                        from.set_read_timeout(Some(Duration::from_millis(20)))
                            .expect("set");
                        thread::spawn(move || {
                            copy_bytes(&mut from, &mut to, &fate, requested.as_deref())
                        });
                    }
                }
            }
        });
        proxy
    }

    /// Returns a proxy to each member, and settings that use the proxies.
    pub fn to_all(settings: &Etcd) -> (Vec<Proxy>, Etcd) {
        let proxies: Vec<Proxy> = settings.endpoints.iter().map(|e| Proxy::to(e)).collect();
        let endpoints = proxies
            .iter()
            .map(|proxy| format!("http://{}", proxy.address));
        let far = Etcd {
            endpoints: endpoints.collect(),
            ..settings.clone()
        };
        (proxies, far)
    }
}

/// Sets the behaviour of all proxies.
pub fn set(proxies: &[Proxy], fate: Fate) {
    for proxy in proxies {
        proxy.fate.store(fate as u8, Ordering::Relaxed);
    }
    // The threads notice within this time.
    thread::sleep(Duration::from_millis(100));
}

pub fn cut(proxies: &[Proxy], cut: bool) {
    set(proxies, if cut { Fate::Cut } else { Fate::Open });
}

/// Copies bytes. `requested`: counts the bytes of requests; `None` for responses.
fn copy_bytes(
    from: &mut TcpStream,
    to: &mut TcpStream,
    fate: &AtomicU8,
    requested: Option<&AtomicU64>,
) {
    let mut buffer = [0; 16 << 10];
    let is = |wanted: Fate| fate.load(Ordering::Relaxed) == wanted as u8;
    while !is(Fate::Cut) {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => {
                match requested {
                    Some(requested) => drop(requested.fetch_add(length as u64, Ordering::Relaxed)),
                    None if is(Fate::Slow) => thread::sleep(DELAY),
                    None => {}
                }
                if requested.is_none() && is(Fate::Mute) {
                    continue;
                }
                if to.write_all(&buffer[..length]).is_err() {
                    break;
                }
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => break,
            Err(_) => {}
        }
    }
    for stream in [from, to] {
        let _ = stream.shutdown(Shutdown::Both);
    }
}
