//! Measures what an attempt costs on the guest side, without a database: CPU time, or, with `held`, memory mappings and
//! memory.
//!
//! ```text
//! cargo xtask handlers
//! cargo run -p rouse-host --example attempt_cost -- [handlers folder] [handler] [attempts] [payload] [reuse]
//! cargo run -p rouse-host --example attempt_cost -- target/test-guests/p2 test.wait-abort 200 {} held
//! perf stat -e instructions:u,instructions:k target/debug/examples/attempt_cost
//! ```
//!
//! `held` runs all attempts at once; their handler has to wait until it is aborted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rouse::job::{AbortReason, Attempt, JobId, RunEnd};
use rouse::sandbox::{
    AbortHandle, Catalog, DatabaseClock, Handler, Instances, JobInput, Sandbox, Settings,
};
use rouse::traces::AttemptTrace;

/// Attempts that are not measured: they touch memory for the first time, and bring code into the caches.
const WARM_UP: usize = 2_000;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().unwrap_or_else(|| "handlers-wasm".into());
    let name = args.next().unwrap_or_else(|| "noop".into());
    let attempts: usize = args.next().map_or(Ok(200_000), |text| text.parse())?;
    let payload = args.next().unwrap_or_else(|| r#"{"n":7}"#.into());
    let (instances, held) = match args.next().as_deref() {
        Some("reuse") => (Instances::Reuse, false),
        Some("held") => (Instances::Fresh, true),
        Some(_) | None => (Instances::Fresh, false),
    };

    let before = Space::now()?;
    let settings = Settings::default();
    let sandbox = Sandbox::start(Settings {
        instances: [(name.clone(), instances)].into(),
        attempts_max: match held {
            true => attempts,
            false => settings.attempts_max,
        },
        ..settings
    })?;
    println!("the pool: {}", Space::now()?.since(&before));
    let catalog = Catalog::open(sandbox.clone(), folder).await?;
    let set = catalog.current();
    let handler = set.get(&name).with_context(|| {
        let names = set.names().join(", ");
        format!("the folder has no handler {name}, only {names}; build it first")
    })?;

    if held {
        return hold(&sandbox, handler, &payload, attempts).await;
    }
    println!("{attempts} attempts at {name}, instances: {instances:?}");
    for tasks in [1, 2] {
        run_tasks(&sandbox, handler, &payload, tasks, WARM_UP).await?;
        let (before, started) = (Cpu::now()?, Instant::now());
        run_tasks(&sandbox, handler, &payload, tasks, attempts / tasks).await?;
        let (cpu, wall) = (before.elapsed()?, started.elapsed());
        println!(
            "{tasks} at once: {:.2} µs of CPU an attempt ({:.2} user + {:.2} kernel), {:.0} attempts a second",
            per(cpu.user + cpu.kernel, attempts),
            per(cpu.user, attempts),
            per(cpu.kernel, attempts),
            attempts as f64 / wall.as_secs_f64(),
        );
    }
    Ok(())
}

/// Runs that many attempts at once, and prints the memory that they occupy while all of them wait for their abort.
async fn hold(
    sandbox: &Arc<Sandbox>,
    handler: &Arc<Handler>,
    payload: &str,
    attempts: usize,
) -> anyhow::Result<()> {
    let before = Space::now()?;
    let abort = AbortHandle::new();
    let running: Vec<_> = (0..attempts)
        .map(|_| {
            let run = sandbox.run(
                handler,
                job(payload.as_bytes().to_vec()),
                abort.clone(),
                None,
            );
            sandbox.guests().spawn(run)
        })
        .collect();
    // All of them wait once the counts stop growing.
    let mut held = Space::now()?;
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let now = Space::now()?;
        if now == held {
            break;
        }
        held = now;
    }
    let since = held.since(&before);
    println!(
        "{attempts} attempts at {}, held: {since}",
        handler.manifest.name
    );
    println!(
        "each: {:.2} mappings, {:.0} KiB resident",
        (held.mappings - before.mappings) as f64 / attempts as f64,
        held.resident_kib.saturating_sub(before.resident_kib) as f64 / attempts as f64,
    );
    abort.abort(AbortReason::Shutdown, Duration::from_secs(60));
    for run in running {
        let run = run.await?;
        ensure!(matches!(run.end, RunEnd::Aborted(_)), "{:?}", run.end);
    }
    println!("after their end: {}", Space::now()?.since(&before));
    Ok(())
}

