//! The dashboard on a large database: how soon its pages respond, how much open pages cost Postgres, and whether hosts
//! that run alongside them are slower.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use rouse_workbench::host_process::HostProcess;
use rouse_workbench::percentiles::median;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time;

use super::Bench;
use super::backlog::Work;
use super::drained;
use super::host::HostOptions;
use super::report::{Report, Unit};
use super::server::Server;

/// The queue of the queued jobs, which no host of the benchmark serves.
const QUEUE: &str = "mail";
/// The minimum duration of statements that are measured.
const LOGGED_FROM_MS: u32 = 10;
/// How long the dashboard may take to listen.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Args)]
pub(super) struct Options {
    /// Finished jobs
    #[arg(long, default_value_t = 10_000_000, value_parser = clap::value_parser!(i64).range(1_000..=100_000_000))]
    pub(super) finished: i64,
    /// Queued jobs, in a fair queue
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(i64).range(1_000..=100_000_000))]
    pub(super) queued: i64,
    /// Tenants of the queued jobs
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    pub(super) tenants: i64,
    /// Handlers
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(i64).range(1..=500))]
    pub(super) handlers: i64,
    /// Requests of each page
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(2..=1_000))]
    pub(super) requests: u16,
    /// Pages that are open
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub(super) open: u16,
    /// How long the cost of open pages is measured, in seconds
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(5..=3_600))]
    pub(super) seconds: u64,
    /// Jobs per drain; half of the drains run while pages are open
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(i64).range(100..=10_000_000))]
    pub(super) jobs: i64,
    /// Drains with open pages, and as many without
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(super) runs: u16,
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut report = Report::new("dashboard");
        report.settings = server.settings();
        fill(bench, server, options).await?;
        // Autovacuum would be counted as work of the dashboard.
        server.suspend_autovacuum().await?;
        server.log_statements(LOGGED_FROM_MS).await?;
        let port = free_port()?;
        let mut command = Command::new(&bench.rouse);
        command
            .args(["ui", "--http", &format!("127.0.0.1:{port}")])
            .env("DATABASE_URL", &server.url);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut dashboard = HostProcess::start(command)?;
        let measuring = async {
            listening(address).await?;
            pages(bench, server, options, address, &mut report).await?;
            cost(bench, server, options, address, &mut report).await?;
            let label = "the slowest statement of the dashboard, including the first reads";
            let slowest = server.slowest_logged()?;
            if let Some((ms, statement)) = &slowest {
                bench.progress.step(&format!("{ms} ms: {statement}"));
            }
            let slowest = slowest.map_or(f64::from(LOGGED_FROM_MS), |(ms, _)| ms);
            report.add("dashboard.statement", label, slowest, Unit::Milliseconds);
            beside(bench, server, options, address, &mut report).await
        };
        dashboard.during(measuring).await?;
        dashboard.stop().await?;
        Ok(report)
    })
    .await
}

