//! A web server on loopback, in plain text and over TLS, that records its requests.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// The server that all tests share, on threads of its own: a test's runtime ends with the test.
pub(crate) fn web() -> &'static Web {
    static WEB: OnceLock<&'static Web> = OnceLock::new();
    WEB.get_or_init(|| {
        let (send, started) = mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .expect("a runtime for the server");
            runtime.block_on(async {
                let plain = TcpListener::bind("127.0.0.1:0").await.expect("a port");
                let tls = TcpListener::bind("127.0.0.1:0").await.expect("a port");
                let web: &'static Web = Box::leak(Box::new(Web {
                    plain: port(&plain),
                    tls: port(&tls),
                    seen: Mutex::default(),
                    connections: AtomicUsize::new(0),
                }));
                send.send(web).expect("the receiver is waiting");
                tokio::join!(web.accept(plain, None), web.accept(tls, Some(acceptor())));
            });
        });
        started.recv().expect("the server starts")
    })
}

fn port(listener: &TcpListener) -> u16 {
    let address: SocketAddr = listener.local_addr().expect("a bound address");
    address.port()
}

fn acceptor() -> TlsAcceptor {
    let certificate = include_bytes!("../certificates/server.crt");
    let key = include_bytes!("../certificates/server.key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has them")
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(certificate).expect("a certificate")],
            PrivateKeyDer::from_pem_slice(key).expect("a key"),
        )
        .expect("the key belongs to the certificate");
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

/// A web server.
pub(crate) struct Web {
    /// The port without TLS.
    pub(crate) plain: u16,
    /// The port with TLS, as `localhost`.
    pub(crate) tls: u16,
    seen: Mutex<Vec<Value>>,
    connections: AtomicUsize,
}

impl Web {
    /// The requests under this path, in order.
    pub(crate) fn seen(&self, path: &str) -> Vec<Value> {
        let seen = self
            .seen
            .lock()
            .expect("no thread panics while it holds the lock");
        let under = |one: &&Value| {
            one["path"]
                .as_str()
                .is_some_and(|own| own.starts_with(path))
        };
        seen.iter().filter(under).cloned().collect()
    }

    async fn accept(&'static self, listener: TcpListener, tls: Option<TlsAcceptor>) {
        while let Ok((stream, _)) = listener.accept().await {
            let connection = self.connections.fetch_add(1, Ordering::Relaxed);
            let tls = tls.clone();
            tokio::spawn(async move {
                match tls {
                    None => self.serve(connection, stream).await,
                    Some(tls) => {
                        // A client that does not trust the certificate disconnects.
                        if let Ok(stream) = tls.accept(stream).await {
                            self.serve(connection, stream).await;
                        }
                    }
                }
            });
        }
    }

    async fn serve<S>(&'static self, connection: usize, stream: S)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let service = service_fn(move |request| self.respond(connection, request));
        let builder = auto::Builder::new(TokioExecutor::new());
        // Some tests cut their clients off.
        drop(
            builder
                .serve_connection(TokioIo::new(stream), service)
                .await,
        );
    }

