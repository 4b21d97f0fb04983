//! The lines of `rouse.toml` that grant something: the single source for all messages that suggest them.

use super::{HttpScheme, Mode, StateQuota, annotated};
use crate::sanitize::is_unsafe;

/// The placeholder for a value that only the operator knows.
pub(super) const UNKNOWN: &str = "…";

/// A value on one line, in quotes. A value that needs an escape is left to the operator: guests choose most of these
/// values, and the operator should see at a glance what a line grants.
fn text(value: &str) -> String {
    let needs_escape = |c: char| c == '"' || c == '\\' || is_unsafe(c);
    match value.contains(needs_escape) {
        true => format!("\"{UNKNOWN}\""),
        false => format!("\"{value}\""),
    }
}

/// Lines that grant what a job lacked, adapted to the operator's file `config`, followed by a paragraph that explains
/// how to use them.
pub(in crate::sandbox) fn to_paste(handler: &str, lines: &str, config: &str) -> String {
    let lines = annotated(lines, config);
    let at = match lines.lines().any(|line| line.starts_with('#')) {
        true => {
            "Put lines with a comment (#) above them where the comment says, and all others at the end of rouse.toml"
        }
        false => "Put them at the end of rouse.toml",
    };
    format!(
        "{lines}\n\n{at} (`rouse handlers show {handler}` lists the grants and their tables). Then restart the host, and run the job again \
         with `rouse job retry ID`"
    )
}

/// The paragraph after lines that bind a table to a module: where to put them, and what to do next.
pub(in crate::sandbox) fn how_to_bind(handler: &str) -> String {
    format!(
        "\n\nPut them at the end of rouse.toml; if it already has this table in single brackets, put only the second line into that table \
         (`rouse handlers show {handler}` lists the grants and their tables). Then restart the host, and run the job again with \
         `rouse job retry ID`"
    )
}

/// Grants requests to a host; `method`: `None` means all methods.
pub(in crate::sandbox) fn http(
    handler: &str,
    host: Option<&str>,
    scheme: HttpScheme,
    port: Option<u16>,
    method: Option<&str>,
) -> String {
    let host = text(host.unwrap_or(UNKNOWN));
    let mut lines = format!("[[handlers.\"{handler}\".http]]\nhosts = [{host}]");
    if scheme == HttpScheme::Http {
        lines += "\nschemes = [\"http\"]";
    }
    if let Some(port) = port.filter(|port| *port != scheme.port()) {
        lines += &format!("\nports = [{port}]");
    }
    if let Some(method) = method {
        lines += &format!("\nmethods = [{}]", text(method));
    }
    lines
}

/// Grants a secret in this header of requests to this host.
pub(in crate::sandbox) fn secret(
    handler: &str,
    name: Option<&str>,
    host: Option<&str>,
    header: &str,
) -> String {
    let [name, host] = [name, host].map(|value| text(value.unwrap_or(UNKNOWN)));
    format!(
        "[[handlers.\"{handler}\".secrets]]\nname = {name}\nhosts = [{host}]\nheaders = [{}]",
        text(header)
    )
}

/// Defines where a secret is read from. Its name may contain dots, and a guest may request any name.
pub(in crate::sandbox) fn read_from(name: &str) -> String {
    let key = key_text(name);
    format!("[secrets.{key}]\nenv = {}", toml::Value::from(name))
}

/// A key, in quotes if it needs them.
pub(super) fn key_text(key: &str) -> String {
    let is_bare = |it: u8| it.is_ascii_alphanumeric() || b"_-".contains(&it);
    match !key.is_empty() && key.bytes().all(is_bare) {
        true => key.to_owned(),
        false => toml::Value::from(key).to_string(),
    }
}

/// Grants signatures with a secret.
pub(in crate::sandbox) fn signing(handler: &str, name: Option<&str>) -> String {
    let name = text(name.unwrap_or(UNKNOWN));
    format!("[[handlers.\"{handler}\".secrets]]\nname = {name}\nsign = true")
}

