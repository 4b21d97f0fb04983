//! The graph of a flow, from left to right: jobs in columns by what they wait for, in the colours of their states.

use std::collections::BTreeMap;
use std::collections::HashMap;

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::chart::px;
use super::layout::Chrome;
use crate::flow::{chains, state};
use crate::plural::{choose, counted};

/// Up to this many jobs are drawn one by one; in larger flows, the jobs of a handler in a column share one box.
const SINGLE_MAX: usize = 80;
/// The maximum number of columns: a chain of 10,000 jobs is easier to read as a list.
const COLUMNS_MAX: usize = 120;
/// The maximum number of boxes in a column.
const ROWS_MAX: usize = 60;
/// The maximum number of arrows. Each job may wait for thousands of others.
const EDGES_MAX: usize = 5_000;

const BOX_WIDTH: f64 = 170.0;
const BOX_HEIGHT: f64 = 40.0;
const GAP_X: f64 = 56.0;
const GAP_Y: f64 = 14.0;
/// Longer names are truncated.
const NAME_CHARS_MAX: usize = 21;

/// One box: a job, or several jobs of one handler.
#[derive(Debug, Default, PartialEq)]
struct Node {
    column: usize,
    row: usize,
    name: String,
    /// The number of jobs in each state.
    states: BTreeMap<String, usize>,
    /// The job, if the box stands for one.
    job: Option<i64>,
}

/// Boxes, and the arrows between them.
#[derive(Debug, Default, PartialEq)]
struct Graph {
    nodes: Vec<Node>,
    edges: Vec<(usize, usize)>,
    /// Jobs that are not drawn.
    left_out: usize,
    /// Arrows that are not drawn.
    edges_left_out: usize,
}

/// Lays out the rows of `rouse.flow`, in which each job comes after those that it waits for.
fn layout(jobs: &[Value]) -> Graph {
    let index_of: HashMap<i64, usize> = jobs
        .iter()
        .enumerate()
        .filter_map(|(index, job)| Some((job["chain"].as_i64()?, index)))
        .collect();
    let parents = |at: usize| {
        let known = chains(&jobs[at]).filter_map(|(_, chain)| index_of.get(&chain).copied());
        // Parents have earlier rows; a later row, which has no column yet, is ignored.
        known.filter(move |&parent| parent < at)
    };
    let mut columns = vec![0; jobs.len()];
    for at in 0..jobs.len() {
        columns[at] = parents(at)
            .map(|parent| columns[parent] + 1)
            .max()
            .unwrap_or(0);
    }
    let folds = jobs.len() > SINGLE_MAX;
    let mut graph = Graph::default();
    let mut rows = HashMap::<usize, usize>::new();
    let mut folded = HashMap::<(usize, &str), usize>::new();
    let mut node_of = vec![None; jobs.len()];
    for (at, job) in jobs.iter().enumerate() {
        let column = columns[at];
        let handler = cells::text(job, "handler");
        let known = folded.get(&(column, handler)).copied().filter(|_| folds);
        let node = known.unwrap_or_else(|| {
            let row = rows.entry(column).or_default();
            if column >= COLUMNS_MAX || *row >= ROWS_MAX {
                return usize::MAX;
            }
            *row += 1;
            graph.nodes.push(Node {
                column,
                row: *row - 1,
                name: match folds {
                    true => handler.to_owned(),
                    false => cells::text(job, "name").to_owned(),
                },
                ..Node::default()
            });
            folded.insert((column, handler), graph.nodes.len() - 1);
            graph.nodes.len() - 1
        });
        let Some(drawn) = graph.nodes.get_mut(node) else {
            graph.left_out += 1;
            continue;
        };
        drawn.job = drawn
            .states
            .is_empty()
            .then(|| job["job"].as_i64())
            .flatten();
        *drawn.states.entry(state(job).to_owned()).or_default() += 1;
        node_of[at] = Some(node);
        for parent in parents(at) {
            if let Some(from) = node_of[parent] {
                graph.edges.push((from, node));
            }
        }
    }
    graph.edges.sort_unstable();
    graph.edges.dedup();
    graph.edges_left_out = graph.edges.len().saturating_sub(EDGES_MAX);
    graph.edges.truncate(EDGES_MAX);
    graph
}

/// The colour of a box: that of its most urgent state.
fn tone(states: &BTreeMap<String, usize>) -> &'static str {
    let urgency = ["bad", "busy", "warn", "quiet", "good"];
    let tones: Vec<_> = states.keys().map(|state| cells::tone(state)).collect();
    urgency
        .into_iter()
        .find(|tone| tones.contains(tone))
        .unwrap_or("quiet")
}

