//! Hundreds of thousands of jobs in one host, some of them hostile: whether it keeps anything of them.
//!
//! Figures are compared between the second tenth of the jobs, when everything has been touched once, and the last one.

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
    /// Jobs, hostile ones included
    #[arg(long, default_value_t = 1_000_000)]
    jobs: i64,
}

/// Enqueued at a time; of each hundred two are hostile.
const CHUNK: i64 = 5_000;
/// Enqueueing waits while so many are left.
const LIVE_MAX: i64 = 20_000;
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Nothing hostile lasts nearly as long.
const STALLED_AFTER: Duration = Duration::from_secs(120);

/// A handler, how many jobs of a chunk, and their payload.
type Kind = (&'static str, i64, &'static str);

/// What a day's work is like: 98 of 100.
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

/// Five of each for a chunk: 2 of 100.
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

/// Short, so that a million jobs end within the hour.
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

/// What the host has at one moment.
struct Sample {
    jobs: i64,
    resident: f64,
    files: f64,
    maps: f64,
    threads: f64,
}

/// One of its figures.
type Has = fn(&Sample) -> f64;

impl Sample {
    fn of(pid: u32, jobs: i64) -> Result<Self> {
        let count = |what: &str| -> Result<f64> {
            let path = format!("/proc/{pid}/{what}");
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
        // It has not ended by itself meanwhile: `during` would have said so.
        host.stop().await?;
        let mut report = Report::new("soak");
        report.settings = server.settings();
        let jobs = (chunks * CHUNK) as f64;
        report.add("soak.jobs", "jobs", jobs, Unit::Count);
        report.add(
            "soak.jobs_per_s",
            "of them",
            jobs / seconds,
            Unit::PerSecond,
        );
        ends(&server.client, &mut report).await?;
        growth(&samples, chunks * CHUNK, &mut report)?;
        Ok(report)
    })
    .await
}

/// Enqueues a chunk whenever there is room for it, until all have ended.
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
        tokio::time::sleep(LOOK_EVERY).await;
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

/// How the jobs have ended: of the good ones none may have failed.
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
            format!("{source} jobs that ended so"),
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

/// What the host has more at the end than when it had touched everything once.
fn growth(samples: &[Sample], jobs: i64, report: &mut Report) -> Result<()> {
    let within = |from: i64, to: i64, value: Has| {
        let tenth = samples
            .iter()
            .filter(|sample| (jobs * from / 10..jobs * to / 10).contains(&sample.jobs));
        median(tenth.map(value).collect())
    };
    let has: [Has; 4] = [
        |sample| sample.resident,
        |sample| sample.files,
        |sample| sample.maps,
        |sample| sample.threads,
    ];
    // By how much each may have grown: a part of it, and a few.
    let names = [
        ("rss", "resident memory", Unit::Bytes, 16e6),
        ("files", "open files", Unit::Count, 4.0),
        ("maps", "mappings", Unit::Count, 50.0),
        ("threads", "threads", Unit::Count, 4.0),
    ];
    for ((key, what, unit, few), value) in names.into_iter().zip(has) {
        let (early, late) = (within(1, 2, value)?, within(9, 10, value)?);
        report.add(
            format!("soak.{key}_early"),
            format!("{what}, second tenth"),
            early,
            unit,
        );
        report.add(
            format!("soak.{key}_late"),
            format!("{what}, last tenth"),
            late,
            unit,
        );
        if late > early * 1.1 + few {
            report.failures.push(format!(
                "{what} grew from {early:.0} to {late:.0}: the host keeps something of its jobs"
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
    fn a_host_that_grows_is_found_and_one_that_does_not_is_not() {
        for (grows, failures) in [(0.0, 0), (0.01, 0), (1.0, 1)] {
            let mut report = Report::new("soak");
            growth(&samples(grows), 1000, &mut report).unwrap();
            assert_eq!(report.failures.len(), failures, "{:?}", report.failures);
            assert_eq!(report.figures.len(), 8);
        }
    }

    #[test]
    fn a_chunk_is_made_of_its_kinds_and_two_of_a_hundred_are_hostile() {
        let jobs = |kinds: &[Kind]| -> i64 { kinds.iter().map(|(_, jobs, _)| jobs).sum() };
        assert_eq!(jobs(&GOOD) + jobs(&HOSTILE), CHUNK);
        assert_eq!(jobs(&HOSTILE) * 50, CHUNK);
    }
}
