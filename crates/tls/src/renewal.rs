//! A certificate whose files are replaced while the server runs, as those of an authority are.
//!
//! A new connection gets the certificate that was in the files [`CHECK_INTERVAL`] before or later. If the files cannot
//! be read or used, for example while only one of them is replaced, the former certificate stays.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use crate::certificate::{Certificate, TlsError, server_config};

/// Minimum time between two looks at the files.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Receiver of the outcome of a look at the files: a new certificate is used, or they cannot be used. An error that
/// repeats is reported once.
pub type Report = fn(Result<(), TlsError>);

impl Certificate {
    /// Like [`Certificate::server_config`], but follows changes of the files that [`Certificate::load`] has read. `report`
    /// is called by a thread that serves connections.
    ///
    /// # Errors
    /// As [`Certificate::server_config`].
    pub fn renewing_server_config(&self, report: Report) -> Result<ServerConfig, TlsError> {
        let Some((chain, key)) = self.files() else {
            return self.server_config();
        };
        server_config(Arc::new(Renewal {
            chain: chain.to_owned(),
            key: key.to_owned(),
            report,
            state: Mutex::new(State {
                current: Arc::new(self.certified()?),
                checked_at: None,
                reported: None,
            }),
        }))
    }
}

/// Chooses the certificate of each connection.
#[derive(Debug)]
struct Renewal {
    chain: PathBuf,
    key: PathBuf,
    report: Report,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    current: Arc<CertifiedKey>,
    checked_at: Option<Instant>,
    /// The error of the last look.
    reported: Option<String>,
}

impl Renewal {
    /// Returns the certificate, after a look at the files if the last one was long ago.
    fn certificate(&self, now: Instant) -> Arc<CertifiedKey> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = |at| now.saturating_duration_since(at) >= CHECK_INTERVAL;
        if state.checked_at.is_none_or(is_due) {
            state.checked_at = Some(now);
            let read = Certificate::load(&self.chain, &self.key);
            match read.and_then(|read| read.certified()) {
                Ok(read) => {
                    state.reported = None;
                    if read.cert != state.current.cert {
                        state.current = Arc::new(read);
                        (self.report)(Ok(()));
                    }
                }
                Err(error) => {
                    let text = Some(error.to_string());
                    if state.reported != text {
                        state.reported = text;
                        (self.report)(Err(error));
                    }
                }
            }
        }
        Arc::clone(&state.current)
    }
}

impl ResolvesServerCert for Renewal {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.certificate(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::fs;
    use std::path::Path;

    thread_local! {
        static REPORTS: RefCell<Vec<Result<(), String>>> = const { RefCell::new(Vec::new()) };
    }

    fn report(outcome: Result<(), TlsError>) {
        REPORTS.with_borrow_mut(|all| all.push(outcome.map_err(|error| error.to_string())));
    }

    /// Generates a certificate; returns its file, which has the key as well.
    fn make(folder: &Path, name: &str) -> PathBuf {
        let own = folder.join(name);
        Certificate::own(&own, name, &[]).expect("made");
        own.join("tls.pem")
    }

    fn certified(chain: &Path, key: &Path) -> CertifiedKey {
        let loaded = Certificate::load(chain, key).expect("loaded");
        loaded.certified().expect("usable")
    }

    #[test]
    fn a_renewed_certificate_is_used_once_certificate_and_key_belong_together() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let (old, new) = (make(folder, "old"), make(folder, "new"));
        let (chain, key) = (folder.join("chain.pem"), folder.join("key.pem"));
        let replace = |file: &Path, by: &Path| {
            fs::copy(by, file).expect("copied");
        };
        replace(&chain, &old);
        replace(&key, &old);
        let renewal = Renewal {
            chain: chain.clone(),
            key: key.clone(),
            report,
            state: Mutex::new(State {
                current: Arc::new(certified(&chain, &key)),
                checked_at: None,
                reported: None,
            }),
        };
        let is_served =
            |file: &Path, now: Instant| renewal.certificate(now).cert == certified(file, file).cert;
        let mut now = Instant::now();
        assert!(is_served(&old, now));
        assert_eq!(REPORTS.take(), []);

        replace(&chain, &new);
        now += CHECK_INTERVAL / 2;
        assert!(is_served(&old, now));
        assert_eq!(REPORTS.take(), [], "the next look is later");
        for _ in 0..3 {
            now += CHECK_INTERVAL;
            assert!(is_served(&old, now), "with the key of the old one");
        }
        let reports = REPORTS.take();
        assert!(matches!(&reports[..], [Err(_)]), "{reports:?}");

        replace(&key, &new);
        now += CHECK_INTERVAL;
        assert!(is_served(&new, now));
        assert_eq!(REPORTS.take(), [Ok(())]);

        fs::remove_file(&key).expect("removed");
        for _ in 0..3 {
            now += CHECK_INTERVAL;
            assert!(is_served(&new, now));
        }
        let reports = REPORTS.take();
        let names_the_key = |error: &String| error.contains("key.pem");
        assert!(
            matches!(&reports[..], [Err(error)] if names_the_key(error)),
            "{reports:?}"
        );
    }

    #[test]
    fn a_generated_certificate_is_not_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = Certificate::own(folder.path(), "a server", &[]).expect("made");
        assert!(own.files().is_none());
        let loaded = Certificate::load(
            &folder.path().join("tls.pem"),
            &folder.path().join("tls.pem"),
        );
        assert!(loaded.expect("loaded").files().is_some());
    }
}
