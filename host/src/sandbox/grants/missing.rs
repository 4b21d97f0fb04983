//! The capabilities that a handler declares and is not granted.

use toml::{Table, Value};

use super::{Granted, GrantedSql, HostPattern, Mode, StateQuota, lines};
use crate::sandbox::capability::HttpAccess;
use crate::sandbox::{Capability, HttpScheme};

/// A capability that a handler declares and is not granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// The capability, in manifest notation.
    pub what: Capability,
    /// The lines of `rouse.toml` that would grant it, with `…` for values that only the operator knows. `None` if this
    /// host does not know the capability.
    pub lines: Option<String>,
}

/// The grants of a handler, of all kinds.
#[derive(Clone, Copy)]
pub(in crate::sandbox) struct Grantings<'a> {
    pub(in crate::sandbox) granted: &'a Granted,
    pub(in crate::sandbox) http: &'a HttpAccess,
    pub(in crate::sandbox) state: Option<StateQuota>,
    pub(in crate::sandbox) sql: Option<&'a GrantedSql>,
}

/// Returns the requested capabilities that are not granted.
pub(in crate::sandbox) fn missing(
    handler: &str,
    requested: &[Capability],
    all: Grantings<'_>,
) -> Vec<Missing> {
    let missing = requested
        .iter()
        .filter(|capability| !is_granted(capability, all))
        .map(|capability| Missing {
            what: capability.clone(),
            lines: lines_for(handler, capability),
        });
    missing.collect()
}

/// The granted capabilities, in manifest notation.
pub(in crate::sandbox) fn granted_capabilities(
    granted: &Granted,
    http: &HttpAccess,
    state: Option<StateQuota>,
) -> Vec<Capability> {
    let hosts = http.hosts().cloned().map(Some).map(Capability::Http);
    let secrets = http.sent_names().iter().cloned();
    let secrets = secrets.map(Some).map(Capability::Secrets);
    let keys = http.signing_names().iter().cloned();
    let keys = keys.map(Some).map(Capability::Sign);
    let dirs = granted.dirs.iter();
    let dirs = dirs.map(|dir| Capability::Dirs(Some((dir.grant.at.clone(), dir.grant.mode))));
    let env = granted.env.iter();
    let env = env.map(|(name, _)| Capability::Env(Some(name.clone())));
    let settings = granted.setting_names().into_iter();
    let settings = settings.map(Some).map(Capability::Settings);
    let clocks = granted.fine_clocks.then_some(Capability::FineClocks);
    let enqueue = granted.enqueue.iter().cloned();
    let enqueue = enqueue.map(Some).map(Capability::Enqueue);
    let schedule = granted.schedule.then_some(Capability::Schedule);
    hosts
        .chain(secrets)
        .chain(keys)
        .chain(dirs)
        .chain(env)
        .chain(settings)
        .chain(state.map(|_| Capability::State))
        .chain(clocks)
        .chain(enqueue)
        .chain(schedule)
        .collect()
}

fn is_granted(capability: &Capability, all: Grantings<'_>) -> bool {
    let Grantings {
        granted,
        http,
        state,
        sql,
    } = all;
    match capability {
        Capability::Http(Some(hosts)) => http.reaches(hosts),
        Capability::Http(None) => http.sends(),
        Capability::Secrets(Some(name)) => http.sent_names().contains(name),
        Capability::Secrets(None) => !http.sent_names().is_empty(),
        Capability::Sign(Some(name)) => http.signing_names().contains(name),
        Capability::Sign(None) => !http.signing_names().is_empty(),
        Capability::Dirs(Some((at, mode))) => granted.has_dir(at, *mode),
        Capability::Dirs(None) => !granted.dirs.is_empty(),
        Capability::Env(Some(name)) => granted.env.iter().any(|(granted, _)| granted == name),
        Capability::Env(None) => !granted.env.is_empty(),
        Capability::Settings(Some(name)) => granted.setting_names().contains(name),
        Capability::Settings(None) => granted.settings.is_some(),
        Capability::State => state.is_some(),
        Capability::FineClocks => granted.fine_clocks,
        Capability::Enqueue(Some(pattern)) => granted.may_enqueue(pattern),
        Capability::Enqueue(None) => !granted.enqueue.is_empty(),
        Capability::Schedule => granted.schedule,
        Capability::Sql(Some(name)) => sql.is_some_and(|sql| sql.statement(name).is_some()),
        Capability::Sql(None) => sql.is_some(),
        Capability::Unknown(_) => false,
    }
}

fn lines_for(handler: &str, capability: &Capability) -> Option<String> {
    Some(match capability {
        Capability::Http(hosts) => {
            let host = hosts.as_ref().map(HostPattern::to_string);
            lines::http(handler, host.as_deref(), HttpScheme::Https, None, None)
        }
        Capability::Secrets(name) => {
            let own = lines::secret(handler, name.as_deref(), None, "authorization");
            with_source(own, name.as_deref())
        }
        Capability::Sign(name) => {
            with_source(lines::signing(handler, name.as_deref()), name.as_deref())
        }
        Capability::Dirs(Some((at, mode))) => lines::dir(handler, Some(at), *mode),
        Capability::Dirs(None) => lines::dir(handler, None, Mode::Read),
        Capability::Env(name) => keys(handler, "env", name.as_deref()),
        Capability::Settings(name) => keys(handler, "settings", name.as_deref()),
        Capability::State => lines::state(handler),
        Capability::FineClocks => lines::fine_clocks(handler),
        Capability::Enqueue(pattern) => lines::enqueue(handler, pattern.as_deref()),
        Capability::Schedule => lines::schedule(handler),
        Capability::Sql(name) => lines::sql(handler, name.as_deref()),
        Capability::Unknown(_) => return None,
    })
}

