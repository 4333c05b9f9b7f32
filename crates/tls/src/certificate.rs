//! The certificate of a server.
//!
//! It is either signed by an authority and read from files ([`Certificate::load`]), or generated
//! and stored by the server itself ([`Certificate::own`]). Hosts that get its [`Pin`] beforehand
//! need no authority.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;

use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::ResolvesServerCert;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use seikan_proto::mesh::Pin;
use zeroize::Zeroizing;

/// File name of a generated certificate, with its key.
const OWN: &str = "tls.pem";

/// Why a certificate could not be loaded or generated.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file or directory cannot be read or created.
    #[error("cannot use {}: {source}", path.display())]
    Io {
        /// Its path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file contains no certificate.
    #[error("{} contains no certificate; it must be PEM, the server's own certificate first", path.display())]
    NoCertificate {
        /// Its path.
        path: PathBuf,
    },
    /// The file contains no private key. Its content is not reported.
    #[error("{} contains no private key; it must be PEM, not encrypted", path.display())]
    NoKey {
        /// Its path.
        path: PathBuf,
    },
    /// Certificate and key cannot be used.
    #[error("cannot use the certificate: {0}")]
    Unusable(rustls::Error),
    /// No certificate can be generated, for example because a name is not a host name.
    #[error("cannot generate a certificate: {0}; give the names and addresses of the server")]
    Make(rcgen::Error),
}

/// A certificate chain and its private key.
pub struct Certificate {
    /// The server's own certificate first; never empty.
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    /// The files of chain and key; `None` if hosts know it by its pin, so that it never changes.
    files: Option<(PathBuf, PathBuf)>,
}

impl Certificate {
    /// Reads PEM files; both may be the same.
    ///
    /// # Errors
    /// [`TlsError::Io`], [`TlsError::NoCertificate`], [`TlsError::NoKey`].
    pub fn load(chain: &Path, key: &Path) -> Result<Certificate, TlsError> {
        let text = read(chain)?;
        let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
        let certificates = certificates.ok().filter(|chain| !chain.is_empty());
        let text = read(key)?;
        Ok(Certificate {
            chain: certificates.ok_or_else(|| TlsError::NoCertificate {
                path: chain.to_owned(),
            })?,
            key: PrivateKeyDer::from_pem_slice(&text).map_err(|_| TlsError::NoKey {
                path: key.to_owned(),
            })?,
            files: Some((chain.to_owned(), key.to_owned())),
        })
    }

    /// Reads the certificate stored in `directory`. If there is none, generates one for these names
    /// and addresses, with `whose` as its common name: self-signed, valid until the year 4096,
    /// readable by its owner only (mode 0600). An existing certificate stays unchanged whatever the
    /// names, because hosts know it by its pin.
    ///
    /// # Errors
    /// As [`Certificate::load`]; [`TlsError::Make`].
    pub fn own(directory: &Path, whose: &str, names: &[String]) -> Result<Certificate, TlsError> {
        let path = directory.join(OWN);
        if !Certificate::is_own(directory) {
            make(directory, &path, whose, names)?;
        }
        let own = Certificate::load(&path, &path)?;
        Ok(Certificate { files: None, ..own })
    }

    /// Whether `directory` contains a generated certificate.
    pub fn is_own(directory: &Path) -> bool {
        directory.join(OWN).exists()
    }

    /// The pin of the certificate.
    pub fn pin(&self) -> Pin {
        Pin::of_certificate(self.chain.first().map_or(&[][..], |own| &own[..]))
    }

    /// The TLS configuration of a server with this certificate. TLS 1.3 only, which every host of a
    /// mesh supports.
    ///
    /// # Errors
    /// [`TlsError::Unusable`]: the key does not belong to the certificate, or is of an unknown
    /// kind.
    pub fn server_config(&self) -> Result<ServerConfig, TlsError> {
        server_config(Arc::new(SingleCertAndKey::from(self.certified()?)))
    }

    /// Returns chain and key in the form that TLS uses.
    pub(crate) fn certified(&self) -> Result<CertifiedKey, TlsError> {
        let provider = aws_lc_rs::default_provider();
        CertifiedKey::from_der(self.chain.clone(), self.key.clone_key(), &provider)
            .map_err(TlsError::Unusable)
    }

    /// Returns the files of chain and key, unless it was generated.
    pub(crate) fn files(&self) -> Option<(&Path, &Path)> {
        let (chain, key) = self.files.as_ref()?;
        Some((chain, key))
    }
}

/// Returns the TLS configuration of a server with these certificates.
pub(crate) fn server_config(
    certificates: Arc<dyn ResolvesServerCert>,
) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsError::Unusable)?;
    Ok(builder
        .with_no_client_auth()
        .with_cert_resolver(certificates))
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate")
            .field("pin", &self.pin())
            .finish_non_exhaustive()
    }
}

