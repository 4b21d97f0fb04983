//! Adapts suggested lines to a `rouse.toml` that may already have some of their tables.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Deserialize;
use serde::de::IgnoredAny;
use toml::Spanned;

/// Adds a comment above each table that cannot be appended to this file, or that would replace something there, and
/// drops lines that the file already has. `wider`: returns the table of the file from which a handler currently
/// inherits a key.
pub fn annotated(lines: &str, file: &str, wider: impl Fn(&str, &str) -> Option<String>) -> String {
    let lines = lines.split("\n\n");
    let annotated = lines.filter_map(|table| match remark(table, file, &wider) {
        Some(Remark::Existing) => None,
        Some(Remark::Above(remark)) => Some(format!("# {remark}\n{table}")),
        Some(Remark::Keys(remark)) => Some(format!("# {remark}\n{}", keys(table).join("\n"))),
        Some(Remark::Element(remark)) => {
            Some(format!("# {remark}\n{{ {} }},", keys(table).join(", ")))
        }
        None => Some(table.to_owned()),
    });
    annotated.collect::<Vec<_>>().join("\n\n")
}

/// The positions of handler tables and their keys in a file.
#[derive(Default, Deserialize)]
struct Positions {
    #[serde(default)]
    handlers: BTreeMap<Spanned<String>, BTreeMap<Spanned<String>, IgnoredAny>>,
    #[serde(default)]
    secrets: BTreeMap<String, IgnoredAny>,
}

impl Positions {
    fn read(text: &str) -> Self {
        // A file that does not parse was refused earlier, with the reason.
        toml::from_str(text).unwrap_or_default()
    }

    /// The position of a handler's table.
    fn handler(&self, handler: &str) -> Option<Range<usize>> {
        Some(self.handlers.get_key_value(handler)?.0.span())
    }

    /// The position of a key in a handler's table.
    fn key(&self, handler: &str, key: &str) -> Option<Range<usize>> {
        let keys = self.handlers.get(handler)?;
        keys.get_key_value(key).map(|(found, _)| found.span())
    }
}

/// The way in which a table has to be adapted.
#[derive(Debug, PartialEq)]
enum Remark {
    /// The file already has it.
    Existing,
    /// Keep the table, with this comment.
    Above(String),
    /// The file has the table: add only the keys, with this comment.
    Keys(String),
    /// The file has a list: add an element, with this comment.
    Element(String),
}

/// The lines below the header of a table.
fn keys(table: &str) -> Vec<&str> {
    table.lines().skip(1).collect()
}

