//! Parses connection strings and `PG*` variables.
//!
//! A connection string is a URL or a list of key-value pairs. tokio-postgres also parses both, but rejects settings
//! that it does not know, `sslmode=verify-full` among them. The strings are therefore parsed here, the settings that
//! Rouse handles itself are removed, and the rest is passed on to it.

use std::collections::BTreeMap;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use tokio_postgres::Config;

use super::{ConnectError, Environment};

/// Variables and the settings that they set, including those of [`UNSUPPORTED`] settings.
const VARIABLES: &[(&str, &str)] = &[
    ("PGHOST", "host"),
    ("PGHOSTADDR", "hostaddr"),
    ("PGPORT", "port"),
    ("PGDATABASE", "dbname"),
    ("PGUSER", "user"),
    ("PGPASSWORD", "password"),
    ("PGPASSFILE", "passfile"),
    ("PGSERVICE", "service"),
    ("PGOPTIONS", "options"),
    ("PGAPPNAME", "application_name"),
    ("PGSSLMODE", "sslmode"),
    ("PGSSLROOTCERT", "sslrootcert"),
    ("PGCONNECT_TIMEOUT", "connect_timeout"),
    ("PGCHANNELBINDING", "channel_binding"),
    ("PGTARGETSESSIONATTRS", "target_session_attrs"),
    ("PGLOADBALANCEHOSTS", "load_balance_hosts"),
    ("PGSSLNEGOTIATION", "sslnegotiation"),
    ("PGSSLCERT", "sslcert"),
    ("PGSSLKEY", "sslkey"),
    ("PGSSLCERTMODE", "sslcertmode"),
    ("PGSSLCRL", "sslcrl"),
    ("PGSSLCRLDIR", "sslcrldir"),
    ("PGSSLMINPROTOCOLVERSION", "ssl_min_protocol_version"),
    ("PGSSLMAXPROTOCOLVERSION", "ssl_max_protocol_version"),
    ("PGREQUIRESSL", "requiressl"),
    ("PGREQUIREAUTH", "require_auth"),
    ("PGREQUIREPEER", "requirepeer"),
    ("PGGSSENCMODE", "gssencmode"),
];

/// Settings that can be ignored: they request the default behaviour, or tune features that are not used.
const IGNORED: [&str; 4] = [
    "client_encoding",
    "fallback_application_name",
    "sslcompression",
    "sslsni",
];

/// Settings that change which server is trusted or reached, so that ignoring them would be wrong.
const UNSUPPORTED: &[&str] = &[
    "service",
    "sslcert",
    "sslkey",
    "sslpassword",
    "sslcertmode",
    "sslcrl",
    "sslcrldir",
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
    "requiressl",
    "require_auth",
    "requirepeer",
    "gssencmode",
];

/// Values of [`UNSUPPORTED`] settings that are accepted, because they request what Rouse does anyway.
const ACCEPTED_VALUES: &[(&str, &str)] = &[
    ("gssencmode", "disable"),
    ("gssencmode", "prefer"),
    ("sslcertmode", "disable"),
    ("sslcertmode", "allow"),
    ("ssl_min_protocol_version", "TLSv1"),
    ("ssl_min_protocol_version", "TLSv1.1"),
    ("ssl_min_protocol_version", "TLSv1.2"),
    ("requiressl", "0"),
];

/// Settings by name. Empty ones count as not set, as in libpq.
#[derive(Clone, Default)]
pub(super) struct Params(BTreeMap<String, String>);

impl Params {
    pub(super) fn from_env(env: Environment<'_>) -> Self {
        let mut params = Self::default();
        for &(variable, setting) in VARIABLES {
            if let Some(value) = env(variable) {
                params.set(setting, value);
            }
        }
        params
    }

