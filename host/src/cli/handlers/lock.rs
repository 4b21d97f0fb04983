//! `rouse handlers lock`: writes handlers.lock, the list of modules that may serve.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args as ClapArgs;
use rouse_display::plural::counted;

use crate::cli::text::plain;
use crate::config::File;
use crate::sandbox::{Catalog, Digest, lock_line};

/// Options of `rouse handlers lock`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// The folder
    #[arg(long, value_name = "DIR", default_value = "handlers-wasm")]
    handlers: PathBuf,

    /// Settings; handlers.lock is written next to this file; default: ./rouse.toml, which may be missing
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Writes the lock, and prints the differences from the previous one.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (file, folder) = File::read(args.config.as_deref())?;
    let lock = File::lock_file(&folder);
    let bytes_max = file.sandbox(&folder, 1).module_bytes_max;
    let now = Catalog::digests(&args.handlers, bytes_max)?;
    let before = match fs::read_to_string(&lock) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).with_context(|| format!("read {}", lock.display())),
    };
    let text: String = now
        .iter()
        .map(|(name, digest)| lock_line(*digest, name) + "\n")
        .collect();
    replace(&lock, &text)?;
    for line in changes(&before, &now) {
        println!("{}", plain(&line));
    }
    println!("{}: {}", lock.display(), counted(now.len(), "module"));
    if !file.pins_to_lock() {
        println!("handlers.lock takes effect with pin = \"lock\" in rouse.toml");
    }
    Ok(ExitCode::SUCCESS)
}

/// The differences from the previous lock, for review.
fn changes(before: &str, now: &BTreeMap<String, Digest>) -> Vec<String> {
    let before: BTreeMap<&str, &str> = before
        .lines()
        .filter_map(|line| line.split_once("  "))
        .map(|(digest, name)| (name, digest))
        .collect();
    let mut lines = Vec::new();
    for (name, digest) in now {
        let digest = digest.to_string();
        match before.get(&**name) {
            None => lines.push(format!("new      {digest}  {name}")),
            Some(was) if **was != digest => lines.push(format!("changed  {digest}  {name}")),
            Some(_) => {}
        }
    }
    for (name, digest) in before {
        if !now.contains_key(name) {
            lines.push(format!("removed  {digest}  {name}"));
        }
    }
    lines
}

/// Replaces a file atomically: a reader finds the old text or the new one.
pub(super) fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    let written = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The temporary file may not exist at all.
        let _ = fs::remove_file(&temporary);
    }
    written.with_context(|| format!("write {}", path.display()))
}
