//! The operator's settings for all requests of guests.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::lookups::{Resolver, SystemResolver};

/// Longer than the usual timeouts of proxies and load balancers.
const TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// The operator's settings for all requests of guests.
#[derive(Debug, Clone)]
pub struct HttpSettings {
    /// The maximum time from the start of a request to the end of its response. Default: 10 minutes.
    pub timeout: Duration,
    /// Certificates (PEM) of authorities that are trusted in addition to the system's. Default: none.
    pub ca_file: Option<PathBuf>,
    /// Resolves names. Default: the system's resolver.
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
