//! Commands that are separate programs: xtask builds the program and replaces itself with it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};
use clap::Args;
use rouse_workbench::workspace::Workspace;

/// The arguments for the program, including `--help`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    all: Vec<OsString>,
}

impl Arguments {
    /// Builds the program and replaces this process with it: its output, signals and exit code are those of `cargo
    /// xtask`. Returns only on an error.
    pub(crate) fn exec(&self, workspace: &Workspace, program: &str) -> Result<ExitCode> {
        let program = workspace.build_program(program)?;
        let error = Command::new(&program).args(&self.all).exec();
        Err(error).with_context(|| format!("start {}", program.display()))
    }
}

/// Turns `help bench drain` into `bench drain --help`, because only the program has its help text.
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
    fn a_program_prints_its_own_help() {
        let rewritten = |line: &str| {
            let arguments = line.split(' ').map(OsString::from).collect();
            with_help_last(arguments, &["bench"])
                .join(" ".as_ref())
                .into_string()
                .unwrap()
        };
        assert_eq!(
            rewritten("xtask help bench drain"),
            "xtask bench drain --help"
        );
        assert_eq!(rewritten("xtask help bench"), "xtask bench --help");
        assert_eq!(rewritten("xtask help test"), "xtask help test");
        assert_eq!(rewritten("xtask help"), "xtask help");
        assert_eq!(rewritten("xtask bench help"), "xtask bench help");
    }
}
