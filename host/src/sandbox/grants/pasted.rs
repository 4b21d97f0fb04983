//! Adapts suggested lines to a `rouse.toml` that may already have some of their tables.

use std::collections::BTreeMap;

use toml::de::DeTable;
use toml::{Spanned, Table, Value};

use super::lines::{UNKNOWN, key_text};
use crate::job::most_specific_first;

/// Drops lines that the file already has, repeats what new lines would replace for their handler, and adds a comment
/// above all that cannot be appended to the file, or that replace something there.
pub fn annotated(lines: &str, file: &str) -> String {
    let file = File::read(file);
    let tables = lines.split("\n\n");
    let adapted = tables.flat_map(|table| adapted(table, &file));
    adapted.collect::<Vec<_>>().join("\n\n")
}

/// The operator's file.
struct File<'a> {
    text: &'a str,
    /// Its contents, with the position of each key.
    keys: DeTable<'a>,
    values: Table,
    /// The tables of handlers, by name or pattern.
    handlers: BTreeMap<String, Value>,
}

impl<'a> File<'a> {
    fn read(text: &'a str) -> Self {
        // A file that does not parse was refused earlier, with the reason.
        let keys = DeTable::parse(text).map(Spanned::into_inner);
        let values: Table = toml::from_str(text).unwrap_or_default();
        let handlers = values.get("handlers").and_then(Value::as_table);
        Self {
            text,
            keys: keys.unwrap_or_default(),
            handlers: handlers.cloned().into_iter().flatten().collect(),
            values,
        }
    }

    /// The value of a key for this handler or pattern, and the table that has it: the most specific one decides.
    fn in_force(&self, handler: &str, key: &str) -> Option<(&str, &Value)> {
        let mut tables = most_specific_first(&self.handlers, handler).into_iter();
        tables.find_map(|(table, keys)| Some((table, keys.get(key)?)))
    }

    /// What the handler has under this key from a table for more handlers, and that table: a table of its own with this
    /// key would replace it.
    fn inherited(&self, handler: &str, key: &str) -> Option<(&str, &Value)> {
        let (table, value) = self.in_force(handler, key)?;
        let module = |table: &str| self.in_force(table, "module").map(|(_, module)| module);
        // Statements are only for the module that the table names.
        let applies = key != "sql" || (module(table).is_some() && module(table) == module(handler));
        (table != handler && applies).then_some((table, value))
    }

    /// True if this table can be appended.
    fn can_end_with(&self, table: &str) -> bool {
        toml::from_str::<Table>(&format!("{}\n{table}", self.text)).is_ok()
    }

    fn value(&self, path: &[&str]) -> Option<&Value> {
        let (first, rest) = path.split_first()?;
        let first = self.values.get(*first)?;
        rest.iter().try_fold(first, |value, key| value.get(*key))
    }

    /// A comment about a key: it is already in the file.
    fn remark(&self, path: &[&str], name: &str, advice: &str) -> String {
        let line = self.position(path).map(|at| {
            let line = self.text[..at].matches('\n').count() + 1;
            format!(", on line {line}")
        });
        let line = line.unwrap_or_default();
        format!("# {name} is already in the file{line}: {advice}")
    }

    /// The position of a key.
    fn position(&self, path: &[&str]) -> Option<usize> {
        let (key, tables) = path.split_last()?;
        let mut table = &self.keys;
        for name in tables {
            table = table.get(*name)?.get_ref().as_table()?;
        }
        Some(table.get_key_value(*key)?.0.span().start)
    }
}

