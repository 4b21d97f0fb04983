//! The grants of a handler, each in full and with its table in `rouse.toml`.

use std::net::IpAddr;

use serde_json::{Map, Value, json};

use crate::cli::list::List;
use crate::cli::text::plain;
use crate::config::File;
use crate::job::pattern_covers;
use crate::sandbox::{
    Capability, Grant, Handler, Host, HostPattern, HttpGrant, SecretGrant, Settings,
};

/// The grants of one handler.
pub(super) struct Held<'a> {
    http: Vec<&'a HttpGrant>,
    secrets: Vec<&'a SecretGrant>,
    dirs: Vec<&'a Grant>,
    /// Other capabilities, each with the table that grants it.
    others: Vec<(String, String)>,
}

impl<'a> Held<'a> {
    pub(super) fn for_handler(handler: &Handler, settings: &'a Settings, file: &File) -> Self {
        let name = &handler.manifest.name;
        let others = handler.held().into_iter().filter_map(|what| {
            let from = match &what {
                Capability::Env(Some(_)) => file.table_of(name, "env"),
                Capability::Settings(Some(_)) => file.table_of(name, "settings"),
                Capability::State => file.table_of(name, "state"),
                Capability::FineClocks => file.origin(name, "fine_clocks"),
                Capability::Enqueue(Some(_)) => file.origin(name, "enqueue"),
                Capability::Schedule => file.origin(name, "schedule"),
                Capability::Sql(Some(_)) => file.table_of(name, "sql"),
                // Listed in full elsewhere.
                Capability::Http(_)
                | Capability::Secrets(_)
                | Capability::Sign(_)
                | Capability::Dirs(_) => return None,
                // A manifest can request these, but no handler holds them.
                Capability::Env(None)
                | Capability::Settings(None)
                | Capability::Enqueue(None)
                | Capability::Sql(None)
                | Capability::Unknown(_) => {
                    return None;
                }
            };
            Some((what.to_string(), from.unwrap_or_default()))
        });
        let fits = |pattern: &str| pattern_covers(pattern, name);
        let module = handler.module.origin();
        let sends = |table: &str| fits(table) && settings.grants_secrets_to(table, module);
        let opens = |table: &str| fits(table) && settings.grants_own_to(table, module);
        let http = settings.http_grants.iter();
        let secrets = settings.secret_grants.iter();
        let dirs = settings.grants.0.iter();
        Self {
            http: http.filter(|grant| fits(&grant.handler)).collect(),
            secrets: secrets.filter(|grant| sends(&grant.handler)).collect(),
            dirs: dirs.filter(|grant| opens(&grant.handler)).collect(),
            others: others.collect(),
        }
    }

    /// As JSON: the grants of requests, secrets and directories.
    pub(super) fn json(&self) -> Value {
        let hosts = |hosts: &[HostPattern]| -> Vec<String> {
            hosts.iter().map(HostPattern::to_string).collect()
        };
        let http = self.http.iter().map(|grant| {
            let schemes = grant.schemes.iter().map(|scheme| scheme.as_str());
            json!({
                "from": list(&grant.handler, "http"),
                "hosts": hosts(&grant.hosts),
                "schemes": schemes.collect::<Vec<_>>(),
                "ports": grant.ports,
                "methods": grant.methods,
                "private": grant.private,
            })
        });
        let secrets = self.secrets.iter().map(|grant| {
            json!({
                "from": list(&grant.handler, "secrets"),
                "name": grant.name,
                "hosts": hosts(&grant.hosts),
                "headers": grant.headers,
                "body": grant.body,
                "sign": grant.sign,
            })
        });
        let dirs = self.dirs.iter().map(|grant| {
            json!({
                "from": list(&grant.handler, "dirs"),
                "dir": grant.dir.display().to_string(),
                "at": grant.at,
                "mode": grant.mode.as_str(),
            })
        });
        let mut grants = Map::new();
        grants.insert("http".into(), http.collect());
        grants.insert("secrets".into(), secrets.collect());
        grants.insert("dirs".into(), dirs.collect());
        grants.into()
    }

