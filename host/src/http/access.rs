//! Access control for invocations, for the states of jobs, and for the status pages.
//!
//! A loopback port is reachable only from this machine, with three exceptions. Two are browsers: any page can make a
//! browser send requests to `http://127.0.0.1` (cross-site request forgery), and its owner can point the page's own
//! name there and read the responses too (DNS rebinding). The first kind of page cannot set `content-type:
//! application/json` without a preflight request, which nothing here answers, and it sends its `Origin`; the second
//! sends a different name in `Host`. All three headers are therefore checked. The third exception is a proxy or tunnel
//! on this machine, through which anyone who can reach it may send requests. Requests that carry a proxy's header are
//! also refused, but not every proxy adds one, so the guide requires a token behind a proxy. None of these callers has
//! a token; if a request carries one, the other checks are skipped.

use std::net::{IpAddr, SocketAddr};

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

use super::problem::Problem;

/// Shorter tokens could be guessed.
const TOKEN_CHARS_MIN: usize = 16;

/// The callers that may invoke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Programs on this machine, without a token.
    Loopback,
    /// Callers with one of these tokens.
    Tokens(Vec<Token>),
}

/// The token of callers. Kept as a hash, so that it is never printed, and compared as a hash in constant time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token([u8; 32]);

impl Token {
    /// # Errors
    /// If the text cannot be sent in a header, or could be guessed.
    pub fn new(text: &str) -> Result<Self, String> {
        if text.len() < TOKEN_CHARS_MIN || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!(
                "a token must have at least {TOKEN_CHARS_MIN} visible ASCII characters, without spaces (`openssl rand -hex 32` makes one)"
            ));
        }
        Ok(Self(Sha256::digest(text).into()))
    }

    /// The tokens in a text, one per line. Callers can change to a new token one by one while both are accepted.
    ///
    /// # Errors
    /// If there is none, or [`new`](Self::new) refuses one.
    pub fn read_lines(text: &str) -> Result<Vec<Self>, String> {
        // A text without tokens is refused as an empty token.
        let lines = text.trim().split('\n').map(str::trim);
        lines
            .enumerate()
            .filter(|(at, line)| *at == 0 || !line.is_empty())
            .map(|(_, line)| Self::new(line))
            .collect()
    }

    /// True if this text is the token.
    pub(crate) fn is(&self, shown: &str) -> bool {
        Self::is_among(std::slice::from_ref(self), shown)
    }

    /// True if this text is one of these tokens. It is compared with all of them, so the time shows nothing about any.
    fn is_among(tokens: &[Self], shown: &str) -> bool {
        let shown: [u8; 32] = Sha256::digest(shown).into();
        let found = tokens.iter().fold(Choice::from(0), |found, token| {
            found | token.0.ct_eq(&shown)
        });
        found.into()
    }

    /// Its SHA-256: a secret that only holders of the token can derive.
    pub(crate) fn hash(&self) -> &[u8; 32] {
        &self.0
    }
}

impl Access {
    /// The access of callers without a token to a port of this address, for `rouse dev`; `None` if they have none.
    pub fn without_token(address: SocketAddr) -> Option<Self> {
        is_loopback(address).then_some(Self::Loopback)
    }

