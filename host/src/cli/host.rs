//! The host of `rouse dev` and `rouse serve`: a worker, its HTTP port, and signals.

pub(super) mod dashboard;
pub(super) mod invocations;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Context as _;
use clap::Args;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use self::invocations::{TOKEN, Tokenless};
use super::misspelt::Named;
use super::open_files;
use super::settings::sandbox_settings;
use super::signals::Signals;
use crate::config::{self, Environment, File, HostSettings, Queue};
use crate::http::{self, Access, Invocations, Jobs, Metrics, Pages, Readiness, Report};
use crate::invoke::{Invoker, Share};
use crate::sandbox::{self, Catalog, HandlerSet, Sandbox};
use crate::setting::{Number, Overlay};
use crate::store::connect::Connector;
use crate::store::{Store, WorkerKey};
use crate::traces::Traces;
use crate::worker::{self, Health, Middleware, Parts, QueueOrder, Stop};

/// Connections of the pool of a worker, also in `rouse queue drain`: one each for claims, settlements and renewals, two
/// for steps, two for state, and one for work that can wait. Heartbeats and other short statements use any free one, and
/// so do the lookups of commits in doubt, two at a time. The number does not depend on the slots.
pub(super) const POOL_SIZE: usize = 8;

/// The default folder of modules.
pub(super) const HANDLERS_DIR: &str = "handlers-wasm";

/// Options of a worker.
#[derive(Debug, Clone, Args)]
pub(super) struct HostArgs {
    /// The folder with the handlers (*.wasm); it is watched
    #[arg(long, value_name = "DIR", default_value = HANDLERS_DIR)]
    pub(super) handlers: PathBuf,

    /// Settings; default: ./rouse.toml, if there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Serve only this queue (repeat for several); default: `queues` of rouse.toml, else all
    #[arg(long = "queue", value_name = "NAME", value_parser = queue)]
    queues: Vec<String>,

    #[arg(
        long,
        value_name = "ORDER",
        hide_possible_values = true,
        help = config::help("queue_order")
    )]
    queue_order: Option<QueueOrder>,

    /// A tag of this worker (repeat for several); default: `tags` of rouse.toml
    #[arg(long = "tag", value_name = "TAG", value_parser = tag)]
    tags: Vec<String>,

    #[arg(
        long,
        value_name = "N",
        help = config::host_help("slots"),
        value_parser = config::host_number("slots")
    )]
    slots: Option<Number>,

    #[arg(
        long,
        value_name = "ID",
        help = config::help("worker_id"),
        value_parser = worker_id
    )]
    worker_id: Option<String>,

    #[arg(long, value_name = "FILE", help = config::help("worker_key_file"))]
    worker_key_file: Option<PathBuf>,

    /// Do not listen for notifications; find jobs by polling alone
    #[arg(long)]
    no_notify: bool,

    #[arg(
        long,
        value_name = "TIME",
        help = config::host_help("poll_max"),
        value_parser = config::host_number("poll_max")
    )]
    poll_max: Option<Number>,

    #[arg(
        long,
        value_name = "TIME",
        help = config::host_help("drain_timeout"),
        value_parser = config::host_number("drain_timeout")
    )]
    drain_timeout: Option<Number>,
}

impl HostArgs {
    /// The settings file, if there is one.
    pub(super) fn config_file(&self) -> Option<&Path> {
        let usual = Path::new(File::USUAL);
        let existing = usual.is_file().then_some(usual);
        self.config.as_deref().or(existing)
    }

    /// The numbers that the options set.
    fn numbers(&self) -> Overlay<HostSettings> {
        let mut set = Overlay::default();
        for (key, number) in [
            ("slots", self.slots),
            ("poll_max", self.poll_max),
            ("drain_timeout", self.drain_timeout),
        ] {
            if let Some(number) = number {
                set.set(key, number);
            }
        }
        set
    }

    /// Reads `rouse.toml`. The numbers of the options override those of the file.
    pub(super) fn read(&self) -> anyhow::Result<Written> {
        let (mut file, folder) = File::read(self.config.as_deref())?;
        file.override_host(self.numbers())
            .map_err(anyhow::Error::msg)?;
        let queue = file.queue();
        Ok(Written {
            file,
            folder,
            queue,
            is_dev: false,
        })
    }
}