/// Adds the lines that define where the secret is read from. For a secret without a name, the operator chooses the name
/// and adds those lines.
fn with_source(own: String, name: Option<&str>) -> String {
    match name {
        Some(name) => format!("{own}\n\n{}", lines::read_from(name)),
        None => own,
    }
}

fn keys(handler: &str, table: &str, name: Option<&str>) -> String {
    let keys: Vec<&str> = name.into_iter().collect();
    lines::keys(handler, table, &keys)
}

impl Missing {
    /// All lines together, as they can be appended to the file: no table occurs twice.
    pub fn lines(missing: &[Self]) -> String {
        let mut tables: Vec<String> = Vec::new();
        let all = missing.iter().filter_map(|one| one.lines.as_deref());
        for table in all.flat_map(|lines| lines.split("\n\n")) {
            let mut lines = table.lines();
            let head = lines.next().unwrap_or_default();
            let same = tables
                .iter_mut()
                .find(|table| !head.starts_with("[[") && table.lines().next() == Some(head));
            let Some(same) = same else {
                tables.push(table.to_owned());
                continue;
            };
            for line in lines {
                *same = with_line(same, line);
            }
        }
        tables.join("\n\n")
    }
}

/// Adds a line to a table, or its elements to a list that the table has under the same key.
fn with_line(table: &str, added: &str) -> String {
    let mut has_key = false;
    let lines = table.lines().map(|line| {
        let is_same = line.split_once(" = ").map(|(key, _)| key)
            == added.split_once(" = ").map(|(key, _)| key);
        has_key |= is_same;
        match is_same {
            true => with_elements(line, added),
            false => line.to_owned(),
        }
    });
    let mut lines: Vec<String> = lines.collect();
    if !has_key {
        lines.push(added.to_owned());
    }
    lines.join("\n")
}

/// One line for two lines with the same key.
fn with_elements(line: &str, added: &str) -> String {
    let pair = |line: &str| toml::from_str::<Table>(line).ok()?.into_iter().next();
    match (pair(line), pair(added)) {
        (Some((key, Value::Array(mut list))), Some((_, Value::Array(added)))) => {
            let new = added.into_iter().filter(|element| !list.contains(element));
            let new: Vec<Value> = new.collect();
            list.extend(new);
            format!("{key} = {}", Value::Array(list))
        }
        // All statements instead of some.
        (Some((_, Value::Array(_))), Some(_)) => added.to_owned(),
        _ => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_parse_as_one_file() {
        let mut missing: Vec<Missing> = [
            "http:a.example",
            "http:b.example",
            "env:LANG",
            "dirs:/out:read-write",
            "env:TZ",
            "settings",
            "sign",
            "sign:HOOK_KEY",
            "enqueue:mail.archive",
            "enqueue:audit.*",
            "sql:insert",
            "sql:delete",
            "of-the-future",
        ]
        .iter()
        .map(|text| {
            let what = text.parse().expect("a capability");
            let lines = lines_for("mail.send", &what);
            Missing { what, lines }
        })
        .collect();
        // As for a handler whose name is not bound.
        for one in missing
            .iter_mut()
            .filter(|one| matches!(one.what, Capability::Sign(_)))
        {
            let own = one.lines.take().expect("it can be granted");
            one.lines = Some(format!(
                "{}\n\n{own}",
                lines::module("mail.send", "mail.wasm")
            ));
        }
        let lines = Missing::lines(&missing);
        let read: toml::Table =
            toml::from_str(&lines).unwrap_or_else(|why| panic!("{why}: {lines}"));
        let handler = &read["handlers"]["mail.send"];
        assert_eq!(handler["module"].as_str(), Some("mail.wasm"));
        assert_eq!(handler["http"][1]["hosts"][0].as_str(), Some("b.example"));
        assert_eq!(handler["env"].as_table().map(toml::Table::len), Some(2));
        assert_eq!(handler["dirs"][0]["mode"].as_str(), Some("read-write"));
        assert!(handler["settings"].is_table());
        assert_eq!(handler["secrets"][1]["name"].as_str(), Some("HOOK_KEY"));
        assert_eq!(handler["secrets"][0]["sign"].as_bool(), Some(true));
        let strings = |list: &str| format!("[{list}]").parse::<Value>().expect("a list");
        assert_eq!(handler["enqueue"], strings(r#""mail.archive", "audit.*""#));
        let statements = &handler["sql"]["statements"];
        assert_eq!(statements, &strings(r#""insert", "delete""#));
    }

    #[test]
    fn all_statements_replace_some() {
        let lines = |words: [&str; 2]| {
            let missing = words.map(|text| {
                let what = text.parse().expect("a capability");
                let lines = lines_for("mail.send", &what);
                Missing { what, lines }
            });
            Missing::lines(&missing)
        };
        for words in [["sql", "sql:insert"], ["sql:insert", "sql"]] {
            let lines = lines(words);
            assert!(lines.ends_with("\nstatements = \"all\""), "{lines}");
            assert_eq!(lines.matches("statements").count(), 1, "{lines}");
        }
    }
}
