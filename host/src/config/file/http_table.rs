//! `[[handlers."…".http]]`: requests that a handler may send.

use serde::{Deserialize, Deserializer};

use crate::sandbox::{HostPattern, HttpGrant, HttpScheme};

/// Requests that a handler may send.
#[derive(Debug, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "a table such as { hosts = [\"api.example.com\"], methods = [\"GET\"] }"
)]
pub(super) struct HttpTable {
    /// `api.example.com`, `*.example.com`, `192.0.2.1`, or `*` for all.
    #[serde(deserialize_with = "hosts")]
    hosts: Vec<HostPattern>,
    #[serde(default = "https_alone")]
    schemes: Vec<SchemeWord>,
    /// Empty: the ports of the schemes.
    #[serde(default)]
    ports: Vec<u16>,
    /// Empty: all methods.
    #[serde(default)]
    methods: Vec<String>,
    /// True: the hosts may also be on this machine or its network.
    #[serde(default)]
    private: bool,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SchemeWord {
    Http,
    Https,
}

fn https_alone() -> Vec<SchemeWord> {
    vec![SchemeWord::Https]
}

/// Reads patterns of hosts.
pub(super) fn hosts<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<HostPattern>, D::Error> {
    let texts = Vec::<String>::deserialize(input)?;
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
    texts.iter().map(read).collect()
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