/// Fills the database: finished jobs of the last two hours, of which one in 100 failed; queued jobs of all tenants.
async fn fill(bench: &Bench, server: &Server, options: &Options) -> Result<()> {
    let Options {
        finished,
        queued,
        tenants,
        handlers,
        ..
    } = options;
    let client = &server.client;
    // The times do not start before the first partition.
    let span = "least(interval '2 hours', now() - date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC')";
    let steps = [
        (
            "making lanes",
            format!(
                "SELECT rouse.set_fair_share('{QUEUE}', 'drr', key => 'tenant');
                 SELECT count(rouse.enqueue('h' || n % {handlers} || '.run', '{{}}', queue => '{QUEUE}', tenant => 't' || n)) FROM generate_series(1, {tenants}) AS n;
                 CREATE TABLE public.lanes AS SELECT row_number() OVER () - 1 AS n, id FROM (SELECT DISTINCT id FROM rouse.lane WHERE queue = '{QUEUE}') AS l;
                 CREATE INDEX ON public.lanes (n);
                 ANALYZE public.lanes;
                 SELECT rouse._ensure_partitions(now())"
            ),
        ),
        (
            "inserting queued jobs",
            format!(
                "INSERT INTO rouse.job (id, lane, turn, requested_at, available_at, tenant, payload, state, bytes)
                 SELECT s.id, l.id, s.id, now() - interval '1 hour', now() - interval '1 hour', 't' || (s.n % {tenants}), '{{\"customer\": {{\"id\": 42}}}}', 'queued', 24
                 FROM (SELECT n, nextval('rouse.turn_seq') AS id FROM generate_series(1, {queued}) AS n) AS s
                 JOIN public.lanes AS l ON l.n = s.n % (SELECT count(*) FROM public.lanes)"
            ),
        ),
        (
            "inserting finished jobs",
            format!(
                "INSERT INTO rouse.finished (id, lane, requested_at, available_at, claimed_at, started_at, finished_at, attempt, uncounted, state, tenant, payload, result, error, cpu_us)
                 SELECT s.id, l.id, t, t, t + interval '20 ms', t + interval '21 ms', t + interval '30 ms', 1, 0,
                        CASE WHEN s.n % 100 = 0 THEN 'failed' ELSE 'succeeded' END::rouse.state, 't' || (s.n % {tenants}), '{{\"customer\": {{\"id\": 42}}}}',
                        CASE WHEN s.n % 100 <> 0 THEN '{{\"ok\": true}}'::jsonb END,
                        CASE WHEN s.n % 100 = 0 THEN '{{\"kind\": \"guest_error\", \"message\": \"no route to host\"}}'::jsonb END, 900
                 FROM (SELECT n, nextval('rouse.turn_seq') AS id, now() - (1 - n / {finished}.0) * {span} AS t FROM generate_series(1, {finished}) AS n) AS s
                 JOIN public.lanes AS l ON l.n = s.n % (SELECT count(*) FROM public.lanes)"
            ),
        ),
        ("vacuuming", "VACUUM ANALYZE rouse.job".to_owned()),
        ("vacuuming", "VACUUM ANALYZE rouse.finished".to_owned()),
    ];
    for (label, sql) in steps {
        bench.progress.step(label);
        client.batch_execute(&sql).await.context(label)?;
    }
    Ok(())
}

/// The pages: a name for figures, and a path.
async fn paths(server: &Server) -> Result<Vec<(&'static str, String)>> {
    let id =
        async |sql: &str| -> Result<i64> { Ok(server.client.query_one(sql, &[]).await?.get(0)) };
    let ended = id("SELECT max(id) FROM rouse.finished").await?;
    let queued = id("SELECT max(id) FROM rouse.job").await?;
    Ok(vec![
        ("overview", "/".to_owned()),
        ("jobs", "/jobs".to_owned()),
        ("jobs_failed", "/jobs?state=failed".to_owned()),
        (
            "jobs_of_handler",
            "/jobs?state=failed&handler=h7.run".to_owned(),
        ),
        ("jobs_of_tenant", "/jobs?tenant=t77".to_owned()),
        (
            "jobs_by_payload",
            "/jobs?payload=%2Fcustomer%2Fid%3D43".to_owned(),
        ),
        ("job_ended", format!("/jobs/{ended}")),
        ("job_queued", format!("/jobs/{queued}")),
        ("flows", "/flows".to_owned()),
        ("schedules", "/schedules".to_owned()),
        ("queues", "/queues".to_owned()),
        ("queue", format!("/queues/{QUEUE}")),
        ("workers", "/workers".to_owned()),
        ("handlers", "/handlers".to_owned()),
        ("handler", "/handlers/h7.run".to_owned()),
        ("audit", "/audit".to_owned()),
    ])
}

/// How soon each page responds once it has been opened: the 95th percentile of the time to the first byte.
async fn pages(
    bench: &Bench,
    server: &Server,
    options: &Options,
    address: SocketAddr,
    report: &mut Report,
) -> Result<()> {
    bench.progress.step("opening each page");
    let mut worst = 0.0_f64;
    for (name, path) in paths(server).await? {
        first_byte(address, &path).await?;
        let mut times = Vec::new();
        for _ in 0..options.requests {
            times.push(first_byte(address, &path).await?);
        }
        times.sort_by(f64::total_cmp);
        let p95 = times[(times.len() * 95).div_ceil(100) - 1];
        worst = worst.max(p95);
        let label = format!("{path}: first byte, p95");
        report.add(format!("dashboard.{name}"), label, p95, Unit::Milliseconds);
    }
    let label = "the slowest page: first byte, p95";
    report.add("dashboard.slowest", label, worst, Unit::Milliseconds);
    Ok(())
}

