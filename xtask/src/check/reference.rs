//! Checks reference pages against the code: the functions that users may call, metrics, kinds of errors and SQLSTATEs.
//! Also checks the kinds in the READMEs of the handlers.
//!
//! Unit tests of the host check the tables of docs/reference/configuration.md and docs/reference/cli.md.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, bail, ensure};

use super::pages::{files, read};

const GRANTS: &str = "migrations/functions/grants.sql";
const SQL: &str = "docs/reference/sql.md";
const METRICS: &str = "docs/reference/metrics.md";
const KINDS: &str = "host/src/job/error.rs";
const FUNCTIONS: &str = "migrations/functions";
const ERRORS: &str = "docs/reference/errors.md";
const SDK: &str = "sdk/src";

/// The SQLSTATEs that functions raise by their names in PL/pgSQL.
const CONDITIONS: [(&str, &str); 15] = [
    ("check_violation", "23514"),
    ("duplicate_function", "42723"),
    ("feature_not_supported", "0A000"),
    ("insufficient_privilege", "42501"),
    ("invalid_parameter_value", "22023"),
    ("invalid_schema_name", "3F000"),
    ("invalid_transaction_state", "25000"),
    ("lock_not_available", "55P03"),
    ("no_data_found", "P0002"),
    ("object_not_in_prerequisite_state", "55000"),
    ("program_limit_exceeded", "54000"),
    ("serialization_failure", "40001"),
    ("too_many_arguments", "54023"),
    ("undefined_object", "42704"),
    ("unique_violation", "23505"),
];
/// SQLSTATEs that no caller sees: the functions that raise the first two catch them, and the last one is a bug in Rouse.
const INTERNAL: [&str; 3] = ["RDROP", "RKEPT", "internal_error"];

pub(crate) fn check(root: &Path) -> Result<()> {
    let mut faults = Vec::new();
    let page = read(root.join(SQL))?;
    for name in granted(&read(root.join(GRANTS))?) {
        if !page.contains(&format!("\n| `rouse.{name}(")) {
            faults.push(format!("{SQL} does not list rouse.{name}"));
        }
    }
    let mut code = String::new();
    for file in files(&root.join("host/src"), "rs", true)? {
        code += &read(file)?;
    }
    let page = read(root.join(METRICS))?;
    let (counted, listed) = (counted(&code), listed(&page));
    for name in counted.difference(&listed) {
        faults.push(format!("{METRICS} does not list {name}"));
    }
    for name in listed.difference(&counted) {
        faults.push(format!("{METRICS} lists {name}, which is not in host/src"));
    }
    faults.extend(errors(root)?);
    faults.extend(guest_kinds(root)?);
    faults.extend(kinds_of_handlers(root)?);
    if !faults.is_empty() {
        bail!("{}", faults.join("; "));
    }
    Ok(())
}

/// Rows that the page of errors lacks, and rows that nothing in the code corresponds to.
fn errors(root: &Path) -> Result<Vec<String>> {
    let page = read(root.join(ERRORS))?;
    let rows: BTreeSet<&str> = page.lines().filter_map(first_cell).collect();
    let code = read(root.join(KINDS))?;
    let kinds = kinds(&code);
    ensure!(!kinds.is_empty(), "{KINDS} has no enum ErrorKind");
    let missing = kinds.into_iter().filter(|kind| !rows.contains(&**kind));
    let mut faults: Vec<String> = missing
        .map(|kind| format!("{ERRORS} does not list {kind}"))
        .collect();
    let mut sql = String::new();
    for file in files(&root.join(FUNCTIONS), "sql", false)? {
        sql += &read(file)?;
    }
    let raised = states(&sql);
    let listed = rows.iter().copied().filter(|row| is_state(row));
    let listed: BTreeSet<&str> = listed.collect();
    for state in raised.difference(&listed) {
        faults.push(format!("{ERRORS} does not list {state}"));
    }
    for state in listed.difference(&raised) {
        faults.push(format!("{ERRORS} lists {state}, which no function raises"));
    }
    Ok(faults)
}

/// Kinds of the SDK that the page of errors lacks, and kinds of the SDK, the handlers and the examples that are not in
/// snake case.
fn guest_kinds(root: &Path) -> Result<BTreeSet<String>> {
    let page = read(root.join(ERRORS))?;
    let listed = listed_kinds(&page);
    let mut of_sdk = BTreeSet::new();
    let mut faults = BTreeSet::new();
    for folder in [SDK, "handlers", "examples"] {
        for file in files(&root.join(folder), "rs", true)? {
            for kind in given_kinds(&read(file)?) {
                if leading_name(kind) != kind {
                    faults.insert(format!("the kind {kind} in {folder} is not in snake case"));
                }
                if folder == SDK {
                    of_sdk.insert(kind.to_owned());
                }
            }
        }
    }
    ensure!(!of_sdk.is_empty(), "no error in {SDK} has a kind");
    let missing = of_sdk.iter().filter(|kind| !listed.contains(&***kind));
    faults.extend(missing.map(|kind| format!("{ERRORS} does not list {kind}, a kind of the SDK")));
    Ok(faults)
}