/// The memory of this process, as the kernel counts it.
#[derive(PartialEq)]
struct Space {
    mappings: usize,
    virtual_kib: usize,
    resident_kib: usize,
}

impl Space {
    fn now() -> anyhow::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let kib = |key: &str| -> anyhow::Result<usize> {
            let line = status.lines().find(|line| line.starts_with(key));
            let line = line.context("read /proc/self/status")?;
            Ok(line.split_whitespace().nth(1).context("read it")?.parse()?)
        };
        Ok(Self {
            mappings: std::fs::read_to_string("/proc/self/maps")?.lines().count(),
            virtual_kib: kib("VmSize:")?,
            resident_kib: kib("VmRSS:")?,
        })
    }

    fn since(&self, before: &Self) -> String {
        format!(
            "{} mappings, {:.2} GiB of address space, {:.1} MiB resident",
            self.mappings.saturating_sub(before.mappings),
            self.virtual_kib.saturating_sub(before.virtual_kib) as f64 / f64::from(1 << 20),
            self.resident_kib.saturating_sub(before.resident_kib) as f64 / 1024.0,
        )
    }
}

fn job(payload: Vec<u8>) -> JobInput {
    JobInput {
        id: JobId(7),
        queue: "default".into(),
        tenant: None,
        source: None,
        attempt: Attempt(1),
        max_attempts: 5,
        requested_at_ms: 1_700_000_000_000,
        payload,
        payload_checked: None,
        memory_bytes: None,
        clock: DatabaseClock::from_host(),
        trace: AttemptTrace::default(),
    }
}

/// Runs that many attempts in each of some tasks.
async fn run_tasks(
    sandbox: &Arc<Sandbox>,
    handler: &Arc<Handler>,
    payload: &str,
    tasks: usize,
    attempts: usize,
) -> anyhow::Result<()> {
    let tasks: Vec<_> = (0..tasks)
        .map(|_| {
            let (sandbox, handler, payload) = (
                sandbox.clone(),
                handler.clone(),
                payload.as_bytes().to_vec(),
            );
            sandbox.clone().guests().spawn(async move {
                for attempt in 0..attempts {
                    if attempt % 100 == 0 {
                        // Lets another thread take over a task that started on the same thread.
                        tokio::task::yield_now().await;
                    }
                    let job = job(payload.clone());
                    let run = sandbox.run(&handler, job, AbortHandle::new(), None).await;
                    ensure!(matches!(run.end, RunEnd::Returned(_)), "{:?}", run.end);
                }
                Ok(())
            })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    Ok(())
}

fn per(time: Duration, attempts: usize) -> f64 {
    time.as_secs_f64() * 1e6 / attempts as f64
}

/// CPU time of this process.
struct Cpu {
    user: Duration,
    kernel: Duration,
}

impl Cpu {
    /// The kernel counts in units of 10 ms, which is exact enough for a run of seconds.
    fn now() -> anyhow::Result<Self> {
        let stat = std::fs::read_to_string("/proc/self/stat")?;
        // The name of the process, in parentheses, may contain spaces.
        let (_, fields) = stat.rsplit_once(')').context("read /proc/self/stat")?;
        let mut times = fields.split_whitespace().skip(11);
        let mut time = || -> anyhow::Result<Duration> {
            let ticks: u64 = times.next().context("read /proc/self/stat")?.parse()?;
            Ok(Duration::from_millis(10 * ticks))
        };
        Ok(Self {
            user: time()?,
            kernel: time()?,
        })
    }

    fn elapsed(&self) -> anyhow::Result<Self> {
        let now = Self::now()?;
        Ok(Self {
            user: now.user - self.user,
            kernel: now.kernel - self.kernel,
        })
    }
}
