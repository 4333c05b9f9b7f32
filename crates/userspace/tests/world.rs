//! A stack, and the kernel as its far end.
//!
//! A thread moves packets between the stack's device and a TUN device in a namespace, as the worker of a tunnel does, and
//! notes what it sees.

use ipnet::IpNet;
use seikan_observe::DropReason;
use seikan_proto::segment::SuperPacket;
use seikan_sys::netns::NetNs;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::tun::{READ_BUFFER_LEN, Tun, TunOptions, VNET_HEADER_LEN};
use seikan_userspace::{
    Counters, Handle, Limits, Names, Options, Service, Stack, Transport, packet_pair,
};
use std::collections::VecDeque;
use std::io::{IoSlice, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A failure waits that long.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub const OURS_V4: &str = "10.9.0.1";
pub const PEER_V4: &str = "10.9.0.2";
pub const OURS_V6: &str = "fd09::1";
pub const PEER_V6: &str = "fd09::2";

/// The path between the stack and the kernel, the same in both directions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Path {
    /// Delay in each direction.
    pub delay: Duration,
    /// One packet of so many is lost; 0: none.
    pub lost: u64,
    /// Bits a second, with a queue of `queue` bytes; 0: as fast as it goes.
    pub rate: u64,
    pub queue: usize,
}

impl Path {
    fn is_direct(&self) -> bool {
        self.delay.is_zero() && self.lost == 0 && self.rate == 0
    }
}

/// Packets that the path has carried.
#[derive(Debug, Default)]
pub struct Seen {
    /// Largest packet from the stack and to it, in bytes, a super-packet as its segments.
    pub largest_out: AtomicU64,
    pub largest_in: AtomicU64,
    /// Super-packets.
    pub merged_out: AtomicU64,
    pub merged_in: AtomicU64,
    /// Packets that the path lost, also at a full queue.
    pub lost: AtomicU64,
}

pub struct World {
    handle: Option<Handle>,
    pub peer: Arc<NetNs>,
    pub seen: Arc<Seen>,
    stop: Arc<AtomicBool>,
    severed: Arc<AtomicBool>,
    pump: Option<JoinHandle<()>>,
}

/// Options of a stack with addresses of both families, SOCKS5 and HTTP.
pub fn options() -> Options {
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    Options {
        addresses: vec![net(OURS_V4, 24), net(OURS_V6, 64)],
        mtu: 1420,
        socks: vec![any],
        http: vec![any],
        forwards: Vec::new(),
        exposed: Vec::new(),
        limits: Limits::default(),
    }
}

fn net(address: &str, length: u8) -> IpNet {
    IpNet::new(address.parse().unwrap(), length).unwrap()
}

/// `db-1` is the peer, with both addresses; `v6.peer` has one.
pub fn names() -> Names {
    Box::new(|name| match name {
        "db-1" => vec![PEER_V4.parse().unwrap(), PEER_V6.parse().unwrap()],
        "v6.peer" => vec![PEER_V6.parse().unwrap()],
        _ => Vec::new(),
    })
}

impl World {
    pub fn new(options: Options) -> World {
        World::with(options, 1420, Path::default())
    }

    /// A world whose TUN device has another MTU than the tunnel's, over a path.
    pub fn with(options: Options, mtu: u32, path: Path) -> World {
        let peer = Arc::new(NetNs::create().expect("namespace"));
        let tun = peer
            .run(|| {
                Tun::create(&TunOptions {
                    name: "peer".to_owned(),
                    mtu,
                    queues: 1,
                    offload: true,
                })
                .expect("TUN")
            })
            .expect("enter");
        let netlink = peer.netlink().expect("netlink");
        let index = tun.index().expect("an interface");
        netlink
            .add_address(index, net(PEER_V4, 24))
            .expect("address");
        netlink
            .add_address(index, net(PEER_V6, 64))
            .expect("address");
        netlink.set_up(index).expect("up");
        // Until duplicate address detection has ended, an address cannot be used.
        let started = Instant::now();
        while peer
            .run(|| TcpListener::bind((PEER_V6, 0)).is_err())
            .expect("enter")
        {
            assert!(started.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(20));
        }
        let (worker, device) = packet_pair().expect("pair");
        let handle = Stack::start(device, options, names()).expect("stack");
        let seen = Arc::new(Seen::default());
        let stop = Arc::new(AtomicBool::new(false));
        let severed = Arc::new(AtomicBool::new(false));
        let pump = Pump {
            tun,
            worker,
            seen: Arc::clone(&seen),
            stop: Arc::clone(&stop),
            severed: Arc::clone(&severed),
            out: Lane::new(path),
            back: Lane::new(path),
        };
        let thread = std::thread::Builder::new().name("pump".to_owned());
        World {
            handle: Some(handle),
            peer,
            seen,
            stop,
            severed,
            pump: Some(thread.spawn(move || pump.run()).expect("thread")),
        }
    }

