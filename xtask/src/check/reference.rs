//! Holds reference pages against the code: the functions that people are granted, and the metrics.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, bail};

use super::pages::{files, read};

const GRANTS: &str = "migrations/functions/grants.sql";
const SQL: &str = "docs/reference/sql.md";
const METRICS: &str = "docs/reference/metrics.md";

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
        faults.push(format!("{METRICS} lists {name}, which no host counts"));
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("; "));
    }
    Ok(())
}

/// The functions that others than workers may call. Those of workers belong to the host, and names that start with `_` to other
/// functions.
fn granted(grants: &str) -> BTreeSet<&str> {
    grants
        .split("GRANT EXECUTE ON FUNCTION")
        .skip(1)
        .filter_map(|rest| rest.split(';').next()?.split_once(" TO "))
        .filter(|(_, roles)| roles.trim() != "rouse_worker")
        .flat_map(|(functions, _)| functions.split("rouse.").skip(1))
        .map(name_at_the_start)
        .filter(|name| !name.starts_with('_'))
        .collect()
}

/// The metrics that the code makes.
fn counted(code: &str) -> BTreeSet<&str> {
    ["counter!(\"", "gauge!(\"", "histogram!(\""]
        .iter()
        .flat_map(|kind| code.split(kind).skip(1))
        .map(name_at_the_start)
        .filter(|name| name.starts_with("rouse_"))
        .collect()
}

/// The metrics that a row of the page starts with.
fn listed(page: &str) -> BTreeSet<&str> {
    page.lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .map(name_at_the_start)
        .filter(|name| name.starts_with("rouse_"))
        .collect()
}

fn name_at_the_start(text: &str) -> &str {
    let is_of_a_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    text.split(|c| !is_of_a_name(c)).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_workers_and_inner_ones_are_not_for_people() {
        let grants = "GRANT EXECUTE ON FUNCTION rouse.enqueue, rouse.cancel TO rouse_producer, rouse_operator;\n\
                      GRANT EXECUTE ON FUNCTION\n    rouse.claim,\n    rouse.depth\n    TO rouse_worker;\n\
                      GRANT EXECUTE ON FUNCTION rouse.depth, rouse._usage\n    TO rouse_observer;\n\
                      GRANT SELECT ON rouse.jobs TO rouse_observer;";
        let functions = ["cancel", "depth", "enqueue"];
        assert_eq!(granted(grants), BTreeSet::from(functions));
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
