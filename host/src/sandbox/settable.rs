//! The limits and quotas that an operator can set. Their defaults are next to their fields (`attempt/limits.rs`,
//! `grants/`, `job/sql.rs`), with the reasons; the reasons for bounds are here.

use super::{Limits, Quota, StateQuota};
use crate::job::SqlLimits;
use crate::setting::Field::{Mib, Time, U32, U64, Usize};
use crate::setting::{Overlay, Settable, Setting};

const DAY_MS: u64 = 86_400_000;

impl Settable for Limits {
    const SETTINGS: &'static [Setting<Self>] = &[
        // A linear memory of 32 bits ends at 4 GiB.
        Setting::new(
            "memory_mb",
            1..=4096,
            |of| Mib(&mut of.memory_bytes),
            "Memory of an attempt, MiB",
        ),
        Setting::new(
            "memory_retry_mb",
            1..=4096,
            |of: &mut Self| Mib(&mut of.memory_retry_bytes),
            "Memory of the attempt after one that exhausted its memory, MiB; at least `memory_mb`",
        )
        .twice("memory_mb"),
        // As long as an attempt may run.
        Setting::new(
            "cpu",
            1..=30 * DAY_MS,
            |of| Time(&mut of.cpu),
            "CPU time of an attempt",
        ),
        Setting::new(
            "result_bytes",
            2..=64 << 20,
            |of| Usize(&mut of.result_bytes),
            "Size of a result",
        ),
        // Postgres stores at least as much (`_may_log` in migrations/functions/steps.sql).
        Setting::new(
            "log_bytes",
            0..=64 << 20,
            |of| Usize(&mut of.log_bytes),
            "Output and log of an attempt",
        ),
        Setting::new(
            "log_lines_per_second",
            1..=1_000_000,
            |of| U32(&mut of.log_lines_per_second),
            "Lines of output and log within a second",
        ),
        // The pool reserves space for this many.
        Setting::new(
            "table_elements",
            1..=20_000,
            |of| Usize(&mut of.table_elements),
            "Elements of a WebAssembly table",
        ),
        Setting::new(
            "hostcall_bytes",
            64 << 10..=128 << 20,
            |of| Usize(&mut of.hostcall_bytes),
            "Bytes that one call passes to the host; at least twice `result_bytes` is allowed in any case",
        ),
        Setting::new(
            "files",
            0..=100_000,
            |of| Usize(&mut of.files),
            "Files and listed directories open at once",
        ),
        Setting::new(
            "resources",
            1..=100_000,
            |of| Usize(&mut of.resources),
            "Open files, streams and pollables at once",
        ),
        Setting::new(
            "handles",
            16..=1_000_000,
            |of| Usize(&mut of.handles),
            "Handles at once, including those of the handler's own resources",
        ),
        Setting::new(
            "random_bytes",
            32..=64 << 20,
            |of| U64(&mut of.random_bytes),
            "Random bytes of one request",
        ),
        // Postgres stores as many (`_check_steps` in migrations/functions/steps.sql).
        Setting::new(
            "steps",
            0..=100_000,
            |of| Usize(&mut of.steps),
            "Steps of a job",
        ),
        Setting::new(
            "step_bytes",
            2..=8 << 20,
            |of| Usize(&mut of.step_bytes),
            "Result of one step",
        ),
        // A later attempt reads them again. Postgres stores at least as many bytes (`_check_steps`).
        Setting::new(
            "steps_bytes",
            2..=64 << 20,
            |of| Usize(&mut of.steps_bytes),
            "Results of all steps of a job together",
        ),
        Setting::new(
            "http_requests",
            0..=1_000_000,
            |of| Usize(&mut of.http_requests),
            "HTTP requests of an attempt",
        ),
        Setting::new(
            "http_body_bytes",
            1024..=1 << 40,
            |of| U64(&mut of.http_body_bytes),
            "Body of one request or response",
        ),
        Setting::new(
            "http_bytes",
            1024..=1 << 40,
            |of| U64(&mut of.http_bytes),
            "All requests and responses of an attempt together",
        ),
        Setting::new(
            "state_calls",
            0..=1_000_000,
            |of| Usize(&mut of.state_calls),
            "Calls of an attempt for its state",
        ),
        Setting::new(
            "state_bytes",
            0..=1 << 30,
            |of| Usize(&mut of.state_bytes),
            "Bytes of state that an attempt reads and writes",
        ),
        Setting::new(
            "jobs",
            0..=10_000,
            |of| Usize(&mut of.jobs),
            "Jobs that an attempt enqueues",
        ),
        Setting::new(
            "jobs_bytes",
            0..=64 << 20,
            |of| Usize(&mut of.jobs_bytes),
            "Payloads and options of an attempt's jobs together",
        ),
        Setting::new(
            "effects",
            0..=100_000,
            |of| Usize(&mut of.effects),
            "SQL statements that an attempt commits",
        ),
        Setting::new(
            "effects_bytes",
            0..=64 << 20,
            |of| Usize(&mut of.effects_bytes),
            "Parameters of an attempt's SQL statements together",
        ),
        Setting::new(
            "queries",
            0..=1_000_000,
            |of| Usize(&mut of.queries),
            "SQL queries of an attempt",
        ),
    ];

    fn check_together(&self, here: &Overlay<Self>, _: &Overlay<Self>) -> Result<(), String> {
        let [memory_mb, retry_mb] =
            [self.memory_bytes, self.memory_retry_bytes].map(|bytes| bytes >> 20);
        if here.has("memory_retry_mb") && retry_mb < memory_mb {
            return Err(format!(
                "memory_retry_mb must be at least memory_mb, which is {memory_mb}, not {retry_mb}"
            ));
        }
        Ok(())
    }
}

