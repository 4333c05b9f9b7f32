//! Real programs on a device behind a gateway, without Seikan on the device.
//!
//! ```text
//! device eth0 --- lan0 gateway wan0 --- wan0 remote
//! 192.168.1.10                10.0.0.1     10.0.0.2       on the interfaces; the remote is mapped to 192.168.1.202
//! 10.77.0.10       10.77.0.1               10.77.0.2      in the overlay; fd77::10 and so on
//! ```

use std::fs;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use seikan_interop::{Implementation, find_program, skip};
use seikan_sys::netlink::AddressOptions;
use seikan_sys::netns::NetNs;

/// Address of the remote for the device.
const SHOWN: [&str; 2] = ["192.168.1.202", "fd00:1::202"];
/// Address of the device for the remote.
const DEVICE: [&str; 2] = ["10.77.0.10", "fd77::10"];
/// Bytes to fetch.
const FILE: usize = 5_000_000;
/// Time to wait for an expected event.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes through a shell session in each direction: some hundred super-packets.
const SESSION: usize = 20_000_000;

/// A host.
type Which = fn(&Site) -> &NetNs;

/// The hosts and their programs, which end on drop.
struct Site {
    device: NetNs,
    gateway: NetNs,
    remote: NetNs,
    folder: tempfile::TempDir,
    running: Vec<Child>,
}

impl Drop for Site {
    fn drop(&mut self) {
        for child in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
        // Left over by killed tunnels.
        let configs = fs::read_dir(self.folder.path()).into_iter().flatten();
        for config in configs.flatten().map(|entry| entry.path()) {
            if config.extension().is_some_and(|end| end == "toml")
                && let Some(name) = config.file_stem().and_then(|name| name.to_str())
            {
                let _ = fs::remove_file(format!("/var/run/wireguard/{name}.sock"));
            }
        }
    }
}

impl Site {
    /// Starts hosts and tunnels, with the gateway in this mode. Returns `None`, with a message, if
    /// the machine lacks something.
    fn up(name: &str, mode: &str) -> Result<Option<Site>> {
        if !Path::new("/dev/net/tun").exists() {
            skip("no /dev/net/tun");
            return Ok(None);
        }
        let hosts = [(); 3].map(|()| NetNs::create());
        let [Ok(device), Ok(gateway), Ok(remote)] = hosts else {
            skip("no privilege to make network namespaces");
            return Ok(None);
        };
        let mut site = Site {
            device,
            gateway,
            remote,
            folder: tempfile::tempdir()?,
            running: Vec::new(),
        };
        // Programs that drop their privileges read files here, too.
        fs::set_permissions(site.folder.path(), fs::Permissions::from_mode(0o755))?;
        join((&site.gateway, "lan0"), (&site.device, "eth0"))?;
        join((&site.gateway, "wan0"), (&site.remote, "wan0"))?;
        for (host, interface, addresses) in [
            (
                &site.device,
                "eth0",
                vec!["192.168.1.10/24", "fd00:1::10/64"],
            ),
            (
                &site.gateway,
                "lan0",
                match mode {
                    "routed" => vec!["192.168.1.1/24", "fd00:1::1/64"],
                    _ => vec![],
                },
            ),
            (&site.gateway, "wan0", vec!["10.0.0.1/24"]),
            (&site.remote, "wan0", vec!["10.0.0.2/24"]),
        ] {
            configure(host, interface, &addresses)?;
        }
        let seikan = Implementation::SeikanNative.program()?;
        let [gateway, remote] = site.write(name, mode, &seikan)?;
        for (host, config) in [(&site.gateway, &gateway), (&site.remote, &remote)] {
            let mut command = Command::new(&seikan);
            command.arg("up").arg(config);
            command.env("SEIKAN_RUN_DIR", site.folder.path());
            let log = fs::File::create(config.with_extension("log"))?;
            command
                .stdin(Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log);
            site.running.push(host.spawn_command(&mut command)?);
        }
        for (host, target) in [(&site.device, SHOWN), (&site.remote, DEVICE)] {
            for target in target {
                wait_for(&format!("no answer from {target}"), || {
                    run(host, &["ping", "-c", "1", "-W", "1", target]).is_ok()
                })?;
            }
        }
        Ok(Some(site))
    }

