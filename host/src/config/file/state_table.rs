//! `[handlers."…".state]`: how much a handler may keep between its jobs.

use serde::Deserialize;

use super::checks::within;
use crate::sandbox::StateQuota;

/// The quota as written, for each tenant. That the table is there is the grant: every key may be left out.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StateTable {
    /// Default 1,000.
    keys_max: Option<u32>,
    /// Keys and values; default 1 MiB.
    bytes_max: Option<u64>,
    /// One value; default 64 KiB.
    value_bytes_max: Option<usize>,
}

impl StateTable {
    /// This where it sets something, the wider one elsewhere.
    pub(super) fn or(&self, wider: &Self) -> Self {
        Self {
            keys_max: self.keys_max.or(wider.keys_max),
            bytes_max: self.bytes_max.or(wider.bytes_max),
            value_bytes_max: self.value_bytes_max.or(wider.value_bytes_max),
        }
    }

    /// Says where one value may be larger than all of them together.
    pub(super) fn check_together(&self, table: &str) -> Result<(), String> {
        let bytes_max = self.quota().bytes_max;
        match self.value_bytes_max {
            Some(value) if value as u64 > bytes_max => Err(format!(
                "{table}: value_bytes_max, of one value, is {value}, and bytes_max, of all together, only {bytes_max}"
            )),
            Some(_) | None => Ok(()),
        }
    }

    /// For the sandbox.
    pub(super) fn quota(&self) -> StateQuota {
        let default = StateQuota::default();
        StateQuota {
            keys_max: self.keys_max.unwrap_or(default.keys_max),
            bytes_max: self.bytes_max.unwrap_or(default.bytes_max),
            value_bytes_max: self.value_bytes_max.unwrap_or(default.value_bytes_max),
        }
    }

    /// Says what is wrong, with the key. Each write that adds to the state sums over all keys: hence the most of them.
    pub(super) fn check(&self, table: &str) -> Result<(), String> {
        let value_bytes_max = self.value_bytes_max.map(|bytes| bytes as u64);
        for (key, value, max) in [
            ("keys_max", self.keys_max.map(u64::from), 10_000),
            ("bytes_max", self.bytes_max, 1 << 30),
            ("value_bytes_max", value_bytes_max, 4 << 20),
        ] {
            within(&format!("{table}.{key}"), value, 1, max, "")?;
        }
        Ok(())
    }
}