impl Settable for StateQuota {
    const SETTINGS: &'static [Setting<Self>] = &[
        // Each write that adds to the state sums the sizes of all keys.
        Setting::new(
            "keys_max",
            1..=10_000,
            |of| U32(&mut of.keys_max),
            "Keys of a tenant",
        ),
        Setting::new(
            "bytes_max",
            1..=1 << 30,
            |of| U64(&mut of.bytes_max),
            "Keys and values of a tenant together",
        ),
        Setting::new(
            "value_bytes_max",
            1..=4 << 20,
            |of| Usize(&mut of.value_bytes_max),
            "One value",
        ),
    ];

    fn check_together(&self, here: &Overlay<Self>, set: &Overlay<Self>) -> Result<(), String> {
        let (value, all) = (self.value_bytes_max, self.bytes_max);
        // The default of one of them is not the operator's mistake.
        let is_set_here = here.has("value_bytes_max") || here.has("bytes_max");
        if is_set_here && set.has("value_bytes_max") && value as u64 > all {
            return Err(format!(
                "value_bytes_max must be at most bytes_max, which is {all}, not {value}"
            ));
        }
        Ok(())
    }
}

impl Settable for SqlLimits {
    const SETTINGS: &'static [Setting<Self>] = &[
        Setting::new(
            "connections_max",
            1..=1_000,
            |of| U32(&mut of.connections_max),
            "Connections of this host with the login",
        ),
        // A transaction that holds locks for longer would delay everything else.
        Setting::new(
            "statement_timeout",
            1..=600_000,
            |of| Time(&mut of.statement_timeout),
            "How long one statement may run",
        ),
        Setting::new(
            "rows_max",
            1..=1_000_000,
            |of| Usize(&mut of.rows_max),
            "Rows of one query",
        ),
        Setting::new(
            "bytes_max",
            1..=64 << 20,
            |of| Usize(&mut of.bytes_max),
            "The rows of one query together, as JSON",
        ),
    ];
}

impl Settable for Quota {
    const SETTINGS: &'static [Setting<Self>] = &[
        // Sums of sizes stay far below 64 bits.
        Setting::new(
            "bytes_max",
            1..=1 << 60,
            |of: &mut Self| U64(&mut of.bytes_max),
            "Total size of its files; needs `mode = \"read-write\"`",
        )
        .default_text("no limit"),
        // Measuring a directory takes one to two microseconds for each file.
        Setting::new(
            "files_max",
            1..=1_000_000,
            |of: &mut Self| U64(&mut of.files_max),
            "Files, directories and links in it; needs `mode = \"read-write\"`",
        )
        .default_text("no limit, or `100000` if `bytes_max` is set"),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_brings_twice_as_much_for_the_next_attempt() {
        let everyone = Limits {
            steps: 7,
            ..Limits::default()
        };
        let set = Overlay::<Limits>::default().with("memory_mb", 8_u32);
        let limits = set.over(&everyone);
        assert_eq!((limits.memory_bytes, limits.steps), (8 << 20, 7));
        assert_eq!(limits.more_memory(), Some(16 << 20), "twice as much, once");
        let firm = set.with("memory_retry_mb", 8_u32);
        assert_eq!(firm.over(&everyone).more_memory(), None);
        assert_eq!(Overlay::default().over(&everyone), everyone);
    }
}
