use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use tokio::runtime::Builder;
use tokio::task::{JoinHandle, spawn_blocking, yield_now};

use super::*;

/// Occupies a thread for each lookup, as the system does, until the test opens `gate`.
#[derive(Debug)]
struct Slow {
    gate: Arc<Mutex<mpsc::Receiver<()>>>,
    now: Arc<AtomicUsize>,
    max: Arc<AtomicUsize>,
}

impl Resolver for Slow {
    fn resolve<'a>(&'a self, name: &'a str) -> Addresses<'a> {
        Box::pin(async move {
            assert_ne!(name, "panic.test", "the test wants a panic");
            if name == "fast.test" {
                return Ok(vec![Ipv4Addr::LOCALHOST.into()]);
            }
            let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
            self.max.fetch_max(now, Ordering::SeqCst);
            let gate = self.gate.clone();
            let lookup = spawn_blocking(move || {
                // Nothing is sent; dropping the sender opens the gate.
                gate.lock().unwrap().recv().unwrap_err();
            });
            lookup.await.unwrap();
            self.now.fetch_sub(1, Ordering::SeqCst);
            Err(io::Error::other("no such name"))
        })
    }
}

/// Lookups that are stuck until the gate opens.
struct Stuck {
    lookups: Arc<Lookups>,
    gate: Option<mpsc::Sender<()>>,
    now: Arc<AtomicUsize>,
    max: Arc<AtomicUsize>,
}

impl Stuck {
    fn new() -> Self {
        let (gate, opened) = mpsc::channel();
        let (now, max) = (Arc::default(), Arc::default());
        let resolver = Slow {
            gate: Arc::new(Mutex::new(opened)),
            now: Arc::clone(&now),
            max: Arc::clone(&max),
        };
        Self {
            lookups: Arc::new(Lookups::new(Arc::new(resolver))),
            gate: Some(gate),
            now,
            max,
        }
    }

    fn start(&self, handler: &str) -> JoinHandle<io::Result<Vec<IpAddr>>> {
        let (lookups, handler) = (self.lookups.clone(), Arc::from(handler));
        tokio::spawn(async move { lookups.look_up(&handler, "slow.test").await })
    }

    /// Starts lookups, and abandons all of them once no more can start.
    async fn start_and_abandon(&self, handler: &str, count: usize) {
        let started: Vec<_> = (0..count).map(|_| self.start(handler)).collect();
        settle().await;
        for one in started {
            one.abort();
            one.await.expect_err("it was abandoned");
        }
    }

    fn now(&self) -> usize {
        self.now.load(Ordering::SeqCst)
    }

    async fn open(mut self) {
        self.gate = None;
        // Once all permits are free, no lookup is running.
        let all = u32::try_from(LOOKUPS_MAX).unwrap();
        let under_way = &self.lookups.under_way;
        drop(under_way.acquire_many(all).await.expect("it is open"));
        assert_eq!(self.now(), 0);
    }
}

/// Lets each task run as far as it can.
async fn settle() {
    for _ in 0..1000 {
        yield_now().await;
    }
}

#[tokio::test]
async fn an_abandoned_lookup_counts_until_it_has_ended() {
    let stuck = Stuck::new();
    for _ in 0..5 {
        stuck.start_and_abandon("a", 20).await;
        assert_eq!(stuck.now(), LOOKUPS_PER_HANDLER_MAX);
    }
    let max = stuck.max.clone();
    stuck.open().await;
    assert_eq!(max.load(Ordering::SeqCst), LOOKUPS_PER_HANDLER_MAX);
}

#[tokio::test]
async fn a_handler_with_stuck_lookups_does_not_block_others() {
    let stuck = Stuck::new();
    stuck.start_and_abandon("a", 20).await;
    let waiting = stuck.start("a");
    let found = stuck.lookups.look_up(&"b".into(), "fast.test").await;
    assert_eq!(found.unwrap(), [IpAddr::V4(Ipv4Addr::LOCALHOST)]);
    assert!(!waiting.is_finished());
    stuck.open().await;
    let found = waiting.await.expect("it was not abandoned");
    assert!(found.unwrap_err().to_string().contains("no such name"));
}

#[test]
fn lookups_take_no_more_than_their_share_of_threads() {
    // One thread is left for other work, such as files.
    let runtime = Builder::new_current_thread()
        .max_blocking_threads(LOOKUPS_MAX + 1)
        .build()
        .unwrap();
    runtime.block_on(async {
        let stuck = Stuck::new();
        for handler in 0..10 {
            stuck.start_and_abandon(&handler.to_string(), 60).await;
        }
        assert_eq!(stuck.now(), LOOKUPS_MAX);
        assert_eq!(spawn_blocking(|| 7).await.unwrap(), 7);
        stuck.open().await;
    });
}

#[tokio::test]
async fn a_panicking_resolver_fails_only_its_request() {
    let stuck = Stuck::new();
    for _ in 0..=LOOKUPS_MAX {
        let looked = stuck.lookups.look_up(&"a".into(), "panic.test").await;
        assert!(looked.unwrap_err().to_string().contains("panicked"));
    }
    stuck.open().await;
}

#[test]
fn the_system_reports_this_machines_own_addresses() {
    let own = super::SystemResolver.own().expect("its addresses");
    assert!(own.contains(&IpAddr::from([127, 0, 0, 1])), "{own:?}");
}
