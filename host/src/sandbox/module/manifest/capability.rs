//! The capabilities that a handler declares: words such as `dirs:/photos`.

use std::fmt;
use std::str::FromStr;

use crate::job::is_pattern;
use crate::sandbox::{HostPattern, Mode};

pub(super) const NAME_CHARS_MAX: usize = 128;

/// The maximum size of a detail, which is one line of text.
pub(super) const DETAIL_BYTES_MAX: usize = 256;

/// A capability that a handler declares: a word, and optionally a colon and a detail. Without a detail, it covers any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Capability {
    /// `http:api.example.com`, `http:*.example.com`: requests to these servers.
    Http(Option<HostPattern>),
    /// `secrets:MAIL_KEY`: this secret.
    Secrets(Option<String>),
    /// `sign:HOOK_KEY`: signatures with this secret.
    Sign(Option<String>),
    /// `dirs:/photos`, `dirs:/out:read-write`: a directory at this path.
    Dirs(Option<(String, Mode)>),
    /// `env:LANG`: this variable.
    Env(Option<String>),
    /// `settings:threshold`: this setting.
    Settings(Option<String>),
    /// `state`: values that it keeps between its jobs.
    State,
    /// `fine_clocks`: clocks that are not coarse.
    FineClocks,
    /// `enqueue:photo.resize`, `enqueue:photo.*`: jobs for these handlers.
    Enqueue(Option<String>),
    /// `schedule`: jobs from the schedule that the manifest declares.
    Schedule,
    /// `sql:mark_paid`: this SQL statement of the manifest.
    Sql(Option<String>),
    /// A word that this host does not know.
    Unknown(String),
}

impl FromStr for Capability {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (word, detail) = match text.split_once(':') {
            Some((word, detail)) => (word, Some(detail)),
            None => (text, None),
        };
        let fits = |detail: &str| {
            (1..=DETAIL_BYTES_MAX).contains(&detail.len())
                && detail.chars().all(|c| c.is_ascii_graphic() || c == ' ')
                && !detail.contains(['"', '\\'])
        };
        if !is_name(word) || detail.is_some_and(|detail| !fits(detail)) {
            return Err("a capability must be a word such as `dirs` or `dirs:/photos`".into());
        }
        let key = |detail: &str| match is_key(detail) {
            true => Ok(detail.to_owned()),
            false => Err(format!(
                "the capability `{text}`: a name must have only letters, digits, - and _"
            )),
        };
        Ok(match (word, detail) {
            ("http", host) => Self::Http(
                host.map(str::parse)
                    .transpose()
                    .map_err(|why| format!("the capability `{text}`: {why}"))?,
            ),
            ("secrets", name) => Self::Secrets(name.map(key).transpose()?),
            ("sign", name) => Self::Sign(name.map(key).transpose()?),
            ("dirs", at) => Self::Dirs(at.map(|at| {
                let (at, mode) = Mode::split(at);
                (at.to_owned(), mode.unwrap_or(Mode::Read))
            })),
            ("env", name) => Self::Env(name.map(key).transpose()?),
            ("settings", name) => Self::Settings(name.map(key).transpose()?),
            ("state", None) => Self::State,
            ("fine_clocks", None) => Self::FineClocks,
            ("enqueue", Some(pattern)) if !is_pattern(pattern) => {
                return Err(format!(
                    "the capability `{text}`: expected a handler name or a pattern such as `photo.*` after the colon"
                ));
            }
            ("enqueue", pattern) => Self::Enqueue(pattern.map(str::to_owned)),
            ("schedule", None) => Self::Schedule,
            ("sql", name) => Self::Sql(name.map(key).transpose()?),
            (_, _) => Self::Unknown(text.to_owned()),
        })
    }
}

/// True for what TOML accepts as a bare key.
fn is_key(name: &str) -> bool {
    name.bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

/// Writes what `FromStr` reads.
impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http(Some(host)) => write!(f, "http:{host}"),
            Self::Http(None) => f.write_str("http"),
            Self::Secrets(Some(name)) => write!(f, "secrets:{name}"),
            Self::Secrets(None) => f.write_str("secrets"),
            Self::Sign(Some(name)) => write!(f, "sign:{name}"),
            Self::Sign(None) => f.write_str("sign"),
            Self::Dirs(Some((at, Mode::Read))) => write!(f, "dirs:{at}"),
            Self::Dirs(Some((at, Mode::ReadWrite))) => write!(f, "dirs:{at}:read-write"),
            Self::Dirs(None) => f.write_str("dirs"),
            Self::Env(Some(name)) => write!(f, "env:{name}"),
            Self::Env(None) => f.write_str("env"),
            Self::Settings(Some(name)) => write!(f, "settings:{name}"),
            Self::Settings(None) => f.write_str("settings"),
            Self::State => f.write_str("state"),
            Self::FineClocks => f.write_str("fine_clocks"),
            Self::Enqueue(Some(pattern)) => write!(f, "enqueue:{pattern}"),
            Self::Enqueue(None) => f.write_str("enqueue"),
            Self::Schedule => f.write_str("schedule"),
            Self::Sql(Some(name)) => write!(f, "sql:{name}"),
            Self::Sql(None) => f.write_str("sql"),
            Self::Unknown(text) => f.write_str(text),
        }
    }
}

/// True for a handler's name, and for the word of a capability: `[a-z0-9][a-z0-9_-]*(\.[a-z0-9][a-z0-9_-]*)*`, 1 to 128
/// characters.
pub(super) fn is_name(name: &str) -> bool {
    name.len() <= NAME_CHARS_MAX
        && name.split('.').all(|word| {
            word.starts_with(|first: char| first.is_ascii_lowercase() || first.is_ascii_digit())
                && word
                    .bytes()
                    .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-'))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_round_trips_as_text() {
        for text in [
            "http",
            "http:*.example.com",
            "secrets:MAIL_KEY",
            "sign",
            "sign:HOOK_KEY",
            "dirs",
            "dirs:/photos",
            "dirs:/out:read-write",
            "env:LANG",
            "settings:threshold",
            "state",
            "fine_clocks",
            "enqueue",
            "enqueue:photo.*",
            "schedule",
            "sql",
            "sql:mark_paid",
            "of-the-future:with detail",
        ] {
            let capability: Capability = text.parse().unwrap();
            assert_eq!(capability.to_string(), text);
        }
    }

    #[test]
    fn refuse_capabilities_that_cannot_be_written_in_rouse_toml() {
        for bad in [
            "rm -rf",
            "http:https://a.example",
            "http:",
            "secrets:a b",
            "sign:a\"b",
            "enqueue:photo*",
            "env:A=B",
            "dirs:/a\"b",
            "dirs:/a\nb",
            "",
        ] {
            assert!(bad.parse::<Capability>().is_err(), "{bad}");
        }
    }
}
