//! Commands of `rouse` that are run to their end.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::worker::guests_dir;
use super::{TestDb, rouse, scratch};

/// What a command prints, and its exit code.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    /// What stands on its standard output, read.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}{}", self.stdout, self.stderr))
    }

    /// Asserts that this stands somewhere in what it printed.
    pub(crate) fn says(&self, part: &str) -> &Self {
        let all = format!("{}{}", self.stdout, self.stderr);
        assert!(all.contains(part), "{part:?} is not in:\n{all}");
        self
    }

    /// Asserts its exit code.
    pub(crate) fn exits(&self, code: i32) -> &Self {
        assert_eq!(self.code, code, "{}{}", self.stdout, self.stderr);
        self
    }
}

/// `rouse` with these arguments, in this folder, on the database at `url`.
pub(crate) fn command(url: &str, args: &[&str], folder: &Path) -> Command {
    let mut command = rouse();
    command
        .args(args)
        .env("DATABASE_URL", url)
        .env_remove("ROUSE_LOG")
        .current_dir(folder)
        .stdin(Stdio::null());
    command
}

/// Runs a command to its end, in this folder.
pub(crate) async fn rouse_in(db: &TestDb, args: &[&str], folder: &Path) -> Ran {
    let mut command = command(&db.url(), args, folder);
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .unwrap()
        .unwrap();
    Ran {
        code: output.status.code().expect("it exits"),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A folder with these guests in `handlers-wasm`, and a `rouse.toml` with this text.
pub(crate) fn folder(config: &str, guests: &[&str]) -> PathBuf {
    let folder = scratch("drain");
    std::fs::create_dir(folder.join("handlers-wasm")).unwrap();
    for file in guests {
        std::fs::copy(
            guests_dir().join(file),
            folder.join("handlers-wasm").join(file),
        )
        .unwrap();
    }
    std::fs::write(folder.join("rouse.toml"), config).unwrap();
    folder
}