    /// Admits a request that runs something, or returns the reason why not.
    pub(super) fn admit(&self, headers: &HeaderMap) -> Result<(), Problem> {
        self.admit_caller(headers)?;
        let kind = only_value(headers, header::CONTENT_TYPE).unwrap_or_default();
        let kind = kind.split(';').next().unwrap_or_default().trim();
        if !kind.eq_ignore_ascii_case("application/json") {
            return Err(Problem::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "not_json",
                "the header `content-type: application/json` is missing",
            ));
        }
        Ok(())
    }

    /// Admits a request that only reads, or returns the reason why not. A page of another origin can send such a
    /// request, but cannot read the response.
    pub(super) fn admit_caller(&self, headers: &HeaderMap) -> Result<(), Problem> {
        match self {
            Self::Tokens(tokens) => {
                let shown = only_value(headers, header::AUTHORIZATION).and_then(bearer);
                if !shown.is_some_and(|shown| Token::is_among(tokens, shown)) {
                    return Err(Problem::new(
                        StatusCode::UNAUTHORIZED,
                        "unauthorized",
                        "the header `authorization: Bearer TOKEN` is missing or wrong",
                    ));
                }
            }
            Self::Loopback => {
                if let Some(name) = headers.keys().find(|name| is_from_a_proxy(name)) {
                    return Err(foreign(format!(
                        "the header `{name}` shows that the call comes through a proxy, so anyone may have sent it; behind a proxy, set a token (ROUSE_INVOKE_TOKEN, or invoke_token_file in rouse.toml)"
                    )));
                }
                let host = only_value(headers, header::HOST).unwrap_or_default();
                if !is_this_machine(host) {
                    return Err(foreign(format!(
                        "the header `host` is {host:?}; without a token it must be localhost or a loopback address"
                    )));
                }
                let own = format!("http://{host}");
                if headers.contains_key(header::ORIGIN)
                    && only_value(headers, header::ORIGIN) != Some(&own)
                {
                    return Err(foreign(
                        "the call comes from a page of another origin".to_string(),
                    ));
                }
            }
        }
        Ok(())
    }
}

/// True for an address that only this machine can reach.
pub(crate) fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Admits a request only if nobody else can make the name in its `host` header resolve to this machine. Otherwise a
/// page whose own name resolves to this machine (DNS rebinding) could read the response.
pub(super) async fn only_from_this_machine(request: Request, next: Next) -> Response {
    let host = only_value(request.headers(), header::HOST).unwrap_or_default();
    if is_this_machine(host) {
        return next.run(request).await;
    }
    let why = format!(
        "the header `host` is {host:?}; on a loopback port it must be localhost or a loopback address\n"
    );
    (StatusCode::FORBIDDEN, why).into_response()
}

fn foreign(message: String) -> Problem {
    Problem::new(StatusCode::FORBIDDEN, "foreign", message)
}

/// True for headers that proxies and tunnels add to requests.
pub(crate) fn is_from_a_proxy(name: &HeaderName) -> bool {
    let name = name.as_str();
    name.starts_with("x-forwarded-") || ["forwarded", "via", "x-real-ip"].contains(&name)
}

/// The value of a header that occurs exactly once.
pub(crate) fn only_value(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    let mut all = headers.get_all(name).iter();
    match (all.next(), all.next()) {
        (Some(only), None) => only.to_str().ok(),
        _ => None,
    }
}

fn bearer(authorization: &str) -> Option<&str> {
    let (scheme, token) = authorization.split_once(' ')?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then_some(token.trim_start())
}

/// True for a name that nobody else can make resolve to this machine.
pub(crate) fn is_this_machine(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let name = authority.host();
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost")
        || bare
            .parse::<IpAddr>()
            .is_ok_and(|address| address.to_canonical().is_loopback())
}

