//! Decides the role of each user.
//!
//! A user presents a token once and gets a signed cookie, or comes through a proxy that identifies them. Without a
//! token for viewers or a proxy, reading needs no sign-in: on loopback, callers on this machine may read (and, in
//! `rouse dev` and `rouse ui` without a token for operators, make changes); at any other address, everyone sees
//! everything except contents. Every request that changes something needs the token of the page's form, and the
//! headers by which browsers show that it comes from a page of this origin.

mod tries;

use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use rouse_display::pages::{Notice, Role, Tone};

use crate::http::{Token, is_from_a_proxy, is_loopback, is_this_machine, only_value, port_of};

use tries::Tries;

/// The time for which a sign-in is valid.
const SESSION: Duration = Duration::from_secs(12 * 3600);
/// The cookie of a sign-in: role, end, name, signature.
const SESSION_COOKIE: &str = "rouse_session";
/// The cookie with the result of the last action.
const NOTICE_COOKIE: &str = "rouse_notice";
/// Longer notices are truncated: browsers reject cookies of more than 4 KiB, and base64 adds a third.
const NOTICE_BYTES_MAX: usize = 1500;

/// The tokens with which users sign in.
#[derive(Debug, Clone, Default)]
pub struct Tokens {
    /// Lets its holder read.
    pub viewer: Option<Token>,
    /// Also lets its holder make changes.
    pub operator: Option<Token>,
}

/// A proxy in front of the dashboard that signs users in.
#[derive(Debug, Clone)]
pub struct Proxy {
    /// The header with the user's name. The proxy must remove it from the requests that users send.
    pub user_header: HeaderName,
    /// The names of the users who may make changes; all others may read.
    pub operators: Vec<String>,
}

/// Decides the role of each user.
pub struct Access {
    tokens: Tokens,
    proxy: Option<Proxy>,
    /// The role of users without a sign-in; `None`: they have no role.
    tokenless: Option<Role>,
    on_loopback: bool,
    port: u16,
    /// Signs cookies. Derived from the tokens, if there are any, so that several hosts accept each other's cookies.
    key: hmac::Key,
    /// Signs forms. The same key if there is a token for operators; otherwise viewers could derive that key from
    /// theirs, so this one is random.
    form_key: hmac::Key,
    tries: Mutex<Tries>,
}

/// A user of the dashboard.
#[derive(Debug, Clone, Default)]
pub(super) struct User {
    pub(super) role: Role,
    /// The name; empty without a sign-in.
    pub(super) name: String,
    /// True if the request has the cookie of a sign-in.
    pub(super) has_session: bool,
    /// The result of the last action.
    pub(super) notice: Option<Notice>,
}

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refused {
    /// A sign-in is required.
    SignIn,
    /// The proxy did not send the name of the user.
    Unnamed,
    /// The request comes from elsewhere.
    Foreign(String),
}

impl Access {
    /// `address`: the address of the port. `is_own`: every caller on this machine's loopback acts on behalf of the user
    /// who started this process (`rouse dev`, `rouse ui`).
    pub fn new(tokens: Tokens, proxy: Option<Proxy>, address: SocketAddr, is_own: bool) -> Self {
        let on_loopback = is_loopback(address);
        let tokenless = match (&tokens.viewer, &proxy, on_loopback) {
            (Some(_), ..) | (_, Some(_), _) => None,
            (None, None, false) => Some(Role::Anonymous),
            (None, None, true) if is_own && tokens.operator.is_none() => Some(Role::Operator),
            (None, None, true) => Some(Role::Viewer),
        };
        let secret = match (&tokens.operator, &tokens.viewer) {
            (None, None) => rand::random::<[u8; 32]>(),
            (operator, viewer) => {
                let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
                for token in [operator, viewer] {
                    hash.update(token.as_ref().map_or(&[0; 32][..], |token| token.hash()));
                }
                hash.finish()
                    .as_ref()
                    .try_into()
                    .expect("SHA-256 has 32 bytes")
            }
        };
        let form_secret = match &tokens.operator {
            Some(_) => secret,
            None => rand::random(),
        };
        Self {
            tokens,
            proxy,
            tokenless,
            on_loopback,
            port: address.port(),
            key: hmac::Key::new(hmac::HMAC_SHA256, &secret),
            form_key: hmac::Key::new(hmac::HMAC_SHA256, &form_secret),
            tries: Mutex::new(Tries::new(Instant::now())),
        }
    }

    /// True if users can sign in.
    pub(super) fn has_tokens(&self) -> bool {
        self.tokens.viewer.is_some() || self.tokens.operator.is_some()
    }

