//! Commands of `rouse` that are run to their end.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::worker::guests_dir;
use super::{TestDb, rouse, scratch};

/// The output of a command, and its exit code.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl CommandOutput {
    /// Runs a command to its end.
    pub(crate) fn run(command: &mut Command) -> Self {
        let output = command.output().expect("run the command");
        Self {
            code: output.status.code().expect("an exit code"),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// All of its output.
    pub(crate) fn text(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    /// Its standard output, parsed as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}{}", self.stdout, self.stderr))
    }

    /// Asserts that its output contains this text.
    pub(crate) fn prints(&self, part: &str) -> &Self {
        let all = self.text();
        assert!(all.contains(part), "{part:?} is missing in:\n{all}");
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

/// Like [`command`], without a database.
pub(crate) fn command_without_database(args: &[&str], folder: &Path) -> Command {
    let mut command = command("", args, folder);
    command.env_remove("DATABASE_URL");
    command
}

/// Runs a command to its end, in this folder.
pub(crate) async fn rouse_in(db: &TestDb, args: &[&str], folder: &Path) -> CommandOutput {
    let mut command = command(&db.url(), args, folder);
    let ran = tokio::task::spawn_blocking(move || CommandOutput::run(&mut command));
    ran.await.unwrap()
}

/// Runs a command to its end, in a folder of its own.
pub(crate) async fn run_rouse(db: &TestDb, args: &[&str]) -> CommandOutput {
    rouse_in(db, args, &scratch("command")).await
}

/// Runs `rouse queue set mail` with these options.
pub(crate) async fn set_mail(db: &TestDb, options: &[&str]) -> CommandOutput {
    run_rouse(db, &[&["queue", "set", "mail"][..], options].concat()).await
}

/// Like [`rouse_in`], without a database.
pub(crate) fn rouse_without_database(args: &[&str], folder: &Path) -> CommandOutput {
    CommandOutput::run(&mut command_without_database(args, folder))
}

/// Shows a handler in the folder of modules that [`folder`] creates.
pub(crate) fn show_handler(handler: &str, folder: &Path, options: &[&str]) -> CommandOutput {
    let show = ["handlers", "show", handler, "--handlers", "handlers-wasm"];
    rouse_without_database(&[&show[..], options].concat(), folder)
}

/// A folder with these guests of `tests/guests` in `handlers-wasm`, and a `rouse.toml` with this text.
pub(crate) fn folder(config: &str, guests: &[&str]) -> PathBuf {
    let read = |file| (file, std::fs::read(guests_dir().join(file)).unwrap());
    let modules: Vec<(&str, Vec<u8>)> = guests.iter().copied().map(read).collect();
    folder_of(config, &modules)
}

/// Like [`folder`], with these modules.
pub(crate) fn folder_of(config: &str, modules: &[(&str, impl AsRef<[u8]>)]) -> PathBuf {
    let folder = scratch("folder");
    let handlers = folder.join("handlers-wasm");
    std::fs::create_dir(&handlers).unwrap();
    for (name, bytes) in modules {
        std::fs::write(handlers.join(name), bytes).unwrap();
    }
    std::fs::write(folder.join("rouse.toml"), config).unwrap();
    folder
}
