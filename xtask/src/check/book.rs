//! Builds the book of docs/ with mdBook. Fails if a page in SUMMARY.md does not exist, or if mdBook cannot parse a
//! page.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use rouse_workbench::workspace::Workspace;

use crate::tool::MDBOOK;

/// Builds the book into `book` in cargo's output folder.
pub(crate) fn check(workspace: &Workspace, install: bool) -> Result<()> {
    let docs = workspace.root.join("docs");
    let mdbook = MDBOOK.find(install)?;
    let book = workspace.target_dir.join("book");
    let output = Command::new(mdbook)
        .arg("build")
        .arg(&docs)
        .arg("--dest-dir")
        .arg(&book)
        .output()
        .context("start mdbook")?;
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("`mdbook build docs` failed\n{}", log.trim());
    }
    // mdBook only warns of markup that it may render differently than the author intended.
    let warnings: Vec<&str> = log.lines().filter(|line| is_warning(line)).collect();
    ensure!(
        warnings.is_empty(),
        "`mdbook build docs` printed warnings\n{}",
        warnings.join("\n")
    );
    has_every_page(&docs, &book)
}

fn is_warning(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("WARN") || line.starts_with("ERROR")
}

/// Fails if a page that SUMMARY.md lists was not rendered.
fn has_every_page(docs: &Path, book: &Path) -> Result<()> {
    let summary = super::pages::read(docs.join("SUMMARY.md"))?;
    let missing: Vec<&str> = super::pages::links(&summary)
        .filter(|page| {
            let rendered = page.strip_suffix("README.md").map_or_else(
                || Path::new(page).with_extension("html"),
                |folder| Path::new(folder).join("index.html"),
            );
            !book.join(rendered).is_file()
        })
        .collect();
    ensure!(
        missing.is_empty(),
        "the book lacks pages that docs/SUMMARY.md lists: {}",
        missing.join(", ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_log_lines_of_warnings_and_errors_are_warnings() {
        assert!(is_warning(" WARN unclosed HTML tag `<id>` found in a.md"));
        assert!(is_warning("ERROR a page cannot be read"));
        assert!(!is_warning(" INFO Book building has started"));
    }

    #[test]
    fn a_listed_page_that_was_not_rendered_is_a_fault() {
        let folder = tempfile::tempdir().unwrap();
        let (docs, book) = (folder.path().join("docs"), folder.path().join("book"));
        for folder in [&docs, &book.join("decisions")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        let summary = "- [A](a.md)\n- [B](b.md)\n- [Decisions](decisions/README.md)\n";
        std::fs::write(docs.join("SUMMARY.md"), summary).unwrap();
        for page in ["a.html", "decisions/index.html"] {
            std::fs::write(book.join(page), "").unwrap();
        }
        let error = has_every_page(&docs, &book).unwrap_err().to_string();
        assert_eq!(
            error,
            "the book lacks pages that docs/SUMMARY.md lists: b.md"
        );
    }
}
