//! What the operator decides about requests of guests, whatever else is granted to them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::lookups::{Resolver, SystemResolver};

/// The longest request that people wait for elsewhere (proxies, load balancers), and then some.
const TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// What the operator decides about requests of guests, whatever else is granted to them.
#[derive(Debug, Clone)]
pub struct HttpSettings {
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
            timeout: TIMEOUT,
            ca_file: None,
            resolver: Arc::new(SystemResolver),
        }
    }
}
