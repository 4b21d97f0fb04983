//! Names in `rouse.toml` that no handler has: mostly misspelt ones, whose settings would be lost in silence.

use std::collections::BTreeSet;
use std::sync::Arc;

use tracing::warn;

use crate::config::File;
use crate::job::pattern_covers;
use crate::sandbox::{Catalog, HandlerSet};

/// What `rouse.toml` says of handlers by name.
pub(super) struct Named {
    tables: Vec<String>,
    sources: Vec<(String, String)>,
}

impl Named {
    pub(super) fn of(file: &File) -> Self {
        // Whatever comes, it fits `*`.
        let tables = file.patterns().filter(|pattern| *pattern != "*");
        let sources = file.sources().iter();
        Self {
            tables: tables.map(str::to_owned).collect(),
            sources: sources
                .map(|(source, handler)| (source.clone(), handler.clone()))
                .collect(),
        }
    }

    /// A sentence for each name that none of these handlers has.
    pub(super) fn unmatched(&self, handlers: &HandlerSet) -> BTreeSet<String> {
        let names = handlers.names();
        let fits = |pattern: &str| names.iter().any(|name| pattern_covers(pattern, name));
        let tables = self.tables.iter().filter(|table| !fits(table));
        let tables = tables.map(|table| {
            format!(
                "[handlers.\"{table}\"] in rouse.toml fits no handler of the folder (`rouse handlers` lists them), and nothing of it counts"
            )
        });
        let sources = self.sources.iter().filter(|(_, handler)| !fits(handler));
        let sources = sources.map(|(source, handler)| {
            format!(
                "{source} of [sources] in rouse.toml names {handler}, a handler that the folder does not have (`rouse handlers` lists them): jobs from that source wait for it"
            )
        });
        tables.chain(sources).collect()
    }

    /// Warns of those that were not unmatched `before`.
    fn warn(&self, handlers: &HandlerSet, before: &BTreeSet<String>) -> BTreeSet<String> {
        let unmatched = self.unmatched(handlers);
        for sentence in unmatched.difference(before) {
            warn!("{sentence}");
        }
        unmatched
    }

    /// Warns of each name that no handler has, once all modules were tried, and while the folder changes, until the catalog is
    /// gone.
    pub(super) fn follow(self, catalog: &Arc<Catalog>) -> impl Future<Output = ()> + use<> {
        let mut changed = catalog.changed();
        let catalog = Arc::downgrade(catalog);
        async move {
            let mut before = BTreeSet::new();
            loop {
                let Some(handlers) = catalog.upgrade().map(|catalog| catalog.current()) else {
                    return;
                };
                if !handlers.is_loading() {
                    before = self.warn(&handlers, &before);
                }
                if changed.changed().await.is_err() {
                    return;
                }
            }
        }
    }
}
