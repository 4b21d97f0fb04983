//! The result of a run: faults, cases, violations, times.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use rouse_workbench::percentiles::Percentiles;
use serde_json::{Map, Value, json};

use super::check::{self, Known, Rule, Violation};
use super::cuts::{At, How};
use super::ledger::{Request, Response, Run};
use super::load::Kind;
use super::plan::Fault;
use super::tally;
use super::world::World;

/// Minimum share of the jobs that the rate implies; nothing is enqueued during an outage.
const ACCEPTED_SHARE_MIN: f64 = 1.0 / 3.0;
/// A kind of job may be missing by chance if fewer than this are expected (in one of a thousand runs at this number).
const EXPECTED_MIN: f64 = 7.0;
/// A run of this length must have no gap, that is, nothing that it should have covered but has not.
const WHOLE_MINUTES: f64 = 5.0;
/// The number of gaps that a shorter run may have by chance: on a busy machine, a fault that is planned three times in
/// a minute may be skipped each time.
const GAPS_MAX: usize = 3;
/// A run of this length cuts effects at each boundary in each way.
const EVERY_CUT_MINUTES: f64 = 20.0;
/// Maximum number of violations for which the full history of the job is written.
const IN_FULL_MAX: usize = 40;
/// Maximum number of violations that are printed.
const PRINTED_MAX: usize = 12;

