//! What the host keeps beside one running instance.

use std::sync::Arc;

use wasmtime::Store;
use wasmtime::component::ResourceTable;
use wasmtime_wasi::filesystem::{WasiFilesystemCtx, WasiFilesystemCtxView};
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};
use wasmtime_wasi_http::WasiHttpCtx;

use super::clocks::Clock;
use super::memory::AttemptLimiter;
use super::meter::Meter;
use crate::sandbox::capability::{
    Elsewhere, FIELDS_BYTES_MAX, Fds, GuestLog, GuestOutput, HandlerState, Http, Speaker, Steps,
    Stream,
};
use crate::sandbox::grants::Granted;
use crate::sandbox::module::lines::Lines;
use crate::sandbox::{AbortHandle, Limits, Profile};

/// What the host keeps beside one running instance.
pub(in crate::sandbox) struct AttemptState {
    /// None until the guest asks for something of WASI: most never do, and it costs as much as
    /// the rest of this.
    wasi: Option<WasiCtx>,
    pub(in crate::sandbox) granted: Arc<Granted>,
    /// WASI knows of no directory: a guest gets those of its grants.
    no_dirs: WasiFilesystemCtx,
    /// What is known of the descriptors of the guest.
    fds: Fds,
    pub(in crate::sandbox) table: ResourceTable,
    pub(in crate::sandbox) limiter: AttemptLimiter,
    /// Of one request for random numbers.
    random_bytes: u64,
    /// Open at once.
    files_max: usize,
    pub(in crate::sandbox) meter: Arc<Meter>,
    pub(in crate::sandbox) abort: AbortHandle,
    pub(in crate::sandbox) log: Arc<GuestLog>,
    /// The panic that the guest reported just before it trapped.
    pub(in crate::sandbox) panic: Option<Panic>,
    pub(in crate::sandbox) steps: Steps,
    pub(in crate::sandbox) handler_state: HandlerState,
    pub(in crate::sandbox) http: Http,
    /// How large a set of fields of a request may be.
    pub(in crate::sandbox) http_fields: WasiHttpCtx,
    /// What was denied last for want of a grant.
    pub(in crate::sandbox) denial: Option<String>,
    /// What it has looked for where no directory is granted.
    pub(in crate::sandbox) elsewhere: Elsewhere,
    /// When the guest wants its next attempt, milliseconds since 1970.
    pub(in crate::sandbox) retry_at_ms: Option<i64>,
    /// Of the module's source.
    pub(in crate::sandbox) lines: Arc<Lines>,
    /// Where what it does is noted, for those who asked for it.
    pub(in crate::sandbox) profile: Option<Arc<Profile>>,
}

/// What belongs to one attempt, and is another's where the instance serves many jobs.
pub(in crate::sandbox) struct OfAttempt {
    pub(in crate::sandbox) meter: Arc<Meter>,
    pub(in crate::sandbox) abort: AbortHandle,
    pub(in crate::sandbox) log: Arc<GuestLog>,
    pub(in crate::sandbox) steps: Steps,
    pub(in crate::sandbox) handler_state: HandlerState,
    pub(in crate::sandbox) http: Http,
    pub(in crate::sandbox) profile: Option<Arc<Profile>>,
}

impl OfAttempt {
    /// Of no attempt: for a module that is described, and for an instance that waits.
    pub(in crate::sandbox) fn of_none() -> Self {
        let (abort, limits) = (AbortHandle::new(), Limits::default());
        Self {
            meter: Arc::default(),
            log: Arc::new(GuestLog::new(Speaker::Module, abort.clone(), &limits, None)),
            steps: Steps::default(),
            handler_state: HandlerState::default(),
            http: Http::new(None, &limits, abort.clone(), Arc::default()),
            profile: None,
            abort,
        }
    }
}