/// The settings that were read.
pub(super) struct Written {
    file: File,
    folder: PathBuf,
    /// Whether the host takes jobs from the queue.
    pub(super) queue: Queue,
    /// True for `rouse dev`, which trusts the modules of its folder.
    pub(super) is_dev: bool,
}

/// The addresses of the database.
pub(super) struct Databases {
    pub(super) connector: Connector,
    pub(super) listen_connector: Connector,
}

pub(super) fn worker_id(text: &str) -> Result<String, String> {
    config::check_worker_id(text).map(|()| text.to_string())
}

fn queue(text: &str) -> Result<String, String> {
    config::check_queue(text).map(|()| text.to_string())
}

fn tag(text: &str) -> Result<String, String> {
    config::check_tag(text).map(|()| text.to_string())
}

/// A host that is loading its handlers, and does not claim yet.
pub(super) struct Host {
    settings: worker::Settings,
    sandbox: Arc<Sandbox>,
    pub(super) catalog: Arc<Catalog>,
    http: Option<TcpListener>,
    metrics: Metrics,
    invocations: Option<Invocations>,
    /// The access control of callers that read jobs.
    readers: Option<Access>,
    /// True for `rouse dev`: every caller on this machine's loopback acts on behalf of the user who started it.
    is_own: bool,
    /// The handlers that `rouse.toml` names.
    named: Named,
    /// The logins that run the SQL statements of handlers.
    sql_logins: BTreeMap<String, Connector>,
    stop: Stop,
}

impl Host {
    /// Checks the settings, opens the HTTP port (unless it is `off`), and starts to load the handlers.
    pub(super) async fn prepare(
        args: &HostArgs,
        written: Written,
        http: &str,
        tokenless: Tokenless,
    ) -> anyhow::Result<Self> {
        let Written {
            file,
            folder,
            queue,
            is_dev,
        } = written;
        let mut settings = file.worker(Environment.hostname());
        if !args.queues.is_empty() {
            settings.queues.clone_from(&args.queues);
        }
        if !args.tags.is_empty() {
            settings.tags.clone_from(&args.tags);
        }
        if let Some(order) = args.queue_order {
            settings.queue_order = order;
        }
        if let Some(id) = &args.worker_id {
            settings.worker_id.clone_from(id);
        }
        let key_file = args
            .worker_key_file
            .clone()
            .or_else(|| file.worker_key_file(&folder));
        if let Some(key_file) = &key_file {
            settings.key = WorkerKey::new(config::read_or_make_key(key_file)?);
        }
        settings.notify &= !args.no_notify;
        settings.fair_share = file.fair_share(Environment)?;
        let signals = Environment.otlp()?;
        settings.traces = Traces::start(signals, &settings.worker_id)?;

        let http = match http {
            "off" => None,
            address => {
                let address = address.parse().with_context(|| {
                    format!(
                        "--http {address} is neither ADDRESS:PORT, such as 127.0.0.1:8420, nor off"
                    )
                })?;
                Some(http::bind(address).await?)
            }
        };
        let metrics = http::install_metrics()?;
        let address = http.as_ref().and_then(|http| http.local_addr().ok());
        let access = invocations::access(&file, &folder, address, tokenless)?;
        let offer = invocations::offer(&file, access.as_ref(), address, settings.slots, tokenless);
        if queue == Queue::Off && offer.is_none() {
            anyhow::bail!(
                "the queue is off (queue = \"off\" in rouse.toml, or --no-queue) and invocations are off, so nothing is left to do; \
                 invocations need --http, an invoke_max above 0, and a token (ROUSE_INVOKE_TOKEN, or invoke_token_file in rouse.toml)"
            );
        }
        let wanted = Share {
            slots: match queue {
                Queue::On => settings.slots,
                Queue::Off => 0,
            },
            invocations: offer.as_ref().map_or(0, |offer| offer.max),
        };
        let attempts_max = wanted.slots + wanted.invocations;
        let limits = sandbox::Settings {
            is_dev,
            ..sandbox_settings(&file, &folder, attempts_max, None)?
        };
        let sql_logins = file.sql_logins(&folder, Environment, None)?;
        for why in file.exposed(&folder, &args.handlers, key_file.as_deref()) {
            warn!("{why}");
        }
        open_files::raise_limit();
        debug!(folder = %args.handlers.display(), "loading the handlers");
        let sandbox = Sandbox::start(limits)?;
        let catalog = Catalog::start(sandbox.clone(), &args.handlers).await?;
        let catalog = Arc::new(catalog);
        let share = wanted.fit(sandbox.attempts_max());
        settings.slots = share.slots;
        let stop = Stop::default();
        let invocations = offer.map(|offer| {
            let invoker = Invoker::new(
                sandbox.clone(),
                catalog.clone(),
                settings.overrides.clone(),
                share.invocations,
                &stop,
            );
            Invocations {
                invoker: Arc::new(invoker),
                access: offer.access,
                payload_bytes_max: offer.payload_bytes_max,
            }
        });
        Ok(Self {
            settings,
            sandbox,
            catalog,
            http,
            metrics,
            invocations,
            readers: access,
            is_own: is_dev,
            named: Named::from_file(&file),
            sql_logins,
            stop,
        })
    }

