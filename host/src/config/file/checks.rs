//! Rules that neither the types of the file nor the tables of settings express.

use std::path::Path;
use std::time::Duration;

use super::bounds::within;
use super::dirs_together::check_together;
use super::own_settings::check_env;
use super::{File, check_worker_id};
use crate::job::is_pattern;
use crate::worker;

impl File {
    /// Rejects invalid values, with the key. Relative paths start at `folder`.
    pub(super) fn check(&self, folder: &Path) -> Result<(), String> {
        if let Some(id) = &self.worker_id {
            check_worker_id(id)?;
        }
        for (key, words) in [("queues", &self.queues), ("tags", &self.tags)] {
            for word in words.iter().flatten() {
                let fits = (1..=128).contains(&word.len())
                    && word.starts_with(|c: char| c.is_ascii_alphanumeric())
                    && match word.split_once('=') {
                        Some((name, value)) if key == "tags" => {
                            is_word(name, b"_.:-") && is_word(value, b"_.:/-")
                        }
                        _ => is_word(word, b"_.:-"),
                    };
                if !fits {
                    let or_pair = if key == "tags" { ", or key=value" } else { "" };
                    return Err(format!(
                        "{key}: {word:?} is not a name: letters, digits and _ . : -{or_pair}; at most 128 characters"
                    ));
                }
            }
        }
        let ms = |duration: Option<Duration>| {
            duration.map(|duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
        };
        within("slots", self.slots.map(|slots| slots as u64), 1, 10_000, "")?;
        within("poll_min", ms(self.poll_min), 1, 60_000, " ms")?;
        within("poll_max", ms(self.poll_max), 1, 60_000, " ms")?;
        let poll_max = self
            .poll_max
            .unwrap_or(worker::Settings::default().poll_max);
        if self.poll_min.is_some_and(|poll_min| poll_min > poll_max) {
            return Err(format!(
                "poll_min, the shortest wait, is longer than poll_max, which is {}",
                humantime::format_duration(poll_max)
            ));
        }
        within("job_delay", ms(self.job_delay), 0, 3_600_000, " ms")?;
        within("keep_days", self.keep_days.map(u64::from), 1, 36_500, "")?;
        within(
            "promote_share",
            self.promote_share.map(u64::from),
            1,
            100,
            " percent",
        )?;
        within("lost_max", self.lost_max.map(u64::from), 1, 1000, "")?;
        within(
            "memory_total_mb",
            self.memory_total_mb.map(|mb| mb as u64),
            16,
            1 << 24,
            "",
        )?;
        self.check_limits()?;
        within(
            "invoke_max",
            self.invoke_max.map(|max| max as u64),
            0,
            10_000,
            "",
        )?;
        within(
            "invoke_payload_bytes_max",
            self.invoke_payload_bytes_max.map(|bytes| bytes as u64),
            2,
            64 << 20,
            "",
        )?;
        within(
            "compilations_max",
            self.compilations_max.map(|max| max as u64),
            1,
            64,
            "",
        )?;
        within("compile_cpu", ms(self.compile_cpu), 1000, 3_600_000, " ms")?;
        within(
            "compile_memory_mb",
            self.compile_memory_mb.map(|mb| mb as u64),
            512,
            65_536,
            "",
        )?;
        for (key, max, least, most) in [
            (
                "module_core_instances_max",
                self.module_core_instances_max,
                4,
                1000,
            ),
            ("module_memories_max", self.module_memories_max, 1, 64),
            ("module_tables_max", self.module_tables_max, 2, 64),
        ] {
            within(key, max.map(u64::from), least, most, "")?;
        }
        within("http_timeout", ms(self.http_timeout), 1, 86_400_000, " ms")?;
        for (name, secret) in &self.secrets {
            secret
                .check()
                .map_err(|why| format!("secrets.{name}: {why}"))?;
        }
        if self.queues.as_ref().is_some_and(Vec::is_empty) {
            return Err("queues is empty: leave it out to serve all queues".into());
        }
        for (handler, table) in &self.handlers {
            if !is_pattern(handler) {
                return Err(format!(
                    "handlers.\"{handler}\" is neither a handler's name nor a pattern such as \"image.*\" or \"*\""
                ));
            }
            let name = |key: &str| format!("handlers.\"{handler}\".{key}");
            self.check_in_force(handler, table)?;
            for dir in &table.dirs {
                dir.check(&name("dirs"))?;
            }
            if let Some(env) = &table.env {
                check_env(env).map_err(|why| name("env") + ": " + &why)?;
            }
            for http in &table.http {
                http.check().map_err(|why| name("http") + ": " + &why)?;
            }
            for secret in &table.secrets {
                let known = self.secrets.keys().any(|known| *known == secret.name);
                secret
                    .check(known)
                    .map_err(|why| name("secrets") + ": " + &why)?;
            }
        }
        check_together(&self.handlers, folder)?;
        self.check_cache(folder)
    }
}

/// Letters, digits and these.
fn is_word(text: &str, more: &[u8]) -> bool {
    let mut bytes = text.bytes();
    !text.is_empty() && bytes.all(|b| b.is_ascii_alphanumeric() || more.contains(&b))
}
