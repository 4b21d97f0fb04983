//! Creates the cluster, once for each data directory.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::Write,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::Path,
    process::Command,
};

use super::{Settings, StartError, USER, binaries::Binaries, child, error::Trying, home::Home};

/// Creates the cluster if it does not exist. It is created under a temporary name and then renamed, so that a crash in
/// between leaves nothing that looks like a cluster.
pub(super) fn ensure(
    home: &Home,
    binaries: &Binaries,
    settings: &Settings,
) -> Result<(), StartError> {
    let fsync = settings.fsync;
    let cluster = home.cluster();
    if cluster.join("PG_VERSION").is_file() {
        return home.account.must_own(&cluster);
    }
    let unfinished = home.dir.join("cluster.new");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)
            .trying(|| format!("remove the unfinished {}", unfinished.display()))?;
    }
    DirBuilder::new()
        .mode(0o700)
        .create(&unfinished)
        .trying(|| format!("create the directory {}", unfinished.display()))?;
    home.account.own(&unfinished)?;
    let password = home.password_path();
    write_new_password(home, &password)?;

    let mut command = Command::new(binaries.program("initdb"));
    command
        .arg("-D")
        .arg(&unfinished)
        .args(["-U", USER, "-E", "UTF8", "--locale=C"])
        .args(["--auth-local=trust", "--auth-host=scram-sha-256"])
        .arg("--pwfile")
        .arg(&password)
        .env("LC_ALL", "C")
        .current_dir("/");
    if !fsync {
        command.arg("--no-sync");
    }
    home.account.run_as(&mut command);
    tracing::debug!("creating a Postgres cluster in {}", cluster.display());
    let output = child::output(&mut command, &settings.cancel).trying(|| "run initdb".into())?;
    if settings.cancel.is_cancelled() {
        return Err(StartError::Cancelled);
    }
    if !output.status.success() {
        let printed = [output.stdout, output.stderr].concat();
        return Err(StartError::InitDb {
            path: cluster,
            output: String::from_utf8_lossy(&printed).trim_end().to_owned(),
        });
    }
    let renamed = fs::rename(&unfinished, &cluster).and_then(|()| {
        if fsync {
            File::open(&home.dir)?.sync_all()
        } else {
            Ok(())
        }
    });
    renamed.trying(|| format!("move the new cluster to {}", cluster.display()))
}

/// Writes a new password for the cluster's superuser, for TCP. initdb sets it, so it exists from the start; the file
/// belongs to the server's user, because initdb reads it as that user.
fn write_new_password(home: &Home, path: &Path) -> Result<(), StartError> {
    let operation = || format!("write {}", path.display());
    match fs::remove_file(path) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).trying(operation),
    }
    let text = format!("{:032x}\n", rand::random::<u128>());
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .trying(operation)?;
    home.account.own(path)
}

/// Reads the password from the file.
pub(super) fn password(home: &Home) -> Result<String, StartError> {
    let path = home.password_path();
    match fs::read_to_string(&path) {
        Ok(text) => Ok(text.trim_end().to_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(StartError::PasswordLost { path })
        }
        Err(error) => Err(error).trying(|| format!("read {}", path.display())),
    }
}