    async fn respond(
        &'static self,
        connection: usize,
        request: Request<Incoming>,
    ) -> Result<Response<Chunks>, Infallible> {
        let (head, body) = request.into_parts();
        let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
        let path = path.to_owned();
        let mut seen = json!({
            "connection": connection,
            "version": format!("{:?}", head.version),
            "method": head.method.as_str(),
            "path": path,
            "authority": head.uri.authority().map(ToString::to_string),
            "headers": head.headers.iter().map(|(name, value)| {
                (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
            }).collect::<BTreeMap<_, _>>(),
        });
        self.note(&seen);
        let body = match body.collect().await {
            Ok(body) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
            Err(error) => format!("incomplete: {error}"),
        };
        seen["body"] = body.into();
        // Recorded a second time, with the body.
        seen["whole"] = true.into();
        self.note(&seen);
        let mut parts = head.uri.path().trim_start_matches('/').splitn(3, '/');
        let (endpoint, argument) = (
            parts.next().unwrap_or_default(),
            parts.next().unwrap_or_default(),
        );
        let number = || argument.parse().expect("a number");
        let response = match endpoint {
            "bytes" => whole("x".repeat(number())),
            "fields" => (0..number())
                .fold(Response::builder(), |response, n| {
                    response.header(format!("x-{n}"), "value")
                })
                .body(Chunks::default()),
            "redirect" => {
                let to = path
                    .split_once("to=")
                    .expect("the target of the redirect")
                    .1;
                let status: u16 = argument.parse().expect("a status");
                let response = Response::builder().status(status).header("location", to);
                response.body(Chunks::default())
            }
            // `/status/503/once?retry-after=7`: this status the first time, then an echo; `/status/404/always`: this
            // status each time.
            "status" => {
                let earlier = self.seen(&path);
                let is_repeated = earlier.iter().filter(|one| one["whole"] == true).count() > 1;
                match head.uri.path().ends_with("/once") && is_repeated {
                    true => whole(seen.to_string()),
                    false => {
                        let wait = path.split_once("retry-after=").map(|(_, wait)| wait);
                        let response =
                            Response::builder().status(argument.parse::<u16>().expect("a status"));
                        let response = match wait {
                            Some(wait) => response.header("retry-after", wait.replace("%20", " ")),
                            None => response,
                        };
                        response.body(Chunks::of(seen.to_string()))
                    }
                }
            }
            // A page that is unchanged for a client that has the version "v1".
            "page" => {
                let response = Response::builder().header("etag", "\"v1\"");
                if seen["headers"]["if-none-match"] == "\"v1\"" {
                    response.status(304).body(Chunks::default())
                } else {
                    let (kind, bytes) = match argument {
                        "json" => ("application/json", Bytes::from_static(PAGE)),
                        "digits" => ("application/json", Bytes::from_static(DIGITS.as_bytes())),
                        _ => (
                            "application/octet-stream",
                            Bytes::from_static(b"\xff\0\xfe"),
                        ),
                    };
                    response
                        .header("content-type", kind)
                        .body(Chunks::of(bytes))
                }
            }
            // The request, in pieces of 3 bytes, with its key in a header.
            "leak" => {
                let text = seen.to_string();
                let key = seen["headers"]["authorization"].as_str().unwrap_or("none");
                let pieces = text.as_bytes().chunks(3).map(Bytes::copy_from_slice);
                Response::builder().header("x-leak", key).body(Chunks {
                    chunks: pieces.collect(),
                    hangs: false,
                })
            }
            "half" => Ok(Response::new(Chunks {
                chunks: VecDeque::from([Bytes::from_static(b"the first half")]),
                hangs: true,
            })),
            "silence" => std::future::pending().await,
            // Longer than the host waits for the first byte by default.
            "late" => {
                tokio::time::sleep(Duration::from_secs(72)).await;
                whole("late".to_owned())
            }
            _ => whole(seen.to_string()),
        };
        Ok(response.expect("a response"))
    }

    fn note(&self, seen: &Value) {
        let mut all = self
            .seen
            .lock()
            .expect("no thread panics while it holds the lock");
        all.push(seen.clone());
    }
}

/// The document at `/page/digits`, as `jsonb` formats it.
pub(crate) const DIGITS: &str =
    r#"{"id": 123456789012345678901234567890, "share": 0.10000000000000000000001}"#;

/// The document at `/page/json`.
pub(crate) const PAGE: &[u8] = b"{\"chf\": 1.07}";

fn whole(text: String) -> hyper::http::Result<Response<Chunks>> {
    Ok(Response::new(Chunks::of(text)))
}

/// A body in pieces.
#[derive(Default)]
struct Chunks {
    chunks: VecDeque<Bytes>,
    /// Nothing follows the last piece.
    hangs: bool,
}

impl Chunks {
    /// The whole body in one piece.
    fn of(bytes: impl Into<Bytes>) -> Self {
        Self {
            chunks: VecDeque::from([bytes.into()]),
            hangs: false,
        }
    }
}

impl Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.chunks.pop_front() {
            Some(chunk) => Poll::Ready(Some(Ok(Frame::data(chunk)))),
            None if self.hangs => Poll::Pending,
            None => Poll::Ready(None),
        }
    }
}
