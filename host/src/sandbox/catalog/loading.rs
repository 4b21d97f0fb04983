//! Making modules beside the thread that follows the folder, so that one which takes its time holds up no other.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;

use super::watch::Wake;
use crate::sandbox::load::{Refused, load};
use crate::sandbox::{Digest, Module, Sandbox};

/// What has become of a file.
pub(super) struct Loaded {
    pub(super) file: String,
    /// Its place in the line, which says which contents it had.
    pub(super) place: u64,
    pub(super) module: Result<Box<Module>, Refused>,
}

/// Begins to make a module of these bytes, whose digest this is.
///
/// # Errors
/// When there is no thread for it.
pub(super) fn start(
    sandbox: &Arc<Sandbox>,
    place: u64,
    file: &str,
    digest: Digest,
    bytes: Vec<u8>,
    done: mpsc::Sender<Wake>,
) -> io::Result<()> {
    let (sandbox, file) = (sandbox.clone(), file.to_owned());
    thread::Builder::new()
        .name("rouse-load".into())
        .spawn(move || {
            // A fault of the host would otherwise keep the module's place for ever.
            let load = || load(&sandbox, &file, digest, &bytes).map(Box::new);
            let module = catch_unwind(AssertUnwindSafe(load)).unwrap_or_else(|_| {
                Err(Refused::Contents(
                    "it made the host panic; this is a fault of Rouse".into(),
                ))
            });
            drop(sandbox);
            // When nobody receives, the catalog is gone.
            let _ = done.send(Wake::Loaded(Loaded {
                file,
                place,
                module,
            }));
        })?;
    Ok(())
}
