//! TLS with the semantics of libpq's `sslmode`.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, InvalidDnsNameError, ServerName, pem::PemObject},
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_rustls::TlsConnector;

use super::{
    ConnectError,
    stream::{Handshake, TlsStream},
    verify::{Check, Verifier},
};
use crate::read_in_time::read_in_time;

/// libpq's `sslmode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SslMode {
    Disable,
    Allow,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

impl SslMode {
    pub(super) fn parse(word: &str) -> Result<Self, ConnectError> {
        [
            Self::Disable,
            Self::Allow,
            Self::Prefer,
            Self::Require,
            Self::VerifyCa,
            Self::VerifyFull,
        ]
        .into_iter()
        .find(|mode| mode.as_str() == word)
        .ok_or_else(|| ConnectError::SslMode { value: word.into() })
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Disable => "disable",
            Self::Allow => "allow",
            Self::Prefer => "prefer",
            Self::Require => "require",
            Self::VerifyCa => "verify-ca",
            Self::VerifyFull => "verify-full",
        }
    }
}

/// The certificate authorities to trust.
pub(super) enum Roots {
    None,
    System,
    File(PathBuf),
}

/// The check and the roots for a mode, with the certificate file that was configured or the one at libpq's default
/// path.
pub(super) fn roots(
    mode: SslMode,
    root_cert: Option<&str>,
    home: Option<&str>,
) -> Result<(Check, Roots), ConnectError> {
    let usual = || {
        home.map(|home| Path::new(home).join(".postgresql/root.crt"))
            .filter(|path| path.exists())
    };
    let too_weak = || ConnectError::WeakSslMode {
        mode: mode.as_str(),
    };
    let named = match root_cert {
        Some("system") if mode == SslMode::Disable => None,
        Some("system") if mode != SslMode::VerifyFull => return Err(too_weak()),
        Some("system") => return Ok((Check::ChainAndName, Roots::System)),
        Some(path) => Some(PathBuf::from(path)),
        None => usual(),
    };
    Ok(match (mode, named) {
        (SslMode::Disable | SslMode::Allow | SslMode::Prefer, _) | (SslMode::Require, None) => {
            (Check::Nothing, Roots::None)
        }
        // libpq: if there is a root certificate, `require` checks against it.
        (SslMode::Require | SslMode::VerifyCa, Some(path)) => (Check::Chain, Roots::File(path)),
        (SslMode::VerifyCa, None) => return Err(too_weak()),
        (SslMode::VerifyFull, Some(path)) => (Check::ChainAndName, Roots::File(path)),
        (SslMode::VerifyFull, None) => (Check::ChainAndName, Roots::System),
    })
}

/// Starts TLS on connections to Postgres.
#[derive(Clone)]
pub struct Tls {
    connector: TlsConnector,
    check: Check,
}

impl Tls {
    pub(super) fn new(check: Check, roots: Roots) -> Result<Self, ConnectError> {
        let provider = Arc::new(ring::default_provider());
        let (store, named) = match roots {
            Roots::None => (RootCertStore::empty(), Vec::new()),
            Roots::System => (system_roots()?, Vec::new()),
            Roots::File(path) => file_roots(&path)?,
        };
        let verifier = Verifier {
            check,
            roots: store,
            named,
            provider: Arc::clone(&provider),
        };
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        // Postgres 17 and later require this protocol name if TLS starts at once (sslnegotiation=direct).
        config.alpn_protocols = vec![b"postgresql".to_vec()];
        Ok(Self {
            connector: Arc::new(config).into(),
            check,
        })
    }
}

impl<S> MakeTlsConnect<S> for Tls
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = TlsStream<S>;
    type TlsConnect = Handshake;
    type Error = InvalidDnsNameError;

    fn make_tls_connect(&mut self, host: &str) -> Result<Handshake, InvalidDnsNameError> {
        let name = match (ServerName::try_from(host), self.check) {
            (Ok(name), _) => name,
            // Called for Unix sockets too, with an empty name. A name that is not checked need not be valid.
            (Err(_), Check::Nothing | Check::Chain) => ServerName::try_from("unnamed.invalid")?,
            (Err(error), Check::ChainAndName) => return Err(error),
        };
        Ok(Handshake {
            connector: self.connector.clone(),
            name: name.to_owned(),
        })
    }
}

fn file_roots(path: &Path) -> Result<(RootCertStore, Vec<CertificateDer<'static>>), ConnectError> {
    let failed = |why: String| ConnectError::RootCert {
        path: path.to_owned(),
        why,
    };
    let wanted = path.to_owned();
    let pem = read_in_time(move || fs::read(wanted)).map_err(|error| failed(error.to_string()))?;
    let named = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| failed(error.to_string()))?;
    if named.is_empty() {
        return Err(failed("it contains no certificate in PEM format".into()));
    }
    let mut store = RootCertStore::empty();
    for certificate in &named {
        store
            .add(certificate.clone())
            .map_err(|error| failed(error.to_string()))?;
    }
    Ok((store, named))
}

fn system_roots() -> Result<RootCertStore, ConnectError> {
    let found = rustls_native_certs::load_native_certs();
    let mut store = RootCertStore::empty();
    // Some bundles contain certificates that cannot be parsed; the others are still valid.
    let (added, _) = store.add_parsable_certificates(found.certs);
    if added == 0 {
        let why = found.errors.first().map(ToString::to_string);
        return Err(ConnectError::NoSystemRoots {
            why: why.unwrap_or_else(|| "none were found".into()),
        });
    }
    Ok(store)
}
