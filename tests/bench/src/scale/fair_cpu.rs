//! Fair queues that charge CPU time: the shares of the CPU time that two tenants with a backlog get.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::Scale;
use crate::host::{self, Host, HostOptions};
use crate::report::Unit;

/// The slots of each host.
const SLOTS: u16 = 2;
/// The number of windows in which shares are compared. Half a window before them is left out: hosts start without
/// knowing the cost of the jobs.
const WINDOWS: u32 = 2;
/// The number that `test.burn` counts to: about 2 ms.
const ROUNDS: i64 = 2_000_000;
/// The number of jobs of a tenant that are enqueued for each second and slot: twice as many as can run if no other
/// tenant has jobs.
const JOBS_PER_S: i64 = 1_000;

/// Two tenants with a backlog: `b` has the weight 1, and its jobs count to `ROUNDS`.
struct Case {
    name: &'static str,
    label: &'static str,
    /// The weight of `a`.
    weight: u32,
    /// The number that a job of `a` counts to, in `ROUNDS`.
    cost: i64,
}

const CASES: [Case; 2] = [
    Case {
        name: "costs",
        label: "equal weights, jobs that cost 3:1",
        weight: 1,
        cost: 3,
    },
    Case {
        name: "weights",
        label: "weights 3:1, jobs that cost the same",
        weight: 3,
        cost: 1,
    },
];

/// The attempts of `a` and of `b` that started in a window: the CPU time that they have used, and their number.
struct Window {
    cpu: [f64; 2],
    jobs: [f64; 2],
}

pub(super) async fn measure(scale: &mut Scale<'_>) -> Result<()> {
    for case in &CASES {
        for hosts in [1, 3] {
            shares(scale, case, hosts).await?;
        }
    }
    Ok(())
}

