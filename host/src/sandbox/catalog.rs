//! The handlers that a folder of WebAssembly files offers.

mod entry;
mod file;
mod folder;
mod gate;
mod handler;
mod line;
mod loading;
mod naming;
mod owners;
mod set;
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
use crate::harmless;

/// The handlers that a folder offers, kept in step with it.
///
/// Files named `*.wasm` count. A broken one is refused with a reason, while its last good
/// version and all other files serve. The name of a handler belongs to the file that served it first, unless the operator
/// binds it; one that two files have at a start belongs to neither.
pub struct Catalog {
    dir: PathBuf,
    published: Arc<Published>,
    loads: Arc<Loads>,
    /// Here until [`watch`](Self::watch) takes it.
    folder: Mutex<Option<(Folder, mpsc::Receiver<Wake>)>>,
    wake: mpsc::Sender<Wake>,
}

impl Catalog {
    /// Loads everything that is in the folder now. What is broken is in
    /// [`HandlerSet::refused`] and in the log.
    ///
    /// # Errors
    /// When the folder cannot be read, or what is kept of its names cannot be used.
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

    /// Starts to load what is in the folder, and follows it from now on; each module serves as soon as it is ready.
    ///
    /// # Errors
    /// When the folder cannot be read, or what is kept of its names cannot be used.
    pub async fn start(sandbox: Arc<Sandbox>, dir: impl AsRef<Path>) -> anyhow::Result<Self> {
        let dir = dir.as_ref().to_owned();
        let listed = tokio::task::spawn_blocking(move || Self::list(sandbox, dir));
        let catalog = listed.await.context("list the handlers folder")??;
        catalog.watch();
        Ok(catalog)
    }

    /// Starts to load what is there.
    fn list(sandbox: Arc<Sandbox>, dir: PathBuf) -> anyhow::Result<Self> {
        if !dir.is_dir() {
            bail!(
                "there is no handlers folder {}; create it, or name another with --handlers",
                dir.display()
            );
        }
        let (wake, wakes) = mpsc::channel();
        let loads = Arc::new(Loads::default());
        let mut folder = Folder::new(sandbox, dir.clone(), loads.clone(), wake.clone())?;
        // A host that has just been started has nothing better to do than to read what is there,
        // however fresh it is.
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

    /// Waits until all of it is loaded.
    fn load(&self) {
        let mut following = lock(&self.folder);
        let Some((folder, wakes)) = following.as_mut() else {
            return;
        };
        folder.start_no_longer();
        loop {
            while folder.is_loading() {
                if let Ok(Wake::Loaded(loaded)) = wakes.recv() {
                    folder.finish(loaded);
                }
            }
            // What was written to meanwhile.
            folder.scan(&Trust::Everything);
            if !folder.is_loading() {
                break;
            }
        }
        folder.settle_names();
        self.published.publish(folder.handlers());
    }

    /// Follows the folder from now on, on a thread of its own, until the catalog is dropped. A
    /// change is served within a second. Called again, it does nothing.
    pub fn watch(&self) {
        let folder = lock(&self.folder).take();
        if let Some((folder, wakes)) = folder {
            watch::start(folder, wakes, self.wake.clone(), self.published.clone());
        }
    }

    /// Waits until each file that was there at the start was tried; those that take their compiler long may be at it still.
    pub async fn tried(&self) -> Arc<HandlerSet> {
        self.until(|handlers| !handlers.is_loading()).await
    }

    /// Waits until the handlers are like that, while the catalog follows its folder.
    pub async fn until(&self, is: impl Fn(&HandlerSet) -> bool) -> Arc<HandlerSet> {
        let mut changed = self.changed();
        loop {
            let handlers = self.current();
            if is(&handlers) {
                return handlers;
            }
            let alive = changed.changed().await;
            alive.expect("the catalog is borrowed, and has the other end");
        }
    }

    /// What it has taken to load the modules.
    pub fn loads(&self) -> &Loads {
        &self.loads
    }

    /// What the folder offers now.
    pub fn current(&self) -> Arc<HandlerSet> {
        self.published.current.load_full()
    }

    /// The digests of the files in a folder that could be modules, by name.
    ///
    /// # Errors
    /// When the folder, or one of them, cannot be read, or one has a name that cannot stand in a line.
    pub fn digests(dir: &Path, bytes_max: usize) -> anyhow::Result<BTreeMap<String, Digest>> {
        let listed = file::list(dir, false)
            .map_err(|why| anyhow::anyhow!("the folder {} cannot be read: {why}", dir.display()))?;
        let digest = |(name, listed): (String, file::Listed)| match file::read(&listed, bytes_max) {
            Ok(Some(bytes)) => Ok((name, Digest::of(&bytes))),
            Ok(None) => bail!("{} is being written to; try again", harmless::name(&name)),
            Err(why) => bail!("{} cannot be listed: {why}", harmless::name(&name)),
        };
        listed.into_iter().map(digest).collect()
    }

    /// The [proof](Digest::proof) that this host has the file of a module. Blocks while it reads the file.
    ///
    /// # Errors
    /// When the folder no longer has that file, or has other bytes under its name; a sentence that starts with "it …" or "its …".
    pub fn prove(&self, module: &Module, nonce: &str, bytes_max: usize) -> Result<Digest, String> {
        let path = self.dir.join(&module.file);
        let stamp = file::Stamp::at(&path).ok_or("its file is gone")?;
        let listed = file::Listed {
            path,
            stamp,
            signature: None,
        };
        match file::read(&listed, bytes_max)? {
            Some(bytes) if Digest::of(&bytes) == module.digest => Ok(Digest::proof(nonce, &bytes)),
            Some(_) | None => Err("its file has changed since it was loaded".into()),
        }
    }

    /// What is free on the disk that the folder is on, bytes; none where that cannot be told.
    pub fn disk_free_bytes(&self) -> Option<u64> {
        let disk = rustix::fs::statvfs(&self.dir).ok()?;
        Some(disk.f_bavail * disk.f_frsize)
    }

    /// Tells of each new [`current`](Self::current): a number that grows.
    pub fn changed(&self) -> channel::Receiver<u64> {
        self.published.version.subscribe()
    }
}

impl Drop for Catalog {
    fn drop(&mut self) {
        // When nobody receives, no thread was started, or it has ended already.
        let _ = self.wake.send(Wake::Stop);
    }
}
