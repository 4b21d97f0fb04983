//! `rouse new NAME`: writes a handler crate that builds, tests and runs unchanged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::Args as ClapArgs;

/// The files of a new crate, with their templates.
const FILES: [(&str, &str); 5] = [
    ("Cargo.toml", include_str!("new/Cargo.toml.in")),
    ("src/lib.rs", include_str!("new/lib.rs.in")),
    ("README.md", include_str!("new/README.md.in")),
    (
        ".cargo/config.toml",
        include_str!("new/cargo-config.toml.in"),
    ),
    (".gitignore", "/target\n/handlers-wasm\n/.rouse\n"),
];

/// The SDK next to this crate, if the host was built from its repository.
const SDK_IN_REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../sdk");

/// The dependency on the SDK if that folder does not exist: the repository, because the SDK is not on crates.io yet.
const SDK_ELSEWHERE: &str = concat!("{ git = \"", env!("CARGO_PKG_REPOSITORY"), "\" }");

/// Longer names lead to paths that are too long for some tools.
const NAME_CHARS_MAX: usize = 64;

/// Names that Cargo or the compiler rejects for a library, and names of dependencies.
const TAKEN: &[&str] = &[
    "abstract",
    "alloc",
    "as",
    "async",
    "await",
    "become",
    "box",
    "break",
    "const",
    "continue",
    "core",
    "crate",
    "do",
    "dyn",
    "else",
    "enum",
    "extern",
    "false",
    "final",
    "fn",
    "for",
    "gen",
    "if",
    "impl",
    "in",
    "let",
    "loop",
    "macro",
    "match",
    "mod",
    "move",
    "mut",
    "override",
    "priv",
    "proc-macro",
    "pub",
    "ref",
    "return",
    "rouse-sdk",
    "schemars",
    "self",
    "serde",
    "static",
    "std",
    "struct",
    "super",
    "test",
    "trait",
    "true",
    "try",
    "type",
    "typeof",
    "unsafe",
    "unsized",
    "use",
    "virtual",
    "where",
    "while",
    "yield",
];

/// Options of `rouse new`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// The name of the crate and its handler, such as greet
    name: String,

    /// The folder in which the crate is created
    #[arg(long, value_name = "DIR", default_value = ".")]
    into: PathBuf,

    /// The SDK's folder; default: that of the repository from which this binary was built, else the
    /// git repository of Rouse
    #[arg(long, value_name = "DIR")]
    sdk: Option<PathBuf>,
}

/// Writes the crate, and prints the next steps.
pub(super) fn run(args: &Args) -> Result<ExitCode> {
    let folder = new(&args.name, &args.into, args.sdk.as_deref())?;
    if args.sdk.is_none() && !Path::new(SDK_IN_REPOSITORY).exists() {
        eprintln!(
            "rouse: rouse-sdk is not on crates.io yet, so Cargo.toml names its git repository; --sdk names a checkout instead"
        );
    }
    println!(
        "wrote {0}\nnext: cd {0} && cargo test; README.md in the folder explains the rest",
        folder.display()
    );
    Ok(ExitCode::SUCCESS)
}

/// Writes the crate `name` into `parent`, and returns its folder. The crate depends on the SDK at `sdk_path`; without a
/// path, on the SDK of the repository from which this host was built; if that no longer exists, on the git repository.
///
/// # Errors
/// If the name is invalid, the folder already exists, there is no SDK at `sdk_path`, or the files cannot be written. In
/// these cases, nothing is left behind.
pub fn new(name: &str, parent: &Path, sdk_path: Option<&Path>) -> Result<PathBuf> {
    check_name(name)?;
    let folder = parent.join(name);
    ensure!(
        folder.symlink_metadata().is_err(),
        "{} already exists: choose another name, or remove it",
        folder.display()
    );
    let sdk = sdk_dependency(sdk_path, Path::new(SDK_IN_REPOSITORY))?;
    let fill = |template: &str| {
        template
            .replace("{name}", name)
            .replace("{lib}", &name.replace('-', "_"))
            .replace("{sdk}", &sdk)
    };

    // Written to a temporary folder and renamed, so that the crate appears complete or not at all.
    let part = parent.join(format!(".{name}.{}.part", std::process::id()));
    let written = write_all(&part, fill).and_then(|()| {
        fs::rename(&part, &folder).with_context(|| format!("move it to {}", folder.display()))
    });
    if let Err(error) = written {
        // If the removal also fails, report the first error.
        let _ = fs::remove_dir_all(&part);
        return Err(error.context(format!("cannot write the crate {name}")));
    }
    Ok(folder)
}

fn write_all(part: &Path, fill: impl Fn(&str) -> String) -> Result<()> {
    fs::create_dir(part).with_context(|| format!("create {}", part.display()))?;
    for folder in ["src", ".cargo"] {
        fs::create_dir(part.join(folder)).with_context(|| format!("create its {folder} folder"))?;
    }
    for (path, template) in FILES {
        fs::write(part.join(path), fill(template)).with_context(|| format!("write {path}"))?;
    }
    Ok(())
}

fn check_name(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_word = |word: &str| !word.is_empty() && word.chars().all(plain);
    let good = name.len() <= NAME_CHARS_MAX
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.split(['-', '_']).all(is_word);
    if !good {
        bail!(
            "`{name}` is not a crate name: write 1 to {NAME_CHARS_MAX} characters (a-z, 0-9, - and _), a letter \
             first, for instance `send-email`. (The handler in it may be called `email.send`: \
             change that in src/lib.rs)"
        );
    }
    ensure!(
        !TAKEN.contains(&name.replace('_', "-").as_str()),
        "`{name}` is taken by Rust or by a dependency: choose another name"
    );
    Ok(())
}

/// The right-hand side of `rouse-sdk = …`. `usual`: the folder that is used without a path, if it exists.
fn sdk_dependency(sdk_path: Option<&Path>, usual: &Path) -> Result<String> {
    let found = match sdk_path {
        Some(path) => Some(path.canonicalize().with_context(|| {
            format!(
                "there is no SDK at {}: give the `sdk` folder of the repository",
                path.display()
            )
        })?),
        None => usual.canonicalize().ok(),
    };
    let Some(path) = found else {
        return Ok(SDK_ELSEWHERE.to_owned());
    };
    let is_sdk = fs::read_to_string(path.join("Cargo.toml"))
        .is_ok_and(|manifest| manifest.contains("name = \"rouse-sdk\""));
    ensure!(
        is_sdk,
        "{} is not the SDK: give the `sdk` folder of the repository",
        path.display()
    );
    let text = path
        .to_str()
        .with_context(|| format!("{} is not UTF-8, which Cargo.toml needs", path.display()))?;
    Ok(format!("{{ path = {} }}", toml::Value::from(text)))
}

#[cfg(test)]
mod tests;