    /// The address of the HTTP port.
    pub(super) fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref()?.local_addr().ok()
    }

    /// Logs which callers may invoke.
    pub(super) fn log_invocations(&self) {
        let Some(invocations) = &self.invocations else {
            return info!(
                "invocations are off: POST /invoke/HANDLER needs {TOKEN} and an invoke_max above 0"
            );
        };
        let max = invocations.invoker.max();
        match &invocations.access {
            Access::Loopback => info!(
                max,
                "invocations are on: POST /invoke/HANDLER, for every program on this machine, without a token"
            ),
            Access::Tokens(tokens) => info!(
                max,
                tokens = tokens.len(),
                "invocations are on: POST /invoke/HANDLER, for callers with a token"
            ),
        }
    }

    /// Works until SIGTERM, SIGINT or SIGHUP, then until all running attempts have ended. A second signal
    /// stops them. Without databases it only serves HTTP.
    pub(super) async fn work(
        self,
        databases: Option<Databases>,
        signals: Signals,
        middleware: Vec<Arc<dyn Middleware>>,
    ) -> anyhow::Result<()> {
        let stop = self.stop;
        let traces = self.settings.traces.clone();
        tokio::spawn(signals.stop(stop.clone()));
        // Even without an HTTP port: otherwise samples would accumulate.
        let metrics = self.metrics.clone();
        tokio::spawn(async move { metrics.run_upkeep().await });
        let health = databases.is_some().then(|| Health {
            metrics_read: self.metrics.scraped(),
            exemplars: self.metrics.exemplars(),
            ..Health::default()
        });
        let readiness = readiness(health.as_ref(), &self.catalog, &stop);
        // Invocations drain in parallel with the worker.
        let invocations = self.invocations.as_ref().map(|it| {
            let (invoker, drain_timeout) = (it.invoker.clone(), self.settings.drain_timeout);
            let ended = tokio::spawn(async move { invoker.end(drain_timeout).await });
            (it.invoker.clone(), ended)
        });
        let http_stop = CancellationToken::new();
        let store = databases
            .as_ref()
            .map(|databases| Store::new(&databases.connector, POOL_SIZE));
        let jobs = self.readers.and_then(|access| {
            let (ends, store) = (health.as_ref()?.ends.clone(), store.clone()?);
            tokio::spawn(ends.clone().look_forever(store));
            Some(Jobs {
                access,
                ends,
                stopping: http_stop.clone(),
            })
        });
        let address = self.http.as_ref().and_then(|it| it.local_addr().ok());
        let dashboard = match address {
            None => None,
            Some(address) => dashboard::start(
                databases.as_ref().map(|databases| &databases.connector),
                Some(self.catalog.clone()),
                address,
                self.is_own,
                http_stop.clone(),
            )?,
        };
        // `rouse dev` prints the address itself.
        if let Some(url) = address
            .filter(|_| dashboard.is_some() && !self.is_own)
            .and_then(dashboard::url)
        {
            info!("the dashboard is on {url}");
        }
        let http = self.http.map(|listener| {
            let pages = Pages {
                dashboard,
                readiness,
                metrics: self.metrics,
                invocations: self.invocations,
                jobs,
            };
            tokio::spawn(http::serve(
                listener,
                pages,
                http_stop.clone().cancelled_owned(),
            ))
        });
        tokio::spawn(self.named.follow(&self.catalog));
        let config = self.sandbox.settings().config_file.clone();
        tokio::spawn(log_loaded(&self.catalog, config));
        let done = match (databases, store, health) {
            (Some(databases), Some(store), Some(health)) => {
                wait_for_bound(&self.settings, &self.catalog, &stop).await;
                let parts = Parts {
                    store,
                    listen_connector: databases.listen_connector,
                    sandbox: self.sandbox,
                    catalog: self.catalog,
                    sql_logins: self.sql_logins,
                    middleware,
                };
                // On a worker thread of the runtime: from the main thread, each claim would change threads twice.
                let worker = worker::run(self.settings, parts, health, stop.child());
                tokio::spawn(worker).await.context("the worker failed")?
            }
            _ => {
                stop.stopping().await;
                Ok(())
            }
        };
        // The worker may have ended without a signal.
        stop.drain();
        if let Some((invoker, ended)) = invocations {
            // Otherwise the error appears at once, when the host exits.
            if let (Err(error), running @ 1..) = (&done, invoker.running()) {
                error!(
                    running,
                    "the worker has failed, and this host exits when its running invocations have ended: {error:#}"
                );
            }
            ended.await.context("wait for invocations")?;
        }
        http_stop.cancel();
        if let Some(http) = http {
            http.await.context("the HTTP server failed")?;
        }
        traces.shut_down().await;
        done
    }
}

