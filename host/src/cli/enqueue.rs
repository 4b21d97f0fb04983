//! `rouse enqueue`: one job, from the shell.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use serde_json::{Map, Value, json};

use super::number::between;
use super::payload;
use super::served::Wanted;
use super::target::Target;
use super::text::as_json;
use crate::config::Environment;
use crate::duration;
use crate::store::{EnqueueRequest, EnqueueResult};

/// Options of `rouse enqueue`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The handler, for instance text.stats
    handler: String,

    /// The payload; `-` reads it from standard input
    #[arg(value_name = "JSON", default_value = "{}")]
    payload: String,

    /// The queue; default: `default`
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,

    /// The tenant of the job
    #[arg(long)]
    tenant: Option<String>,

    /// The source that triggers the job
    #[arg(long)]
    source: Option<String>,

    /// high, normal or low
    #[arg(long)]
    priority: Option<String>,

    /// Run the job after this delay, for instance 90s or 2h
    #[arg(long = "in", value_name = "TIME", value_parser = duration::argument)]
    delay: Option<Duration>,

    /// Run the job at this time, for instance 2027-01-31T08:00Z
    #[arg(long, value_name = "TIME", conflicts_with = "delay")]
    at: Option<String>,

    /// The maximum number of attempts; default: the handler's own
    #[arg(long, value_name = "N", value_parser = between(1_i32, 1_000))]
    max_attempts: Option<i32>,

    /// Unique among the live jobs of the handler and tenant: if such a job exists, its id is printed and nothing is
    /// added
    #[arg(long, value_name = "KEY")]
    unique_key: Option<String>,

    /// How long a claim is valid without renewal, 2s to 1d; default: the handler's own
    #[arg(long, value_name = "TIME", value_parser = duration::argument_above_zero)]
    lease: Option<Duration>,

    /// How long an attempt may run, at most 30d; default: the handler's own. If rouse.toml sets a timeout for the
    /// handler, the shorter of the two applies
    #[arg(long, value_name = "TIME", value_parser = duration::argument_above_zero)]
    timeout: Option<Duration>,

    /// The time within which the job has to end, with all its attempts, retries and waits, at most 3660d; it counts from
    /// now, or from the time of --in or --at. A job that has not ended by then fails; default: none
    #[arg(long, value_name = "TIME", value_parser = duration::argument_above_zero)]
    job_timeout: Option<Duration>,

    /// Run the job after the end of job ID (repeat for several). If job ID fails, the new job is cancelled; with `:run`
    /// it runs in any case, and with `:wait` it waits until job ID has been retried and has succeeded. NAME describes
    /// job ID in `rouse job`; default: the id
    #[arg(long = "after", value_name = "[NAME=]ID[:ON_FAILURE]", value_parser = dependency)]
    after: Vec<(String, Value)>,

    /// A tag that the worker must have (repeat for several)
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,

    /// Grants of this job, fewer than the handler's, for instance {"http": ["api.example.com"], "memory_mb": 32};
    /// default: all
    #[arg(long, value_name = "JSON")]
    grants: Option<String>,

    /// The trace to which the job belongs, a W3C traceparent; default: $TRACEPARENT, else none
    #[arg(long, value_name = "TRACEPARENT")]
    trace: Option<String>,

    /// Print {"id": …, "created": …, "differs": [arguments in which the live job with the key differs]}; `created` is
    /// false if a live job has the key, or a gate has merged the job with an earlier one
    #[arg(long)]
    json: bool,
}

