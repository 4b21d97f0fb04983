//! The subset of URLs that requests need.

use std::fmt;

use crate::{Error, Result};

/// The URL of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Url {
    /// Lower case: `http`, `https`.
    pub(crate) scheme: String,
    /// `host` or `host:port`.
    pub(crate) authority: String,
    /// Starts with a slash, and has no fragment.
    pub(crate) path_with_query: String,
}

impl Url {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let invalid = |why: &str| {
            let text = without_user(text);
            Error::permanent(format_args!(
                "{text:?} is not a valid URL for a request: {why}"
            ))
            .kind("invalid_request")
        };
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| invalid("it must start with http:// or https://"))?;
        let scheme = scheme.to_ascii_lowercase();
        if scheme != "http" && scheme != "https" {
            return Err(invalid("it must start with http:// or https://"));
        }
        let rest = rest.split('#').next().unwrap_or_default();
        let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        if authority.is_empty() {
            return Err(invalid("it has no host"));
        }
        if !authority.is_ascii() {
            return Err(invalid("write the host in ASCII, as xn--…"));
        }
        Ok(Self {
            scheme,
            authority: authority.to_owned(),
            path_with_query: encoded(path),
        })
    }

    /// Resolves a reference in a response from this URL (RFC 3986, 5.2).
    pub(crate) fn join(&self, reference: &str) -> Result<Self> {
        let reference = reference.trim().split('#').next().unwrap_or_default();
        let has_scheme = reference.split_once(':').is_some_and(|(scheme, _)| {
            !scheme.is_empty()
                && scheme
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
        });
        if has_scheme {
            return Self::parse(reference);
        }
        if let Some(rest) = reference.strip_prefix("//") {
            return Self::parse(&format!("{}://{rest}", self.scheme));
        }
        let own_path = self.path_with_query.split('?').next().unwrap_or("/");
        let path = match reference.chars().next() {
            None => self.path_with_query.clone(),
            Some('/') => without_dots(reference),
            Some('?') => format!("{own_path}{reference}"),
            Some(_) => {
                let folder = own_path.rfind('/').map_or("", |end| &own_path[..end]);
                without_dots(&format!("{folder}/{reference}"))
            }
        };
        Ok(Self {
            path_with_query: encoded(&path),
            ..self.clone()
        })
    }

    /// Scheme and authority, which identify a server.
    pub(crate) fn origin(&self) -> (&str, String) {
        (&self.scheme, self.authority.to_ascii_lowercase())
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            scheme,
            authority,
            path_with_query,
        } = self;
        write!(f, "{scheme}://{authority}{path_with_query}")
    }
}

/// Removes the user info before an `@` from a URL, even a malformed one. Use it for messages: they are stored, and the
/// user info may contain a password.
///
/// ```
/// use rouse_sdk::http::without_user;
///
/// assert_eq!(without_user("https://ada:pw@a.example/@b"), "https://a.example/@b");
/// ```
pub fn without_user(url: &str) -> String {
    let scheme = url.find(":/").map_or(0, |end| end + 1);
    let rest = url[scheme..].trim_start_matches(['/', '\\']);
    let start = &url[..url.len() - rest.len()];
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    // If the part after the colon is not a port, it is the start of a password that contains one of those characters.
    let authority = &rest[..end];
    let port = authority.rsplit_once(':').map_or("", |(_, port)| port);
    let is_port = port.ends_with(']') || port.bytes().all(|byte| byte.is_ascii_digit());
    let end = if is_port || authority.contains('@') {
        end
    } else {
        rest.len()
    };
    let host = rest[..end].rfind('@').map_or(0, |at| at + 1);
    format!("{start}{}", &rest[host..])
}

