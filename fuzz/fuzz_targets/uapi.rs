//! Any bytes on the configuration socket, in any pieces: every request is answered, and the output
//! of `get`, passed to `set` of another device, configures the same device.
use seikan_fuzz::Counter;
use seikan_node::output::Output;
use seikan_node::output::Phase;
use seikan_node::uapi::{Device, Dialogue, Refusal};
use seikan_proto::keys::PrivateKey;
use seikan_proto::protocol::Protocol;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::{Now, Tunnel, TunnelConfig};
use std::time::Duration;

/// A device without sockets. Ports below 1024 are in use.
struct Paper {
    tunnel: Tunnel,
    key: Option<PrivateKey>,
    port: u16,
    mark: u32,
}

impl Paper {
    fn new() -> Paper {
        let tunnel = Tunnel::new(TunnelConfig {
            protocol: Protocol::WireGuard,
            mode: seikan_proto::mode::Mode::Ip,
            private_key: PrivateKey::from_bytes([7; 32]),
            inner_mtu: 1420,
            offload: false,
            ciphers: vec![],
            copy_dscp: false,
            repair: None,
            rng: Box::new(Counter::new(1)),
        });
        Paper {
            tunnel,
            key: None,
            port: 51820,
            mark: 0,
        }
    }
}

impl Device for Paper {
    fn tunnel(&self) -> &Tunnel {
        &self.tunnel
    }
    fn tunnel_mut(&mut self) -> &mut Tunnel {
        &mut self.tunnel
    }
    fn now(&self) -> Now {
        Now {
            mono: Instant::from_nanos(1 << 40),
            wall: Duration::from_secs(1_800_000_000),
        }
    }
    fn private_key(&self) -> Option<&PrivateKey> {
        self.key.as_ref()
    }
    fn set_private_key(&mut self, key: Option<PrivateKey>) {
        if let Some(key) = &key {
            self.tunnel.set_private_key(key.clone());
        }
        self.key = key;
    }
    fn listen_port(&self) -> u16 {
        self.port
    }
    fn set_listen_port(&mut self, port: u16) -> Result<(), Refusal> {
        if (1..1024).contains(&port) {
            return Err(Refusal::PortInUse);
        }
        self.port = if port == 0 { 40_000 } else { port };
        Ok(())
    }
    fn fwmark(&self) -> u32 {
        self.mark
    }
    fn set_fwmark(&mut self, mark: u32) -> Result<(), Refusal> {
        self.mark = mark;
        Ok(())
    }
}

/// Sends `bytes` in pieces of `piece` bytes; returns the responses.
fn talk(device: &mut Paper, dialogue: &mut Dialogue, bytes: &[u8], piece: usize) -> String {
    let (mut answer, mut waiting, mut output) = (Vec::new(), Vec::new(), Output::default());
    for part in bytes.chunks(piece) {
        waiting.extend_from_slice(part);
        loop {
            let used = dialogue.take(&waiting, device, &mut output);
            waiting.drain(..used);
            let replying = dialogue.phase() == Phase::Replying;
            if replying {
                dialogue.give(device, &mut output);
            }
            answer.extend_from_slice(output.unsent());
            output.advance(output.unsent().len());
            if !replying && (used == 0 || dialogue.phase() == Phase::Over) {
                break;
            }
        }
    }
    String::from_utf8(answer).expect("answers are text")
}

fn get(device: &mut Paper) -> String {
    talk(device, &mut Dialogue::default(), b"get=1\n\n", 7)
}

/// One input.
pub fn run(bytes: &[u8]) {
    let Some((&piece, bytes)) = bytes.split_first() else {
        return;
    };
    let mut device = Paper::new();
    let answer = talk(
        &mut device,
        &mut Dialogue::default(),
        bytes,
        usize::from(piece).max(1),
    );
    assert!(answer.is_empty() || answer.contains("errno="), "{answer:?}");

    let settings = get(&mut device);
    let mut request = String::from("set=1\nreplace_peers=true\n");
    for line in settings.lines() {
        let key = line.split('=').next().unwrap_or_default();
        if ![
            "errno",
            "protocol_version",
            "last_handshake_time_sec",
            "last_handshake_time_nsec",
            "rx_bytes",
            "tx_bytes",
            "",
        ]
        .contains(&key)
        {
            request += line;
            request.push('\n');
        }
    }
    request.push('\n');
    let mut copy = Paper::new();
    let answer = talk(
        &mut copy,
        &mut Dialogue::default(),
        request.as_bytes(),
        4096,
    );
    assert_eq!(answer, "errno=0\n\n", "{request}");
    assert_eq!(get(&mut copy), settings);
}
