//! The work that remains to be done on a database.

use tokio_postgres::Client;

use super::in_force::{self, Difference};
use super::ledger::{Definitions, Record};
use super::{MigrateError, Migration, Sources};

/// The work to do.
pub(super) struct Plan<'a> {
    /// True if there is no ledger.
    pub(super) first: bool,
    pub(super) missing: Vec<&'a Migration>,
    pub(super) definitions: bool,
    /// Applied definitions that have been changed.
    pub(super) differences: Vec<Difference>,
    pub(super) version: i32,
}

impl<'a> Plan<'a> {
    pub(super) async fn read(
        client: &mut Client,
        sources: Sources<'a>,
    ) -> Result<Self, MigrateError> {
        let record = Record::read(client).await?;
        record.compare(sources)?;
        let missing = record.missing(sources);
        let (mut definitions, mut differences) = (record.needs_definitions(sources), Vec::new());
        // The definitions of a newer host are restored by that host.
        let ours = |theirs: &Definitions| theirs.sha256 == sources.digest();
        if record.definitions.as_ref().is_some_and(ours) {
            differences = in_force::differences(client).await?;
            // A migration may have dropped functions that have to be restored.
            definitions = !differences.is_empty() || !missing.is_empty();
        }
        let newest = record
            .migrations
            .last()
            .map_or(0, |migration| migration.version);
        Ok(Self {
            first: record.migrations.is_empty() && record.definitions.is_none(),
            missing,
            definitions,
            differences,
            version: newest,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.missing.is_empty() && !self.definitions
    }
}
