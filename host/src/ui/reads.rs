//! The values that pages show, each read once for all users.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;

use super::cached::Cached;
use super::samples::Samples;
use crate::sandbox::Catalog;
use crate::store::{DatabaseMetrics, Store, StoreError, add_counts};

/// The maximum number of gates whose keys are read.
const GATES_MAX: usize = 50;
/// The maximum number of keys of a gate that are read.
const GATE_KEYS_MAX: i64 = 9;

/// The database, and the values that were read from it.
pub(super) struct Reads {
    pub(super) store: Store,
    pub(super) catalog: Option<Arc<Catalog>>,
    pub(super) samples: Arc<Samples>,
    queues: Arc<Cached<Vec<Value>>>,
    fair_keys: Arc<Cached<HashMap<String, Value>>>,
    backlog: Arc<Cached<Option<Vec<Value>>>>,
    workers: Arc<Cached<Vec<Value>>>,
    handlers: Arc<Cached<Vec<Value>>>,
    failing: Arc<Cached<Vec<Value>>>,
    recent: Arc<Cached<Value>>,
    metrics: Arc<Cached<DatabaseMetrics>>,
    gates: Arc<Cached<Vec<Value>>>,
}

impl Reads {
    pub(super) fn new(store: Store, catalog: Option<Arc<Catalog>>) -> Self {
        Self {
            store,
            catalog,
            samples: Arc::default(),
            queues: Arc::default(),
            fair_keys: Arc::default(),
            backlog: Arc::default(),
            workers: Arc::default(),
            handlers: Arc::default(),
            failing: Arc::default(),
            recent: Arc::default(),
            metrics: Arc::default(),
            gates: Arc::default(),
        }
    }

    /// Every queue, as in `rouse queue ls --json`, without the keys of fair queues. The numbers of its jobs are those
    /// of the backlog; they are missing if the login may not read the backlog.
    pub(super) async fn queues(&self) -> Result<Vec<Value>, StoreError> {
        let store = self.store.clone();
        let read = async move || store.queue_settings().await;
        let (queues, backlog) = tokio::try_join!(self.queues.get(read), self.read_backlog())?;
        let mut queues = queues.to_vec();
        if let Some(backlog) = &*backlog {
            add_counts(&mut queues, backlog);
        }
        Ok(queues)
    }

    /// The keys of all fair queues that have keys, by queue.
    pub(super) async fn fair_keys(&self) -> Result<Arc<HashMap<String, Value>>, StoreError> {
        let store = self.store.clone();
        let read = async move || store.fair_keys().await;
        self.fair_keys.get(read).await
    }

    /// The backlog, if it is already known: counting the jobs of many lanes takes a long time.
    pub(super) fn known_backlog(&self) -> Option<Vec<Value>> {
        let store = self.store.clone();
        let read = async move || store.backlog(None).await;
        Option::clone(&*self.backlog.known(read)?)
    }

    async fn read_backlog(&self) -> Result<Arc<Option<Vec<Value>>>, StoreError> {
        let store = self.store.clone();
        let read = async move || store.backlog(None).await;
        self.backlog.get(read).await
    }

    /// The rows of `rouse.backlog`. Like the others below: empty if the login may not read them.
    pub(super) async fn backlog(&self) -> Result<Vec<Value>, StoreError> {
        let backlog = self.read_backlog().await?;
        Ok(Option::clone(&*backlog).unwrap_or_default())
    }

    /// The newest incarnation of each worker.
    pub(super) async fn workers(&self) -> Result<Arc<Vec<Value>>, StoreError> {
        let store = self.store.clone();
        let read = async move || Ok(store.workers().await?.unwrap_or_default());
        self.workers.get(read).await
    }

    /// The rows of `rouse.handlers`.
    pub(super) async fn handlers(&self) -> Result<Arc<Vec<Value>>, StoreError> {
        let store = self.store.clone();
        let read = async move || Ok(store.fleet_handlers(None).await?.unwrap_or_default());
        self.handlers.get(read).await
    }

    /// The handlers whose jobs have failed or timed out in the last hour.
    pub(super) async fn failing(&self) -> Result<Arc<Vec<Value>>, StoreError> {
        let store = self.store.clone();
        let read = async move || Ok(store.failing().await?.unwrap_or_default());
        self.failing.get(read).await
    }

    /// Durations and resource usage of the newest ended jobs.
    pub(super) async fn recent(&self) -> Result<Arc<Value>, StoreError> {
        let store = self.store.clone();
        let read = async move || Ok(store.recent(None).await?.unwrap_or_default());
        self.recent.get(read).await
    }

    /// The database metrics: what keeps dead rows.
    pub(super) async fn database_metrics(&self) -> Result<Arc<DatabaseMetrics>, StoreError> {
        let store = self.store.clone();
        self.metrics
            .get(async move || store.database_metrics().await)
            .await
    }

    /// The gates. The first [`GATES_MAX`] have `keys`: those of their keys that have the most jobs.
    pub(super) async fn gates(&self) -> Result<Arc<Vec<Value>>, StoreError> {
        let store = self.store.clone();
        self.gates.get(async move || read_gates(&store).await).await
    }

    /// Forgets what an action may have changed.
    pub(super) fn forget(&self) {
        self.queues.forget();
        self.fair_keys.forget();
        self.backlog.forget();
        self.workers.forget();
    }
}

async fn read_gates(store: &Store) -> Result<Vec<Value>, StoreError> {
    let mut gates = store.gates(None).await?;
    for gate in gates.iter_mut().take(GATES_MAX) {
        let name = gate["name"].as_str().unwrap_or_default().to_owned();
        let keys = store.gate_keys(&name, GATE_KEYS_MAX).await?;
        gate["keys"] = keys.keys.into();
    }
    Ok(gates)
}
