//! A table of the same shape as rouse.job, and plain INSERTs of the same rows.

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tokio_postgres::Client;
use tokio_postgres::types::Json;

/// The statements. `$1` is the payload, or the array of payloads.
pub(super) struct Plain {
    pub(super) insert: String,
    pub(super) insert_many: String,
}

/// Same columns, checks, indexes and storage parameters, without a function in front of it.
const TABLE: &str = "\
    DROP TABLE IF EXISTS public.plain_job;
    DROP SEQUENCE IF EXISTS public.plain_seq;
    CREATE SEQUENCE public.plain_seq;
    CREATE TABLE public.plain_job (LIKE rouse.job INCLUDING ALL);
    DO $$ BEGIN
        EXECUTE (SELECT format('ALTER TABLE public.plain_job SET (%s)', string_agg(o, ', '))
                 FROM pg_class, unnest(reloptions) AS o WHERE oid = 'rouse.job'::regclass);
    END $$";

/// The columns of one row, with their types and their values as text.
const ROW: &str = "\
    SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), to_jsonb(j) ->> a.attname::text
    FROM rouse.job AS j CROSS JOIN pg_attribute AS a
    WHERE j.id = $1 AND a.attrelid = 'rouse.job'::regclass AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum";

impl Plain {
    /// Creates the table, and derives the INSERTs from a job that `rouse.enqueue` has written.
    pub(super) async fn create(client: &Client) -> Result<Self> {
        client
            .batch_execute(TABLE)
            .await
            .context("create a table like rouse.job")?;
        let id: i64 = client
            .query_one(
                "SELECT rouse.enqueue('noop', $1)",
                &[&Json(json!({"n": 1}))],
            )
            .await
            .context("enqueue a job to copy")?
            .get(0);
        let (mut columns, mut single, mut many) = (Vec::new(), Vec::new(), Vec::new());
        for row in client
            .query(ROW, &[&id])
            .await
            .context("read the job to copy")?
        {
            let [name, kind]: [String; 2] = [row.get(0), row.get(1)];
            let Some(value) = row.get::<_, Option<String>>(2) else {
                continue;
            };
            let written = match (name.as_str(), kind.as_str()) {
                ("id", _) => "nextval('public.plain_seq')".to_owned(),
                (_, "bigint") if value == id.to_string() => {
                    "currval('public.plain_seq')".to_owned()
                }
                (_, "timestamp with time zone") => "now()".to_owned(),
                (_, "jsonb") => "$1::jsonb".to_owned(),
                _ => format!("'{}'::{kind}", value.replace('\'', "''")),
            };
            columns.push(format!("\"{name}\""));
            many.push(written.replace("$1::jsonb", "payload"));
            single.push(written);
        }
        client
            .execute("DELETE FROM rouse.job WHERE id = $1", &[&id])
            .await?;
        ensure!(
            single.iter().any(|value| value.starts_with("$1")),
            "rouse.job has no payload column: adapt tests/bench/src/plain.rs"
        );
        let into = format!("INSERT INTO public.plain_job ({})", columns.join(", "));
        Ok(Self {
            insert: format!("{into} VALUES ({}) RETURNING id", single.join(", ")),
            insert_many: format!(
                "{into} SELECT {} FROM unnest($1::jsonb[]) AS payload RETURNING id",
                many.join(", ")
            ),
        })
    }
}
