//! Explains why no worker takes a job, and what to do.

use serde_json::{Map, Value};

use super::nearest::{did_you_mean, nearest};
use super::text::{plain, strings};
use crate::store::{Store, StoreError};

/// True for a row of `rouse.jobs` that waits for a worker: a queued job, or an orphan.
pub(super) fn waits(job: &Value) -> bool {
    job["state"] == "queued" || job["orphaned_at"].is_string()
}

/// What a job requires of its worker.
pub(super) struct Wanted<'a> {
    pub(super) handler: &'a str,
    pub(super) queue: &'a str,
    pub(super) tags: &'a Value,
}

impl<'a> Wanted<'a> {
    /// The requirements of a row of `rouse.jobs` or `rouse.backlog`.
    pub(super) fn from_row(row: &'a Value) -> Self {
        Self {
            handler: row["handler"].as_str().unwrap_or_default(),
            queue: row["queue"].as_str().unwrap_or_default(),
            tags: &row["tags"],
        }
    }

    /// Warns on standard error if no worker takes the job, with the reason. A misspelt handler and a missing worker
    /// cannot be distinguished here.
    ///
    /// # Errors
    /// If a query fails.
    pub(super) async fn warn_if_unserved(&self, store: &Store) -> Result<(), StoreError> {
        let Some(workers) = store.serving().await? else {
            return Ok(());
        };
        if let Some(why) = self.why_unserved(&workers) {
            eprintln!("rouse: {why}");
        }
        if let Some(since) = store.queue_paused_at(self.queue).await? {
            let queue = plain(self.queue);
            eprintln!(
                "rouse: queue {queue} has been paused since {since} (`rouse queue resume {queue}`)"
            );
        }
        Ok(())
    }

    /// Warns on standard error of payload keys that the handler does not know on any worker. They are probably
    /// misspelt.
    ///
    /// # Errors
    /// If a query fails.
    pub(super) async fn warn_of_unknown_keys(
        &self,
        store: &Store,
        payload: &str,
    ) -> Result<(), StoreError> {
        let Ok(payload) = serde_json::from_str::<Map<String, Value>>(payload) else {
            return Ok(());
        };
        let Some(rows) = store.fleet_handlers(Some(self.handler)).await? else {
            return Ok(());
        };
        let known: Option<Vec<_>> = rows
            .iter()
            .map(|row| row["payload_keys"].as_array())
            .collect();
        let known: Vec<&str> = match known {
            Some(known) if !known.is_empty() => known
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect(),
            // No worker has the handler, or a worker does not list its keys.
            Some(_) | None => return Ok(()),
        };
        for key in payload.keys().filter(|key| !known.contains(&key.as_str())) {
            eprintln!(
                "rouse: no worker knows the key {} in a payload of {}{}",
                plain(key),
                plain(self.handler),
                did_you_mean(nearest(key, known.iter().copied()))
            );
        }
        Ok(())
    }

    /// Why none of these active workers takes the job, and what to do; `None` if one does. Follows the same rule as the
    /// view `rouse.backlog`.
    pub(super) fn why_unserved(&self, workers: &[Value]) -> Option<String> {
        let handler = plain(self.handler);
        let having = |worker: &&Value| has(&worker["handlers"], self.handler);
        let able: Vec<_> = workers.iter().filter(having).collect();
        if able.is_empty() && workers.iter().any(|worker| worker["loading"] == true) {
            return Some(format!(
                "no running worker has the handler {handler} yet; one of them is loading its modules"
            ));
        }
        if able.is_empty() {
            let names = workers
                .iter()
                .flat_map(|worker| strings(&worker["handlers"]));
            return Some(format!(
                "no running worker has the handler {handler}; the job waits for one (`rouse handlers` lists the handlers of a folder, `rouse handlers ls` those of the fleet){}",
                did_you_mean(nearest(self.handler, names))
            ));
        }
        let serving: Vec<_> = able
            .iter()
            .filter(|worker| {
                worker["queues"].as_array().is_none_or(Vec::is_empty)
                    || has(&worker["queues"], self.queue)
            })
            .collect();
        let queue = plain(self.queue);
        if serving.is_empty() {
            return Some(format!(
                "no running worker with the handler {handler} serves the queue {queue}; start one with --queue {queue}, or empty the queue with `rouse queue drain {queue}`"
            ));
        }
        let tags: Vec<&str> = strings(self.tags).collect();
        let tagged: Vec<_> = serving
            .iter()
            .filter(|worker| tags.iter().all(|tag| has(&worker["tags"], tag)))
            .collect();
        if let Some(first) = tagged.first() {
            let parked = |worker: &Value| worker["parked"][self.handler].as_str().map(plain);
            let is_parked = tagged.iter().all(|worker| parked(worker).is_some());
            return parked(first)
                .filter(|_| is_parked)
                .map(|why| format!("the handler {handler} is parked: {why}"));
        }
        let tags = plain(&tags.join(", "));
        Some(format!(
            "no running worker with the handler {handler} has the tags that the job requires ({tags}); start one with them (`rouse serve --tag`, or `tags` in rouse.toml)"
        ))
    }
}

fn has(list: &Value, wanted: &str) -> bool {
    strings(list).any(|text| text == wanted)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_missing_handler_is_named_first_then_the_queue_then_the_tags() {
        let workers = [
            json!({"handlers": ["a"], "queues": ["mail"], "tags": ["gpu"]}),
            json!({"handlers": ["a"], "queues": [], "tags": []}),
            json!({"handlers": ["c"], "queues": ["mail"], "tags": []}),
        ];
        let why = |handler, queue, tags: Value| {
            let row = json!({"handler": handler, "queue": queue, "tags": tags});
            Wanted::from_row(&row).why_unserved(&workers)
        };
        assert_eq!(why("a", "any", json!([])), None);
        assert_eq!(why("a", "mail", json!(["gpu"])), None);
        let parked =
            json!({"handlers": ["a"], "queues": [], "tags": [], "parked": {"a": "no privilege"}});
        let row = json!({"handler": "a", "queue": "q", "tags": []});
        let on = |workers: &[Value]| Wanted::from_row(&row).why_unserved(workers);
        assert!(on(std::slice::from_ref(&parked)).is_some_and(|why| why.contains("no privilege")));
        assert_eq!(on(&[parked, workers[1].clone()]), None);
        let says = |why: Option<String>, part: &str| {
            assert!(
                why.as_ref().is_some_and(|why| why.contains(part)),
                "{why:?}"
            )
        };
        says(why("b", "mail", json!([])), "has the handler b; the job");
        let starts = [json!({"handlers": [], "queues": [], "tags": [], "loading": true})];
        let row = json!({"handler": "b", "queue": "mail", "tags": []});
        let starting = Wanted::from_row(&row).why_unserved(&starts);
        says(starting, "has the handler b yet; one of them is loading");
        says(why("c", "other", json!([])), "serves the queue other");
        says(why("a", "other", json!(["gpu"])), "requires (gpu)");
        says(
            why("a", "mail", json!(["gpu", "big"])),
            "requires (gpu, big)",
        );
    }
}
