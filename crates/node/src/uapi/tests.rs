use super::*;
use proptest::prelude::*;
use seikan_proto::capabilities::Cipher;
use seikan_proto::noise::Protocol;
use seikan_proto::rng::Rng;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::TunnelConfig;
use std::time::Duration;

struct Fixed;

impl Rng for Fixed {
    fn fill(&mut self, destination: &mut [u8]) {
        destination.fill(7);
    }
}

/// A device without sockets; port 1 belongs to somebody else.
struct Fake {
    tunnel: Tunnel,
    keyless: bool,
    port: u16,
    mark: u32,
}

impl Fake {
    fn new() -> Fake {
        Fake {
            tunnel: Tunnel::new(TunnelConfig {
                protocol: Protocol::WireGuard,
                mode: seikan_proto::mode::Mode::Ip,
                private_key: PrivateKey::from_bytes([0x48; 32]),
                inner_mtu: 1420,
                offload: false,
                ciphers: vec![Cipher::ChaCha20Poly1305],
                copy_dscp: false,
                repair: None,
                rng: Box::new(Fixed),
            }),
            keyless: false,
            port: 51820,
            mark: 0,
        }
    }

    /// Returns the reply to `request`.
    fn ask(&mut self, request: &str) -> String {
        converse(self, &[request.as_bytes()]).0
    }
}

