//! Checks that a host does not leak while it runs a million jobs, some of them hostile.
//!
//! Figures are compared between the second tenth of the jobs, when every code path has run once, and the last tenth.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use rouse_workbench::percentiles::median;
use tokio_postgres::Client;

use super::Bench;
use super::host::{Host, HostOptions, Memory};
use super::report::{Report, Unit};
use super::server::Server;

#[derive(Args)]
pub(super) struct Options {
    /// Number of jobs, including hostile ones
    #[arg(long, default_value_t = 1_000_000)]
    jobs: i64,
}

/// Jobs per enqueued chunk; two in a hundred are hostile.
const CHUNK: i64 = 5_000;
/// Enqueueing pauses while this many jobs are live.
const LIVE_MAX: i64 = 20_000;
const POLL_EVERY: Duration = Duration::from_millis(500);
/// Much longer than any hostile job.
const STALLED_AFTER: Duration = Duration::from_secs(120);

/// A handler, its jobs per chunk, and their payload.
type Kind = (&'static str, i64, &'static str);

/// Typical jobs: 98 in 100.
const GOOD: [Kind; 8] = [
    ("noop", 3_000, r#"{"n": 7}"#),
    (
        "text.stats",
        700,
        r#"{"text": "the quick brown fox jumps over the lazy dog", "top": 3}"#,
    ),
    ("csv.summary", 300, r#"{"csv": "a,b\n1,x\n2,y\n3,z\n"}"#),
    ("test.echo", 500, r#"{"a": [1, 2, {"b": null}]}"#),
    ("test.sleep", 200, r#"{"ms": 5}"#),
    ("test.print", 100, r#"{"line": "hello", "times": 3}"#),
    ("test.reuse.state", 90, "{}"),
    ("test.reuse.state", 10, r#"{"again": true}"#),
];

/// Hostile jobs, five of each per chunk: 2 in 100.
const HOSTILE: [Kind; 20] = [
    ("test.spin", 5, "{}"),
    ("test.alloc", 5, r#"{"bytes": 4000000000}"#),
    ("test.alloc", 5, r#"{"bytes": 4000000000, "gently": true}"#),
    ("test.recurse", 5, r#"{"depth": 1000000000}"#),
    ("test.trap", 5, "{}"),
    ("test.panic", 5, r#"{"message": "\u001b[31mred"}"#),
    ("test.panic", 5, "{}"),
    ("test.big-result", 5, r#"{"bytes": 100000000}"#),
    ("test.big-result", 5, r#"{"bytes": 5000000}"#),
    ("test.nul-result", 5, "{}"),
    ("test.print", 5, r#"{"line": "flood", "times": 100000}"#),
    ("test.ignore-abort", 5, "{}"),
    ("test.deadlock", 5, "{}"),
    (
        "test.bad-steps",
        5,
        r#"{"name": "s", "count": 1000000, "bytes": 1}"#,
    ),
    (
        "test.bad-steps",
        5,
        r#"{"name": "s", "count": 3, "bytes": 50000000}"#,
    ),
    ("test.connect", 5, r#"{"to": "127.0.0.1:5432"}"#),
    ("test.read-file", 5, r#"{"path": "../../etc/passwd"}"#),
    ("test.fail", 5, r#"{"as": "details"}"#),
    ("text.stats", 5, r#"{"text": 7}"#),
    ("noop", 5, r#"[[[[[[[[1]]]]]]]]"#),
];

/// Short limits, so that a million jobs end within an hour.
const CONFIG: &str = r#"
[handlers."test.spin".limits]
cpu = "50ms"

[handlers."test.big-result".limits]
cpu = "50ms"

[handlers."test.alloc".limits]
cpu = "100ms"

[handlers."test.ignore-abort"]
timeout = "100ms"
grace = "50ms"
"#;

/// Resources of the host at one moment.
struct Sample {
    jobs: i64,
    resident: f64,
    files: f64,
    maps: f64,
    threads: f64,
}

/// One of these resources.
type Resource = fn(&Sample) -> f64;

impl Sample {
    fn of(pid: u32, jobs: i64) -> Result<Self> {
        let count = |folder: &str| -> Result<f64> {
            let path = format!("/proc/{pid}/{folder}");
            let entries = std::fs::read_dir(&path).with_context(|| format!("list {path}"))?;
            Ok(entries.count() as f64)
        };
        let maps = format!("/proc/{pid}/maps");
        let maps = std::fs::read_to_string(&maps).with_context(|| format!("read {maps}"))?;
        Ok(Self {
            jobs,
            resident: Memory::of(pid)?.resident as f64,
            files: count("fd")?,
            maps: maps.lines().count() as f64,
            threads: count("task")?,
        })
    }
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    ensure!(
        options.jobs >= 20 * CHUNK,
        "a soak needs at least {} jobs",
        20 * CHUNK
    );
    let chunks = options.jobs / CHUNK;
    Server::during(bench, async |server| {
        let modules = ["noop", "text_stats", "csv_summary", "test_guests"];
        let handlers = HostOptions {
            config: Some(CONFIG.into()),
            ..HostOptions::new(&server.handlers(&bench.guests, &modules)?)
        };
        bench.progress.step("starting a host");
        let mut host = Host::start(bench, server, &handlers).await?;
        let pid = host.pid();
        let started = Instant::now();
        let samples = host
            .during(soak(bench, &server.client, pid, chunks))
            .await?;
        let seconds = started.elapsed().as_secs_f64();
        // The host has not exited on its own: `during` would have failed.
        host.stop().await?;
        let mut report = Report::new("soak");
        report.settings = server.settings();
        let jobs = (chunks * CHUNK) as f64;
        report.add("soak.jobs", "jobs", jobs, Unit::Count);
        report.add(
            "soak.jobs_per_s",
            "throughput",
            jobs / seconds,
            Unit::PerSecond,
        );
        ends(&server.client, &mut report).await?;
        growth(&samples, chunks * CHUNK, &mut report)?;
        Ok(report)
    })
    .await
}

/// Enqueues a chunk whenever few enough jobs are live, and returns when all jobs have ended.
async fn soak(bench: &Bench, client: &Client, pid: u32, chunks: i64) -> Result<Vec<Sample>> {
    let jobs = chunks * CHUNK;
    bench.progress.count("soaking", jobs.unsigned_abs());
    let (mut enqueued, mut samples) = (0, Vec::new());
    let (mut done_before, mut changed) = (0, Instant::now());
    loop {
        let row = client
            .query_one("SELECT count(*) FROM rouse.job", &[])
            .await?;
        let live: i64 = row.get(0);
        let done = enqueued * CHUNK - live;
        samples.push(Sample::of(pid, done)?);
        bench.progress.at(done.unsigned_abs());
        if done >= jobs {
            return Ok(samples);
        }
        if done != done_before {
            (done_before, changed) = (done, Instant::now());
        }
        ensure!(
            changed.elapsed() < STALLED_AFTER,
            "no job has ended for {STALLED_AFTER:?}; {live} are left"
        );
        if enqueued < chunks && live + CHUNK <= LIVE_MAX {
            enqueue(client).await.context("enqueue a chunk")?;
            enqueued += 1;
            continue;
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
}

async fn enqueue(client: &Client) -> Result<()> {
    const SQL: &str = "SELECT rouse.enqueue_many($1, array_fill($2::text::jsonb, ARRAY[$3::bigint::integer]), source => $4, max_attempts => 1)";
    for (source, kinds) in [("good", &GOOD[..]), ("hostile", &HOSTILE)] {
        for (handler, jobs, payload) in kinds {
            client
                .execute(SQL, &[handler, payload, jobs, &source])
                .await?;
        }
    }
    Ok(())
}

/// Counts how the jobs ended. Every good job must have succeeded.
async fn ends(client: &Client, report: &mut Report) -> Result<()> {
    let rows = client
        .query(
            "SELECT source, coalesce(error ->> 'kind', state::text), count(*), min(error ->> 'message')
             FROM rouse.finished GROUP BY 1, 2 ORDER BY 1, 3 DESC",
            &[],
        )
        .await?;
    for row in rows {
        let (source, end, jobs): (String, String, i64) = (row.get(0), row.get(1), row.get(2));
        let key = format!("soak.{source}.{end}");
        report.add(
            key,
            format!("{source} jobs that ended as {end}"),
            jobs as f64,
            Unit::Count,
        );
        if source == "good" && end != "succeeded" {
            let why: Option<String> = row.get(3);
            report.failures.push(format!(
                "{jobs} good jobs ended as {end}: {}",
                why.unwrap_or_default()
            ));
        }
    }
    Ok(())
}

/// Growth of the host's resources between the second and the last tenth of the jobs.
fn growth(samples: &[Sample], jobs: i64, report: &mut Report) -> Result<()> {
    let within = |from: i64, to: i64, value: Resource| {
        let tenth = samples
            .iter()
            .filter(|sample| (jobs * from / 10..jobs * to / 10).contains(&sample.jobs));
        median(tenth.map(value).collect())
    };
    let resources: [Resource; 4] = [
        |sample| sample.resident,
        |sample| sample.files,
        |sample| sample.maps,
        |sample| sample.threads,
    ];
    // The permitted growth of each: 10 %, plus this amount.
    let names = [
        ("rss", "resident memory", Unit::Bytes, 16e6),
        ("files", "open files", Unit::Count, 4.0),
        ("maps", "mappings", Unit::Count, 50.0),
        ("threads", "threads", Unit::Count, 4.0),
    ];
    for ((key, label, unit, slack), value) in names.into_iter().zip(resources) {
        let (early, late) = (within(1, 2, value)?, within(9, 10, value)?);
        report.add(
            format!("soak.{key}_early"),
            format!("{label}, second tenth"),
            early,
            unit,
        );
        report.add(
            format!("soak.{key}_late"),
            format!("{label}, last tenth"),
            late,
            unit,
        );
        if late > early * 1.1 + slack {
            report.failures.push(format!(
                "{label} grew from {early:.0} to {late:.0}: the host leaks"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(grows: f64) -> Vec<Sample> {
        (0..1000)
            .map(|jobs| Sample {
                jobs,
                resident: 1e8 + grows * 1e6 * jobs as f64,
                files: 20.0,
                maps: 900.0,
                threads: 10.0,
            })
            .collect()
    }

    #[test]
    fn only_a_growing_host_is_a_failure() {
        for (grows, failures) in [(0.0, 0), (0.01, 0), (1.0, 1)] {
            let mut report = Report::new("soak");
            growth(&samples(grows), 1000, &mut report).unwrap();
            assert_eq!(report.failures.len(), failures, "{:?}", report.failures);
            assert_eq!(report.figures.len(), 8);
        }
    }

    #[test]
    fn two_in_a_hundred_jobs_of_a_chunk_are_hostile() {
        let jobs = |kinds: &[Kind]| -> i64 { kinds.iter().map(|(_, jobs, _)| jobs).sum() };
        assert_eq!(jobs(&GOOD) + jobs(&HOSTILE), CHUNK);
        assert_eq!(jobs(&HOSTILE) * 50, CHUNK);
    }
}
