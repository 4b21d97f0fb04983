//! A fan-out over photographs: a job for each of them, and one summary.

use rouse_sdk::{Ctx, Error, Job, OnFailure, Priority, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Deserialize, Serialize, JsonSchema)]
pub(crate) struct Photo {
    name: String,
}

#[derive(Serialize, JsonSchema)]
pub(crate) struct Summary {
    photos: u64,
    bytes: u64,
    failed: Vec<String>,
}

/// Enqueues a job for each photograph, and continues its chain with the summary of all.
///
/// All of these jobs are committed with the success of this attempt, or none. Jobs that wait for this job also wait for
/// the summary.
#[handler(
    name = "photos.import",
    capabilities = ["enqueue:photos.*"]
)]
pub(crate) fn import(ctx: &Ctx, names: Vec<String>) -> Result<(), Error> {
    let mut after = Job::of::<summary>(&());
    for name in names {
        let photo = Photo { name };
        let resized = ctx.enqueue(Job::of::<resize>(&photo).priority(Priority::Low))?;
        after = after.after_or(photo.name, &resized, OnFailure::Run);
    }
    ctx.continue_with(after)
}

/// Stands in for the work on a photograph, and returns its new size.
#[handler(name = "photos.resize", max_attempts = 3)]
pub(crate) fn resize(photo: Photo) -> Result<u64, Error> {
    match photo.name.strip_suffix(".jpg") {
        Some(name) => Ok(1_000 + name.len() as u64),
        None => Err(Error::permanent(format_args!(
            "{} is not a JPEG",
            photo.name
        ))),
    }
}

/// Adds up the results, and lists the photographs that have failed.
#[handler(name = "photos.summary")]
pub(crate) fn summary(ctx: &Ctx, (): ()) -> Result<Summary, Error> {
    let mut summary = Summary {
        photos: 0,
        bytes: 0,
        failed: Vec::new(),
    };
    for photo in &ctx.results()? {
        match photo.failure() {
            None => {
                summary.photos += 1;
                summary.bytes += photo.output::<u64>()?;
            }
            Some(_) => summary.failed.push(photo.name().to_owned()),
        }
    }
    Ok(summary)
}

#[cfg(test)]
mod tests {
    use rouse_sdk::{End, TestCtx};
    use serde_json::json;

    #[test]
    fn an_import_enqueues_a_job_for_each_photograph_and_a_summary_of_all() {
        // With the summary, these are as many jobs as an attempt may enqueue by default.
        let ctx = TestCtx::new();
        let names: Vec<String> = (0..999).map(|nth| format!("{nth}.jpg")).collect();
        ctx.run::<super::import>(json!(names)).unwrap();
        assert_eq!(ctx.enqueued().len(), 999);
        assert_eq!(ctx.enqueued()[7].payload, json!({"name": "7.jpg"}));
        let summary = ctx.continued_with().unwrap();
        let after = summary.options["after"].as_object().unwrap();
        assert_eq!(after.len(), 999);
        assert_eq!(after["7.jpg"], json!({"job": -8, "on_failure": "run"}));
    }

    #[test]
    fn a_summary_counts_the_photographs_and_lists_those_that_have_failed() {
        let ctx = TestCtx::new();
        ctx.set_parent("a.jpg", End::Succeeded, json!(1_001));
        ctx.set_parent("b.jpg", End::Succeeded, json!(1_001));
        ctx.set_parent("c.txt", End::Failed, json!({"message": "not a JPEG"}));
        assert_eq!(
            ctx.run::<super::summary>(json!(null)).unwrap(),
            json!({"photos": 2, "bytes": 2_002, "failed": ["c.txt"]})
        );
    }

    #[test]
    fn a_photograph_is_resized_and_another_file_is_refused() {
        let ctx = TestCtx::new();
        assert_eq!(
            ctx.run::<super::resize>(json!({"name": "a.jpg"})).unwrap(),
            1_001
        );
        let refused = ctx.run::<super::resize>(json!({"name": "a.txt"}));
        assert!(refused.unwrap_err().permanent);
    }
}