/// The paragraph after lines that replace others.
pub(in crate::sandbox) const RESTART_AND_RETRY: &str =
    "\n\nThen restart the host, and run the job again with `rouse job retry ID`";

/// Grants a directory that the operator has to name.
pub(in crate::sandbox) fn dir(handler: &str, at: Option<&str>, mode: Mode) -> String {
    this_dir(handler, UNKNOWN, at.unwrap_or(UNKNOWN), mode)
}

/// Grants this directory.
pub(in crate::sandbox) fn this_dir(handler: &str, dir: &str, at: &str, mode: Mode) -> String {
    let mode = match mode {
        Mode::Read => "",
        Mode::ReadWrite => "\nmode = \"read-write\"",
    };
    let (dir, at) = (toml::Value::from(dir), text(at));
    format!("[[handlers.\"{handler}\".dirs]]\ndir = {dir}\nat = {at}{mode}")
}

/// Sets environment variables or settings: keys of a table.
pub(in crate::sandbox) fn keys(handler: &str, table: &str, keys: &[&str]) -> String {
    let mut lines = format!("[handlers.\"{handler}\".{table}]");
    for key in keys {
        lines += &format!("\n{key} = \"{UNKNOWN}\"");
    }
    lines
}

/// Grants state with the default quota.
pub(in crate::sandbox) fn state(handler: &str) -> String {
    let quota = StateQuota::default();
    format!(
        "[handlers.\"{handler}\".state]\nkeys_max = {}\nbytes_max = {}\nvalue_bytes_max = {}",
        quota.keys_max, quota.bytes_max, quota.value_bytes_max
    )
}

/// Binds the names of a table to a file. File names may contain quotes.
pub(in crate::sandbox) fn module(table: &str, file: &str) -> String {
    format!("[handlers.\"{table}\"]\n{}", module_key(file))
}

/// The `module` key alone, for an existing table.
pub(in crate::sandbox) fn module_key(file: &str) -> String {
    format!("module = {}", toml::Value::from(file))
}

/// Lets a handler enqueue jobs for the handlers of this pattern.
pub(in crate::sandbox) fn enqueue(handler: &str, pattern: Option<&str>) -> String {
    let pattern = text(pattern.unwrap_or(UNKNOWN));
    format!("[handlers.\"{handler}\"]\nenqueue = [{pattern}]")
}

/// Allows the schedule that the module declares.
pub(in crate::sandbox) fn schedule(handler: &str) -> String {
    format!("[handlers.\"{handler}\"]\nschedule = true")
}

/// Grants a statement, or all that the module declares. The login is read from a variable.
pub(in crate::sandbox) fn sql(handler: &str, statement: Option<&str>) -> String {
    let statements = match statement {
        Some(name) => format!("[{}]", text(name)),
        None => "\"all\"".into(),
    };
    format!(
        "[handlers.\"{handler}\".sql]\nlogin = {{ env = \"{UNKNOWN}\" }}\nstatements = {statements}"
    )
}

/// Grants fine clocks.
pub(in crate::sandbox) fn fine_clocks(handler: &str) -> String {
    format!("[handlers.\"{handler}\"]\nfine_clocks = true")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_cannot_write_lines_of_its_own() {
        let hostile = ["x\", \"*", "x\"\nprivate = true", "x\\", "x\u{202e}y"];
        for value in hostile {
            for lines in [
                http("h", Some(value), HttpScheme::Https, None, Some(value)),
                secret("h", Some(value), Some(value), value),
                signing("h", Some(value)),
                dir("h", Some(value), Mode::Read),
                enqueue("h", Some(value)),
                sql("h", Some(value)),
            ] {
                assert!(!lines.contains('x'), "{lines}");
            }
        }
        let plain = enqueue("h", Some("mail.*"));
        assert_eq!(plain, "[handlers.\"h\"]\nenqueue = [\"mail.*\"]");
    }
}