    /// The user who sends this request, or the reason why it is refused. `is_sign_in`: the request is for the sign-in
    /// page, which is open to everyone.
    pub(super) fn user(
        &self,
        method: &Method,
        headers: &HeaderMap,
        is_sign_in: bool,
    ) -> Result<User, Refused> {
        let host = only_value(headers, header::HOST).unwrap_or_default();
        let is_proxied = headers.keys().any(is_from_a_proxy);
        // Any name can be made to resolve to this machine (DNS rebinding).
        let is_local = self.on_loopback && !is_proxied && is_this_machine(host);
        if self.on_loopback && !is_local && !self.has_tokens() && self.proxy.is_none() {
            return Err(Refused::Foreign(format!(
                "The Host header is {host:?}, or the request came through a proxy. Without tokens \
                 (ROUSE_UI_OPERATOR_TOKEN, ROUSE_UI_VIEWER_TOKEN), the dashboard accepts only direct requests from \
                 this machine."
            )));
        }
        if !method.is_safe() {
            self.check_origin(headers, host)?;
        }
        let named = self.named_by_proxy(headers);
        // A web page in a browser on this machine can send the header of the proxy if its name resolves to this
        // machine (DNS rebinding). Its requests name this port; those through the proxy name that of the proxy.
        let is_direct = self.on_loopback && port_of(host) == Some(self.port);
        if named.is_some() && is_direct && !is_this_machine(host) {
            return Err(Refused::Foreign(format!(
                "The request names a user in the header of the proxy (ROUSE_UI_USER_HEADER), but its Host header is \
                 {host:?}, with the port of the dashboard: a web page may have sent it, and not the proxy."
            )));
        }
        let signed_in = self.session(headers, now()).or(named);
        let tokenless = self.tokenless.filter(|_| is_local || !self.on_loopback);
        let user = match (signed_in, tokenless) {
            (Some(user), _) => user,
            (None, Some(role)) => User {
                role,
                ..User::default()
            },
            (None, None) if !self.has_tokens() => return Err(Refused::Unnamed),
            (None, None) if is_sign_in => User::default(),
            (None, None) => return Err(Refused::SignIn),
        };
        Ok(User {
            notice: self.notice(headers),
            ..user
        })
    }

    /// Refuses a request that changes something, unless its headers show that it comes from a page of this origin.
    fn check_origin(&self, headers: &HeaderMap, host: &str) -> Result<(), Refused> {
        let foreign =
            || Refused::Foreign("The request comes from a page of another origin.".into());
        let site = HeaderName::from_static("sec-fetch-site");
        match only_value(headers, site) {
            Some("same-origin" | "none") => return Ok(()),
            Some(_) => return Err(foreign()),
            None => {}
        }
        // Behind a proxy, `host` may be the proxy's name for this host.
        let forwarded = only_value(headers, HeaderName::from_static("x-forwarded-host"));
        let origin = only_value(headers, header::ORIGIN).and_then(|it| it.split_once("://"));
        match origin {
            Some((_, origin)) if origin == host || Some(origin) == forwarded => Ok(()),
            _ => Err(foreign()),
        }
    }

    /// The token that forms of this user's pages contain; empty if the user may not change anything.
    pub(super) fn form_token(&self, user: &User) -> String {
        match user.role {
            Role::Operator => self.signature("form", &user.name),
            Role::Nobody | Role::Anonymous | Role::Viewer => String::new(),
        }
    }

    /// True if `shown` is the token of this user's forms.
    pub(super) fn is_form_of(&self, user: &User, shown: &str) -> bool {
        user.role == Role::Operator && self.is_signed("form", &user.name, shown)
    }

    /// The cookie that proves the role of this token in later requests; `None` if the token is wrong. `from`: the
    /// address of the client. `Err`: how long to wait, after too many tries.
    pub(super) fn sign_in(
        &self,
        from: IpAddr,
        shown: &str,
        base: &str,
        is_https: bool,
    ) -> Result<Option<HeaderValue>, Duration> {
        let tries = self.tries.lock();
        let mut tries = tries.unwrap_or_else(PoisonError::into_inner);
        tries.count(from, Instant::now())?;
        drop(tries);
        let is = |token: &Option<Token>| token.as_ref().is_some_and(|token| token.is(shown));
        let (role, name) = match (is(&self.tokens.operator), is(&self.tokens.viewer)) {
            (true, _) => ("operator", "operator"),
            (false, true) => ("viewer", "viewer"),
            (false, false) => return Ok(None),
        };
        let until = now() + SESSION.as_secs();
        let what = format!("{role}.{until}.{name}");
        let value = format!("{what}.{}", self.signature("session", &what));
        Ok(Some(cookie(
            SESSION_COOKIE,
            &value,
            base,
            SESSION,
            is_https,
        )))
    }

