//! A switch port that adds a VLAN tag to a device's frames and removes it from frames to the
//! device. The kernel's VLAN interfaces are a module that may be missing; and on most ports a
//! device does not know its VLAN. Super-packets pass whole.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use seikan_lab::site::Host;
use seikan_sys::packet::{Accept, PacketOptions, PacketSocket, RECEIVE_BUFFER_LEN};
use seikan_wire::{VNET_HDR_LEN, VnetHdr};

use crate::gateway::site::{Switch, index, new_host, write_sysctl};

/// Offset of the tag: after both addresses.
const TAG_AT: usize = VNET_HDR_LEN + 12;

/// The port; it ends when dropped.
pub struct Tagger {
    stop: Arc<AtomicBool>,
    longest: [Arc<AtomicUsize>; 2],
    threads: Vec<JoinHandle<()>>,
    _host: Host,
}

impl Tagger {
    /// Connects the device's interface to a switch through a port with this tag.
    pub fn start(
        device: &Host,
        interface: &str,
        switch: &Switch,
        tag: u16,
    ) -> Result<Tagger, String> {
        let host = new_host("tagger")?;
        // It is no host of either network.
        write_sysctl(&host, "ipv6/conf/default/disable_ipv6", "1");
        switch.plug(&host, "outside", 1500);
        let netlink = host.netlink().map_err(|e| e.to_string())?;
        let there = Some(std::os::fd::AsFd::as_fd(device.netns()));
        let inside = netlink.create_veth("inside", interface, there);
        netlink
            .set_up(inside.map_err(|e| e.to_string())?)
            .map_err(|e| e.to_string())?;
        let device_link = device.netlink().map_err(|e| e.to_string())?;
        device_link
            .set_up(index(device, interface))
            .map_err(|e| e.to_string())?;
        let open = |interface: &str| -> Result<Arc<PacketSocket>, String> {
            let number = index(&host, interface);
            let all = PacketOptions::new(Accept::Everything {
                snap_length: 1 << 18,
            });
            let socket = host.run(|| PacketSocket::open(number, &all));
            let socket = socket.map_err(|e| e.to_string())?;
            let socket = socket.map_err(|e| e.to_string())?;
            socket.set_promiscuous(true).map_err(|e| e.to_string())?;
            Ok(Arc::new(socket))
        };
        let (inside, outside) = (open("inside")?, open("outside")?);
        let stop = Arc::new(AtomicBool::new(false));
        let longest = [0, 0].map(|n| Arc::new(AtomicUsize::new(n)));
        let start = |from: &Arc<PacketSocket>, to: &Arc<PacketSocket>, outwards: bool| {
            let (from, to, stop) = (Arc::clone(from), Arc::clone(to), Arc::clone(&stop));
            let longest = Arc::clone(&longest[usize::from(!outwards)]);
            std::thread::spawn(move || forward(&from, &to, outwards, tag, &stop, &longest))
        };
        let threads = vec![
            start(&inside, &outside, true),
            start(&outside, &inside, false),
        ];
        Ok(Tagger {
            stop,
            longest,
            threads,
            _host: host,
        })
    }

    /// Returns the length of the longest frames from the device, and to it.
    pub fn longest(&self) -> [usize; 2] {
        [0, 1].map(|i| self.longest[i].load(Ordering::Relaxed))
    }
}

impl Drop for Tagger {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn forward(
    from: &PacketSocket,
    to: &PacketSocket,
    outwards: bool,
    tag: u16,
    stop: &AtomicBool,
    longest: &AtomicUsize,
) {
    let mut buffer = vec![0; RECEIVE_BUFFER_LEN];
    while !stop.load(Ordering::Relaxed) {
        let Ok(received) = from.receive(&mut buffer) else {
            std::thread::sleep(Duration::from_micros(100));
            continue;
        };
        let frame = &buffer[..received.length];
        if received.truncated || frame.len() < TAG_AT {
            continue;
        }
        // Losses here are like those of any switch.
        let sent = if outwards {
            send_tagged(to, frame, tag)
        } else {
            received.vlan.map(|tci| tci & 0xfff) == Some(tag)
                && to.send_vectored(&[IoSlice::new(frame)]).is_ok()
        };
        if sent {
            longest.fetch_max(received.length, Ordering::Relaxed);
        }
    }
}

fn send_tagged(to: &PacketSocket, frame: &[u8], tag: u16) -> bool {
    let Ok(mut header) = VnetHdr::read(frame) else {
        return false;
    };
    if header.needs_csum {
        header.csum_start += 4;
    }
    if header.hdr_len > 0 {
        header.hdr_len += 4;
    }
    let [high, low] = tag.to_be_bytes();
    let parts: [&[u8]; 4] = [
        &header.to_bytes(),
        &frame[VNET_HDR_LEN..TAG_AT],
        &[0x81, 0, high, low],
        &frame[TAG_AT..],
    ];
    to.send_vectored(&parts.map(IoSlice::new)).is_ok()
}
