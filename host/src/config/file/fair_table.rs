//! `[fair_share."…"]`: how a queue is shared.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use serde::de::MapAccess;
use serde::{Deserialize, Deserializer};

use super::File;
use crate::config::env::Environment;
use crate::duration;
use crate::setting::Entry;
use crate::setting::table::{self, Table};
use crate::store::NewFairShare;

/// How a queue is shared. The database checks the numbers.
#[derive(Debug, Default, Clone)]
pub(super) struct FairTable(NewFairShare);

impl Table for FairTable {
    type Numbers = ();
    const EXPECTED: &'static str = "a table such as { policy = \"drr\", weights = { acme = 3 } }";
    const ENTRIES: &'static [Entry] = &[
        Entry::new(
            "policy",
            "`\"fifo\"`, `\"drr\"`",
            "unchanged",
            "`drr`: the keys of the queue share the workers; `fifo`: the keys have no effect",
        ),
        Entry::new(
            "key",
            "`\"tenant\"`, `\"handler\"`, `\"source\"`, `\"tenant-and-handler\"`",
            "unchanged",
            "The key by which the jobs of the queue are divided",
        ),
        Entry::new(
            "charge",
            "`\"jobs\"`, `\"cpu\"`",
            "unchanged",
            "`cpu`: a job costs its key the CPU time of the last jobs of its lane; `jobs`: a job costs one turn",
        ),
        Entry::new(
            "quantum",
            "1 to 1000",
            "unchanged",
            "The number of jobs of a key of weight 1 in each round",
        ),
        Entry::new(
            "weights",
            "a table of 0.001 to 1000 by key",
            "unchanged",
            "The weights of keys; they replace all that were set",
        ),
        Entry::new(
            "default_weight",
            "0.001 to 1000",
            "unchanged",
            "The weight of all other keys",
        ),
        Entry::new(
            "starvation",
            "0s to 365days",
            "unchanged",
            "Jobs that have waited this long go first, the oldest of them first; `\"0s\"`: never",
        ),
        Entry::new(
            "max_in_flight",
            "0 to 1000000",
            "unchanged",
            "The maximum number of running jobs of a key, on all workers; 0: any number",
        ),
    ];

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "policy" => self.0.policy = Some(map.next_value()?),
            "key" => self.0.key = Some(map.next_value()?),
            "charge" => self.0.charge = Some(map.next_value()?),
            "quantum" => self.0.quantum = Some(map.next_value()?),
            "weights" => self.0.weights = Some(map.next_value()?),
            "default_weight" => self.0.default_weight = Some(map.next_value()?),
            "starvation" => {
                self.0.starvation_s = Some(map.next_value::<Time>()?.0.as_secs_f64());
            }
            "max_in_flight" => self.0.max_in_flight = Some(map.next_value()?),
            key => unreachable!("{key} has a row, and is not read"),
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for FairTable {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        table::read(input)
    }
}

#[derive(Deserialize)]
struct Time(#[serde(deserialize_with = "duration::read")] Duration);

impl File {
    /// How queues are shared, by name: for each queue, the table in `ROUSE_FAIR_SHARE`, else the one in the file.
    ///
    /// # Errors
    /// If the variable is not a JSON object of such tables.
    pub fn fair_share(
        &self,
        environment: Environment,
    ) -> anyhow::Result<BTreeMap<String, NewFairShare>> {
        let mut tables = self.fair_share.clone();
        if let Some(text) = environment.fair_share() {
            tables.extend(read_variable(&text)?);
        }
        let shares = tables.into_iter();
        Ok(shares.map(|(queue, table)| (queue, table.0)).collect())
    }
}

fn read_variable(text: &str) -> anyhow::Result<BTreeMap<String, FairTable>> {
    serde_json::from_str(text).with_context(|| {
        "ROUSE_FAIR_SHARE must be a JSON object such as {\"mail\": {\"policy\": \"drr\"}}"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{FairKey, FairPolicy};

    #[test]
    fn the_variable_has_the_tables_of_the_file_as_json() {
        let text = r#"{"mail": {"policy": "drr", "key": "tenant-and-handler", "weights": {"a/b": 2}, "starvation": "90s"}}"#;
        let tables = read_variable(text).unwrap();
        let share = &tables["mail"].0;
        assert_eq!(share.policy, Some(FairPolicy::Drr));
        assert_eq!(share.key, Some(FairKey::TenantAndHandler));
        assert_eq!(share.weights, Some([("a/b".to_owned(), 2.0)].into()));
        assert_eq!((share.starvation_s, share.quantum), (Some(90.0), None));
        for invalid in [
            "drr",
            "[]",
            r#"{"mail": {"polcy": "drr"}}"#,
            r#"{"mail": {"policy": "lifo"}}"#,
        ] {
            let why = format!("{:#}", read_variable(invalid).unwrap_err());
            assert!(
                why.starts_with("ROUSE_FAIR_SHARE must be a JSON object"),
                "{why}"
            );
        }
    }
}
