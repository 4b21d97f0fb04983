use std::convert::Infallible;
use std::future::{Ready, pending, ready};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use futures_util::stream::repeat_with;
use http::{Request, Uri};
use http_body::Frame;
use http_body_util::{BodyExt as _, Empty, StreamBody};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::mpsc::{
    UnboundedReceiver, UnboundedSender, error::TryRecvError, unbounded_channel,
};
use tokio::task::yield_now;
use tokio::time::timeout;

use super::super::lookups::LOOKUPS_PER_HANDLER_MAX;
use super::super::outgoing::Unsent;
use super::super::tally::Tally;
use super::super::{Addresses, HttpAccess, Resolver};
use super::*;
use crate::sandbox::{AbortHandle, Settings};

/// Resolves all names to this machine.
#[derive(Debug)]
struct Here;

impl Resolver for Here {
    fn resolve<'a>(&'a self, _: &'a str) -> Addresses<'a> {
        Box::pin(async { Ok(vec![IpAddr::V4(Ipv4Addr::LOCALHOST)]) })
    }
}

/// Starts a server that responds to every request, and reports the end of each connection. Returns its port.
async fn server() -> (u16, UnboundedReceiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (ended, ends) = unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(respond(stream, ended.clone()));
        }
    });
    (port, ends)
}

async fn respond(mut stream: TcpStream, ended: UnboundedSender<()>) {
    let mut request = [0; 1024];
    // A request arrives in one piece here.
    while stream.read(&mut request).await.is_ok_and(|bytes| bytes > 0) {
        let response = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
        stream.write_all(response).await.unwrap();
    }
    ended.send(()).unwrap();
}

fn request_to(server: usize, port: u16) -> Request<Outgoing> {
    let body = Empty::new().map_err(|never| match never {});
    let tally = Tally::new(Arc::default(), u64::MAX, None);
    // Its attempt never ends.
    let slot = Box::leak(Box::<Unsent>::default()).slot();
    let done_by = tokio::time::Instant::now() + Duration::from_secs(60);
    let body = slot.fill(body.boxed_unsync(), AbortHandle::new(), tally, 0, done_by);
    let request = Request::get(format!("http://server-{server}.test:{port}/")).body(body);
    request.expect("an address")
}

fn net(resolver: Arc<dyn Resolver>) -> Arc<Net> {
    let settings = HttpSettings {
        resolver,
        ..HttpSettings::default()
    };
    Net::new(settings, 1).unwrap()
}

#[tokio::test]
async fn limit_the_open_connections_of_a_host() {
    let (port, mut ends) = server().await;
    let net = net(Arc::new(Here));
    let handlers: [Arc<str>; 2] = ["a".into(), "b".into()];
    let send = async |at: usize| {
        let client = net.client(&handlers[at % 2], Reach::Private);
        let response = client.request(request_to(at, port));
        let response = response.await.expect("a response");
        response.into_body().collect().await.expect("its end");
    };

    let started = Instant::now();
    for at in 0..OPEN_MAX {
        send(at).await;
    }
    assert_eq!(ends.try_recv(), Err(TryRecvError::Empty), "all are open");
    send(OPEN_MAX).await;
    for _ in 0..OPEN_MAX {
        ends.recv().await.expect("the server is running");
    }
    assert!(started.elapsed() < IDLE_MAX, "their age ended them");
    // The last connection belongs to the new pool.
    send(OPEN_MAX).await;
    assert_eq!(ends.try_recv(), Err(TryRecvError::Empty));
}

#[tokio::test]
async fn a_connection_beyond_the_maximum_waits_for_another_to_end() {
    let (port, _ends) = server().await;
    let net = net(Arc::new(Here));
    let all = IN_FLIGHT_MAX + OPEN_MAX;
    let free = net.dialer.free.clone();
    let held = free
        .clone()
        .try_acquire_many_owned(u32::try_from(all).unwrap());
    let held = held.expect("none is open yet");
    let client = net.client(&"a".into(), Reach::Private);
    let mut waiting = tokio::spawn(client.request(request_to(0, port)));
    let early = timeout(Duration::from_millis(100), &mut waiting).await;
    assert!(early.is_err(), "it does not connect");
    drop(held);
    let response = waiting.await.expect("it does not panic");
    assert!(response.is_ok());
    assert_eq!(free.available_permits(), all - 1);
}

