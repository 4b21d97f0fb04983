//! Builds one guest with each toolchain of another language (`tests/guests-other`), with the commands of
//! `docs/guides/other-languages.md`.
//!
//! Package managers install the tools below cargo's output folder, in the versions that `install.sh`, lock files and
//! hashes pin. Each module is kept under a digest of sources, scripts, lock files and contract, so that nothing is
//! installed or built twice. A guest that cannot be built is not an error here: the reason is written to a file next to
//! the modules, for the test that would load it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use rouse_workbench::workspace::Workspace;
use sha2::{Digest as _, Sha256};

/// A folder of `tests/guests-other`.
struct Language {
    name: &'static str,
    /// Files that `system.sh` installs as root. The script is skipped if all of them exist.
    system: &'static [&'static str],
}

const LANGUAGES: [Language; 4] = [
    Language {
        name: "python",
        system: &[],
    },
    Language {
        name: "js",
        system: &[],
    },
    Language {
        name: "qjs",
        system: &[],
    },
    Language {
        name: "c",
        system: &[
            "/usr/bin/clang-19",
            "/usr/bin/wasm-ld-19",
            "/usr/lib/llvm-19/lib/clang/19/lib/wasi/libclang_rt.builtins-wasm32.a",
            "/usr/lib/wasm32-wasi/libc.a",
        ],
    },
];

/// Maximum number of log lines shown after a failed build.
const LOG_LINES_MAX: usize = 15;

/// Builds all guests in parallel, into `other` below the folder of the tests' guests. `rouse` writes the contract.
pub(crate) fn build(workspace: &Workspace, rouse: &Path, test_guests: &Path) -> Result<()> {
    let folder = test_guests.join("other");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let results: Vec<_> = thread::scope(|scope| {
        let builds = LANGUAGES.map(|language| {
            let folder = &folder;
            scope.spawn(move || {
                let started = Instant::now();
                let place = |built: Built| place(&built, &language, folder);
                let placed = build_one(workspace, rouse, &language).and_then(place);
                let secs = started.elapsed().as_secs();
                match &placed {
                    Ok(true) => println!("guest in {}: built in {secs} s", language.name),
                    Ok(false) => {}
                    Err(error) => println!("guest in {}: NOT BUILT: {error:#}", language.name),
                }
                update_reason(&placed, &language, folder)
            })
        });
        builds
            .into_iter()
            .map(|build| build.join().expect("a build does not panic"))
            .collect()
    });
    results.into_iter().collect()
}

/// A module, and whether this run has built it.
struct Built {
    module: PathBuf,
    new: bool,
}

fn place(built: &Built, language: &Language, folder: &Path) -> Result<bool> {
    let to = folder.join(language.name).with_extension("wasm");
    fs::copy(&built.module, &to).with_context(|| format!("write {}", to.display()))?;
    Ok(built.new)
}

/// If the guest could not be built, replaces its module with a file that contains the reason, for the test. Otherwise
/// removes an older reason.
fn update_reason(placed: &Result<bool>, language: &Language, folder: &Path) -> Result<()> {
    let why = folder.join(language.name).with_extension("why");
    let stale = match placed {
        Ok(_) => why,
        Err(error) => {
            fs::write(&why, format!("{error:#}"))
                .with_context(|| format!("write {}", why.display()))?;
            folder.join(language.name).with_extension("wasm")
        }
    };
    match fs::remove_file(&stale) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", stale.display()))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

fn build_one(workspace: &Workspace, rouse: &Path, language: &Language) -> Result<Built> {
    let name = language.name;
    let sources = files(&workspace.root.join("tests/guests-other").join(name))?;
    let contract = files(&workspace.root.join("sdk/wit"))?;
    let build_digest = digest(&[&sources, &contract]);
    let folder = workspace.target_dir.join("guests-other");
    let module = folder.join(format!("{name}-{build_digest}.wasm"));
    if module.is_file() {
        return Ok(Built { module, new: false });
    }

    let work = folder.join(name);
    fs::create_dir_all(&work).with_context(|| format!("create {}", work.display()))?;
    let log_path = work.join("log");
    let log = File::create(&log_path).with_context(|| format!("create {}", log_path.display()))?;
    for (path, bytes) in &sources {
        fs::write(work.join(path), bytes).with_context(|| format!("write {path}"))?;
    }
    let script = |script: &str| run(script, &work, rouse, &log, &log_path);

    let missing = |path: &&&str| !Path::new(path).exists();
    if let Some(missing) = language.system.iter().find(missing) {
        ensure!(
            rustix::process::geteuid().is_root(),
            "{missing} is missing: run tests/guests-other/{name}/system.sh as root"
        );
        script("system.sh")?;
    }
    // Tools are installed again only if the files that pin them have changed.
    let tools = sources
        .iter()
        .filter(|(path, _)| *path != "build.sh" && !path.starts_with("app."))
        .map(|(path, bytes)| (path.clone(), bytes.clone()))
        .collect();
    let (installed, tools_digest) = (work.join("installed"), digest(&[&tools]));
    if fs::read_to_string(&installed).ok().as_ref() != Some(&tools_digest) {
        script("install.sh")?;
        // Left by a tool that cargo has built; nothing else needs it.
        let target = work.join("target");
        if target.exists() {
            fs::remove_dir_all(&target).with_context(|| format!("remove {}", target.display()))?;
        }
        fs::write(&installed, tools_digest).context("record the installed tools")?;
    }
    // The last build may have changed its copy of the contract.
    let wit = work.join("wit");
    if wit.exists() {
        fs::remove_dir_all(&wit).with_context(|| format!("remove {}", wit.display()))?;
    }
    script("build.sh")?;

    for old in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
        let old = old?;
        let is_old = |file: &str| file.starts_with(&format!("{name}-"));
        if old.file_name().to_str().is_some_and(is_old) {
            fs::remove_file(old.path())
                .with_context(|| format!("remove {}", old.path().display()))?;
        }
    }
    fs::rename(work.join("app.wasm"), &module)
        .with_context(|| format!("{name}/build.sh has built no app.wasm"))?;
    Ok(Built { module, new: true })
}