    pub fn counters(&self) -> Counters {
        self.handle.as_ref().unwrap().counters()
    }

    /// What opens sockets of this process.
    pub fn sockets(&self) -> &seikan_userspace::Sockets {
        self.handle.as_ref().unwrap().sockets()
    }

    /// Makes the path lose everything from now on.
    pub fn sever(&self) {
        self.severed.store(true, Relaxed);
    }

    /// Waits until the counters are like that.
    pub fn until(&self, what: &str, is: impl Fn(&Counters) -> bool) {
        let started = Instant::now();
        while !is(&self.counters()) {
            assert!(
                started.elapsed() < PATIENCE,
                "{what}: {:?}",
                self.counters()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.counters().drops.get(reason)
    }

    /// The first address of a service.
    pub fn listener(&self, service: Service, transport: Transport) -> SocketAddr {
        let listeners = self.handle.as_ref().unwrap().listeners();
        let is = |l: &&seikan_userspace::Listener| l.service == service && l.transport == transport;
        listeners.iter().find(is).expect("listener").address
    }

    /// Listens in the namespace; the thread serves one connection after the other.
    pub fn serve(&self, address: &str, serve: impl Fn(TcpStream) + Send + 'static) -> u16 {
        let address: IpAddr = address.parse().unwrap();
        let listener = self
            .peer
            .run(|| TcpListener::bind((address, 0)).expect("bind"))
            .expect("enter");
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            while let Ok((socket, _)) = listener.accept() {
                serve(socket);
            }
        });
        port
    }

    /// Connects from the namespace.
    pub fn connect(&self, to: SocketAddr) -> std::io::Result<TcpStream> {
        let socket = self.peer.run(|| TcpStream::connect(to)).expect("enter")?;
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Ok(socket)
    }

    /// A UDP socket in the namespace.
    pub fn udp(&self, address: &str) -> UdpSocket {
        let address: IpAddr = address.parse().unwrap();
        let socket = self
            .peer
            .run(|| UdpSocket::bind((address, 0)).expect("bind"))
            .expect("enter");
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    }

    /// Sends a request to a proxy and reads `length` bytes of the answer.
    pub fn ask(
        &self,
        service: Service,
        requests: &[&[u8]],
        lengths: &[usize],
    ) -> (TcpStream, Vec<u8>) {
        use std::io::Read;
        let mut socket =
            TcpStream::connect(self.listener(service, Transport::Tcp)).expect("connect");
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut answer = Vec::new();
        for (request, length) in requests.iter().zip(lengths) {
            socket.write_all(request).expect("write");
            answer = vec![0; *length];
            socket.read_exact(&mut answer).expect("answer");
        }
        (socket, answer)
    }

