//! Reads the secrets that `rouse.toml` names.

use std::path::Path;

use anyhow::{Context as _, anyhow};

use super::File;
use super::secret_table::SecretTable;
use crate::config::env::Environment;
use crate::job::pattern_covers;
use crate::sandbox::{Secret, Secrets};

impl File {
    /// Reads all secrets, or only those that this handler is granted.
    ///
    /// # Errors
    /// If a secret is missing, is readable by others, cannot be sent, or is granted for signing and is not a key. The
    /// error names it.
    pub fn secrets(
        &self,
        folder: &Path,
        environment: Environment,
        handler: Option<&str>,
    ) -> anyhow::Result<Secrets> {
        let wanted = |name: &str| handler.is_none_or(|handler| self.has_granted(name, handler));
        let secrets = self.secrets.iter().filter(|(name, _)| wanted(name));
        let secrets = secrets.map(|(name, table)| {
            let secret = self.read_secret(name, table, folder, environment);
            secret.map(|secret| (name.clone(), secret))
        });
        Ok(Secrets(secrets.collect::<anyhow::Result<_>>()?))
    }

    /// One error for each secret that cannot be read. If there are any, a host does not start.
    pub fn secret_errors(&self, folder: &Path, environment: Environment) -> Vec<anyhow::Error> {
        let secrets = self.secrets.iter();
        let read = secrets.map(|(name, table)| self.read_secret(name, table, folder, environment));
        read.filter_map(Result::err).collect()
    }

    fn has_granted(&self, name: &str, handler: &str) -> bool {
        let mut tables = self.handlers.iter();
        tables.any(|(pattern, table)| {
            pattern_covers(pattern, handler) && table.secrets.iter().any(|grant| grant.name == name)
        })
    }

    fn read_secret(
        &self,
        name: &str,
        table: &SecretTable,
        folder: &Path,
        environment: Environment,
    ) -> anyhow::Result<Secret> {
        let text = table.read(folder, environment);
        text.and_then(|text| self.secret(name, &text).map_err(|why| anyhow!(why)))
            .with_context(|| format!("read the secret {name} (secrets.{name} in rouse.toml)"))
    }

    fn secret(&self, name: &str, text: &str) -> Result<Secret, String> {
        let secret = Secret::new(text)?;
        let mut uses = self.handlers.values().flat_map(|table| &table.secrets);
        if uses.any(|grant| grant.sign && grant.name == name) {
            // Report an unusable key now, not with the first job that signs.
            secret.hmac_sha256(b"")?;
        }
        Ok(secret)
    }
}
