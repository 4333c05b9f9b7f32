//! A coordinator or relay on loopback, and the cost of received messages.

use crate::common::{PATIENCE, Tunnel};
use socket2::{Domain, Socket, Type};
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum cost of a message, as a multiple of the cheapest message of the same length.
pub const WORTH: f64 = 5.0;

pub fn seconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("a clock").as_secs()
}

/// Starts a service; returns it and its first line of output.
pub fn start(words: &[&str]) -> (Tunnel, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
    command.args(words).env_remove("SEIKAN_RELAY_SECRET");
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::null()).spawn().expect("started");
    let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("a line");
    (Tunnel { child, stdout }, line)
}

/// Returns the addresses in a line, in order.
pub fn addresses(line: &str) -> Vec<SocketAddr> {
    let words = line.split([' ', ',', '\n']);
    words.filter_map(|word| word.parse().ok()).collect()
}

/// Returns the processor time of a process's threads, in nanoseconds (schedstat); utime and stime
/// have ticks of 10 ms.
pub fn busy(pid: u32) -> Duration {
    let sum = || {
        let mut sum = 0;
        for task in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
            let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            sum += text.split_whitespace().next()?.parse::<u64>().ok()?;
        }
        Some(sum)
    };
    // A thread may end between two readings.
    let looks = std::iter::repeat_with(sum).take(100);
    Duration::from_nanos(looks.flatten().next().expect("schedstat"))
}

/// Opens a TCP connection from one of this host's addresses; `deaf`: with a tiny receive buffer.
pub fn connect(from: Ipv4Addr, to: SocketAddr, deaf: bool) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    if deaf {
        socket.set_recv_buffer_size(4096)?;
    }
    socket.bind(&SocketAddr::from((from, 0)).into())?;
    socket.connect(&to.into())?;
    let socket = TcpStream::from(socket);
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    Ok(socket)
}
