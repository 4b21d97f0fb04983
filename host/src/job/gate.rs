//! Gates that decide which jobs may start.

use std::collections::BTreeMap;

/// A gate that acts in claims: `rouse.set_gate`. The database decides what it permits; a worker knows which lanes are
/// behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimGate {
    /// Its name.
    pub name: String,
    /// Its queue; `None` means all.
    pub queue: Option<String>,
    /// Its handler; `None` means all.
    pub handler: Option<String>,
    /// The values by which it divides jobs: `tenant`, `source`, `handler`, `queue`, and paths in the payload.
    pub key: Vec<String>,
    /// The limit.
    pub limit: ClaimLimit,
    /// All of its settings, as text: if they change, closed lanes may open.
    pub settings: String,
}

/// The limit of a gate that acts in claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimLimit {
    /// The number of running jobs (`max_concurrent`).
    Running,
    /// The rate at which jobs start (`throttle`).
    Starts,
    /// Jobs start together (`batch`), at most this many.
    Batch(usize),
}

impl ClaimGate {
    /// The key of the jobs of a lane, or `None` if this gate does not apply to them. Jobs without its values share a
    /// key.
    pub fn key_of(
        &self,
        queue: &str,
        handler: &str,
        values: &BTreeMap<String, String>,
    ) -> Option<Vec<String>> {
        let is_of =
            |gate: &Option<String>, own: &str| gate.as_deref().is_none_or(|gate| gate == own);
        let applies = is_of(&self.queue, queue) && is_of(&self.handler, handler);
        let value = |by: &String| match by.as_str() {
            "queue" => queue.to_owned(),
            "handler" => handler.to_owned(),
            _ => values.get(by).cloned().unwrap_or_default(),
        };
        applies.then(|| self.key.iter().map(value).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_divides_the_jobs_of_its_queue_and_handler_by_its_key() {
        let gate = ClaimGate {
            name: "g".into(),
            queue: None,
            handler: Some("email.send".into()),
            key: vec!["tenant".into(), "queue".into()],
            limit: ClaimLimit::Running,
            settings: String::new(),
        };
        let acme = [("tenant".to_owned(), "acme".to_owned())].into();
        assert_eq!(
            gate.key_of("mail", "email.send", &acme),
            Some(vec!["acme".into(), "mail".into()])
        );
        assert_eq!(
            gate.key_of("mail", "email.send", &BTreeMap::new()),
            Some(vec![String::new(), "mail".into()])
        );
        assert_eq!(gate.key_of("mail", "email.read", &acme), None);
        let gate = ClaimGate {
            queue: Some("other".into()),
            handler: None,
            ..gate
        };
        assert_eq!(gate.key_of("mail", "email.send", &acme), None);
        assert!(gate.key_of("other", "email.read", &acme).is_some());
    }
}
