//! The doctor, called like anybody would call it, in a host that it knows nothing of but an interface and the rate
//! that should go through.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use seikan_diagnose::Cause;
use serde::{Deserialize, Serialize};

use crate::error::{LabError, Result};
use crate::interrupt::Interrupt;
use crate::link::Host;
use crate::tunnel::seikan;

/// How much longer than asked for the doctor may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// How much of its complaint an error quotes, in characters.
const QUOTED: usize = 400;

/// What the doctor said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// The cause.
    pub cause: Cause,
    /// How sure: `consistent`, `supported` or `confirmed`.
    pub level: String,
    /// Other causes, the heaviest first.
    #[serde(default)]
    pub alternatives: Vec<Cause>,
    /// From the cause to what is felt.
    #[serde(default)]
    pub chain: Vec<Cause>,
    /// Seconds until it was said; measured here, not the doctor's own figure.
    #[serde(default)]
    pub seconds: f64,
}

/// Asks the doctor in `host` about `interface`, through which `expected` Mbit/s should go. It looks for `seconds`.
///
/// # Errors
/// There is no program, it fails, takes too long, or says what is no diagnosis; [`LabError::Interrupted`].
pub(super) fn ask(
    host: &Host,
    interface: &str,
    expected: f64,
    seconds: f64,
    interrupt: &Interrupt,
) -> Result<Diagnosis> {
    let program = seikan::program()
        .ok_or_else(|| LabError::Setup("no program `seikan`: set $SEIKAN_BIN to it".into()))?;
    let mut command = Command::new(program);
    command
        .args(["doctor", "--iface", interface, "--json"])
        .args(["--expect", &format!("{expected:.1}")])
        .args(["--seconds", &format!("{seconds:.0}")])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let start = Instant::now();
    let child = host
        .spawn(&mut command)
        .map_err(LabError::io("start `seikan doctor`"))?;
    let patience = Duration::from_secs_f64(seconds) + PATIENCE;
    let (success, said, complaint) = Asked(child).finish(patience, interrupt)?;
    if !success {
        return Err(LabError::Setup(format!(
            "`seikan doctor` failed: {}",
            complaint.chars().take(QUOTED).collect::<String>().trim()
        )));
    }
    let mut diagnosis: Diagnosis = serde_json::from_str(&said)
        .map_err(|e| LabError::Setup(format!("what `seikan doctor` says is no diagnosis: {e}")))?;
    diagnosis.seconds = start.elapsed().as_secs_f64();
    Ok(diagnosis)
}

/// A program whose output is read; killed when dropped.
struct Asked(Child);

impl Asked {
    /// Reads both outputs to their ends; whether it succeeded.
    fn finish(
        mut self,
        patience: Duration,
        interrupt: &Interrupt,
    ) -> Result<(bool, String, String)> {
        let (out, complaint) = (self.0.stdout.take(), self.0.stderr.take());
        std::thread::scope(|scope| {
            let out = scope.spawn(|| text_of(out));
            let complaint = scope.spawn(|| text_of(complaint));
            let status = self.wait(patience, interrupt);
            // Closes what the readers read.
            drop(self);
            let texts = (
                out.join().unwrap_or_default(),
                complaint.join().unwrap_or_default(),
            );
            status.map(|success| (success, texts.0, texts.1))
        })
    }

    fn wait(&mut self, patience: Duration, interrupt: &Interrupt) -> Result<bool> {
        let start = Instant::now();
        loop {
            let status = self
                .0
                .try_wait()
                .map_err(LabError::io("wait for `seikan doctor`"))?;
            if let Some(status) = status {
                return Ok(status.success());
            }
            if start.elapsed() > patience {
                return Err(LabError::Timeout {
                    what: "`seikan doctor`".into(),
                    seconds: patience.as_secs_f64(),
                });
            }
            interrupt.sleep(Duration::from_millis(50))?;
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        // Fails only when it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text_of(source: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(mut source) = source {
        // What could be read is what there is.
        let _ = source.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
