//! The resources that an attempt has used.

use std::time::Duration;

/// The resources that an attempt has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time of the guest, including instantiation and host calls.
    pub cpu: Duration,
    /// The peak memory of the guest, in bytes. If its instance has already served other jobs, their memory is included.
    pub memory_bytes_peak: u64,
    /// Calls to Rouse's own interfaces, to files and to the network. Clocks, random numbers and waiting are not
    /// counted.
    pub host_calls: u32,
    /// Bytes received over the network.
    pub bytes_in: u64,
    /// Bytes sent over the network.
    pub bytes_out: u64,
}
