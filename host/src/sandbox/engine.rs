//! The sandbox: the engine, the instance pool and the threads that all attempts of a host share.

use std::sync::{Arc, Once};
use std::thread::available_parallelism;

use anyhow::{Context, bail};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Semaphore;
use wasmtime::component::{HasSelf, Linker};
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

use super::attempt::clocks;
use super::attempt::contract::Checks;
use super::attempt::idle::Idle;
use super::attempt::instance::{Instance, Serves};
use super::attempt::limits::TABLE_ELEMENTS;
use super::attempt::memory::{MemoryBudget, PAGE_BYTES};
use super::attempt::state::AttemptState;
use super::capability::{Net, guard_files, guard_sockets, link_http};
use super::grants::Roots;
use super::grants::quota::Ledgers;
use super::module::cache::CodeCache;
use super::module::code::code_config;
use super::pool::Machine;
use super::ticker::Ticker;
use super::{Settings, bindings};

/// Instances for describing new modules, in addition to those for attempts.
const DESCRIBES_MAX: usize = 2;

/// Idle instances have pool slots of their own, so that they never take the slot of a fresh one: 4 for each attempt
/// that may run at once, for tenants that alternate, and at most 64 on large hosts. Their memory is also limited
/// (`idle.rs`).
const IDLE_PER_ATTEMPT: usize = 4;
const IDLE_COUNT_MAX: usize = 64;

/// The part of each instance's memory and tables that stays resident after the attempt and is cleared in place. Only
/// what lies beyond it is returned to the kernel, which costs a system call, an interruption of the other threads,
/// and a page fault for each page that the next attempt touches: 12 µs for a no-op.
/// (`docs/decisions/fresh-instances-are-cheap.md`)
///
/// A small guest with a stack of 128 KiB starts with 192 to 256 KiB, and a table of 8 KiB for 1,000 functions. 200
/// attempts at once keep at most 200 × (256 + 2 × 64) KiB = 75 MiB, usually less than 55. With the largest modules
/// that are allowed (4 memories, 8 tables) they keep 200 × (4 × 256 + 8 × 64) KiB = 300 MiB. The estimate of 2 MiB
/// for each attempt (`pool.rs`) is never reached.
const MEMORY_RESIDENT_BYTES: usize = 256 << 10;
const TABLE_RESIDENT_BYTES: usize = 64 << 10;

/// The divisor of the share of the attempts' memory that is reserved for running attempts: 1/8.
const MEMORY_SPARE_SHARE: usize = 8;

/// Runs guests. A host has one sandbox: it owns the engine, the instance pool, the clock that interrupts guests, and
/// the threads that run them.
pub struct Sandbox {
    pub(super) engine: Engine,
    pub(super) linker: Linker<AttemptState>,
    pub(super) settings: Settings,
    pub(super) budget: Arc<MemoryBudget>,
    /// One permit for each attempt that the pool can hold.
    pub(super) attempts: Semaphore,
    pub(super) describes: Semaphore,
    /// One permit, for modules that need a long time to describe themselves.
    pub(super) slow_describes: Semaphore,
    pub(super) checks: Checks,
    pub(super) ticker: Ticker,
    pub(super) idle: Arc<Idle<Serves, Instance>>,
    pub(super) cache: Option<CodeCache>,
    /// Ensures that the actions that the confinement of compilers cannot prevent are logged only once.
    pub(super) confinement_logged: Once,
    pub(super) net: Arc<Net>,
    pub(super) roots: Roots,
    pub(super) ledgers: Ledgers,
    attempts_max: usize,
    /// If less memory is free, no more jobs are claimed.
    memory_spare_bytes: usize,
    /// Guests have threads of their own, so that a CPU-bound guest never delays a heartbeat or a renewal. `None` only
    /// while the sandbox is being dropped.
    guests: Option<Runtime>,
}

impl Sandbox {
    /// Starts the engine, its clock and the threads for guests.
    ///
    /// # Errors
    /// When a setting is invalid, or the machine cannot hold even one instance.
    pub fn start(settings: Settings) -> anyhow::Result<Arc<Self>> {
        if settings.attempts_max == 0 {
            bail!("the sandbox is configured for 0 concurrent attempts; set at least 1");
        }
        let max = settings.memory_bytes_max();
        if !(PAGE_BYTES..=4 << 30).contains(&max) {
            bail!(
                "the sandbox is configured for {max} bytes of memory per attempt; set 64 KiB to 4 GiB"
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
                "fewer concurrent attempts than requested: {why}"
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
            confinement_logged: Once::new(),
            ticker: Ticker::start(engine.clone(), settings.tick)?,
            engine,
            idle: Idle::new(idle_max(attempts_max, &settings)),
            net: Net::new(settings.http.clone(), attempts_max)?,
            roots: Roots::open(&settings.grants),
            settings,
            ledgers: Ledgers::default(),
            budget: MemoryBudget::new(size.memory_bytes_total_max),
            memory_spare_bytes: size.memory_bytes_total_max / MEMORY_SPARE_SHARE,
            attempts: Semaphore::new(attempts_max),
            describes: Semaphore::new(DESCRIBES_MAX),
            slow_describes: Semaphore::new(1),
            checks: Checks::new(available_parallelism().map_or(1, usize::from)),
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

    /// The number of attempts that can run at once: the setting, or less if the machine has too few resources. A worker
    /// claims no more jobs than that.
    pub fn attempts_max(&self) -> usize {
        self.attempts_max
    }

    /// True if there is no memory for another attempt of the usual size. Such an attempt should not start, because it
    /// would exhaust the host's memory.
    pub fn memory_is_short(&self) -> bool {
        self.budget.free_bytes()
            < self
                .settings
                .limits
                .memory_bytes
                .min(self.memory_spare_bytes)
    }

    /// The operator's settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The threads for guests. Await [`run`](Self::run) only in a task on these threads.
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
            // Dropping a runtime in async code panics; this does not block.
            guests.shutdown_background();
        }
    }
}

/// Creates the engine, and returns the number of attempts that it can hold. If the address space is too small (`ulimit
/// -v`, small containers), it retries with half as many.
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
                    "fewer concurrent attempts than requested: {error:#}"
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
    let max = settings.memory_bytes_max();
    let mut pool = PoolingAllocationConfig::new();
    // Each instance may be that of the largest module that is allowed, so no instance ever waits for its parts.
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
        .max_memory_size(max.next_multiple_of(PAGE_BYTES));

    let mut config = code_config();
    config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    config
}

/// Links everything that a guest can import. Linking does not grant anything: without a grant, a guest has no
/// directory, and every socket is refused.
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
        .and_then(|()| {
            bindings::rouse::handler::jobs::add_to_linker::<_, HasSelf<AttemptState>>(
                &mut linker,
                |state| state,
            )
        })
        .and_then(|()| {
            bindings::rouse::handler::parents::add_to_linker::<_, HasSelf<AttemptState>>(
                &mut linker,
                |state| state,
            )
        })
        .and_then(|()| {
            bindings::rouse::handler::waits::add_to_linker::<_, HasSelf<AttemptState>>(
                &mut linker,
                |state| state,
            )
        })
        .and_then(|()| {
            bindings::rouse::handler::sql::add_to_linker::<_, HasSelf<AttemptState>>(
                &mut linker,
                |state| state,
            )
        })
        .and_then(|()| {
            bindings::rouse::handler::batch::add_to_linker::<_, HasSelf<AttemptState>>(
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
    fn code_compiled_without_a_pool_fits_a_host_with_one() {
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
