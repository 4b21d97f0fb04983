//! Checks the pages: links and their anchors, cargo xtask commands, the README's handlers, the length of lines, and
//! that docs/SUMMARY.md lists every page.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::CommandFactory as _;

use crate::Cli;

/// Maximum length of a line in a page under docs/, without the targets of its links.
const LINE_CHARS_MAX: usize = 120;

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

    let docs = root.join("docs");
    let mut faults = Vec::new();
    for page in &pages {
        let text = read(page)?;
        let folder = page.parent().unwrap_or(root);
        let mut found = broken_links(&text, |link| folder.join(link).exists());
        found.extend(broken_anchors(&text, |link| match link {
            "" => Some(anchors(&text)),
            link if link.ends_with(".md") => {
                read(folder.join(link)).ok().map(|text| anchors(&text))
            }
            _ => None,
        }));
        found.extend(unknown_commands(&text));
        found.extend(rebuilds(&text));
        if *page == readme {
            found.extend(foreign_handlers(&text, &sources));
        }
        if page.starts_with(&docs) {
            found.extend(long_lines(&text));
        }
        let name = page.strip_prefix(root).unwrap_or(page).display();
        faults.extend(found.into_iter().map(|fault| format!("{name}: {fault}")));
    }
    let in_docs: Vec<_> = pages
        .iter()
        .filter_map(|page| page.strip_prefix(&docs).ok()?.to_str())
        .collect();
    faults.extend(unlisted(&read(docs.join("SUMMARY.md"))?, &in_docs));
    if !faults.is_empty() {
        bail!("{}", faults.join("; "));
    }
    Ok(())
}

/// Links to files of the clone that do not exist.
fn broken_links(text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    links(text)
        .map(|link| link.split('#').next().unwrap_or(link))
        .filter(|link| !link.is_empty() && !exists(link))
        .map(|link| format!("the link to {link} is broken: there is no such file"))
        .collect()
}

/// Links to headings that their page does not have. `anchors_of` returns the anchors of the page at a path, or of this
/// page for an empty path. It returns `None` if there is no page at the path.
fn broken_anchors(text: &str, anchors_of: impl Fn(&str) -> Option<Vec<String>>) -> Vec<String> {
    links(text)
        .filter_map(|link| Some((link, link.split_once('#')?)))
        .filter(|(_, (path, anchor))| {
            anchors_of(path).is_some_and(|known| !known.iter().any(|one| one == anchor))
        })
        .map(|(link, _)| format!("the link to {link} is broken: the page has no such heading"))
        .collect()
}

/// The targets of links within the clone.
pub(super) fn links(text: &str) -> impl Iterator<Item = &str> {
    links_of_any_kind(text).filter(|link| !link.contains(':'))
}

/// The anchors of a page's headings, as GitHub and mdBook generate them: in lower case, with a hyphen for each space,
/// without other punctuation, and numbered if a heading is repeated.
fn anchors(text: &str) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    let headings = prose(text).filter_map(|(_, line)| {
        let level = line.len() - line.trim_start_matches('#').len();
        let heading = line[level..].strip_prefix(' ')?;
        (1..=6).contains(&level).then_some(heading)
    });
    let mut plain: Vec<String> = Vec::new();
    for heading in headings {
        let anchor: String = heading
            .trim()
            .to_lowercase()
            .replace(' ', "-")
            .chars()
            .filter(|c| c.is_alphanumeric() || ['-', '_'].contains(c))
            .collect();
        let earlier = plain.iter().filter(|one| **one == anchor).count();
        anchors.push(match earlier {
            0 => anchor.clone(),
            count => format!("{anchor}-{count}"),
        });
        plain.push(anchor);
    }
    anchors
}

/// Lines that are too long. Rows of tables, code and the targets of links do not count, because they are never wrapped.
fn long_lines(text: &str) -> Vec<String> {
    prose(text)
        .filter(|(_, line)| !line.starts_with("    ") && !line.trim_start().starts_with('|'))
        .filter_map(|(number, line)| {
            let targets: usize = links_of_any_kind(line)
                .map(|link| link.chars().count())
                .sum();
            let chars = line.chars().count() - targets;
            (chars > LINE_CHARS_MAX).then(|| {
                format!("line {number} is {chars} characters long, more than {LINE_CHARS_MAX}")
            })
        })
        .collect()
}

/// The targets of links, including those outside the clone.
fn links_of_any_kind(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(link, _)| link)
}

/// The lines outside of fenced blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fence = None;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let line = line.trim_start();
        let ticks = line.len() - line.trim_start_matches('`').len();
        match fence {
            None if ticks >= 3 => {
                fence = Some(ticks);
                false
            }
            None => true,
            Some(opened) => {
                if ticks >= opened {
                    fence = None;
                }
                false
            }
        }
    })
}

