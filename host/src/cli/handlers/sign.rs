//! `rouse handlers keygen` and `rouse handlers sign`: signatures of modules.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, anyhow, ensure};
use clap::Args as ClapArgs;

use super::lock::replace;
use crate::cli::text::plain;
use crate::sandbox::SigningKey;

/// Options of `rouse handlers keygen`.
#[derive(Debug, ClapArgs)]
pub(super) struct KeygenArgs {
    /// The file for the secret key; it must not exist yet
    #[arg(value_name = "FILE")]
    key: PathBuf,
}

/// Options of `rouse handlers sign`.
#[derive(Debug, ClapArgs)]
pub(super) struct SignArgs {
    /// The file with the secret key, made by `rouse handlers keygen`
    #[arg(long, value_name = "FILE")]
    key: PathBuf,

    /// The modules; the signature of x.wasm is written to x.wasm.sig next to it
    #[arg(value_name = "MODULE", required = true)]
    modules: Vec<PathBuf>,
}

/// Makes a key, and prints its public key.
pub(super) fn keygen(args: &KeygenArgs) -> anyhow::Result<ExitCode> {
    let secret = SigningKey::random();
    let key: SigningKey = secret.parse().map_err(|why: String| anyhow!(why))?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&args.key)
        .with_context(|| format!("create the key file {}", args.key.display()))?;
    writeln!(file, "{secret}")
        .and_then(|()| file.sync_all())
        .with_context(|| format!("write the key {}", args.key.display()))?;
    println!("trusted_keys = [\"{}\"]", key.public());
    Ok(ExitCode::SUCCESS)
}

/// Signs modules, and prints the path of each signature.
pub(super) fn sign(args: &SignArgs) -> anyhow::Result<ExitCode> {
    let key = read(&args.key)?;
    for module in &args.modules {
        let bytes = fs::read(module).with_context(|| format!("read {}", module.display()))?;
        let mut path = module.as_os_str().to_owned();
        path.push(".sig");
        let path = PathBuf::from(path);
        replace(&path, &format!("{}\n", key.sign(&bytes)))?;
        println!("{}", plain(&path.display().to_string()));
    }
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> anyhow::Result<SigningKey> {
    let metadata =
        fs::metadata(path).with_context(|| format!("open the key {}", path.display()))?;
    ensure!(
        metadata.mode() & 0o077 == 0,
        "other users can read the key {}; run `chmod 600` on it",
        path.display()
    );
    let text =
        fs::read_to_string(path).with_context(|| format!("read the key {}", path.display()))?;
    let key: Result<SigningKey, String> = text.parse();
    key.map_err(|why| anyhow!("{}: {why}", path.display()))
}
