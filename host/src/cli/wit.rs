//! `rouse wit [DIR]`: writes the contract between host and handlers, for authors in any language.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args as ClapArgs;
use rouse_display::plural::counted;

/// Files of `sdk/wit`: the path of each below the folder, with its text.
macro_rules! files {
    ($($path:literal),+ $(,)?) => {
        [$(($path, include_str!(concat!("../../../sdk/wit/", $path)))),+]
    };
}

/// The package of the contract and its WASI dependencies. A test compares the list with the folder.
const FILES: [(&str, &str); 7] = files![
    "rouse.wit",
    "deps/clocks/monotonic-clock.wit",
    "deps/http/outgoing-handler.wit",
    "deps/http/types.wit",
    "deps/io/error.wit",
    "deps/io/poll.wit",
    "deps/io/streams.wit",
];

/// Options of `rouse wit`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
A handler module is a component of the world `module`, or a core module of wasm32-wasip1 that is linked against it:
  rouse wit && wit-bindgen c wit --world module\n\
docs/guides/other-languages.md shows how to build one with componentize-py, componentize-js, componentize-qjs or \
clang.")]
pub(super) struct Args {
    /// The folder to write the contract to
    #[arg(value_name = "DIR", default_value = "wit")]
    dir: PathBuf,

    /// Replace files of the contract that were changed or belong to another version
    #[arg(long)]
    force: bool,
}

/// Writes the missing files. If an existing file differs, writes none.
pub(super) fn run(args: &Args) -> Result<ExitCode> {
    let mut missing = Vec::new();
    for (path, text) in FILES {
        let file = args.dir.join(path);
        match existing(&file)? {
            Some(existing) if existing == text.as_bytes() => continue,
            Some(_) => ensure!(
                args.force,
                "{} exists and differs from the contract of this version; remove it, or replace it with --force",
                file.display()
            ),
            None => {}
        }
        missing.push((file, text));
    }
    for (file, text) in &missing {
        let folder = file.parent().unwrap_or(&args.dir);
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        fs::write(file, text).with_context(|| format!("write {}", file.display()))?;
    }
    println!(
        "{}: {} written, {} unchanged; the world is rouse:handler/module",
        args.dir.display(),
        counted(missing.len(), "file"),
        FILES.len() - missing.len()
    );
    Ok(ExitCode::SUCCESS)
}

/// The bytes of a file; `None` if it does not exist.
fn existing(file: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(file) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("read {}", file.display())),
    }
}
