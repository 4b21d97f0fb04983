//! Warns about names in `rouse.toml` that no handler has. Most of them are misspelt, and their settings would silently
//! have no effect.

use std::collections::BTreeSet;
use std::sync::Arc;

use tracing::warn;

use crate::config::File;
use crate::job::pattern_covers;
use crate::sandbox::{Catalog, HandlerSet};

/// The handlers that `rouse.toml` names.
pub(super) struct Named {
    tables: Vec<String>,
    sources: Vec<(String, String)>,
}

impl Named {
    pub(super) fn from_file(file: &File) -> Self {
        // `*` matches every handler.
        let tables = file.patterns().filter(|pattern| *pattern != "*");
        let sources = file.sources().iter();
        Self {
            tables: tables.map(str::to_owned).collect(),
            sources: sources
                .map(|(source, handler)| (source.clone(), handler.clone()))
                .collect(),
        }
    }

    /// A sentence for each name that matches none of these handlers.
    pub(super) fn unmatched(&self, handlers: &HandlerSet) -> BTreeSet<String> {
        let names = handlers.names();
        let fits = |pattern: &str| names.iter().any(|name| pattern_covers(pattern, name));
        let tables = self.tables.iter().filter(|table| !fits(table));
        let tables = tables.map(|table| {
            format!(
                "[handlers.\"{table}\"] in rouse.toml matches no handler of the folder (`rouse handlers` lists them), so its settings have no effect"
            )
        });
        let sources = self.sources.iter().filter(|(_, handler)| !fits(handler));
        let sources = sources.map(|(source, handler)| {
            format!(
                "{source} of [sources] in rouse.toml names {handler}, which the folder does not have (`rouse handlers` lists its handlers): jobs from that source wait for it"
            )
        });
        tables.chain(sources).collect()
    }

    /// Warns of names that are newly unmatched.
    fn warn(&self, handlers: &HandlerSet, before: &BTreeSet<String>) -> BTreeSet<String> {
        let unmatched = self.unmatched(handlers);
        for sentence in unmatched.difference(before) {
            warn!("{sentence}");
        }
        unmatched
    }

    /// Warns of unmatched names once all modules have been tried, and after each change of the folder, until the
    /// catalog is dropped.
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
