//! The rows of the keys: what can be read, and what the reference page lists.

use std::path::Path;

use super::read;
use crate::config::Environment;
use crate::config::file::dir_table::DirTable;
use crate::config::file::fair_table::FairTable;
use crate::config::file::handler_table::HandlerTable;
use crate::config::file::http_table::HttpTable;
use crate::config::file::secret_table::{SecretTable, SecretUseTable};
use crate::config::file::sql_table::{LoginTable, SqlTable};
use crate::config::file::{File, HostSettings};
use crate::job::SqlLimits;
use crate::sandbox::{Limits, Quota, StateQuota};
use crate::setting::table::Table;
use crate::setting::{Entry, Overlay, Settable, Setting};
use crate::worker::Policy;

/// A table of `rouse.toml`, or of the environment.
struct Described {
    /// Its name on the page.
    name: &'static str,
    /// The line above its keys in the file.
    head: &'static str,
    keys: Vec<&'static str>,
    rows: Vec<String>,
}

/// The table with these entries and the numbers of `T`.
fn described<T: Settable>(
    name: &'static str,
    head: &'static str,
    entries: &'static [Entry],
) -> Described {
    let numbers = T::SETTINGS.iter();
    let keys = entries.iter().map(|entry| entry.key);
    let rows = entries.iter().map(Entry::row);
    Described {
        name,
        head,
        keys: keys.chain(numbers.clone().map(|it| it.key)).collect(),
        rows: rows.chain(numbers.map(Setting::row)).collect(),
    }
}

fn table<T: Table>(name: &'static str, head: &'static str) -> Described {
    described::<T::Numbers>(name, head, T::ENTRIES)
}

fn tables_of_the_file() -> Vec<Described> {
    vec![
        table::<File>("host", ""),
        table::<HandlerTable>("handlers", "[handlers.x]\n"),
        described::<Limits>("limits", "[limits]\n", &[]),
        described::<StateQuota>("state", "[handlers.x.state]\n", &[]),
        table::<SqlTable>("sql", "[handlers.x.sql]\n"),
        table::<LoginTable>("login", "[handlers.x.sql.login]\n"),
        table::<FairTable>("fair", "[fair_share.x]\n"),
        table::<DirTable>("dirs", "[[handlers.x.dirs]]\n"),
        table::<HttpTable>("http", "[[handlers.x.http]]\n"),
        table::<SecretTable>("secrets", "[secrets.x]\n"),
        table::<SecretUseTable>("uses", "[[handlers.x.secrets]]\n"),
    ]
}

#[test]
fn a_key_without_a_row_cannot_be_read() {
    for table in tables_of_the_file() {
        let why = read(&format!("{}no_such_key = 1", table.head)).unwrap_err();
        assert!(why.contains("unknown field `no_such_key`"), "{why}");
        let (_, known) = why
            .split_once("expected one of ")
            .expect("the error lists the known keys");
        let known: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
        assert_eq!(known, table.keys, "{}", table.name);
    }
}

#[test]
fn each_key_with_a_row_is_read() {
    for table in tables_of_the_file() {
        for key in table.keys {
            // 0 is invalid for most keys, but none of them is unknown.
            if let Err(why) = read(&format!("{}{key} = 0", table.head)) {
                assert!(!why.contains("unknown field"), "{}: {why}", table.name);
            }
        }
    }
}

#[test]
fn the_example_on_the_page_is_valid() {
    let page = include_str!("../../../../../docs/reference/configuration.md");
    let (_, block) = page.split_once("```toml\n").expect("the page has a block");
    let (block, _) = block.split_once("\n```").expect("which ends");
    let file = read(block).unwrap();
    assert_eq!(file.worker("other".into()).worker_id, "mail-1");
    let misspelt = block.replacen("poll_max", "pol_max", 1);
    assert!(read(&misspelt).unwrap_err().contains("pol_max"));
}

/// `UPDATE_DOCS=1 cargo test -p rouse-host --lib` writes them.
#[test]
fn the_tables_of_the_page_are_those_of_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/configuration.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let mut wanted = page.clone();
    let mut tables = tables_of_the_file();
    tables.push(described::<()>("environment", "", Environment::VARIABLES));
    for Described { name, rows, .. } in tables {
        let first = match name {
            "environment" => "Variable",
            _ => "Key",
        };
        let head = format!("| {first} | Default | Values | Meaning |\n|---|---|---|---|");
        let table = format!("{head}\n{}", rows.join("\n"));
        let (start, end) = (
            format!("<!-- {name}: from the code -->\n"),
            "\n<!-- end -->",
        );
        let (before, rest) = wanted.split_once(&start).expect("the table has a start");
        let (_, after) = rest.split_once(end).expect("the table has an end");
        wanted = format!("{before}{start}\n{table}\n{end}{after}");
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    } else {
        assert!(
            page == wanted,
            "{} does not match the code; write it with UPDATE_DOCS=1 cargo test -p rouse-host --lib",
            path.display()
        );
    }
}

#[test]
fn defaults_are_within_their_bounds() {
    fn check<T: Settable>() {
        for setting in T::SETTINGS.iter().filter(|it| it.has_fixed_default()) {
            let mut table = Overlay::<T>::default();
            table.insert(setting, setting.default());
            assert_eq!(table.check("default"), Ok(()));
        }
    }
    check::<HostSettings>();
    check::<Policy>();
    check::<Limits>();
    check::<StateQuota>();
    check::<SqlLimits>();
    check::<Quota>();
}