    /// Writes the configurations of gateway and remote.
    fn write(&self, name: &str, mode: &str, seikan: &Path) -> Result<[PathBuf; 2]> {
        let pair = || -> Result<[String; 2]> {
            let genkey = run(&self.device, &[&seikan.to_string_lossy(), "genkey"])?;
            let script = format!("echo {} | {} pubkey", genkey.trim(), seikan.display());
            let public = run(&self.device, &["sh", "-c", &script])?;
            Ok([genkey, public].map(|text| text.trim().to_owned()))
        };
        let (gateway, remote) = (pair()?, pair()?);
        let proxy_arp = mode == "routed";
        let texts = [
            format!(
                r#"
private-key = "{}"
listen-port = 7000
address = ["10.77.0.1/24", "fd77::1/64"]
[[peer]]
public-key = "{}"
allowed-ips = ["10.77.0.2/32", "fd77::2/128"]
endpoint = "10.0.0.2:7000"
[gateway]
interface = "lan0"
mode = "{mode}"
proxy-arp = {proxy_arp}
[[gateway.device]]
name = "device"
lan = ["192.168.1.10", "fd00:1::10"]
overlay = ["10.77.0.10", "fd77::10"]
[[gateway.remote]]
overlay = "10.77.0.2"
lan = "192.168.1.202"
[[gateway.remote]]
overlay = "fd77::2"
lan = "fd00:1::202"
"#,
                gateway[0], remote[1]
            ),
            format!(
                r#"
private-key = "{}"
listen-port = 7000
address = ["10.77.0.2/24", "fd77::2/64"]
[[peer]]
public-key = "{}"
allowed-ips = ["10.77.0.0/24", "fd77::/64"]
endpoint = "10.0.0.1:7000"
"#,
                remote[0], gateway[1]
            ),
        ];
        let mut paths = [PathBuf::new(), PathBuf::new()];
        for ((path, text), side) in paths.iter_mut().zip(texts).zip(["g", "r"]) {
            // The interface is named after the file; the name must be unique on this machine.
            let file = format!("i{}{name}{side}.toml", std::process::id());
            *path = self.folder.path().join(file);
            fs::write(&*path, text)?;
            fs::set_permissions(&*path, fs::Permissions::from_mode(0o600))?;
        }
        Ok(paths)
    }

    /// Starts a program that ends with the site.
    fn start(&mut self, on: Which, words: &[&str]) -> Result<()> {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = on(self).spawn_command(&mut command);
        self.running
            .push(child.with_context(|| format!("{words:?}"))?);
        Ok(())
    }

    /// Serves a folder over HTTP on port 8080.
    fn serve(&mut self, on: Which, files: &Path) -> Result<()> {
        let root = files.to_string_lossy().into_owned();
        if find_program("nginx").is_none() {
            let words = [
                "python3",
                "-m",
                "http.server",
                "8080",
                "--bind",
                "::",
                "-d",
                &root,
            ];
            return self.start(on, &words);
        }
        let config = files.join("nginx.conf");
        let text = format!(
            "daemon off; master_process off; pid {root}/pid; error_log stderr;\n\
             events {{}}\n\
             http {{\n access_log off; sendfile on;\n\
             client_body_temp_path {root}/b; proxy_temp_path {root}/p; fastcgi_temp_path {root}/f;\n\
             uwsgi_temp_path {root}/u; scgi_temp_path {root}/s;\n\
             server {{ listen 8080; listen [::]:8080; root {root}; }}\n}}\n"
        );
        fs::write(&config, text)?;
        self.start(on, &["nginx", "-c", &config.to_string_lossy()])
    }
}

fn join((a, interface): (&NetNs, &str), (b, other): (&NetNs, &str)) -> Result<()> {
    a.netlink()?
        .create_veth(interface, other, Some(b.as_fd()))?;
    Ok(())
}