/// A table, adapted to the file: blocks of lines, each with a comment if it cannot be appended.
fn adapted(table: &str, file: &File<'_>) -> Vec<String> {
    let unchanged = || vec![table.to_owned()];
    let Ok(added) = toml::from_str::<Table>(table) else {
        return unchanged();
    };
    if let Some(secret) = first_key(added.get("secrets")) {
        return match file.value(&["secrets", secret]) {
            Some(_) => Vec::new(),
            None => unchanged(),
        };
    }
    let Some(handler) = first_key(added.get("handlers")) else {
        return unchanged();
    };
    let own = format!("[handlers.\"{handler}\"]");
    let header = table.lines().next().unwrap_or_default();
    let keys = added["handlers"].get(handler);
    let inner = first_key(keys).filter(|_| header != own);
    let (table, remark) = match inner {
        Some(inner) => with_inherited_keys(table, handler, inner, file).map_or_else(
            || (table.to_owned(), None),
            |(table, remark)| (table, Some(remark)),
        ),
        None => with_inherited_elements(table, handler, file),
    };
    if file.can_end_with(&table) {
        return vec![match remark {
            Some(remark) => format!("{remark}\n{table}"),
            None => table,
        }];
    }

    let lines: Vec<&str> = table.lines().skip(1).collect();
    let path = ["handlers", handler];
    let Some(inner) = inner else {
        return with_keys(&lines, &path, &own, file);
    };
    let in_line = format!("{{ {} }}", lines.join(", "));
    let is_list = header.starts_with("[[");
    let inner_path = ["handlers", handler, inner];
    let name = format!("handlers.\"{handler}\".{inner}");
    match (file.value(&inner_path), is_list) {
        (Some(_), true) => {
            let remark = file.remark(&inner_path, &name, ADD_ELEMENTS);
            vec![format!("{remark}\n{in_line},")]
        }
        (Some(_), false) => with_keys(&lines, &inner_path, &name, file),
        // The handler's table is an inline table, which cannot be continued elsewhere.
        (None, _) => {
            let line = match is_list {
                true => format!("{inner} = [{in_line}]"),
                false => format!("{inner} = {in_line}"),
            };
            with_keys(&[line.as_str()], &path, &own, file)
        }
    }
}

const ADD_ELEMENTS: &str = "add this at the start of its list";

/// Lines for a table that the file has. `path` and `name` are those of the table.
fn with_keys(lines: &[&str], path: &[&str], name: &str, file: &File<'_>) -> Vec<String> {
    let mut missing = Vec::new();
    let mut changes = Vec::new();
    for line in lines {
        let Some((key, added)) = pair(line) else {
            continue;
        };
        let path = [path, &[key.as_str()]].concat();
        let Some(existing) = file.value(&path) else {
            missing.push(*line);
            continue;
        };
        if let Some((advice, change)) = change(existing, &added, line) {
            let name = format!("{}.{key}", name.trim_matches(['[', ']']));
            changes.push(format!("{}\n{change}", file.remark(&path, &name, advice)));
        }
    }
    let missing = (!missing.is_empty()).then(|| {
        let remark = file.remark(path, name, "add these lines to that table");
        format!("{remark}\n{}", missing.join("\n"))
    });
    missing.into_iter().chain(changes).collect()
}

/// A handler's own table, with the elements of lists that it would replace, and a comment about that if there are any.
fn with_inherited_elements(
    table: &str,
    handler: &str,
    file: &File<'_>,
) -> (String, Option<String>) {
    let mut remark = None;
    let lines = table.lines().map(|line| {
        let with_elements = pair(line).and_then(|(key, added)| {
            let (from, existing) = file.inherited(handler, &key)?;
            let list = joined(existing, &added)?;
            let from = format!("{key} of [handlers.\"{from}\"]");
            remark = Some(replaces(&from, handler, REPEATED));
            Some(format!("{key} = {list}"))
        });
        with_elements.unwrap_or_else(|| line.to_owned())
    });
    let lines: Vec<String> = lines.collect();
    (lines.join("\n"), remark)
}

/// A table within a handler's table, with the keys that it would replace, and a comment about that; `None` if it
/// replaces none.
fn with_inherited_keys(
    table: &str,
    handler: &str,
    inner: &str,
    file: &File<'_>,
) -> Option<(String, String)> {
    if !matches!(inner, "env" | "settings" | "sql") {
        return None;
    }
    let (from, inherited) = file.inherited(handler, inner)?;
    let mut inherited = inherited.as_table()?.clone();
    let from = format!("all of [handlers.\"{from}\".{inner}]");
    let mut lines: Vec<String> = Vec::new();
    for line in table.lines() {
        let existing =
            pair(line).and_then(|(key, added)| Some((inherited.remove(&key)?, key, added)));
        lines.push(match existing {
            None => line.to_owned(),
            Some((existing, key, added)) => match joined(&existing, &added) {
                Some(list) => format!("{} = {list}", key_text(&key)),
                None if change(&existing, &added, line).is_some() => line.to_owned(),
                None => format!("{} = {existing}", key_text(&key)),
            },
        });
    }
    let rest = inherited.iter();
    lines.extend(rest.map(|(key, value)| format!("{} = {value}", key_text(key))));
    // These lines are read one by one, and some end up in an inline table.
    if lines.iter().any(|line| line.contains('\n')) {
        let remark = replaces(&from, handler, "repeat here the keys that it still needs");
        return Some((table.to_owned(), remark));
    }
    Some((lines.join("\n"), replaces(&from, handler, REPEATED)))
}

