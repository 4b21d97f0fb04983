//! Pages of the documentation whose code blocks the tests run.

use std::path::Path;

use tokio_postgres::{Client, SimpleQueryMessage, SimpleQueryRow};

/// One block of code, in the order of the page.
#[derive(Debug)]
pub(crate) struct Block {
    /// The word after the backticks: `console`, `sql`, `text` …
    pub(crate) kind: String,
    /// Its contents, with line breaks.
    pub(crate) text: String,
    /// The prose between the previous block and this one, on one line.
    pub(crate) before: String,
    /// The line of the page on which it starts.
    pub(crate) line: usize,
}

/// The root of the repository.
pub(crate) fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The blocks of the page at this path in the repository.
pub(crate) fn blocks(page: &str) -> Vec<Block> {
    let text = std::fs::read_to_string(repository().join(page))
        .unwrap_or_else(|why| panic!("{page}: {why}"));
    let mut blocks: Vec<Block> = Vec::new();
    let (mut before, mut open) = (String::new(), None::<Block>);
    for (number, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => block.text += &format!("{line}\n"),
            (Some(kind), None) => {
                open = Some(Block {
                    kind: kind.to_owned(),
                    text: String::new(),
                    before: std::mem::take(&mut before),
                    line: number + 1,
                });
            }
            (None, None) => before += &format!("{} ", line.trim()),
        }
    }
    assert!(open.is_none(), "{page} ends inside a block");
    blocks
}

/// The text of each block of this kind on a page.
pub(crate) fn blocks_of(page: &str, kind: &str) -> Vec<String> {
    let blocks = blocks(page).into_iter();
    let blocks = blocks.filter(|block| block.kind == kind);
    blocks.map(|block| block.text).collect()
}

/// True if a line matches a line on a page: `…` matches any text, and runs of spaces match each other.
pub(crate) fn is_as_shown(line: &str, shown: &str) -> bool {
    let plain = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (line, shown) = (plain(line), plain(shown));
    let mut parts = shown.split('…').map(str::trim);
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = line.strip_prefix(first) else {
        return false;
    };
    let others: Vec<&str> = parts.collect();
    let Some((last, between)) = others.split_last() else {
        return rest.is_empty();
    };
    for part in between {
        match rest.split_once(part) {
            Some((_, behind)) => rest = behind,
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Asserts that the lines of a `text` block appear in the printed output, in this order.
pub(crate) fn assert_shown(printed: &str, block: &Block) {
    let mut lines = printed.lines();
    for shown in block.text.lines().filter(|line| !line.trim().is_empty()) {
        assert!(
            lines.any(|line| is_as_shown(line, shown)),
            "{shown:?} from line {} of the page is missing or out of order in:\n{printed}",
            block.line
        );
    }
}

/// Runs the statements of an `sql` block one by one. If a comment follows a statement, the first row must match it: a
/// value, or several in parentheses.
pub(crate) async fn run_sql(client: &Client, block: &Block) {
    for (statement, shown) in statements(&block.text) {
        let rows = client.simple_query(&statement).await;
        let rows = rows.unwrap_or_else(|why| panic!("line {}: {statement}: {why:?}", block.line));
        let Some(shown) = shown else { continue };
        let first = rows.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(as_text(row)),
            _ => None,
        });
        let first = first.unwrap_or_else(|| panic!("line {}: no row: {statement}", block.line));
        assert!(
            is_as_shown(&first, &shown),
            "line {}: {statement} is {first}, not {shown}",
            block.line
        );
    }
}

/// The statements of a text, each with the comment that follows it. Semicolons between `$$` do not end a statement.
fn statements(sql: &str) -> Vec<(String, Option<String>)> {
    let mut statements = Vec::new();
    let (mut statement, mut quoted) = (String::new(), false);
    for line in sql.lines() {
        let (code, comment) = match line.split_once(";  ") {
            Some((code, rest)) => (format!("{code};"), rest.trim().strip_prefix("-- ")),
            None => (line.to_owned(), None),
        };
        statement += &format!("{code}\n");
        quoted ^= code.matches("$$").count() % 2 == 1;
        if !quoted && code.ends_with(';') {
            statements.push((std::mem::take(&mut statement), comment.map(str::to_owned)));
        }
    }
    assert!(
        statement.trim().is_empty(),
        "unterminated statement: {statement}"
    );
    statements
}

fn as_text(row: &SimpleQueryRow) -> String {
    let values = (0..row.len()).map(|column| row.get(column).unwrap_or_default());
    let values = values.collect::<Vec<_>>().join(",");
    match row.len() {
        1 => values,
        _ => format!("({values})"),
    }
}

#[test]
fn statements_end_at_semicolons_outside_of_functions() {
    let sql = "SELECT 1;    -- 1\n\nCREATE FUNCTION f() AS $$\nBEGIN\n    RETURN;\nEND\n$$;\nSELECT a,\n    b;  -- (2,)\n";
    let found = statements(sql);
    let shown: Vec<_> = found.iter().map(|(_, shown)| shown.as_deref()).collect();
    assert_eq!(shown, [Some("1"), None, Some("(2,)")]);
    assert!(found[1].0.ends_with("END\n$$;\n"), "{found:?}");
}

#[test]
fn a_line_is_compared_with_the_line_on_the_page() {
    for (line, shown) in [
        (" state         failed", "state  failed"),
        (
            "job 8  a.b  failed after 3 ms, attempt 1 of 8",
            "job 8  a.b  failed after …, attempt 1 of 8",
        ),
        (
            "ready:    2 handlers from /tmp/shop/handlers-wasm",
            "ready: 2 handlers from …/shop/handlers-wasm",
        ),
        ("2 passed; 0 failed", "…2 passed…"),
    ] {
        assert!(is_as_shown(line, shown), "{line:?} is {shown:?}");
    }
    for (line, shown) in [
        ("state succeeded", "state failed"),
        ("attempt 1 of 8, next", "attempt 1 of 8"),
        ("the attempt 1 of 8", "attempt 1…"),
        ("12 passed; 1 failed", "…passed; 0…"),
    ] {
        assert!(
            !is_as_shown(line, shown),
            "{line:?} does not match {shown:?}"
        );
    }
}
