//! `rouse queue drain`: this process becomes a worker of one queue, until that is empty (SPEC row H6).

mod progress;
mod summary;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args as ClapArgs;

use self::progress::Progress;
use self::summary::{Left, Summary, left};
use crate::cli::duration::duration;
use crate::cli::host::{stop_on_signals, worker_id};
use crate::cli::target::Target;
use crate::cli::text::plain;
use crate::config::{Environment, File};
use crate::sandbox::{Catalog, Sandbox};
use crate::store::connect::Connector;
use crate::store::{Remaining, Store, StoreError};
use crate::worker::{self, Health, Overrides, Parts, Settings, Stop};

/// Connections of the pool, as of a host, and one to look.
const POOL_SIZE: usize = 5;

/// How often the queue is looked at. What is left is counted each time, so not more often where there is much.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const LOOK_EVERY_WHERE_MUCH: Duration = Duration::from_secs(1);
const MUCH: i64 = 1_000;

/// Some jobs failed, or wait for another try.
const EXIT_FAILED: u8 = 1;
/// Jobs are left that this process cannot run.
const EXIT_LEFT: u8 = 3;
/// The queue is paused.
const EXIT_REFUSED: u8 = 6;
/// A signal ended it before the queue was empty, as shells have it: 128 + SIGINT.
const EXIT_INTERRUPTED: u8 = 130;

/// Options of `rouse queue drain`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Runs everything that is ready or due, also what is enqueued meanwhile, and ends when nothing of it is left; what waits for a
later time is left alone. Sources, memory, directories, slots and tags of rouse.toml hold.
Exit codes: 0 all succeeded, or there was nothing to do · 1 some failed, or wait for another try · 3 jobs are left that this
process cannot run · 6 the queue is paused · 130 a signal came first")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The queue
    name: String,

    /// The folder with the handlers (*.wasm)
    #[arg(long, value_name = "DIR", default_value = "handlers-wasm")]
    handlers: PathBuf,

    /// Settings; default: ./rouse.toml, if there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// This worker's id; default: a random one, also where rouse.toml has one
    #[arg(long, value_name = "ID", value_parser = worker_id)]
    worker_id: Option<String>,

    /// How long a claim is good for without renewal, whatever modules and rouse.toml say
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = lease)]
    lease: Duration,

    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

fn lease(text: &str) -> Result<Duration, String> {
    let time = duration(text)?;
    match (Duration::from_secs(2)..=Duration::from_secs(86_400)).contains(&time) {
        true => Ok(time),
        false => Err("must be between 2s and 24h".into()),
    }
}

/// Drains, and says what came of it.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (file, folder) = File::read(args.config.as_deref())?;
    let connector = args.target.connector()?;
    let store = Store::new(connector.pool(POOL_SIZE));
    store.check_schema().await?;
    if let Some(since) = store.queue_paused_at(&args.name).await? {
        tell_paused(&args.name, &since);
        return Ok(ExitCode::from(EXIT_REFUSED));
    }
    let settings = settings(&args, &file);
    let mut summary = Summary::new(&args.name, &settings.worker_id);
    let now = store.remaining(&args.name).await?;
    // Nothing is compiled for an empty queue.
    if now.iter().any(|row| row.ready + row.due > 0) {
        let sandbox = Sandbox::start(file.sandbox(&folder, settings.slots))?;
        let catalog = Catalog::open(sandbox.clone(), &args.handlers).await?;
        let work = Work {
            settings: Settings {
                slots: settings.slots.min(sandbox.attempts_max()),
                ..settings
            },
            sandbox,
            catalog: Arc::new(catalog),
            store: store.clone(),
            connector,
        };
        work.until_empty(&mut summary).await?;
    } else {
        summary.left = left(&now, |_| Some("nothing of it is due yet".into()));
    }
    match args.json {
        true => println!("{}", summary.to_json()),
        false => println!("{}", summary.to_text()),
    }
    Ok(exit_code(&summary))
}

fn exit_code(summary: &Summary) -> ExitCode {
    if let Some(since) = &summary.paused_at {
        tell_paused(&summary.queue, since);
        return ExitCode::from(EXIT_REFUSED);
    }
    if summary.interrupted {
        return ExitCode::from(EXIT_INTERRUPTED);
    }
    if summary.failures() > 0 {
        return ExitCode::from(EXIT_FAILED);
    }
    match summary.left.iter().any(Left::is_in_vain) {
        true => ExitCode::from(EXIT_LEFT),
        false => ExitCode::SUCCESS,
    }
}

