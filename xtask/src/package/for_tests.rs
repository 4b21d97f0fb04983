//! What tests/it/package.rs needs: the package of the binary that is tested, and a Debian to install it into.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use rouse_workbench::workspace::Workspace;

use super::{deb, succeed};
use crate::tool::CARGO_DEB;

/// Makes both, and returns their folder. What cannot be made leaves the reason in its place: `rouse.why`, `debian.why`.
pub(crate) fn prepare(workspace: &Workspace, install: bool) -> Result<PathBuf> {
    let folder = workspace.target_dir.join("test-package");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let package = package(workspace, install, &folder);
    keep(&folder.join("rouse.why"), package)?;
    keep(
        &folder.join("debian.why"),
        debian(&folder.join("debian.tar")),
    )?;
    Ok(folder)
}

fn package(workspace: &Workspace, install: bool, folder: &Path) -> Result<()> {
    let made = deb(workspace, &CARGO_DEB.find(install)?, "dev", folder)?;
    fs::rename(made, folder.join("rouse.deb")).context("name the package")
}

/// The smallest system that debootstrap makes, of the release of this machine, whose libraries the binary is linked with. Kept:
/// it takes half a minute, and tests change a copy.
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
        "there is no debootstrap on this machine (apt-get install debootstrap)"
    );
    let release = fs::read_to_string("/etc/os-release").context("read /etc/os-release")?;
    let codename = codename(&release).context("/etc/os-release names no release of Debian")?;
    let targets = succeed(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(CODENAME) $(COMPONENT) $(REPO_URI)",
        "Created-By: Packages",
    ]))?;
    let mirror = mirror(&targets, codename)
        .with_context(|| format!("apt knows no mirror of {codename}: run apt-get update"))?;
    eprintln!("making a Debian {codename} for the test of the package, from {mirror}");
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

/// Leaves the reason of a failure, and removes an older one.
fn keep(why: &Path, made: Result<()>) -> Result<()> {
    match made {
        Ok(()) if why.exists() => fs::remove_file(why),
        Ok(()) => Ok(()),
        Err(error) => fs::write(why, format!("{error:#}")),
    }
    .with_context(|| format!("change {}", why.display()))
}

fn codename(os_release: &str) -> Option<&str> {
    let value = (os_release.lines()).find_map(|line| line.strip_prefix("VERSION_CODENAME="))?;
    Some(value.trim_matches('"')).filter(|name| !name.is_empty())
}

/// The first address that apt has for the main part of a release.
fn mirror<'a>(targets: &'a str, codename: &str) -> Option<&'a str> {
    let wanted = format!("{codename} main ");
    targets.lines().find_map(|line| line.strip_prefix(&wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_and_its_mirror_are_those_of_the_machine() {
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
    fn a_reason_stays_only_as_long_as_there_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let why = folder.path().join("rouse.why");
        keep(&why, Err(anyhow::anyhow!("no network").context("get it"))).unwrap();
        assert_eq!(fs::read_to_string(&why).unwrap(), "get it: no network");
        keep(&why, Ok(())).unwrap();
        assert!(!why.exists());
        keep(&why, Ok(())).unwrap();
    }
}
