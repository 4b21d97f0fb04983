//! `[secrets.…]`: where secrets are read from. `[[handlers."…".secrets]]`: how handlers may use them.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use serde::de::MapAccess;
use serde::{Deserialize, Deserializer};

use super::http_table::Hosts;
use crate::config::env::Environment;
use crate::config::token_file::read_text;
use crate::sandbox::{HostPattern, SecretGrant};
use crate::setting::Entry;
use crate::setting::table::{self, Table};

/// Where a secret is read from: a variable or a file.
#[derive(Debug, Default)]
pub(super) struct SecretTable {
    env: Option<String>,
    pub(super) file: Option<PathBuf>,
}

impl Table for SecretTable {
    type Numbers = ();
    const EXPECTED: &'static str = "a table that names where the secret is read from: [secrets.NAME] with env = \"VARIABLE\" or file = \"PATH\"";
    const ENTRIES: &'static [Entry] = &[
        Entry::new(
            "env",
            "a name",
            "none",
            "The environment variable that has the secret",
        ),
        Entry::new(
            "file",
            "a path",
            "none",
            "The file with the secret, which only its owner may read; relative to the folder of `rouse.toml`",
        ),
    ];

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "env" => self.env = Some(map.next_value()?),
            "file" => self.file = Some(map.next_value()?),
            key => unreachable!("{key} has a row, and is not read"),
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for SecretTable {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        table::read(input)
    }
}

/// Where the host sends a secret for a handler, and whether the host signs with it for the handler.
#[derive(Debug, Default)]
pub(super) struct SecretUseTable {
    pub(super) name: String,
    hosts: Vec<HostPattern>,
    headers: Vec<String>,
    body: bool,
    pub(super) sign: bool,
}

impl Table for SecretUseTable {
    type Numbers = ();
    const EXPECTED: &'static str = "a table such as { name = \"KEY\", hosts = [\"api.example.com\"], headers = [\"authorization\"] } or { name = \"KEY\", sign = true }";
    const ENTRIES: &'static [Entry] = &[
        Entry::required("name", "a name", "The secret, by its name in `[secrets]`"),
        Entry::new(
            "hosts",
            "as in `http`",
            "none",
            "The servers to which it may be sent",
        ),
        Entry::new(
            "headers",
            "names of headers",
            "none",
            "The headers in which it may be sent",
        ),
        Entry::new(
            "body",
            "`true`, `false`",
            "`false`",
            "`true`: it may also be sent in bodies",
        ),
        Entry::new(
            "sign",
            "`true`, `false`",
            "`false`",
            "`true`: the host signs with it (HMAC-SHA256); `hosts` and `headers` may be left out",
        ),
    ];

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "name" => self.name = map.next_value()?,
            "hosts" => self.hosts = map.next_value::<Hosts>()?.0,
            "headers" => self.headers = map.next_value()?,
            "body" => self.body = map.next_value()?,
            "sign" => self.sign = map.next_value()?,
            key => unreachable!("{key} has a row, and is not read"),
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for SecretUseTable {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        table::read(input)
    }
}

/// The message for a file that contains a secret itself, which the message does not repeat.
pub(super) fn written_out(text: &str) -> Option<String> {
    let file = text.parse::<toml::Table>().ok()?;
    let mut secrets = file.get("secrets")?.as_table()?.iter();
    let (name, _) = secrets.find(|(_, value)| value.is_str())?;
    Some(format!(
        "secrets.{name} must name where the secret is read from, not contain the secret itself: write [secrets.{name}] with \
         env = \"VARIABLE\" or file = \"PATH\""
    ))
}

/// An error in a table of secrets, without the line that it points to; `None` if it points elsewhere.
pub(super) fn redacted_error(error: &toml::de::Error, text: &str) -> Option<String> {
    let at = error.span()?.start.min(text.len());
    let start = text[..text.floor_char_boundary(at)]
        .rfind('\n')
        .map_or(0, |end| end + 1);
    let line = text[start..].lines().next().unwrap_or_default();
    let mut above = text[..start].lines().rev().map(str::trim_start);
    let table = above.find(|line| line.starts_with('['));
    if !line.contains("secrets") && !table.is_some_and(|table| table.contains("secrets")) {
        return None;
    }
    let number = text[..start].lines().count() + 1;
    // The message about a value of another type repeats the value.
    let message = match error.message().rsplit_once(", expected ") {
        Some((found, expected)) if found.contains('"') => format!("expected {expected}"),
        Some(_) | None => error.message().into(),
    };
    Some(format!(
        "at line {number}, which may contain a secret and is not shown: {message}"
    ))
}

impl SecretTable {
    /// Rejects an invalid table.
    pub(super) fn check(&self) -> Result<(), String> {
        match (&self.env, &self.file) {
            (Some(_), None) | (None, Some(_)) => Ok(()),
            (Some(_), Some(_)) | (None, None) => Err("needs either env or file".into()),
        }
    }

    pub(super) fn read(&self, folder: &Path, environment: Environment) -> anyhow::Result<String> {
        match (&self.env, &self.file) {
            (Some(name), _) => environment
                .get(name)
                .ok_or_else(|| anyhow!("the variable {name} is not set")),
            (None, Some(file)) => read_text(&folder.join(file), "secret"),
            (None, None) => Err(anyhow!("it has neither env nor file")),
        }
    }
}

impl SecretUseTable {
    /// Rejects an invalid table. `known` is true if the file has such a secret.
    pub(super) fn check(&self, known: bool) -> Result<(), String> {
        let name = &self.name;
        if !known {
            return Err(format!(
                "there is no [secrets.{name}]; add it, with the env or file from which {name} is read"
            ));
        }
        let is_sent = !self.hosts.is_empty() && (self.body || !self.headers.is_empty());
        let goes_nowhere = self.hosts.is_empty() && self.headers.is_empty() && !self.body;
        let only_signs = self.sign && goes_nowhere;
        if !is_sent && !only_signs {
            return Err(format!(
                "{name} is sent nowhere: it needs hosts, and headers or body = true (or sign = true alone)"
            ));
        }
        match self.headers.iter().find(|header| !is_header(header)) {
            Some(header) => Err(format!(
                "{header:?} is not a header that a handler can send"
            )),
            None => Ok(()),
        }
    }

    pub(super) fn grant(&self, handler: &str) -> SecretGrant {
        let headers = self.headers.iter();
        SecretGrant {
            handler: handler.to_owned(),
            name: self.name.clone(),
            hosts: self.hosts.clone(),
            headers: headers.map(|header| header.to_ascii_lowercase()).collect(),
            body: self.body,
            sign: self.sign,
        }
    }
}

fn is_header(name: &str) -> bool {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.!#$%&'*+^`|~".contains(&byte);
    !name.is_empty() && name.bytes().all(is_token) && !name.eq_ignore_ascii_case("host")
}
