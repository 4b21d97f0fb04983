//! How long another settlement is delayed while many waiting jobs are cancelled or retried.
//!
//! One connection settles individual jobs of another lane, one after another; a second one changes the waiting jobs in
//! batches, as hosts and commands do. No host runs, so that each settlement is timed separately.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rouse_workbench::database;
use rouse_workbench::percentiles::Percentiles;
use tokio_postgres::Client;

use super::Bench;
use super::report::{Report, Unit};
use super::server::Server;

/// The pause between two settlements.
const PAUSE: Duration = Duration::from_millis(2);
/// How long the settlements are timed alone.
const ALONE: Duration = Duration::from_secs(5);
/// The number of jobs in one claim.
const CLAIMED: i32 = 1_000;
/// The maximum number of jobs in a flow.
const FLOW: i64 = 10_000;
/// The maximum number of jobs that one statement enqueues to wait for another.
const CHILDREN: i64 = 1_000;
/// The number of jobs that each job of the retried flow waits for.
const DEPENDENCIES: i64 = 20;
const FENCE: i64 = 7;

/// Settles jobs that nothing waits for.
struct Settler {
    client: Client,
    worker: i64,
    claimed: Vec<i64>,
}

impl Settler {
    async fn register(server: &Server) -> Result<Self> {
        let client = database::connect(&server.url).await?;
        let register = "SELECT rouse.register('held-up', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
        client.execute(register, &[]).await.context("register")?;
        let worker = "SELECT max(incarnation) FROM rouse.worker";
        Ok(Self {
            worker: client.query_one(worker, &[]).await?.get(0),
            client,
            claimed: Vec::new(),
        })
    }

    async fn claim(&mut self) -> Result<()> {
        let enqueue = "SELECT count(*) FROM rouse.enqueue_many('held-up.other', array_fill('{}'::jsonb, ARRAY[$1::integer]))";
        self.client.query_one(enqueue, &[&CLAIMED]).await?;
        let claim = "SELECT id FROM rouse.claim($1, sha256('key'), $2, ARRAY(
                         SELECT jsonb_populate_record(NULL::rouse.claim_order,
                                    jsonb_build_object('lane', l.id, 'after', (-9223372036854775808)::bigint, 'lease_ms', 3600000))
                         FROM (SELECT DISTINCT id FROM rouse.lane WHERE handler = 'held-up.other') AS l), $3)";
        let rows = self
            .client
            .query(claim, &[&self.worker, &FENCE, &CLAIMED])
            .await?;
        self.claimed = rows.iter().map(|row| row.get(0)).collect();
        ensure!(!self.claimed.is_empty(), "nothing could be claimed");
        Ok(())
    }

    /// Settles one job; returns how long that took, in milliseconds.
    async fn settle(&mut self) -> Result<f64> {
        if self.claimed.is_empty() {
            self.claim().await?;
        }
        let id = self.claimed.pop().context("there is no claimed job")?;
        let settle = "SELECT id FROM rouse.settle($1, sha256('key'), ARRAY[jsonb_populate_record(NULL::rouse.settlement,
                          jsonb_build_object('id', $2::bigint, 'fence', $3::bigint, 'state', 'succeeded', 'started_us', 1, 'result', 1))], '{}', false)";
        let started = Instant::now();
        let accepted = self
            .client
            .query(settle, &[&self.worker, &id, &FENCE])
            .await?;
        ensure!(
            accepted.len() == 1,
            "the settlement of job {id} was refused"
        );
        Ok(started.elapsed().as_secs_f64() * 1000.0)
    }

    /// Settles jobs as long as `work` takes. Returns the times of the settlements, and the seconds that the work took.
    async fn during(
        &mut self,
        work: impl Future<Output = Result<()>>,
    ) -> Result<(Percentiles, f64)> {
        self.claim().await?;
        let (is_done, started) = (AtomicBool::new(false), Instant::now());
        let working = async {
            work.await?;
            is_done.store(true, Ordering::Relaxed);
            anyhow::Ok(started.elapsed().as_secs_f64())
        };
        let settling = async {
            let mut times = Vec::new();
            while !is_done.load(Ordering::Relaxed) {
                times.push(self.settle().await?);
                tokio::time::sleep(PAUSE).await;
            }
            Percentiles::of(times)
        };
        let (seconds, times) = tokio::try_join!(working, settling)?;
        Ok((times, seconds))
    }
}

