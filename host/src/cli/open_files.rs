//! How many files this process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{debug, warn};

/// Takes as many as it may. The 1,024 of many shells and services are fewer than the attempts of one host may have open together,
/// and a process that has no more can neither take a connection nor look into its handlers folder.
pub(super) fn take_as_many_as_allowed() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => debug!(before = current, now = maximum, "open files are limited"),
        Err(error) => warn!(
            limit = current,
            "the limit of open files cannot be raised, attempts that open many could leave none for the host: {error}"
        ),
    }
}
