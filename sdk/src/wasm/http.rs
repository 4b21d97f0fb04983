//! Requests over `wasi:http`.

use super::Source;
use super::bindings::wasi::http::outgoing_handler;
use super::bindings::wasi::http::types::{
    ErrorCode, Fields, IncomingBody, Method, OutgoingBody, OutgoingRequest, RequestOptions, Scheme,
};
use super::bindings::wasi::io::poll::Pollable;
use super::bindings::wasi::io::streams::{OutputStream, StreamError};
use crate::http::{Request, Response, Url};
use crate::task::Wait;
use crate::{Either, Error, Result, race};

/// The size of one read, in bytes.
const READ_BYTES: u64 = 64 << 10;

/// Sends a request, and reads the whole response.
pub(super) async fn send(request: &Request) -> Result<Response> {
    let (outgoing, body) = outgoing(request)?;
    let pending = outgoing_handler::handle(outgoing, options(request))
        .map_err(|code| failed(&request.label(), code))?;
    // A server may respond before it has read the whole body. The rest of the body is kept until the response has
    // arrived, because dropping it would end the connection.
    let mut rest = None;
    if let Some(body) = body {
        match race(write(&body, &request.body), ready(pending.subscribe())).await {
            Either::First(Ok(())) => drop(OutgoingBody::finish(body, None)),
            Either::First(Err(_)) | Either::Second(()) => rest = Some(body),
        }
    }

    ready(pending.subscribe()).await;
    let response = pending
        .get()
        .expect("the pollable is ready")
        .expect("the response is taken once")
        .map_err(|code| failed(&request.label(), code))?;
    let fields = response.headers().entries();
    let headers = fields.into_iter().map(|(name, value)| {
        (
            name.to_ascii_lowercase(),
            String::from_utf8_lossy(&value).into_owned(),
        )
    });
    let mut answered = Response::new(response.status(), Vec::new());
    answered.headers = headers.collect();
    let body = response.consume().expect("the body is consumed once");
    (answered.body, answered.is_truncated) = read(&body, request).await?;
    drop(rest);
    Ok(answered)
}

/// Lets the response start as late as the timeout of the request permits, and pause for as long. Without it, the
/// defaults of the host apply. The host's limit for a whole request applies in any case.
fn options(request: &Request) -> Option<RequestOptions> {
    let timeout = request.timeout?;
    let nanoseconds = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
    let options = RequestOptions::new();
    options
        .set_first_byte_timeout(Some(nanoseconds))
        .and_then(|()| options.set_between_bytes_timeout(Some(nanoseconds)))
        .expect("the host supports both timeouts");
    Some(options)
}

fn outgoing(request: &Request) -> Result<(OutgoingRequest, Option<OutgoingBody>)> {
    let bad = |why: &str| {
        Error::permanent(format_args!("{}: {why}", request.label())).kind("invalid_request")
    };
    let url = Url::parse(&request.url)?;
    let mut entries: Vec<(String, Vec<u8>)> = request
        .headers
        .iter()
        .map(|(name, value)| (name.clone(), value.clone().into_bytes()))
        .collect();
    let has_length = |(name, _): &(String, Vec<u8>)| name.eq_ignore_ascii_case("content-length");
    if !request.body.is_empty() && !entries.iter().any(has_length) {
        let length = request.body.len().to_string();
        entries.push(("content-length".to_owned(), length.into_bytes()));
    }
    let fields = Fields::from_list(&entries)
        .map_err(|error| bad(&format!("a header cannot be sent: {error:?}")))?;
    let outgoing = OutgoingRequest::new(fields);
    let method = match request.method.as_str() {
        "GET" => Method::Get,
        "HEAD" => Method::Head,
        "POST" => Method::Post,
        "PUT" => Method::Put,
        "DELETE" => Method::Delete,
        "OPTIONS" => Method::Options,
        "PATCH" => Method::Patch,
        other => Method::Other(other.to_owned()),
    };
    let scheme = match url.scheme.as_str() {
        "http" => Scheme::Http,
        _ => Scheme::Https,
    };
    outgoing
        .set_method(&method)
        .map_err(|()| bad("the method is invalid"))?;
    outgoing
        .set_scheme(Some(&scheme))
        .and_then(|()| outgoing.set_authority(Some(&url.authority)))
        .and_then(|()| outgoing.set_path_with_query(Some(&url.path_with_query)))
        .map_err(|()| bad("the URL is invalid"))?;
    if request.body.is_empty() {
        return Ok((outgoing, None));
    }
    let body = outgoing
        .body()
        .map_err(|()| bad("content-length is not a number"))?;
    Ok((outgoing, Some(body)))
}

