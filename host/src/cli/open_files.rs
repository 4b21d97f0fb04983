//! The limit on open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{debug, warn};

/// Raises the limit to its maximum. The attempts of one host may need more than the usual 1,024, and a process without
/// free descriptors can neither accept a connection nor read its handlers folder.
pub(super) fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => debug!(
            before = current,
            now = maximum,
            "raised the limit on open files"
        ),
        Err(error) => warn!(
            limit = current,
            "cannot raise the limit on open files; attempts that open many files could leave none for the host: {error}"
        ),
    }
}
