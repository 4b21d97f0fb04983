//! The thread that follows the folder.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use notify::event::{ModifyKind, RenameMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};

use super::file;
use super::folder::{Folder, Trust};
use super::loading::Wake;
use super::set::Published;

/// The scan interval without events: network folders send none, and events get lost.
const RESCAN: Duration = Duration::from_millis(500);

/// While modules are being loaded, ready ones are published together at this interval, because each publication reads
/// the whole folder.
const PUBLISH_EVERY: Duration = Duration::from_millis(100);

/// Starts the thread that follows the folder; it ends with `Wake::Stop`. `events` is the sender of `wakes`.
pub(super) fn start(
    folder: Folder,
    wakes: mpsc::Receiver<Wake>,
    events: mpsc::Sender<Wake>,
    published: Arc<Published>,
) {
    let thread = thread::Builder::new()
        .name("rouse-catalog".into())
        .spawn(move || follow(folder, &published, &wakes, events));
    if let Err(error) = thread {
        tracing::error!(
            "cannot start the thread that follows the handlers folder; changes need a restart: {error}"
        );
    }
}

fn follow(
    mut folder: Folder,
    published: &Published,
    wakes: &mpsc::Receiver<Wake>,
    events: mpsc::Sender<Wake>,
) {
    // Events arrive as long as this value is alive.
    let _watcher = listen(&folder, events);
    let mut renamed = HashSet::new();
    let mut changed = false;
    let (mut scan_at, mut publish_at) = (Instant::now(), Instant::now());
    loop {
        let now = Instant::now();
        if now >= scan_at || !renamed.is_empty() {
            let scan = folder.scan(&Trust::Renamed(std::mem::take(&mut renamed)));
            changed |= scan.changed;
            // Also saves changes that could not be saved before, and the times since which files have been missing.
            folder.save_names();
            scan_at = now + scan.again_in.unwrap_or(RESCAN).min(RESCAN);
        }
        changed |= folder.ends_start();
        if changed && (now >= publish_at || !folder.is_trying()) {
            changed = false;
            folder.settle_names();
            // Saved before the new ownership becomes visible.
            folder.save_names();
            published.publish(folder.handlers());
            publish_at = now + PUBLISH_EVERY;
        }
        let wake_at = match changed {
            true => scan_at.min(publish_at),
            false => scan_at,
        };
        let mut next = wakes.recv_timeout(wake_at.saturating_duration_since(Instant::now()));
        loop {
            match next {
                Ok(Wake::Changed { renamed: paths }) => {
                    scan_at = now;
                    renamed.extend(paths.iter().map(|path| file::name(path)));
                }
                Ok(Wake::Loaded(loaded)) => changed |= folder.finish(loaded),
                Ok(Wake::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => break,
            }
            // Wakes that have arrived in the meantime belong to the same scan.
            next = wakes.recv_timeout(Duration::ZERO);
        }
    }
}

fn listen(folder: &Folder, events: mpsc::Sender<Wake>) -> Option<RecommendedWatcher> {
    let dir = folder.dir().to_owned();
    let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
        let renamed = match event {
            Ok(event) if !is_change(&event, &dir) => return,
            Ok(event)
                if matches!(
                    event.kind,
                    EventKind::Modify(ModifyKind::Name(RenameMode::To))
                ) =>
            {
                event.paths
            }
            Ok(_) | Err(_) => Vec::new(),
        };
        // If there is no receiver, the catalog was dropped.
        let _ = events.send(Wake::Changed { renamed });
    })
    .and_then(|mut watcher| {
        watcher.watch(folder.dir(), RecursiveMode::NonRecursive)?;
        Ok(watcher)
    });
    watcher
        .inspect_err(|error| {
            tracing::warn!(
                dir = %folder.dir().display(),
                "the handlers folder sends no events, so it is scanned twice a second: {error}"
            );
        })
        .ok()
}

/// True if the event may concern the modules in the folder: other files there may be written to all the time.
fn is_change(event: &Event, dir: &Path) -> bool {
    // The host's own reads are not changes.
    let is_read = matches!(event.kind, EventKind::Access(_));
    let mut paths = event.paths.iter();
    // An event without paths means that events have been lost.
    let concerns_modules =
        event.paths.is_empty() || paths.any(|path| path == dir || file::belongs_to_module(path));
    !is_read && concerns_modules
}

#[cfg(test)]
mod tests {
    use notify::event::{AccessKind, DataChange};

    use super::*;

    #[test]
    fn only_events_of_modules_signatures_and_the_folder_are_changes() {
        let dir = Path::new("/handlers");
        let written = EventKind::Modify(ModifyKind::Data(DataChange::Any));
        let is_change = |kind: EventKind, names: &[&str]| {
            let paths = names.iter().map(|name| dir.join(name));
            is_change(&paths.fold(Event::new(kind), Event::add_path), dir)
        };
        for name in ["a.wasm", "a.cwasm", "a.wasm.sig", ""] {
            assert!(is_change(written, &[name]), "{name:?}");
        }
        for name in ["host.log", "a.wasm.part", ".a.wasm", "sig", "notes.sig"] {
            assert!(!is_change(written, &[name]), "{name:?}");
        }
        assert!(is_change(written, &[]), "events have been lost");
        assert!(is_change(written, &["a.wasm.part", "a.wasm"]), "a rename");
        assert!(!is_change(EventKind::Access(AccessKind::Any), &["a.wasm"]));
    }
}
