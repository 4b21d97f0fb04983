//! The handlers in a folder of WebAssembly files.

mod entry;
mod file;
mod folder;
mod handler;
mod load_queue;
mod loading;
mod naming;
mod owners;
mod set;
mod verification;
mod watch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};

use anyhow::{Context, bail};
use tokio::sync::watch as channel;

use self::folder::{Folder, Trust};
pub use self::handler::{GRANTS, Handler};
use self::loading::{Wake, lock};
use self::set::Published;
pub use self::set::{HandlerSet, Refusal};
use super::{Digest, Loads, Module, Sandbox};
use crate::sanitize;

/// The handlers that a folder offers, kept up to date with it.
///
/// Only files named `*.wasm` count. A broken file is refused with a reason, while its last good version and all other
/// files keep serving. A handler's name belongs to the file that served it first, unless the operator binds it. If two
/// files claim the same name when a host starts, neither serves it.
pub struct Catalog {
    dir: PathBuf,
    published: Arc<Published>,
    loads: Arc<Loads>,
    /// Present until [`watch`](Self::watch) takes it.
    folder: Mutex<Option<(Folder, mpsc::Receiver<Wake>)>>,
    wake: mpsc::Sender<Wake>,
}

impl Catalog {
    /// Loads everything that is in the folder now. Broken files are listed in [`HandlerSet::refused`] and in the log.
    ///
    /// # Errors
    /// When the folder, or the saved ownership of its handler names, cannot be read.
    pub async fn open(sandbox: Arc<Sandbox>, dir: impl AsRef<Path>) -> anyhow::Result<Self> {
        let dir = dir.as_ref().to_owned();
        tokio::task::spawn_blocking(move || {
            let catalog = Self::list(sandbox, dir)?;
            catalog.load();
            Ok(catalog)
        })
        .await
        .context("load the handlers folder")?
    }

    /// Starts to load the folder, and follows it. Each module serves as soon as it is ready.
    ///
    /// # Errors
    /// When the folder, or the saved ownership of its handler names, cannot be read.
    pub async fn start(sandbox: Arc<Sandbox>, dir: impl AsRef<Path>) -> anyhow::Result<Self> {
        let dir = dir.as_ref().to_owned();
        let listed = tokio::task::spawn_blocking(move || Self::list(sandbox, dir));
        let catalog = listed.await.context("list the handlers folder")??;
        catalog.watch();
        Ok(catalog)
    }

    /// Lists the folder and starts to load its files.
    fn list(sandbox: Arc<Sandbox>, dir: PathBuf) -> anyhow::Result<Self> {
        if !dir.is_dir() {
            bail!(
                "the handlers folder {} does not exist; create it, or name another folder with --handlers",
                dir.display()
            );
        }
        let (wake, wakes) = mpsc::channel();
        let loads = Arc::new(Loads::default());
        let mut folder = Folder::new(sandbox, dir.clone(), loads.clone(), wake.clone())?;
        // When a host starts, it reads every file at once, however recently the file was written.
        folder.scan(&Trust::Everything);
        let published = Published::new(folder.handlers());
        Ok(Self {
            dir,
            published: Arc::new(published),
            loads,
            folder: Mutex::new(Some((folder, wakes))),
            wake,
        })
    }

    /// Waits until all files are loaded.
    fn load(&self) {
        let mut folder = lock(&self.folder);
        let Some((folder, wakes)) = folder.as_mut() else {
            return;
        };
        folder.end_start_when_loaded();
        loop {
            while folder.is_loading() {
                if let Ok(Wake::Loaded(loaded)) = wakes.recv() {
                    folder.finish(loaded);
                }
            }
            // Finds files that were written to in the meantime.
            folder.scan(&Trust::Everything);
            if !folder.is_loading() {
                break;
            }
        }
        folder.settle_names();
        self.published.publish(folder.handlers());
    }

    /// Follows the folder on a thread of its own until the catalog is dropped. Changes are served within a second. A
    /// second call does nothing.
    pub fn watch(&self) {
        let folder = lock(&self.folder).take();
        if let Some((folder, wakes)) = folder {
            watch::start(folder, wakes, self.wake.clone(), self.published.clone());
        }
    }

    /// Waits until each file that was present at startup has been tried; slow ones may still be loading.
    pub async fn tried(&self) -> Arc<HandlerSet> {
        self.until(|handlers| !handlers.is_loading()).await
    }

    /// Waits until the condition is true for the handlers, while the catalog follows its folder.
    pub async fn until(&self, condition: impl Fn(&HandlerSet) -> bool) -> Arc<HandlerSet> {
        let mut changed = self.changed();
        loop {
            let handlers = self.current();
            if condition(&handlers) {
                return handlers;
            }
            let alive = changed.changed().await;
            alive.expect("the catalog is borrowed, and has the sender");
        }
    }

    /// Counters of the work done to load modules.
    pub fn loads(&self) -> &Loads {
        &self.loads
    }

    /// The handlers that the folder offers now.
    pub fn current(&self) -> Arc<HandlerSet> {
        self.published.current.load_full()
    }

    /// The digests of the module files in a folder, by file name.
    ///
    /// # Errors
    /// When the folder or one of the files cannot be read, or a file name cannot be written on one line.
    pub fn digests(dir: &Path, bytes_max: usize) -> anyhow::Result<BTreeMap<String, Digest>> {
        let listing = file::list(dir, false)
            .map_err(|why| anyhow::anyhow!("the folder {} cannot be read: {why}", dir.display()))?;
        let digest = |(name, listed): (String, file::Listed)| match file::read(&listed, bytes_max) {
            Ok(Some(bytes)) => Ok((name, Digest::compute(&bytes))),
            Ok(None) => bail!("{} is being written to; try again", sanitize::name(&name)),
            Err(unusable) => bail!(
                "{} cannot be listed: {}",
                sanitize::name(&name),
                unusable.why()
            ),
        };
        if let Some((name, why)) = listing.unreadable.into_iter().next() {
            bail!("{} cannot be listed: {}", sanitize::name(&name), why.why());
        }
        listing.files.into_iter().map(digest).collect()
    }

    /// The [proof](Digest::proof) that this host has the file of a module. Blocks while it reads the file.
    ///
    /// # Errors
    /// When the folder no longer has that file, or its content has changed; a sentence that starts with "it …" or
    /// "its …".
    pub fn prove(&self, module: &Module, nonce: &str, bytes_max: usize) -> Result<Digest, String> {
        let path = self.dir.join(&module.file);
        let stamp = file::Stamp::at(&path).ok_or("its file was removed")?;
        let listed = file::Listed {
            path,
            stamp,
            signature: None,
        };
        match file::read(&listed, bytes_max).map_err(file::Unusable::why)? {
            Some(bytes) if Digest::compute(&bytes) == module.digest => {
                Ok(Digest::proof(nonce, &bytes))
            }
            Some(_) | None => Err("its file has changed since it was loaded".into()),
        }
    }

    /// Free space on the folder's disk, bytes; `None` if it cannot be determined.
    pub fn disk_free_bytes(&self) -> Option<u64> {
        let disk = rustix::fs::statvfs(&self.dir).ok()?;
        Some(disk.f_bavail * disk.f_frsize)
    }

    /// Notifies of each new [`current`](Self::current) with an increasing number.
    pub fn changed(&self) -> channel::Receiver<u64> {
        self.published.version.subscribe()
    }
}

impl Drop for Catalog {
    fn drop(&mut self) {
        // If there is no receiver, the thread has already ended.
        let _ = self.wake.send(Wake::Stop);
    }
}
