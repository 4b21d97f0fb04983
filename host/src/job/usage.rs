//! What an attempt has used.

use std::time::Duration;

/// What an attempt has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time of the guest, instantiation and host calls included.
    pub cpu: Duration,
    /// The most memory that the guest had, bytes; that of earlier jobs included, where its instance has served any.
    pub memory_bytes_peak: u64,
    /// Calls of what Rouse offers, of files and of the network. Clocks, random numbers and waiting are not counted.
    pub host_calls: u32,
    /// Received over the network.
    pub bytes_in: u64,
    /// Sent over the network.
    pub bytes_out: u64,
}
