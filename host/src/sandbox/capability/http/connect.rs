//! From a name to a connection: resolves the name, drops addresses that may not be reached, and connects to one of the
//! others. The name is not resolved a second time, so a response that changes in between (DNS rebinding) has no effect.

use std::cell::OnceCell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, timeout};

use super::address::{AddressKind, address_kind};
use super::fault::Fault;
use super::lookups::Lookups;
use super::settings::HttpSettings;
use super::target::Target;
use super::tls;
use crate::sandbox::grants::{Host, HttpScheme};

/// The maximum time from the lookup to the end of the handshake. Lost packets are retransmitted after 1, 3 and 7 s.
pub(super) const CONNECT_MAX: Duration = Duration::from_secs(10);

/// The maximum time for one address: a server that does not respond at this address may respond at the next.
const ADDRESS_MAX: Duration = Duration::from_secs(3);

/// The maximum number of addresses that are tried.
const ADDRESSES_MAX: usize = 8;

/// The time for which a server may refuse to take data that is ready to be sent.
const STALLED_MAX: Duration = Duration::from_secs(60);

/// The parts that the connections of all handlers share: name lookups, trusted authorities, and the limit on the number
/// of connections.
pub(super) struct Dialer {
    lookups: Lookups,
    /// One permit for each connection that the host may have open.
    pub(super) free: Arc<Semaphore>,
    /// The operator's own authorities.
    authorities: Vec<tls::Authority>,
    /// Created with the first TLS connection: reading the system's authorities takes a few milliseconds.
    tls: OnceLock<Arc<ClientConfig>>,
}

impl Dialer {
    /// # Errors
    /// When the file with the operator's authorities cannot be read.
    pub(super) fn new(
        settings: &HttpSettings,
        connections_max: usize,
    ) -> anyhow::Result<Arc<Self>> {
        let authorities = match &settings.ca_file {
            Some(path) => tls::read_authorities(path)?,
            None => Vec::new(),
        };
        Ok(Arc::new(Self {
            lookups: Lookups::new(settings.resolver.clone()),
            free: Arc::new(Semaphore::new(connections_max)),
            authorities,
            tls: OnceLock::new(),
        }))
    }

    fn tls(&self) -> Arc<ClientConfig> {
        let new = || tls::config(&self.authorities);
        self.tls.get_or_init(new).clone()
    }
}

/// The addresses to which connections may go. Each value includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Reach {
    Public,
    Private,
    /// An address that the operator has listed.
    Listed,
}

impl Reach {
    fn includes(self, kind: AddressKind) -> bool {
        match kind {
            AddressKind::Public => true,
            AddressKind::Own | AddressKind::Private => self >= Self::Private,
            AddressKind::Metadata => self >= Self::Listed,
            AddressKind::Nowhere => false,
        }
    }
}

/// Makes connections for the client.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) dialer: Arc<Dialer>,
    pub(super) handler: Arc<str>,
    pub(super) reach: Reach,
    /// Counts the open connections, together with those of the other connectors of these pools.
    pub(super) open: OpenCount,
}

impl Connector {
    async fn connect(self, uri: Uri) -> Result<Wire, Fault> {
        let target = Target::parse(&uri).map_err(Fault::Unreachable)?;
        let connect = async {
            let addresses = self.addresses(&target.host).await?;
            // The wait is no longer than a connection may take, so attempts that hold connections cannot block each
            // other.
            let permit = self.dialer.free.clone().acquire_owned().await;
            let permit = permit.expect("the semaphore is never closed");
            let stream = connect_to_one_of(&addresses, target.port).await?;
            let open = self.open.one();
            let (stream, h2): (Box<dyn Stream>, bool) = match target.scheme {
                HttpScheme::Http => (Box::new(stream), false),
                HttpScheme::Https => {
                    let config = self.dialer.tls();
                    let (stream, h2) = tls::handshake(config, &target.host, stream).await?;
                    (Box::new(stream), h2)
                }
            };
            let io = TokioIo::new(stream);
            Ok(Wire {
                io,
                h2,
                stalled: None,
                stalled_max: STALLED_MAX,
                _open: open,
                _permit: permit,
            })
        };
        match timeout(CONNECT_MAX, connect).await {
            Ok(connected) => connected,
            Err(_) => Err(Fault::ConnectTimeout),
        }
    }

    /// The addresses of a server to which this handler may connect; at least one.
    async fn addresses(&self, host: &Host) -> Result<Vec<IpAddr>, Fault> {
        let addresses = match host {
            Host::Ip(address) => vec![*address],
            Host::Name(name) => {
                let resolved = self.dialer.lookups.look_up(&self.handler, name).await;
                resolved.map_err(|error| Fault::Unknown(error.to_string()))?
            }
        };
        let own = OnceCell::new();
        let mut prohibited = None;
        let mut reachable = Vec::new();
        // The response from a name server may contain thousands of addresses.
        for address in addresses {
            let kind = self.address_kind(address, &own)?;
            if self.reach.includes(kind) {
                reachable.push(address);
            } else {
                prohibited.get_or_insert(Fault::Prohibited { address, kind });
            }
            if reachable.len() == ADDRESSES_MAX {
                break;
            }
        }
        match (prohibited, reachable.is_empty()) {
            (_, false) => Ok(reachable),
            (Some(prohibited), true) => Err(prohibited),
            (None, true) => Err(Fault::Unknown("it has no address".into())),
        }
    }