/// Draws the flow of these jobs, which are rows of `rouse.flow`. `others`: the number of other jobs of the flow.
pub(super) fn graph(chrome: &Chrome, jobs: &[Value], others: usize) -> Markup {
    let graph = layout(jobs);
    let left_out = graph.left_out + others;
    let columns = graph
        .nodes
        .iter()
        .map(|node| node.column + 1)
        .max()
        .unwrap_or(0);
    let rows = graph
        .nodes
        .iter()
        .map(|node| node.row + 1)
        .max()
        .unwrap_or(0);
    let width = columns as f64 * (BOX_WIDTH + GAP_X);
    let height = rows as f64 * (BOX_HEIGHT + GAP_Y) + GAP_Y;
    let left = |node: &Node| node.column as f64 * (BOX_WIDTH + GAP_X) + 4.0;
    let top = |node: &Node| node.row as f64 * (BOX_HEIGHT + GAP_Y) + GAP_Y;
    html! {
        div class="scroll" tabindex="0" role="region" aria-label="Graph" {
            svg class="graph" width=(px(width)) height=(px(height)) viewBox={ "0 0 " (px(width)) " " (px(height)) } {
                @for (from, to) in &graph.edges {
                    @let (from, to) = (&graph.nodes[*from], &graph.nodes[*to]);
                    @let (x1, y1) = (left(from) + BOX_WIDTH, top(from) + BOX_HEIGHT / 2.0);
                    @let (x2, y2) = (left(to), top(to) + BOX_HEIGHT / 2.0);
                    path class="edge" d={
                        "M" (px(x1)) " " (px(y1)) "C" (px(x1 + GAP_X / 2.0)) " " (px(y1)) " "
                        (px(x2 - GAP_X / 2.0)) " " (px(y2)) " " (px(x2)) " " (px(y2))
                    } {}
                }
                @for node in &graph.nodes { (node_box(chrome, node, left(node), top(node))) }
            }
        }
        @for (left_out, what) in [(left_out, "job"), (graph.edges_left_out, "arrow")] {
            @if left_out > 0 { p class="soft" { (counted(left_out, what)) " " (choose(left_out, "is", "are")) " not drawn." } }
        }
    }
}

fn node_box(chrome: &Chrome, node: &Node, x: f64, y: f64) -> Markup {
    let count: usize = node.states.values().sum();
    let states: Vec<_> = node
        .states
        .iter()
        .map(|(state, jobs)| match count {
            1 => state.replace('_', " "),
            _ => format!("{jobs} {}", state.replace('_', " ")),
        })
        .collect();
    let name = cells::line(&node.name);
    let short: String = name.chars().take(NAME_CHARS_MAX).collect();
    let short = if short.len() < name.len() {
        short + "…"
    } else {
        short
    };
    let below: String = states.join(", ");
    let below: String = below.chars().take(NAME_CHARS_MAX + 4).collect();
    let shape = html! {
        g class={ "node " (tone(&node.states)) } {
            title { (name) ": " (states.join(", ")) }
            rect x=(px(x)) y=(px(y)) width=(px(BOX_WIDTH)) height=(px(BOX_HEIGHT)) rx="7" {}
            text x=(px(x + 10.0)) y=(px(y + 17.0)) { (short) }
            text x=(px(x + 10.0)) y=(px(y + 32.0)) { (below) }
        }
    };
    match node.job {
        Some(id) => html! { a href={ (chrome.base) "/jobs/" (id) } { (shape) } },
        None => shape,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn job(id: i64, name: &str, after: &[i64], state: &str) -> Value {
        let after: serde_json::Map<String, Value> = after
            .iter()
            .map(|parent| (format!("j{parent}"), json!(parent)))
            .collect();
        json!({"job": id, "chain": id, "name": name, "handler": "h", "after": after, "state": state})
    }

    #[test]
    fn each_job_is_to_the_right_of_those_that_it_waits_for() {
        let jobs = [
            job(1, "a", &[], "succeeded"),
            job(2, "b", &[1], "running"),
            job(3, "c", &[1], "queued"),
            job(4, "d", &[2, 3], "queued"),
        ];
        let graph = layout(&jobs);
        let positions: Vec<_> = graph.nodes.iter().map(|it| (it.column, it.row)).collect();
        assert_eq!(positions, [(0, 0), (1, 0), (1, 1), (2, 0)]);
        assert_eq!(graph.edges, [(0, 1), (0, 2), (1, 3), (2, 3)]);
        assert_eq!(graph.nodes[1].job, Some(2));
    }

    #[test]
    fn ten_thousand_jobs_are_folded_by_column_and_handler() {
        let mut jobs = vec![job(1, "first", &[], "succeeded")];
        let middle: Vec<i64> = (2..10_000).collect();
        for id in &middle {
            let state = if id % 2 == 0 { "succeeded" } else { "failed" };
            jobs.push(job(*id, &format!("m{id}"), &[1], state));
        }
        jobs.push(job(10_000, "last", &middle, "queued"));
        let graph = layout(&jobs);
        assert_eq!(graph.nodes.len(), 3);
        assert_eq!(graph.nodes[1].states["failed"], 4_999);
        assert_eq!((graph.nodes[1].job, graph.edges.len()), (None, 2));
        assert_eq!(tone(&graph.nodes[1].states), "bad");
    }

    #[test]
    fn jobs_that_wait_for_very_many_others_have_a_limited_number_of_arrows() {
        // 60 handlers in each column, and each job waits for all jobs of the column before.
        let mut jobs = Vec::new();
        for column in 0..4 {
            for row in 1..=60 {
                let before = (column - 1) * 60 + 1..=column * 60;
                let before: Vec<i64> = before.filter(|id| *id > 0).collect();
                let mut job = job(column * 60 + row, "x", &before, "queued");
                job["handler"] = json!(format!("h{row}"));
                jobs.push(job);
            }
        }
        let graph = layout(&jobs);
        let edges = 3 * 60 * 60;
        assert_eq!(
            (graph.nodes.len(), graph.edges.len(), graph.edges_left_out),
            (240, EDGES_MAX, edges - EDGES_MAX)
        );
        let drawn = super::graph(&Chrome::default(), &jobs, 0).into_string();
        let left_out = format!("{} arrows are not drawn.", edges - EDGES_MAX);
        assert!(drawn.contains(&left_out), "{drawn}");
    }

    #[test]
    fn a_long_chain_is_drawn_up_to_a_limit() {
        let jobs: Vec<Value> = (1..=500)
            .map(|id| job(id, "x", &[id - 1], "queued"))
            .collect();
        let graph = layout(&jobs);
        assert_eq!((graph.nodes.len(), graph.left_out), (COLUMNS_MAX, 380));
    }
}
