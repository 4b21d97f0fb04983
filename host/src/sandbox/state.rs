//! What the host keeps beside one running instance.

use std::sync::Arc;

use wasmtime::component::ResourceTable;
use wasmtime_wasi::filesystem::WasiFilesystemCtxView;
use wasmtime_wasi::{FsPerms, WasiCtx, WasiCtxBuilder, WasiCtxView, WasiView};
use wasmtime_wasi_http::WasiHttpCtx;

use super::capability::{FIELDS_BYTES_MAX, GuestLog, GuestOutput, Http, Steps, Stream};
use super::memory::AttemptLimiter;
use super::meter::Meter;
use super::{AbortHandle, Grant, Limits, Mode, Profile};

/// What the host keeps beside one running instance.
pub(super) struct AttemptState {
    /// None until the guest asks for something of WASI: most never do, and it costs as much as
    /// the rest of this.
    wasi: Option<WasiCtx>,
    pub(super) table: ResourceTable,
    pub(super) limiter: AttemptLimiter,
    /// Of one request for random numbers.
    random_bytes: u64,
    pub(super) meter: Arc<Meter>,
    pub(super) abort: AbortHandle,
    pub(super) log: Arc<GuestLog>,
    /// The panic that the guest reported just before it trapped.
    pub(super) panic: Option<Panic>,
    pub(super) steps: Steps,
    pub(super) http: Http,
    /// How large a set of fields of a request may be.
    pub(super) http_fields: WasiHttpCtx,
    /// What was denied last for want of a grant.
    pub(super) denial: Option<String>,
    /// When the guest wants its next attempt, milliseconds since 1970.
    pub(super) retry_at_ms: Option<i64>,
    /// Where what it does is noted, for those who asked for it.
    pub(super) profile: Option<Arc<Profile>>,
}

/// What belongs to one attempt, and is another's where the instance serves many jobs.
pub(super) struct OfAttempt {
    pub(super) meter: Arc<Meter>,
    pub(super) abort: AbortHandle,
    pub(super) log: Arc<GuestLog>,
    pub(super) steps: Steps,
    pub(super) http: Http,
    pub(super) profile: Option<Arc<Profile>>,
}

/// A panic, in the guest's own words.
#[derive(Debug, Clone)]
pub(super) struct Panic {
    pub(super) message: String,
    pub(super) location: String,
}

impl AttemptState {
    /// Opens the granted directories, and nothing else: no environment, no arguments, no
    /// standard input, no sockets. Clocks and random numbers are there for everyone.
    ///
    /// # Errors
    /// When a granted directory cannot be opened.
    pub(super) fn new(
        grants: &[Grant],
        limits: &Limits,
        mut limiter: AttemptLimiter,
        of: OfAttempt,
    ) -> Result<Self, String> {
        let OfAttempt {
            meter,
            abort,
            log,
            steps,
            http,
            profile,
        } = of;
        limiter.tell(meter.clone());
        let mut http_fields = WasiHttpCtx::new();
        http_fields.set_field_size_limit(FIELDS_BYTES_MAX);
        Ok(Self {
            meter,
            wasi: prepared(grants, &log, limits.random_bytes)?,
            random_bytes: limits.random_bytes,
            table: ResourceTable::new(),
            limiter,
            abort,
            log,
            panic: None,
            steps,
            http,
            http_fields,
            denial: None,
            retry_at_ms: None,
            profile,
        })
    }

    /// Makes it ready for the next job of an instance that holds nothing of the host: only the
    /// memory is counted on.
    ///
    /// # Errors
    /// When a granted directory cannot be opened.
    pub(super) fn next(&mut self, grants: &[Grant], of: OfAttempt) -> Result<(), String> {
        let OfAttempt {
            meter,
            abort,
            log,
            steps,
            http,
            profile,
        } = of;
        self.limiter.tell(meter.clone());
        self.meter = meter;
        self.wasi = prepared(grants, &log, self.random_bytes)?;
        self.abort = abort;
        self.log = log;
        self.panic = None;
        self.steps = steps;
        self.http = http;
        self.denial = None;
        self.retry_at_ms = None;
        self.profile = profile;
        Ok(())
    }
}

/// Directories are opened before the guest runs, so that what is missing can be named; without any,
/// nothing is made yet.
fn prepared(
    grants: &[Grant],
    log: &Arc<GuestLog>,
    random_bytes: u64,
) -> Result<Option<WasiCtx>, String> {
    match grants {
        [] => Ok(None),
        grants => granted(wasi(log, random_bytes), grants).map(Some),
    }
}

/// What everyone has: clocks, random numbers, and standard streams that end in the log.
fn wasi(log: &Arc<GuestLog>, random_bytes: u64) -> WasiCtxBuilder {
    let mut wasi = WasiCtx::builder();
    wasi.allow_tcp(false)
        .allow_udp(false)
        .allow_ip_name_lookup(false)
        .max_random_size(random_bytes)
        .stdout(GuestOutput::new(log.clone(), Stream::Output))
        .stderr(GuestOutput::new(log.clone(), Stream::Error));
    wasi
}

/// The same with granted directories.
fn granted(mut wasi: WasiCtxBuilder, grants: &[Grant]) -> Result<WasiCtx, String> {
    for grant in grants {
        let perms = match grant.mode {
            Mode::Read => FsPerms::ReadOnly,
            Mode::ReadWrite => FsPerms::ReadWrite,
        };
        wasi.preopened_dir(&grant.dir, &grant.at, perms)
            .map_err(|error| {
                format!(
                    "the directory {} that is granted at {} cannot be opened: {error:#}; \
                     create it or change the grant",
                    grant.dir.display(),
                    grant.at
                )
            })?;
    }
    Ok(wasi.build())
}

impl AttemptState {
    /// The files of the guest, and where their denials are noted.
    pub(super) fn files(&mut self) -> (WasiFilesystemCtxView<'_>, &mut Option<String>) {
        let log = &self.log;
        let wasi = self
            .wasi
            .get_or_insert_with(|| wasi(log, self.random_bytes).build());
        let files = WasiFilesystemCtxView {
            ctx: wasi.filesystem(),
            table: &mut self.table,
        };
        (files, &mut self.denial)
    }
}

impl WasiView for AttemptState {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        let log = &self.log;
        WasiCtxView {
            ctx: self
                .wasi
                .get_or_insert_with(|| wasi(log, self.random_bytes).build()),
            table: &mut self.table,
        }
    }
}
