//! Loads modules on threads of their own, so that a slow one does not delay the others.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread;

use super::file::{self, Listed, Unusable};
use super::load_queue::{LoadQueue, Next};
use super::verification::Rules;
use crate::sandbox::module::compile::{Compiler, Try};
use crate::sandbox::module::load::load;
use crate::sandbox::module::refused::NotLoaded;
use crate::sandbox::{Digest, Loads, Module, Sandbox};

/// A file to load.
pub(super) struct Order {
    pub(super) file: String,
    /// The number of the order, which identifies the version of the file.
    pub(super) number: u64,
    pub(super) listed: Listed,
    pub(super) rules: Arc<Rules>,
    /// The contents that were refused before; they are not tried again.
    pub(super) refused: Option<Digest>,
}

/// The outcome of an order.
pub(super) struct Loaded {
    pub(super) file: String,
    pub(super) number: u64,
    pub(super) outcome: Outcome,
}

/// The result of loading a file.
pub(super) enum Outcome {
    Module(Arc<Module>),
    /// It was written to or removed in the meantime.
    Changed,
    /// The same contents were refused before.
    StillRefused,
    /// With the digest if the contents are the cause.
    Refused(String, Option<Digest>),
    /// Refused because of the state of the machine; it may be accepted later.
    Transient(String),
    /// It is slow to compile or to describe itself, and waits until all others have been tried.
    Slow,
}

impl From<Unusable> for Outcome {
    fn from(unusable: Unusable) -> Self {
        match unusable {
            Unusable::UntilChanged(why) => Self::Refused(why, None),
            Unusable::ForNow(why) => Self::Transient(why),
        }
    }
}

/// An event that wakes the thread that follows the folder.
pub(super) enum Wake {
    /// Something happened in the folder; these files were renamed into place.
    Changed { renamed: Vec<PathBuf> },
    /// A load has finished.
    Loaded(Loaded),
    /// The catalog was dropped.
    Stop,
}

/// Loads files, up to a maximum at once.
pub(super) struct Loader(Arc<Shared>);

struct Shared {
    sandbox: Arc<Sandbox>,
    queue: Mutex<LoadQueue<Order>>,
    /// Known contents are not compiled again.
    known: Mutex<Known<Module>>,
    loads: Arc<Loads>,
    /// Receives the outcomes.
    done: mpsc::Sender<Wake>,
}

impl Loader {
    pub(super) fn new(sandbox: Arc<Sandbox>, loads: Arc<Loads>, done: mpsc::Sender<Wake>) -> Self {
        Self(Arc::new(Shared {
            queue: Mutex::new(LoadQueue::new(sandbox.settings().compilations_max)),
            sandbox,
            known: Mutex::new(Known(HashMap::new())),
            loads,
            done,
        }))
    }

    /// Loads a file; the outcome is sent to `done`.
    pub(super) fn load(&self, order: Order) {
        lock(&self.0.queue).push(order);
        self.0.start();
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        lock(&self.0.queue).clear();
    }
}

impl Shared {
    /// Starts a thread for each file that may be loaded now.
    fn start(self: &Arc<Self>) {
        while let Some(next) = lock(&self.queue).take() {
            let (Next::First(order) | Next::Retry(order)) = &next;
            let (file, number) = (order.file.clone(), order.number);
            let is_first = matches!(next, Next::First(_));
            let shared = self.clone();
            let thread = thread::Builder::new()
                .name("rouse-load".into())
                .spawn(move || shared.run(next));
            if let Err(error) = thread {
                self.done(is_first);
                let why =
                    format!("it could not be loaded, because no thread could be started: {error}");
                self.report(file, number, Outcome::Transient(why));
            }
        }
    }

    fn done(&self, is_first: bool) {
        let mut queue = lock(&self.queue);
        match is_first {
            true => queue.done_first(),
            false => queue.done_retry(),
        }
    }

