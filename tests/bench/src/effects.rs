//! How fast one host runs jobs that each change a row of another table, compared with a loop of plain SQL that does the
//! same: in one transaction, it claims a row, changes the row of the other table and deletes the claimed row.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use rouse_workbench::database;
use rouse_workbench::percentiles::median;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::Bench;
use super::backlog::Work;
use super::drained::{self, Drained};
use super::host::HostOptions;
use super::report::{Report, Unit};
use super::server::Server;

/// The number of connections of the loop, and of the host's login.
const CONNECTIONS: usize = 8;

const TABLES: &str = "\
    CREATE TABLE public.accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
    CREATE ROLE bench_handler LOGIN IN ROLE rouse_handler;
    GRANT SELECT, UPDATE ON public.accounts TO bench_handler;";

const FILL: &str = "\
    TRUNCATE public.accounts;
    INSERT INTO public.accounts SELECT n, 0 FROM generate_series(1, $1::bigint) AS n";

const QUEUE: &str = "\
    DROP TABLE IF EXISTS public.todo;
    CREATE TABLE public.todo (id bigint PRIMARY KEY, payload jsonb NOT NULL)";

#[derive(Args)]
pub(super) struct Options {
    /// Jobs per run
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(i64).range(1..=1_000_000))]
    jobs: i64,
    /// Runs of the host and of the loop, alternating; the median of each figure is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    runs: u16,
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut report = Report::new("effects");
        report.settings = server.settings();
        server.client.batch_execute(TABLES).await?;
        let mut host = HostOptions::new(&server.handlers(&bench.guests, &["flow_guests"])?);
        host.slots = Some(32);
        host.config = Some(config(server)?);
        let work = Work {
            handler: "sql.transfer",
            payload: "jsonb_build_object('account', n)".to_owned(),
            ..Work::noop(options.jobs)
        };
        let (mut drains, mut loops): (Vec<Drained>, Vec<f64>) = Default::default();
        for run in 1..=options.runs {
            let client = &server.client;
            fill(server, options.jobs).await?;
            loops.push(by_hand(bench, server, options.jobs).await?);
            fill(server, options.jobs).await?;
            let drained = drained::drain(bench, server, &host, 1, &work).await?;
            let changed = "SELECT count(*) FROM public.accounts WHERE balance = 1";
            let changed: i64 = client.query_one(changed, &[]).await?.get(0);
            ensure!(
                changed == options.jobs,
                "{changed} of {} accounts were changed once",
                options.jobs
            );
            bench.progress.note(&format!(
                "run {run} of {}: {:.0} jobs/s, by hand {:.0}/s",
                options.runs,
                drained.jobs_per_s(),
                loops.last().copied().unwrap_or_default()
            ));
            drains.push(drained);
        }
        let of = |value: fn(&Drained) -> f64| median(drains.iter().map(value).collect());
        let (probe, jobs_per_s) = (median(loops)?, of(Drained::jobs_per_s)?);
        let label = "probe: a loop of plain SQL, 8 connections, one row in each transaction";
        report.add("effects.probe", label, probe, Unit::PerSecond);
        let label = "jobs with one UPDATE each";
        report.add("effects.jobs_per_s", label, jobs_per_s, Unit::PerSecond);
        let label = "ratio to the probe";
        report.add("effects.ratio", label, jobs_per_s / probe, Unit::Ratio);
        let label = "CPU time per job: Postgres";
        let cpu = of(|run| run.cpu_postgres_us)?;
        report.add("effects.cpu_postgres", label, cpu, Unit::Microseconds);
        let label = "WAL per job: claim and settle";
        report.add("effects.wal", label, of(|run| run.wal)?, Unit::Bytes);
        Ok(report)
    })
    .await
}

/// Lets the guest run its statement.
fn config(server: &Server) -> Result<String> {
    let (_, rest) = server
        .url
        .split_once('@')
        .context("find the host in the URL")?;
    let url = format!("postgres://bench_handler@{rest}");
    Ok(format!(
        "[handlers.\"sql.transfer\"]\nmodule = \"flow_guests.wasm\"\n\n\
         [handlers.\"sql.transfer\".sql]\nlogin = {{ url = \"{url}\" }}\nstatements = \"all\"\nconnections_max = {CONNECTIONS}\n"
    ))
}

async fn fill(server: &Server, accounts: i64) -> Result<()> {
    let (truncate, insert) = FILL.split_once(";\n").context("split the statements")?;
    server.client.batch_execute(truncate).await?;
    server
        .client
        .execute(insert.trim(), &[&accounts])
        .await
        .context("fill the table of accounts")?;
    server
        .client
        .batch_execute("VACUUM ANALYZE public.accounts")
        .await?;
    Ok(())
}

/// Jobs per second of the loop.
async fn by_hand(bench: &Bench, server: &Server, jobs: i64) -> Result<f64> {
    let client = &server.client;
    client.batch_execute(QUEUE).await?;
    let insert = "INSERT INTO public.todo SELECT n, jsonb_build_object('account', n) FROM generate_series(1, $1::bigint) AS n";
    client.execute(insert, &[&jobs]).await?;
    client.batch_execute("VACUUM ANALYZE public.todo").await?;
    bench.progress.step("probing: a loop of plain SQL");
    let start = Arc::new(Barrier::new(CONNECTIONS + 1));
    let mut workers = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let mut client = database::connect(&server.url).await?;
        let start = start.clone();
        workers.spawn(async move {
            let claim = client
                .prepare("SELECT id, (payload ->> 'account')::bigint FROM public.todo ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED")
                .await?;
            let change = client
                .prepare("UPDATE public.accounts SET balance = balance + 1 WHERE id = $1")
                .await?;
            let delete = client.prepare("DELETE FROM public.todo WHERE id = $1").await?;
            start.wait().await;
            let mut done = 0;
            loop {
                let transaction = client.transaction().await?;
                let Some(row) = transaction.query_opt(&claim, &[]).await? else {
                    return anyhow::Ok(done);
                };
                transaction.execute(&change, &[&row.get::<_, i64>(1)]).await?;
                transaction.execute(&delete, &[&row.get::<_, i64>(0)]).await?;
                transaction.commit().await?;
                done += 1;
            }
        });
    }
    start.wait().await;
    let started = Instant::now();
    let mut done = 0;
    while let Some(worker) = workers.join_next().await {
        done += worker?.context("run the loop")?;
    }
    let elapsed = started.elapsed();
    ensure!(done == jobs, "the loop did {done} of {jobs} jobs");
    Ok(jobs as f64 / elapsed.as_secs_f64())
}