const REPEATED: &str = "what it has is repeated here; put this at the end of the file";

/// A comment about lines that replace something for one handler.
fn replaces(from: &str, handler: &str, advice: &str) -> String {
    format!("# this replaces {from} for {handler}: {advice}")
}

/// The key and value on a line; `None` for a header.
fn pair(line: &str) -> Option<(String, Value)> {
    toml::from_str::<Table>(line)
        .ok()?
        .into_iter()
        .next()
        .filter(|_| !line.starts_with('['))
}

/// A list with the elements of both; `None` if they are not two lists.
fn joined(existing: &Value, added: &Value) -> Option<Value> {
    let mut list = existing.as_array()?.clone();
    let new = added.as_array()?.iter();
    let new: Vec<Value> = new
        .filter(|element| !list.contains(element))
        .cloned()
        .collect();
    list.extend(new);
    Some(Value::Array(list))
}

/// How the value of a key has to change, with the new text; `None` if it can stay.
fn change(existing: &Value, added: &Value, line: &str) -> Option<(&'static str, String)> {
    match (existing, added) {
        (Value::Array(existing), Value::Array(added)) => {
            let new = added.iter().filter(|element| !existing.contains(element));
            let new: Vec<String> = new.map(|element| format!("{element},")).collect();
            (!new.is_empty()).then(|| (ADD_ELEMENTS, new.join(" ")))
        }
        // `statements = "all"` also grants these.
        (Value::String(_), Value::Array(_)) => None,
        _ if existing == added || line.contains(UNKNOWN) => None,
        _ => Some(("replace it with this line", line.to_owned())),
    }
}

