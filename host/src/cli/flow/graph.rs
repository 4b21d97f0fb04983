//! Draws the graph of a flow as a tree: each job below its deepest parent.

use std::collections::HashMap;

use rouse_display::flow::{chains, state};
use serde_json::Value;

/// One line of the drawing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Line {
    /// The name of the job behind the branches of the tree; or the number of jobs that are left out.
    pub(super) drawn: String,
    /// Its state; for a queued job that waits for others, `waiting` or `stuck`.
    pub(super) state: String,
    pub(super) handler: String,
    /// Its id.
    pub(super) job: String,
    /// What it waits or waited for.
    pub(super) after: String,
}

/// Draws the rows of `rouse.flow`, in which each job comes after those that it waits for. At most `limit` jobs are
/// drawn below each job, and as many at the top; one more line counts the others.
pub(super) fn draw(jobs: &[Value], limit: usize) -> Vec<Line> {
    let at: HashMap<i64, usize> = jobs
        .iter()
        .enumerate()
        .filter_map(|(index, job)| Some((job["chain"].as_i64()?, index)))
        .collect();
    let mut depths = vec![0; jobs.len()];
    let mut roots = Vec::new();
    let mut below = vec![Vec::new(); jobs.len()];
    for (index, job) in jobs.iter().enumerate() {
        let parents = chains(job).filter_map(|(_, chain)| at.get(&chain).copied());
        // Rows are in the order of the graph; anything else is ignored.
        let parents = parents.filter(|parent| *parent < index);
        match parents.max_by_key(|parent| (depths[*parent], *parent)) {
            None => roots.push(index),
            Some(parent) => {
                depths[index] = depths[parent] + 1;
                below[parent].push(index);
            }
        }
    }
    let mut lines = Vec::new();
    // Jobs to draw, the next one last, with the branches in front of them and below.
    let mut stack = Vec::new();
    push(&mut stack, &roots, limit, None);
    while let Some((next, front, under)) = stack.pop() {
        match next {
            Next::Rest(count) => lines.push(Line {
                drawn: format!("{front}… {count} more (show --all)"),
                ..Line::default()
            }),
            Next::Job(index) => {
                lines.push(line(&jobs[index], &front, jobs, &at));
                push(&mut stack, &below[index], limit, Some(&under));
            }
        }
    }
    lines
}

enum Next {
    Job(usize),
    /// This many jobs are left out.
    Rest(usize),
}

/// Adds siblings to the stack, the first one on top.
fn push(
    stack: &mut Vec<(Next, String, String)>,
    indexes: &[usize],
    limit: usize,
    under: Option<&str>,
) {
    let drawn = &indexes[..indexes.len().min(limit)];
    let rest = indexes.len() - drawn.len();
    let mut siblings: Vec<Next> = drawn.iter().map(|index| Next::Job(*index)).collect();
    if rest > 0 {
        siblings.push(Next::Rest(rest));
    }
    let last = siblings.len().saturating_sub(1);
    for (n, next) in siblings.into_iter().enumerate().rev() {
        let (front, below) = match (under, n == last) {
            (None, _) => (String::new(), String::new()),
            (Some(under), true) => (format!("{under}└─ "), format!("{under}   ")),
            (Some(under), false) => (format!("{under}├─ "), format!("{under}│  ")),
        };
        stack.push((next, front, below));
    }
}

fn line(job: &Value, front: &str, jobs: &[Value], at: &HashMap<i64, usize>) -> Line {
    let text = |key: &str| job[key].as_str().unwrap_or_default().to_owned();
    let mut parents: Vec<String> = chains(job)
        .map(|(on_failure, chain)| {
            let name = at
                .get(&chain)
                .and_then(|index| jobs[*index]["name"].as_str());
            let name = name.map_or_else(|| format!("job {chain}"), str::to_owned);
            match on_failure {
                None => name,
                Some(word) => format!("{name} ({word})"),
            }
        })
        .collect();
    let count = parents.len();
    if count > 4 {
        parents.truncate(3);
        parents.push(format!("{} more", count - 3));
    }
    Line {
        drawn: format!("{front}{}", text("name")),
        state: state(job).to_owned(),
        handler: text("handler"),
        job: job["job"].to_string(),
        after: match parents.is_empty() {
            true => String::new(),
            false => format!("after {}", parents.join(", ")),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn job(id: i64, name: &str, after: Value) -> Value {
        let waits_for = if after.is_null() {
            json!(null)
        } else {
            json!([1])
        };
        json!({"name": name, "job": id, "chain": id, "handler": "x", "state": "queued", "after": after, "waits_for": waits_for})
    }

    fn drawn(jobs: &[Value], limit: usize) -> Vec<String> {
        draw(jobs, limit)
            .into_iter()
            .map(|line| format!("{} | {}", line.drawn, line.after))
            .collect()
    }

    #[test]
    fn a_job_is_drawn_below_its_deepest_parent_and_names_all_of_them() {
        let jobs = [
            job(1, "charge", json!(null)),
            job(2, "reserve", json!(null)),
            job(3, "pack", json!({"r": 2})),
            job(
                4,
                "ship",
                json!({"paid": 1, "packed": {"job": 3, "on_failure": "run"}}),
            ),
            job(5, "thank", json!({"1": 1, "outside": 99})),
        ];
        assert_eq!(
            drawn(&jobs, 10),
            [
                "charge | ",
                "└─ thank | after charge, job 99",
                "reserve | ",
                "└─ pack | after reserve",
                "   └─ ship | after charge, pack (run)",
            ]
        );
        let lines = draw(&jobs, 10);
        assert_eq!(
            (lines[0].state.as_str(), lines[1].state.as_str()),
            ("queued", "waiting")
        );
    }

    #[test]
    fn a_job_that_waits_for_a_failed_one_is_stuck() {
        let mut ship = job(2, "ship", json!({"paid": {"job": 1, "on_failure": "wait"}}));
        ship["is_stuck"] = json!(true);
        let lines = draw(&[job(1, "charge", json!(null)), ship], 10);
        assert_eq!(lines[1].state, "stuck");
    }

    #[test]
    fn a_job_that_has_several_names_is_drawn_once_with_the_strictest_effect() {
        let named = |effect: &str| json!({"job": 1, "on_failure": effect});
        for (after, drawn_after) in [
            (json!({"a": named("run"), "b": 1}), "after charge"),
            (
                json!({"a": named("run"), "b": named("wait")}),
                "after charge (wait)",
            ),
        ] {
            let jobs = [job(1, "charge", json!(null)), job(2, "ship", after)];
            assert_eq!(drawn(&jobs, 10)[1], format!("└─ ship | {drawn_after}"));
        }
    }

    #[test]
    fn many_jobs_below_one_are_counted() {
        let mut jobs = vec![job(1, "root", json!(null))];
        let parents: Vec<i64> = (2..=6).collect();
        jobs.extend(
            parents
                .iter()
                .map(|id| job(*id, &format!("n{id}"), json!([]))),
        );
        for job in &mut jobs[1..] {
            job["after"] = json!({"root": 1});
        }
        let after = parents.iter().map(|id| (id.to_string(), json!(id)));
        jobs.push(job(7, "last", Value::Object(after.collect())));
        assert_eq!(
            drawn(&jobs, 2),
            [
                "root | ",
                "├─ n2 | after root",
                "├─ n3 | after root",
                "└─ … 3 more (show --all) | ",
            ]
        );
        assert_eq!(
            drawn(&jobs, 10).last().unwrap(),
            "   └─ last | after n2, n3, n4, 2 more"
        );
    }
}
