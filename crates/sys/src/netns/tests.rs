use std::net::UdpSocket;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::*;
use crate::testing::{in_child, skip};

fn namespace() -> Option<NetNs> {
    NetNs::create()
        .map_err(|error| skip(&error.to_string()))
        .ok()
}

/// Whether any process or thread is in the namespace, or it is mounted.
fn namespace_is_alive(id: u64) -> bool {
    let tasks = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .flat_map(|process| {
            fs::read_dir(process.path().join("task"))
                .into_iter()
                .flatten()
                .flatten()
        });
    let label = format!("net:[{id}]");
    let lived_in = tasks
        .filter_map(|task| fs::read_link(task.path().join("ns/net")).ok())
        .any(|link| link.as_os_str() == label.as_str());
    lived_in
        || fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .contains(&label)
}

/// Whether the namespace ends within seconds. A joined thread leaves its namespace a moment after
/// join returns (do_exit wakes the joiner first), and a namespace of another test may reuse the
/// number.
fn namespace_dies(id: u64) -> bool {
    let deadline = Instant::now() + Duration::from_secs(10);
    while namespace_is_alive(id) {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
    true
}

#[test]
fn a_new_namespace_has_only_a_working_loopback() {
    let Some(namespace) = namespace() else { return };
    let (devices, echoed) = namespace
        .run(|| {
            let devices = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
            let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
            sender
                .send_to(b"hello", receiver.local_addr().unwrap())
                .unwrap();
            receiver
                .set_read_timeout(Some(Duration::from_secs(5)))
                .unwrap();
            let mut buffer = [0; 16];
            let (length, _) = receiver.recv_from(&mut buffer).unwrap();
            (devices, buffer[..length].to_vec())
        })
        .unwrap();
    let names: Vec<_> = devices
        .lines()
        .skip(2)
        .filter_map(|line| line.split(':').next())
        .map(str::trim)
        .collect();
    // Kernels with built-in tunnel modules add their fallback devices (sit0, tunl0 ...).
    assert!(
        names.contains(&"lo") && !names.contains(&"eth0"),
        "{names:?}"
    );
    assert_eq!(echoed, b"hello");
}

#[test]
fn the_calling_thread_stays_where_it_is() {
    let Some(namespace) = namespace() else { return };
    let before = fs::read_link(OWN_NAMESPACE).unwrap();
    let inside = namespace
        .run(|| fs::read_link(OWN_NAMESPACE).unwrap())
        .unwrap();
    assert_eq!(fs::read_link(OWN_NAMESPACE).unwrap(), before);
    assert_eq!(
        inside.to_str().unwrap(),
        format!("net:[{}]", namespace.id().unwrap())
    );
}

#[test]
fn a_panic_inside_reaches_the_caller_and_leaves_nothing() {
    let Some(namespace) = namespace() else { return };
    let id = namespace.id().unwrap();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = namespace.run(|| panic!("inside"));
    }));
    assert_eq!(outcome.unwrap_err().downcast_ref::<&str>(), Some(&"inside"));
    drop(namespace);
    assert!(namespace_dies(id));
}

#[test]
fn current_is_the_callers_own() {
    let label = fs::read_link(OWN_NAMESPACE).unwrap();
    let id = NetNs::current().unwrap().id().unwrap();
    assert_eq!(label.to_str().unwrap(), format!("net:[{id}]"));
}

#[test]
fn a_thread_lives_in_the_namespace() {
    let Some(namespace) = namespace() else { return };
    let thread = namespace
        .spawn_thread("inside", || fs::read_link(OWN_NAMESPACE).unwrap())
        .unwrap();
    let label = thread.join().unwrap();
    assert_eq!(
        label.to_str().unwrap(),
        format!("net:[{}]", namespace.id().unwrap())
    );
}

#[test]
fn a_command_runs_in_the_namespace() {
    let Some(namespace) = namespace() else { return };
    let mut command = Command::new("readlink");
    command.arg("/proc/self/ns/net").stdout(Stdio::piped());
    let output = namespace
        .spawn_command(&mut command)
        .unwrap()
        .wait_with_output()
        .unwrap();
    let label = String::from_utf8(output.stdout).unwrap();
    assert_eq!(label.trim(), format!("net:[{}]", namespace.id().unwrap()));
}

