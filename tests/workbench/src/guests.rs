//! Builds the WebAssembly guests: the shipped handlers, and those that only tests load.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::wasm_toolchain::{self, Rustc};
use crate::workspace::{self, Package, Workspace};

/// The handler that is also built for wasm32-wasip1, so that tests load a core module.
const WASIP1_GUEST: &str = "handlers/text-stats";

/// The guest that takes batches. It declares a gate, which each host that loads the guest sets in its database, so the
/// guest has a folder of its own.
const BATCH_GUEST: &str = "rouse-test-guests-batch";

/// The result of placing .wasm files in a folder.
pub struct Placed {
    folder: PathBuf,
    changed: Vec<String>,
    same: usize,
}

impl fmt::Display for Placed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.folder.display())?;
        match self.changed.as_slice() {
            [] => write!(f, "{} modules, all up to date", self.same),
            changed => write!(f, "{} updated, {} unchanged", changed.join(", "), self.same),
        }
    }
}

/// Builds handlers/* into `out`. Other files in `out` are left alone, since users keep their own modules there.
pub fn build_handlers(workspace: &Workspace, out: &Path) -> Result<Placed> {
    let rustc = wasm_toolchain::ensure(workspace)?;
    let handlers = workspace.guests_in("handlers");
    let modules = build(workspace, &rustc, "wasm32-wasip2", &handlers)?;
    place(&modules, out)
}

/// Builds all modules that the tests load into `p1`, `p2` and `batch` below the returned folder.
pub fn build_test_guests(workspace: &Workspace) -> Result<PathBuf> {
    let rustc = wasm_toolchain::ensure(workspace)?;
    let folder = workspace.target_dir.join("test-guests");

    let components: Vec<_> = ["handlers", "examples", "tests"]
        .into_iter()
        .flat_map(|part| workspace.guests_in(part))
        .collect();
    let (batch, others): (Vec<_>, Vec<_>) = components
        .into_iter()
        .partition(|package| package.name == BATCH_GUEST);
    let modules = build(workspace, &rustc, "wasm32-wasip2", &others)?;
    place_only(&modules, &folder.join("p2"))?;
    let modules = build(workspace, &rustc, "wasm32-wasip2", &batch)?;
    place_only(&modules, &folder.join("batch"))?;

    let core_modules = workspace.guests_in(WASIP1_GUEST);
    let modules = build(workspace, &rustc, "wasm32-wasip1", &core_modules)?;
    place_only(&modules, &folder.join("p1"))?;
    Ok(folder)
}

/// Builds `packages` for one target in a separate target folder, so that this build and builds for the
/// host do not block or invalidate each other.
fn build(
    workspace: &Workspace,
    rustc: &Rustc,
    target: &str,
    packages: &[&Package],
) -> Result<Vec<PathBuf>> {
    if packages.is_empty() {
        return Ok(Vec::new());
    }
    let mut command = workspace.cargo("build");
    command.args(["--profile", "guest", "--target", target, "--target-dir"]);
    command.arg(workspace.target_dir.join("guests"));
    for package in packages {
        command.args(["--package", &package.name]);
    }
    rustc.apply(&mut command);
    let modules: Vec<_> = workspace::build(command)?
        .into_iter()
        .flat_map(|artifact| artifact.files)
        .filter(|file| {
            file.extension()
                .is_some_and(|extension| extension == "wasm")
        })
        .collect();
    if modules.len() != packages.len() {
        bail!(
            "{} crates for {target} produced {} .wasm files",
            packages.len(),
            modules.len()
        );
    }
    Ok(modules)
}

/// Like [`place`], and removes modules that are no longer built.
fn place_only(modules: &[PathBuf], folder: &Path) -> Result<Placed> {
    let placed = place(modules, folder)?;
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let file = entry?.path();
        if !modules
            .iter()
            .any(|module| module.file_name() == file.file_name())
        {
            fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
        }
    }
    Ok(placed)
}

/// Copies each module whose bytes have changed. Uses a temporary name, since a host may watch the folder.
fn place(modules: &[PathBuf], folder: &Path) -> Result<Placed> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let mut placed = Placed {
        folder: folder.to_owned(),
        changed: Vec::new(),
        same: 0,
    };
    for module in modules {
        let name = module.file_name().context("a module without a file name")?;
        let destination = folder.join(name);
        let bytes = fs::read(module).with_context(|| format!("read {}", module.display()))?;
        if fs::read(&destination).is_ok_and(|existing| existing == bytes) {
            placed.same += 1;
            continue;
        }
        let mut temporary = tempfile::Builder::new()
            .prefix(".")
            .suffix(".tmp")
            .tempfile_in(folder)
            .with_context(|| format!("write to {}", folder.display()))?;
        std::io::Write::write_all(&mut temporary, &bytes)
            .with_context(|| format!("write to {}", folder.display()))?;
        fs::set_permissions(temporary.path(), fs::metadata(module)?.permissions())?;
        temporary
            .persist(&destination)
            .with_context(|| format!("replace {}", destination.display()))?;
        placed.changed.push(name.to_string_lossy().into_owned());
    }
    Ok(placed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_modules_are_replaced_and_other_files_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (built, folder) = (dir.path().join("built"), dir.path().join("folder"));
        fs::create_dir_all(&built).unwrap();
        fs::create_dir_all(&folder).unwrap();
        let modules = [built.join("a.wasm"), built.join("b.wasm")];
        fs::write(&modules[0], "new").unwrap();
        fs::write(&modules[1], "same").unwrap();
        fs::write(folder.join("a.wasm"), "old").unwrap();
        fs::write(folder.join("b.wasm"), "same").unwrap();
        fs::write(folder.join("mine.wasm"), "mine").unwrap();
        let untouched_at = fs::metadata(folder.join("b.wasm"))
            .unwrap()
            .modified()
            .unwrap();

        let placed = place(&modules, &folder).unwrap();

        assert_eq!(placed.changed, ["a.wasm"]);
        assert_eq!(placed.same, 1);
        assert_eq!(fs::read(folder.join("a.wasm")).unwrap(), b"new");
        assert_eq!(
            fs::metadata(folder.join("b.wasm"))
                .unwrap()
                .modified()
                .unwrap(),
            untouched_at
        );
        let mut names: Vec<_> = fs::read_dir(&folder)
            .unwrap()
            .map(|f| f.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["a.wasm", "b.wasm", "mine.wasm"]);
    }

    #[test]
    fn a_module_that_is_no_longer_built_is_removed_from_the_test_folder() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("p2");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("gone.wasm"), "old").unwrap();
        let module = dir.path().join("a.wasm");
        fs::write(&module, "a").unwrap();

        place_only(&[module], &folder).unwrap();

        let names: Vec<_> = fs::read_dir(&folder)
            .unwrap()
            .map(|f| f.unwrap().file_name())
            .collect();
        assert_eq!(names, ["a.wasm"]);
    }
}
