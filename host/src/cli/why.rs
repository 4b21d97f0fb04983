//! `rouse why`: the reasons why a job has not started.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::attempt_error::cell;
use super::number::job_id;
use super::target::{EXIT_NO_JOB, Target, no_job, seen};
use super::text::as_json;
use crate::job::JobId;

/// Options of `rouse why`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
One sentence for each thing that keeps the job from starting, and what would change it: its time, the jobs that it waits for, \
a paused queue, no worker that can run it, gates, jobs that are ahead of it, busy workers. The same as rouse.why(id) in SQL.\n\
Needs the role rouse_producer, rouse_observer or rouse_operator.\n\
Exit codes: 0 found · 3 no such job")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The job's id, as rouse.enqueue returned it
    #[arg(value_parser = job_id)]
    id: i64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Explains why the job has not started.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let reasons = seen(store.why(JobId(args.id)).await?)?;
    if reasons.is_empty() {
        eprintln!("rouse: {}", no_job(args.id));
        return Ok(ExitCode::from(EXIT_NO_JOB));
    }
    match args.json {
        true => println!("{}", as_json(json!({"why": reasons}))),
        false => println!("{}", sentences(&reasons)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Rows of `rouse.why`, each with its remedy on a line of its own, indented.
pub(super) fn sentences(reasons: &[Value]) -> String {
    let mut lines = Vec::new();
    for row in reasons {
        lines.push(format!("  {}", cell(&row["sentence"])));
        if !row["remedy"].is_null() {
            lines.push(format!("    → {}", cell(&row["remedy"])));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remedy_is_below_its_sentence_and_control_characters_are_escaped() {
        let reasons = [
            json!({"sentence": "Queue a has been paused.", "remedy": "`rouse queue resume a`"}),
            json!({"sentence": "It waits for \u{1b}[31m.", "remedy": null}),
        ];
        let text = sentences(&reasons);
        let paused = "  Queue a has been paused.\n    → `rouse queue resume a`\n  It waits";
        assert!(text.starts_with(paused), "{text}");
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }
}
