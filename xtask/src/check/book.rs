//! Builds the book of docs/ with mdBook. A page that SUMMARY.md lists and that does not exist, or a page that mdBook cannot read,
//! fails.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use rouse_workbench::workspace::Workspace;

/// Pinned, so that a new release changes nothing until its pages were looked at. 0.5.4 builds with Rust 1.88 and newer.
const MDBOOK_VERSION: &str = "0.5.4";

/// Builds the book into cargo's output folder, where it can be read.
pub(crate) fn check(workspace: &Workspace, install: bool) -> Result<()> {
    let docs = workspace.root.join("docs");
    let mdbook = mdbook(install)?;
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
    // mdBook only warns of what it cannot read as the author meant it.
    let warnings: Vec<&str> = log.lines().filter(|line| is_warning(line)).collect();
    ensure!(
        warnings.is_empty(),
        "`mdbook build docs` warned\n{}",
        warnings.join("\n")
    );
    has_every_page(&docs, &book)
}

fn is_warning(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("WARN") || line.starts_with("ERROR")
}

/// Each page that SUMMARY.md lists was rendered.
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

/// The program: on PATH in the pinned version, else in our cache, else installed there if `install` is set.
fn mdbook(install: bool) -> Result<PathBuf> {
    let tools = tools_dir()?;
    let cached = tools.join("bin/mdbook");
    let expected = format!("mdbook v{MDBOOK_VERSION}");
    for candidate in [PathBuf::from("mdbook"), cached.clone()] {
        let found = Command::new(&candidate).arg("--version").output();
        if found.is_ok_and(|output| output.stdout.trim_ascii() == expected.as_bytes()) {
            return Ok(candidate);
        }
    }
    ensure!(
        install,
        "mdbook {MDBOOK_VERSION} is missing: run `cargo xtask check --install`, \
         or `cargo install mdbook --locked --no-default-features --version {MDBOOK_VERSION}`"
    );
    eprintln!(
        "installing mdbook {MDBOOK_VERSION} into {}",
        tools.display()
    );
    // Unoptimised, and without its web server and its search: about 45 s of CPU time. It then builds the book in 0.3 s.
    let status = Command::new("cargo")
        .args([
            "install",
            "mdbook",
            "--locked",
            "--debug",
            "--no-default-features",
        ])
        .args(["--force", "--version", MDBOOK_VERSION, "--root"])
        .arg(&tools)
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        // Its build uses neither our target folder nor our lint flags.
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("RUSTFLAGS")
        .status()
        .context("start cargo install")?;
    ensure!(status.success(), "mdbook could not be installed: see above");
    Ok(cached)
}

fn tools_dir() -> Result<PathBuf> {
    let cache = match std::env::var_os("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => std::env::home_dir()
            .context("there is no home directory: set XDG_CACHE_HOME")?
            .join(".cache"),
    };
    Ok(cache.join("rouse/tools"))
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
