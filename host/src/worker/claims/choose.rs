//! Chooses the lanes from which jobs are claimed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::Claims;
use crate::sandbox::{BootTime, Handler};
use crate::store::{Lane, StoreError};
use crate::worker::claim::HostLimit;
use crate::worker::lanes::Serving;
use crate::worker::policy::Policy;

/// The maximum number of attempts of a handler that run at the same time on this host.
fn max_at_once(policy: &Policy) -> Option<usize> {
    policy.concurrency.and_then(|max| usize::try_from(max).ok())
}

impl Claims<'_> {
    /// Chooses the lanes to serve, or the new ones among them, by the loaded handlers, by the queues and tags of the
    /// settings, and by the leased shards and the incarnation of this worker.
    pub(in crate::worker) fn choose_lanes(&mut self) {
        let handlers = self.shared.catalog.current();
        let sql = self.shared.sql.version();
        let me = *self.shared.presence.incarnation.borrow();
        let are_known = self.chosen_by.as_ref().is_some_and(|(before, of, was)| {
            Arc::ptr_eq(before, &handlers) && (*of, *was) == (sql, me)
        });
        let own = self.shared.shards.own(BootTime::now());
        let are_known = !self.lanes.set_own(own) && are_known;
        if are_known && !self.lanes.has_unchosen() {
            return;
        }
        let settings = &self.shared.settings;
        // The jobs of a parked handler wait.
        let served = |name: &str| {
            let handler = handlers.get(name)?;
            (!self.shared.sql.is_parked(handler)).then_some(handler)
        };
        let policy = |handler: &Handler| Policy::resolve(&handler.manifest, &settings.overrides);
        let lease_ms =
            |policy: &Policy| i64::try_from(policy.lease.as_millis()).unwrap_or(i64::MAX);
        let bound: Vec<(&String, &Arc<Handler>)> = settings
            .sources
            .iter()
            .filter_map(|(source, name)| Some((source, served(name)?)))
            .collect();
        // The handler that will run is not known before the claim, so lanes that are served by source get the longest
        // of these leases.
        let bound_lease_ms = bound
            .iter()
            .map(|(_, handler)| lease_ms(&policy(handler)))
            .max();
        let sources: Vec<String> = bound.iter().map(|(source, _)| (*source).clone()).collect();
        if sources.iter().any(|source| !self.sources.contains(source)) {
            // The last search by source did not cover this one.
            self.by_source_at = Instant::now();
        }
        self.sources = sources;
        let unbound = settings.sources.iter();
        let unbound = unbound.filter(|(_, name)| served(name).is_none());
        self.unbound
            .set(unbound.map(|(source, _)| source.clone()).collect());
        // There may be thousands of lanes and a thousand queues.
        let mut positions: HashMap<&str, usize> = HashMap::new();
        for (position, queue) in settings.queues.iter().enumerate() {
            positions.entry(queue).or_insert(position);
        }
        let serving = |lane: &Lane| {
            let queue_index = match positions.is_empty() {
                true => 0,
                false => *positions.get(&*lane.queue)?,
            };
            if !lane.tags.iter().all(|tag| settings.tags.contains(tag)) {
                return None;
            }
            let policy = served(&lane.handler).map(|handler| policy(handler));
            Some(Serving {
                lease_ms: policy.as_ref().map(lease_ms).or(bound_lease_ms)?,
                queue_index,
                by_source: policy.is_none(),
                orphans_only: lane.inbox_of().is_some_and(|worker| worker != me),
                max_at_once: policy.and_then(|policy| max_at_once(&policy)),
            })
        };
        if !are_known {
            let limit = |handler: &Handler| {
                let name = handler.manifest.name.as_str();
                let max = max_at_once(&policy(handler))?;
                let handler = name.into();
                Some((name.to_owned(), HostLimit { handler, max }))
            };
            let names = handlers.names();
            let all = names.iter().filter_map(|name| handlers.get(name));
            self.host_limits = all.filter_map(|handler| limit(handler)).collect();
            let takes_batches = |handler: &&Arc<Handler>| handler.manifest.takes_batches();
            let all = names.iter().filter_map(|name| handlers.get(name));
            let all = all.filter(takes_batches);
            self.take_batches = all.map(|handler| handler.manifest.name.clone()).collect();
            // The leases were checked for other lanes. The claims must not overlook orphans in lanes that are newly
            // served, for instance because the statements of their handler were accepted.
            self.checked_at = SystemTime::UNIX_EPOCH;
        }
        let sharded = self.lanes.sharded().len();
        match are_known {
            true => self.lanes.serve_new(serving),
            false => self.lanes.serve(serving),
        }
        // New lanes only add queues.
        if !are_known || self.lanes.sharded().len() > sharded {
            let names = handlers.names();
            let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
            names.retain(|name| served(name).is_some());
            self.lease_shards(&names, &bound);
        }
        self.chosen_by = Some((handlers, sql, me));
    }

    /// Sets the queues whose shards are leased: the sharded queues of which this worker serves a lane.
    fn lease_shards(&self, handlers: &[&str], bound: &[(&String, &Arc<Handler>)]) {
        let settings = &self.shared.settings;
        let mut queues: Vec<String> = self.lanes.sharded().iter().cloned().collect();
        queues.sort_unstable();
        // Empty strings separate the three lists: no handler, source or tag has an empty name.
        let mut sources: Vec<&str> = bound.iter().map(|(source, _)| source.as_str()).collect();
        let mut tags: Vec<&str> = settings.tags.iter().map(String::as_str).collect();
        sources.sort_unstable();
        tags.sort_unstable();
        let serves = [handlers, &sources, &tags].join(&"");
        self.shared.shards.want(queues, &serves);
    }

    /// Reads new lanes from the catalog. True if there are any.
    pub(in crate::worker) async fn read_catalog(&mut self) -> Result<bool, StoreError> {
        let after = self.lanes.read_after();
        let fair = self.lanes.fair_version();
        let catalog = self.shared.store.catalog_after(after, fair).await?;
        let change = self.lanes.learn(catalog.lanes);
        if change.removed {
            self.shared.costs.retain(|lane| self.lanes.knows(lane));
            self.unbound.retain(|lane| self.lanes.knows(lane));
        }
        // `|` makes all of these calls, regardless of what the first returns.
        let is_new = self.lanes.learn_fair(catalog.fair)
            | self.lanes.set_gates(catalog.gates)
            | self.lanes.set_sharded(catalog.sharded);
        if is_new || change.removed {
            self.chosen_by = None;
        }
        self.choose_lanes();
        Ok(change.new)
    }
}