    /// The kind of an address, as seen from this machine, whose own addresses are read once. If they are unknown, no
    /// public address can be reached.
    fn address_kind(
        &self,
        address: IpAddr,
        own: &OnceCell<Vec<IpAddr>>,
    ) -> Result<AddressKind, Fault> {
        let kind = address_kind(address);
        if kind != AddressKind::Public {
            return Ok(kind);
        }
        let own = match own.get() {
            Some(own) => own,
            None => {
                let read = self.dialer.lookups.own().map_err(|error| {
                    Fault::Unreachable(format!(
                        "the addresses of this machine cannot be read: {error}"
                    ))
                })?;
                own.get_or_init(|| read)
            }
        };
        Ok(match own.contains(&address) {
            true => AddressKind::Own,
            false => AddressKind::Public,
        })
    }
}

async fn connect_to_one_of(addresses: &[IpAddr], port: u16) -> Result<TcpStream, Fault> {
    let mut fault = Fault::ConnectTimeout;
    for address in addresses {
        let address = SocketAddr::new(*address, port);
        match timeout(ADDRESS_MAX, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                // Makes small writes go out at once; if this call fails, they are only slower.
                drop(stream.set_nodelay(true));
                return Ok(stream);
            }
            Ok(Err(error)) => fault = Fault::Unreachable(error.to_string()),
            Err(_) => fault = Fault::ConnectTimeout,
        }
    }
    Err(fault)
}

impl tower_service::Service<Uri> for Connector {
    type Response = Wire;
    type Error = Fault;
    type Future = Pin<Box<dyn Future<Output = Result<Wire, Fault>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

/// The number of open connections.
#[derive(Clone, Default)]
pub(super) struct OpenCount(Arc<AtomicUsize>);

impl OpenCount {
    /// Counts a connection until the result is dropped.
    pub(super) fn one(&self) -> Open {
        self.0.fetch_add(1, Ordering::Relaxed);
        Open(self.clone())
    }

    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// An open connection.
pub(super) struct Open(OpenCount);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection, plain or over TLS.
pub(super) struct Wire {
    io: TokioIo<Box<dyn Stream>>,
    h2: bool,
    /// Runs while the server does not take any data.
    stalled: Option<Pin<Box<Sleep>>>,
    stalled_max: Duration,
    _open: Open,
    _permit: OwnedSemaphorePermit,
}

impl Wire {
    /// Ends a write that the server delays: hyper would wait forever, even if no caller is waiting for the response any
    /// more.
    fn unless_stalled<T>(
        &mut self,
        written: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(self.stalled_max)));
        stalled.as_mut().poll(context).map(|()| {
            Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the server takes no data",
            ))
        })
    }
}

impl Connection for Wire {
    fn connected(&self) -> Connected {
        match self.h2 {
            true => Connected::new().negotiated_h2(),
            false => Connected::new(),
        }
    }
}

impl hyper::rt::Read for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl hyper::rt::Write for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        self.unless_stalled(written, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(context);
        self.unless_stalled(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.io).poll_shutdown(context);
        self.unless_stalled(shut, context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reach_includes_those_before_it_and_none_includes_multicast() {
        let reaches = [Reach::Public, Reach::Private, Reach::Listed];
        for (kind, first) in [
            (AddressKind::Public, 0),
            (AddressKind::Own, 1),
            (AddressKind::Private, 1),
            (AddressKind::Metadata, 2),
            (AddressKind::Nowhere, 3),
        ] {
            for (index, reach) in reaches.into_iter().enumerate() {
                assert_eq!(reach.includes(kind), index >= first, "{reach:?} {kind:?}");
            }
        }
    }

    #[tokio::test]
    async fn a_server_that_takes_no_data_ends_the_connection() {
        let (near, mut far) = tokio::io::duplex(4);
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned();
        let mut wire = Wire {
            io: TokioIo::new(Box::new(near)),
            h2: false,
            stalled: None,
            stalled_max: Duration::from_millis(20),
            _open: OpenCount::default().one(),
            _permit: permit.expect("it is free"),
        };
        let mut write = async || {
            std::future::poll_fn(|context| {
                hyper::rt::Write::poll_write(Pin::new(&mut wire), context, b"text")
            })
            .await
        };
        assert_eq!(write().await.expect("there is room"), 4);
        let reads = tokio::spawn(async move {
            let mut text = [0; 4];
            tokio::io::AsyncReadExt::read_exact(&mut far, &mut text)
                .await
                .map(|_| far)
        });
        assert_eq!(write().await.expect("it has read"), 4);
        let _far = reads.await.expect("it does not panic").expect("it reads");
        let error = write().await.expect_err("it reads no more");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
