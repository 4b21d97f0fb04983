//! The handlers that a folder of WebAssembly files offers.

mod entry;
mod file;
mod folder;
mod gate;
mod line;
mod loading;
mod owners;
mod watch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use anyhow::{Context, bail};
use arc_swap::ArcSwap;
use tokio::sync::watch as channel;

use self::folder::{Folder, Trust};
use super::capability::HttpAccess;
use super::grants::{Granted, held, lines, missing};
use super::{
    Attenuation, Capability, Digest, HandlerManifest, Limits, Loads, Missing, Module, Sandbox,
    StateQuota, Withheld,
};
use crate::harmless;

/// A handler that can run.
#[derive(Debug)]
pub struct Handler {
    /// What its module says of it.
    pub manifest: HandlerManifest,
    /// The module that it is in.
    pub module: Arc<Module>,
    /// The manifest's name once more: what an attempt says carries it.
    pub(super) name: Arc<str>,
    pub(super) granted: Arc<Granted>,
    /// What its attempts may use.
    pub limits: Limits,
    pub(super) http: Arc<HttpAccess>,
    /// How much it may keep; none: nothing.
    pub state: Option<StateQuota>,
    /// It would keep something, and the job leaves nothing of it.
    pub(super) state_is_taken: bool,
    /// Its instances may serve many jobs: module and operator agree.
    pub reuses: bool,
    /// The file that its name belongs to: its module's, or one that is gone and had the same content.
    pub owner: String,
    /// The table of `rouse.toml` that binds its name; none: the name belongs to the file that had it first.
    pub bound_by: Option<String>,
    /// What tables grant to it, and do not until they say which module they are for.
    pub withheld: Vec<Withheld>,
}

/// The kinds of capabilities that an operator can grant, as [`Handler::granted`] names them.
pub const GRANTS: [&str; 8] = [
    "files",
    "http",
    "secrets",
    "sign",
    "state",
    "env",
    "settings",
    "fine_clocks",
];

impl Handler {
    /// The kinds of capabilities that the operator has granted to it.
    pub fn granted(&self) -> Vec<&'static str> {
        let granted = [
            !self.granted.dirs.is_empty(),
            self.http.sends(),
            !self.http.sent_names().is_empty(),
            !self.http.signing_names().is_empty(),
            self.state.is_some(),
            !self.granted.env.is_empty(),
            self.granted.settings.is_some(),
            self.granted.fine_clocks,
        ];
        GRANTS
            .into_iter()
            .zip(granted)
            .filter_map(|(word, granted)| granted.then_some(word))
            .collect()
    }

    /// All that the operator has granted to it, in the words of manifests.
    pub fn held(&self) -> Vec<Capability> {
        held(&self.granted, &self.http, self.state)
    }

    /// What it asks for and is not granted.
    pub fn missing(&self) -> Vec<Missing> {
        let asked = &self.manifest.capabilities;
        let missing = missing(&self.name, asked, &self.granted, &self.http, self.state);
        let binding =
            (self.bound_by.is_none()).then(|| lines::module(&self.name, &self.module.file));
        let with_binding = |one: Missing| {
            let lines = match (&one.what, &binding) {
                // They are for modules that are bound.
                (Capability::Secrets(_) | Capability::Sign(_), Some(binding)) => {
                    let own = one.lines.as_deref().unwrap_or_default();
                    Some(format!("{binding}\n\n{own}"))
                }
                _ => one.lines,
            };
            Missing {
                lines: self.lines_to_bind(&one.what).or(lines),
                what: one.what,
            }
        };
        missing.into_iter().map(with_binding).collect()
    }

    /// The lines that would grant this by binding the tables that have something of the kind; none where none has.
    fn lines_to_bind(&self, what: &Capability) -> Option<String> {
        let kind = match what {
            Capability::Secrets(_) | Capability::Sign(_) => "secrets",
            Capability::Dirs(_) => "dirs",
            Capability::State => "state",
            Capability::Http(_)
            | Capability::Env(_)
            | Capability::Settings(_)
            | Capability::FineClocks
            | Capability::Unknown(_) => return None,
        };
        let withheld = self.withheld.iter().filter(|it| it.what == kind);
        let lines: Vec<&str> = withheld.map(|it| it.lines.as_str()).collect();
        (!lines.is_empty()).then(|| lines.join("\n\n"))
    }

    /// The same handler with what a job leaves of its grants and limits. Its instances serve that job alone.
    pub fn attenuated(&self, job: &Attenuation) -> Arc<Self> {
        Arc::new(Self {
            manifest: self.manifest.clone(),
            module: self.module.clone(),
            name: self.name.clone(),
            granted: Arc::new(self.granted.attenuated(job)),
            limits: self.limits.attenuated(job),
            http: self.http.attenuated(job),
            state: self.state.filter(|_| job.leaves_state()),
            state_is_taken: self.state.is_some() && !job.leaves_state(),
            reuses: false,
            owner: self.owner.clone(),
            bound_by: self.bound_by.clone(),
            withheld: self.withheld.clone(),
        })
    }
}

/// A file that is not served, or not in its newest version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The file's name in the folder, with its control characters shown.
    pub file: String,
    /// Why; a sentence that starts with "it …", in one line.
    pub why: String,
    /// The lines of `rouse.toml` that would allow it, where that is the operator's to say.
    pub lines: Option<String>,
    /// True when the last good version of the file still serves.
    pub last_good_serves: bool,
}

/// What a folder offers at one moment. Never changes; a running attempt keeps its handler.
#[derive(Debug, Default)]
pub struct HandlerSet {
    /// The handlers by name.
    pub handlers: BTreeMap<String, Arc<Handler>>,
    /// What was refused, by file name.
    pub refused: Vec<Refusal>,
    /// Files that have not been tried yet, by name.
    pub loading: Vec<String>,
    /// Files that take their compiler long, by name. They are compiled behind all others, and nothing waits for them.
    pub slow: Vec<String>,
    /// Why the folder cannot be read, where it cannot; everything goes on serving then.
    pub unreadable: Option<String>,
}

impl HandlerSet {
    /// The handler of that name.
    pub fn get(&self, name: &str) -> Option<&Arc<Handler>> {
        self.handlers.get(name)
    }

    /// True while there are files that nobody has tried yet.
    pub fn is_loading(&self) -> bool {
        !self.loading.is_empty()
    }

    /// The names of the handlers, in order.
    pub fn names(&self) -> Vec<String> {
        self.handlers.keys().cloned().collect()
    }
}

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
    folder: Mutex<Option<(Folder, mpsc::Receiver<watch::Wake>)>>,
    wake: mpsc::Sender<watch::Wake>,
}

struct Published {
    current: ArcSwap<HandlerSet>,
    version: channel::Sender<u64>,
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
        let published = Published {
            current: ArcSwap::from_pointee(folder.handlers()),
            version: channel::Sender::new(0),
        };
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
                if let Ok(watch::Wake::Loaded(loaded)) = wakes.recv() {
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

impl Published {
    fn publish(&self, handlers: HandlerSet) {
        self.current.store(Arc::new(handlers));
        self.version.send_modify(|version| *version += 1);
    }
}

impl Drop for Catalog {
    fn drop(&mut self) {
        // When nobody receives, no thread was started, or it has ended already.
        let _ = self.wake.send(watch::Wake::Stop);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