/// A panic, in the guest's own words.
#[derive(Debug, Clone)]
pub(in crate::sandbox) struct Panic {
    pub(in crate::sandbox) message: String,
    pub(in crate::sandbox) location: String,
}

impl AttemptState {
    /// Has the granted directories, and nothing else: no arguments, no standard input, no sockets, and of an environment only
    /// what is granted. Coarse clocks and random numbers are there for everyone.
    ///
    /// # Errors
    /// When a granted directory was never there.
    pub(in crate::sandbox) fn new(
        granted: Arc<Granted>,
        lines: Arc<Lines>,
        limits: &Limits,
        mut limiter: AttemptLimiter,
        of: OfAttempt,
    ) -> Result<Self, String> {
        let OfAttempt {
            meter,
            abort,
            log,
            steps,
            handler_state,
            http,
            profile,
        } = of;
        granted.open()?;
        limiter.count_with(meter.clone());
        let http = http.within(limiter.held().clone());
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
            http,
            http_fields,
            denial: None,
            elsewhere: Elsewhere::default(),
            retry_at_ms: None,
            lines,
            profile,
        })
    }

    /// Makes it ready for the next job of an instance that holds nothing of the host: only the
    /// memory is counted on.
    ///
    /// # Errors
    /// When a granted directory was never there.
    pub(in crate::sandbox) fn next(&mut self, of: OfAttempt) -> Result<(), String> {
        self.granted.open()?;
        self.serve(of);
        Ok(())
    }

    /// Lets go of everything that belongs to the last attempt.
    pub(in crate::sandbox) fn rest(&mut self) {
        self.serve(OfAttempt::of_none());
    }

    fn serve(&mut self, of: OfAttempt) {
        let OfAttempt {
            meter,
            abort,
            log,
            steps,
            handler_state,
            http,
            profile,
        } = of;
        self.limiter.count_with(meter.clone());
        self.meter = meter;
        self.wasi = None;
        self.fds = Fds::new(self.files_max);
        self.abort = abort;
        self.log = log;
        self.panic = None;
        self.steps = steps;
        self.handler_state = handler_state;
        self.http = http.within(self.limiter.held().clone());
        self.denial = None;
        self.elsewhere = Elsewhere::default();
        self.retry_at_ms = None;
        self.profile = profile;
    }
}

/// Clocks, random numbers, granted variables, and standard streams that end in the log.
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
    /// The files of the guest, with what is known of its descriptors, where their denials are noted, and what it looks for
    /// elsewhere.
    pub(in crate::sandbox) fn files(
        &mut self,
    ) -> (
        WasiFilesystemCtxView<'_>,
        &mut Fds,
        &mut Option<String>,
        &mut Elsewhere,
    ) {
        let files = WasiFilesystemCtxView {
            ctx: &mut self.no_dirs,
            table: &mut self.table,
        };
        (files, &mut self.fds, &mut self.denial, &mut self.elsewhere)
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

/// Sets every limit of a fresh store.
pub(in crate::sandbox) fn limit(store: &mut Store<AttemptState>, limits: &Limits) {
    store.limiter(|state| &mut state.limiter);
    store.set_hostcall_fuel(limits.hostcall_bytes_max());
    store.set_max_component_handles(limits.handles);
    store.data_mut().table.set_max_capacity(limits.resources);
    start(store);
    // Every tick, a guest that computes lets the others run, or is stopped.
    store.epoch_deadline_callback(|context| {
        let state = context.data();
        if let Some(profile) = &state.profile {
            profile.look(&context, &state.lines);
        }
        Ok(if context.data().abort.is_killed() {
            wasmtime::UpdateDeadline::Interrupt
        } else {
            wasmtime::UpdateDeadline::YieldCustom(1, Box::pin(tokio::task::yield_now()))
        })
    });
}

/// Counts the ticks from now on, at the start of each job.
pub(in crate::sandbox) fn start(store: &mut Store<AttemptState>) {
    store.set_epoch_deadline(1);
}