pub(super) struct Report {
    run: Run,
    /// How often each fault was injected, and how often it was skipped.
    faults: BTreeMap<Fault, (u64, u64)>,
    /// How often effects were cut at each boundary.
    cuts: BTreeMap<(At, How), u64>,
    rules: Vec<(&'static Rule, u64, usize)>,
    counts: Vec<(&'static str, u64)>,
    /// The measurements of rules that measure something.
    times: Vec<(&'static Rule, &'static str, Percentiles)>,
    pub(super) violations: Vec<(&'static str, Violation)>,
    first_in_full: Option<String>,
    /// What the run should have covered, but has not.
    gaps: Vec<String>,
    /// Reasons why the run fails.
    pub(super) failures: Vec<String>,
}

impl Report {
    pub(super) fn of(known: &Known<'_>) -> Self {
        let world = known.world;
        let mut report = Self {
            run: world.run.clone(),
            faults: tally::faults(world),
            cuts: tally::cuts(world),
            rules: Vec::new(),
            counts: tally::jobs(world),
            times: Vec::new(),
            violations: Vec::new(),
            first_in_full: None,
            gaps: Vec::new(),
            failures: Vec::new(),
        };
        for (rule, found) in check::check(known) {
            report
                .rules
                .push((rule, found.checked, found.violations.len()));
            if !found.violations.is_empty() {
                let count = found.violations.len();
                report.failures.push(format!(
                    "{}: {count} violations of the guarantee: {}",
                    rule.name, rule.guarantee
                ));
            } else if found.checked == 0 && rule.is_needed(&world.run) {
                report
                    .gaps
                    .push(format!("{}: the run had no case to check", rule.name));
            }
            if let Ok(percentiles) = Percentiles::of(found.measured_ms) {
                report.times.push((rule, found.measures, percentiles));
            }
            let violations = found.violations.into_iter();
            report.violations.extend(violations.map(|v| (rule.name, v)));
        }
        let first = report.violations.iter().find_map(|(_, v)| v.job);
        report.first_in_full = first.map(|job| check::job_history(known, job));
        report.check_work(world);
        report.find_gaps(world);
        if !permits(report.gaps.len(), &report.run) {
            report.failures.append(&mut report.gaps);
        }
        report
    }

    /// A run without its load, or without any of its faults, does not prove anything.
    fn check_work(&mut self, world: &World) {
        let accepted = world.calls.iter().filter(|call| {
            // Jobs that faults enqueue do not count as load.
            matches!(&call.request, Request::Enqueue { spec, .. } if spec.kind != Kind::FromFault)
                && matches!(call.response, Response::Ok(_))
        });
        let wanted = self.accepted_min();
        let accepted = accepted.count();
        if (accepted as f64) < wanted {
            self.failures.push(format!(
                "only {accepted} jobs were accepted: the load needs at least {wanted:.0}"
            ));
        }
        let happened = |fault: &Fault| self.faults.get(fault).is_some_and(|(done, _)| *done > 0);
        if !self.run.faults.is_empty() && !self.run.faults.iter().any(happened) {
            self.failures.push("none of the faults happened".to_owned());
        }
    }

    /// Adds the kinds of jobs and the faults that did not occur.
    fn find_gaps(&mut self, world: &World) {
        let wanted = self.accepted_min();
        let kinds = tally::kinds(world);
        for (kind, share) in Kind::ALL {
            if wanted * share as f64 / 1000.0 >= EXPECTED_MIN && !kinds.contains(&kind) {
                self.gaps
                    .push(format!("no job of the kind {kind:?} was accepted"));
            }
        }
        for fault in &self.run.faults {
            if self.faults.get(fault).is_none_or(|(done, _)| *done == 0) {
                self.gaps
                    .push(format!("the fault {} never happened", fault.name()));
            }
        }
        if self.run.minutes >= EVERY_CUT_MINUTES && self.run.faults.contains(&Fault::CutEffects) {
            for ((at, how), count) in &self.cuts {
                if *count == 0 {
                    self.gaps
                        .push(format!("effects were never cut at {at:?} by {how:?}"));
                }
            }
        }
    }

    /// The number of jobs that a run must accept.
    fn accepted_min(&self) -> f64 {
        f64::from(self.run.rate) * self.run.minutes * 60.0 * ACCEPTED_SHARE_MIN
    }

    /// Each violation with the full history of its job.
    pub(super) fn violations_in_full(&self, known: &Known<'_>) -> String {
        let mut text = String::new();
        let mut written = BTreeSet::new();
        for (rule, violation) in &self.violations {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{rule}: {}", violation.message);
            if let Some(job) = violation.job
                && written.len() < IN_FULL_MAX
                && written.insert(job)
            {
                text.push_str(&check::job_history(known, job));
            }
            text.push('\n');
        }
        text
    }

    pub(super) fn print(&self, as_json: bool, kept: Option<&Path>) {
        if as_json {
            println!("{}", self.to_json(kept));
            return;
        }
        println!("{}", self.fault_table());
        if self.run.faults.contains(&Fault::CutEffects) {
            println!("{}", self.cut_table());
        }
        println!("{}", self.rule_table());
        let counts: Vec<_> = self
            .counts
            .iter()
            .map(|(label, n)| format!("{n} {label}"))
            .collect();
        println!("{}", counts.join(", "));
        for (_, measures, times) in &self.times {
            println!(
                "{measures}: p50 {:.0} ms, p99 {:.0} ms, longest {:.0} ms",
                times.p50, times.p99, times.max
            );
        }
        for (rule, violation) in self.violations.iter().take(PRINTED_MAX) {
            println!("VIOLATION of {rule}: {}", violation.message);
        }
        if let Some(first) = &self.first_in_full {
            println!("history of the job of the first violation:\n{first}");
        }
        if self.violations.len() > PRINTED_MAX {
            println!("… and {} more", self.violations.len() - PRINTED_MAX);
        }
        for gap in &self.gaps {
            println!("not covered: {gap}");
        }
        for failure in &self.failures {
            println!("FAILED: {failure}");
        }
        if let Some(kept) = kept {
            println!("ledger, evidence and logs: {}", kept.display());
            if !self.violations.is_empty() {
                println!("histories of all violations: violations.txt in this folder");
            }
        }
        println!("to repeat this run: {}", self.command());
    }

    fn command(&self) -> String {
        let Run {
            seed,
            minutes,
            hosts,
            producers,
            rate,
            faults,
            ..
        } = &self.run;
        let mut command = format!(
            "cargo xtask chaos --minutes {minutes} --seed {seed} --hosts {hosts} --producers {producers} --rate {rate}"
        );
        if faults.len() < <Fault as clap::ValueEnum>::value_variants().len() {
            let names: Vec<_> = faults.iter().map(|fault| fault.name()).collect();
            command.push_str(" --faults ");
            command.push_str(&names.join(","));
        }
        command
    }

    fn fault_table(&self) -> Table {
        let mut table = table(["fault", "done", "skipped"]);
        for (fault, (done, skipped)) in &self.faults {
            table.add_row([fault.name(), done.to_string(), skipped.to_string()]);
        }
        table
    }

    fn cut_table(&self) -> Table {
        let mut table = table([
            "effects cut at",
            "terminated",
            "host killed",
            "server crashed",
        ]);
        for at in At::ALL {
            let counts = How::ALL.map(|how| self.cuts[&(at, how)].to_string());
            let name = match at {
                At::Fence => "their fence",
                At::Statement => "a statement",
                At::Answered => "the last response",
                At::Commit => "their commit",
            };
            table.add_row(std::iter::once(name.to_owned()).chain(counts));
        }
        table
    }

    fn rule_table(&self) -> Table {
        let mut table = table(["guarantee", "cases", "violations"]);
        for (rule, checked, violations) in &self.rules {
            table.add_row([
                format!("{}: {}", rule.name, rule.guarantee),
                checked.to_string(),
                violations.to_string(),
            ]);
        }
        table
    }

    fn to_json(&self, kept: Option<&Path>) -> Value {
        let faults: Map<String, Value> = self
            .faults
            .iter()
            .map(|(fault, (done, skipped))| {
                (fault.name(), json!({"done": done, "skipped": skipped}))
            })
            .collect();
        let cuts: Vec<Value> = self
            .cuts
            .iter()
            .map(|((at, how), count)| json!({"at": at, "how": how, "count": count}))
            .collect();
        let rules: Map<String, Value> = self
            .rules
            .iter()
            .map(|(rule, checked, violations)| {
                (
                    rule.name.into(),
                    json!({"cases": checked, "violations": violations}),
                )
            })
            .collect();
        let times: Map<String, Value> = self
            .times
            .iter()
            .map(|(rule, _, t)| {
                (
                    rule.name.into(),
                    json!({"p50": t.p50, "p99": t.p99, "max": t.max}),
                )
            })
            .collect();
        let counts: Map<String, Value> = self
            .counts
            .iter()
            .map(|(label, count)| ((*label).into(), (*count).into()))
            .collect();
        let violations: Vec<_> = self
            .violations
            .iter()
            .map(|(rule, v)| json!({"rule": rule, "job": v.job, "message": v.message}))
            .collect();
        json!({
            "run": self.run,
            "command": self.command(),
            "faults": faults,
            "effects_cut": cuts,
            "rules": rules,
            "counts": counts,
            "measured_ms": times,
            "violations": violations,
            "gaps": self.gaps,
            "failures": self.failures,
            "folder": kept,
        })
    }
}

/// Whether a run may have this number of gaps.
fn permits(gaps: usize, run: &Run) -> bool {
    gaps <= if run.minutes < WHOLE_MINUTES {
        GAPS_MAX
    } else {
        0
    }
}

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    table.set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_short_run_may_have_a_few_gaps() {
        let run = |minutes| Run {
            minutes,
            ..Run::default()
        };
        assert!(permits(GAPS_MAX, &run(1.0)));
        assert!(!permits(GAPS_MAX + 1, &run(1.0)));
        assert!(permits(0, &run(WHOLE_MINUTES)));
        assert!(!permits(1, &run(WHOLE_MINUTES)));
    }
}
