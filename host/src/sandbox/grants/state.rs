//! The quota of a handler's state.

/// Enough for a cursor for each of a few hundred sources.
const KEYS_MAX: u32 = 1_000;

/// A kilobyte for each key.
const BYTES_MAX: u64 = 1 << 20;

/// Enough for a cursor, a token or a counter; larger data belongs in a table or a file.
const VALUE_BYTES_MAX: usize = 64 << 10;

/// The quota of the state that a handler keeps for one tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateQuota {
    /// The maximum number of keys. Default: 1,000.
    pub keys_max: u32,
    /// The maximum size of keys and values together, in bytes. Default: 1 MiB.
    pub bytes_max: u64,
    /// The maximum size of one value, in bytes. Default: 64 KiB.
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
