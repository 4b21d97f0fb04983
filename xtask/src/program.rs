//! Commands that are programs of their own: xtask builds one when it is asked for, and the program takes its place.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};
use clap::Args;
use rouse_workbench::workspace::Workspace;

/// What the program reads by itself; its `--help` too.
#[derive(Args)]
pub(crate) struct Arguments {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    all: Vec<OsString>,
}

impl Arguments {
    /// Builds the program and becomes it: its output, signals and exit code are those of `cargo xtask`. Returns only where that
    /// cannot be done.
    pub(crate) fn hand_to(&self, workspace: &Workspace, program: &str) -> Result<ExitCode> {
        let program = workspace.build_program(program)?;
        let error = Command::new(&program).args(&self.all).exec();
        Err(error).with_context(|| format!("start {}", program.display()))
    }
}

/// `help bench drain` becomes `bench drain --help`, because only the program knows its help.
pub(crate) fn with_help_last(mut arguments: Vec<OsString>, programs: &[&str]) -> Vec<OsString> {
    let is_program = |name: &OsString| programs.iter().any(|program| name == program);
    if arguments.get(1).is_some_and(|first| first == "help")
        && arguments.get(2).is_some_and(is_program)
    {
        arguments.remove(1);
        arguments.push("--help".into());
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_for_a_program_is_asked_of_the_program() {
        let read = |line: &str| {
            let arguments = line.split(' ').map(OsString::from).collect();
            with_help_last(arguments, &["bench"])
                .join(" ".as_ref())
                .into_string()
                .unwrap()
        };
        assert_eq!(read("xtask help bench drain"), "xtask bench drain --help");
        assert_eq!(read("xtask help bench"), "xtask bench --help");
        assert_eq!(read("xtask help test"), "xtask help test");
        assert_eq!(read("xtask help"), "xtask help");
        assert_eq!(read("xtask bench help"), "xtask bench help");
    }
}