    /// As text: a line for each grant.
    pub(super) fn table(&self) -> String {
        let mut lines: Vec<(String, String)> = Vec::new();
        for grant in &self.http {
            let from = list(&grant.handler, "http");
            lines.extend(requests(grant).map(|text| (text, from.clone())));
        }
        for grant in &self.secrets {
            lines.push((secret(grant), list(&grant.handler, "secrets")));
        }
        for grant in &self.dirs {
            let (at, mode, dir) = (&grant.at, grant.mode.as_str(), grant.dir.display());
            let text = format!("dirs:{at}:{mode}, which is {dir}");
            lines.push((text, list(&grant.handler, "dirs")));
        }
        lines.extend(self.others.iter().cloned());
        if lines.is_empty() {
            return "nothing".into();
        }
        let mut table = List::plain();
        for (text, from) in lines {
            table.row([plain(&text), from]);
        }
        table.text()
    }
}

/// The name of a list of a handler in `rouse.toml`.
fn list(handler: &str, key: &str) -> String {
    format!("[[handlers.\"{handler}\".{key}]]")
}

/// For instance `http://127.0.0.1:9911 GET,POST`.
fn requests(grant: &HttpGrant) -> impl Iterator<Item = String> {
    let ports: Vec<String> = grant.ports.iter().map(u16::to_string).collect();
    let ports = match ports.is_empty() {
        true => String::new(),
        false => format!(":{}", ports.join(",")),
    };
    let methods = match grant.methods.is_empty() {
        true => "with any method".to_owned(),
        false => grant.methods.join(","),
    };
    let private = match grant.private {
        true => ", including private addresses",
        false => "",
    };
    let schemes = grant.schemes.iter();
    schemes.flat_map(move |scheme| {
        let rest = format!("{ports} {methods}{private}");
        let hosts = grant.hosts.iter();
        hosts.map(move |host| format!("{}://{}{rest}", scheme.as_str(), in_url(host)))
    })
}

/// In a URL, an address with colons is in brackets.
fn in_url(host: &HostPattern) -> String {
    match host {
        HostPattern::Exact(Host::Ip(IpAddr::V6(address))) => format!("[{address}]"),
        HostPattern::Exact(Host::Ip(IpAddr::V4(_)) | Host::Name(_))
        | HostPattern::Any
        | HostPattern::Under(_) => host.to_string(),
    }
}

fn secret(grant: &SecretGrant) -> String {
    let mut uses = Vec::new();
    if !grant.hosts.is_empty() {
        let hosts: Vec<String> = grant.hosts.iter().map(HostPattern::to_string).collect();
        let body = grant.body.then(|| "bodies".to_owned());
        let places: Vec<String> = grant.headers.iter().cloned().chain(body).collect();
        uses.push(format!("to {} in {}", hosts.join(","), places.join(",")));
    }
    if grant.sign {
        uses.push("for signing".into());
    }
    format!("secrets:{} {}", grant.name, uses.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::HttpScheme;

    #[test]
    fn a_grant_of_requests_shows_scheme_host_ports_and_methods() {
        let grant = HttpGrant {
            handler: "x".into(),
            hosts: ["127.0.0.1", "::1"]
                .map(|host| host.parse().expect("a host"))
                .into(),
            schemes: vec![HttpScheme::Http],
            ports: vec![9911, 80],
            methods: vec!["GET".into(), "POST".into()],
            private: false,
        };
        let lines: Vec<String> = requests(&grant).collect();
        assert_eq!(
            lines,
            [
                "http://127.0.0.1:9911,80 GET,POST",
                "http://[::1]:9911,80 GET,POST"
            ]
        );
        let wide = HttpGrant {
            hosts: vec!["*.example.com".parse().expect("a host")],
            schemes: vec![HttpScheme::Https],
            ports: Vec::new(),
            methods: Vec::new(),
            private: true,
            ..grant
        };
        let lines: Vec<String> = requests(&wide).collect();
        let line = "https://*.example.com with any method, including private addresses";
        assert_eq!(lines, [line]);
    }

    #[test]
    fn a_secret_shows_where_it_may_go_and_whether_it_signs() {
        let sent = SecretGrant {
            handler: "x".into(),
            name: "KEY".into(),
            hosts: vec!["a.example".parse().expect("a host")],
            headers: vec!["authorization".into()],
            body: true,
            sign: true,
        };
        assert_eq!(
            secret(&sent),
            "secrets:KEY to a.example in authorization,bodies, for signing"
        );
    }
}
