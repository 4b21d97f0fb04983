//! The numbers at the top of `rouse.toml`, which hold for the whole host: their bounds, defaults and meaning.

use std::ops::RangeInclusive;

use super::File;
use crate::setting::Number;

#[cfg(test)]
use crate::{sandbox, setting, worker};

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;

/// One setting.
struct HostSetting {
    key: &'static str,
    /// As written: a count, bytes, MiB, or milliseconds of a duration.
    bounds: RangeInclusive<u64>,
    /// What the file sets.
    written: fn(&File) -> Option<Number>,
    /// What it means, for the reference page.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the reference page"))]
    doc: &'static str,
}

/// Describes a setting.
const fn setting(
    key: &'static str,
    bounds: RangeInclusive<u64>,
    written: fn(&File) -> Option<Number>,
    doc: &'static str,
) -> HostSetting {
    HostSetting {
        key,
        bounds,
        written,
        doc,
    }
}

const SETTINGS: &[HostSetting] = &[
    setting(
        "slots",
        1..=10_000,
        |file| file.slots.map(Number::from),
        "Attempts at the same time",
    ),
    setting(
        "poll_min",
        1..=60_000,
        |file| file.poll_min.map(Number::from),
        "First wait after a poll that found nothing",
    ),
    setting(
        "poll_max",
        1..=60_000,
        |file| file.poll_max.map(Number::from),
        "Longest wait between two polls",
    ),
    setting(
        "job_delay",
        0..=HOUR_MS,
        |file| file.job_delay.map(Number::from),
        "How long a slot waits after an attempt before it starts the next one",
    ),
    setting(
        "keep_days",
        1..=36_500,
        |file| file.keep_days.map(Number::from),
        "Days for which finished jobs are kept; the smallest value of all hosts counts",
    ),
    setting(
        "lost_max",
        1..=1000,
        |file| file.lost_max.map(Number::from),
        "How often a job may be lost with its worker before it fails",
    ),
    setting(
        "promote_share",
        1..=100,
        |file| file.promote_share.map(|share| u32::from(share).into()),
        "Percent of each claim for jobs that have waited for `promote_after`, while there are any",
    ),
    setting(
        "memory_total_mb",
        16..=1 << 24,
        |file| file.memory_total_mb.map(Number::from),
        "Memory of all attempts together, MiB",
    ),
    setting(
        "invoke_max",
        0..=10_000,
        |file| file.invoke_max.map(Number::from),
        "Invocations at the same time, besides the slots; 0: none",
    ),
    setting(
        "invoke_payload_bytes_max",
        2..=64 << 20,
        |file| file.invoke_payload_bytes_max.map(Number::from),
        "Size of an invocation's payload",
    ),
    setting(
        "http_timeout",
        1..=DAY_MS,
        |file| file.http_timeout.map(Number::from),
        "How long a handler's HTTP request may take, its response included",
    ),
    setting(
        "compilations_max",
        1..=64,
        |file| file.compilations_max.map(Number::from),
        "Compilations at the same time",
    ),
    setting(
        "compile_cpu",
        1000..=HOUR_MS,
        |file| file.compile_cpu.map(Number::from),
        "CPU time to compile one module",
    ),
    setting(
        "compile_memory_mb",
        512..=65_536,
        |file| file.compile_memory_mb.map(Number::from),
        "Address space to compile one module, MiB",
    ),
    setting(
        "module_core_instances_max",
        4..=1000,
        |file| file.module_core_instances_max.map(Number::from),
        "Core instances of one module",
    ),
    setting(
        "module_memories_max",
        1..=64,
        |file| file.module_memories_max.map(Number::from),
        "Linear memories of one module; each reserves 4 GiB of address space for each slot",
    ),
    setting(
        "module_tables_max",
        2..=64,
        |file| file.module_tables_max.map(Number::from),
        "Tables of one module",
    ),
];

impl File {
    /// Rejects numbers out of their bounds.
    pub(super) fn check_host_settings(&self) -> Result<(), String> {
        SETTINGS
            .iter()
            .filter_map(|setting| Some((setting, (setting.written)(self)?)))
            .try_for_each(|(setting, number)| number.check(setting.key, &setting.bounds))
    }
}

/// Their rows on the reference page.
#[cfg(test)]
pub(super) fn rows() -> Vec<String> {
    let (worker, sandbox) = (worker::Settings::default(), sandbox::Settings::default());
    let default = |key: &str| -> (Number, Option<&str>) {
        match key {
            "slots" => (0_usize.into(), Some("4 for each core")),
            "poll_min" => (worker.poll_min.into(), None),
            "poll_max" => (worker.poll_max.into(), None),
            "job_delay" => (worker.job_delay.into(), None),
            "keep_days" => (worker.keep_days.into(), None),
            "lost_max" => (worker.lost_max.into(), None),
            "promote_share" => (u32::from(worker.promote_share).into(), None),
            "memory_total_mb" => (0_usize.into(), Some("three quarters of the machine's")),
            "invoke_max" => (0_usize.into(), Some("as many as slots")),
            "invoke_payload_bytes_max" => (File::default().invoke_payload_bytes_max().into(), None),
            "http_timeout" => (sandbox.http.timeout.into(), None),
            "compilations_max" => (0_usize.into(), Some("one for each core, at most 4")),
            "compile_cpu" => (sandbox.compile_cpu_max.into(), None),
            "compile_memory_mb" => ((sandbox.compile_memory_bytes_max >> 20).into(), None),
            "module_core_instances_max" => (sandbox.module_parts.core_instances.into(), None),
            "module_memories_max" => (sandbox.module_parts.memories.into(), None),
            "module_tables_max" => (sandbox.module_parts.tables.into(), None),
            key => panic!("{key} needs a default"),
        }
    };
    let rows = SETTINGS.iter().map(|setting| {
        let (number, text) = default(setting.key);
        let text = text.map(str::to_owned);
        setting::row(setting.key, number, text, &setting.bounds, setting.doc)
    });
    rows.collect()
}
