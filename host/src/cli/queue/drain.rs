//! `rouse queue drain`: works on one queue in this process until the queue is empty.

mod progress;
mod summary;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args as ClapArgs;
use tracing::debug;

use self::progress::Progress;
use self::summary::{Left, Summary, left};
use crate::cli::host::{HANDLERS_DIR, POOL_SIZE, worker_id};
use crate::cli::open_files;
use crate::cli::settings::sandbox_settings;
use crate::cli::signals::Signals;
use crate::cli::target::Target;
use crate::cli::text::{as_json, error_line, plain};
use crate::cli::used::warn_of_unused_queue;
use crate::config::{Environment, File};
use crate::sandbox::{Catalog, Sandbox};
use crate::setting::{Number, setting};
use crate::store::connect::Connector;
use crate::store::{Remaining, Store, StoreError};
use crate::telemetry;
use crate::worker::{self, Health, Middleware, Parts, Policy, Settings, Stop};

/// The interval at which the queue is queried. Each query counts the jobs that are left, so large queues are queried
/// less often.
const POLL_EVERY: Duration = Duration::from_millis(200);
const POLL_EVERY_IF_LARGE: Duration = Duration::from_secs(1);
const LARGE: i64 = 1_000;

/// An outage that lasts this long is reported. A lost connection is replaced sooner.
const OUTAGE_REPORTED_AFTER: Duration = Duration::from_secs(3);

/// Some jobs failed, or wait for a retry.
const EXIT_FAILED: u8 = 1;
/// Jobs are left that this process cannot run.
const EXIT_LEFT: u8 = 3;
/// The queue is paused.
const EXIT_REFUSED: u8 = 6;
/// An error in the settings, the folder or the database, when the command starts or later.
const EXIT_BROKEN: u8 = 7;
/// A signal ended it before the queue was empty; 128 + SIGINT, as in shells.
const EXIT_INTERRUPTED: u8 = 130;

/// Options of `rouse queue drain`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Runs all jobs that are ready or due, including those enqueued while it runs, and ends when none is left. Jobs that are \
scheduled for later stay. Sources, memory, directories, slots and tags of rouse.toml apply. A job that fails because \
its workers crashed too often is in the history (`rouse job ls`), but not in the counts here.\n\
Exit codes: 0 all succeeded, or there was nothing to do · 1 some failed, or wait for a retry · 3 jobs are left that this \
process cannot run · 6 the queue is paused · 7 an error in the settings, the folder or the database · 130 a signal \
came first")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The queue
    name: String,

    /// The folder with the handlers (*.wasm)
    #[arg(long, value_name = "DIR", default_value = HANDLERS_DIR)]
    handlers: PathBuf,

    /// Settings; default: ./rouse.toml, if there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// This worker's id; default: a random one, even if rouse.toml has one
    #[arg(long, value_name = "ID", value_parser = worker_id)]
    worker_id: Option<String>,

    /// How long a claim is valid without renewal; overrides modules and rouse.toml
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = lease)]
    lease: Number,

    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

fn lease(text: &str) -> Result<Number, String> {
    setting::<Policy>("lease").parse(text)
}

/// Drains the queue, and prints a summary.
pub(super) async fn run(
    args: Args,
    middleware: Vec<Arc<dyn Middleware>>,
) -> anyhow::Result<ExitCode> {
    let signals = Signals::install()?;
    match drain(&args, signals, middleware).await {
        Ok(code) => Ok(code),
        Err(error) => {
            telemetry::line(&error_line(format_args!("{error:#}")));
            Ok(ExitCode::from(EXIT_BROKEN))
        }
    }
}

async fn drain(
    args: &Args,
    mut signals: Signals,
    middleware: Vec<Arc<dyn Middleware>>,
) -> anyhow::Result<ExitCode> {
    let Some(prepared) = signals.unless(prepare(args)).await else {
        return Ok(ExitCode::from(EXIT_INTERRUPTED));
    };
    let Some((mut summary, work)) = prepared? else {
        return Ok(ExitCode::from(EXIT_REFUSED));
    };
    let done = match work {
        Some(work) => work.until_empty(&mut summary, signals, middleware).await,
        None => Ok(()),
    };
    let text = match args.json {
        true => as_json(summary.to_json()),
        false => summary.to_text(),
    };
    telemetry::flush();
    // Not `println!`, which panics if the reader has closed the pipe.
    writeln!(std::io::stdout(), "{text}").context("print the summary")?;
    done?;
    Ok(exit_code(&summary))
}

