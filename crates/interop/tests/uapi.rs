//! The configuration socket with the `wg` command: show, set, syncconf.
//!
//! The other end is wireguard-go, so that changes by `wg` show on the wire.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use seikan_interop::{Implementation, Setup, Tunnel};

/// Time to wait for an answer that must not arrive.
const SILENCE: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_secs(20);

/// Starts a tunnel between Seikan, `a`, and wireguard-go, and sends a packet through it.
fn tunnel(setup: Setup) -> Result<Option<Tunnel>> {
    let Some(tunnel) = Tunnel::up(setup)? else {
        return Ok(None);
    };
    tunnel.ping(&tunnel.b, false, 1, 56)?;
    Ok(Some(tunnel))
}

fn with_wireguard_go() -> Setup {
    Setup::new(Implementation::under_test(), Implementation::WireguardGo)
}

/// The fields of `wg show INTERFACE dump`, wg(8): one line of the interface, one of each peer.
fn dump(tunnel: &Tunnel) -> Result<Vec<Vec<String>>> {
    let text = tunnel.a.wg(&["show", &tunnel.a.interface, "dump"])?;
    Ok(text
        .lines()
        .map(|line| line.split('\t').map(str::to_owned).collect())
        .collect())
}

#[test]
fn show_lists_keys_port_endpoint_traffic_and_handshake() -> Result<()> {
    let Some(tunnel) = tunnel(Setup {
        preshared_key: true,
        keepalive: 25,
        ..with_wireguard_go()
    })?
    else {
        return Ok(());
    };
    let lines = dump(&tunnel)?;
    ensure!(lines.len() == 2, "{lines:?}");
    let their_view = tunnel.b.wg(&["show", &tunnel.b.interface, "dump"])?;
    let theirs: Vec<Vec<&str>> = their_view
        .lines()
        .map(|line| line.split('\t').collect())
        .collect();
    let (interface, peer) = (&lines[0], &lines[1]);
    ensure!(
        interface[1] == theirs[1][0],
        "our public key is {}, they know {}",
        interface[1],
        theirs[1][0]
    );
    ensure!(
        interface[2..] == ["51820", "off"],
        "port and mark: {:?}",
        &interface[2..]
    );
    ensure!(peer[0] == theirs[0][1], "their public key");
    ensure!(
        peer[1] == theirs[1][1] && peer[1] != "(none)",
        "the preshared key"
    );
    ensure!(peer[2] == "10.66.0.2:51820", "the endpoint {}", peer[2]);
    let mut allowed: Vec<&str> = peer[3].split(',').collect();
    allowed.sort_unstable();
    ensure!(
        allowed == ["10.67.0.2/32", "fd67::2/128"],
        "allowed IPs {allowed:?}"
    );
    let age = tunnel.a.handshake_age()?.context("no handshake")?;
    ensure!(
        age < Duration::from_secs(30),
        "the handshake is {age:?} old"
    );
    // At least the handshake (148 or 92 bytes) and one padded ping (128 bytes).
    let (received, sent): (u64, u64) = (peer[5].parse()?, peer[6].parse()?);
    ensure!(
        (220..5000).contains(&received) && (220..5000).contains(&sent),
        "{received} received, {sent} sent"
    );
    ensure!(peer[7] == "25", "the keepalive {}", peer[7]);
    Ok(())
}

#[test]
fn set_removes_a_peer_and_adds_it_again() -> Result<()> {
    let Some(tunnel) = tunnel(with_wireguard_go())? else {
        return Ok(());
    };
    let peer = dump(&tunnel)?[1][0].clone();
    tunnel
        .a
        .wg(&["set", &tunnel.a.interface, "peer", &peer, "remove"])?;
    ensure!(dump(&tunnel)?.len() == 1, "the peer is still listed");
    ensure!(
        tunnel.time_to_answer(&tunnel.b, SILENCE).is_err(),
        "a removed peer answers"
    );
    let (endpoint, allowed) = ("10.66.0.2:51820", "10.67.0.2/32,fd67::2/128");
    let arguments = [
        "set",
        &tunnel.a.interface,
        "peer",
        &peer,
        "endpoint",
        endpoint,
        "allowed-ips",
        allowed,
    ];
    tunnel.a.wg(&arguments)?;
    tunnel.time_to_answer(&tunnel.b, SOON)?;
    Ok(())
}

