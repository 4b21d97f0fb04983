//! What the operator decides about requests of guests, whatever else is granted to them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::connect::{Resolver, SystemResolver};

/// A handler that needs more should be several jobs; a loop that sends would be an attack.
const REQUESTS_MAX: usize = 1_000;

/// Both ways, heads and bodies together: a job that moves more data is better off with a file.
const BYTES_MAX: u64 = 1 << 30;

/// A body is not held in the host's memory, so this bounds time and traffic, and what a guest can be sent
/// that did not expect it.
const BODY_BYTES_MAX: u64 = 256 << 20;

/// The longest request that people wait for elsewhere (proxies, load balancers), and then some.
const TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// What the operator decides about requests of guests, whatever else is granted to them.
#[derive(Debug, Clone)]
pub struct HttpSettings {
    /// Requests of one attempt. Default: 1,000.
    pub requests_max: usize,
    /// Bytes of all requests and responses of one attempt together. Default: 1 GiB.
    pub bytes_max: u64,
    /// Bytes of one body, either way. Default: 256 MiB.
    pub body_bytes_max: u64,
    /// From a request to the end of its response. Default: 10 minutes.
    pub timeout: Duration,
    /// Certificates (PEM) of authorities that are trusted beside the system's. Default: none.
    pub ca_file: Option<PathBuf>,
    /// Finds the addresses of a name. Default: the system's.
    pub resolver: Arc<dyn Resolver>,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            requests_max: REQUESTS_MAX,
            bytes_max: BYTES_MAX,
            body_bytes_max: BODY_BYTES_MAX,
            timeout: TIMEOUT,
            ca_file: None,
            resolver: Arc::new(SystemResolver),
        }
    }
}
