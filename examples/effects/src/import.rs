//! Imports a price list in parts: each part is a step, which commits its rows with its result.

use rouse_sdk::{Ctx, Error, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Rows in one transaction.
const PART: usize = 100;

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Import {
    /// Lines with an article and a price in cents: `tea,350`.
    csv: String,
}

#[derive(Serialize, JsonSchema)]
pub(crate) struct Imported {
    rows: usize,
}

#[derive(Serialize)]
struct Row<'a> {
    article: &'a str,
    cents: i64,
}

/// Imports all rows of a price list.
#[handler(
    name = "prices.import",
    sql(put = "INSERT INTO prices (article, cents)
               SELECT article, cents FROM jsonb_to_recordset($1) AS new (article text, cents bigint)
               ON CONFLICT (article) DO UPDATE SET cents = excluded.cents")
)]
pub(crate) fn import(ctx: &Ctx, payload: Import) -> Result<Imported, Error> {
    let rows = payload
        .csv
        .lines()
        .map(row)
        .collect::<Result<Vec<_>, _>>()?;
    let parts = rows.len().div_ceil(PART);
    for (index, part) in rows.chunks(PART).enumerate() {
        let percent = u8::try_from(100 * index / parts).unwrap_or(100);
        ctx.progress(percent, format!("part {} of {parts}", index + 1));
        // A later attempt continues after the last part that was committed.
        ctx.step_with("part", |tx| tx.sql("put", (part,)))?;
    }
    Ok(Imported { rows: rows.len() })
}

fn row(line: &str) -> Result<Row<'_>, Error> {
    let read = line.split_once(',').and_then(|(article, cents)| {
        Some(Row {
            article: article.trim(),
            cents: cents.trim().parse().ok()?,
        })
    });
    read.ok_or_else(|| {
        Error::permanent(format_args!(
            "not an article and a price in cents: {line:?}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use rouse_sdk::TestCtx;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_later_attempt_does_not_import_a_part_again() {
        let csv: Vec<String> = (0..250).map(|n| format!("article {n},{n}")).collect();
        let payload = json!({"csv": csv.join("\n")});
        let ctx = TestCtx::new();
        let imported = ctx.run::<import>(payload.clone()).expect("it is imported");
        assert_eq!(imported, json!({"rows": 250}));
        assert_eq!(ctx.steps_done(), ["part", "part#2", "part#3"]);
        assert_eq!(
            ctx.effects()[2].params[0].as_array().map(Vec::len),
            Some(50)
        );
        let next = ctx.next_attempt();
        next.run::<import>(payload).expect("it is imported");
        assert_eq!(next.effects(), []);
    }

    #[test]
    fn an_invalid_line_imports_nothing() {
        let ctx = TestCtx::new();
        let error = ctx
            .run::<import>(json!({"csv": "tea,350\nmilk"}))
            .expect_err("no price");
        assert!(error.permanent && error.message.contains("milk"));
        assert_eq!(ctx.effects(), []);
    }
}
