//! How much a handler may keep between its jobs.

/// A handler that remembers a cursor for each of some hundred sources.
const KEYS_MAX: u32 = 1_000;

/// As many keys with a kilobyte each.
const BYTES_MAX: u64 = 1 << 20;

/// A cursor, a token, a counter; what is larger belongs into a table or a file.
const VALUE_BYTES_MAX: usize = 64 << 10;

/// How much a handler may keep for one tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateQuota {
    /// Keys. Default: 1,000.
    pub keys_max: u32,
    /// Keys and values together, bytes. Default: 1 MiB.
    pub bytes_max: u64,
    /// One value, bytes. Default: 64 KiB.
    pub value_bytes_max: usize,
}

impl Default for StateQuota {
    fn default() -> Self {
        Self {
            keys_max: KEYS_MAX,
            bytes_max: BYTES_MAX,
            value_bytes_max: VALUE_BYTES_MAX,
        }
    }
}