/// Enqueues and prints the id.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let payload = payload::read(args.payload)?;
    let store = args.target.checked_store().await?;
    let (handler, tags) = (args.handler.clone(), json!(args.tags));
    let payload_text = payload.clone();
    let queue = args.queue.clone().unwrap_or_else(|| "default".into());
    // A worker may have bound a source to another handler.
    let is_bound = args.source.is_some();
    let after = after(args.after)?;
    let has_key = args.unique_key.is_some();
    let done = store
        .enqueue(&EnqueueRequest {
            handler: args.handler,
            payload,
            queue: args.queue,
            tenant: args.tenant,
            source: args.source,
            priority: args.priority,
            delay_secs: args.delay.map(|delay| delay.as_secs_f64()),
            run_at: args.at,
            max_attempts: args.max_attempts,
            unique_key: args.unique_key,
            tags: args.tags,
            grants: args.grants,
            lease_secs: args.lease.map(|lease| lease.as_secs_f64()),
            timeout_secs: args.timeout.map(|timeout| timeout.as_secs_f64()),
            job_timeout_secs: args.job_timeout.map(|timeout| timeout.as_secs_f64()),
            after,
            trace: args.trace.or_else(|| Environment.traceparent()),
        })
        .await?;
    if done.created && !is_bound {
        let wanted = Wanted {
            handler: &handler,
            queue: &queue,
            tags: &tags,
        };
        // These are hints: the job is enqueued even if the login may not see the workers.
        let _ = wanted.warn_if_unserved(&store).await;
        let _ = wanted.warn_of_unknown_keys(&store, &payload_text).await;
    }
    if args.json {
        let done = json!({"id": done.id.0, "created": done.created, "differs": done.differs});
        println!("{}", as_json(done));
        return Ok(ExitCode::SUCCESS);
    }
    println!("{}", done.id);
    if !done.created {
        eprintln!("rouse: no job was added: {}", earlier(&done, has_key));
    }
    Ok(ExitCode::SUCCESS)
}

/// The reason why no job was added.
fn earlier(done: &EnqueueResult, has_key: bool) -> String {
    let id = done.id;
    match (has_key, done.differs.is_empty()) {
        (false, _) => format!("a gate has merged it with job {id}"),
        // A gate comes before the key.
        (true, true) => {
            format!("job {id} has the unique key, or a gate has merged it with that job")
        }
        (true, false) => {
            let differs = done.differs.join(", ");
            format!("job {id} has the unique key, with a different {differs}")
        }
    }
}

/// Parses `[NAME=]ID[:ON_FAILURE]` into an entry of `after`.
fn dependency(text: &str) -> Result<(String, Value), String> {
    let (name, job) = match text.rsplit_once('=') {
        Some((name, job)) => (Some(name), job),
        None => (None, text),
    };
    let (id, on_failure) = match job.split_once(':') {
        Some((id, on_failure)) => (id, Some(on_failure)),
        None => (job, None),
    };
    let number = id.parse().ok().filter(|number: &i64| *number > 0);
    let number = number.ok_or_else(|| {
        format!("{id:?} is not a job id; for instance 17, charge=17 or charge=17:run")
    })?;
    let entry = match on_failure {
        None => json!(number),
        Some("cancel" | "run" | "wait") => json!({"job": number, "on_failure": on_failure}),
        Some(other) => return Err(format!("{other:?} is not cancel, run or wait")),
    };
    Ok((name.unwrap_or(id).to_owned(), entry))
}

/// The argument `after`: all entries by name. `None` if there are none.
fn after(entries: Vec<(String, Value)>) -> anyhow::Result<Option<String>> {
    let mut after = Map::new();
    for (name, entry) in entries {
        if after.contains_key(&name) {
            anyhow::bail!("--after has two jobs with the name {name}");
        }
        after.insert(name, entry);
    }
    Ok((!after.is_empty()).then(|| Value::Object(after).to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dependency_has_an_id_and_optionally_a_name_and_the_effect_of_a_failure() {
        let parsed = |text: &str| dependency(text).map(|(name, job)| format!("{name}: {job}"));
        assert_eq!(parsed("17").unwrap(), "17: 17");
        assert_eq!(parsed("charge=17").unwrap(), "charge: 17");
        assert_eq!(
            parsed("a=b=17:run").unwrap(),
            r#"a=b: {"job":17,"on_failure":"run"}"#
        );
        assert_eq!(
            parsed("charge").unwrap_err(),
            "\"charge\" is not a job id; for instance 17, charge=17 or charge=17:run"
        );
        assert_eq!(
            parsed("17:stop").unwrap_err(),
            "\"stop\" is not cancel, run or wait"
        );
    }

    #[test]
    fn two_dependencies_with_one_name_are_refused() {
        let entry = |text: &str| dependency(text).unwrap();
        assert_eq!(after(Vec::new()).unwrap(), None);
        assert_eq!(
            after(vec![entry("1"), entry("b=2")]).unwrap().as_deref(),
            Some(r#"{"1":1,"b":2}"#)
        );
        let error = after(vec![entry("a=1"), entry("a=2")]).unwrap_err();
        assert_eq!(error.to_string(), "--after has two jobs with the name a");
    }
}
