//! The host's state for one running instance, and the limits of the instance.

use std::sync::Arc;

use wasmtime::Store;
use wasmtime::component::ResourceTable;
use wasmtime_wasi::filesystem::{WasiFilesystemCtx, WasiFilesystemCtxView};
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};
use wasmtime_wasi_http::WasiHttpCtx;

use super::clocks::{Clock, DatabaseClock};
use super::memory::AttemptLimiter;
use super::meter::Meter;
use crate::job::Suspension;
use crate::sandbox::capability::{
    Batch, Closings, FIELDS_BYTES_MAX, Fds, GuestLog, GuestOutput, HandlerState, Http, LogSource,
    NewJobs, OutsidePaths, Sql, StepSpans, Steps, Stream,
};
use crate::sandbox::grants::Granted;
use crate::sandbox::module::lines::Lines;
use crate::sandbox::{AbortHandle, Limits, Profile};
use crate::traces::AttemptTrace;

/// The host's state for one running instance, and the limits of the instance.
pub(in crate::sandbox) struct AttemptState {
    /// `None` until the guest calls WASI: most guests never do, and creating it costs as much as everything else here.
    wasi: Option<WasiCtx>,
    pub(in crate::sandbox) granted: Arc<Granted>,
    /// Empty: the guest's directories come from its grants.
    no_dirs: WasiFilesystemCtx,
    /// The guest's descriptors.
    fds: Fds,
    pub(in crate::sandbox) table: ResourceTable,
    pub(in crate::sandbox) limiter: AttemptLimiter,
    /// The maximum size of one request for random numbers, in bytes.
    random_bytes: u64,
    /// The maximum number of open files.
    files_max: usize,
    pub(in crate::sandbox) meter: Arc<Meter>,
    pub(in crate::sandbox) abort: AbortHandle,
    pub(in crate::sandbox) log: Arc<GuestLog>,
    /// The panic that the guest reported just before it trapped.
    pub(in crate::sandbox) panic: Option<Panic>,
    pub(in crate::sandbox) steps: Steps,
    pub(in crate::sandbox) handler_state: HandlerState,
    /// The jobs that it enqueues.
    pub(in crate::sandbox) jobs: NewJobs,
    pub(in crate::sandbox) sql: Sql,
    pub(in crate::sandbox) batch: Batch,
    /// Set when the host stops the guest because the guest waits.
    pub(in crate::sandbox) suspension: Option<Suspension>,
    pub(in crate::sandbox) clock: DatabaseClock,
    pub(in crate::sandbox) http: Http,
    pub(in crate::sandbox) trace: AttemptTrace,
    pub(in crate::sandbox) step_spans: StepSpans,
    /// Limits the size of a request's header fields.
    pub(in crate::sandbox) http_fields: WasiHttpCtx,
    /// The last denial for lack of a grant.
    pub(in crate::sandbox) denial: Option<String>,
    /// Paths that the guest tried outside granted directories.
    pub(in crate::sandbox) outside_paths: OutsidePaths,
    /// The time for which the guest requests its next attempt, in milliseconds since 1970.
    pub(in crate::sandbox) retry_at_ms: Option<i64>,
    /// The module's source lines.
    pub(in crate::sandbox) lines: Arc<Lines>,
    /// Receives samples of the guest's stack, if profiling is on.
    pub(in crate::sandbox) profile: Option<Arc<Profile>>,
}

/// The parts of the state that belong to one attempt, and change when the instance serves another.
pub(in crate::sandbox) struct PerAttempt {
    pub(in crate::sandbox) meter: Arc<Meter>,
    pub(in crate::sandbox) abort: AbortHandle,
    pub(in crate::sandbox) log: Arc<GuestLog>,
    pub(in crate::sandbox) steps: Steps,
    pub(in crate::sandbox) handler_state: HandlerState,
    pub(in crate::sandbox) jobs: NewJobs,
    pub(in crate::sandbox) sql: Sql,
    pub(in crate::sandbox) batch: Batch,
    pub(in crate::sandbox) clock: DatabaseClock,
    pub(in crate::sandbox) http: Http,
    pub(in crate::sandbox) trace: AttemptTrace,
    pub(in crate::sandbox) profile: Option<Arc<Profile>>,
}

impl PerAttempt {
    /// A placeholder without an attempt: for describing a module, and for an idle instance.
    pub(in crate::sandbox) fn placeholder() -> Self {
        let (abort, limits) = (AbortHandle::new(), Limits::default());
        Self {
            meter: Arc::default(),
            log: Arc::new(GuestLog::new(
                LogSource::Module,
                abort.clone(),
                &limits,
                None,
            )),
            steps: Steps::default(),
            handler_state: HandlerState::default(),
            jobs: NewJobs::default(),
            sql: Sql::default(),
            batch: Batch::default(),
            clock: DatabaseClock::from_host(),
            http: Http::new(None, &limits, abort.clone(), Arc::default()),
            trace: AttemptTrace::default(),
            profile: None,
            abort,
        }
    }
}

/// A panic, as the guest reported it.
#[derive(Debug, Clone)]
pub(in crate::sandbox) struct Panic {
    pub(in crate::sandbox) message: String,
    pub(in crate::sandbox) location: String,
}