/// Kinds of handlers that their READMEs lack, and kinds that READMEs list although no error has them.
fn kinds_of_handlers(root: &Path) -> Result<Vec<String>> {
    let mut sdk = String::new();
    for file in files(&root.join(SDK), "rs", true)? {
        sdk += &read(file)?;
    }
    let mut faults = Vec::new();
    for readme in files(&root.join("handlers"), "md", true)? {
        let mut code = String::new();
        for file in files(&readme.with_file_name("src"), "rs", true)? {
            // Tests imitate errors of the host.
            if !file.ends_with("tests.rs") {
                code += &read(file)?;
            }
        }
        let page = read(&readme)?;
        let name = readme.strip_prefix(root).unwrap_or(&readme).display();
        let (given, listed) = (given_kinds(&code), readme_kinds(&page));
        for kind in given.difference(&listed) {
            faults.push(format!("{name} does not list {kind}"));
        }
        for kind in unknown_kinds(&listed, &given, &given_kinds(&sdk)) {
            faults.push(format!(
                "{name} lists {kind}, but no error of the handler or of the SDK has this kind"
            ));
        }
    }
    Ok(faults)
}

/// The kinds in the first cells of the tables in the section about errors.
fn readme_kinds(page: &str) -> BTreeSet<&str> {
    let (_, section) = page.split_once("\n## Errors\n").unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows.filter_map(|row| row.split_once(" |"));
    cells
        .flat_map(|(cell, _)| cell.split('`').step_by(2))
        .filter(|kind| !kind.is_empty() && leading_name(kind) == *kind)
        .collect()
}

/// The kinds that a README lists, but that no error in the code of its handler or of the SDK has. The kinds of HTTP
/// statuses are known, because the code derives them from the numbers.
fn unknown_kinds<'a>(
    listed: &BTreeSet<&'a str>,
    given: &BTreeSet<&str>,
    of_sdk: &BTreeSet<&str>,
) -> Vec<&'a str> {
    let is_status = |kind: &str| {
        let status = kind.strip_prefix("http_");
        status.is_some_and(|status| status.parse::<u16>().is_ok())
    };
    let is_known = |kind: &str| given.contains(kind) || of_sdk.contains(kind) || is_status(kind);
    let all = listed.iter().copied();
    all.filter(|kind| !is_known(kind)).collect()
}

/// The kinds that code gives to errors, except in comments.
fn given_kinds(code: &str) -> BTreeSet<&str> {
    code.lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| line.split(".kind(\"").skip(1))
        .filter_map(|rest| rest.split_once('"'))
        .map(|(kind, _)| kind)
        .collect()
}

/// The kinds in the first cells of the table of the SDK's kinds.
fn listed_kinds(page: &str) -> BTreeSet<&str> {
    let (_, section) = page
        .split_once("\n### Kinds of the SDK\n")
        .unwrap_or_default();
    let (section, _) = section.split_once("\n## ").unwrap_or_default();
    let cells = section.lines().filter_map(first_cell);
    cells.flat_map(|cell| cell.split("`, `")).collect()
}

/// The variants of `ErrorKind`, in snake case.
fn kinds(code: &str) -> Vec<String> {
    let (_, body) = code.split_once("pub enum ErrorKind {").unwrap_or_default();
    let (body, _) = body.split_once("\n}").unwrap_or_default();
    let variants = body
        .lines()
        .filter_map(|line| line.trim().strip_suffix(','));
    variants
        .map(|variant| {
            let mut kind = String::new();
            for (at, c) in variant.char_indices() {
                if c.is_ascii_uppercase() && at > 0 {
                    kind.push('_');
                }
                kind.push(c.to_ascii_lowercase());
            }
            kind
        })
        .collect()
}

/// The SQLSTATEs that functions raise; a name that [`CONDITIONS`] lacks stays as it is.
fn states(sql: &str) -> BTreeSet<&str> {
    sql.split("ERRCODE = '")
        .skip(1)
        .filter_map(|rest| rest.split_once('\''))
        .map(|(state, _)| state)
        .filter(|state| !INTERNAL.contains(state))
        .map(|state| {
            let condition = CONDITIONS.iter().find(|(name, _)| *name == state);
            condition.map_or(state, |&(_, code)| code)
        })
        .collect()
}

/// True for five digits and capital letters.
fn is_state(cell: &str) -> bool {
    let mut bytes = cell.bytes();
    cell.len() == 5 && bytes.all(|byte| byte.is_ascii_digit() || byte.is_ascii_uppercase())
}

/// The first cell of a row, without backticks.
fn first_cell(line: &str) -> Option<&str> {
    let (cell, _) = line.strip_prefix("| ")?.split_once(" |")?;
    Some(cell.trim_matches('`'))
}