/// Logs the handlers once, when every module that was present at startup has been tried.
fn log_loaded(catalog: &Arc<Catalog>, config: Option<PathBuf>) -> impl Future<Output = ()> + use<> {
    let since = Instant::now();
    let mut changed = catalog.changed();
    let catalog = Arc::downgrade(catalog);
    async move {
        loop {
            let Some(catalog) = catalog.upgrade() else {
                return;
            };
            let handlers = catalog.current();
            if !handlers.is_loading() {
                log_missing_grants(&handlers, config.as_deref());
                let loads = catalog.loads();
                info!(
                    handlers = handlers.names().join(", "),
                    refused = handlers.refused.len(),
                    slow = handlers.slow.join(", "),
                    files_read = loads.files_read(),
                    modules_compiled = loads.modules_compiled(),
                    compilers_started = loads.compilers_started(),
                    elapsed_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX),
                    "modules loaded"
                );
                if handlers.handlers.is_empty() {
                    warn!("no handler is loaded; put *.wasm files into the folder");
                }
                return;
            }
            drop(catalog);
            if changed.changed().await.is_err() {
                return;
            }
        }
    }
}

/// Logs the handlers that lack grants that they request.
fn log_missing_grants(handlers: &HandlerSet, config: Option<&Path>) {
    let lacking = handlers.handlers.values();
    let lacking = lacking.filter(|handler| !handler.missing().is_empty());
    let names: Vec<&str> = lacking
        .map(|handler| handler.manifest.name.as_str())
        .collect();
    let Some(first) = names.first() else {
        return;
    };
    let config = config.map(|file| format!(" --config {}", file.display()));
    info!(
        handlers = names.join(", "),
        "handlers request grants that rouse.toml does not give them; to print the lines for one of them: `rouse handlers show {first}{}`",
        config.unwrap_or_default()
    );
}

/// Waits until each handler to which a source is bound has been loaded, or until all modules have been tried. Otherwise
/// the worker would claim jobs of such a source that name another handler, and could not run them.
async fn wait_for_bound(settings: &worker::Settings, catalog: &Catalog, stop: &Stop) {
    let are_there = |handlers: &HandlerSet| {
        let mut bound = settings.sources.values();
        !handlers.is_loading() || bound.all(|handler| handlers.get(handler).is_some())
    };
    tokio::select! {
        _ = catalog.until(are_there) => {}
        () = stop.stopping() => {}
    }
}

/// The report of `/readyz`, without I/O.
fn readiness(health: Option<&Health>, catalog: &Arc<Catalog>, stop: &Stop) -> Readiness {
    let (health, catalog, stop) = (health.cloned(), catalog.clone(), stop.clone());
    Readiness::new(move || {
        let current = catalog.current();
        let handlers = match (&current.unreadable, current.handlers.is_empty()) {
            (Some(why), _) => Err(format!("the handlers folder cannot be read: {why}")),
            (None, false) => Ok(()),
            (None, true) if current.is_loading() => Err("no handler is loaded yet".to_string()),
            (None, true) => Err("no handler is loaded".to_string()),
        };
        let Some(health) = &health else {
            return Report::without_queue(handlers, stop.is_stopping());
        };
        let database = match health.database_responds.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err("the database does not respond".to_string()),
        };
        Report::new(database, handlers, stop.is_stopping())
    })
}
