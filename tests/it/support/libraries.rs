//! Libraries of other languages, from their registries.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Libraries with a lock file.
pub(crate) struct Libraries {
    /// The folder of the lock file, below `tests`.
    pub(crate) folder: &'static str,
    pub(crate) lock: &'static str,
    /// Installs the locked libraries into the working directory.
    pub(crate) install: &'static [&'static [&'static str]],
}

pub(crate) const NPM: &[&[&str]] = &[&["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]];

pub(crate) const PIP: &[&[&str]] = &[
    &["python3", "-m", "venv", "venv"],
    &[
        "venv/bin/pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--require-hashes",
        "--requirement",
        "requirements.txt",
    ],
];

impl Libraries {
    /// The folder with the installed libraries, which is kept below cargo's output until the lock file changes. The
    /// error is the reason why they cannot be installed here.
    pub(crate) fn installed(&self) -> Result<PathBuf, String> {
        let locks = Path::new(env!("CARGO_MANIFEST_DIR")).join(self.folder);
        let lock = fs::read(locks.join(self.lock)).unwrap();
        let test_binary = std::env::current_exe().unwrap();
        let output = test_binary.ancestors().nth(3).unwrap();
        let folder = output.join("libraries").join(self.folder);
        // A copy of the lock file, written last: an interrupted installation is repeated.
        let complete = folder.join("complete");
        if fs::read(&complete).is_ok_and(|of_installed| of_installed == lock) {
            return Ok(folder);
        }
        // It may not exist yet.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        for file in fs::read_dir(&locks).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), folder.join(file.file_name())).unwrap();
        }
        for command in self.install {
            let output = Command::new(command[0])
                .args(&command[1..])
                .current_dir(&folder)
                .output()
                .map_err(|error| format!("{} does not start: {error}", command[0]))?;
            if !output.status.success() {
                let stderr = String::from_utf8_lossy(&output.stderr);
                return Err(format!("`{}` failed: {stderr}", command.join(" ")));
            }
        }
        fs::write(complete, lock).unwrap();
        Ok(folder)
    }
}
