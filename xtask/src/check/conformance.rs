//! Checks that docs/conformance.md has every row of the specification, and names only files and tests that exist.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

const TABLE: &str = "docs/conformance.md";

/// The letters of the specification's parts, with the number of rows of each.
const PARTS: [(char, u32); 9] = [
    ('C', 9),
    ('H', 10),
    ('A', 11),
    ('S', 7),
    ('D', 7),
    ('Q', 10),
    ('B', 10),
    ('F', 8),
    ('O', 7),
];

/// Row, requirement, how to see it, code, tests.
const COLUMNS: usize = 5;

pub(crate) fn check(root: &Path) -> Result<()> {
    let text = fs::read_to_string(root.join(TABLE)).with_context(|| format!("read {TABLE}"))?;
    let has_test = |file: &str, name: &str| has_test(&root.join(file), name);
    let faults = faults(&text, |file| root.join(file).exists(), has_test);
    if !faults.is_empty() {
        bail!("{TABLE}: {}", faults.join("; "));
    }
    Ok(())
}

/// True if the file exists and defines this function.
fn has_test(file: &Path, name: &str) -> bool {
    fs::read_to_string(file).is_ok_and(|code| code.contains(&format!("fn {name}(")))
}

fn faults(
    text: &str,
    exists: impl Fn(&str) -> bool,
    has_test: impl Fn(&str, &str) -> bool,
) -> Vec<String> {
    let rows: Vec<Vec<&str>> = text.lines().filter_map(cells).collect();
    let mut faults = Vec::new();
    for (part, count) in PARTS {
        for number in 1..=count {
            let id = format!("{part}{number}");
            match rows.iter().filter(|row| row[0] == id).count() {
                0 => faults.push(format!("row {id} is missing")),
                1 => {}
                _ => faults.push(format!("row {id} is repeated")),
            }
        }
    }
    for row in rows {
        if row.len() != COLUMNS {
            let count = row.len();
            faults.push(format!("row {} has {count} cells, not {COLUMNS}", row[0]));
        }
        for (file, name) in row.iter().flat_map(|cell| tests(cell)) {
            if !has_test(&file, name) {
                faults.push(format!(
                    "row {} names the test {name}, which is not in {file}",
                    row[0]
                ));
            }
        }
        for file in row.iter().flat_map(|cell| files(cell)) {
            if !exists(file) {
                faults.push(format!("row {} names {file}, which does not exist", row[0]));
            }
        }
    }
    faults
}

/// The cells of a row of the table. `None` for its header and for other lines.
fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    let cells: Vec<_> = inner.split('|').map(str::trim).collect();
    let (letter, number) = cells[0].split_at_checked(1)?;
    let is_id =
        letter.starts_with(|c: char| c.is_ascii_uppercase()) && number.parse::<u32>().is_ok();
    is_id.then_some(cells)
}

/// The tests named in backticks, each with its file: `module::name` is in `tests/it`; other tests are followed by their
/// file, as in "`one` and `another` in `path`". A function that is not a test has parentheses: `module::name()`.
fn tests(cell: &str) -> Vec<(String, &str)> {
    let is_word = |text: &str| {
        text.bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    };
    let parts: Vec<&str> = cell.split('`').collect();
    let mut found = Vec::new();
    let mut file_after = None;
    // From the end, because a file follows its tests.
    for at in (1..parts.len()).step_by(2).rev() {
        file_after = match parts.get(at + 1).map(|text| text.trim()) {
            Some("in") => parts.get(at + 2).copied(),
            Some("and") => file_after,
            _ => None,
        };
        let (file, name) = match (parts[at].rsplit_once("::"), file_after) {
            (Some((module, name)), _) if module.split("::").all(is_word) => {
                (format!("tests/it/{}.rs", module.replace("::", "/")), name)
            }
            (None, Some(file)) => (file.to_owned(), parts[at]),
            (Some(_) | None, _) => continue,
        };
        if is_word(name) {
            found.push((file, name));
        }
    }
    found
}

/// The paths in backticks: words that end with a slash or with a file extension of the clone.
fn files(cell: &str) -> impl Iterator<Item = &str> {
    const ENDINGS: [&str; 7] = [".rs", ".sql", ".wit", ".md", ".toml", ".sh", ".html"];
    cell.split('`')
        .skip(1)
        .step_by(2)
        .filter(|code| !code.contains(char::is_whitespace))
        .filter(|code| ENDINGS.iter().any(|ending| code.ends_with(ending)) || code.ends_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole_table() -> String {
        PARTS
            .iter()
            .flat_map(|(part, count)| {
                (1..=*count).map(move |n| format!("| {part}{n} | w | not yet | | |\n"))
            })
            .collect()
    }

    #[test]
    fn a_table_with_every_row_has_no_faults() {
        assert_eq!(
            faults(&whole_table(), |_| false, |_, _| false),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_missing_and_a_repeated_row_are_faults() {
        let table = whole_table().replace("| Q10 |", "| Q9 |");
        assert_eq!(
            faults(&table, |_| true, |_, _| true),
            ["row Q9 is repeated", "row Q10 is missing"]
        );
    }

    #[test]
    fn a_row_without_all_its_cells_is_a_fault() {
        let table = whole_table().replace("| C1 | w | not yet | | |", "| C1 | w | not yet | |");
        assert_eq!(
            faults(&table, |_| true, |_, _| true),
            ["row C1 has 4 cells, not 5"]
        );
    }

    #[test]
    fn a_file_that_does_not_exist_is_a_fault_and_other_code_is_not() {
        let table = whole_table().replace(
            "| C1 | w | not yet | | |",
            "| C1 | w | `rouse dev` | `host/src/cli/dev.rs`, `host/src/gone.rs` | `it::a_test` |",
        );
        assert_eq!(
            faults(&table, |file| file == "host/src/cli/dev.rs", |_, _| true),
            ["row C1 names host/src/gone.rs, which does not exist"]
        );
    }

    #[test]
    fn a_test_that_does_not_exist_is_a_fault() {
        let table = whole_table().replace(
            "| C1 | w | not yet | | |",
            "| C1 | w | see | `job::decide()` | `it::a_test`, `it::another` |",
        );
        assert_eq!(
            faults(&table, |_| true, |_, name| name == "a_test"),
            ["row C1 names the test another, which is not in tests/it/it.rs"]
        );
    }

    #[test]
    fn a_test_in_a_file_that_does_not_exist_is_not_a_test() {
        let this = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/check/conformance.rs");
        let test = "a_test_in_a_file_that_does_not_exist_is_not_a_test";
        assert!(has_test(&this, test));
        assert!(!has_test(&this, "another"));
        assert!(!has_test(&this.with_file_name("gone.rs"), test));
    }

    #[test]
    fn each_test_is_found_with_its_file() {
        let cell = "`a::b` in every way, `a::c::d`, `one` and `two` in `x.rs`: `rouse dev`, `three` in `y.rs`; `four` and `y.rs`";
        let file = |(file, name)| format!("{file} {name}");
        let found: Vec<String> = tests(cell).into_iter().rev().map(file).collect();
        let expected = [
            "tests/it/a.rs b",
            "tests/it/a/c.rs d",
            "x.rs one",
            "x.rs two",
            "y.rs three",
        ];
        assert_eq!(found, expected);
    }
}