fn first_key(table: Option<&Value>) -> Option<&str> {
    let (key, _) = table?.as_table()?.iter().next()?;
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::super::lines;
    use super::*;

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

    /// Does with a file what the annotated lines say, and parses it.
    fn followed(file: &str, annotated: &str) -> Table {
        let mut lines: Vec<String> = file.lines().map(str::to_owned).collect();
        let mut changes = Vec::new();
        for block in annotated.split("\n\n").filter(|block| !block.is_empty()) {
            let Some((remark, text)) = block
                .strip_prefix("# ")
                .and_then(|block| block.split_once('\n'))
            else {
                lines.extend(block.lines().map(str::to_owned));
                continue;
            };
            if remark.ends_with(REPEATED) {
                lines.extend(text.lines().map(str::to_owned));
                continue;
            }
            let (_, rest) = remark.split_once(", on line ").expect("a line");
            let (line, advice) = rest.split_once(": ").expect("advice");
            let line: usize = line.parse().expect("a number");
            changes.push((line, advice, text));
        }
        // Changes from the end, so that numbers of other lines stay what they were.
        changes.sort_by_key(|(line, ..)| std::cmp::Reverse(*line));
        for (line, advice, text) in changes {
            match advice {
                "add this at the start of its list" => {
                    let list = lines[line - 1].replacen('[', &format!("[{text} "), 1);
                    lines[line - 1] = list;
                }
                "add these lines to that table" => lines.insert(line, text.to_owned()),
                "replace it with this line" => lines[line - 1] = text.to_owned(),
                _ => panic!("{advice}"),
            }
        }
        let text = lines.join("\n");
        toml::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// The elements of a list of strings.
    fn elements(list: &Value) -> Vec<&str> {
        let list = list.as_array().expect("a list");
        list.iter().filter_map(Value::as_str).collect()
    }

    #[test]
    fn an_existing_list_gets_the_elements_that_it_lacks() {
        let lines = lines::enqueue("mail.send", Some("b"));
        for file in [
            "[handlers.\"mail.send\"]\nlease = \"5s\"\nenqueue = [\"a\"]\n",
            "[handlers.\"mail.send\"]\nenqueue = [ # all of them\n    \"a\"\n]\n[handlers.\"mail.send\".env]\n",
            "[handlers.\"mail.send\"]\nenqueue = []\n",
            "[handlers.\"mail.send\"]\nlease = \"5s\"\n",
            "handlers.\"mail.send\".enqueue = [\"a\"]",
            "",
        ] {
            let followed = followed(file, &annotated(&lines, file));
            let granted = elements(&followed["handlers"]["mail.send"]["enqueue"]);
            assert!(granted.contains(&"b"), "{file}: {followed}");
            assert_eq!(granted.contains(&"a"), file.contains("\"a\""), "{file}");
        }
        let file = "[handlers.\"mail.send\"]\nenqueue = [\"a\"]\n";
        assert_eq!(
            annotated(&lines, file),
            "# handlers.\"mail.send\".enqueue is already in the file, on line 2: add this at the start of its list\n\"b\","
        );
        let both =
            "[handlers.\"mail.send\"]\nmodule = \"mail.wasm\"\nenqueue = [\"a\", \"b\", \"c\"]";
        let followed = followed(file, &annotated(both, file));
        let handler = &followed["handlers"]["mail.send"];
        assert_eq!(elements(&handler["enqueue"]), ["b", "c", "a"]);
        assert_eq!(handler["module"].as_str(), Some("mail.wasm"));
    }

    #[test]
    fn statements_are_added_to_those_that_the_file_grants() {
        let lines = lines::sql("mail.send", Some("two"));
        let file =
            "[handlers.\"mail.send\".sql]\nlogin = { env = \"DB\" }\nstatements = [\"one\"]\n";
        let followed_file = followed(file, &annotated(&lines, file));
        let sql = &followed_file["handlers"]["mail.send"]["sql"];
        assert_eq!(elements(&sql["statements"]), ["two", "one"]);
        assert_eq!(sql["login"]["env"].as_str(), Some("DB"));
        // All of them instead of one.
        let all = lines::sql("mail.send", None);
        let followed_file = followed(file, &annotated(&all, file));
        let sql = &followed_file["handlers"]["mail.send"]["sql"];
        assert_eq!(sql["statements"].as_str(), Some("all"));
        // A file that grants all needs no line.
        let file = file.replace("[\"one\"]", "\"all\"");
        assert_eq!(annotated(&lines, &file), "");
    }

    #[test]
    fn a_value_that_denies_is_replaced() {
        let file = "[handlers.\"mail.send\"]\nschedule = false\n";
        let annotated = annotated(&lines::schedule("mail.send"), file);
        assert!(
            annotated.starts_with(
                "# handlers.\"mail.send\".schedule is already in the file, on line 2: replace it"
            ),
            "{annotated}"
        );
        let followed = followed(file, &annotated);
        let handler = &followed["handlers"]["mail.send"];
        assert_eq!(handler["schedule"].as_bool(), Some(true));
    }

    #[test]
    fn an_inline_table_gets_an_inline_value() {
        let file = "[handlers]\n\"mail.send\" = { lease = \"5s\" }\n";
        let remark = "# [handlers.\"mail.send\"] is already in the file, on line 2: add these lines to that table\n";
        assert_eq!(
            annotated(&lines::sql("mail.send", None), file),
            format!("{remark}sql = {{ login = {{ env = \"…\" }}, statements = \"all\" }}")
        );
        assert_eq!(
            annotated(&lines::signing("mail.send", Some("KEY")), file),
            format!("{remark}secrets = [{{ name = \"KEY\", sign = true }}]")
        );
    }

    #[test]
    fn name_the_line_of_an_existing_table() {
        let env = annotated("[handlers.\"mail.send\".env]\nLANG = \"…\"", FILE);
        assert!(
            env.starts_with("# handlers.\"mail.send\".env is already in the file, on line 5:"),
            "{env}"
        );
        let dirs = "[[handlers.\"mail.send\".dirs]]\ndir = \"…\"\nat = \"/out\"";
        let dirs = annotated(dirs, FILE);
        assert!(
            dirs.contains("dirs is already in the file, on line 8:"),
            "{dirs}"
        );
        let clocks = "[handlers.\"mail.send\"]\nfine_clocks = true";
        let own = annotated(clocks, FILE);
        assert!(
            own.starts_with("# [handlers.\"mail.send\"] is already in the file, on line 7:"),
            "{own}"
        );
        let first = "[handlers.\"mail.send\"]\nlease = \"5s\"\n[handlers.\"mail.send\".env]\n";
        let own = annotated(clocks, first);
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
            "# handlers.\"mail.send\".secrets is already in the file, on line 2: add this at the start of its list\n\
             { name = \"…\", sign = true },\n\n\
             # handlers.\"mail.send\".http is already in the file, on line 3: add this at the start of its list\n\
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
            assert_eq!(annotated(table, FILE), table);
        }
        assert_eq!(
            annotated("[handlers.\"a\".env]\nA = \"…\"", ""),
            "[handlers.\"a\".env]\nA = \"…\""
        );
    }

    #[test]
    fn a_new_list_repeats_the_elements_of_the_list_that_it_replaces() {
        let lines = lines::enqueue("mail.send", Some("b"));
        for file in [
            "[handlers.\"*\"]\nenqueue = [\"a\"]\n",
            "[handlers.\"*\"]\nenqueue = [\"z\"]\n[handlers.\"mail.*\"]\nenqueue = [\"a\"]\n",
            "[handlers.\"*\"]\nenqueue = [\"a\"]\n[handlers.\"mail.send\"]\nlease = \"5s\"\n",
        ] {
            let followed = followed(file, &annotated(&lines, file));
            let granted = elements(&followed["handlers"]["mail.send"]["enqueue"]);
            assert_eq!(granted, ["a", "b"], "{file}");
        }
        let file = "[handlers.\"*\"]\nenqueue = [\"a\"]\n";
        assert_eq!(
            annotated(&lines, file),
            "# this replaces enqueue of [handlers.\"*\"] for mail.send: what it has is repeated here; put this at the end of the file\n\
             [handlers.\"mail.send\"]\nenqueue = [\"a\", \"b\"]"
        );
        // Tables for other handlers.
        let file = "[handlers.\"web.*\"]\nenqueue = [\"a\"]\n";
        assert_eq!(annotated(&lines, file), lines);
    }

    #[test]
    fn new_statements_repeat_the_login_and_the_statements_that_they_replace() {
        let lines = lines::sql("mail.send", Some("two"));
        let wider = "[handlers.\"mail.*\"]\nmodule = \"mail.wasm\"\n\
                     sql = { login = { env = \"DB\" }, statements = [\"one\"], rows = 7 }\n";
        let own = "[handlers.\"mail.send\"]\nlease = \"5s\"\n";
        for file in [wider.to_owned(), format!("{wider}{own}")] {
            let followed = followed(&file, &annotated(&lines, &file));
            let sql = &followed["handlers"]["mail.send"]["sql"];
            assert_eq!(elements(&sql["statements"]), ["one", "two"], "{file}");
            assert_eq!(sql["login"]["env"].as_str(), Some("DB"));
            assert_eq!(sql["rows"].as_integer(), Some(7));
        }
        let all = wider.replace("[\"one\"]", "\"all\"");
        let followed = followed(&all, &annotated(&lines, &all));
        let sql = &followed["handlers"]["mail.send"]["sql"];
        assert_eq!(sql["statements"].as_str(), Some("all"));
        // The wider table grants nothing to another module.
        let other = format!("{wider}[handlers.\"mail.send\"]\nmodule = \"other.wasm\"\n");
        assert_eq!(annotated(&lines, &other), lines);
    }

    #[test]
    fn a_table_that_replaces_a_wider_one_repeats_it_and_can_be_pasted() {
        let lines = "[handlers.\"mail.read\".env]\nTZ = \"…\"\n\n[[handlers.\"mail.read\".dirs]]\ndir = \"…\"\nat = \"/in\"";
        let annotated = annotated(lines, FILE);
        assert!(
            annotated.starts_with("# this replaces all of [handlers.\"*\".env] for mail.read:"),
            "{annotated}"
        );
        let together: Table = toml::from_str(&format!("{FILE}\n{annotated}")).unwrap();
        let env = &together["handlers"]["mail.read"]["env"];
        assert_eq!(env["TZ"].as_str(), Some("…"));
        assert_eq!(env["LANG"].as_str(), Some("C"));
    }

    #[test]
    fn a_value_of_several_lines_is_left_to_the_operator() {
        let file = "[handlers.\"*\".settings]\ntext = \"\"\"\na\nb\"\"\"\n\"a key\" = 1\n";
        let lines = "[handlers.\"mail.send\".settings]\nwide = \"…\"";
        assert_eq!(
            annotated(lines, file),
            format!(
                "# this replaces all of [handlers.\"*\".settings] for mail.send: repeat here the keys that it still needs\n{lines}"
            )
        );
        let file = file.replace("\na\nb", "a");
        let followed = followed(&file, &annotated(lines, &file));
        let settings = &followed["handlers"]["mail.send"]["settings"];
        assert_eq!(settings["text"].as_str(), Some("a"));
        assert_eq!(settings["a key"].as_integer(), Some(1));
        assert_eq!(settings["wide"].as_str(), Some("…"));
    }
}
