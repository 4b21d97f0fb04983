//! Loads modules on threads of their own, so that a slow one does not delay the others.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread;

use super::file::{self, Listed};
use super::gate::Rules;
use super::line::{Line, Next};
use crate::sandbox::module::compile::{Compiler, Try};
use crate::sandbox::module::load::load;
use crate::sandbox::module::refused::NotLoaded;
use crate::sandbox::{Digest, Loads, Module, Sandbox};

/// A file to load.
pub(super) struct Order {
    pub(super) file: String,
    /// The number of the order, which identifies the version of the file.
    pub(super) place: u64,
    pub(super) listed: Listed,
    pub(super) rules: Arc<Rules>,
    /// The contents that were refused before; they are not tried again.
    pub(super) refused: Option<Digest>,
}

/// The outcome of an order.
pub(super) struct Loaded {
    pub(super) file: String,
    pub(super) place: u64,
    pub(super) outcome: Outcome,
}

/// The result of loading a file.
pub(super) enum Outcome {
    Module(Arc<Module>),
    /// It was written to meanwhile, or is gone.
    Changed,
    /// The same contents were refused before.
    StillRefused,
    /// With the digest if the contents are at fault.
    Refused(String, Option<Digest>),
    /// Refused because of the state of the machine; it may pass later.
    Transient(String),
    /// It is slow to compile, and waits until all others were tried.
    Slow,
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

/// Loads files as places become free.
pub(super) struct Loader(Arc<Shared>);

struct Shared {
    sandbox: Arc<Sandbox>,
    line: Mutex<Line<Order>>,
    /// Live modules by digest: known contents are not compiled again.
    known: Mutex<HashMap<Digest, Weak<Module>>>,
    loads: Arc<Loads>,
    /// Receives the outcomes.
    done: mpsc::Sender<Wake>,
}

impl Loader {
    pub(super) fn new(sandbox: Arc<Sandbox>, loads: Arc<Loads>, done: mpsc::Sender<Wake>) -> Self {
        Self(Arc::new(Shared {
            line: Mutex::new(Line::new(sandbox.settings().compilations_max)),
            sandbox,
            known: Mutex::default(),
            loads,
            done,
        }))
    }

    /// Loads a file; the outcome is sent to `done`.
    pub(super) fn load(&self, order: Order) {
        lock(&self.0.line).push(order);
        self.0.start();
    }

    /// Forgets modules that were dropped.
    pub(super) fn forget_gone(&self) {
        lock(&self.0.known).retain(|_, module| module.strong_count() > 0);
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        lock(&self.0.line).clear();
    }
}

impl Shared {
    /// Starts a thread for each file that there is a place for.
    fn start(self: &Arc<Self>) {
        while let Some(next) = lock(&self.line).take() {
            let (Next::First(order) | Next::Again(order)) = &next;
            let (file, place) = (order.file.clone(), order.place);
            let is_first = matches!(next, Next::First(_));
            let shared = self.clone();
            let thread = thread::Builder::new()
                .name("rouse-load".into())
                .spawn(move || shared.run(next));
            if let Err(error) = thread {
                self.free(is_first);
                let why = format!("no thread could be started to load it: {error}");
                self.report(file, place, Outcome::Transient(why));
            }
        }
    }

    fn free(&self, is_first: bool) {
        let mut line = lock(&self.line);
        match is_first {
            true => line.done_first(),
            false => line.done_again(),
        }
    }

    /// Loads one file after the other with one compiler, which serves many of them.
    fn run(self: Arc<Self>, first: Next<Order>) {
        let mut compiler = Compiler::new(self.sandbox.clone(), self.loads.clone());
        let mut next = Some(first);
        while let Some(now) = next {
            let (is_first, which, order) = match now {
                Next::First(order) => (true, Try::First, order),
                Next::Again(order) => (false, Try::Second, order),
            };
            let (file, place) = (order.file.clone(), order.place);
            // Otherwise a panic of the host would occupy the place forever.
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
                lock(&self.line).push_again(order);
            }
            self.report(file, place, outcome);
            self.free(is_first);
            next = lock(&self.line).take();
        }
    }

    fn report(&self, file: String, place: u64, outcome: Outcome) {
        // If there is no receiver, the catalog was dropped.
        let _ = self.done.send(Wake::Loaded(Loaded {
            file,
            place,
            outcome,
        }));
    }

    fn try_load(&self, order: &Order, which: Try, compiler: &mut Compiler) -> Outcome {
        self.loads.read_file();
        let bytes = match file::read(&order.listed, self.sandbox.settings().module_bytes_max) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Outcome::Changed,
            Err(why) => return Outcome::Refused(why, None),
        };
        let digest = Digest::of(&bytes);
        let passes = order
            .rules
            .check(&order.file, &order.listed.path, digest, &bytes);
        let signed_by = match passes {
            Ok(signed_by) => signed_by,
            Err(why) => return Outcome::Refused(why, None),
        };
        if order.refused == Some(digest) {
            return Outcome::StillRefused;
        }
        let known = lock(&self.known).get(&digest).and_then(Weak::upgrade);
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
                lock(&self.known).insert(digest, Arc::downgrade(&module));
                Outcome::Module(module)
            }
            Err(NotLoaded::Contents(why)) => Outcome::Refused(why, Some(digest)),
            Err(NotLoaded::Transient(why)) => Outcome::Transient(why),
            Err(NotLoaded::Retry) => Outcome::Slow,
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