/// The functions that users may call. Only the host calls those granted to workers alone, and only other functions call
/// those whose names start with `_`.
fn granted(grants: &str) -> BTreeSet<&str> {
    grants
        .split("GRANT EXECUTE ON FUNCTION")
        .skip(1)
        .filter_map(|rest| rest.split(';').next()?.split_once(" TO "))
        .filter(|(_, roles)| roles.trim() != "rouse_worker")
        .flat_map(|(functions, _)| functions.split("rouse.").skip(1))
        .map(leading_name)
        .filter(|name| !name.starts_with('_'))
        .collect()
}

/// The metrics that the code records.
fn counted(code: &str) -> BTreeSet<&str> {
    ["counter!(\"", "gauge!(\"", "histogram!(\""]
        .iter()
        .flat_map(|kind| code.split(kind).skip(1))
        .map(leading_name)
        .filter(|name| name.starts_with("rouse_"))
        .collect()
}

/// The metrics at the start of the page's rows.
fn listed(page: &str) -> BTreeSet<&str> {
    page.lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .map(leading_name)
        .filter(|name| name.starts_with("rouse_"))
        .collect()
}

fn leading_name(text: &str) -> &str {
    let is_name_char = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    text.split(|c| !is_name_char(c)).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_for_workers_and_internal_functions_need_no_row() {
        let grants = "GRANT EXECUTE ON FUNCTION rouse.enqueue, rouse.cancel TO rouse_producer, rouse_operator;\n\
                      GRANT EXECUTE ON FUNCTION\n    rouse.claim,\n    rouse.depth\n    TO rouse_worker;\n\
                      GRANT EXECUTE ON FUNCTION rouse.depth, rouse._usage\n    TO rouse_observer;\n\
                      GRANT SELECT ON rouse.jobs TO rouse_observer;";
        let functions = ["cancel", "depth", "enqueue"];
        assert_eq!(granted(grants), BTreeSet::from(functions));
    }

    #[test]
    fn kinds_and_states_are_found_in_code_and_in_rows() {
        let code = "pub enum ErrorKind {\n    /// It panicked, badly.\n    Panic,\n    OutOfCpu,\n}\nenum Other { A, }";
        assert_eq!(kinds(code), ["panic", "out_of_cpu"]);
        let sql = "USING ERRCODE = 'RW001', HINT = 'x'; USING ERRCODE = 'no_data_found'; -- RW002\n\
                   USING ERRCODE = 'RDROP'; USING ERRCODE = 'disk_full'";
        assert_eq!(states(sql), BTreeSet::from(["RW001", "P0002", "disk_full"]));
        assert!(is_state("0A000") && is_state("RW001"));
        assert!(!is_state("200") && !is_state("panic"));
        assert_eq!(first_cell("| `panic` | it panicked |"), Some("panic"));
        assert_eq!(first_cell("| RW001 | x |"), Some("RW001"));
        assert_eq!(first_cell("no row"), None);
    }

    #[test]
    fn kinds_of_guests_are_found_in_code_and_in_rows() {
        let code = "/// Error::permanent(why).kind(\"of-a-page\")\n\
                    Error::permanent(why).kind(\"no_parent\"); error.kind() == x\n    .kind(\"in-step\")\n";
        assert_eq!(given_kinds(code), BTreeSet::from(["no_parent", "in-step"]));
        let page = "| `early` | x |\n### Kinds of the SDK\n\n| `a` | x |\n| `b_c`, `d` | `e` |\n\n\
                    ## Next\n\n| `f` | x |\n";
        assert_eq!(listed_kinds(page), BTreeSet::from(["a", "b_c", "d"]));
    }

    #[test]
    fn kinds_of_readmes_are_those_of_the_handler_the_sdk_and_statuses() {
        let page = "A `word`.\n\n| `field` | x |\n\n## Errors\n\n| error | why |\n|---|---|\n| `own` | `other` |\n\
                    | `stale`, `denied` | x |\n| `http_404` and others | x |\n| `http_timeout` | x |\n\n## Next\n\n| `f` | x |\n";
        let listed = readme_kinds(page);
        let all = ["denied", "http_404", "http_timeout", "own", "stale"];
        assert_eq!(listed, BTreeSet::from(all));
        let (given, of_sdk) = (BTreeSet::from(["own"]), BTreeSet::from(["denied"]));
        let unknown = unknown_kinds(&listed, &given, &of_sdk);
        assert_eq!(unknown, ["http_timeout", "stale"]);
        assert_eq!(readme_kinds("# noop\n\n| `n` | x |\n"), BTreeSet::new());
    }

    #[test]
    fn metrics_are_found_in_code_and_in_rows() {
        let code =
            r#"counter!("rouse_a_total", "x" => y); gauge!("rouse_b").set(1); "rouse_worker""#;
        assert_eq!(counted(code), BTreeSet::from(["rouse_a_total", "rouse_b"]));
        let page = "| Metric |\n| `rouse_a_total{x}` | counter | see `rouse_c` |\n| `failed` | |\n";
        assert_eq!(listed(page), BTreeSet::from(["rouse_a_total"]));
    }
}
