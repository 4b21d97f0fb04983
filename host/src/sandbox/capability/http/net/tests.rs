use std::future::pending;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use http::Request;
use http_body_util::{BodyExt as _, Empty};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
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

/// Starts a server that answers every request, and reports the end of each connection. Returns its port.
async fn server() -> (u16, UnboundedReceiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (ended, ends) = unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream, ended.clone()));
        }
    });
    (port, ends)
}

async fn answer(mut stream: TcpStream, ended: UnboundedSender<()>) {
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
    let body = slot.fill(body.boxed_unsync(), AbortHandle::new(), tally, 0);
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
        let response = response.await.expect("an answer");
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
    let all = UNDER_WAY_MAX + OPEN_MAX;
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
    // Each version uses a reach that the earlier ones did not, and so a client of its own.
    for reach in [Reach::Public, Reach::Private, Reach::Listed] {
        let access = HttpAccess::new(
            "a",
            crate::sandbox::Origin::of_tests(),
            &Settings::default(),
            net.clone(),
        );
        for at in 0..LOOKUPS_PER_HANDLER_MAX {
            tokio::spawn(access.client(reach).request(request_to(at, 80)));
        }
    }
    // Each continues as far as it can without an answer.
    for _ in 0..1000 {
        yield_now().await;
    }
    assert_eq!(never.0.load(Ordering::Relaxed), LOOKUPS_PER_HANDLER_MAX);
}
