//! Which handler may send which requests.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// How a server is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HttpScheme {
    /// In the clear.
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

    /// The port where a URL has none.
    pub fn port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}

/// Requests that a handler, or a family of handlers, may send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpGrant {
    /// A handler's name, or a pattern.
    pub handler: String,
    /// To these servers.
    pub hosts: Vec<HostPattern>,
    /// In these ways.
    pub schemes: Vec<HttpScheme>,
    /// At these ports; none: at the scheme's own.
    pub ports: Vec<u16>,
    /// With these methods; none: with any but CONNECT.
    pub methods: Vec<String>,
    /// Also where a host's addresses are those of this machine or of its surroundings. Not even then at the addresses
    /// at which clouds give out credentials: those have to be listed themselves.
    pub private: bool,
}

impl HttpGrant {
    /// True where it is for this server.
    pub fn covers(&self, scheme: HttpScheme, host: &Host, port: u16) -> bool {
        self.schemes.contains(&scheme)
            && match self.ports.as_slice() {
                [] => port == scheme.port(),
                ports => ports.contains(&port),
            }
            && self.hosts.iter().any(|pattern| pattern.covers(host))
    }

    /// True where it is for this method.
    pub fn covers_method(&self, method: &str) -> bool {
        self.methods.is_empty() || self.methods.iter().any(|granted| granted == method)
    }
}

/// A server, by name or by address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// Lower case, without the dot at its end.
    Name(String),
    /// An address.
    Ip(IpAddr),
}

impl Host {
    /// Reads one, as it stands in a URL. What other readers may take for an address, such as `0x7f.1`, is refused.
    ///
    /// # Errors
    /// What is wrong with it, in a sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(inner) = text.strip_prefix('[') {
            let address = inner.strip_suffix(']').and_then(|it| it.parse().ok());
            return address
                .map(|address: Ipv6Addr| Self::Ip(address.into()))
                .ok_or_else(|| "what stands in brackets is no IPv6 address".into());
        }
        if let Ok(address) = text.parse::<Ipv4Addr>() {
            return Ok(Self::Ip(address.into()));
        }
        let name = text.strip_suffix('.').unwrap_or(text);
        let last = name.rsplit('.').next().unwrap_or_default();
        if last.starts_with(|first: char| first.is_ascii_digit()) && is_number(last) {
            return Err("an address is written in dotted decimal, as in 192.0.2.1".into());
        }
        match name.len() <= NAME_BYTES_MAX && name.split('.').all(is_label) {
            true => Ok(Self::Name(name.to_ascii_lowercase())),
            false => Err(
                "it is no host name (letters, digits, hyphens and dots; others as xn--…)".into(),
            ),
        }
    }
}

/// Of a name of the domain name system (RFC 1035), and of each part of it.
const NAME_BYTES_MAX: usize = 253;
const LABEL_BYTES_MAX: usize = 63;

/// Underscores are in use.
fn is_label(label: &str) -> bool {
    (1..=LABEL_BYTES_MAX).contains(&label.len())
        && !label.starts_with('-')
        && !label.ends_with('-')
        && label
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

/// As `inet_aton` reads numbers: decimal, octal, hexadecimal.
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

/// Servers, as a grant names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostPattern {
    /// `*`: all of them.
    Any,
    /// `api.example.com`, `192.0.2.1` or `2001:db8::1`: this one.
    Exact(Host),
    /// `*.example.com`: all names that end so, and not `example.com` itself. Here with its dot: `.example.com`.
    Under(String),
}

impl HostPattern {
    /// True where it is for this server.
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
    /// True where it is for all servers that the other is for.
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
                Host::Ip(_) => Err("nothing is under an address".into()),
            };
        }
        // In a list of hosts an address needs no brackets.
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
    fn a_name_is_that_host_and_a_star_is_what_is_under_it() {
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
    fn a_pattern_includes_what_is_narrower() {
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
    fn what_is_no_pattern_is_refused() {
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
    fn a_grant_is_for_its_schemes_ports_and_methods() {
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
