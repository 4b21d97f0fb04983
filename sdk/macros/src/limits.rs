//! The host's limits on what a module declares: the host refuses the whole module if one value exceeds them. A test of
//! the host (`host/src/sandbox/module/manifest/tests.rs`) compares these numbers with the host's own.

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// The maximum length of the name of a handler.
pub(crate) const NAME_CHARS_MAX: usize = 128;

pub(crate) const ATTEMPTS_MAX: u32 = 1_000;
pub(crate) const MULTIPLIER_MAX: f64 = 1_000.0;
/// The wait after the first failed attempt of a handler that does not declare one.
pub(crate) const RETRY_INITIAL_MS: u64 = 10_000;
/// The maximum backoff and run timeout.
pub(crate) const WAIT_MS_MAX: u64 = 30 * DAY_MS;
pub(crate) const LEASE_MS_MIN: u64 = 2_000;
pub(crate) const LEASE_MS_MAX: u64 = DAY_MS;
pub(crate) const GRACE_MS_MAX: u64 = 10 * 60 * 1000;
pub(crate) const CONCURRENCY_MAX: u32 = 1_000_000;

/// The maximum length of a cron expression.
pub(crate) const CRON_CHARS_MAX: usize = 200;

pub(crate) const GATES_MAX: usize = 8;
/// The maximum number of running jobs, of starts in a period, and of jobs in a burst.
pub(crate) const GATE_COUNT_MAX: u32 = 1_000_000;
/// The maximum number of starts in a period without a burst.
pub(crate) const GATE_STARTS_MAX: u32 = 1_000;
/// The maximum number of jobs in a batch.
pub(crate) const GATE_BATCH_MAX: u32 = 1_000;
pub(crate) const GATE_PERIOD_MS_MAX: u64 = 30 * DAY_MS;

pub(crate) const STATEMENTS_MAX: usize = 64;
pub(crate) const STATEMENT_NAME_CHARS_MAX: usize = 63;
pub(crate) const STATEMENT_BYTES_MAX: usize = 16 << 10;

pub(crate) const CAPABILITIES_MAX: usize = 64;
/// The maximum length of the part of a capability after the colon.
pub(crate) const CAPABILITY_BYTES_MAX: usize = 256;
