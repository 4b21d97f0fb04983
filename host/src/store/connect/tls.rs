//! TLS as libpq's `sslmode` wants it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor, verify_server_name,
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
    server::ParsedCertificate,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::ConnectError;

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

/// What is checked about the server's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    Nothing,
    Chain,
    ChainAndName,
}

/// Whose signature is good.
pub(super) enum Roots {
    None,
    System,
    File(PathBuf),
}

/// What a mode means, with the certificates that were named and those at libpq's usual place.
pub(super) fn roots(
    mode: SslMode,
    root_cert: Option<&str>,
    home: Option<&str>,
) -> Result<(Check, Roots), ConnectError> {
    let usual = || {
        home.map(|home| Path::new(home).join(".postgresql/root.crt"))
            .filter(|path| path.exists())
    };
    let named = match root_cert {
        Some("system") if mode == SslMode::Disable => None,
        Some("system") if mode != SslMode::VerifyFull => {
            return Err(ConnectError::WeakSslMode {
                mode: mode.as_str(),
            });
        }
        Some("system") => return Ok((Check::ChainAndName, Roots::System)),
        Some(path) => Some(PathBuf::from(path)),
        None => usual(),
    };
    Ok(match (mode, named) {
        (SslMode::Disable | SslMode::Allow | SslMode::Prefer, _) | (SslMode::Require, None) => {
            (Check::Nothing, Roots::None)
        }
        // libpq: where there is a root certificate, `require` checks against it.
        (SslMode::Require | SslMode::VerifyCa, Some(path)) => (Check::Chain, Roots::File(path)),
        (SslMode::VerifyCa, None) => (Check::Chain, Roots::System),
        (SslMode::VerifyFull, Some(path)) => (Check::ChainAndName, Roots::File(path)),
        (SslMode::VerifyFull, None) => (Check::ChainAndName, Roots::System),
    })
}

/// Starts TLS on connections to Postgres.
#[derive(Clone)]
pub struct Tls {
    inner: MakeRustlsConnect,
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
        // Servers from 17 on insist on it where TLS begins at once (sslnegotiation=direct).
        config.alpn_protocols = vec![b"postgresql".to_vec()];
        Ok(Self {
            inner: MakeRustlsConnect::new(config),
            check,
        })
    }
}

impl<S> MakeTlsConnect<S> for Tls
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = <MakeRustlsConnect as MakeTlsConnect<S>>::Stream;
    type TlsConnect = <MakeRustlsConnect as MakeTlsConnect<S>>::TlsConnect;
    type Error = <MakeRustlsConnect as MakeTlsConnect<S>>::Error;

    fn make_tls_connect(&mut self, host: &str) -> Result<Self::TlsConnect, Self::Error> {
        // Asked for Unix sockets too, with an empty name. A name that nobody checks need not be one.
        let host = match self.check {
            Check::ChainAndName => host,
            Check::Nothing | Check::Chain if ServerName::try_from(host).is_ok() => host,
            Check::Nothing | Check::Chain => "unnamed.invalid",
        };
        MakeTlsConnect::<S>::make_tls_connect(&mut self.inner, host)
    }
}

#[derive(Debug)]
struct Verifier {
    check: Check,
    roots: RootCertStore,
    /// The certificates of the file that the operator named.
    named: Vec<CertificateDer<'static>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.check == Check::Nothing {
            return Ok(ServerCertVerified::assertion());
        }
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        match verify_server_cert_signed_by_trust_anchor(
            &certificate,
            &self.roots,
            intermediates,
            now,
            algorithms,
        ) {
            Ok(()) => {}
            // A self-signed certificate that says of itself that it is an authority, as `openssl
            // req -x509` makes it, is refused as a server's. The operator named this very one, and
            // its dates were checked before that.
            Err(Error::InvalidCertificate(CertificateError::Other(_)))
                if self.named.iter().any(|named| named == end_entity) => {}
            Err(error) => return Err(error),
        }
        if self.check == Check::ChainAndName {
            verify_server_name(&certificate, server_name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        if self.check == Check::Nothing {
            // A signature by whoever it may be proves nothing, and old certificates that cannot
            // be parsed would fail here.
            return Ok(HandshakeSignatureValid::assertion());
        }
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        if self.check == Check::Nothing {
            return Ok(HandshakeSignatureValid::assertion());
        }
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

fn file_roots(path: &Path) -> Result<(RootCertStore, Vec<CertificateDer<'static>>), ConnectError> {
    let failed = |why: String| ConnectError::RootCert {
        path: path.to_owned(),
        why,
    };
    let named = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| failed(error.to_string()))?;
    if named.is_empty() {
        return Err(failed("there is no certificate in PEM format in it".into()));
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
    // Some bundles hold certificates that nothing can parse; the others are good all the same.
    let (added, _) = store.add_parsable_certificates(found.certs);
    if added == 0 {
        let why = found.errors.first().map(ToString::to_string);
        return Err(ConnectError::NoSystemRoots {
            why: why.unwrap_or_else(|| "none was found".into()),
        });
    }
    Ok(store)
}
