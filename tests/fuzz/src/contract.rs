//! Schemas as contracts: Postgres never refuses a value that a host accepts.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use rand::Rng as _;
use rand::rngs::StdRng;
use rouse::sandbox::Manifest;
use rouse_workbench::database;
use rouse_workbench::host_process::{self, HostProcess};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Statement};

use super::schema::{schema, text, value};

/// The number of values for each schema.
const VALUES: usize = 20;

/// The value as Postgres stores it, which is what a host receives, and whether the predicate refuses it.
const CHECK: &str = "SELECT $1::text::jsonb::text, coalesce(jsonb_path_match($1::text::jsonb, ('strict ' || $2::text)::jsonpath, '{}', true), false)";

/// A private Postgres, and how many values the host alone or both have refused so far.
pub(crate) struct Contracts {
    runtime: Runtime,
    process: HostProcess,
    client: Client,
    check: Statement,
    scratch: TempDir,
    refused_by_host: u64,
    refused_by_both: u64,
}

pub(crate) fn generate(random: &mut StdRng) -> Vec<u8> {
    let depth = random.random_range(1..5);
    let schema = schema(random, depth);
    let values: Vec<String> = (0..VALUES)
        .map(|_| match random.random_ratio(1, 3) {
            true => text(random, 3),
            false => value(random, 3).to_string(),
        })
        .collect();
    json!({"schema": schema, "values": values})
        .to_string()
        .into_bytes()
}

impl Contracts {
    pub(crate) fn start(rouse: &Path) -> Result<Self> {
        let runtime = Runtime::new().context("start a runtime")?;
        let scratch = host_process::scratch_folder()?;
        let mut command = Command::new(rouse);
        command
            .args(["postgres", "--json", "--data-dir"])
            .arg(scratch.path().join("pg"));
        let (process, client, check) = runtime.block_on(async {
            let mut process = HostProcess::start(command)?;
            let url = process
                .ready()
                .await?
                .url
                .context("`rouse postgres` printed no connection URL")?;
            let client = database::connect(&url).await?;
            let check = client.prepare(CHECK).await?;
            anyhow::Ok((process, client, check))
        })?;
        Ok(Self {
            runtime,
            process,
            client,
            check,
            scratch,
            refused_by_host: 0,
            refused_by_both: 0,
        })
    }

    pub(crate) fn run(&mut self, input: &[u8]) -> Result<&'static str> {
        let input: Value = serde_json::from_slice(input).context("read the case")?;
        let values = input["values"]
            .as_array()
            .context("the case has no values")?;
        let manifest = json!({"handlers": [{"name": "a", "input_schema": input["schema"]}]});
        let Ok(manifest) = Manifest::parse(&manifest.to_string()) else {
            return Ok("refused");
        };
        let schema = &manifest.handlers[0].input_schema;
        let contract = schema.contract();
        self.check_rules(&contract.rules)?;
        let Some(refuses) = contract.refuses else {
            return Ok("nothing to check");
        };
        for value in values.iter().filter_map(Value::as_str) {
            let Some((stored, is_refused)) = self.check(value, &refuses)? else {
                continue;
            };
            let host = schema.check(stored.as_bytes());
            self.refused_by_host += u64::from(host.is_err());
            self.refused_by_both += u64::from(host.is_err() && is_refused);
            ensure!(
                host.is_err() || !is_refused,
                "Postgres refuses {stored}, which matches {}: strict {refuses}",
                schema.written()
            );
        }
        Ok("checked")
    }

    /// `None` if Postgres cannot store the value.
    fn check(&self, value: &str, refuses: &str) -> Result<Option<(String, bool)>> {
        let params: [&(dyn ToSql + Sync); 2] = [&value, &refuses];
        let checked = self.client.query_one(&self.check, &params);
        match self.runtime.block_on(checked) {
            Ok(row) => Ok(Some((row.get(0), row.get(1)))),
            Err(error) => match error.code() {
                // Surrogates and NUL, numbers that are too large, nesting that is too deep.
                Some(
                    &SqlState::UNTRANSLATABLE_CHARACTER
                    | &SqlState::NUMERIC_VALUE_OUT_OF_RANGE
                    | &SqlState::STATEMENT_TOO_COMPLEX,
                ) => Ok(None),
                Some(&SqlState::INVALID_TEXT_REPRESENTATION) => {
                    self.is_path(&format!("strict {refuses}"))?;
                    Ok(None)
                }
                _ => bail!("the predicate fails on {value}: {error:?}: strict {refuses}"),
            },
        }
    }

    fn is_path(&self, path: &str) -> Result<()> {
        let params: [&(dyn ToSql + Sync); 1] = [&path];
        let parsed = self.client.query_one("SELECT $1::text::jsonpath", &params);
        let parsed = self.runtime.block_on(parsed);
        parsed.with_context(|| format!("{path} is not a jsonpath"))?;
        Ok(())
    }

    /// Checks that every predicate of the rules can be parsed.
    fn check_rules(&self, rules: &Value) -> Result<()> {
        match rules {
            Value::Object(rules) => {
                if let Some(Value::String(path)) = rules.get("refuses") {
                    self.is_path(path)?;
                }
                rules.values().try_for_each(|part| self.check_rules(part))
            }
            Value::Array(parts) => parts.iter().try_for_each(|part| self.check_rules(part)),
            _ => Ok(()),
        }
    }

    /// Stops Postgres, and prints how many of the refused values only the host has refused.
    pub(crate) fn finish(mut self) -> Result<()> {
        let only_host = self.refused_by_host - self.refused_by_both;
        println!(
            "{:<10} {only_host} of {} refused values ({:.1} %) are refused by the host only",
            "",
            self.refused_by_host,
            only_host as f64 * 100.0 / self.refused_by_host.max(1) as f64
        );
        ensure!(
            self.refused_by_both > 0 || self.refused_by_host < 100,
            "Postgres has refused nothing, so nothing was tested"
        );
        drop(self.client);
        self.runtime.block_on(self.process.stop())?;
        self.scratch.close().context("remove the data")
    }
}
