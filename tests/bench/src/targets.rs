//! The targets of the figures, in the order of the last table of `cargo xtask bench all`.

use serde::Deserialize;

use super::report::Unit;

/// One figure's target.
pub(super) struct Target {
    /// The key of the figure.
    pub(super) key: &'static str,
    pub(super) at_least: f64,
    pub(super) aim: f64,
    pub(super) better: Better,
}

/// The side of a bound on which a figure is good.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Better {
    Higher,
    Lower,
}

/// A figure compared with its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Aim,
    AtLeast,
    Missed,
}

const fn higher(key: &'static str, at_least: f64, aim: f64) -> Target {
    Target {
        key,
        at_least,
        aim,
        better: Better::Higher,
    }
}

const fn lower(key: &'static str, at_least: f64, aim: f64) -> Target {
    Target {
        key,
        at_least,
        aim,
        better: Better::Lower,
    }
}

/// In the units of the figures: seconds, milliseconds, microseconds, bytes, percent.
pub(super) const TARGETS: [Target; 61] = [
    higher("drain.ratio", 0.40, 0.55),
    higher("drain.reuse.ratio", 0.60, 0.90),
    lower("drain.cpu_postgres", 18.0, 12.0),
    lower("drain.wal", 1.2 * 1024.0, 0.9 * 1024.0),
    lower("latency.notify.acknowledged.p50", 0.8, 0.4),
    lower("latency.notify.acknowledged.p99", 6.0, 3.0),
    lower("latency.polling.acknowledged.p50", 15.0, 8.0),
    higher("enqueue.busy.32.ratio", 0.75, 0.9),
    higher("enqueue.asleep.32.ratio", 0.25, 0.5),
    higher("enqueue.many.ratio", 0.6, 0.8),
    higher("decay.held.ratio", 0.90, 0.98),
    higher("decay.pending_unknown.ratio", 0.90, 0.98),
    higher("decay.pending_unserved.ratio", 0.90, 0.98),
    higher("decay.pending_low.ratio", 0.90, 0.98),
    higher("decay.finished.ratio", 0.90, 0.98),
    higher("decay.old.ratio", 0.95, 0.98),
    higher("scale.lanes_1000.ratio", 0.7, 0.95),
    higher("scale.fair_10000.ratio", 0.8, 0.9),
    higher("scale.fair_shares_1.jain", 0.95, 0.99),
    higher("scale.fair_shares_3.jain", 0.95, 0.99),
    lower("scale.fair_cold.ratio", 2.0, 1.5),
    lower("scale.fair_cpu_costs_1.off", 5.0, 2.0),
    lower("scale.fair_cpu_costs_3.off", 5.0, 2.0),
    lower("scale.fair_cpu_weights_1.off", 5.0, 2.0),
    lower("scale.fair_cpu_weights_3.off", 5.0, 2.0),
    higher("scale.gates_open.ratio", 0.9, 0.95),
    lower("scale.gates_one_1.p50", 2.0, 1.0),
    lower("scale.gates_one_3.p50", 2.0, 1.0),
    lower("scale.gates_one_1.exceeded", 0.0, 0.0),
    lower("scale.gates_one_3.exceeded", 0.0, 0.0),
    higher("scale.modes_drr.kept", 0.8, 0.9),
    higher("scale.modes_shards.kept", 0.95, 1.0),
    lower("scale.late_idle.worst", 1500.0, 50.0),
    lower("scale.late_busy.worst", 1500.0, 50.0),
    lower("scale.late_until.worst", 1500.0, 50.0),
    lower("idle.1.transactions", 2.0, 0.5),
    lower("idle.1.cpu", 0.5, 0.1),
    lower("idle.10.transactions", 2.0, 0.5),
    lower("idle.10.cpu", 0.5, 0.1),
    lower("drain.reuse.cpu_postgres", 18.0, 12.0),
    lower("drain.reuse.wal", 1.2 * 1024.0, 0.9 * 1024.0),
    lower("drain.rss_running", MB_300, MB_120),
    // These targets were decided for flows; no other queue has figures to compare with.
    higher("flows.fan.ratio", 0.8, 0.95),
    higher("flows.chains.ratio", 0.8, 0.95),
    higher("flows.continued.ratio", 0.8, 0.95),
    lower("flows.hops.started.p50", 1.0, 0.8),
    lower("flows.sleepers.resumed_within", 60.0, 30.0),
    lower("flows.sleepers.rss_growth", 20e6, 5e6),
    lower("flows.resumptions.ratio", 1.5, 1.2),
    lower("flows.held_up.cancel.max", 50.0, 20.0),
    lower("flows.held_up.fail.max", 50.0, 20.0),
    lower("flows.held_up.retry.max", 50.0, 20.0),
    lower("flows.schedules.started", 1000.0, 500.0),
    higher("effects.ratio", 1.0, 3.0),
    higher("enqueue.contract.ratio", 0.9, 0.97),
    higher("enqueue.contract.many.ratio", 0.7, 0.9),
    lower("enqueue.contract.check", 10.0, 5.0),
    lower("dashboard.slowest", 100.0, 50.0),
    lower("dashboard.statement", 250.0, 100.0),
    lower("dashboard.postgres", 2.0, 1.0),
    higher("dashboard.ratio", 0.97, 0.99),
];

const MB_300: f64 = 300e6;
const MB_120: f64 = 120e6;

impl Target {
    pub(super) fn of(key: &str) -> Option<&'static Self> {
        TARGETS.iter().find(|target| target.key == key)
    }

    pub(super) fn verdict(&self, value: f64) -> Verdict {
        let reaches = |bound: f64| match self.better {
            Better::Higher => value >= bound,
            Better::Lower => value <= bound,
        };
        if reaches(self.aim) {
            Verdict::Aim
        } else if reaches(self.at_least) {
            Verdict::AtLeast
        } else {
            Verdict::Missed
        }
    }

    /// Formats a bound, with the sign of its good side.
    pub(super) fn bound(&self, bound: f64, unit: Unit) -> String {
        let sign = match self.better {
            Better::Higher => "≥",
            Better::Lower => "≤",
        };
        format!("{sign} {}", unit.format(bound))
    }
}

impl Verdict {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Aim => "aim",
            Self::AtLeast => "at least",
            Self::Missed => "MISSED",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_compared_on_its_better_side() {
        let ratio = higher("a", 0.4, 0.55);
        assert_eq!(ratio.verdict(0.55), Verdict::Aim);
        assert_eq!(ratio.verdict(0.54), Verdict::AtLeast);
        assert_eq!(ratio.verdict(0.39), Verdict::Missed);
        let delay = lower("b", 6.0, 3.0);
        assert_eq!(delay.verdict(2.9), Verdict::Aim);
        assert_eq!(delay.verdict(6.0), Verdict::AtLeast);
        assert_eq!(delay.verdict(6.1), Verdict::Missed);
    }

    #[test]
    fn no_figure_has_two_targets() {
        for (index, target) in TARGETS.iter().enumerate() {
            assert!(TARGETS[..index].iter().all(|other| other.key != target.key));
        }
    }
}