    /// Connects through SOCKS5 and returns the code of the answer.
    pub fn socks(&self, host: &str, port: u16) -> (TcpStream, u8) {
        let mut request = vec![5, 1, 0];
        match host.parse() {
            Ok(IpAddr::V4(address)) => {
                request.push(1);
                request.extend(address.octets());
            }
            Ok(IpAddr::V6(address)) => {
                request.push(4);
                request.extend(address.octets());
            }
            Err(_) => {
                request.extend([3, host.len() as u8]);
                request.extend(host.as_bytes());
            }
        }
        request.extend(port.to_be_bytes());
        let (mut socket, answer) = self.ask(Service::Socks, &[&[5, 1, 0], &request], &[2, 4]);
        let rest = if answer[3] == 1 { 6 } else { 18 };
        std::io::Read::read_exact(&mut socket, &mut vec![0; rest]).expect("bound address");
        (socket, answer[1])
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.handle.take();
        if let Some(pump) = self.pump.take() {
            let ended = pump.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

struct Pump {
    tun: Tun,
    worker: OwnedFd,
    seen: Arc<Seen>,
    stop: Arc<AtomicBool>,
    /// The path loses everything.
    severed: Arc<AtomicBool>,
    out: Lane,
    back: Lane,
}

/// A direction of the path.
struct Lane {
    path: Path,
    /// Packets on their way, with the time of their arrival.
    packets: VecDeque<(Instant, Vec<u8>)>,
    count: u64,
    free_at: Instant,
}

impl Lane {
    fn new(path: Path) -> Lane {
        Lane {
            path,
            packets: VecDeque::new(),
            count: 0,
            free_at: Instant::now(),
        }
    }

    /// A packet enters the path, as its segments. Returns how many are lost.
    fn enter(&mut self, packet: &[u8]) -> u64 {
        let Path {
            delay,
            lost,
            rate,
            queue,
        } = self.path;
        let whole = SuperPacket::parse(packet).expect("a packet");
        let mut losses = 0;
        for i in 0..whole.segments() {
            let mut segment = vec![0; VNET_HEADER_LEN + whole.segment_len(i)];
            whole.segment(i, false, &mut segment[VNET_HEADER_LEN..]);
            self.count += 1;
            let now = Instant::now();
            let mut at = now;
            if rate > 0 {
                let busy = self.free_at.saturating_duration_since(now);
                if (busy.as_secs_f64() * rate as f64 / 8.0) as usize > queue {
                    losses += 1;
                    continue;
                }
                let time = Duration::from_secs_f64(segment.len() as f64 * 8.0 / rate as f64);
                self.free_at = self.free_at.max(now) + time;
                at = self.free_at;
            }
            // Not periodic: a hash of the number.
            if lost > 0
                && (self.count.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33).is_multiple_of(lost)
            {
                losses += 1;
                continue;
            }
            self.packets.push_back((at + delay, segment));
        }
        losses
    }

    fn next(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.packets.front().filter(|(at, _)| *at <= now)?;
        self.packets.pop_front().map(|(_, packet)| packet)
    }
}

impl Pump {
    fn run(mut self) {
        let mut epoll = Epoll::new(2).expect("epoll");
        epoll
            .add(&self.tun.queues()[0], 0, Interest::Read)
            .expect("add");
        epoll.add(&self.worker, 1, Interest::Read).expect("add");
        let mut buf = vec![0; READ_BUFFER_LEN];
        let direct = self.out.path.is_direct();
        while !self.stop.load(Relaxed) {
            let severed = self.severed.load(Relaxed);
            let now = Instant::now();
            let lanes = [&self.out, &self.back].into_iter();
            let next = lanes
                .filter_map(|lane| lane.packets.front())
                .map(|(at, _)| *at)
                .min();
            let wait = next.map_or(Duration::from_millis(50), |at| {
                at.saturating_duration_since(now)
            });
            epoll.wait(Some(wait)).expect("wait").for_each(drop);
            for _ in 0..64 {
                let Ok(length) = nix::unistd::read(&self.worker, &mut buf) else {
                    break;
                };
                if length == 0 {
                    return;
                }
                let packet = &buf[..length];
                note(packet, &self.seen.largest_out, &self.seen.merged_out);
                if severed {
                    self.seen.lost.fetch_add(1, Relaxed);
                } else if direct {
                    self.to_kernel(packet);
                } else {
                    self.seen.lost.fetch_add(self.out.enter(packet), Relaxed);
                }
            }
            for _ in 0..64 {
                let Ok(length) = self.tun.queues()[0].read(&mut buf) else {
                    break;
                };
                let packet = &buf[..length];
                note(packet, &self.seen.largest_in, &self.seen.merged_in);
                if severed {
                    self.seen.lost.fetch_add(1, Relaxed);
                } else if direct {
                    to_stack(&self.worker, packet);
                } else {
                    self.seen.lost.fetch_add(self.back.enter(packet), Relaxed);
                }
            }
            let now = Instant::now();
            while let Some(packet) = self.out.next(now) {
                self.to_kernel(&packet);
            }
            while let Some(packet) = self.back.next(now) {
                to_stack(&self.worker, &packet);
            }
        }
    }

    fn to_kernel(&self, packet: &[u8]) {
        self.tun.queues()[0]
            .write_vectored(&[IoSlice::new(packet)])
            .expect("the kernel takes the packet");
    }
}

/// Gives the stack a packet; waits while it is behind.
fn to_stack(worker: &OwnedFd, packet: &[u8]) {
    while let Err(error) = nix::unistd::write(worker, packet) {
        if error != nix::errno::Errno::EAGAIN {
            return;
        }
        let mut epoll = Epoll::new(1).expect("epoll");
        epoll.add(worker, 0, Interest::Write).expect("add");
        epoll
            .wait(Some(Duration::from_millis(100)))
            .expect("wait")
            .for_each(drop);
    }
}

fn note(packet: &[u8], largest: &AtomicU64, merged: &AtomicU64) {
    let parsed = SuperPacket::parse(packet).expect("a packet");
    if parsed.segments() > 1 {
        merged.fetch_add(1, Relaxed);
    }
    largest.fetch_max(parsed.segment_len(0) as u64, Relaxed);
}