/// Queries the queue and, if it has jobs to run, loads the handlers. `None` if the queue is paused.
async fn prepare(args: &Args) -> anyhow::Result<Option<(Summary, Option<Work>)>> {
    let (file, folder) = File::read(args.config.as_deref())?;
    let connector = args.target.connector()?;
    let store = Store::new(&connector, POOL_SIZE);
    store.check_schema().await?;
    warn_of_unused_queue(&store, &args.name).await?;
    if let Some(since) = store.queue_paused_at(&args.name).await? {
        report_paused(&args.name, &since);
        return Ok(None);
    }
    let settings = settings(args, &file);
    let mut summary = Summary::new(&args.name, &settings.worker_id);
    let now = store.remaining(&args.name, &[]).await?;
    debug!("queried queue {}", plain(&args.name));
    // Do not compile anything for an empty queue.
    if now.iter().all(|row| row.ready + row.due == 0) {
        summary.left = left(&now, |_| Some("no job is due yet".into()));
        return Ok(Some((summary, None)));
    }
    open_files::raise_limit();
    let sandbox = Sandbox::start(sandbox_settings(&file, &folder, settings.slots, None)?)?;
    let catalog = Catalog::open(sandbox.clone(), &args.handlers).await?;
    check_sources(&settings, &catalog, args)?;
    let work = Work {
        settings: Settings {
            slots: settings.slots.min(sandbox.attempts_max()),
            ..settings
        },
        sandbox,
        catalog: Arc::new(catalog),
        store,
        connector,
        sql_logins: file.sql_logins(&folder, Environment, None)?,
    };
    Ok(Some((summary, Some(work))))
}

/// Rejects sources that are bound to missing handlers. A host leaves their jobs waiting, and this process would never
/// end.
fn check_sources(settings: &Settings, catalog: &Catalog, args: &Args) -> anyhow::Result<()> {
    let handlers = catalog.current();
    let mut missing: Vec<String> = settings
        .sources
        .iter()
        .filter(|(_, handler)| handlers.get(handler).is_none())
        .map(|(source, handler)| format!("{} = {}", plain(source), plain(handler)))
        .collect();
    missing.sort();
    anyhow::ensure!(
        missing.is_empty(),
        "rouse.toml binds sources to handlers that {} does not have ([sources]: {}); add their modules, or remove the bindings",
        args.handlers.display(),
        missing.join(", ")
    );
    Ok(())
}

fn exit_code(summary: &Summary) -> ExitCode {
    if let Some(since) = &summary.paused_at {
        report_paused(&summary.queue, since);
        return ExitCode::from(EXIT_REFUSED);
    }
    if summary.interrupted {
        return ExitCode::from(EXIT_INTERRUPTED);
    }
    if summary.has_failures() {
        return ExitCode::from(EXIT_FAILED);
    }
    match summary.left.iter().any(Left::is_unrunnable) {
        true => ExitCode::from(EXIT_LEFT),
        false => ExitCode::SUCCESS,
    }
}

fn report_paused(queue: &str, since: &str) {
    let queue = plain(queue);
    telemetry::line(&format!(
        "rouse: queue {queue} has been paused since {since}; `rouse queue resume {queue}` resumes it"
    ));
}

/// The file's settings, for this queue only, with one lease for all handlers.
fn settings(args: &Args, file: &File) -> Settings {
    let written = file.worker(Environment.hostname());
    let random = Settings::default().worker_id;
    let mut overrides = written.overrides;
    overrides.0.entry("*".into()).or_default();
    for set in overrides.0.values_mut() {
        set.set("lease", args.lease);
    }
    Settings {
        worker_id: args.worker_id.clone().unwrap_or(random),
        queues: vec![args.name.clone()],
        overrides,
        // Schedules would keep the queue from becoming empty.
        schedules: false,
        ..written
    }
}

/// A worker that ends when the queue is empty.
struct Work {
    settings: Settings,
    sandbox: Arc<Sandbox>,
    catalog: Arc<Catalog>,
    store: Store,
    connector: Connector,
    sql_logins: BTreeMap<String, Connector>,
}