fn failed(path: &Path) -> impl Fn(io::Error) -> TlsError {
    move |source| TlsError::Io {
        path: path.to_owned(),
        source,
    }
}

fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, TlsError> {
    fs::read(path).map(Zeroizing::new).map_err(failed(path))
}

/// Generates a certificate and stores it, unless another process was faster.
fn make(directory: &Path, path: &Path, whose: &str, names: &[String]) -> Result<(), TlsError> {
    let key = KeyPair::generate().map_err(TlsError::Make)?;
    let mut parameters = CertificateParams::new(names).map_err(TlsError::Make)?;
    parameters.distinguished_name = DistinguishedName::new();
    parameters
        .distinguished_name
        .push(DnType::CommonName, whose);
    parameters.insert_extended_key_usage(ExtendedKeyUsagePurpose::ServerAuth);
    let certificate = parameters.self_signed(&key).map_err(TlsError::Make)?;
    let key = Zeroizing::new(key.serialize_pem());
    let text = Zeroizing::new(format!("{}{}", certificate.pem(), *key));

    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(failed(directory))?;
    let temporary = directory.join(format!("{OWN}.{}", process::id()));
    let written = write_once(&temporary, path, text.as_bytes());
    // The first error is more useful than an error of the removal.
    let _ = fs::remove_file(&temporary);
    written.map_err(failed(path))
}

/// Creates the file atomically. An existing file is complete and is not overwritten.
fn write_once(temporary: &Path, path: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(temporary)?;
    file.write_all(text)?;
    file.sync_all()?;
    match fs::hard_link(temporary, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn names() -> Vec<String> {
        vec!["mesh.example.org".to_owned(), "192.0.2.1".to_owned()]
    }

    #[test]
    fn a_generated_certificate_is_readable_by_its_owner_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = folder.path().join("state");
        assert!(!Certificate::is_own(&state));
        let made = Certificate::own(&state, "a server", &names()).expect("made");
        assert!(Certificate::is_own(&state));
        let kept = Certificate::own(&state, "a server", &[]).expect("kept");
        assert_eq!(made.pin(), kept.pin());
        let file = fs::metadata(state.join("tls.pem")).expect("a file");
        assert_eq!(file.permissions().mode() & 0o777, 0o600);
        let folder = fs::metadata(&state).expect("a folder");
        assert_eq!(folder.permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::read_dir(&state).expect("a folder").count(), 1);
        made.server_config().expect("it can serve");
    }

    #[test]
    fn the_pin_is_of_the_first_certificate() {
        let folder = tempfile::tempdir().expect("a folder");
        let make = |name: &str| {
            let folder = folder.path().join(name);
            let own = Certificate::own(&folder, "a server", &names()).expect("made");
            (folder.join("tls.pem"), own)
        };
        let ((first, own), (second, _)) = (make("a"), make("b"));
        let both = folder.path().join("both.pem");
        let text = |path| fs::read_to_string(path).expect("a file");
        fs::write(&both, text(&first) + &text(&second)).expect("a file");
        let chain = Certificate::load(&both, &first).expect("loaded");
        assert_eq!(chain.pin(), own.pin());
        assert_eq!(chain.chain.len(), 2);
    }

    #[test]
    fn errors_name_the_missing_part_without_the_content() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = folder.path().join("own");
        Certificate::own(&own, "a server", &names()).expect("made");
        let good = own.join("tls.pem");
        let odd = folder.path().join("odd.pem");
        fs::write(&odd, "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n").expect("a file");
        let error = Certificate::load(&good, &odd).expect_err("no key");
        assert!(matches!(error, TlsError::NoKey { .. }), "{error}");
        assert!(!error.to_string().contains("c2VjcmV0"), "{error}");
        let error = Certificate::load(&odd, &good).expect_err("no certificate");
        assert!(matches!(error, TlsError::NoCertificate { .. }), "{error}");
        let error = Certificate::load(&folder.path().join("none"), &good).expect_err("no file");
        assert!(matches!(error, TlsError::Io { .. }), "{error}");
    }

    #[test]
    fn a_key_of_another_certificate_is_unusable() {
        let folder = tempfile::tempdir().expect("a folder");
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        for own in [&a, &b] {
            Certificate::own(own, "a server", &names()).expect("made");
        }
        let mixed = Certificate::load(&a.join("tls.pem"), &b.join("tls.pem")).expect("loaded");
        let error = mixed.server_config().expect_err("they do not fit");
        assert!(matches!(error, TlsError::Unusable(_)), "{error}");
        // Not even in debug output.
        assert!(!format!("{mixed:?}").contains("Private"), "{mixed:?}");
    }

    #[test]
    fn an_invalid_name_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let error =
            Certificate::own(folder.path(), "a server", &["名".to_owned()]).expect_err("no name");
        assert!(matches!(error, TlsError::Make(_)), "{error}");
    }
}
