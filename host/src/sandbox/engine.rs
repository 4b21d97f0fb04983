//! The engine that all attempts of a host share.

use std::num::NonZeroUsize;
use std::sync::{Arc, Once};
use std::thread::available_parallelism;

use anyhow::{Context, bail};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Semaphore;
use wasmtime::component::{HasSelf, Linker};
use wasmtime::{
    Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, WasmBacktraceDetails,
    WasmFeatures,
};

use super::cache::CodeCache;
use super::capability::{Net, guard_files, guard_sockets, link_http};
use super::grants::Roots;
use super::idle::Idle;
use super::instance::{Instance, Serves};
use super::limits::{TABLE_ELEMENTS, WASM_STACK_BYTES_MAX};
use super::memory::MemoryBudget;
use super::pool::Machine;
use super::quota::Ledgers;
use super::state::AttemptState;
use super::ticker::Ticker;
use super::{Settings, bindings, clocks};

/// Instances beside those of attempts, in which new modules are asked for their manifests.
const DESCRIBES_MAX: usize = 2;

/// Instances that wait for their next job have places of their own in the pool, so that they never
/// keep a fresh one from its place: 4 for each attempt that may run at once, for tenants that take
/// turns, and on large hosts no more than 64, whose memory is bounded besides (`idle.rs`).
const IDLE_PER_ATTEMPT: usize = 4;
const IDLE_COUNT_MAX: usize = 64;

/// Of each instance's memory and tables, this much from the start stays with the process after the
/// attempt and is cleared in place. Only what lies beyond is given back to the kernel, which costs a
/// system call, an interruption of the other threads, and a page fault for each page that the next
/// attempt touches: 12 µs for a no-op. (`docs/decisions/fresh-instances-are-cheap.md`)
///
/// A small guest whose stack is 128 KiB has 192 to 256 KiB to start with, and a table of 8 KiB for
/// 1,000 functions. 200 attempts at once keep at most 200 × (256 + 2 × 64) KiB = 75 MiB, mostly
/// under 55. Of the largest modules that are allowed (4 memories, 8 tables) they keep 200 × (4 × 256 + 8 × 64) KiB = 300 MiB; what an
/// attempt is reckoned to need, 2 MiB (`pool.rs`), is never reached.
const MEMORY_RESIDENT_BYTES: usize = 256 << 10;
const TABLE_RESIDENT_BYTES: usize = 64 << 10;

/// Of the memory that all attempts have, this part is kept for those that run: an eighth.
const MEMORY_SPARE_SHARE: usize = 8;

/// A WebAssembly page.
pub(super) const PAGE_BYTES: usize = 64 << 10;

/// Frames of a backtrace that are kept: the panic machinery takes the first ten.
pub(super) const BACKTRACE_FRAMES_MAX: usize = 48;

/// Runs guests. One for a host: it owns the engine, the pool of instances, the clock that
/// interrupts guests, and the threads that run them.
pub struct Sandbox {
    pub(super) engine: Engine,
    pub(super) linker: Linker<AttemptState>,
    pub(super) settings: Settings,
    pub(super) budget: Arc<MemoryBudget>,
    /// One permit for each attempt that the pool can hold.
    pub(super) attempts: Semaphore,
    pub(super) describes: Semaphore,
    /// Of payloads and results that take long.
    pub(super) checks: Arc<Semaphore>,
    pub(super) ticker: Ticker,
    pub(super) idle: Arc<Idle<Serves, Instance>>,
    pub(super) cache: Option<CodeCache>,
    /// What compilers cannot be kept from was said.
    pub(super) fence_logged: Once,
    pub(super) net: Arc<Net>,
    pub(super) roots: Roots,
    pub(super) ledgers: Ledgers,
    attempts_max: usize,
    /// Where less is free, nothing new is claimed.
    memory_spare_bytes: usize,
    /// Guests have threads of their own, so that one which computes never holds up a heartbeat
    /// or a renewal. None only while the sandbox is being dropped.
    guests: Option<Runtime>,
}

