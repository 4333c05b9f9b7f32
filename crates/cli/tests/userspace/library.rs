//! Programs with the library: its examples.

use crate::common::eventually;
use crate::mesh::site::at_a_site;
use crate::userspace::client::{assert_echo, connect};
use crate::userspace::user::{NOBODY, User};
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// A copy of an example that the user may execute.
pub fn example(user: &User, name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this binary");
    let build = test.parent().and_then(Path::parent).expect("the build");
    let program = user.folder.path().join(name);
    std::fs::copy(build.join("examples").join(name), &program).expect("the example");
    program
}

#[test]
fn a_program_joins_a_mesh_and_serves_its_members() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let [a, service] = [site.host(), site.host()];
        a.join("a", &site.token(&[]));
        let _a = a.up();
        let user = User::new(NOBODY);
        let program = example(&user, "echo");
        let [token, pin] = site.token(&[]);
        let words = ["https://192.0.2.1:7443", &pin, &token, "svc", "svc.toml"];
        // The second start needs no token: the file has everything.
        for words in [words, [words[0], words[1], "used-up", words[3], words[4]]] {
            let mut command = user.command_of(&program, &words);
            command.stderr(Stdio::inherit());
            let started = service.netns.spawn_command(&mut command);
            let mut child = started.expect("started");
            let stdout = child.stdout.take().expect("piped");
            let mut line = String::new();
            BufReader::new(stdout).read_line(&mut line).expect("a line");
            assert_eq!(line, "svc listens\n");
            let members = site.members();
            let own = members.iter().find(|member| member["name"] == "svc");
            let own = &own.expect("a member")["addresses"];
            let own = own.as_array().expect("addresses").iter();
            let own = own.filter_map(|ip| ip.as_str()?.parse().ok());
            let own: Vec<std::net::Ipv4Addr> = own.collect();
            let at = SocketAddr::new(own[0].into(), 7);
            let mut stream = None;
            eventually("the service answers", || {
                stream = connect(&a.netns, at).ok();
                stream.is_some()
            });
            assert_echo(stream.expect("connected"));
            let answer = a.netns.run(|| -> std::io::Result<usize> {
                let socket = UdpSocket::bind("0.0.0.0:0")?;
                socket.set_read_timeout(Some(Duration::from_secs(60)))?;
                socket.send_to(b"query", at)?;
                socket.recv(&mut [0; 16])
            });
            assert_eq!(answer.expect("namespace").expect("an answer"), 5);
            child.kill().expect("killed");
            child.wait().expect("an end");
        }
        let kept = user.home().join("svc.state");
        assert!(kept.is_dir(), "{kept:?}");
    });
}