/// Counts lookups, and never finishes one.
#[derive(Debug, Default)]
struct Never(AtomicUsize);

impl Resolver for Never {
    fn resolve<'a>(&'a self, _: &'a str) -> Addresses<'a> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(pending())
    }
}

#[tokio::test]
async fn a_reloaded_handler_has_the_same_limit_of_lookups() {
    let never = Arc::new(Never::default());
    let net = net(never.clone());
    // Each version uses a reach that the earlier ones did not, and therefore a separate client.
    for reach in [Reach::Public, Reach::Private, Reach::Listed] {
        let access = HttpAccess::new(
            "a",
            crate::sandbox::Origin::for_tests(),
            &Settings::default(),
            net.clone(),
        );
        for at in 0..LOOKUPS_PER_HANDLER_MAX {
            tokio::spawn(access.client(reach).request(request_to(at, 80)));
        }
    }
    // Each continues as far as it can without a response.
    for _ in 0..1000 {
        yield_now().await;
    }
    assert_eq!(never.0.load(Ordering::Relaxed), LOOKUPS_PER_HANDLER_MAX);
}

/// Connects to this server, once.
#[derive(Clone)]
struct To(Arc<Mutex<Option<UnixStream>>>);

impl tower_service::Service<Uri> for To {
    type Response = TokioIo<UnixStream>;
    type Error = io::Error;
    type Future = Ready<io::Result<TokioIo<UnixStream>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let stream = self.0.lock().unwrap().take();
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        ready(stream.map(TokioIo::new).ok_or_else(refused))
    }
}

/// The server allows 2 GiB, and does not take any of it.
#[tokio::test]
async fn limit_what_is_kept_for_an_http2_server() {
    let (near, mut server) = UnixStream::pair().unwrap();
    // SETTINGS with the window of each stream, and WINDOW_UPDATE of the connection.
    let settings = b"\0\0\x06\x04\0\0\0\0\0\0\x04\x7f\xff\xff\xff";
    let update = b"\0\0\x04\x08\0\0\0\0\0\x7f\xff\0\0";
    server.write_all(settings).await.unwrap();
    server.write_all(update).await.unwrap();

    let taken = Arc::new(AtomicUsize::new(0));
    let chunk = Bytes::from(vec![0; CHUNK_BYTES_MAX]);
    let count = taken.clone();
    let body = StreamBody::new(repeat_with(move || {
        count.fetch_add(chunk.len(), Ordering::Relaxed);
        Ok::<_, Infallible>(Frame::data(chunk.clone()))
    }));
    let request = Request::post("http://server.test/").body(body).unwrap();
    let to = To(Arc::new(Mutex::new(Some(near))));
    let client = builder().http2_only(true).build(to);
    let _sending = tokio::spawn(client.request(request));
    // The request continues as far as it can.
    for _ in 0..1000 {
        yield_now().await;
    }
    // Part of the body is in the buffers of the socket.
    let taken = taken.load(Ordering::Relaxed);
    assert!((192 << 10..1 << 20).contains(&taken), "{taken}");

    // The windows that the server receives: 256 KiB for each response, and 64 KiB - 1 and the rest for the connection.
    let mut head = [0; 1024];
    server.read_exact(&mut head).await.unwrap();
    let has = |bytes: &[u8]| head.windows(bytes.len()).any(|part| part == bytes);
    assert!(has(b"\0\x04\0\x04\0\0"), "{head:?}");
    assert!(has(b"\0\0\x04\x08\0\0\0\0\0\0\x0f\0\x01"), "{head:?}");
}