impl Sandbox {
    /// Starts the engine, its clock and the threads for guests.
    ///
    /// # Errors
    /// When a setting makes no sense, or the machine cannot hold even one instance.
    pub fn start(settings: Settings) -> anyhow::Result<Arc<Self>> {
        if settings.attempts_max == 0 {
            bail!("the sandbox is set to 0 attempts at once; set at least 1");
        }
        let most = settings.memory_bytes_most();
        if !(PAGE_BYTES..=4 << 30).contains(&most) {
            bail!(
                "the sandbox is set to {most} bytes of memory for an attempt; set 64 KiB to 4 GiB"
            );
        }

        clocks::start();
        let size = Machine::read().fit(
            settings.attempts_max,
            usize::try_from(settings.module_parts.memories).unwrap_or(usize::MAX),
            settings.memory_bytes_total_max,
        );
        if let Some(why) = size.clamp {
            tracing::warn!(
                wanted = settings.attempts_max,
                attempts_max = size.attempts_max,
                "fewer attempts at once than were asked for: {why}"
            );
        }
        let (engine, attempts_max) = engine(size.attempts_max, &settings)?;
        tracing::debug!(
            attempts_max,
            memory_bytes = settings.limits.memory_bytes,
            memory_bytes_total_max = size.memory_bytes_total_max,
            "the sandbox is ready"
        );

        Ok(Arc::new(Self {
            linker: linker(&engine)?,
            cache: settings
                .cache_dir
                .as_deref()
                .and_then(|dir| CodeCache::open(dir, &engine)),
            fence_logged: Once::new(),
            ticker: Ticker::start(engine.clone(), settings.tick)?,
            engine,
            idle: Idle::new(idle_max(attempts_max, &settings)),
            net: Net::new(settings.http.clone())?,
            roots: Roots::open(&settings.grants),
            settings,
            ledgers: Ledgers::default(),
            budget: MemoryBudget::new(size.memory_bytes_total_max),
            memory_spare_bytes: size.memory_bytes_total_max / MEMORY_SPARE_SHARE,
            attempts: Semaphore::new(attempts_max),
            describes: Semaphore::new(DESCRIBES_MAX),
            checks: Arc::new(Semaphore::new(
                available_parallelism().map_or(1, usize::from),
            )),
            attempts_max,
            guests: Some(
                Builder::new_multi_thread()
                    .thread_name("rouse-guest")
                    .enable_all()
                    .build()
                    .context("start the threads for guests")?,
            ),
        }))
    }

    /// How many attempts can run at once: the setting, or less where the machine holds less. A
    /// worker claims no more jobs than that.
    pub fn attempts_max(&self) -> usize {
        self.attempts_max
    }

    /// True where there is no room for another attempt of the usual size: it is better not to start what would only run
    /// out of the host's memory.
    pub fn memory_is_short(&self) -> bool {
        self.budget.free_bytes()
            < self
                .settings
                .limits
                .memory_bytes
                .min(self.memory_spare_bytes)
    }

    /// What the operator decided.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The threads for guests. Whoever awaits [`run`](Self::run) does so in a task of these.
    pub fn guests(&self) -> &Handle {
        self.guests
            .as_ref()
            .expect("the runtime is taken only by drop")
            .handle()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if let Some(guests) = self.guests.take() {
            // A runtime that is dropped from async code panics; this does not wait.
            guests.shutdown_background();
        }
    }
}

/// The engine, and how many attempts it can hold. Where the address space is too small
/// (`ulimit -v`, small containers) it tries with half as many.
fn engine(attempts_wanted: usize, settings: &Settings) -> anyhow::Result<(Engine, usize)> {
    let mut attempts = attempts_wanted;
    loop {
        match Engine::new(&config(attempts, settings)) {
            Ok(engine) => return Ok((engine, attempts)),
            Err(error) if attempts == 1 => bail!(
                "the sandbox cannot reserve address space for even one instance: {error:#}; \
                 raise the limit (ulimit -v)"
            ),
            Err(error) => {
                tracing::warn!(
                    wanted = attempts,
                    attempts_max = attempts / 2,
                    "fewer attempts at once than were asked for: {error:#}"
                );
                attempts /= 2;
            }
        }
    }
}

fn idle_max(attempts: usize, settings: &Settings) -> usize {
    match settings.reuse_somewhere() {
        true => (IDLE_PER_ATTEMPT * attempts).min(IDLE_COUNT_MAX),
        false => 0,
    }
}

