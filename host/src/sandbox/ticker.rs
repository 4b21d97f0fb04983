//! The clock that interrupts guests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use anyhow::Context;
use wasmtime::Engine;

/// Advances the engine's epoch while guests run; sleeps while no guest runs, so that an idle host uses no CPU.
pub(super) struct Ticker {
    shared: Arc<TickerShared>,
    thread: Thread,
}

struct TickerShared {
    running: AtomicUsize,
    stop: AtomicBool,
}

/// Advances the epoch while it exists.
pub(super) struct Ticking<'a>(&'a TickerShared);

impl Ticker {
    pub(super) fn start(engine: Engine, tick: Duration) -> anyhow::Result<Self> {
        let shared = Arc::new(TickerShared {
            running: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let thread = thread::Builder::new()
            .name("rouse-ticker".into())
            .spawn({
                let shared = shared.clone();
                move || {
                    while !shared.stop.load(Ordering::Acquire) {
                        if shared.running.load(Ordering::Acquire) == 0 {
                            // An `unpark` between the load and here makes this return at once.
                            thread::park();
                        } else {
                            thread::sleep(tick);
                            engine.increment_epoch();
                        }
                    }
                }
            })
            .context("start the clock that interrupts guests")?
            .thread()
            .clone();
        Ok(Self { shared, thread })
    }

    /// Advances the epoch until the returned guard is dropped.
    pub(super) fn tick(&self) -> Ticking<'_> {
        if self.shared.running.fetch_add(1, Ordering::AcqRel) == 0 {
            self.thread.unpark();
        }
        Ticking(&self.shared)
    }
}

impl Drop for Ticking<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.thread.unpark();
    }
}
