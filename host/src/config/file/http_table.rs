//! `[[handlers."…".http]]`: requests that a handler may send.

use serde::de::MapAccess;
use serde::{Deserialize, Deserializer};

use crate::sandbox::{HostPattern, HttpGrant, HttpScheme};
use crate::setting::Entry;
use crate::setting::table::{self, Table};

/// Requests that a handler may send.
#[derive(Debug)]
pub(super) struct HttpTable {
    hosts: Vec<HostPattern>,
    schemes: Vec<SchemeWord>,
    /// Empty: the ports of the schemes.
    ports: Vec<u16>,
    /// Empty: all methods.
    methods: Vec<String>,
    private: bool,
}

impl Default for HttpTable {
    fn default() -> Self {
        Self {
            hosts: Vec::new(),
            schemes: vec![SchemeWord::Https],
            ports: Vec::new(),
            methods: Vec::new(),
            private: false,
        }
    }
}

impl Table for HttpTable {
    type Numbers = ();
    const EXPECTED: &'static str =
        "a table such as { hosts = [\"api.example.com\"], methods = [\"GET\"] }";
    const ENTRIES: &'static [Entry] = &[
        Entry::required(
            "hosts",
            "names, `*.suffix`, addresses, `*`",
            "The servers; `*`: all",
        ),
        Entry::new(
            "schemes",
            "`https`, `http`",
            "`[\"https\"]`",
            "The schemes of requests",
        ),
        Entry::new(
            "ports",
            "1 to 65535",
            "those of the schemes",
            "The ports of the servers",
        ),
        Entry::new("methods", "such as `GET`", "all", "The methods of requests"),
        Entry::new(
            "private",
            "`true`, `false`",
            "`false`",
            "`true`: names may resolve to addresses of this machine and of private networks; addresses listed in `hosts` are allowed in any case",
        ),
    ];

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "hosts" => self.hosts = map.next_value::<Hosts>()?.0,
            "schemes" => self.schemes = map.next_value()?,
            "ports" => self.ports = map.next_value()?,
            "methods" => self.methods = map.next_value()?,
            "private" => self.private = map.next_value()?,
            key => unreachable!("{key} has a row, and is not read"),
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for HttpTable {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        table::read(input)
    }
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SchemeWord {
    Http,
    Https,
}

/// Patterns of hosts.
pub(super) struct Hosts(pub(super) Vec<HostPattern>);

impl<'de> Deserialize<'de> for Hosts {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let strings = Vec::<String>::deserialize(input)?;
        let read = |text: &String| {
            text.parse::<HostPattern>().map_err(|why| {
                let hint = match has_more_than_a_host(text) {
                    true => {
                        "; write the host alone: its port goes into `ports` and its scheme into `schemes` of [[handlers.\"…\".http]]"
                    }
                    false => "",
                };
                serde::de::Error::custom(format!("the host {text:?}: {why}{hint}"))
            })
        };
        strings.iter().map(read).collect::<Result<_, _>>().map(Self)
    }
}

/// True for a URL, and for a host with its port.
fn has_more_than_a_host(text: &str) -> bool {
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = text.rsplit_once(':').map(|(_, port)| port);
    text.contains("://") || port.is_some_and(is_port)
}

impl HttpTable {
    /// Rejects an invalid table.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.hosts.is_empty() || self.schemes.is_empty() {
            return Err("without hosts or schemes it grants nothing".into());
        }
        if self.ports.contains(&0) {
            return Err("ports are from 1 to 65535".into());
        }
        let is_method = |method: &String| {
            !method.is_empty()
                && method
                    .bytes()
                    .all(|byte| byte.is_ascii_uppercase() || byte == b'-')
        };
        match self.methods.iter().find(|method| !is_method(method)) {
            Some(method) => Err(format!("{method:?} is not a method such as GET")),
            None => Ok(()),
        }
    }

    pub(super) fn grant(&self, handler: &str) -> HttpGrant {
        let scheme = |word: &SchemeWord| match word {
            SchemeWord::Http => HttpScheme::Http,
            SchemeWord::Https => HttpScheme::Https,
        };
        HttpGrant {
            handler: handler.to_owned(),
            hosts: self.hosts.clone(),
            schemes: self.schemes.iter().map(scheme).collect(),
            ports: self.ports.clone(),
            methods: self.methods.clone(),
            private: self.private,
        }
    }
}
