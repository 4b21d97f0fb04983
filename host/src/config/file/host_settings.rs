//! The numeric settings at the top of `rouse.toml`, which apply to the whole host. Some also have a command-line
//! option.

use std::time::Duration;

use humantime::format_duration;

use super::File;
use crate::setting::Field::{Mib, Time, U8, U32, Usize};
use crate::setting::{Number, Overlay, Settable, Setting, setting};
use crate::{sandbox, worker};

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;

/// The same as the default limit of a job's payload.
const INVOKE_PAYLOAD_BYTES_MAX: usize = 256 << 10;

/// What the operator sets for the whole host.
#[derive(Debug, Clone, Default)]
pub struct HostSettings {
    /// The worker.
    pub worker: worker::Settings,
    /// The sandbox.
    pub sandbox: sandbox::Settings,
    /// Invocations.
    pub invoke: InvokeSettings,
}

/// What the operator sets for invocations.
#[derive(Debug, Clone)]
pub struct InvokeSettings {
    /// The maximum number of concurrent invocations, in addition to the slots. Default: the number of slots.
    pub max: Option<usize>,
    /// The maximum size of a payload, in bytes. Default: 256 KiB, as for jobs.
    pub payload_bytes_max: usize,
}

impl Default for InvokeSettings {
    fn default() -> Self {
        Self {
            max: None,
            payload_bytes_max: INVOKE_PAYLOAD_BYTES_MAX,
        }
    }
}

impl Settable for HostSettings {
    const SETTINGS: &'static [Setting<Self>] = &[
        Setting::new(
            "slots",
            1..=10_000,
            |of: &mut Self| Usize(&mut of.worker.slots),
            "Maximum number of attempts at the same time",
        )
        .default_text("4 for each core")
        .option("--slots"),
        Setting::new(
            "poll_min",
            1..=60_000,
            |of: &mut Self| Time(&mut of.worker.poll_min),
            "First wait after a poll that found nothing",
        ),
        Setting::new(
            "poll_max",
            1..=60_000,
            |of: &mut Self| Time(&mut of.worker.poll_max),
            "Longest wait between two polls",
        )
        .option("--poll-max"),
        // The maximum is that of the run timeout.
        Setting::new(
            "drain_timeout",
            0..=30 * DAY_MS,
            |of: &mut Self| Time(&mut of.worker.drain_timeout),
            "How long running attempts may continue after SIGTERM",
        )
        .option("--drain-timeout"),
        Setting::new(
            "job_delay",
            0..=HOUR_MS,
            |of: &mut Self| Time(&mut of.worker.job_delay),
            "How long a slot waits after an attempt before it starts the next one",
        ),
        Setting::new(
            "lost_max",
            1..=1000,
            |of: &mut Self| U32(&mut of.worker.lost_max),
            "The number of crashes of its workers after which a job fails",
        ),
        Setting::new(
            "promote_after",
            0..=30 * DAY_MS,
            |of: &mut Self| Time(of.worker.promote_after.get_or_insert_default()),
            "How long a job waits before it goes ahead of newer jobs of higher priority; `0s`: it never does",
        ),
        Setting::new(
            "promote_share",
            1..=100,
            |of: &mut Self| U8(&mut of.worker.promote_share),
            "Percent of each claim for jobs that have waited for `promote_after`, while there are any",
        ),
        Setting::new(
            "memory_total_mb",
            16..=1 << 24,
            |of: &mut Self| Mib(of.sandbox.memory_bytes_total_max.get_or_insert_default()),
            "Memory of all attempts together, MiB",
        )
        .default_text("three quarters of the machine's"),
        Setting::new(
            "invoke_max",
            0..=10_000,
            |of: &mut Self| Usize(of.invoke.max.get_or_insert_default()),
            "Maximum number of invocations at the same time, in addition to the slots; 0: none",
        )
        .default_text("as many as slots"),
        Setting::new(
            "invoke_payload_bytes_max",
            2..=64 << 20,
            |of: &mut Self| Usize(&mut of.invoke.payload_bytes_max),
            "Size of an invocation's payload",
        ),
        Setting::new(
            "http_timeout",
            1..=DAY_MS,
            |of: &mut Self| Time(&mut of.sandbox.http.timeout),
            "How long a handler's HTTP request may take, its response included",
        ),
        Setting::new(
            "compilations_max",
            1..=64,
            |of: &mut Self| Usize(&mut of.sandbox.compilations_max),
            "Maximum number of compilations at the same time",
        )
        .default_text("one for each core, at most 4"),
        Setting::new(
            "compile_cpu",
            1000..=HOUR_MS,
            |of: &mut Self| Time(&mut of.sandbox.compile_cpu_max),
            "CPU time to compile one module",
        ),
        Setting::new(
            "compile_memory_mb",
            512..=65_536,
            |of: &mut Self| Mib(&mut of.sandbox.compile_memory_bytes_max),
            "Address space to compile one module, MiB",
        ),
        Setting::new(
            "module_core_instances_max",
            4..=1000,
            |of: &mut Self| U32(&mut of.sandbox.module_parts.core_instances),
            "Core instances of one module",
        ),
        Setting::new(
            "module_memories_max",
            1..=64,
            |of: &mut Self| U32(&mut of.sandbox.module_parts.memories),
            "Linear memories of one module; each reserves 4 GiB of address space for each slot",
        ),
        Setting::new(
            "module_tables_max",
            2..=64,
            |of: &mut Self| U32(&mut of.sandbox.module_parts.tables),
            "Tables of one module",
        ),
    ];

    fn check_together(&self, _: &Overlay<Self>, set: &Overlay<Self>) -> Result<(), String> {
        let (min, max) = (self.worker.poll_min, self.worker.poll_max);
        // A worker lowers the default of poll_min to poll_max.
        if set.has("poll_min") && min > max {
            return Err(format!(
                "poll_min must be at most poll_max, which is {}, not {}",
                format_duration(max),
                format_duration(min)
            ));
        }
        Ok(())
    }
}

/// The help of an option that sets one of these numbers.
///
/// # Panics
/// If there is no such key.
pub fn host_help(key: &str) -> String {
    setting::<HostSettings>(key).help()
}

/// The parser of an option that sets one of these numbers.
///
/// # Panics
/// If there is no such key.
pub fn host_number(key: &'static str) -> impl Fn(&str) -> Result<Number, String> + Clone {
    let setting = setting::<HostSettings>(key);
    move |text| setting.parse(text)
}

impl File {
    /// Applies the settings of the command line, which override those of the file.
    ///
    /// # Errors
    /// If they contradict the settings of the file. The error names the keys.
    pub fn override_host(&mut self, set: Overlay<HostSettings>) -> Result<(), String> {
        self.host = set.or(&self.host);
        self.check_host()
    }

    /// The numbers of the host, and the defaults of everything else.
    pub(super) fn host(&self) -> HostSettings {
        let mut host = self.host.over(&HostSettings::default());
        let promote_after = host.worker.promote_after;
        host.worker.promote_after = promote_after.filter(|after| !after.is_zero());
        host
    }

    /// The time for which a slot waits after an attempt of any handler.
    pub fn job_delay(&self) -> Duration {
        self.host().worker.job_delay
    }

    /// The maximum number of concurrent invocations; `None` if the operator has not set it.
    pub fn invoke_max(&self) -> Option<usize> {
        self.host().invoke.max
    }

    /// The maximum size of an invocation's payload, in bytes.
    pub fn invoke_payload_bytes_max(&self) -> usize {
        self.host().invoke.payload_bytes_max
    }
}