/// Adds the figures for `jobs` waiting jobs to the report.
pub(super) async fn run(
    bench: &Bench,
    server: &Server,
    jobs: i64,
    report: &mut Report,
) -> Result<()> {
    let mut settler = Settler::register(server).await?;
    let worker = settler.worker;
    let mut add = |key: &str, what: &str, (times, seconds): (Percentiles, f64)| {
        bench.progress.note(&format!(
            "{what}: settlements took up to {:.1} ms",
            times.max
        ));
        let key = |figure: &str| format!("flows.held_up.{key}.{figure}");
        report.add(
            key("max"),
            format!("longest settlement, {what}"),
            times.max,
            Unit::Milliseconds,
        );
        report.add(
            key("p99"),
            "99 % of them took at most",
            times.p99,
            Unit::Milliseconds,
        );
        report.add(key("seconds"), "duration", seconds, Unit::Seconds);
    };
    bench.progress.step("timing settlements alone");
    let alone = async {
        tokio::time::sleep(ALONE).await;
        Ok(())
    };
    add(
        "alone",
        "probe: nothing else happens",
        settler.during(alone).await?,
    );

    bench.progress.step("enqueueing flows whose jobs wait");
    let client = &server.client;
    let flow = "SELECT rouse.enqueue_flow(jsonb_agg(jsonb_build_object('name', n::text, 'handler', 'held-up.waits')
                    || CASE n WHEN 1 THEN '{\"run_at\": \"2999-01-01\"}' ELSE '{\"after\": [\"1\"]}'::jsonb END))
                FROM generate_series(1, $1::bigint) AS n";
    let mut flows = Vec::new();
    for size in parts(jobs, FLOW) {
        let row = client.query_one(flow, &[&size]).await;
        flows.push(row.context("enqueue a flow")?.get::<_, i64>(0));
    }
    let cancel = async {
        for flow in &flows {
            until_zero(client, "SELECT rouse.cancel_flow($1)", *flow).await?;
        }
        Ok(())
    };
    let what = format!("flows with {jobs} jobs are cancelled");
    add("cancel", &what, settler.during(cancel).await?);

    bench.progress.step("enqueueing jobs that wait for one");
    let parent = "SELECT rouse.enqueue('held-up.waits', run_at => '2999-01-01')";
    let parent: i64 = client.query_one(parent, &[]).await?.get(0);
    let children = "SELECT count(rouse.enqueue('held-up.waits', after => jsonb_build_array($1::bigint))) FROM generate_series(1, $2::bigint)";
    for count in parts(jobs, CHILDREN) {
        client.query_one(children, &[&parent, &count]).await?;
    }
    let fail = async {
        client
            .execute("SELECT rouse.fail($1, 'bench')", &[&parent])
            .await?;
        // The same statement as in a host.
        let more = "SELECT rouse.continue_releases($1, sha256('key'), 1000)";
        while client.query_one(more, &[&worker]).await?.get(0) {}
        let left = "SELECT count(*) FROM rouse.dependency WHERE chain = $1";
        let left: i64 = client.query_one(left, &[&parent]).await?.get(0);
        ensure!(left == 0, "{left} jobs still wait");
        Ok(())
    };
    let what = format!("a job fails that {jobs} others wait for");
    add("fail", &what, settler.during(fail).await?);

    bench
        .progress
        .step("enqueueing a flow with many dependencies");
    let retried = jobs.min(FLOW);
    let flow = "SELECT rouse.enqueue_flow(jsonb_agg(jsonb_build_object('name', n::text, 'handler', 'held-up.waits', 'run_at', '2999-01-01',
                    'after', (SELECT coalesce(jsonb_agg(m::text), '[]') FROM generate_series(greatest(1, n - $2), n - 1) AS m))))
                FROM generate_series(1, $1::bigint) AS n";
    let flow: i64 = client
        .query_one(flow, &[&retried, &DEPENDENCIES])
        .await?
        .get(0);
    until_zero(client, "SELECT rouse.cancel_flow($1)", flow).await?;
    let retry = until_zero(client, "SELECT rouse.retry_flow($1)", flow);
    let what = format!("a flow of {retried} jobs, each after {DEPENDENCIES} others, is retried");
    add("retry", &what, settler.during(retry).await?);
    Ok(())
}

/// Sizes of up to `max` that add up to `jobs`.
fn parts(jobs: i64, max: i64) -> Vec<i64> {
    let mut sizes = Vec::new();
    let mut left = jobs;
    while left > 0 {
        sizes.push(left.min(max));
        left -= max;
    }
    sizes
}

/// Repeats a change to a flow until nothing is left to change.
async fn until_zero(client: &Client, sql: &str, flow: i64) -> Result<()> {
    while client.query_one(sql, &[&flow]).await?.get::<_, i32>(0) > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::parts;

    #[test]
    fn the_parts_add_up_to_the_number_of_jobs() {
        assert_eq!(parts(25_000, 10_000), [10_000, 10_000, 5_000]);
        assert_eq!(parts(10_000, 10_000), [10_000]);
        assert_eq!(parts(1_500, 1_000), [1_000, 500]);
        assert_eq!(parts(3, 10_000), [3]);
    }
}