    /// True if a setting names a server or a database.
    pub(super) fn name_a_database(&self) -> bool {
        ["host", "hostaddr", "dbname", "service"]
            .iter()
            .any(|name| self.has(name))
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(super) fn take(&mut self, name: &str) -> Option<String> {
        self.0.remove(name)
    }

    pub(super) fn overlay(&mut self, stronger: Self) {
        // PGHOSTADDR and PGPORT belong to the host of PGHOST, not to the one in the string.
        if stronger.has("host") || stronger.has("hostaddr") {
            for name in ["host", "hostaddr", "port"] {
                self.0.remove(name);
            }
        }
        self.0.extend(stronger.0);
    }

    pub(super) fn refuse_unsupported(&mut self) -> Result<(), ConnectError> {
        for name in IGNORED {
            self.0.remove(name);
        }
        self.0
            .retain(|name, value| !ACCEPTED_VALUES.contains(&(name, value)));
        let Some(name) = UNSUPPORTED.iter().find(|name| self.has(name)) else {
            return Ok(());
        };
        let variable = VARIABLES.iter().find(|(_, setting)| setting == name);
        Err(ConnectError::Unsupported {
            setting: (*name).into(),
            and: variable.map_or_else(String::new, |(variable, _)| {
                format!(", or unset {variable}")
            }),
        })
    }

    /// Passes the settings on, as a key-value string with all values quoted, except those that tokio-postgres reads in
    /// a different unit than libpq, or under a different name.
    pub(super) fn into_config(mut self) -> Result<Config, ConnectError> {
        let tcp_user_timeout_ms = self.take_count("tcp_user_timeout")?;
        let keepalives_count = self.take_count("keepalives_count")?;
        let quoted = |value: &str| value.replace('\\', "\\\\").replace('\'', "\\'");
        let text: Vec<_> = self
            .0
            .iter()
            .map(|(name, value)| format!("{name}='{}'", quoted(value)))
            .collect();
        let parsed = text.join(" ").parse();
        let mut config: Config = parsed.map_err(|error: tokio_postgres::Error| {
            // Its cause names the setting, and never the value.
            let cause = error.into_source();
            ConnectError::BadValue {
                why: cause.map_or_else(|| "no reason given".into(), |cause| cause.to_string()),
            }
        })?;
        if let Some(ms) = tcp_user_timeout_ms {
            config.tcp_user_timeout(Duration::from_millis(ms.into()));
        }
        if let Some(count) = keepalives_count {
            config.keepalives_retries(count);
        }
        Ok(config)
    }

    /// Removes a setting that is a number; 0 counts as not set, as in libpq.
    fn take_count(&mut self, name: &str) -> Result<Option<u32>, ConnectError> {
        let Some(text) = self.take(name) else {
            return Ok(None);
        };
        match text.parse() {
            Ok(0) => Ok(None),
            Ok(count) => Ok(Some(count)),
            Err(_) => Err(ConnectError::BadValue {
                why: format!("invalid value for option `{name}`"),
            }),
        }
    }

    fn set(&mut self, name: &str, value: String) {
        if value.is_empty() {
            self.0.remove(name);
        } else {
            self.0.insert(name.to_owned(), value);
        }
    }
}

/// Parses a connection string: a URL or key-value pairs.
pub(super) fn parse(text: &str) -> Result<Params, ConnectError> {
    let text = text.trim();
    let url = ["postgres://", "postgresql://"]
        .into_iter()
        .find_map(|scheme| text.strip_prefix(scheme));
    match url {
        Some(rest) => parse_url(rest),
        None if text.contains("://") => Err(unreadable("it does not start with postgres://")),
        None => parse_pairs(text),
    }
}

fn parse_url(rest: &str) -> Result<Params, ConnectError> {
    let mut params = Params::default();
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
    // From the right: the password may contain an @.
    let (credentials, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
    let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
    params.set("user", decode(user)?);
    params.set("password", decode(password)?);
    params.set("dbname", decode(database)?);

    let (mut names, mut ports) = (Vec::new(), Vec::new());
    for host in hosts.split(',') {
        let (name, port) = match host.strip_prefix('[') {
            Some(v6) => {
                let (name, after) = v6
                    .split_once(']')
                    .ok_or_else(|| unreadable("an IPv6 address has no closing bracket"))?;
                (name, after.strip_prefix(':').unwrap_or(""))
            }
            None => host.split_once(':').unwrap_or((host, "")),
        };
        names.push(decode(name)?);
        ports.push(port);
    }
    // An empty list would hide PGHOST and PGPORT.
    if names.iter().any(|name| !name.is_empty()) {
        params.set("host", names.join(","));
    }
    if ports.iter().any(|port| !port.is_empty()) {
        params.set("port", ports.join(","));
    }
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair
            .split_once('=')
            .ok_or_else(|| unreadable("a parameter after the ? has no ="))?;
        match (decode(name)?.as_str(), decode(value)?) {
            // JDBC's spelling, which libpq accepts too.
            ("ssl", value) if value == "true" => params.set("sslmode", "require".into()),
            (name, value) => params.set(name, value),
        }
    }
    Ok(params)
}

fn decode(text: &str) -> Result<String, ConnectError> {
    percent_decode_str(text)
        .decode_utf8()
        .map(std::borrow::Cow::into_owned)
        .map_err(|_| unreadable("a percent-encoded part is not UTF-8"))
}

/// Parses `name = value 'quoted value' with\ escapes`, as libpq does.
fn parse_pairs(text: &str) -> Result<Params, ConnectError> {
    let mut params = Params::default();
    let mut rest = text;
    while !rest.is_empty() {
        let (name, after) = rest
            .split_once('=')
            .ok_or_else(|| unreadable("a name is not followed by ="))?;
        let name = name.trim();
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(unreadable("a name is not followed by ="));
        }
        let after = after.trim_start();
        let quoted = after.starts_with('\'');
        let mut characters = after.char_indices().skip(usize::from(quoted));
        let mut value = String::new();
        let end = loop {
            match characters.next() {
                Some((_, '\\')) => value.extend(characters.next().map(|(_, escaped)| escaped)),
                Some((at, '\'')) if quoted => break at + 1,
                Some((at, space)) if !quoted && space.is_whitespace() => break at,
                Some((_, other)) => value.push(other),
                None if quoted => return Err(unreadable("a quoted value has no closing quote")),
                None => break after.len(),
            }
        };
        params.set(name, value);
        rest = after[end..].trim_start();
    }
    Ok(params)
}

fn unreadable(why: &str) -> ConnectError {
    ConnectError::Unreadable { why: why.into() }
}
