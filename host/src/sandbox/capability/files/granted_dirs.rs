//! The granted directories as guests get them: opened by the host, and followed by the empty root.

use std::sync::Arc;

use wasmtime_wasi::p2::bindings::filesystem::preopens;
use wasmtime_wasi::p2::bindings::filesystem::types::Descriptor;

use super::disk::{Disk, Threads};
use super::fds::{FdState, InQuota, OpenFile};
use super::outside::{ROOT, nowhere};
use super::view::{Fd, Files};
use crate::job::RunEnd;
use crate::sandbox::AbortHandle;
use crate::sandbox::attempt::meter::Meter;
use crate::sandbox::grants::Granted;

/// Opens the granted directories that have never been opened, on a thread that may block. Returns the end of the
/// attempt if one cannot be opened, or if the attempt is stopped first.
pub(in crate::sandbox) async fn open_granted(
    granted: &Arc<Granted>,
    abort: &AbortHandle,
    meter: &Arc<Meter>,
) -> Option<RunEnd> {
    if granted.is_open() {
        return None;
    }
    let disk = Disk::new(abort.clone(), meter.clone(), Threads::default());
    let granted = granted.clone();
    tokio::select! {
        biased;
        opened = disk.read(move || granted.open()) => opened.err().map(RunEnd::Unrunnable),
        reason = abort.hard_stopped() => Some(RunEnd::Aborted(reason)),
    }
}

impl preopens::Host for Files<'_> {
    fn get_directories(&mut self) -> wasmtime::Result<Vec<(Fd, String)>> {
        let mut preopens = Vec::with_capacity(self.granted.dirs.len() + 1);
        let granted = self.granted.clone();
        for dir in &granted.dirs {
            let opened = dir.opened().map_err(wasmtime::Error::msg)?;
            let fd = self.push(OpenFile::held_by_host(Descriptor::Dir(opened)))?;
            let quota = dir
                .grant
                .quota
                .zip(dir.ledger.clone())
                .map(|(quota, ledger)| {
                    Arc::new(InQuota::new(ledger, quota, &dir.grant.at, self.log.clone()))
                });
            let at = dir.grant.at.clone();
            let state = FdState {
                quota,
                at: at.clone(),
            };
            self.fds.insert(&fd, state);
            preopens.push((fd, at));
        }
        // The root comes last, because guests rely on the numbers of the directories before it. Libraries use it for
        // every path outside those directories; without it, they would not call the host at all.
        if let Some(nowhere) = nowhere() {
            let fd = self.push(OpenFile::held_by_host(Descriptor::Dir(nowhere)))?;
            self.fds.insert_root(&fd);
            preopens.push((fd, ROOT.to_owned()));
        }
        Ok(preopens)
    }
}