/// Measures a case while both tenants have jobs.
async fn shares(scale: &mut Scale<'_>, case: &Case, hosts: usize) -> Result<()> {
    let (bench, server) = (scale.bench, scale.server);
    let client = &server.client;
    let Case {
        name,
        label,
        weight,
        ..
    } = case;
    let queue = format!("cpu-{name}");
    let fair = format!(
        "SELECT rouse.set_fair_share('{queue}', policy => 'drr', charge => 'cpu', weights => '{{\"a\": {weight}}}', starvation => '0 s')"
    );
    client.batch_execute(&fair).await.context("set the share")?;
    let seconds = scale.options.window;
    let (from_s, window_s) = (f64::from(seconds) / 2.0, f64::from(seconds));
    let to_s = from_s + window_s * f64::from(WINDOWS);

    let mut options = HostOptions::new(&server.handlers(&bench.guests, &["test_guests"])?);
    options.slots = Some(SLOTS);
    bench.progress.step(&format!("starting {hosts} host(s)"));
    let mut running = Host::start_many(bench, server, &options, hosts).await?;
    let jobs = jobs_each(hosts, to_s);
    bench.progress.step("enqueueing the jobs of two tenants");
    client.batch_execute("BEGIN").await?;
    let mut first = i64::MAX;
    for (tenant, cost) in [("a", case.cost), ("b", 1)] {
        let enqueue = "
            SELECT min(e.id) FROM rouse.enqueue_many('test.burn', array_fill(jsonb_build_object('rounds', $1::bigint), ARRAY[$2::integer]),
                                                     queue => $3, tenant => $4) AS e(id)";
        // Fewer jobs are enqueued if they are expensive.
        let jobs = i32::try_from(jobs / cost).context("convert the number of jobs")?;
        let row = client
            .query_one(enqueue, &[&(cost * ROUNDS), &jobs, &queue, &tenant])
            .await
            .context("enqueue the jobs of a tenant")?;
        first = first.min(row.get(0));
    }
    let before = host::cpu_of(&running)?;
    client.batch_execute("COMMIT").await?;
    let work = async {
        // One second more, because the first attempt starts a little later, and the last attempts have to be settled.
        let lasts = Duration::from_secs_f64(to_s + 1.0);
        let title = format!("{label}, {hosts} host(s)");
        let sleep = tokio::time::sleep(lasts);
        bench.progress.during(&title, lasts, sleep).await;
        let left = "SELECT count(DISTINCT j.tenant) FROM rouse.job AS j WHERE j.state = 'queued'";
        let left: i64 = client.query_one(left, &[]).await?.get(0);
        let metered = "SELECT coalesce(sum(f.cpu_us), 0)::float8 / 1e6 FROM rouse.finished AS f WHERE f.id >= $1";
        let metered: f64 = client.query_one(metered, &[&first]).await?.get(0);
        anyhow::Ok((left, metered))
    };
    let (left, metered) = host::during(&mut running, Box::pin(work)).await?;
    let counted = host::cpu_of(&running)?.since(before).guests;
    ensure!(
        left == 2,
        "a tenant had no more jobs: raise JOBS_PER_S in tests/bench/src/scale/fair_cpu.rs"
    );
    // The rest of the jobs is not needed.
    client
        .execute("SELECT rouse.pause_queue($1)", &[&queue])
        .await?;
    host::stop_all(running).await?;
    client
        .execute("SELECT rouse.resume_queue($1)", &[&queue])
        .await?;
    let by_window = "
        WITH f AS (SELECT f.tenant, f.cpu_us, extract(epoch FROM f.started_at - min(f.started_at) OVER ())::float8 AS at_s
                   FROM rouse.finished AS f WHERE f.id >= $1)
        SELECT coalesce(sum(f.cpu_us) FILTER (WHERE f.tenant = 'a'), 0)::float8, coalesce(sum(f.cpu_us) FILTER (WHERE f.tenant = 'b'), 0)::float8,
               (count(*) FILTER (WHERE f.tenant = 'a'))::float8, (count(*) FILTER (WHERE f.tenant = 'b'))::float8
        FROM f WHERE f.at_s >= $2::float8 AND f.at_s < $3::float8 GROUP BY floor((f.at_s - $2::float8) / $4::float8)";
    let rows = client
        .query(by_window, &[&first, &from_s, &to_s, &window_s])
        .await
        .context("compare the shares")?;
    client
        .batch_execute("SELECT rouse.unlock_history('bench'); TRUNCATE rouse.job, rouse.finished")
        .await?;
    let windows = rows.iter().map(|row| Window {
        cpu: [row.get(0), row.get(1)],
        jobs: [row.get(2), row.get(3)],
    });
    let windows: Vec<Window> = windows.collect();
    ensure!(
        windows.len() == WINDOWS as usize,
        "attempts started in {} of {WINDOWS} windows",
        windows.len()
    );

    let key = format!("fair_cpu_{name}_{hosts}");
    let cpu = ratio(windows.iter().map(|window| window.cpu));
    let label = format!("{label}, {hosts} host(s): CPU time of the two tenants");
    scale.figure(&format!("{key}.ratio"), &label, cpu, Unit::Ratio);
    let jobs = ratio(windows.iter().map(|window| window.jobs));
    scale.figure(&format!("{key}.jobs"), "their jobs", jobs, Unit::Ratio);
    let off = off_percent(&windows, f64::from(*weight));
    let label = format!("off from their weights in the worst window of {seconds} s");
    scale.figure(&format!("{key}.off"), &label, off, Unit::Percent);
    let label = "metered CPU time compared with that of guest threads, as counted by the kernel";
    let metered = metered / counted;
    scale.figure(&format!("{key}.metered"), label, metered, Unit::Ratio);
    Ok(())
}

/// The number of jobs of each tenant that last for this time on this many hosts.
fn jobs_each(hosts: usize, seconds: f64) -> i64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let slots = cores.min(hosts * usize::from(SLOTS));
    // A few seconds more.
    (slots as f64 * (seconds + 5.0)) as i64 * JOBS_PER_S
}

/// The share of `a`, compared with that of `b`.
fn ratio(of_windows: impl Iterator<Item = [f64; 2]>) -> f64 {
    let sum = of_windows.fold([0.0, 0.0], |sum, [a, b]| [sum[0] + a, sum[1] + b]);
    sum[0] / sum[1]
}

/// The difference between the CPU time of `a`, compared with that of `b`, and its weight, in the worst window.
fn off_percent(windows: &[Window], weight: f64) -> f64 {
    let off = |window: &Window| (window.cpu[0] / window.cpu[1] / weight - 1.0).abs() * 100.0;
    windows.iter().map(off).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_window_counts_and_the_weight_is_not_a_difference() {
        let window = |a, b| Window {
            cpu: [a, b],
            jobs: [1.0, 3.0],
        };
        let windows = [window(303.0, 100.0), window(285.0, 100.0)];
        assert!((off_percent(&windows, 3.0) - 5.0).abs() < 1e-9);
        let all = ratio(windows.iter().map(|window| window.cpu));
        assert!((all - 2.94).abs() < 1e-9, "{all}");
        assert_eq!(off_percent(&[window(200.0, 200.0)], 1.0), 0.0);
    }
}
