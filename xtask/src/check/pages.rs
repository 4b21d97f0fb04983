//! Checks what the pages promise as far as it is cheap: links, cargo xtask commands, the README's handlers.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::CommandFactory as _;

use crate::Cli;

pub(crate) fn check(root: &Path) -> Result<()> {
    let mut pages = files(root, "md", false)?;
    for folder in ["docs", "examples", "handlers", "sdk"] {
        pages.extend(files(&root.join(folder), "md", true)?);
    }
    let readme = root.join("README.md");
    if !pages.contains(&readme) {
        bail!("README.md is missing");
    }
    let mut sources = files(&root.join("examples"), "rs", true)?;
    sources.extend(files(&root.join("handlers"), "rs", true)?);
    let sources = sources.iter().map(read).collect::<Result<Vec<_>>>()?;

    let mut faults = Vec::new();
    for page in pages {
        let text = read(&page)?;
        let mut found = broken_links(&text, |link| {
            page.parent().unwrap_or(root).join(link).exists()
        });
        found.extend(unknown_commands(&text));
        found.extend(rebuilds(&text));
        if page == readme {
            found.extend(foreign_handlers(&text, &sources));
        }
        let name = page.strip_prefix(root).unwrap_or(&page).display();
        faults.extend(found.into_iter().map(|fault| format!("{name}: {fault}")));
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("; "));
    }
    Ok(())
}

/// Links to files of the clone that are not there.
fn broken_links(text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(link, _)| link.split('#').next().unwrap_or(link))
        .filter(|link| !link.is_empty() && !link.contains(':') && !exists(link))
        .map(|link| format!("the link to {link} leads nowhere"))
        .collect()
}

/// `cargo xtask …` commands, in code blocks or in backticks, that xtask does not have.
fn unknown_commands(text: &str) -> Vec<String> {
    let cli = Cli::command();
    text.split("cargo xtask ")
        .skip(1)
        .filter_map(|rest| {
            let end = rest
                .find(|c: char| !c.is_ascii_lowercase())
                .unwrap_or(rest.len());
            let name = &rest[..end];
            (!name.is_empty() && cli.find_subcommand(name).is_none())
                .then(|| format!("there is no `cargo xtask {name}`"))
        })
        .collect()
}

/// Commands that build the host with other features than the tests and the demo do, and so once more.
fn rebuilds(text: &str) -> Option<String> {
    text.contains("cargo run -p rouse-host -- ").then(|| {
        "`cargo run -p rouse-host` builds the host once more; write target/debug/rouse".to_owned()
    })
}

/// Blocks of Rust that are no part of a file that is compiled.
fn foreign_handlers(text: &str, sources: &[String]) -> Vec<String> {
    text.split("```rust\n")
        .skip(1)
        .filter_map(|rest| rest.split_once("```"))
        .map(|(block, _)| block.trim())
        .filter(|block| !sources.iter().any(|source| source.contains(block)))
        .map(|block| {
            let first = block.lines().next().unwrap_or_default();
            format!(
                "the block that starts with `{first}` is in no file under examples/ or handlers/"
            )
        })
        .collect()
}

/// Files with one extension; none where the folder is not there.
fn files(folder: &Path, extension: &str, deep: bool) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if !folder.exists() {
        return Ok(found);
    }
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() && deep && !path.ends_with("target") {
            found.extend(files(&path, extension, deep)?);
        } else if path.extension().is_some_and(|there| there == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_to_a_missing_file_is_a_fault_and_links_elsewhere_are_none() {
        let text = "[a](there.md#part) [b](gone.md) [c](https://example.com/x) [d](#here)";
        assert_eq!(
            broken_links(text, |link| link == "there.md"),
            ["the link to gone.md leads nowhere"]
        );
    }

    #[test]
    fn a_command_that_xtask_does_not_have_is_a_fault() {
        let text = "Run `cargo xtask demo`, then\n```sh\ncargo xtask tset -- --nocapture\n```";
        assert_eq!(unknown_commands(text), ["there is no `cargo xtask tset`"]);
    }

    #[test]
    fn a_command_that_builds_the_host_once_more_is_a_fault() {
        assert!(rebuilds("cargo run -p rouse-host -- dev").is_some());
        assert!(rebuilds("target/debug/rouse dev").is_none());
    }

    #[test]
    fn rust_in_the_readme_must_stand_in_a_compiled_file() {
        let text = "```rust\nfn kept() {}\n```\n```rust\nfn drifted() {}\n```";
        let sources = ["//! x\n\nfn kept() {}\n".to_owned()];
        assert_eq!(
            foreign_handlers(text, &sources),
            [
                "the block that starts with `fn drifted() {}` is in no file under examples/ or handlers/"
            ]
        );
    }
}
