//! The handlers that a folder offers at one moment.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::watch;

use super::handler::Handler;

/// A file that is not served, or not in its newest version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The file's name in the folder, with control characters escaped.
    pub file: String,
    /// The reason, on one line: a sentence that starts with "it …" or "its …".
    pub why: String,
    /// The lines of `rouse.toml` that would allow it, if there are any.
    pub lines: Option<String>,
    /// True when the last good version of the file still serves.
    pub last_good_serves: bool,
}

/// The handlers that a folder offers at one moment. Immutable: a running attempt keeps its handler.
#[derive(Debug, Default)]
pub struct HandlerSet {
    /// The handlers by name.
    pub handlers: BTreeMap<String, Arc<Handler>>,
    /// Refused files, by name.
    pub refused: Vec<Refusal>,
    /// Files that have not been tried yet, by name.
    pub loading: Vec<String>,
    /// Files that are slow to load, by name. They are loaded after all others, and nothing waits for them.
    pub slow: Vec<String>,
    /// Why the folder cannot be read; `None` if it can. The handlers keep serving in the meantime.
    pub unreadable: Option<String>,
}

impl HandlerSet {
    /// The handler of that name.
    pub fn get(&self, name: &str) -> Option<&Arc<Handler>> {
        self.handlers.get(name)
    }

    /// True while there are files that have not been tried yet.
    pub fn is_loading(&self) -> bool {
        !self.loading.is_empty()
    }

    /// The names of the handlers, sorted.
    pub fn names(&self) -> Vec<String> {
        self.handlers.keys().cloned().collect()
    }
}

/// The current set, with change notifications.
pub(super) struct Published {
    pub(super) current: ArcSwap<HandlerSet>,
    pub(super) version: watch::Sender<u64>,
}

impl Published {
    pub(super) fn new(handlers: HandlerSet) -> Self {
        Self {
            current: ArcSwap::from_pointee(handlers),
            version: watch::Sender::new(0),
        }
    }

    pub(super) fn publish(&self, handlers: HandlerSet) {
        self.current.store(Arc::new(handlers));
        self.version.send_modify(|version| *version += 1);
    }
}
