//! TLS connections to servers: authorities of the system and the operator, HTTP/2 if the server supports it.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::fault::Fault;
use crate::read_in_time::read_in_time;
use crate::sandbox::grants::Host;

/// The certificate of a trusted authority.
pub(super) type Authority = CertificateDer<'static>;

/// Reads the certificates in a file (PEM).
///
/// # Errors
/// When the file cannot be read, or contains no certificate.
pub(super) fn read_authorities(path: &Path) -> anyhow::Result<Vec<Authority>> {
    let shown = path.display();
    let wanted = path.to_owned();
    let pem = read_in_time(move || fs::read(wanted))
        .with_context(|| format!("read the certificates of http_ca_file {shown}"))?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match certificates {
        Ok(certificates) if certificates.is_empty() => {
            bail!("http_ca_file {shown} contains no certificate in PEM format")
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => bail!("http_ca_file {shown} cannot be read: {error}"),
    }
}

/// The TLS configuration: trusted authorities, and offered protocols.
pub(super) fn config(authorities: &[Authority]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let system = rustls_native_certs::load_native_certs();
    for error in &system.errors {
        tracing::warn!("a certificate of the system cannot be read: {error}");
    }
    roots.add_parsable_certificates(system.certs);
    roots.add_parsable_certificates(authorities.iter().cloned());
    if roots.is_empty() {
        tracing::warn!(
            "the system has no certificates of authorities (in Debian: the package ca-certificates), so no handler can use https; install them, or set http_ca_file in rouse.toml"
        );
    }
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring supports these versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Arc::new(config)
}

/// Performs the handshake and verifies the host. Returns true if the connection uses HTTP/2.
pub(super) async fn handshake(
    config: Arc<ClientConfig>,
    host: &Host,
    stream: TcpStream,
) -> Result<(TlsStream<TcpStream>, bool), Fault> {
    let name = match host {
        Host::Ip(address) => ServerName::from(*address),
        Host::Name(name) => ServerName::try_from(name.clone())
            .map_err(|error| Fault::Tls(format!("{name} cannot have a certificate: {error}")))?,
    };
    let connected = TlsConnector::from(config).connect(name, stream).await;
    let stream = connected.map_err(|error| Fault::Tls(error.to_string()))?;
    let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    Ok((stream, h2))
}