/// Removes `.` and `..` from a path, and leaves a query unchanged.
fn without_dots(path_with_query: &str) -> String {
    let (path, query) =
        path_with_query.split_at(path_with_query.find('?').unwrap_or(path_with_query.len()));
    let mut kept: Vec<&str> = Vec::new();
    let mut parts = path.split('/').skip(1).peekable();
    while let Some(part) = parts.next() {
        let is_last = parts.peek().is_none();
        match part {
            "." | ".." => {
                if part == ".." {
                    kept.pop();
                }
                if is_last {
                    kept.push("");
                }
            }
            part => kept.push(part),
        }
    }
    format!("/{}{query}", kept.join("/"))
}

/// A path with a leading slash, in which characters that a request line cannot contain (spaces, non-ASCII letters) are
/// percent-encoded.
fn encoded(path: &str) -> String {
    let mut text = String::with_capacity(path.len() + 1);
    if !path.starts_with('/') {
        text.push('/');
    }
    for byte in path.bytes() {
        match byte {
            b' '
            | b'"'
            | b'<'
            | b'>'
            | b'\\'
            | b'^'
            | b'`'
            | b'{'
            | b'|'
            | b'}'
            | 0..0x20
            | 0x7f.. => {
                text += &format!("%{byte:02X}");
            }
            byte => text.push(char::from(byte)),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_parsed() {
        let url = Url::parse("HTTPS://a.example:8443/x y?q=ü#here").unwrap();
        assert_eq!(url.scheme, "https");
        assert_eq!(url.authority, "a.example:8443");
        assert_eq!(url.path_with_query, "/x%20y?q=%C3%BC");
        assert_eq!(Url::parse("http://a").unwrap().path_with_query, "/");
        assert_eq!(Url::parse("http://a?b").unwrap().path_with_query, "/?b");
        for bad in [
            "a.example",
            "ftp://a/",
            "https://",
            "https:///x",
            "https://bücher.example/",
        ] {
            let error = Url::parse(bad).unwrap_err();
            assert!(error.permanent && error.kind == "invalid_request", "{bad}");
        }
    }

    #[test]
    fn messages_contain_no_password() {
        for (url, shown) in [
            ("https://a.example/x?to=me@b", "https://a.example/x?to=me@b"),
            (
                "https://user:p@w@a.example:8443/x",
                "https://a.example:8443/x",
            ),
            ("https:///user:pw@a.example", "https:///a.example"),
            ("https:/user:pw@a.example", "https:/a.example"),
            ("//user:pw@a.example/x", "//a.example/x"),
            ("user:pw@a.example/@x", "a.example/@x"),
            ("https://user:p/w@a.example/x", "https://a.example/x"),
            ("https://user:p?w#@a.example", "https://a.example"),
            ("https://[::1]/@x", "https://[::1]/@x"),
            ("https://a.example:8443/@x", "https://a.example:8443/@x"),
            ("/x/@y", "/x/@y"),
            ("", ""),
        ] {
            assert_eq!(without_user(url), shown);
        }
        for bad in [
            "ftp://user:pw@a/",
            "user:pw@a",
            "https://user:pw@bücher.example/",
        ] {
            let message = Url::parse(bad).unwrap_err().message;
            assert!(!message.contains("pw"), "{message}");
        }
    }

    #[test]
    fn a_reference_is_resolved() {
        let at = Url::parse("https://a.example/one/two?q").unwrap();
        for (reference, wanted) in [
            ("http://b.example/x", "http://b.example/x"),
            ("//b.example/x", "https://b.example/x"),
            ("/x/../y/./z", "https://a.example/y/z"),
            ("three", "https://a.example/one/three"),
            ("../three", "https://a.example/three"),
            ("../../../three", "https://a.example/three"),
            (".", "https://a.example/one/"),
            ("?p=1:2", "https://a.example/one/two?p=1:2"),
            ("", "https://a.example/one/two?q"),
            ("/x#y", "https://a.example/x"),
        ] {
            assert_eq!(
                at.join(reference).unwrap().to_string(),
                wanted,
                "{reference}"
            );
        }
        assert!(at.join("javascript:alert(1)").is_err());
    }
}
