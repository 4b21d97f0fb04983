//! Guests that run SQL statements.

use std::time::Duration;

use rouse_sdk::{Ctx, Error, Result, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::spec::Spec;

/// A call to a statement.
#[derive(Deserialize, JsonSchema)]
struct Call {
    statement: String,
    #[serde(default)]
    params: Vec<Value>,
}

/// What the guest does next.
#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Do {
    /// Add an effect.
    Sql(Call),
    /// Run a query; the rows are part of the result.
    Query(Call),
    /// The same, and continue if it fails; the error is part of the result.
    TryQuery(Call),
    /// A step with effects; its result is the number of the attempt.
    Step {
        name: String,
        effects: Vec<Call>,
    },
    /// The same, and continue if it fails; the error is part of the result.
    TryStep {
        name: String,
        effects: Vec<Call>,
    },
    /// Enqueue a job.
    Enqueue(Box<Spec>),
    /// Sleep durably.
    Sleep {
        ms: u64,
    },
    /// Report `waiting` as the progress, and run for this long.
    Run {
        ms: u64,
    },
    Fail,
    FailOnce,
    FailPermanently,
    Panic,
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Script {
    script: Vec<Do>,
}

fn step(ctx: &Ctx, name: &str, effects: &[Call]) -> Result<u32> {
    ctx.step_with(name, |tx| {
        for Call { statement, params } in effects {
            tx.sql(statement, params)?;
        }
        Ok(ctx.job().attempt)
    })
}

fn failure(error: &Error) -> Value {
    json!({"kind": error.kind, "message": error.message, "details": error.details, "permanent": error.permanent})
}

/// Does what its payload says, and returns the results.
#[handler(
    name = "sql.run",
    max_attempts = 3,
    retry_initial = "10ms",
    retry_max = "10ms",
    grace = "500ms",
    sql(
        mark_paid = "UPDATE orders SET paid = true WHERE id = $1 AND NOT paid",
        rows = 1
    ),
    sql(add_line = "INSERT INTO ledger (job, amount) VALUES ($1, $2)"),
    sql(add_order = "INSERT INTO orders (id) VALUES ($1)"),
    sql(
        add_or_retry = "INSERT INTO orders (id) VALUES ($1)",
        on_error = "retry"
    ),
    sql(
        returning = "INSERT INTO orders (id) VALUES ($1) RETURNING id, repeat('x', $2)",
        rows = 1
    ),
    sql(
        transfer = "UPDATE accounts SET balance = balance + $2 WHERE id = $1",
        rows = 1
    ),
    sql(orders = "SELECT id, paid FROM orders WHERE id = ANY($1) ORDER BY id -- all of them"),
    sql(one_order = "SELECT id FROM orders WHERE id = $1", rows = 1),
    sql(
        expect_unpaid = "SELECT FROM orders WHERE id = $1 AND NOT paid FOR UPDATE",
        rows = 1
    ),
    sql(
        types = "SELECT $1::bigint AS n, $2::text AS t, $3::jsonb AS j, $4::text[] AS a, $5::boolean AS b, $6::numeric AS d"
    ),
    sql(sleepy = "SELECT pg_sleep($1)"),
    sql(text = "SELECT repeat('x', $1) AS x FROM generate_series(1, $2)"),
    sql(set = "SELECT set_config($1, $2, $3)"),
    sql(
        setting = "SELECT current_setting($1, true) AS value, session_user::text, current_user::text"
    ),
    sql(lock = "SELECT pg_advisory_lock($1)"),
    sql(
        locks = "SELECT count(*) AS count FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    ),
    sql(
        activity = "SELECT query FROM pg_stat_activity WHERE usename = session_user
            UNION ALL SELECT statement FROM pg_prepared_statements
            UNION ALL SELECT statement FROM pg_cursors
            UNION ALL SELECT current_query()
            UNION ALL SELECT name || ' = ' || setting FROM pg_settings WHERE source = 'session'"
    ),
    sql(call = "SELECT * FROM checked($1)")
)]
pub(crate) async fn run(ctx: &Ctx, payload: Script) -> Result<Value> {
    let mut results = Vec::new();
    for one in &payload.script {
        match one {
            Do::Sql(Call { statement, params }) => ctx.sql(statement, params)?,
            Do::Query(Call { statement, params }) => {
                let rows: Vec<Value> = ctx.query(statement, params)?;
                results.push(json!(rows));
            }
            Do::TryQuery(Call { statement, params }) => {
                let rows: Result<Vec<Value>> = ctx.query(statement, params);
                results.push(rows.map_or_else(|error| failure(&error), |rows| json!(rows)));
            }
            Do::Step { name, effects } => results.push(json!(step(ctx, name, effects)?)),
            Do::TryStep { name, effects } => {
                let done = step(ctx, name, effects);
                results.push(done.map_or_else(|error| failure(&error), |attempt| json!(attempt)));
            }
            Do::Enqueue(job) => {
                ctx.enqueue(job.job(&[])?)?;
            }
            Do::Sleep { ms } => ctx.sleep("nap", Duration::from_millis(*ms))?,
            Do::Run { ms } => {
                ctx.progress(50, "waiting");
                rouse_sdk::sleep(Duration::from_millis(*ms)).await;
            }
            Do::Fail => return Err(Error::retryable("it fails")),
            Do::FailOnce if ctx.job().attempt == 1 => {
                return Err(Error::retryable("it fails once"));
            }
            Do::FailOnce => {}
            Do::FailPermanently => return Err(Error::permanent("it fails")),
            Do::Panic => panic!("it panics"),
        }
    }
    Ok(json!(results))
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Transfer {
    account: i64,
}

/// Adds 1 to an account.
#[handler(
    name = "sql.transfer",
    sql(
        add = "UPDATE accounts SET balance = balance + 1 WHERE id = $1",
        rows = 1
    )
)]
pub(crate) fn transfer(ctx: &Ctx, payload: Transfer) -> Result<()> {
    ctx.sql("add", (payload.account,))
}

#[derive(Deserialize, Serialize, JsonSchema)]
pub(crate) struct Nothing {}

/// Declares statements that no host may run.
macro_rules! refused {
    ($($function:ident $name:tt $sql:tt),+ $(,)?) => {
        $(
            #[handler(name = $name, sql(it = $sql))]
            pub(crate) fn $function(ctx: &Ctx, _: Nothing) -> Result<()> {
                ctx.sql("it", ())
            }
        )+
    };
}

refused!(
    jobs "sql.jobs" "SELECT * FROM rouse.job",
    settle "sql.settle" "SELECT rouse.settle(1, NULL, NULL, NULL, false)",
    copy "sql.copy" "COPY orders TO STDOUT",
    listen "sql.listen" "LISTEN rouse_wake",
    block "sql.do" "DO 'BEGIN END'",
    temporary "sql.temporary" "CREATE TEMPORARY TABLE t ()",
    two "sql.two" "SELECT 1; SELECT 2",
    commit "sql.commit" "COMMIT",
    set_role "sql.role" "SET ROLE rouse_owner",
    missing "sql.missing" "SELECT * FROM no_such_table",
    modifying "sql.modifying" "WITH gone AS (DELETE FROM orders RETURNING id) SELECT * FROM gone",
    syntax "sql.syntax" "SELECT FROM WHERE",
    into "sql.into" "SELECT 1 INTO other",
);