    /// Loads one file after another, all of them with one compiler.
    fn run(self: Arc<Self>, first: Next<Order>) {
        let mut compiler = Compiler::new(self.sandbox.clone(), self.loads.clone());
        let mut next = Some(first);
        while let Some(now) = next {
            let (is_first, which, order) = match now {
                Next::First(order) => (true, Try::First, order),
                Next::Retry(order) => (false, Try::Second, order),
            };
            let (file, number) = (order.file.clone(), order.number);
            // A panic is caught, because the load would otherwise be counted as running forever.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                self.try_load(&order, which, &mut compiler)
            }))
            .unwrap_or_else(|_| {
                Outcome::Refused(
                    "it made the host panic; this is a bug in Rouse".into(),
                    None,
                )
            });
            if let Outcome::Slow = outcome {
                lock(&self.queue).push_retry(order);
            }
            self.report(file, number, outcome);
            self.done(is_first);
            next = lock(&self.queue).take();
        }
    }

    fn report(&self, file: String, number: u64, outcome: Outcome) {
        // If there is no receiver, the catalog was dropped.
        let _ = self.done.send(Wake::Loaded(Loaded {
            file,
            number,
            outcome,
        }));
    }

    fn try_load(&self, order: &Order, which: Try, compiler: &mut Compiler) -> Outcome {
        self.loads.read_file();
        let bytes = match file::read(&order.listed, self.sandbox.settings().module_bytes_max) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Outcome::Changed,
            Err(unusable) => return unusable.into(),
        };
        let digest = Digest::compute(&bytes);
        let passes = order
            .rules
            .check(&order.file, &order.listed.path, digest, &bytes);
        let signed_by = match passes {
            Ok(signed_by) => signed_by,
            Err(unusable) => return unusable.into(),
        };
        if order.refused == Some(digest) {
            return Outcome::StillRefused;
        }
        let known = lock(&self.known).get(digest);
        if let Some(module) = known {
            return Outcome::Module(Arc::new(module.renamed(&order.file, signed_by)));
        }
        match load(
            &self.sandbox,
            compiler,
            which,
            (&order.file, signed_by),
            digest,
            &bytes,
        ) {
            Ok(module) => {
                let module = Arc::new(module);
                lock(&self.known).insert(digest, &module);
                Outcome::Module(module)
            }
            Err(NotLoaded::Contents(why)) => Outcome::Refused(why, Some(digest)),
            Err(NotLoaded::Transient(why)) => Outcome::Transient(why),
            Err(NotLoaded::Retry) => Outcome::Slow,
        }
    }
}

/// Live modules by digest.
struct Known<T>(HashMap<Digest, Weak<T>>);

impl<T> Known<T> {
    fn get(&self, digest: Digest) -> Option<Arc<T>> {
        self.0.get(&digest)?.upgrade()
    }

    /// Adds a module, and forgets those that were dropped.
    fn insert(&mut self, digest: Digest, module: &Arc<T>) {
        self.0.retain(|_, known| known.strong_count() > 0);
        self.0.insert(digest, Arc::downgrade(module));
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Settings;
    use crate::sandbox::catalog::verification::Verifier;

    #[test]
    fn a_file_is_tried_again_after_a_system_error() {
        let settings = || Settings {
            attempts_max: 1,
            ..Settings::default()
        };
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().join("a.wasm");
        std::fs::write(&there, b"a module").unwrap();
        let (wake, done) = mpsc::channel();
        let loader = Loader::new(Sandbox::start(settings()).unwrap(), Arc::default(), wake);
        loader.load(Order {
            file: "a.wasm".into(),
            number: 1,
            listed: Listed {
                // The name is too long: an error that does not depend on the file.
                path: dir.path().join("x".repeat(300)),
                stamp: file::Stamp::at(&there).unwrap(),
                signature: None,
            },
            rules: Verifier::new(&settings()).rules(),
            refused: None,
        });
        let Ok(Wake::Loaded(loaded)) = done.recv() else {
            panic!("it is not loaded");
        };
        let Outcome::Transient(why) = loaded.outcome else {
            panic!("it is not tried again");
        };
        assert!(why.starts_with("it cannot be read: "), "{why}");
    }

    #[test]
    fn versions_that_were_replaced_are_forgotten() {
        let mut known = Known(HashMap::new());
        let digest = |version: u8| Digest([version; 32]);
        let mut serving = Arc::new(0);
        for version in 0..10 {
            let module = Arc::new(version);
            known.insert(digest(version), &module);
            serving = module;
        }
        assert_eq!(known.get(digest(9)), Some(serving));
        // At the last insertion, the version before it had not been dropped yet.
        assert_eq!((known.get(digest(8)), known.0.len()), (None, 2));
    }
}
