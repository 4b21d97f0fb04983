//! Grants of HTTP requests to handlers.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// The scheme of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HttpScheme {
    /// Without encryption.
    Http,
    /// Over TLS.
    Https,
}

impl HttpScheme {
    /// As in a URL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }

    /// The default port.
    pub fn port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}

/// Requests that a handler or a family of handlers may send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpGrant {
    /// A handler's name, or a pattern.
    pub handler: String,
    /// The servers.
    pub hosts: Vec<HostPattern>,
    /// The schemes.
    pub schemes: Vec<HttpScheme>,
    /// The ports; empty means the scheme's default.
    pub ports: Vec<u16>,
    /// The methods; empty means any except CONNECT.
    pub methods: Vec<String>,
    /// Also allows hosts with addresses of this machine or its network. Addresses at which clouds serve credentials are
    /// excluded even then, unless they are listed themselves.
    pub private: bool,
}

impl HttpGrant {
    /// True if it covers this server.
    pub fn covers(&self, scheme: HttpScheme, host: &Host, port: u16) -> bool {
        self.schemes.contains(&scheme)
            && match self.ports.as_slice() {
                [] => port == scheme.port(),
                ports => ports.contains(&port),
            }
            && self.hosts.iter().any(|pattern| pattern.covers(host))
    }

    /// True if it covers this method.
    pub fn covers_method(&self, method: &str) -> bool {
        self.methods.is_empty() || self.methods.iter().any(|granted| granted == method)
    }
}

/// A server, by name or by address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// A name in lower case, without a trailing dot.
    Name(String),
    /// An address.
    Ip(IpAddr),
}

impl Host {
    /// Parses a host as in a URL. Spellings that other parsers read as an address, such as `0x7f.1`, are refused.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(inner) = text.strip_prefix('[') {
            let address = inner.strip_suffix(']').and_then(|it| it.parse().ok());
            return address
                .map(|address: Ipv6Addr| Self::Ip(address.into()))
                .ok_or_else(|| "the text in brackets is not an IPv6 address".into());
        }
        if let Ok(address) = text.parse::<Ipv4Addr>() {
            return Ok(Self::Ip(address.into()));
        }
        let name = text.strip_suffix('.').unwrap_or(text);
        let last = name.rsplit('.').next().unwrap_or_default();
        if last.starts_with(|first: char| first.is_ascii_digit()) && is_number(last) {
            return Err("an address must be in dotted decimal, as in 192.0.2.1".into());
        }
        match name.len() <= NAME_BYTES_MAX && name.split('.').all(is_label) {
            true => Ok(Self::Name(name.to_ascii_lowercase())),
            false => Err(
                "it is not a host name (letters, digits, hyphens and dots; write other characters as xn--…)".into(),
            ),
        }
    }
}

/// The maximum sizes of a domain name and of each label (RFC 1035).
const NAME_BYTES_MAX: usize = 253;
const LABEL_BYTES_MAX: usize = 63;

/// Underscores occur in practice.
fn is_label(label: &str) -> bool {
    (1..=LABEL_BYTES_MAX).contains(&label.len())
        && !label.starts_with('-')
        && !label.ends_with('-')
        && label
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

/// True for a number as `inet_aton` reads it: decimal, octal, hexadecimal.
fn is_number(label: &str) -> bool {
    let hexadecimal = label.strip_prefix("0x").or(label.strip_prefix("0X"));
    match hexadecimal {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
        None => label.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Ip(address) => address.fmt(f),
        }
    }
}

/// A pattern of servers in a grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostPattern {
    /// `*`: every server.
    Any,
    /// `api.example.com`, `192.0.2.1` or `2001:db8::1`: exactly this server.
    Exact(Host),
    /// `*.example.com`: all names below it, but not `example.com` itself. Stored with its dot: `.example.com`.
    Under(String),
}

impl HostPattern {
    /// True if it covers this server.
    pub fn covers(&self, host: &Host) -> bool {
        match (self, host) {
            (Self::Any, Host::Name(_) | Host::Ip(_)) => true,
            (Self::Exact(exact), host) => exact == host,
            (Self::Under(suffix), Host::Name(name)) => {
                name.len() > suffix.len() && name.ends_with(suffix)
            }
            (Self::Under(_), Host::Ip(_)) => false,
        }
    }
}

