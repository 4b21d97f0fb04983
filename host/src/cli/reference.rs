//! docs/reference/cli.md, printed from the commands and options themselves.

use std::path::Path;

use clap::{Arg, Command, CommandFactory as _};

use super::Cli;
use crate::config::{self, Environment};

const HEAD: &str = "\
<!-- From the code: UPDATE_DOCS=1 cargo test -p rouse-host --lib writes this page. -->

# Command line

`rouse COMMAND --help` prints the same. Exit codes that several commands share are in [errors and exit
codes](errors.md#exit-codes).
";

/// `UPDATE_DOCS=1 cargo test -p rouse-host --lib` writes the page.
#[test]
fn the_page_matches_the_commands() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/cli.md");
    let mut command = Cli::command();
    command.build();
    let mut wanted = HEAD.to_owned();
    print(&command, "rouse", &mut wanted);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
        return;
    }
    let page = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        page == wanted,
        "{} does not match the commands; write it with UPDATE_DOCS=1 cargo test -p rouse-host --lib",
        path.display()
    );
}

#[test]
fn the_help_of_every_command_fits_80_columns() {
    fn check(command: &mut Command) {
        for help in [command.render_help(), command.render_long_help()] {
            let help = help.to_string();
            for line in help.lines() {
                assert!(line.chars().count() <= 80, "{line:?} in\n{help}");
            }
        }
        let shown = command
            .get_subcommands_mut()
            .filter(|one| !one.is_hide_set());
        shown.for_each(check);
    }
    let mut command = Cli::command();
    command.build();
    check(&mut command);
}

#[test]
fn options_and_variables_that_override_settings_exist() {
    let command = Cli::command();
    let commands = ["dev", "serve"].map(|name| command.find_subcommand(name).expect("a command"));
    let options = commands.iter().flat_map(|command| command.get_arguments());
    let options: Vec<&str> = options.filter_map(Arg::get_long).collect();
    let variables = Environment::VARIABLES.iter().map(|row| row.key);
    let variables: Vec<&str> = variables.chain(["cache_dir"]).collect();
    for name in config::overrides() {
        match name.strip_prefix("--") {
            Some(option) => assert!(options.contains(&option), "{name}"),
            None => assert!(variables.contains(&name), "{name}"),
        }
    }
}

/// A section for the command, then one for each of its subcommands.
fn print(command: &Command, name: &str, page: &mut String) {
    let about = command.get_long_about().or(command.get_about());
    let about = about.map(|text| text.to_string()).unwrap_or_default();
    let usage = command.clone().bin_name(name).render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").lines().map(str::trim);
    let usage = usage.collect::<Vec<_>>().join("\n");
    *page += &format!("\n## {name}\n\n```text\n{}\n\n{usage}\n", about.trim_end());
    if let Some(more) = command.get_after_long_help().or(command.get_after_help()) {
        *page += &format!("\n{}\n", more.to_string().trim_end());
    }
    *page += "```\n";
    let aliases: Vec<String> = command
        .get_visible_aliases()
        .map(|alias| format!("`{alias}`"))
        .collect();
    if !aliases.is_empty() {
        *page += &format!("\nAlso called {}.\n", aliases.join(", "));
    }
    let rows: Vec<String> = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str()))
        // Global options are listed once, at the top.
        .filter(|arg| !arg.is_global_set() || name == "rouse")
        .map(row)
        .collect();
    if !rows.is_empty() {
        *page += &format!(
            "\n| Argument or option | Default | Meaning |\n|---|---|---|\n{}\n",
            rows.join("\n")
        );
    }
    for inner in command.get_subcommands() {
        if !inner.is_hide_set() && inner.get_name() != "help" {
            print(inner, &format!("{name} {}", inner.get_name()), page);
        }
    }
}

fn row(arg: &Arg) -> String {
    let defaults = arg.get_default_values().iter();
    let defaults: Vec<String> = defaults
        .filter(|_| arg.get_action().takes_values())
        .map(|value| format!("`{}`", value.to_string_lossy()))
        .collect();
    let help = arg.get_help().or(arg.get_long_help());
    let mut help = help.map(|text| text.to_string()).unwrap_or_default();
    let words = arg.get_possible_values();
    if arg.get_action().takes_values() && !words.is_empty() {
        let words: Vec<&str> = words.iter().map(|word| word.get_name()).collect();
        help += &format!(" [{}]", words.join(", "));
    }
    let short = arg.get_short().map(|short| format!("-{short}, "));
    format!(
        "| `{}{}` | {} | {} |",
        short.unwrap_or_default(),
        cell(&arg.to_string()),
        cell(&defaults.join(" ")),
        cell(&help)
    )
}

/// A text in one cell of a table.
fn cell(text: &str) -> String {
    text.split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace('|', "\\|")
}