fn remark(table: &str, file: &str, wider: impl Fn(&str, &str) -> Option<String>) -> Option<Remark> {
    let (added, existing) = (Positions::read(table), Positions::read(file));
    if let Some(secret) = added.secrets.keys().next() {
        return existing
            .secrets
            .contains_key(secret)
            .then_some(Remark::Existing);
    }
    let (handler, keys) = added.handlers.first_key_value()?;
    let (handler, key) = (handler.get_ref(), keys.first_key_value()?.0.get_ref());
    let together = toml::from_str::<toml::Table>(&format!("{file}\n{table}"));
    if together.is_err() {
        let (table_name, at) = match existing.key(handler, key) {
            Some(at) => (format!("handlers.\"{handler}\".{key}"), Some(at)),
            None => (
                format!("[handlers.\"{handler}\"]"),
                existing.handler(handler),
            ),
        };
        let line = at.map(|at| format!(", on line {}", file[..at.start].matches('\n').count() + 1));
        let line = line.unwrap_or_default();
        if table.starts_with("[[") && existing.key(handler, key).is_some() {
            return Some(Remark::Element(format!(
                "{table_name} is already in the file{line}: add this element to its list"
            )));
        }
        return Some(Remark::Keys(format!(
            "{table_name} is already in the file{line}: add these lines to that table"
        )));
    }
    let replaces = matches!(key.as_str(), "env" | "settings");
    let wider = replaces.then(|| wider(handler, key)).flatten()?;
    Some(Remark::Above(format!(
        "this replaces all of {wider} for {handler}: repeat here the keys that it still needs"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The wider table in `FILE`.
    fn wider(handler: &str, key: &str) -> Option<String> {
        let is_wider = (handler, key) == ("mail.read", "env");
        is_wider.then(|| "[handlers.\"*\".env]".to_owned())
    }

    fn annotated(lines: &str, file: &str) -> String {
        super::annotated(lines, file, wider)
    }

    fn remark(table: &str, file: &str) -> Option<Remark> {
        super::remark(table, file, wider)
    }

    const FILE: &str = r#"
slots = 4
[handlers."*".env]
LANG = "C"
[handlers."mail.send".env]
TZ = "UTC"
[handlers."mail.send"]
dirs = [
    { dir = "in", at = "/in" },
]
[[handlers."mail.send".secrets]]
name = "KEY"
"#;

    #[test]
    fn name_the_line_of_an_existing_table() {
        let remark_text = |table: &str, file: &str| match remark(table, file) {
            Some(
                Remark::Above(remark_text)
                | Remark::Keys(remark_text)
                | Remark::Element(remark_text),
            ) => remark_text,
            Some(Remark::Existing) | None => String::new(),
        };
        let remark = |table: &str| remark_text(table, FILE);
        let env = remark("[handlers.\"mail.send\".env]\nLANG = \"…\"");
        assert!(
            env.starts_with("handlers.\"mail.send\".env is already in the file, on line 5:"),
            "{env}"
        );
        let dirs = remark("[[handlers.\"mail.send\".dirs]]\ndir = \"…\"\nat = \"/out\"");
        assert!(
            dirs.contains("dirs is already in the file, on line 8:"),
            "{dirs}"
        );
        let clocks = "[handlers.\"mail.send\"]\nfine_clocks = true";
        let own = remark(clocks);
        assert!(
            own.starts_with("[handlers.\"mail.send\"] is already in the file, on line 7:"),
            "{own}"
        );
        let first = "[handlers.\"mail.send\"]\nlease = \"5s\"\n[handlers.\"mail.send\".env]\n";
        let own = remark_text(clocks, first);
        assert!(own.contains("on line 1:"), "{own}");
    }

    #[test]
    fn print_an_element_for_an_existing_list() {
        let file =
            "[handlers.\"mail.send\"]\nsecrets = [{ name = \"A\", sign = true }]\nhttp = []\n";
        let lines = "[[handlers.\"mail.send\".secrets]]\nname = \"…\"\nsign = true\n\n\
                     [[handlers.\"mail.send\".http]]\nhosts = [\"a.example\"]\nmethods = [\"GET\"]";
        assert_eq!(
            annotated(lines, file),
            "# handlers.\"mail.send\".secrets is already in the file, on line 2: add this element to its list\n\
             { name = \"…\", sign = true },\n\n\
             # handlers.\"mail.send\".http is already in the file, on line 3: add this element to its list\n\
             { hosts = [\"a.example\"], methods = [\"GET\"] },"
        );
    }

    #[test]
    fn omit_headers_and_secrets_that_the_file_has() {
        let lines =
            "[handlers.\"mail.send\"]\nmodule = \"mail.wasm\"\n\n[secrets.KEY]\nenv = \"KEY\"";
        let file = "[handlers.\"mail.send\"]\nlease = \"5s\"\n";
        let (module, secret) = (
            "# [handlers.\"mail.send\"] is already in the file, on line 1: add these lines to that table\nmodule = \"mail.wasm\"",
            "[secrets.KEY]\nenv = \"KEY\"",
        );
        assert_eq!(annotated(lines, file), format!("{module}\n\n{secret}"));
        let file = format!("{file}[secrets.KEY]\nfile = \"key\"\n");
        assert_eq!(annotated(lines, &file), module);
    }

    #[test]
    fn no_remark_for_tables_that_can_be_appended() {
        for table in [
            "[[handlers.\"mail.send\".secrets]]\nname = \"…\"\nsign = true",
            "[[handlers.\"mail.send\".http]]\nhosts = [\"…\"]",
            "[handlers.\"mail.send\".settings]\nwide = \"…\"",
            "[handlers.\"mail.read\"]\nfine_clocks = true",
        ] {
            assert_eq!(remark(table, FILE), None, "{table}");
        }
        assert_eq!(
            annotated("[handlers.\"a\".env]\nA = \"…\"", ""),
            "[handlers.\"a\".env]\nA = \"…\""
        );
    }

    #[test]
    fn a_table_that_replaces_a_wider_one_has_a_remark_and_can_be_pasted() {
        let lines = "[handlers.\"mail.read\".env]\nTZ = \"…\"\n\n[[handlers.\"mail.read\".dirs]]\ndir = \"…\"\nat = \"/in\"";
        let annotated = annotated(lines, FILE);
        assert!(
            annotated.starts_with("# this replaces all of [handlers.\"*\".env] for mail.read:"),
            "{annotated}"
        );
        let together = format!("{FILE}\n{annotated}");
        assert!(
            toml::from_str::<toml::Table>(&together).is_ok(),
            "{together}"
        );
    }
}