/// Runs a script in the folder of its language. The error of a failed script has the end of its log.
fn run(script: &str, work: &Path, rouse: &Path, log: &File, log_path: &Path) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let own = rouse.parent().context("the path of rouse has no folder")?;
    let path =
        std::env::join_paths(std::iter::once(own.to_owned()).chain(std::env::split_paths(&path)))
            .context("add rouse to PATH")?;
    let mut command = Command::new("bash");
    command
        .args(["-euxo", "pipefail", script])
        .current_dir(work)
        .env("PATH", path)
        .env("DEBIAN_FRONTEND", "noninteractive")
        // A separate target folder for `cargo install`, because the outer cargo may hold the lock of the usual one.
        .env("CARGO_TARGET_DIR", work.join("target"))
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("share the log")?)
        .stderr(log.try_clone().context("share the log")?);
    for (name, _) in std::env::vars_os() {
        // CARGO_PKG_… describe xtask, and CARGO_PROFILE_… are meant for this clone.
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_PROFILE_") {
            command.env_remove(name.as_ref());
        }
    }
    let status = command.status().context("start bash")?;
    if !status.success() {
        let log = fs::read(log_path).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).into_owned();
        let lines: Vec<_> = log.lines().collect();
        let last = &lines[lines.len().saturating_sub(LOG_LINES_MAX)..];
        bail!("{script}: {status}:\n{}", last.join("\n"));
    }
    Ok(())
}

/// All files below a folder, by their relative paths.
fn files(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut all = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).with_context(|| format!("list {}", next.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(folder).unwrap_or(&path);
            let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            all.insert(name.display().to_string(), bytes);
        }
    }
    Ok(all)
}

/// The digest of names and contents, and of this machine's architecture.
fn digest(parts: &[&BTreeMap<String, Vec<u8>>]) -> String {
    let mut digest = Sha256::new();
    digest.update(std::env::consts::ARCH);
    for (name, bytes) in parts.iter().copied().flatten() {
        for part in [name.as_bytes(), bytes] {
            digest.update(part.len().to_le_bytes());
            digest.update(part);
        }
    }
    let bytes = digest.finalize();
    bytes[..8].iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string does not fail");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_contents_or_names_have_different_digests() {
        let of = |files: &[(&str, &str)]| {
            let files = files
                .iter()
                .map(|(name, text)| (name.to_string(), text.as_bytes().to_vec()));
            digest(&[&files.collect()])
        };
        let some = of(&[("a", "bc"), ("d", "")]);
        assert_eq!(some.len(), 16);
        assert_eq!(some, of(&[("d", ""), ("a", "bc")]));
        for other in [
            &[("ab", "c"), ("d", "")][..],
            &[("a", "bc")],
            &[("a", "bc"), ("d", "e")],
        ] {
            assert_ne!(some, of(other));
        }
    }

    #[test]
    fn a_guest_that_cannot_be_built_leaves_its_reason_and_no_module() {
        let folder = tempfile::tempdir().unwrap();
        let language = &LANGUAGES[0];
        let module = folder.path().join("python.wasm");
        let why = folder.path().join("python.why");
        fs::write(&module, "old").unwrap();

        update_reason(&Err(anyhow::anyhow!("no network")), language, folder.path()).unwrap();
        assert!(!module.exists());
        assert_eq!(fs::read_to_string(&why).unwrap(), "no network");

        fs::write(&module, "new").unwrap();
        update_reason(&Ok(true), language, folder.path()).unwrap();
        assert!(module.exists() && !why.exists());
    }

    #[test]
    fn the_error_of_a_failed_script_has_the_end_of_its_log() {
        let folder = tempfile::tempdir().unwrap();
        let log_path = folder.path().join("log");
        let log = File::create(&log_path).unwrap();
        fs::write(
            folder.path().join("install.sh"),
            "echo installing\nfalse\necho never",
        )
        .unwrap();
        let rouse = Path::new("/nowhere/rouse");
        let error = run("install.sh", folder.path(), rouse, &log, &log_path).unwrap_err();
        let error = error.to_string();
        assert!(
            error.starts_with("install.sh: exit status: 1:\n") && error.ends_with("+ false"),
            "{error}"
        );
    }
}
