//! Decides which capabilities a heartbeat sends: all of them may be several megabytes, and while modules load, each
//! heartbeat adds a few.

use serde_json::{Map, Value};

/// The capabilities of this worker that the database has, by handler.
#[derive(Debug, Default)]
pub(in crate::worker) struct Reported {
    /// Null: unknown, because a heartbeat got no response.
    known: Map<String, Value>,
    /// What the worker had when the database refused a change. The change is not sent again until something else
    /// changes.
    refused: Option<Map<String, Value>>,
    /// The number of heartbeats whose changes the database has. `None`: unknown, because a heartbeat got no response.
    count: Option<i64>,
}

impl Reported {
    /// The capabilities with which the worker has registered.
    pub(in crate::worker) fn registered(capabilities: &Value) -> Self {
        Self {
            known: capabilities.as_object().cloned().unwrap_or_default(),
            refused: None,
            count: Some(0),
        }
    }

    /// The changes to report; null for a handler that the worker no longer has. `None` if there are none.
    pub(super) fn changes(&self, current: &Map<String, Value>) -> Option<Value> {
        if self.refused.as_ref() == Some(current) {
            return None;
        }
        let changed = current
            .iter()
            .filter(|(name, capability)| self.known.get(*name) != Some(*capability))
            .map(|(name, capability)| (name.clone(), capability.clone()));
        let gone = self
            .known
            .keys()
            .filter(|name| !current.contains_key(*name));
        let gone = gone.map(|name| (name.clone(), Value::Null));
        let changes: Map<String, Value> = changed.chain(gone).collect();
        (!changes.is_empty()).then_some(Value::Object(changes))
    }

    /// Notes that the database has accepted a heartbeat with these changes, and now has the changes of `count`
    /// heartbeats. False if that is not the number that it has accepted: a failover may have lost some without a failed
    /// heartbeat. Then all capabilities are sent again.
    pub(super) fn accepted(
        &mut self,
        changes: Option<&Value>,
        current: Map<String, Value>,
        count: i64,
    ) -> bool {
        let expected = self.count.map(|count| count + i64::from(changes.is_some()));
        let is_expected = expected.is_none_or(|expected| expected == count);
        if !is_expected {
            self.lost(current);
        } else if changes.is_some() {
            self.known = current;
            self.refused = None;
        }
        self.count = Some(count);
        is_expected
    }

    /// Notes that the database has refused the changes.
    pub(super) fn refused(&mut self, current: Map<String, Value>) {
        self.refused = Some(current);
    }

    /// Notes that a heartbeat got no response, or could not be sent: the database may have its changes or not, and
    /// after an outage, it may have lost earlier ones. All are sent again.
    pub(super) fn lost(&mut self, current: Map<String, Value>) {
        self.count = None;
        self.refused = None;
        self.known.extend(current);
        self.known
            .values_mut()
            .for_each(|known| *known = Value::Null);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// This many handlers.
    fn handlers(count: usize) -> Map<String, Value> {
        let handler = |n| (format!("handler.{n}"), json!({"version": "1.0.0"}));
        (0..count).map(handler).collect()
    }

    fn bytes(capabilities: &Value) -> usize {
        capabilities.to_string().len()
    }

    /// Sends the changes to a database that has accepted all earlier ones; returns them.
    fn send(reported: &mut Reported, current: Map<String, Value>) -> Option<Value> {
        let changes = reported.changes(&current);
        let before = reported.count.unwrap_or(7);
        let count = before + i64::from(changes.is_some());
        assert!(reported.accepted(changes.as_ref(), current, count));
        changes
    }

    #[test]
    fn each_of_two_hundred_handlers_that_load_one_after_another_is_sent_once() {
        let mut reported = Reported::default();
        let mut sent = 0;
        for count in 1..=200 {
            let changes = send(&mut reported, handlers(count)).expect("one is new");
            assert_eq!(changes.as_object().map(Map::len), Some(1));
            sent += bytes(&changes);
            assert_eq!(reported.changes(&handlers(count)), None);
        }
        let all = bytes(&Value::Object(handlers(200)));
        assert!(sent <= all + 200, "{sent} bytes were sent for {all}");
    }

    #[test]
    fn changed_and_removed_capabilities_are_sent() {
        let mut reported = Reported::registered(&json!({"a": {"version": "1"}, "b": {}, "c": {}}));
        let Value::Object(current) = json!({"a": {"version": "2"}, "c": {}, "d": {}}) else {
            unreachable!("it is an object");
        };
        let changes = send(&mut reported, current.clone());
        assert_eq!(
            changes,
            Some(json!({"a": {"version": "2"}, "b": null, "d": {}}))
        );
        assert_eq!(reported.changes(&current), None);
    }

    #[test]
    fn after_a_lost_response_all_are_sent_again_and_those_that_may_be_gone_are_removed() {
        let mut reported = Reported::registered(&json!({"handler.0": {}, "gone": {}}));
        // The database may have these or not.
        reported.lost(handlers(3));
        let changes = send(&mut reported, handlers(2));
        let mut expected = handlers(2);
        expected.insert("gone".into(), Value::Null);
        expected.insert("handler.2".into(), Value::Null);
        assert_eq!(changes, Some(Value::Object(expected)));
        assert_eq!(reported.changes(&handlers(2)), None);
    }

    #[test]
    fn accepted_changes_that_the_database_has_lost_are_sent_again() {
        // The next heartbeat has no changes, or has one.
        for next in [3, 4] {
            let mut reported = Reported::registered(&Value::Object(handlers(2)));
            send(&mut reported, handlers(3));
            // The new server lacks that change.
            let changes = reported.changes(&handlers(next));
            let count = i64::from(changes.is_some());
            assert!(!reported.accepted(changes.as_ref(), handlers(next), count));
            let all = Some(Value::Object(handlers(next)));
            assert_eq!(send(&mut reported, handlers(next)), all);
            assert_eq!(send(&mut reported, handlers(next)), None);
        }
    }

    #[test]
    fn refused_changes_are_sent_again_with_the_next_change() {
        let mut reported = Reported::default();
        reported.refused(handlers(3));
        assert_eq!(reported.changes(&handlers(3)), None);
        assert_eq!(
            reported.changes(&handlers(2)),
            Some(Value::Object(handlers(2)))
        );
        send(&mut reported, handlers(2));
        assert!(reported.changes(&handlers(3)).is_some());
    }

    #[test]
    fn after_a_refusal_and_an_outage_all_are_sent_again() {
        let mut reported = Reported::registered(&json!({"handler.0": {"version": "1.0.0"}}));
        reported.refused(handlers(3));
        reported.lost(handlers(3));
        let all = Value::Object(handlers(3));
        assert_eq!(reported.changes(&handlers(3)), Some(all));
    }
}