impl Work {
    async fn until_empty(
        self,
        summary: &mut Summary,
        signals: Signals,
        middleware: Vec<Arc<dyn Middleware>>,
    ) -> anyhow::Result<()> {
        let (health, stop) = (Health::default(), Stop::default());
        tokio::spawn(signals.stop(stop.clone()));
        let parts = Parts {
            store: self.store.clone(),
            listen_connector: self.connector.clone(),
            sandbox: self.sandbox.clone(),
            catalog: self.catalog.clone(),
            sql_logins: self.sql_logins.clone(),
            middleware,
        };
        let mut worker = tokio::spawn(worker::run(
            self.settings.clone(),
            parts,
            health.clone(),
            stop.clone(),
        ));
        let progress = Progress::new(&summary.queue);
        let mut outage = Outage::default();
        let mut fault = None;
        let ended = loop {
            match self.is_empty(summary, &health, &progress).await {
                Ok(true) => break None,
                Ok(false) if summary.paused_at.is_some() => break None,
                Ok(false) => outage = Outage::default(),
                // The worker continues as far as it can.
                Err(error) if error.is_transient() => outage.report(&summary.queue, &error),
                Err(error) => {
                    fault = Some(error);
                    break None;
                }
            }
            let pause = if summary.ready > LARGE {
                POLL_EVERY_IF_LARGE
            } else {
                POLL_EVERY
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // A signal arrived, or the worker failed.
                ended = &mut worker => break Some(ended),
            }
        };
        summary.interrupted = ended.is_some();
        stop.drain();
        let ended = match ended {
            Some(ended) => ended,
            None => worker.await,
        };
        progress.end();
        // Count the outcomes, including after an error.
        summary.count(&health.outcomes);
        ended.context("run the worker")??;
        if let Some(fault) = fault {
            return Err(fault).context("count the jobs that are left");
        }
        let now = self.store.remaining(&summary.queue, &self.sources()).await;
        summary.left = self.left(&now.context("count the jobs that are left")?);
        Ok(())
    }

    /// True if no job is left that this worker could run, and none is running here. Notes if the queue was paused,
    /// since there is nothing to wait for then.
    async fn is_empty(
        &self,
        summary: &mut Summary,
        health: &Health,
        progress: &Progress,
    ) -> Result<bool, StoreError> {
        // A worker runs nothing until it is registered.
        let registered = self.store.incarnation().is_some();
        let sources = self.sources();
        let now = self.store.left_to_run(&summary.queue, &sources).await?;
        let running = i64::try_from(health.in_hand.load(Ordering::Relaxed)).unwrap_or(i64::MAX);
        summary.ready = self.ready(&now);
        summary.count(&health.outcomes);
        progress.show(summary, running);
        if running == 0 {
            summary.paused_at = self.store.queue_paused_at(&summary.queue).await?;
        }
        if !registered || summary.ready + running > 0 {
            return Ok(false);
        }
        // A job that is being claimed or settled right now is not counted here, and may be retried at once: only the
        // database knows all jobs.
        let now = self.store.remaining(&summary.queue, &sources).await?;
        let running: i64 = now.iter().map(|row| row.mine).sum();
        Ok(self.ready(&now) + running == 0)
    }

    /// The number of jobs that this worker could run now.
    fn ready(&self, now: &[Remaining]) -> i64 {
        now.iter().map(|row| self.ready_of(row)).sum()
    }

    /// The sources that are bound to a handler of the folder.
    fn sources(&self) -> Vec<String> {
        let handlers = self.catalog.current();
        let bound = self.settings.sources.iter();
        bound
            .filter(|(_, handler)| handlers.get(handler).is_some())
            .map(|(source, _)| source.clone())
            .collect()
    }

    fn ready_of(&self, row: &Remaining) -> i64 {
        match self.why_not(row) {
            None => row.ready + row.due,
            // Their source is bound to a handler of the folder.
            Some(_) if self.missing_tags(row).is_empty() => row.bound,
            Some(_) => 0,
        }
    }

    /// Why this worker cannot run such jobs; `None` if it can.
    fn why_not(&self, row: &Remaining) -> Option<String> {
        if self.catalog.current().get(&row.handler).is_none() {
            return Some("the folder has no such handler".into());
        }
        let missing = self.missing_tags(row);
        (!missing.is_empty()).then(|| {
            format!(
                "they require the tags {} (`tags` in rouse.toml)",
                missing.join(", ")
            )
        })
    }

    fn missing_tags<'a>(&self, row: &'a Remaining) -> Vec<&'a str> {
        row.tags
            .iter()
            .filter(|tag| !self.settings.tags.contains(tag))
            .map(String::as_str)
            .collect()
    }

    fn left(&self, now: &[Remaining]) -> Vec<Left> {
        // This worker can run bound jobs. They are left only if they were enqueued just now, or if the queue was paused
        // or the drain interrupted.
        left(now, |row| {
            let unrunnable = row.bound == 0 || row.ready + row.due > self.ready_of(row);
            self.why_not(row).filter(|_| unrunnable)
        })
    }
}

/// An outage of the database.
#[derive(Default)]
struct Outage {
    since: Option<Instant>,
    reported: bool,
}

impl Outage {
    /// Reports the outage once, when it has lasted for some time.
    fn report(&mut self, queue: &str, error: &StoreError) {
        let since = *self.since.get_or_insert_with(Instant::now);
        if !self.reported && since.elapsed() >= OUTAGE_REPORTED_AFTER {
            self.reported = true;
            telemetry::line(&format!(
                "rouse: queue {}: cannot count the jobs that are left ({error}); waiting for the database (Ctrl-C stops)",
                plain(queue)
            ));
        }
    }
}