#[test]
fn a_command_outlives_the_thread_that_started_it() {
    let Some(namespace) = namespace() else { return };
    let mut child = thread::scope(|scope| {
        scope
            .spawn(|| {
                namespace
                    .spawn_command(Command::new("sleep").arg("60"))
                    .unwrap()
            })
            .join()
            .unwrap()
    });
    thread::sleep(Duration::from_millis(100));
    let still_running = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(still_running);
}

#[test]
fn a_command_dies_with_its_process() {
    use std::io::{Read, Write};
    let Some(namespace) = namespace() else { return };
    let (mut reader, mut writer) = io::pipe().unwrap();
    // SAFETY: as in `in_child`; the child waits to be killed.
    let parent = match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let child = namespace
                .spawn_command(Command::new("sleep").arg("60"))
                .unwrap();
            let _ = writer.write_all(&child.id().to_ne_bytes());
            let _ = child.wait_with_output(); // killed before it comes back
            std::process::abort()
        }
        nix::unistd::ForkResult::Parent { child } => child,
    };
    drop(writer);
    let mut pid = [0; 4];
    reader.read_exact(&mut pid).unwrap();
    let process = format!("/proc/{}/cmdline", u32::from_ne_bytes(pid));
    assert!(fs::read_to_string(&process).unwrap().starts_with("sleep"));
    nix::sys::signal::kill(parent, nix::sys::signal::Signal::SIGKILL).unwrap();
    nix::sys::wait::waitpid(parent, None).unwrap();
    // The orphan is gone, or a zombie (empty command line) until init collects it.
    let deadline = Instant::now() + Duration::from_secs(5);
    while fs::read_to_string(&process).is_ok_and(|line| line.starts_with("sleep")) {
        assert!(Instant::now() < deadline, "the child outlived its process");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_file_that_is_no_namespace_cannot_be_entered() {
    let file = NetNs::open("/dev/null").unwrap();
    assert!(matches!(
        file.run(|| ()),
        Err(NetNsError::Enter {
            errno: Errno::EINVAL
        })
    ));
}

#[test]
fn an_unprivileged_user_is_root_in_a_world_of_its_own() {
    in_child(|| {
        if nix::unistd::geteuid().is_root() {
            nix::unistd::setgid(65534.into()).map_err(|e| e.to_string())?;
            nix::unistd::setuid(65534.into()).map_err(|e| e.to_string())?;
            // As exec does: without it, /proc/self belongs to root after setuid.
            nix::sys::prctl::set_dumpable(true).map_err(|e| e.to_string())?;
        }
        match unshare_user() {
            Err(NetNsError::User { source, .. })
                if source.raw_os_error() == Some(libc::EPERM)
                    && std::env::var_os("SEIKAN_REQUIRE_ALL").is_none() =>
            {
                eprintln!("SKIPPED: no user namespaces for users here");
                return Ok(());
            }
            other => other.map_err(|e| e.to_string())?,
        }
        if !nix::unistd::geteuid().is_root() {
            return Err("not root inside".into());
        }
        let netlink = Netlink::open().map_err(|e| e.to_string())?;
        netlink
            .create_veth("v0", "v1", None)
            .map_err(|e| e.to_string())?;
        // Nested namespaces, as the demo's two hosts need them.
        NetNs::create()
            .and_then(|namespace| namespace.run(|| ()))
            .map_err(|e| e.to_string())
    });
}

#[test]
fn the_error_of_unshare_user_with_threads_names_the_reason() {
    let (stop, stopped) = mpsc::channel::<()>();
    let other = thread::spawn(move || stopped.recv());
    let error = unshare_user().unwrap_err();
    drop(stop);
    let _ = other.join();
    assert!(
        error
            .to_string()
            .contains("before the process starts a second thread"),
        "{error}"
    );
}