/// Pages under docs/ that the table of contents does not list.
fn unlisted(summary: &str, pages: &[&str]) -> Vec<String> {
    pages
        .iter()
        .filter(|page| **page != "SUMMARY.md" && !links(summary).any(|link| link == **page))
        .map(|page| format!("docs/SUMMARY.md does not list {page}"))
        .collect()
}

/// `cargo xtask …` commands that do not exist, in code blocks or in backticks.
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

/// Commands that build the host again, with features other than those of the tests and the demo.
fn rebuilds(text: &str) -> Option<String> {
    text.contains("cargo run -p rouse-host -- ").then(|| {
        "`cargo run -p rouse-host` builds the host again: write target/debug/rouse".to_owned()
    })
}

/// Blocks of Rust that are not part of a compiled file.
fn foreign_handlers(text: &str, sources: &[String]) -> Vec<String> {
    text.split("```rust\n")
        .skip(1)
        .filter_map(|rest| rest.split_once("```"))
        .map(|(block, _)| block.trim())
        .filter(|block| !sources.iter().any(|source| source.contains(block)))
        .map(|block| {
            let first = block.lines().next().unwrap_or_default();
            format!(
                "the block that starts with `{first}` is not in a file under examples/ or handlers/"
            )
        })
        .collect()
}

/// Files with one extension. Empty if the folder does not exist.
pub(super) fn files(folder: &Path, extension: &str, deep: bool) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if !folder.exists() {
        return Ok(found);
    }
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() && deep && !path.ends_with("target") {
            found.extend(files(&path, extension, deep)?);
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

pub(super) fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_to_a_missing_file_is_a_fault_and_links_elsewhere_are_not() {
        let text = "[a](there.md#part) [b](gone.md) [c](https://example.com/x) [d](#here)";
        assert_eq!(
            broken_links(text, |link| link == "there.md"),
            ["the link to gone.md is broken: there is no such file"]
        );
    }

    #[test]
    fn a_link_to_a_heading_that_its_page_does_not_have_is_a_fault() {
        let text = "# Here\n[a](there.md#part) [b](there.md#gone) [c](#here) [d](#gone) [e](gone.md#x) \
                    [f](https://example.com/x#y) [g](there.md)";
        let anchors_of = |link: &str| match link {
            "" => Some(anchors(text)),
            "there.md" => Some(vec!["part".to_owned()]),
            _ => None,
        };
        assert_eq!(
            broken_anchors(text, anchors_of),
            [
                "the link to there.md#gone is broken: the page has no such heading",
                "the link to #gone is broken: the page has no such heading"
            ]
        );
    }

    #[test]
    fn headings_have_the_anchors_of_github_and_mdbook() {
        let text = "# `POST /invoke`: what's new?\n## Half_of it\n```sh\n# a comment\n```\n#hashtag\n\
                    ### Half_of it\n####### seven\n";
        assert_eq!(
            anchors(text),
            ["post-invoke-whats-new", "half_of-it", "half_of-it-1"]
        );
    }

    #[test]
    fn only_long_lines_of_prose_are_faults_and_targets_of_links_do_not_count() {
        let long = "x".repeat(LINE_CHARS_MAX);
        let text = format!(
            "{long}\n{long}y\n| {long} |\n```\n{long}y\n```\n    {long}y\n[a]({long}) [b](https://{long})\n"
        );
        assert_eq!(
            long_lines(&text),
            ["line 2 is 121 characters long, more than 120"]
        );
    }

    #[test]
    fn a_page_that_the_table_of_contents_does_not_list_is_a_fault() {
        let summary = "# Summary\n\n- [A](a.md)\n  - [B](guides/b.md)\n";
        assert_eq!(
            unlisted(
                summary,
                &["SUMMARY.md", "a.md", "guides/b.md", "guides/c.md"]
            ),
            ["docs/SUMMARY.md does not list guides/c.md"]
        );
    }

    #[test]
    fn an_unknown_xtask_command_is_a_fault() {
        let text = "Run `cargo xtask demo`, then\n```sh\ncargo xtask tset -- --nocapture\n```";
        assert_eq!(unknown_commands(text), ["there is no `cargo xtask tset`"]);
    }

    #[test]
    fn a_command_that_builds_the_host_again_is_a_fault() {
        assert!(rebuilds("cargo run -p rouse-host -- dev").is_some());
        assert!(rebuilds("target/debug/rouse dev").is_none());
    }

    #[test]
    fn rust_in_the_readme_must_be_in_a_compiled_file() {
        let text = "```rust\nfn kept() {}\n```\n```rust\nfn drifted() {}\n```";
        let sources = ["//! x\n\nfn kept() {}\n".to_owned()];
        assert_eq!(
            foreign_handlers(text, &sources),
            [
                "the block that starts with `fn drifted() {}` is not in a file under examples/ or handlers/"
            ]
        );
    }
}