#[test]
fn set_narrows_the_allowed_ips() -> Result<()> {
    let Some(tunnel) = tunnel(with_wireguard_go())? else {
        return Ok(());
    };
    let peer = dump(&tunnel)?[1][0].clone();
    tunnel.a.wg(&[
        "set",
        &tunnel.a.interface,
        "peer",
        &peer,
        "allowed-ips",
        "fd67::2/128",
    ])?;
    ensure!(
        tunnel.time_to_answer(&tunnel.b, SILENCE).is_err(),
        "IPv4 still goes through"
    );
    tunnel.ping(&tunnel.b, true, 1, 56)
}

#[test]
fn set_moves_to_another_port_and_the_peer_follows() -> Result<()> {
    let Some(tunnel) = tunnel(with_wireguard_go())? else {
        return Ok(());
    };
    tunnel
        .a
        .wg(&["set", &tunnel.a.interface, "listen-port", "40405"])?;
    tunnel.time_to_answer(&tunnel.b, SOON)?;
    ensure!(tunnel.b.show("endpoints")? == "10.66.0.1:40405");
    Ok(())
}

#[test]
fn set_changes_the_preshared_key_for_the_next_handshake() -> Result<()> {
    let Some(tunnel) = tunnel(with_wireguard_go())? else {
        return Ok(());
    };
    let file = tempfile::NamedTempFile::new()?;
    fs::write(file.path(), tunnel.a.wg(&["genpsk"])?)?;
    let key = file.path().to_string_lossy();
    for side in [&tunnel.a, &tunnel.b] {
        let peer = side.wg(&["show", &side.interface, "peers"])?;
        side.wg(&[
            "set",
            &side.interface,
            "peer",
            peer.trim(),
            "preshared-key",
            &key,
        ])?;
    }
    ensure!(tunnel.a.show("preshared-keys")? == tunnel.b.show("preshared-keys")?);
    tunnel.time_to_answer(&tunnel.b, SOON)?;
    Ok(())
}

#[test]
fn syncconf_changes_differences_and_keeps_the_session() -> Result<()> {
    let Some(tunnel) = tunnel(with_wireguard_go())? else {
        return Ok(());
    };
    let before = tunnel.a.show("latest-handshakes")?;
    let file = tempfile::NamedTempFile::new()?;
    fs::write(
        file.path(),
        tunnel.a.wg(&["showconf", &tunnel.a.interface])? + "PersistentKeepalive = 7\n",
    )?;
    tunnel.a.wg(&[
        "syncconf",
        &tunnel.a.interface,
        &file.path().to_string_lossy(),
    ])?;
    ensure!(tunnel.a.show("persistent-keepalive")? == "7");
    tunnel.ping(&tunnel.b, false, 1, 56)?;
    ensure!(
        tunnel.a.show("latest-handshakes")? == before,
        "the session was dropped"
    );
    Ok(())
}

#[test]
fn syncconf_removes_a_peer_that_is_not_in_the_file() -> Result<()> {
    let Some(tunnel) = tunnel(with_wireguard_go())? else {
        return Ok(());
    };
    let file = tempfile::NamedTempFile::new()?;
    let all = tunnel.a.wg(&["showconf", &tunnel.a.interface])?;
    fs::write(
        file.path(),
        all.split("[Peer]").next().context("no interface")?,
    )?;
    tunnel.a.wg(&[
        "syncconf",
        &tunnel.a.interface,
        &file.path().to_string_lossy(),
    ])?;
    ensure!(dump(&tunnel)?.len() == 1, "the peer is still listed");
    Ok(())
}

#[test]
fn a_wrong_request_is_refused_and_changes_nothing() -> Result<()> {
    let Some(tunnel) = tunnel(with_wireguard_go())? else {
        return Ok(());
    };
    let before = dump(&tunnel)?;
    for request in [
        "set=1\nlisten_port=70000\n\n",
        "set=1\nprivate_key=zz\n\n",
        "set=1\nno_such_key=1\n\n",
        "set=1\nallowed_ip=10.0.0.0/8\n\n",
    ] {
        let answer = tunnel.a.uapi(request)?;
        let errno = answer
            .trim()
            .strip_prefix("errno=")
            .with_context(|| format!("{answer:?} to {request:?}"))?;
        ensure!(errno != "0", "{request:?} was accepted");
    }
    ensure!(dump(&tunnel)?[0] == before[0]);
    Ok(())
}
