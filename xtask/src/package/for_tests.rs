//! Prepares tests/it/package.rs: the package of the tested binary, and a Debian system to install it into.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use rouse_workbench::workspace::Workspace;

use super::{deb, succeed};
use crate::tool::CARGO_DEB;

/// Creates both, and returns their folder. If one cannot be created, a file contains the reason: `rouse.why` or
/// `debian.why`.
pub(crate) fn prepare(workspace: &Workspace, install: bool) -> Result<PathBuf> {
    let folder = workspace.target_dir.join("test-package");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let package = package(workspace, install, &folder);
    update_reason(&folder.join("rouse.why"), package)?;
    update_reason(
        &folder.join("debian.why"),
        debian(&folder.join("debian.tar")),
    )?;
    Ok(folder)
}

fn package(workspace: &Workspace, install: bool, folder: &Path) -> Result<()> {
    let made = deb(workspace, &CARGO_DEB.find(install)?, "dev", folder)?;
    fs::rename(made, folder.join("rouse.deb")).context("rename the package")
}

/// The smallest system that debootstrap makes, of this machine's release, because the binary is linked with its
/// libraries. It takes half a minute and is kept: tests change only a copy.
fn debian(archive: &Path) -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "only root can run debootstrap and chroot"
    );
    if archive.is_file() {
        return Ok(());
    }
    let version = Command::new("debootstrap").arg("--version").output();
    ensure!(
        version.is_ok_and(|output| output.status.success()),
        "debootstrap is not installed: run `apt-get install debootstrap`"
    );
    let release = fs::read_to_string("/etc/os-release").context("read /etc/os-release")?;
    let codename = codename(&release).context("/etc/os-release has no VERSION_CODENAME")?;
    let targets = succeed(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(CODENAME) $(COMPONENT) $(REPO_URI)",
        "Created-By: Packages",
    ]))?;
    let mirror = mirror(&targets, codename)
        .with_context(|| format!("apt has no mirror of {codename}: run `apt-get update`"))?;
    eprintln!("installing Debian {codename} from {mirror}, for the test of the package");
    let folder = tempfile::tempdir().context("create a folder for debootstrap")?;
    succeed(
        Command::new("debootstrap")
            .args(["--variant=minbase", codename])
            .arg(folder.path())
            .arg(mirror),
    )?;
    let unfinished = archive.with_extension("new");
    succeed(
        Command::new("tar")
            .args(["--exclude=./var/cache/apt/archives/*.deb", "-cf"])
            .arg(&unfinished)
            .arg("-C")
            .arg(folder.path())
            .arg("."),
    )?;
    fs::rename(&unfinished, archive).with_context(|| format!("write {}", archive.display()))
}

/// Writes the reason for a failure to a file. After a success, removes an older reason.
fn update_reason(why: &Path, made: Result<()>) -> Result<()> {
    match made {
        Ok(()) if why.exists() => fs::remove_file(why),
        Ok(()) => Ok(()),
        Err(error) => fs::write(why, format!("{error:#}")),
    }
    .with_context(|| format!("update {}", why.display()))
}

fn codename(os_release: &str) -> Option<&str> {
    let value = (os_release.lines()).find_map(|line| line.strip_prefix("VERSION_CODENAME="))?;
    Some(value.trim_matches('"')).filter(|name| !name.is_empty())
}

/// The first URL that apt has for the component `main` of a release.
fn mirror<'a>(targets: &'a str, codename: &str) -> Option<&'a str> {
    let wanted = format!("{codename} main ");
    targets.lines().find_map(|line| line.strip_prefix(&wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_and_its_mirror_are_read_from_the_machine() {
        let debian = "NAME=\"Debian GNU/Linux\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        assert_eq!(codename(debian), Some("bookworm"));
        assert_eq!(codename("NAME=Arch\n"), None);
        let targets = "bookworm-security main http://security/\n\
                       bookworm contrib http://one/\n\
                       bookworm main http://one/\nbookworm main http://two/\n";
        assert_eq!(mirror(targets, "bookworm"), Some("http://one/"));
        assert_eq!(mirror(targets, "trixie"), None);
    }

    #[test]
    fn a_reason_is_removed_after_a_success() {
        let folder = tempfile::tempdir().unwrap();
        let why = folder.path().join("rouse.why");
        update_reason(&why, Err(anyhow::anyhow!("no network").context("get it"))).unwrap();
        assert_eq!(fs::read_to_string(&why).unwrap(), "get it: no network");
        update_reason(&why, Ok(())).unwrap();
        assert!(!why.exists());
        update_reason(&why, Ok(())).unwrap();
    }
}
