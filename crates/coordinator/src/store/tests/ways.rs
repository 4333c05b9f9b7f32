//! Ways to etcd on which something becomes of what goes there.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::store::Etcd;

/// What becomes of what goes a way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Open = 0,
    /// All connections end, and new ones at once.
    Cut = 1,
    /// Questions arrive and answers do not.
    Mute = 2,
    /// Answers come later.
    Slow = 3,
}

/// How much later.
const LATER: Duration = Duration::from_millis(200);

/// A way to a member of a cluster that can be cut.
pub struct Way {
    address: SocketAddr,
    fate: Arc<AtomicU8>,
    /// Bytes that went to the member.
    pub asked: Arc<AtomicU64>,
}

impl Way {
    fn to(endpoint: &str) -> Way {
        let far: SocketAddr = endpoint["http://".len()..].parse().expect("an address");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("an address");
        let (fate, asked) = <(Arc<AtomicU8>, Arc<AtomicU64>)>::default();
        let way = Way {
            address,
            fate: Arc::clone(&fate),
            asked: Arc::clone(&asked),
        };
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                // What is tried at all counts, too.
                asked.fetch_add(1, Ordering::Relaxed);
                if let Ok(far) = TcpStream::connect(far) {
                    let copy = |stream: &TcpStream| stream.try_clone().expect("a copy");
                    let there = (copy(&near), copy(&far), Some(Arc::clone(&asked)));
                    for (mut from, mut to, asked) in [there, (far, near, None)] {
                        let fate = Arc::clone(&fate);
                        from.set_read_timeout(Some(Duration::from_millis(20)))
                            .expect("set");
                        thread::spawn(move || carry(&mut from, &mut to, &fate, asked.as_deref()));
                    }
                }
            }
        });
        way
    }

    /// One to each member, and settings for who goes them.
    pub fn to_all(settings: &Etcd) -> (Vec<Way>, Etcd) {
        let ways: Vec<Way> = settings.endpoints.iter().map(|e| Way::to(e)).collect();
        let endpoints = ways.iter().map(|way| format!("http://{}", way.address));
        let far = Etcd {
            endpoints: endpoints.collect(),
            ..settings.clone()
        };
        (ways, far)
    }
}

/// From now on this becomes of what goes there.
pub fn set(ways: &[Way], fate: Fate) {
    for way in ways {
        way.fate.store(fate as u8, Ordering::Relaxed);
    }
    // As long as what carries may take to see it.
    thread::sleep(Duration::from_millis(100));
}

pub fn cut(ways: &[Way], cut: bool) {
    set(ways, if cut { Fate::Cut } else { Fate::Open });
}

/// `asked`: counts questions; `None`: these are answers.
fn carry(from: &mut TcpStream, to: &mut TcpStream, fate: &AtomicU8, asked: Option<&AtomicU64>) {
    let mut buffer = [0; 16 << 10];
    let is = |wanted: Fate| fate.load(Ordering::Relaxed) == wanted as u8;
    while !is(Fate::Cut) {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => {
                match asked {
                    Some(asked) => drop(asked.fetch_add(length as u64, Ordering::Relaxed)),
                    None if is(Fate::Slow) => thread::sleep(LATER),
                    None => {}
                }
                if asked.is_none() && is(Fate::Mute) {
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