impl AttemptState {
    /// Creates the state with the granted directories and nothing else: no arguments, no standard input, no sockets,
    /// and only granted environment variables. Coarse clocks and random numbers are always available.
    ///
    /// # Errors
    /// When a granted directory has never been opened successfully.
    pub(in crate::sandbox) fn new(
        granted: Arc<Granted>,
        lines: Arc<Lines>,
        limits: &Limits,
        mut limiter: AttemptLimiter,
        of: PerAttempt,
    ) -> Result<Self, String> {
        let PerAttempt {
            meter,
            abort,
            log,
            steps,
            handler_state,
            jobs,
            sql,
            batch,
            clock,
            http,
            trace,
            profile,
        } = of;
        granted.open()?;
        limiter.report_to(meter.clone());
        let http = http.counted_by(limiter.host_memory().clone());
        let mut http_fields = WasiHttpCtx::new();
        http_fields.set_field_size_limit(FIELDS_BYTES_MAX);
        Ok(Self {
            meter,
            wasi: None,
            granted,
            no_dirs: WasiFilesystemCtx::default(),
            fds: Fds::new(limits.files),
            random_bytes: limits.random_bytes,
            files_max: limits.files,
            table: ResourceTable::new(),
            limiter,
            abort,
            log,
            panic: None,
            steps,
            handler_state,
            trace,
            step_spans: StepSpans::default(),
            http,
            http_fields,
            jobs,
            sql,
            batch,
            suspension: None,
            clock,
            denial: None,
            outside_paths: OutsidePaths::default(),
            retry_at_ms: None,
            lines,
            profile,
        })
    }

    /// Prepares the state for the next job of an instance that holds no host resources. Only the memory count is kept.
    ///
    /// # Errors
    /// When a granted directory has never been opened successfully.
    pub(in crate::sandbox) fn prepare(&mut self, of: PerAttempt) -> Result<(), String> {
        self.granted.open()?;
        self.serve(of);
        Ok(())
    }

    /// Releases everything that belongs to the last attempt.
    pub(in crate::sandbox) fn release(&mut self) {
        self.serve(PerAttempt::placeholder());
    }

    fn serve(&mut self, of: PerAttempt) {
        let PerAttempt {
            meter,
            abort,
            log,
            steps,
            handler_state,
            jobs,
            sql,
            batch,
            clock,
            http,
            trace,
            profile,
        } = of;
        self.limiter.report_to(meter.clone());
        self.meter = meter;
        self.wasi = None;
        self.fds = Fds::new(self.files_max);
        self.abort = abort;
        self.log = log;
        self.panic = None;
        self.steps = steps;
        self.handler_state = handler_state;
        self.jobs = jobs;
        self.sql = sql;
        self.batch = batch;
        self.suspension = None;
        self.clock = clock;
        self.http = http.counted_by(self.limiter.host_memory().clone());
        self.trace = trace;
        self.step_spans = StepSpans::default();
        self.denial = None;
        self.outside_paths = OutsidePaths::default();
        self.retry_at_ms = None;
        self.profile = profile;
    }
}

/// Creates the WASI context: clocks, random numbers, granted variables, and standard streams that end in the log.
fn wasi(granted: &Granted, log: &Arc<GuestLog>, random_bytes: u64) -> WasiCtx {
    let clock = Clock::new(granted.fine_clocks);
    WasiCtx::builder()
        .allow_tcp(false)
        .allow_udp(false)
        .allow_ip_name_lookup(false)
        .max_random_size(random_bytes)
        .wall_clock(clock)
        .monotonic_clock(clock)
        .envs(&granted.env)
        .stdout(GuestOutput::new(log.clone(), Stream::Output))
        .stderr(GuestOutput::new(log.clone(), Stream::Error))
        .build()
}

impl AttemptState {
    /// The guest's files and descriptors, and the records of denials and of paths outside granted directories.
    pub(in crate::sandbox) fn files(
        &mut self,
    ) -> (
        WasiFilesystemCtxView<'_>,
        &mut Fds,
        &mut Option<String>,
        &mut OutsidePaths,
    ) {
        let files = WasiFilesystemCtxView {
            ctx: &mut self.no_dirs,
            table: &mut self.table,
        };
        (
            files,
            &mut self.fds,
            &mut self.denial,
            &mut self.outside_paths,
        )
    }

    /// Counts the guest's files that are being closed, also with this state; `None` if it never had any.
    pub(in crate::sandbox) fn closings(&self) -> Option<Closings> {
        self.fds.closings()
    }
}

impl WasiView for AttemptState {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView {
            ctx: self
                .wasi
                .get_or_insert_with(|| wasi(&self.granted, &self.log, self.random_bytes)),
            table: &mut self.table,
        }
    }
}

/// Sets all limits of a fresh store.
pub(in crate::sandbox) fn limit(store: &mut Store<AttemptState>, limits: &Limits) {
    store.limiter(|state| &mut state.limiter);
    store.set_hostcall_fuel(limits.hostcall_bytes_max());
    store.set_max_component_handles(limits.handles);
    store.data_mut().table.set_max_capacity(limits.resources);
    start(store);
    // At each tick, a CPU-bound guest yields to others, or is stopped.
    store.epoch_deadline_callback(|context| {
        let state = context.data();
        if let Some(profile) = &state.profile {
            profile.sample(&context, &state.lines);
        }
        Ok(if context.data().abort.is_hard_stopped() {
            wasmtime::UpdateDeadline::Interrupt
        } else {
            wasmtime::UpdateDeadline::YieldCustom(1, Box::pin(tokio::task::yield_now()))
        })
    });
}

/// Restarts the tick deadline when a job starts.
pub(in crate::sandbox) fn start(store: &mut Store<AttemptState>) {
    store.set_epoch_deadline(1);
}