fn config(attempts: usize, settings: &Settings) -> Config {
    let instances = attempts + DESCRIBES_MAX + idle_max(attempts, settings);
    let instances = u32::try_from(instances).unwrap_or(u32::MAX);
    let most = settings.memory_bytes_most();
    let mut pool = PoolingAllocationConfig::new();
    // Each instance may be of the largest module that is allowed, so that none ever waits for a place of its parts.
    let parts = settings.module_parts;
    pool.total_component_instances(instances)
        .total_core_instances(instances.saturating_mul(parts.core_instances))
        .total_memories(instances.saturating_mul(parts.memories))
        .total_tables(instances.saturating_mul(parts.tables))
        .total_stacks(instances)
        .max_core_instances_per_component(parts.core_instances)
        .max_memories_per_component(parts.memories)
        .max_memories_per_module(parts.memories)
        .max_tables_per_component(parts.tables)
        .max_tables_per_module(parts.tables)
        .table_elements(TABLE_ELEMENTS)
        .table_keep_resident(TABLE_RESIDENT_BYTES)
        .linear_memory_keep_resident(MEMORY_RESIDENT_BYTES)
        .max_memory_size(most.next_multiple_of(PAGE_BYTES));

    let mut config = code_config();
    config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    config
}

/// What machine code depends on: the same in a host and in the process that compiles for it.
pub(super) fn code_config() -> Config {
    let mut config = Config::new();
    config
        .epoch_interruption(true)
        .consume_fuel(false)
        .max_wasm_stack(WASM_STACK_BYTES_MAX)
        // Lines are read by the compiler, once (`lines`).
        .wasm_backtrace_details(WasmBacktraceDetails::Disable)
        .wasm_backtrace_max_frames(NonZeroUsize::new(BACKTRACE_FRAMES_MAX))
        .concurrency_support(false)
        .wasm_component_model(true)
        .wasm_memory64(false);
    for feature in [
        WasmFeatures::THREADS,
        WasmFeatures::GC,
        WasmFeatures::EXCEPTIONS,
        WasmFeatures::STACK_SWITCHING,
    ] {
        config.wasm_features(feature, false);
    }
    config
}

/// Everything that a guest can import. What is linked is not granted: without a grant there is
/// no directory to open, and every socket is refused.
fn linker(engine: &Engine) -> anyhow::Result<Linker<AttemptState>> {
    let mut linker = Linker::new(engine);
    wasmtime_wasi::p2::add_to_linker_async(&mut linker)
        .and_then(|()| guard_files(&mut linker))
        .and_then(|()| guard_sockets(&mut linker))
        .and_then(|()| link_http(&mut linker))
        .and_then(|()| {
            bindings::rouse::handler::context::add_to_linker::<_, HasSelf<AttemptState>>(
                &mut linker,
                |state| state,
            )
        })
        .and_then(|()| {
            bindings::rouse::handler::steps::add_to_linker::<_, HasSelf<AttemptState>>(
                &mut linker,
                |state| state,
            )
        })
        .and_then(|()| {
            bindings::rouse::handler::retry::add_to_linker::<_, HasSelf<AttemptState>>(
                &mut linker,
                |state| state,
            )
        })
        .and_then(|()| {
            bindings::rouse::handler::state::add_to_linker::<_, HasSelf<AttemptState>>(
                &mut linker,
                |state| state,
            )
        })
        .and_then(|()| {
            bindings::rouse::handler::settings::add_to_linker::<_, HasSelf<AttemptState>>(
                &mut linker,
                |state| state,
            )
        })
        .and_then(|()| {
            bindings::rouse::handler::secrets::add_to_linker::<_, HasSelf<AttemptState>>(
                &mut linker,
                |state| state,
            )
        })
        .map_err(|error| anyhow::anyhow!("link the host's interfaces: {error:#}"))?;
    Ok(linker)
}

#[cfg(test)]
mod tests {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};

    use super::*;
    use crate::sandbox::Limits;

    #[test]
    fn code_that_is_compiled_without_a_pool_fits_a_host_with_one() {
        let key = |config: &Config| {
            let mut hasher = DefaultHasher::new();
            let engine = Engine::new(config).unwrap();
            engine.precompile_compatibility_hash().hash(&mut hasher);
            hasher.finish()
        };
        let settings = Settings {
            limits: Limits {
                memory_bytes: 1 << 20,
                ..Limits::default()
            },
            ..Settings::default()
        };
        assert_eq!(key(&code_config()), key(&config(1, &settings)));
    }
}