impl Device for Fake {
    fn tunnel(&self) -> &Tunnel {
        &self.tunnel
    }
    fn tunnel_mut(&mut self) -> &mut Tunnel {
        &mut self.tunnel
    }
    fn now(&self) -> Now {
        Now {
            mono: Instant::BOOT,
            wall: Duration::ZERO,
        }
    }
    fn private_key(&self) -> Option<&PrivateKey> {
        (!self.keyless).then(|| self.tunnel.identity().private())
    }
    fn set_private_key(&mut self, key: Option<PrivateKey>) {
        self.keyless = key.is_none();
        let key = key.unwrap_or(PrivateKey::from_bytes([0x50; 32]));
        self.tunnel.set_private_key(key);
    }
    fn listen_port(&self) -> u16 {
        self.port
    }
    fn set_listen_port(&mut self, port: u16) -> Result<(), Refusal> {
        if port == 1 {
            return Err(Refusal::PortInUse);
        }
        self.port = port;
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

/// Sends pieces one after the other, as the loop does; returns the reply, and whether the dialogue is over.
fn converse(device: &mut dyn Device, pieces: &[&[u8]]) -> (String, bool) {
    let mut dialogue = Dialogue::default();
    let (mut input, mut sent) = (Vec::new(), Vec::new());
    for piece in pieces {
        input.extend_from_slice(piece);
        loop {
            let mut output = Output::default();
            let used = match dialogue.phase() {
                Phase::Over => break,
                Phase::Replying => {
                    dialogue.give(device, &mut output);
                    1
                }
                _ => {
                    let used = dialogue.take(&input, device, &mut output);
                    assert!(used <= input.len());
                    input.drain(..used);
                    used
                }
            };
            sent.extend_from_slice(output.unsent());
            if used == 0 {
                break;
            }
        }
    }
    let over = dialogue.phase() == Phase::Over;
    (String::from_utf8(sent).unwrap(), over)
}

fn key(byte: u8) -> String {
    format!("{byte:02x}").repeat(32)
}

#[test]
fn a_configuration_is_returned_as_it_was_set() {
    let mut fake = Fake::new();
    let peer = key(0xaa);
    let reply = fake.ask(&format!(
        "set=1\nprivate_key={}\nlisten_port=1234\nfwmark=51820\nreplace_peers=true\n\
         public_key={peer}\npreshared_key={}\nprotocol_version=1\nendpoint=[2001:db8::1]:5\n\
         persistent_keepalive_interval=25\nreplace_allowed_ips=true\nallowed_ip=10.1.2.3/8\n\
         allowed_ip=fd00::/64\n\n",
        key(0x48),
        key(0xbb),
    ));
    assert_eq!(reply, "errno=0\n\n");
    assert_eq!(
        fake.ask("get=1\n\n"),
        format!(
            "private_key={}\nlisten_port=1234\nfwmark=51820\npublic_key={peer}\n\
             preshared_key={}\nprotocol_version=1\nendpoint=[2001:db8::1]:5\n\
             last_handshake_time_sec=0\nlast_handshake_time_nsec=0\ntx_bytes=0\nrx_bytes=0\n\
             persistent_keepalive_interval=25\nallowed_ip=10.0.0.0/8\nallowed_ip=fd00::/64\n\
             errno=0\n\n",
            key(0x48),
            key(0xbb),
        )
    );
}

#[test]
fn faults_have_the_errno_of_the_specification() {
    let good = format!("public_key={}", key(1));
    for (lines, errno) in [
        ("nonsense", -71),
        ("listen_port=65536", -22),
        ("listen_port=+5", -22),
        ("listen_port=", -22),
        ("listen_port=1", -98),
        ("fwmark=4294967296", -22),
        ("private_key=00", -22),
        ("replace_peers=yes", -22),
        ("colour=red", -22),
        ("allowed_ip=10.0.0.0/8", -22),
        ("public_key=zz", -22),
        (&format!("{good}\nprotocol_version=2"), -22),
        (&format!("{good}\nendpoint=10.0.0.1"), -22),
        (&format!("{good}\nallowed_ip=10.0.0.1"), -22),
        (&format!("{good}\nallowed_ip=10.0.0.1/33"), -22),
        (&format!("{good}\nlisten_port=5"), -22),
        (&format!("{good}\npersistent_keepalive_interval=65536"), -22),
    ] {
        let reply = Fake::new().ask(&format!("set=1\n{lines}\n\n"));
        assert_eq!(reply, format!("errno={errno}\n\n"), "{lines}");
    }
}

#[test]
fn after_a_fault_the_rest_of_the_request_is_skipped_and_the_next_is_served() {
    let mut fake = Fake::new();
    let reply = fake.ask("set=1\nlisten_port=7\nbad\nlisten_port=9\n\nget=1\n\n");
    assert!(reply.starts_with("errno=-71\n\nprivate_key="), "{reply}");
    assert!(reply.contains("\nlisten_port=7\n"), "{reply}");
}

#[test]
fn update_only_makes_no_peer() {
    let mut fake = Fake::new();
    let lines = "update_only=true\nallowed_ip=10.0.0.0/8";
    fake.ask(&format!("set=1\npublic_key={}\n{lines}\n\n", key(1)));
    assert_eq!(fake.tunnel.peers().count(), 0);
    fake.ask(&format!("set=1\npublic_key={}\n\n", key(1)));
    fake.ask(&format!("set=1\npublic_key={}\n{lines}\n\n", key(1)));
    let id = fake.tunnel.peers().next().unwrap().id;
    assert_eq!(fake.tunnel.allowed_ips(id).count(), 1);
}

#[test]
fn a_removed_peer_takes_no_more_lines() {
    let mut fake = Fake::new();
    let lines = "allowed_ip=10.0.0.0/8\nremove=true\nallowed_ip=10.0.0.0/8";
    let reply = fake.ask(&format!("set=1\npublic_key={}\n{lines}\n\n", key(1)));
    assert_eq!(reply, "errno=0\n\n");
    assert_eq!(fake.tunnel.peers().count(), 0);
}

#[test]
fn nobody_is_their_own_peer() {
    let mut fake = Fake::new();
    let own = fake
        .tunnel
        .identity()
        .public()
        .as_bytes()
        .map(|b| format!("{b:02x}"));
    let lines = "allowed_ip=10.0.0.0/8";
    let reply = fake.ask(&format!("set=1\npublic_key={}\n{lines}\n\n", own.concat()));
    assert_eq!(
        (reply.as_str(), fake.tunnel.peers().count()),
        ("errno=0\n\n", 0)
    );
}

#[test]
fn a_minus_takes_an_allowed_ip_from_its_peer_only() {
    let mut fake = Fake::new();
    fake.ask(&format!(
        "set=1\npublic_key={}\nallowed_ip=10.0.0.0/8\nallowed_ip=11.0.0.0/8\n\n",
        key(1)
    ));
    fake.ask(&format!(
        "set=1\npublic_key={}\nallowed_ip=-11.0.0.0/8\npublic_key={}\nallowed_ip=-10.0.0.0/8\n\n",
        key(2),
        key(1)
    ));
    let id = fake.tunnel.peers().next().unwrap().id;
    let left: Vec<_> = fake.tunnel.allowed_ips(id).map(|p| p.to_string()).collect();
    assert_eq!(left, ["11.0.0.0/8"]);
}

#[test]
fn without_a_key_none_is_returned() {
    let mut fake = Fake::new();
    fake.ask(&format!("set=1\nprivate_key={}\n\n", key(0)));
    assert!(!fake.ask("get=1\n\n").contains("private_key"));
    fake.ask(&format!("set=1\nprivate_key={}\n\n", key(0x48)));
    assert!(fake.ask("get=1\n\n").contains(&key(0x48)));
}

#[test]
fn other_protocols_get_no_answer() {
    for request in ["GET / HTTP/1.1\r\n\r\n", "\n", "get=2\n\n", "set=\n"] {
        let over = converse(&mut Fake::new(), &[request.as_bytes()]);
        assert_eq!(over, (String::new(), true), "{request:?}");
    }
}

#[test]
fn a_line_without_end_is_refused() {
    let line = "a".repeat(MAX_LINE);
    let request = format!("set=1\n{line}");
    let reply = converse(&mut Fake::new(), &[request.as_bytes()]);
    assert_eq!(reply, ("errno=-71\n\n".into(), true));
    let (almost, _) = request.split_at(request.len() - 1);
    assert_eq!(
        converse(&mut Fake::new(), &[almost.as_bytes()]),
        (String::new(), false)
    );
}

#[test]
fn a_request_without_end_is_refused() {
    let mut fake = Fake::new();
    let mut dialogue = Dialogue::default();
    let mut output = Output::default();
    dialogue.take(b"set=1\n", &mut fake, &mut output);
    let lines = "listen_port=5\n".repeat(4096);
    for _ in 0..=MAX_REQUEST / lines.len() {
        dialogue.take(lines.as_bytes(), &mut fake, &mut output);
    }
    assert_eq!(output.unsent(), b"errno=-7\n\n");
    assert_eq!(dialogue.phase(), Phase::Over);
}

#[test]
fn a_long_reply_comes_in_pieces() {
    let mut fake = Fake::new();
    for i in 0..2000u32 {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&i.to_le_bytes());
        fake.tunnel
            .add_peer(seikan_proto::keys::PublicKey::from_bytes(bytes));
    }
    let mut dialogue = Dialogue::default();
    let mut output = Output::default();
    dialogue.take(b"get=1\n\n", &mut fake, &mut output);
    let (mut pieces, mut peers) = (0, 0);
    while dialogue.phase() == Phase::Replying {
        dialogue.give(&fake, &mut output);
        assert!(output.unsent().len() < crate::output::PIECE + 1024);
        let text = std::str::from_utf8(output.unsent()).unwrap();
        peers += text.matches("public_key=").count();
        output.advance(usize::MAX / 2);
        pieces += 1;
    }
    assert_eq!(peers, 2000);
    assert!(pieces > 5, "{pieces}");
}

/// Lines that are nearly right, so that more than the first check is reached.
fn line() -> impl Strategy<Value = String> {
    let key = || (0..4u8).prop_map(key);
    let prefix = (any::<u8>(), 0..34u8).prop_map(|(a, l)| format!("{a}.0.0.0/{l}"));
    prop_oneof![
        4 => key().prop_map(|k| format!("public_key={k}")),
        1 => key().prop_map(|k| format!("preshared_key={k}")),
        1 => key().prop_map(|k| format!("private_key={k}")),
        4 => (any::<bool>(), prefix).prop_map(|(minus, p)| {
            format!("allowed_ip={}{p}", if minus { "-" } else { "" })
        }),
        1 => (0..70_000u32).prop_map(|n| format!("listen_port={n}")),
        1 => any::<u32>().prop_map(|n| format!("fwmark={n}")),
        1 => (0..70_000u32).prop_map(|n| format!("persistent_keepalive_interval={n}")),
        1 => (0..70_000u32).prop_map(|n| format!("endpoint=1.2.3.4:{n}")),
        1 => Just("endpoint=[fe80::1%lo]:5".to_owned()),
        1 => prop_oneof![
            Just("remove"), Just("update_only"), Just("replace_allowed_ips"), Just("replace_peers")
        ].prop_map(|name| format!("{name}=true")),
        1 => Just("get=1".to_owned()),
        2 => Just("set=1".to_owned()),
        3 => Just(String::new()),
        1 => "[ -~]{0,40}",
    ]
}

proptest! {
    #[test]
    fn how_bytes_are_cut_up_changes_nothing(
        lines in prop::collection::vec(line(), 0..60),
        cuts in prop::collection::vec(1..200usize, 0..60),
    ) {
        let text = format!("set=1\n{}\n", lines.join("\n"));
        let (mut rest, mut pieces) = (text.as_bytes(), Vec::new());
        for cut in cuts {
            let (piece, behind) = rest.split_at(cut.min(rest.len()));
            pieces.push(piece);
            rest = behind;
        }
        pieces.push(rest);
        let whole = converse(&mut Fake::new(), &[text.as_bytes()]);
        prop_assert_eq!(converse(&mut Fake::new(), &pieces), whole);
    }

    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..4000)) {
        converse(&mut Fake::new(), &[b"set=1\n", &bytes]);
        converse(&mut Fake::new(), &[&bytes]);
    }
}