impl HostPattern {
    /// True if it covers all servers that the other covers.
    pub fn includes(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Any, Self::Any | Self::Exact(_) | Self::Under(_)) => true,
            (Self::Exact(_) | Self::Under(_), Self::Any) => false,
            (pattern @ (Self::Exact(_) | Self::Under(_)), Self::Exact(host)) => {
                pattern.covers(host)
            }
            (Self::Under(suffix), Self::Under(other)) => other.ends_with(suffix.as_str()),
            (Self::Exact(_), Self::Under(_)) => false,
        }
    }
}

/// Writes what `FromStr` reads.
impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Exact(host) => host.fmt(f),
            Self::Under(suffix) => write!(f, "*{suffix}"),
        }
    }
}

impl FromStr for HostPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Self::Any);
        }
        if let Some(suffix) = text.strip_prefix("*.") {
            return match Host::parse(suffix)? {
                Host::Name(name) => Ok(Self::Under(format!(".{name}"))),
                Host::Ip(_) => Err("an address has no subdomains".into()),
            };
        }
        // In a list of hosts, an address needs no brackets.
        match text.parse::<Ipv6Addr>() {
            Ok(address) => Ok(Self::Exact(Host::Ip(address.into()))),
            Err(_) => Host::parse(text).map(Self::Exact),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covers(pattern: &str, host: &str) -> bool {
        let pattern: HostPattern = pattern.parse().expect("a pattern");
        pattern.covers(&Host::parse(host).expect("a host"))
    }

    #[test]
    fn a_name_covers_that_host_and_a_star_its_subdomains() {
        assert!(covers("api.example.com", "API.example.com."));
        assert!(!covers("api.example.com", "evil-api.example.com"));
        assert!(!covers("example.com", "api.example.com"));
        assert!(covers("*.example.com", "a.b.example.com"));
        assert!(!covers("*.example.com", "example.com"));
        assert!(!covers("*.example.com", "evilexample.com"));
        assert!(covers("*", "192.0.2.1") && covers("*", "a.example"));
        assert!(covers("2001:db8::1", "[2001:db8:0::1]"));
        assert!(covers("[2001:db8::1]", "[2001:db8::1]"));
        assert!(!covers("127.0.0.1", "[::ffff:127.0.0.1]"));
    }

    #[test]
    fn a_pattern_includes_more_specific_ones() {
        let includes = |wide: &str, narrow: &str| {
            let pattern = |text: &str| text.parse::<HostPattern>().expect("a pattern");
            pattern(wide).includes(&pattern(narrow))
        };
        for text in ["*", "*.example.com", "a.example.com", "192.0.2.1"] {
            assert!(includes("*", text) && includes(text, text), "{text}");
        }
        assert!(includes("*.example.com", "*.a.example.com"));
        assert!(includes("*.example.com", "a.example.com"));
        assert!(!includes("*.a.example.com", "*.example.com"));
        assert!(!includes("*.example.com", "*.evilexample.com"));
        assert!(!includes("a.example.com", "*.a.example.com"));
        assert!(!includes("*.example.com", "*"));
    }

    #[test]
    fn refuse_text_that_is_not_a_pattern() {
        for bad in [
            "",
            "*.",
            "*x",
            "a.*",
            "https://a",
            "a:443",
            "*.10.0.0.1",
            "ä.example",
            "a b",
        ] {
            assert!(bad.parse::<HostPattern>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_grant_covers_its_schemes_ports_and_methods() {
        let grant = HttpGrant {
            handler: "*".into(),
            hosts: vec![HostPattern::Any],
            schemes: vec![HttpScheme::Https],
            ports: vec![],
            methods: vec!["GET".into()],
            private: false,
        };
        let host = Host::Name("a.example".into());
        assert!(grant.covers(HttpScheme::Https, &host, 443));
        assert!(!grant.covers(HttpScheme::Https, &host, 8443));
        assert!(!grant.covers(HttpScheme::Http, &host, 80));
        assert!(grant.covers_method("GET") && !grant.covers_method("get"));
        let grant = HttpGrant {
            ports: vec![8443],
            methods: vec![],
            ..grant
        };
        assert!(grant.covers(HttpScheme::Https, &host, 8443) && grant.covers_method("POST"));
        assert!(!grant.covers(HttpScheme::Https, &host, 443));
    }
}