/// The CPU time that Postgres uses for open pages, beyond the time that it uses with the dashboard and no open page.
async fn cost(
    bench: &Bench,
    server: &Server,
    options: &Options,
    address: SocketAddr,
    report: &mut Report,
) -> Result<()> {
    let span = Duration::from_secs(options.seconds);
    bench.progress.step("without open pages");
    let alone = cpu_during(server, span).await?;
    let open = open(server, options, address).await?;
    bench.progress.step("with open pages");
    // The first reads after opening are not part of the measurement.
    time::sleep(Duration::from_secs(5)).await;
    let with = cpu_during(server, span).await?;
    drop(open);
    let cores = std::thread::available_parallelism()?.get() as f64;
    let label = format!(
        "Postgres for {} open pages: share of the machine",
        options.open
    );
    report.add(
        "dashboard.postgres",
        label,
        (with - alone) * 100.0 / cores,
        Unit::Percent,
    );
    Ok(())
}

/// Drains without and with open pages, alternating.
async fn beside(
    bench: &Bench,
    server: &Server,
    options: &Options,
    address: SocketAddr,
    report: &mut Report,
) -> Result<()> {
    let mut host = HostOptions::new(&server.handlers(&bench.guests, &["noop"])?);
    host.queues = vec!["default".to_owned()];
    let work = Work::noop(options.jobs);
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..options.runs {
        let drained = drained::drain(bench, server, &host, 1, &work).await?;
        without.push(drained.jobs_per_s());
        let open = open(server, options, address).await?;
        let drained = drained::drain(bench, server, &host, 1, &work).await?;
        with.push(drained.jobs_per_s());
        drop(open);
    }
    let (without, with) = (median(without)?, median(with)?);
    report.add(
        "dashboard.without",
        "jobs, no page open",
        without,
        Unit::PerSecond,
    );
    report.add("dashboard.with", "jobs, pages open", with, Unit::PerSecond);
    let label = "jobs, pages open: ratio to no page open";
    report.add("dashboard.ratio", label, with / without, Unit::Ratio);
    Ok(())
}

/// Opens pages, and reads their updates until the returned set is dropped.
async fn open(server: &Server, options: &Options, address: SocketAddr) -> Result<JoinSet<()>> {
    let mut readers = JoinSet::new();
    for (_, path) in paths(server).await?.into_iter().take(options.open.into()) {
        let mut stream = request(address, &format!("/live{path}")).await?;
        readers.spawn(async move {
            let mut part = vec![0; 64 << 10];
            while stream.read(&mut part).await.is_ok_and(|count| count > 0) {}
        });
    }
    Ok(readers)
}

/// The cores that Postgres uses.
async fn cpu_during(server: &Server, span: Duration) -> Result<f64> {
    let (since, before) = (Instant::now(), server.cpu()?);
    time::sleep(span).await;
    Ok((server.cpu()? - before) / since.elapsed().as_secs_f64())
}

/// Milliseconds until the first byte of a page.
async fn first_byte(address: SocketAddr, path: &str) -> Result<f64> {
    let since = Instant::now();
    let mut stream = request(address, path).await?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).await.context("read a page")?;
    let took = since.elapsed().as_secs_f64() * 1e3;
    ensure!(
        &head == b"HTTP/1.1 200",
        "{path}: {}",
        String::from_utf8_lossy(&head)
    );
    stream
        .read_to_end(&mut Vec::new())
        .await
        .context("read a page")?;
    Ok(took)
}

async fn request(address: SocketAddr, path: &str) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET /ui{path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    Ok(stream)
}

async fn listening(address: SocketAddr) -> Result<()> {
    let trying = async {
        while TcpStream::connect(address).await.is_err() {
            time::sleep(Duration::from_millis(50)).await;
        }
    };
    time::timeout(READY_TIMEOUT, trying)
        .await
        .context("wait until the dashboard listens")
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}
