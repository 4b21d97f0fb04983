//! Rules that neither the types of the file nor the rows of its keys express.

use std::path::Path;

use super::dirs_together::check_together;
use super::own_settings::check_env;
use super::{File, check_worker_id};
use crate::job::is_pattern;

impl File {
    /// Rejects invalid values, with the key. Relative paths start at `folder`.
    pub(super) fn check(&self, folder: &Path) -> Result<(), String> {
        if let Some(id) = &self.worker_id {
            check_worker_id(id)?;
        }
        for (key, words) in [("queues", &self.queues), ("tags", &self.tags)] {
            for word in words.iter().flatten() {
                check_word(key, word)?;
            }
        }
        self.check_host()?;
        self.check_limits()?;
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
            if let Some(sql) = &table.sql {
                sql.check().map_err(|why| name("sql") + ": " + &why)?;
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

/// Rejects an invalid name in `queues` or `tags`.
pub(super) fn check_word(key: &str, word: &str) -> Result<(), String> {
    let fits = (1..=128).contains(&word.len())
        && word.starts_with(|c: char| c.is_ascii_alphanumeric())
        && match word.split_once('=') {
            Some((name, value)) if key == "tags" => {
                is_word(name, b"_.:-") && is_word(value, b"_.:/-")
            }
            _ => is_word(word, b"_.:-"),
        };
    if fits {
        return Ok(());
    }
    let or_pair = if key == "tags" { " or key=value" } else { "" };
    Err(format!(
        "{key}: {word:?} is not a name{or_pair}: a letter or digit, then letters, digits and _ . : -, at most 128 characters"
    ))
}

/// True for letters, digits and these characters, at least one.
fn is_word(text: &str, more: &[u8]) -> bool {
    let mut bytes = text.bytes();
    !text.is_empty() && bytes.all(|b| b.is_ascii_alphanumeric() || more.contains(&b))
}
