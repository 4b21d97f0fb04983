//! TLS for Postgres connections, with channel binding: the login is bound to the TLS session.
//!
//! tokio-postgres-rustls 0.13 does the same, but its binding does not work: it parses the certificate as the wrong
//! structure, so that `channel_binding=require`, which some providers write into their connection strings, always
//! fails.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use rustls::pki_types::ServerName;
use sha2::{Digest, Sha256, Sha384, Sha512};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, TlsConnect};
use tokio_rustls::{TlsConnector, client};

/// Starts TLS on one connection.
pub struct Handshake {
    pub(super) connector: TlsConnector,
    pub(super) name: ServerName<'static>,
}

impl<S> TlsConnect<S> for Handshake
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = TlsStream<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TlsStream<S>>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move { Ok(TlsStream(self.connector.connect(self.name, stream).await?)) })
    }
}

/// An encrypted connection.
pub struct TlsStream<S>(client::TlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> tokio_postgres::tls::TlsStream for TlsStream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        let (_, session) = self.0.get_ref();
        session
            .peer_certificates()
            .and_then(|chain| end_point(chain.first()?))
            .map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for TlsStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for TlsStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// The hash that represents a certificate in the login, after RFC 5929, section 4.1: with the hash algorithm of the
/// certificate's own signature, or with SHA-256 if that algorithm is older. `None` if the signature has no hash of its
/// own (Ed25519, PSS): then the login is not bound.
fn end_point(certificate: &[u8]) -> Option<Vec<u8>> {
    // RSA: 1.2.840.113549.1.1.n; ECDSA: 1.2.840.10045.4.1 and 1.2.840.10045.4.3.n.
    const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01];
    const ECDSA: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04];
    let algorithm = signature_algorithm(certificate)?;
    let rsa = algorithm.strip_prefix(RSA);
    let ecdsa = algorithm.strip_prefix(ECDSA);
    match (rsa, ecdsa) {
        (Some([4 | 5 | 11]), _) | (_, Some([1] | [3, 2])) => {
            Some(Sha256::digest(certificate).to_vec())
        }
        (Some([12]), _) | (_, Some([3, 3])) => Some(Sha384::digest(certificate).to_vec()),
        (Some([13]), _) | (_, Some([3, 4])) => Some(Sha512::digest(certificate).to_vec()),
        (Some(_), _) | (_, Some(_)) | (None, None) => None,
    }
}

/// The object identifier in `Certificate { tbs, signatureAlgorithm { algorithm, … }, … }`.
fn signature_algorithm(certificate: &[u8]) -> Option<&[u8]> {
    let (certificate, _) = element(certificate, 0x30)?;
    let (_, after_tbs) = element(certificate, 0x30)?;
    let (algorithm, _) = element(after_tbs, 0x30)?;
    Some(element(algorithm, 0x06)?.0)
}

/// The content of the first DER element, and the rest.
fn element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = der.split_first()?;
    let (&first, mut rest) = rest.split_first()?;
    let mut length = usize::from(first);
    if first >= 0x80 {
        let digits = rest.get(..usize::from(first & 0x7f))?;
        rest = &rest[digits.len()..];
        length = digits.iter().try_fold(0_usize, |length, &digit| {
            length.checked_mul(256)?.checked_add(usize::from(digit))
        })?;
    }
    (found == tag && length <= rest.len()).then(|| rest.split_at(length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_or_absurd_certificates_give_no_hash_and_no_panic() {
        let algorithm = [0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 11];
        let mut whole = vec![0x30, 0x81, 17, 0x30, 0, 0x30, 11];
        whole.extend(algorithm);
        whole.extend([0x03, 0]);
        assert_eq!(end_point(&whole), Some(Sha256::digest(&whole).to_vec()));
        for end in 0..whole.len() {
            assert_eq!(end_point(&whole[..end]), None, "{end}");
        }
        assert_eq!(end_point(&[0x30, 0x89, 1, 1, 1, 1, 1, 1, 1, 1, 1]), None);
    }
}