/// The port in the value of a `host` header. Browsers leave out that of HTTP.
pub(crate) fn port_of(host: &str) -> Option<u16> {
    let authority = host.parse::<Authority>().ok()?;
    Some(authority.port_u16().unwrap_or(80))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_only_reads_needs_no_content_type_and_comes_from_this_machine() {
        let read = |headers: &[(HeaderName, &str)]| {
            let map = headers
                .iter()
                .map(|(name, value)| (name.clone(), value.parse().unwrap()))
                .collect();
            let refused = Access::Loopback.admit_caller(&map).err();
            refused.map_or(200, |problem| problem.status().as_u16())
        };
        assert_eq!(read(&[(header::HOST, "localhost:8420")]), 200);
        assert_eq!(read(&[(header::HOST, "rebound.example")]), 403);
        let here = (header::HOST, "localhost:8420");
        assert_eq!(read(&[here, (header::ORIGIN, "http://evil.example")]), 403);
    }

    fn status(access: &Access, headers: &[(HeaderName, &str)]) -> u16 {
        let map = headers
            .iter()
            .map(|(name, value)| (name.clone(), value.parse().unwrap()))
            .collect();
        access
            .admit(&map)
            .err()
            .map_or(200, |problem| problem.status().as_u16())
    }

    const JSON: (HeaderName, &str) = (header::CONTENT_TYPE, "application/json; charset=utf-8");

    #[test]
    fn on_loopback_only_calls_from_this_machine_are_admitted() {
        let access = Access::Loopback;
        for host in ["localhost", "LocalHost:8420", "127.0.0.1:8420", "[::1]:1"] {
            assert_eq!(
                status(&access, &[JSON, (header::HOST, host)]),
                200,
                "{host}"
            );
        }
        for host in [
            "evil.example:8420",
            "localhost.evil.example",
            "10.0.0.1",
            "",
        ] {
            assert_eq!(
                status(&access, &[JSON, (header::HOST, host)]),
                403,
                "{host}"
            );
        }
        assert_eq!(status(&access, &[JSON]), 403, "no host");
        let here = (header::HOST, "localhost:8420");
        for (origin, code) in [
            ("http://localhost:8420", 200),
            ("http://evil.example", 403),
            ("http://localhost:3000", 403),
            ("null", 403),
        ] {
            let headers = [JSON, here.clone(), (header::ORIGIN, origin)];
            assert_eq!(status(&access, &headers), code, "{origin}");
        }
        for proxy in [
            "forwarded",
            "via",
            "X-Forwarded-For",
            "x-forwarded-proto",
            "x-real-ip",
        ] {
            let proxy = HeaderName::from_bytes(proxy.as_bytes()).unwrap();
            let headers = [JSON, here.clone(), (proxy.clone(), "127.0.0.1")];
            assert_eq!(status(&access, &headers), 403, "{proxy}");
        }
        assert_eq!(status(&access, std::slice::from_ref(&here)), 415);
        let form = (header::CONTENT_TYPE, "text/plain");
        assert_eq!(status(&access, &[form, here]), 415);
    }

    #[test]
    fn with_a_token_only_the_token_counts() {
        let access = Access::Tokens(vec![Token::new("0123456789abcdef").unwrap()]);
        let call = |value: &str| {
            let headers = [
                JSON,
                (header::HOST, "jobs.example"),
                (header::AUTHORIZATION, value),
            ];
            status(&access, &headers)
        };
        assert_eq!(call("Bearer 0123456789abcdef"), 200);
        assert_eq!(call("bearer  0123456789abcdef"), 200);
        let forwarded = [
            JSON,
            (header::VIA, "1.1 proxy"),
            (header::AUTHORIZATION, "Bearer 0123456789abcdef"),
        ];
        assert_eq!(status(&access, &forwarded), 200);
        for invalid in [
            "Bearer 0123456789abcdeF",
            "Bearer 0123456789abcde",
            "Bearer",
            "Basic 0123456789abcdef",
        ] {
            assert_eq!(call(invalid), 401, "{invalid}");
        }
        assert_eq!(status(&access, &[JSON, (header::HOST, "localhost")]), 401);
    }

    #[test]
    fn each_token_of_a_text_is_accepted() {
        let tokens = Token::read_lines("0123456789abcdef\r\n\nfedcba9876543210\n").unwrap();
        assert_eq!(tokens.len(), 2);
        let access = Access::Tokens(tokens);
        for (token, code) in [
            ("0123456789abcdef", 200),
            ("fedcba9876543210", 200),
            ("0123456789abcdeffedcba9876543210", 401),
            ("", 401),
        ] {
            let authorization = format!("Bearer {token}");
            let headers = [JSON, (header::AUTHORIZATION, authorization.as_str())];
            assert_eq!(status(&access, &headers), code, "{token}");
        }
        for bad in [
            "",
            "\n",
            "0123456789abcdef\nshort",
            "0123456789abcdef fedcba9876543210",
        ] {
            assert!(Token::read_lines(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn without_a_token_only_loopback_is_served() {
        let on = |address: &str| Access::without_token(address.parse().unwrap());
        assert_eq!(on("127.0.0.1:1"), Some(Access::Loopback));
        assert_eq!(on("[::1]:1"), Some(Access::Loopback));
        assert_eq!(on("0.0.0.0:1"), None);
        assert_eq!(on("[::]:1"), None);
    }

    #[test]
    fn weak_or_unsendable_tokens_are_refused_and_no_token_is_printed() {
        assert!(Token::new("short").is_err());
        assert!(Token::new("with spaces in between").is_err());
        let token = Token::new("0123456789abcdef").unwrap();
        assert!(!format!("{token:?}").contains("0123456789abcdef"));
    }
}
