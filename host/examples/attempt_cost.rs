//! What one attempt costs the guest side: processor time, without a database.
//!
//! ```text
//! cargo xtask handlers
//! cargo run -p rouse-host --example attempt_cost -- [handlers folder] [handler] [attempts] [payload] [reuse]
//! perf stat -e instructions:u,instructions:k target/debug/examples/attempt_cost
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rouse::job::{Attempt, JobId, RunEnd};
use rouse::sandbox::{AbortHandle, Catalog, Handler, Instances, JobInput, Sandbox, Settings};

/// Attempts that are not measured: until memory has been touched once, and code is in the caches.
const WARM_UP: usize = 2_000;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().unwrap_or_else(|| "handlers-wasm".into());
    let name = args.next().unwrap_or_else(|| "noop".into());
    let attempts: usize = args.next().map_or(Ok(200_000), |text| text.parse())?;
    let payload = args.next().unwrap_or_else(|| r#"{"n":7}"#.into());
    let instances = match args.next().as_deref() {
        Some("reuse") => Instances::Reuse,
        Some(_) | None => Instances::Fresh,
    };

    let sandbox = Sandbox::start(Settings {
        instances: [(name.clone(), instances)].into(),
        ..Settings::default()
    })?;
    let catalog = Catalog::open(sandbox.clone(), folder).await?;
    let set = catalog.current();
    let handler = set.get(&name).with_context(|| {
        let names = set.names().join(", ");
        format!("there is no handler {name} in the folder, only {names}; build it first")
    })?;

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
                        // Tasks that start on the same thread part here.
                        tokio::task::yield_now().await;
                    }
                    let job = JobInput {
                        id: JobId(7),
                        queue: "default".into(),
                        tenant: None,
                        source: None,
                        attempt: Attempt(1),
                        max_attempts: 5,
                        requested_at_ms: 1_700_000_000_000,
                        payload: payload.clone(),
                        memory_bytes: None,
                    };
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

/// Processor time of this process.
struct Cpu {
    user: Duration,
    kernel: Duration,
}

impl Cpu {
    /// From the counts of 10 ms that the kernel keeps: a run takes seconds.
    fn now() -> anyhow::Result<Self> {
        let stat = std::fs::read_to_string("/proc/self/stat")?;
        // The name of the process, in parentheses, may hold spaces.
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
