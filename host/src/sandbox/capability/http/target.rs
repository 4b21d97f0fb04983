//! The target of a request, in canonical form.

use std::fmt;
use std::net::IpAddr;

use http::Uri;

use crate::sandbox::grants::{Host, HttpScheme};

/// Scheme, host and port of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) scheme: HttpScheme,
    pub(super) host: Host,
    pub(super) port: u16,
}

impl Target {
    /// Parses the target. Anything ambiguous is refused, so that the connection goes to the target that was checked.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub(super) fn parse(uri: &Uri) -> Result<Self, String> {
        let scheme = match uri.scheme_str() {
            Some("http") => HttpScheme::Http,
            Some("https") => HttpScheme::Https,
            Some(_) | None => return Err("the scheme must be http or https".into()),
        };
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        if authority.contains('@') {
            return Err("an address must not have a user name; send a header instead".into());
        }
        // There may also be colons inside brackets.
        let host_end = authority.rfind(']').map_or(0, |bracket| bracket + 1);
        let (host, port) = match authority[host_end..].find(':') {
            None => (authority, scheme.port()),
            Some(colon) => {
                let (host, port) = authority.split_at(host_end + colon);
                (host, port_of(&port[1..])?)
            }
        };
        Ok(Self {
            scheme,
            host: Host::parse(host)?,
            port,
        })
    }

    /// `host`, or `host:port` if the port is not the scheme's default.
    pub(super) fn authority(&self) -> String {
        let host = match &self.host {
            Host::Ip(IpAddr::V6(address)) => format!("[{address}]"),
            Host::Ip(IpAddr::V4(address)) => address.to_string(),
            Host::Name(name) => name.clone(),
        };
        match self.port == self.scheme.port() {
            true => host,
            false => format!("{host}:{}", self.port),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme.as_str(), self.authority())
    }
}

fn port_of(digits: &str) -> Result<u16, String> {
    let port = match digits.bytes().all(|byte| byte.is_ascii_digit()) {
        true => digits.parse().unwrap_or(0),
        false => 0,
    };
    match port {
        0 => Err("a port must be a number from 1 to 65535".into()),
        port => Ok(port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(uri: &str) -> Result<String, String> {
        // Depending on the strictness of the URI parser, some spellings do not parse at all.
        let uri = uri.parse().map_err(|_| "not a host name".to_string())?;
        Target::parse(&uri).map(|target| target.to_string())
    }

    #[test]
    fn canonicalize_every_spelling_of_a_target() {
        for spelling in [
            "https://api.example.com/",
            "https://API.Example.COM",
            "https://api.example.com./x",
            "https://api.example.com:443",
            "https://api.example.com:0443",
        ] {
            assert_eq!(read(spelling).as_deref(), Ok("https://api.example.com"));
        }
        assert_eq!(read("http://a:8080/").as_deref(), Ok("http://a:8080"));
        assert_eq!(read("http://[0:0::1]:80/").as_deref(), Ok("http://[::1]"));
        assert_eq!(read("http://127.0.0.1/").as_deref(), Ok("http://127.0.0.1"));
    }

    #[test]
    fn refuse_ambiguous_targets() {
        for (uri, part) in [
            ("https://api.example.com@evil.example/", "user name"),
            ("https://user:pass@api.example.com/", "user name"),
            ("https://api.example.com:0/", "port"),
            ("https://api.example.com:/", "port"),
            ("https://2130706433/", "dotted"),
            ("https://0x7f.1/", "dotted"),
            ("https://127.1/", "dotted"),
            ("https://0177.0.0.1/", "dotted"),
            ("https://127.0.0.1./", "dotted"),
            ("https://1.2.3.4.5/", "dotted"),
            ("https://a..example/", "not a host name"),
            ("https://-a.example/", "not a host name"),
            ("https://a%2eexample/", "not a host name"),
            ("ftp://a.example/", "scheme"),
        ] {
            let why = read(uri).expect_err(uri);
            assert!(why.contains(part), "{uri}: {why}");
        }
    }
}