/// Writes the whole body, or as much as the server accepts.
async fn write(body: &OutgoingBody, bytes: &[u8]) -> std::result::Result<(), StreamError> {
    let stream = body.write().expect("the body is written once");
    let mut left = bytes;
    while !left.is_empty() {
        let accepted = capacity(&stream).await?;
        let (now, later) = left.split_at(accepted.min(left.len()));
        stream.write(now)?;
        left = later;
    }
    stream.flush()
}

/// Waits until the server accepts more of the body, and returns the number of bytes.
async fn capacity(stream: &OutputStream) -> std::result::Result<usize, StreamError> {
    loop {
        match stream.check_write()? {
            0 => ready(stream.subscribe()).await,
            bytes => return Ok(usize::try_from(bytes).unwrap_or(usize::MAX)),
        }
    }
}

/// Reads the body, and returns whether it was truncated.
async fn read(body: &IncomingBody, request: &Request) -> Result<(Vec<u8>, bool)> {
    let stream = body.stream().expect("the stream is taken once");
    let mut bytes = Vec::new();
    loop {
        match stream.read(READ_BYTES) {
            Ok(more) if more.is_empty() => ready(stream.subscribe()).await,
            Ok(more) => {
                bytes.extend(more);
                if request.fit(&mut bytes)? {
                    return Ok((bytes, true));
                }
            }
            Err(StreamError::Closed) => return Ok((bytes, false)),
            Err(StreamError::LastOperationFailed(error)) => {
                let (label, why) = (request.label(), error.to_debug_string());
                return Err(Error::retryable(format_args!("{label}: {why}")).kind("http"));
            }
        }
    }
}

/// Waits for a pollable, and drops it before the resource that it belongs to.
async fn ready(pollable: Pollable) {
    Wait::new(Source {
        pollable,
        _owner: None,
    })
    .await;
}

fn failed(label: &str, code: ErrorCode) -> Error {
    match code {
        ErrorCode::HttpRequestDenied | ErrorCode::DestinationIpProhibited => {
            Error::permanent(format_args!("{label}: not granted")).kind("denied")
        }
        ErrorCode::InternalError(Some(why)) => {
            Error::retryable(format_args!("{label}: {why}")).kind("http")
        }
        ErrorCode::ConnectionTimeout
        | ErrorCode::ConnectionReadTimeout
        | ErrorCode::HttpResponseTimeout => {
            Error::retryable(format_args!("{label}: no response in time")).kind("http_timeout")
        }
        ErrorCode::HttpRequestBodySize(bytes) => {
            let limit = bytes.map_or(String::new(), |bytes| format!(" ({bytes} bytes)"));
            Error::permanent(format_args!(
                "{label}: the body is larger than the host allows{limit}"
            ))
            .kind("too_large")
        }
        ErrorCode::DnsError(error) => {
            let why = error.rcode.unwrap_or_default();
            Error::retryable(format_args!(
                "{label}: the host name cannot be resolved: {why}"
            ))
            .kind("http")
        }
        code => Error::retryable(format_args!("{label}: {code:?}")).kind("http"),
    }
}