fn configure(host: &NetNs, interface: &str, addresses: &[&str]) -> Result<()> {
    let netlink = host.netlink()?;
    let index = netlink.link(interface)?.index;
    let options = AddressOptions {
        no_dad: true,
        ..AddressOptions::default()
    };
    for address in addresses {
        netlink.add_address_with(index, address.parse()?, options)?;
    }
    netlink.set_up(index)?;
    Ok(())
}

/// Runs a program to its end; returns its output.
fn run(host: &NetNs, words: &[&str]) -> Result<String> {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = host.spawn_command(&mut command)?.wait_with_output()?;
    let [text, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ensure!(output.status.success(), "{words:?}: {text}{errors}");
    Ok(text)
}

fn wait_for(failure: &str, mut is_so: impl FnMut() -> bool) -> Result<()> {
    let begin = Instant::now();
    while !is_so() {
        if begin.elapsed() > PATIENCE {
            bail!("{failure}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Waits until a program listens on a port.
fn listens(host: &NetNs, port: u16) -> Result<()> {
    let there = SocketAddr::from(([127, 0, 0, 1], port));
    configure(host, "lo", &[])?;
    wait_for(&format!("nobody listens on port {port}"), || {
        let connect = || std::net::TcpStream::connect(there).is_ok();
        host.run(connect).unwrap_or(false)
    })
}

/// An iperf3 server refuses clients until it has finished with the previous one; then it closes its
/// socket, which resets connections that it has not accepted, and listens anew.
fn when_free(mut client: impl FnMut() -> Result<String>) -> Result<String> {
    let begin = Instant::now();
    loop {
        match client() {
            Err(refused)
                if ["server is busy", "unable to connect", "reset by peer"]
                    .iter()
                    .any(|reason| refused.to_string().contains(reason))
                    && begin.elapsed() < PATIENCE =>
            {
                std::thread::sleep(Duration::from_millis(200));
            }
            done => return done,
        }
    }
}

#[test]
fn iperf3_in_both_directions() -> Result<()> {
    if find_program("iperf3").is_none() {
        skip("no `iperf3`: install it");
        return Ok(());
    }
    let Some(mut site) = Site::up("i", "transparent")? else {
        return Ok(());
    };
    site.start(|site| &site.remote, &["iperf3", "-s"])?;
    site.start(|site| &site.device, &["iperf3", "-s"])?;
    listens(&site.remote, 5201)?;
    listens(&site.device, 5201)?;
    for (host, targets) in [(&site.device, SHOWN), (&site.remote, DEVICE)] {
        for target in targets {
            for way in [&[][..], &["-R"]] {
                let words = [&["iperf3", "-f", "m", "-t", "1", "-c", target], way].concat();
                let text = when_free(|| run(host, &words))?;
                // "[  5]   0.00-1.00   sec   600 MBytes  5033 Mbits/sec                  receiver"
                let line = text.lines().find(|line| line.ends_with("receiver"));
                let words: Vec<&str> = line.context("no result")?.split_whitespace().collect();
                let rate = words.iter().position(|word| *word == "Mbits/sec");
                let rate: f64 = words[rate.context("no rate")? - 1].parse()?;
                eprintln!("{target} {way:?}: {rate} Mbit/s");
                // A gateway that cannot handle super-packets is a hundred times slower.
                ensure!(rate > 50.0, "{target} {way:?}: {text}");
            }
        }
    }
    Ok(())
}

#[test]
fn curl_in_both_directions() -> Result<()> {
    if find_program("curl").is_none() {
        skip("no `curl`: install it");
        return Ok(());
    }
    let Some(mut site) = Site::up("c", "transparent")? else {
        return Ok(());
    };
    let content = content(FILE);
    let folder = site.folder.path().to_owned();
    let servers: [(&str, Which); 2] = [
        ("remote", |site| &site.remote),
        ("device", |site| &site.device),
    ];
    for (name, on) in servers {
        let files = folder.join(name);
        fs::create_dir(&files)?;
        fs::write(files.join("file"), &content)?;
        site.serve(on, &files)?;
        listens(on(&site), 8080)?;
    }
    let expected = sha256(&site, &folder.join("remote/file"))?;
    for (host, targets) in [(&site.device, SHOWN), (&site.remote, DEVICE)] {
        for target in targets {
            let host_part = if target.contains(':') {
                format!("[{target}]")
            } else {
                target.to_owned()
            };
            let (url, fetched) = (
                format!("http://{host_part}:8080/file"),
                folder.join("fetched"),
            );
            let to = fetched.to_string_lossy();
            run(
                host,
                &[
                    "curl",
                    "-sS",
                    "--fail",
                    "--max-time",
                    "20",
                    "-g",
                    "-o",
                    &to,
                    &url,
                ],
            )?;
            ensure!(
                sha256(&site, &fetched)? == expected,
                "{url} differs from the served file"
            );
        }
    }
    Ok(())
}

/// Returns bytes without repetitions (Knuth's linear congruential generator, MMIX).
fn content(length: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let bytes = std::iter::repeat_with(|| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    });
    bytes.take(length).collect()
}

fn sha256(site: &Site, file: &Path) -> Result<String> {
    let text = run(&site.gateway, &["sha256sum", &file.to_string_lossy()])?;
    Ok(text
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .to_owned())
}

#[test]
fn ssh_through_a_transparent_gateway() -> Result<()> {
    ssh_session("s", "transparent")
}

#[test]
fn ssh_through_a_routed_gateway() -> Result<()> {
    ssh_session("r", "routed")
}

/// Runs Dropbear's client on the device against its server on the remote. One command there writes
/// data for the client to print, another reads data from the client.
fn ssh_session(name: &str, mode: &str) -> Result<()> {
    for program in ["dropbear", "dbclient", "dropbearkey"] {
        if find_program(program).is_none() {
            skip(&format!("no `{program}`: install dropbear-bin"));
            return Ok(());
        }
    }
    let Some(mut site) = Site::up(name, mode)? else {
        return Ok(());
    };
    let home = site.folder.path().join("home");
    let keys = home.join(".ssh");
    fs::create_dir_all(&keys)?;
    let [host_key, own_key] = ["host", "own"].map(|key| keys.join(key).display().to_string());
    let mut authorized = String::new();
    for key in [&host_key, &own_key] {
        let text = run(&site.device, &["dropbearkey", "-t", "ed25519", "-f", key])?;
        let public = text.lines().find(|line| line.starts_with("ssh-ed25519 "));
        authorized = public.context("no public key")?.to_owned() + "\n";
    }
    fs::write(keys.join("authorized_keys"), authorized)?;
    fs::set_permissions(&home, fs::Permissions::from_mode(0o700))?;
    fs::set_permissions(&keys, fs::Permissions::from_mode(0o700))?;
    // The server searches for keys in the home directory of passwd(5): this file replaces it for
    // the server alone.
    let (passwd, pid) = (site.folder.path().join("passwd"), home.join("pid"));
    let user = format!("root:x:0:0::{}:/bin/sh\n", home.display());
    fs::write(&passwd, user)?;
    let script = format!(
        "mount --bind {} /etc/passwd && exec dropbear -F -E -m -s -r {host_key} -P {} -p 22",
        passwd.display(),
        pid.display()
    );
    site.start(
        |site| &site.remote,
        &["unshare", "--mount", "sh", "-c", &script],
    )?;
    listens(&site.remote, 22)?;
    let [file, sent, printed] = ["file", "sent", "printed"].map(|name| home.join(name));
    fs::write(&file, content(SESSION))?;
    let expected = sha256(&site, &file)?;
    for target in SHOWN {
        // Accepts the host's key the first time, and requires it afterwards.
        let client = format!(
            "HOME={} timeout 30 dbclient -y -T -i {own_key} root@{target}",
            home.display()
        );
        let there = format!("{client} 'cat >{}' <{}", sent.display(), file.display());
        let back = format!("{client} 'cat {}' >{}", file.display(), printed.display());
        for (command, result) in [(there, &sent), (back, &printed)] {
            run(&site.device, &["sh", "-c", &command])?;
            ensure!(sha256(&site, result)? == expected, "{command} changed it");
            fs::remove_file(result)?;
        }
    }
    Ok(())
}
