//! The lanes of a scenario: one for each tenant.

use std::sync::Arc;

use rouse_turns::Place;

use crate::gates::{Key, Limit};
use crate::server::Job;
use crate::{Nanos, Sabotage, Scenario};

/// What all hosts and the server know about a lane.
#[derive(Debug)]
pub(crate) struct Lane {
    /// The index of its class.
    pub(crate) class: u16,
    /// Where it takes its turns.
    pub(crate) place: Place,
    /// Its weight in the scenario.
    pub(crate) weight: f64,
    /// Tenants of the same group share by weight, if the same hosts serve them: those behind no gate, and those behind
    /// the same gates with one key for all. `None` if a gate limits this tenant alone.
    pub(crate) group: Option<usize>,
    /// Its keys, one for each of its gates.
    pub(crate) keys: Vec<Key>,
    /// The keys that limit running jobs.
    pub(crate) limits: Vec<Key>,
}

impl Lane {
    /// True if a gate limits how many of its jobs start in a period.
    pub(crate) fn is_throttled(&self) -> bool {
        self.keys.len() > self.limits.len()
    }

    /// A job that is enqueued at this time.
    pub(crate) fn job(&self, lane: u32, enqueued_at: Nanos) -> Job {
        Job {
            enqueued_at,
            lane,
            class: self.class,
            is_limited: !self.limits.is_empty(),
            is_new: true,
        }
    }
}

/// The lanes of a scenario; those of a class are neighbours.
pub(crate) fn for_scenario(scenario: &Scenario) -> Vec<Lane> {
    let queue: Arc<str> = "q".into();
    let mut lanes = Vec::new();
    let groups = groups(scenario);
    for ((class, of), group) in (0_u16..).zip(&scenario.classes).zip(groups) {
        for _ in 0..of.tenants {
            let number = u32::try_from(lanes.len()).expect("a number of tenants");
            let is_favoured = number == 0 && scenario.sabotage == Some(Sabotage::Weights);
            let key = |gate: &usize| Key {
                gate: *gate,
                key: if scenario.gates[*gate].by_tenant {
                    number
                } else {
                    0
                },
            };
            let keys: Vec<Key> = of.gates.iter().map(key).collect();
            let limits = keys.iter().copied();
            let limits = limits
                .filter(|key| matches!(scenario.gates[key.gate].limit, Limit::Running { .. }));
            lanes.push(Lane {
                class,
                place: Place {
                    class: [1, 0],
                    queue: queue.clone(),
                    key: number.to_string().into(),
                    share: if is_favoured {
                        2.0 * of.weight
                    } else {
                        of.weight
                    },
                },
                weight: of.weight,
                group,
                limits: limits.collect(),
                keys,
            });
        }
    }
    lanes
}

/// The group of each class.
fn groups(scenario: &Scenario) -> Vec<Option<usize>> {
    let mut behind: Vec<&[usize]> = vec![&[]];
    let mut groups = Vec::new();
    for class in &scenario.classes {
        let gates = class.gates.as_slice();
        if gates.iter().any(|gate| scenario.gates[*gate].by_tenant) {
            groups.push(None);
            continue;
        }
        let known = behind.iter().position(|known| *known == gates);
        groups.push(known.or(Some(behind.len())));
        if known.is_none() {
            behind.push(gates);
        }
    }
    groups
}
