//! The daemon's socket for `wg` (the cross-platform interface of WireGuard).

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use seikan_node::control::ask;
use zeroize::Zeroizing;

use super::BUFFER;

/// Maximum time for an answer of the daemon.
const PATIENCE: Duration = Duration::from_secs(10);

/// The socket for `wg`.
pub struct Uapi {
    stream: BufReader<UnixStream>,
}

impl Uapi {
    /// Connects to the socket.
    pub fn connect(path: &Path) -> anyhow::Result<Uapi> {
        let failed = || {
            format!(
                "cannot connect to {}, the tunnel's socket for `wg`",
                path.display()
            )
        };
        let stream = UnixStream::connect(path).with_context(failed)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Uapi {
            stream: BufReader::new(stream),
        })
    }

    /// Sends a request, and returns the lines of its answer before `errno`.
    pub fn ask(&mut self, request: &str) -> anyhow::Result<Zeroizing<String>> {
        const FAILED: &str = "cannot talk to the tunnel";
        self.stream
            .get_mut()
            .write_all(request.as_bytes())
            .context(FAILED)?;
        let mut answer = Zeroizing::new(String::with_capacity(BUFFER));
        let mut lines = (&mut self.stream).take(ask::MAX_ANSWER);
        loop {
            let start = answer.len();
            if lines.read_line(&mut answer).context(FAILED)? == 0 {
                if lines.limit() == 0 {
                    bail!("cannot talk to the tunnel: its answer has more than 64 MiB");
                }
                bail!(
                    "cannot talk to the tunnel: it closed the connection before the end of its answer"
                );
            }
            if let Some(errno) = answer[start..].strip_prefix("errno=") {
                let errno: i32 = errno
                    .trim()
                    .parse()
                    .context("the daemon's answer has no number as errno")?;
                if errno != 0 {
                    let error = io::Error::from_raw_os_error(-errno);
                    bail!(
                        "the tunnel refuses the change: {error}; the lines before it were applied"
                    );
                }
                answer.truncate(start);
                // Skip the empty line that ends the answer.
                lines.read_line(&mut String::new()).context(FAILED)?;
                return Ok(answer);
            }
        }
    }

    /// Sends settings.
    pub fn set(&mut self, lines: &str) -> anyhow::Result<()> {
        let request = Zeroizing::new(format!("set=1\n{lines}\n"));
        self.ask(&request).map(drop)
    }
}