fn tell_paused(queue: &str, since: &str) {
    let queue = plain(queue);
    eprintln!(
        "rouse: queue {queue} is paused since {since}; `rouse queue resume {queue}` lets it go on"
    );
}

/// The file's settings, for this queue alone, with a lease for all handlers.
fn settings(args: &Args, file: &File) -> Settings {
    let written = file.worker(Environment.hostname());
    let random = Settings::default().worker_id;
    let mut overrides = written.overrides;
    overrides.0.entry("*".into()).or_default();
    for set in overrides.0.values_mut() {
        set.lease = Some(args.lease);
    }
    Settings {
        worker_id: args.worker_id.clone().unwrap_or(random),
        queues: vec![args.name.clone()],
        overrides: Overrides(overrides.0),
        ..written
    }
}

/// A worker that ends by itself.
struct Work {
    settings: Settings,
    sandbox: Arc<Sandbox>,
    catalog: Arc<Catalog>,
    store: Store,
    connector: Connector,
}

impl Work {
    async fn until_empty(self, summary: &mut Summary) -> anyhow::Result<()> {
        let (health, stop) = (Health::default(), Stop::default());
        tokio::spawn(stop_on_signals(stop.clone(), None)?);
        let parts = Parts {
            store: self.store.clone(),
            listen_at: self.connector.clone(),
            sandbox: self.sandbox.clone(),
            catalog: self.catalog.clone(),
            middlewares: Vec::new(),
        };
        let mut worker = tokio::spawn(worker::run(
            self.settings.clone(),
            parts,
            health.clone(),
            stop.clone(),
        ));
        let progress = Progress::new(&summary.queue);
        let mut fault = None;
        let ended = loop {
            match self.looks_empty(summary, &health, &progress).await {
                Ok(true) => break None,
                Ok(false) if summary.paused_at.is_some() => break None,
                Ok(false) => {}
                // The worker goes on meanwhile, as well as it can.
                Err(error) if error.is_transient() => {}
                Err(error) => {
                    fault = Some(error);
                    break None;
                }
            }
            let much = summary.ready > MUCH;
            let pause = if much {
                LOOK_EVERY_WHERE_MUCH
            } else {
                LOOK_EVERY
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // A signal came, or the worker cannot go on.
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
        ended.context("run the worker")??;
        if let Some(fault) = fault {
            return Err(fault).context("look what is left");
        }
        summary.count(&health.outcomes);
        let now = self.store.remaining(&summary.queue).await?;
        summary.left = self.left(&now);
        Ok(())
    }

    /// True where nothing is left that this worker could run, nor runs here. Nor is there anything to wait for while
    /// the queue is paused.
    async fn looks_empty(
        &self,
        summary: &mut Summary,
        health: &Health,
        progress: &Progress,
    ) -> Result<bool, StoreError> {
        // Before it has registered, it runs nothing.
        let registered = self.store.incarnation().is_some();
        let now = self.store.remaining(&summary.queue).await?;
        let ours = || now.iter().filter(|row| self.why_not(row).is_none());
        let running: i64 = now.iter().map(|row| row.mine).sum();
        summary.ready = ours().map(|row| row.ready + row.due).sum();
        summary.count(&health.outcomes);
        progress.show(summary, running);
        if running == 0 {
            summary.paused_at = self.store.queue_paused_at(&summary.queue).await?;
        }
        Ok(registered && summary.ready + running == 0)
    }

    /// Why this worker cannot run such jobs; none: it can.
    fn why_not(&self, row: &Remaining) -> Option<String> {
        if self.catalog.current().get(&row.handler).is_none() {
            return Some("the folder has no such handler".into());
        }
        let missing: Vec<&str> = row
            .tags
            .iter()
            .filter(|tag| !self.settings.tags.contains(tag))
            .map(String::as_str)
            .collect();
        (!missing.is_empty()).then(|| {
            format!(
                "they require the tags {} (`tags` in rouse.toml)",
                missing.join(", ")
            )
        })
    }

    fn left(&self, now: &[Remaining]) -> Vec<Left> {
        left(now, |row| self.why_not(row))
    }
}
