//! Support for the tests of this crate: tests that are skipped, child processes, threads in a network
//! namespace of their own, and interfaces in it.

use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;

use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

/// Prints why a test is skipped. Panics where every test must run (`SEIKAN_REQUIRE_ALL=1`).
pub(crate) fn skip(reason: &str) {
    assert!(
        std::env::var_os("SEIKAN_REQUIRE_ALL").is_none_or(|value| value != "1"),
        "{reason}"
    );
    eprintln!("SKIPPED: {reason}");
}

/// Runs `check` in a forked, hence single-threaded, child process. Its error or panic fails the test.
pub(crate) fn in_child(check: impl FnOnce() -> Result<(), String>) {
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    // SAFETY: glibc keeps malloc usable in the child of a fork; the child runs only `check` and
    // leaves by _exit, never returning into the test harness.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            nix::unistd::alarm::set(60); // kills a child that hangs
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check));
            let text = match outcome {
                Ok(Ok(())) => "passed".into(),
                Ok(Err(text)) => text,
                Err(_) => "panicked".into(),
            };
            let _ = writer.write_all(text.as_bytes());
            // SAFETY: ends the child at once; nothing here needs a destructor.
            unsafe { libc::_exit(0) }
        }
        nix::unistd::ForkResult::Parent { child } => {
            drop(writer);
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            nix::sys::wait::waitpid(child, None).unwrap();
            assert_eq!(text, "passed");
        }
    }
}

/// Runs `test` in a thread with a new network namespace in which loopback is up. The namespace ends
/// with the thread and its descriptors, also if the test panics.
pub(crate) fn in_namespace(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| match unshare(CloneFlags::CLONE_NEWNET) {
            Ok(()) => {
                set_up("lo");
                test();
            }
            Err(errno) => skip(&format!("no network namespace: {errno}")),
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Sets interface `name` up, in the namespace of the calling thread.
pub(crate) fn set_up(name: &str) {
    let mut request = request(name);
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    ioctl(libc::SIOCSIFFLAGS, &request);
}

/// Sets address and mask of interface `name`.
pub(crate) fn set_address(name: &str, address: Ipv4Addr, mask: Ipv4Addr) {
    for (operation, address) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, mask)] {
        let mut request = request(name);
        let address = libc::sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: 0,
            sin_addr: libc::in_addr {
                s_addr: u32::from(address).to_be(),
            },
            sin_zero: [0; 8],
        };
        // SAFETY: sockaddr and sockaddr_in are both 16 bytes of plain integers.
        request.ifr_ifru.ifru_addr =
            unsafe { std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(address) };
        ioctl(operation, &request);
    }
}

/// Sets the MTU of interface `name`.
pub(crate) fn set_mtu(name: &str, mtu: i32) {
    let mut request = request(name);
    request.ifr_ifru.ifru_mtu = mtu;
    ioctl(libc::SIOCSIFMTU, &request);
}

fn ioctl(operation: libc::Ioctl, request: &libc::ifreq) {
    let socket = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .expect("socket");
    // SAFETY: every operation used here reads one ifreq, and `request` outlives the call.
    let outcome =
        unsafe { libc::ioctl(socket.as_raw_fd(), operation, std::ptr::from_ref(request)) };
    nix::errno::Errno::result(outcome).expect("ioctl");
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is integers, arrays and unions of them, for which zero bytes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name[..15].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request
}