    /// The cookie that ends a sign-in.
    pub(super) fn sign_out(&self, base: &str) -> HeaderValue {
        cookie(SESSION_COOKIE, "", base, Duration::ZERO, false)
    }

    /// The cookie with the result of an action.
    pub(super) fn notice_cookie(&self, notice: &Notice, base: &str) -> HeaderValue {
        let tone = match notice.tone {
            Tone::Good => "good",
            Tone::Bad => "bad",
            Tone::Plain => "plain",
        };
        let text = &notice.text[..notice.text.floor_char_boundary(NOTICE_BYTES_MAX)];
        let what = format!("{tone}.{}", URL_SAFE_NO_PAD.encode(text));
        let value = format!("{what}.{}", self.signature("notice", &what));
        cookie(NOTICE_COOKIE, &value, base, Duration::from_secs(60), false)
    }

    /// The cookie that removes the notice.
    pub(super) fn no_notice(&self, base: &str) -> HeaderValue {
        cookie(NOTICE_COOKIE, "", base, Duration::ZERO, false)
    }

    /// The user of a sign-in that is valid at `now`, in seconds since 1970.
    fn session(&self, headers: &HeaderMap, now: u64) -> Option<User> {
        let value = find_cookie(headers, SESSION_COOKIE)?;
        let (what, signature) = value.rsplit_once('.')?;
        let mut parts = what.splitn(3, '.');
        let (role, until, name) = (parts.next()?, parts.next()?, parts.next()?);
        if until.parse::<u64>().ok()? < now || !self.is_signed("session", what, signature) {
            return None;
        }
        Some(User {
            role: match role {
                // Without a token for operators, viewers can derive the key.
                "operator" if self.tokens.operator.is_some() => Role::Operator,
                "viewer" => Role::Viewer,
                _ => return None,
            },
            name: name.to_owned(),
            has_session: true,
            notice: None,
        })
    }

    fn named_by_proxy(&self, headers: &HeaderMap) -> Option<User> {
        let proxy = self.proxy.as_ref()?;
        let name =
            only_value(headers, proxy.user_header.clone()).filter(|name| !name.is_empty())?;
        Some(User {
            role: match proxy.operators.iter().any(|operator| operator == name) {
                true => Role::Operator,
                false => Role::Viewer,
            },
            name: name.to_owned(),
            has_session: false,
            notice: None,
        })
    }

    fn notice(&self, headers: &HeaderMap) -> Option<Notice> {
        let value = find_cookie(headers, NOTICE_COOKIE)?;
        let (what, signature) = value.rsplit_once('.')?;
        if !self.is_signed("notice", what, signature) {
            return None;
        }
        let (tone, text) = what.split_once('.')?;
        Some(Notice {
            tone: match tone {
                "good" => Tone::Good,
                "bad" => Tone::Bad,
                _ => Tone::Plain,
            },
            text: String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?,
        })
    }

    fn signature(&self, kind: &str, what: &str) -> String {
        let key = self.key_of(kind);
        URL_SAFE_NO_PAD.encode(hmac::sign(key, format!("{kind}|{what}").as_bytes()))
    }

    fn key_of(&self, kind: &str) -> &hmac::Key {
        match kind {
            "form" => &self.form_key,
            _ => &self.key,
        }
    }

    fn is_signed(&self, kind: &str, what: &str, signature: &str) -> bool {
        let Ok(signature) = URL_SAFE_NO_PAD.decode(signature) else {
            return false;
        };
        let key = self.key_of(kind);
        hmac::verify(key, format!("{kind}|{what}").as_bytes(), &signature).is_ok()
    }
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// A cookie of the dashboard. `Lax`: links from elsewhere open a page for a user who has signed in, and forms from
/// elsewhere do not send the cookie.
fn cookie(name: &str, value: &str, base: &str, lasts: Duration, is_https: bool) -> HeaderValue {
    let secure = if is_https { "; Secure" } else { "" };
    let text = format!(
        "{name}={value}; Path={base}; Max-Age={}; HttpOnly; SameSite=Lax{secure}",
        lasts.as_secs()
    );
    // The value has letters, digits, dots, dashes and underscores; the path was checked when it was read.
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static(""))
}

fn find_cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let all = headers.get_all(header::COOKIE).iter();
    let mut pairs = all
        .filter_map(|it| it.to_str().ok())
        .flat_map(|it| it.split(';'));
    pairs.find_map(|pair| {
        let (key, value) = pair.trim().split_once('=')?;
        (key == name && !value.is_empty()).then_some(value)
    })
}

#[cfg(test)]
mod tests;
