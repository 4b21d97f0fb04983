//! The recorded steps of a job, and the limits on recording more.

use std::collections::HashMap;
use std::sync::Arc;

use serde::de::IgnoredAny;

use crate::job::{RecordedStep, RecordedWait};
use crate::sandbox::bindings::rouse::handler::steps::StepError;
use crate::sandbox::capability::batch::NO_STEPS;
use crate::sandbox::{Journal, Limits, WaitStore};

/// The maximum length of a step's name, which is meant for people.
const NAME_CHARS_MAX: usize = 200;

/// The number of calls to the database that an attempt may make for each step that the limit on steps allows. It need
/// not divide them evenly among the steps.
const CALLS_PER_STEP: usize = 10;

/// The number of calls that an attempt may make even if the limit on steps is low. A job may wait for 10,000 others,
/// whose results may take a page each.
const CALLS_MIN: usize = 20_000;

/// An attempt may read this many times the bytes that the results of all steps of a job may have: 1 GiB by default. A
/// handler that is resumed reads each result once, and the results of calls together may exceed the limit on those of
/// steps.
const BYTES_READ_FACTOR: usize = 128;

/// The limits on what an attempt may record.
#[derive(Default, Clone, Copy)]
struct StepLimits {
    count: usize,
    /// The maximum number of calls to the database for steps, waits and parents.
    calls: usize,
    /// The number of bytes of results after which calls are refused.
    bytes_read: usize,
    /// The maximum size of one result.
    bytes: usize,
    bytes_total: usize,
}

/// The steps of one attempt.
#[derive(Default)]
pub(in crate::sandbox) struct Steps {
    journal: Option<Arc<dyn Journal>>,
    /// The handler takes batches: it has no steps.
    takes_batches: bool,
    limits: StepLimits,
    /// The steps that earlier attempts have recorded, by name; `None` until the first step starts.
    recorded: Option<Arc<HashMap<String, RecordedStep>>>,
    /// The steps that this attempt has recorded.
    own: HashMap<String, RecordedStep>,
    /// The number of steps; a wait that this attempt has ended counts once.
    count: usize,
    /// The calls to the database so far.
    calls: usize,
    /// The bytes of results that these calls have read.
    bytes_read: usize,
    /// The size of all recorded results together.
    bytes: usize,
}

/// The progress of a step.
pub(in crate::sandbox::capability) enum StepStart {
    /// It is new.
    New,
    /// It waits.
    Waits(RecordedWait),
    /// It is done, with this result.
    Done(Vec<u8>),
}

impl Steps {
    /// Steps that are recorded in this journal; with `None`, each step runs.
    pub(in crate::sandbox) fn new(journal: Option<Arc<dyn Journal>>, limits: &Limits) -> Self {
        Self {
            journal,
            limits: StepLimits {
                count: limits.steps,
                calls: limits.steps.saturating_mul(CALLS_PER_STEP).max(CALLS_MIN),
                bytes_read: limits.steps_bytes.saturating_mul(BYTES_READ_FACTOR),
                bytes: limits.step_bytes,
                bytes_total: limits.steps_bytes,
            },
            ..Self::default()
        }
    }

    /// Refuses all steps and waits if the handler takes batches.
    pub(in crate::sandbox) fn unless_batches(self, takes_batches: bool) -> Self {
        Self {
            takes_batches,
            ..self
        }
    }

    /// Refuses steps, waits and the ends of parents if the handler takes batches.
    pub(in crate::sandbox::capability) fn require_one_job(&self) -> Result<(), String> {
        match self.takes_batches {
            true => Err(NO_STEPS.to_owned()),
            false => Ok(()),
        }
    }

    pub(in crate::sandbox::capability) fn journal(&self) -> Option<&dyn Journal> {
        self.journal.as_deref()
    }

    pub(in crate::sandbox::capability) fn waits(&self) -> Option<&dyn WaitStore> {
        self.journal.as_ref()?.waits()
    }

    /// Counts calls to the database, and refuses them beyond the maximum. Without a journal, there are none.
    pub(in crate::sandbox::capability) fn count_calls(
        &mut self,
        more: usize,
    ) -> Result<(), String> {
        if self.journal.is_none() {
            return Ok(());
        }
        let calls_max = self.limits.calls;
        if self.calls + more > calls_max {
            return Err(format!(
                "an attempt may read and record steps, waits and results of other jobs at most {calls_max} times ({CALLS_PER_STEP} times limits.steps in rouse.toml, at least {CALLS_MIN}); keep results instead of reading them again"
            ));
        }
        let bytes_max = self.limits.bytes_read;
        if self.bytes_read >= bytes_max {
            return Err(format!(
                "an attempt may read at most {bytes_max} bytes of the results of steps and calls ({BYTES_READ_FACTOR} times limits.steps_bytes in rouse.toml); keep results instead of reading them again"
            ));
        }
        self.calls += more;
        Ok(())
    }

    /// Counts the results that a call to the database has read.
    pub(in crate::sandbox::capability) fn count_read(&mut self, bytes: usize) {
        self.bytes_read = self.bytes_read.saturating_add(bytes);
    }

    /// The limit on the steps of a job.
    pub(super) fn count_max(&self) -> usize {
        self.limits.count
    }

    /// The limit on the size of all results together, in bytes.
    pub(in crate::sandbox::capability) fn bytes_max(&self) -> usize {
        self.limits.bytes_total
    }

    /// Reads the steps of earlier attempts, once.
    async fn read(&mut self) {
        if self.recorded.is_some() {
            return;
        }
        let recorded = match &self.journal {
            Some(journal) => journal.recorded().await,
            None => Arc::default(),
        };
        let sizes = recorded.values().map(|step| match step {
            RecordedStep::Done { bytes, .. } => *bytes,
            RecordedStep::Waits(_) => 0,
        });
        self.bytes = sizes.sum();
        self.count = recorded.len();
        self.recorded = Some(recorded);
    }

    fn get(&self, name: &str) -> Option<&RecordedStep> {
        let earlier = || self.recorded.as_ref()?.get(name);
        self.own.get(name).or_else(earlier)
    }

    /// The step if it is recorded; `None` if it has to run.
    pub(in crate::sandbox::capability) async fn find(
        &mut self,
        name: &str,
    ) -> Result<Option<&RecordedStep>, StepError> {
        self.require_one_job().map_err(refused)?;
        self.read().await;
        let found = self.get(name);
        if found.is_none() {
            check_name(name)?;
            self.require_space(1)?;
        }
        Ok(found)
    }

    pub(super) async fn start(&mut self, name: &str) -> Result<Option<Vec<u8>>, StepError> {
        match self.start_wait(name).await? {
            StepStart::New => Ok(None),
            StepStart::Done(result) => Ok(Some(result)),
            StepStart::Waits(_) => Err(refused(format!("the step {name} is a wait"))),
        }
    }

    /// Refuses this many new steps if the job would then have too many.
    pub(in crate::sandbox::capability) fn require_space(
        &self,
        new: usize,
    ) -> Result<(), StepError> {
        match self.count + new <= self.limits.count {
            true => Ok(()),
            false => Err(self.too_many()),
        }
    }

    fn too_many(&self) -> StepError {
        let count_max = self.limits.count;
        refused(format!(
            "a job may have at most {count_max} steps (limits.steps in rouse.toml)"
        ))
    }

    /// The progress of a step, which may be a wait.
    pub(in crate::sandbox::capability) async fn start_wait(
        &mut self,
        name: &str,
    ) -> Result<StepStart, StepError> {
        let small = match self.find(name).await? {
            None => return Ok(StepStart::New),
            Some(RecordedStep::Waits(wait)) => return Ok(StepStart::Waits(*wait)),
            Some(RecordedStep::Done { result, .. }) => result.clone(),
        };
        if let Some(result) = small {
            return Ok(StepStart::Done(result));
        }
        self.count_calls(1).map_err(refused)?;
        match &self.journal {
            Some(journal) => {
                let result = journal.result(name).await.map_err(refused)?;
                self.count_read(result.len());
                Ok(StepStart::Done(result))
            }
            // Without a journal, every step runs.
            None => Ok(StepStart::New),
        }
    }

    /// Records here that the database has recorded the result of this step.
    pub(in crate::sandbox::capability) fn note(&mut self, name: String, bytes: usize) {
        self.bytes += bytes;
        self.count += usize::from(self.get(&name).is_none());
        let done = RecordedStep::Done {
            bytes,
            result: None,
        };
        self.own.insert(name, done);
    }

    /// Refuses a result that cannot be recorded.
    pub(in crate::sandbox::capability) async fn check_complete(
        &mut self,
        name: &str,
        output: &[u8],
    ) -> Result<(), StepError> {
        if self.find(name).await?.is_some() && self.journal.is_some() {
            return Err(refused(format!("the step {name} is already recorded")));
        }
        let StepLimits {
            bytes: bytes_max,
            bytes_total,
            ..
        } = self.limits;
        if output.len() > bytes_max {
            return Err(refused(format!(
                "the result of the step {name} is {} bytes long; at most {bytes_max} are allowed (limits.step_bytes in rouse.toml)",
                output.len()
            )));
        }
        if self.bytes + output.len() > bytes_total {
            return Err(refused(format!(
                "the step {name} cannot be recorded: with it, the results of all steps exceed the maximum of {bytes_total} bytes (limits.steps_bytes in rouse.toml)"
            )));
        }
        if let Err(error) = serde_json::from_slice::<IgnoredAny>(output) {
            return Err(refused(format!(
                "the result of the step {name} is not JSON: {error}"
            )));
        }
        Ok(())
    }

    pub(in crate::sandbox::capability) async fn complete(
        &mut self,
        name: String,
        output: Vec<u8>,
    ) -> Result<(), StepError> {
        self.check_complete(&name, &output).await?;
        self.count_calls(1).map_err(refused)?;
        if let Some(journal) = &self.journal {
            journal.record(&name, &output).await.map_err(refused)?;
        }
        self.note(name, output.len());
        Ok(())
    }
}

fn check_name(name: &str) -> Result<(), StepError> {
    let chars = name.chars().count();
    if chars == 0 || chars > NAME_CHARS_MAX || name.chars().any(char::is_control) {
        return Err(refused(format!(
            "the name of a step must have 1 to {NAME_CHARS_MAX} printable characters"
        )));
    }
    Ok(())
}

fn refused(why: String) -> StepError {
    StepError::Refused(why)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tracing::Level;

    use super::*;
    use crate::sandbox::{JournalFuture, Meter};

    /// A recorded step as the store returns it, with a limit of one byte for small results.
    fn recorded(result: &[u8]) -> RecordedStep {
        RecordedStep::Done {
            bytes: result.len(),
            result: (result.len() < 2).then(|| result.to_vec()),
        }
    }

    /// A journal in memory that records its calls.
    #[derive(Default)]
    struct Recorder {
        results: Mutex<HashMap<String, Vec<u8>>>,
        calls: Mutex<Vec<String>>,
    }

    impl Journal for Recorder {
        fn recorded(&self) -> JournalFuture<'_, Arc<HashMap<String, RecordedStep>>> {
            self.calls.lock().unwrap().push("names".into());
            let results = self.results.lock().unwrap();
            let steps = results
                .iter()
                .map(|(name, it)| (name.clone(), recorded(it)));
            let steps = Arc::new(steps.collect());
            Box::pin(async move { steps })
        }

        fn result<'a>(&'a self, step: &'a str) -> JournalFuture<'a, Result<Vec<u8>, String>> {
            self.calls.lock().unwrap().push(step.to_owned());
            let found = self.results.lock().unwrap().get(step).cloned();
            Box::pin(async move { found.ok_or_else(|| "gone".to_owned()) })
        }

        fn record<'a>(
            &'a self,
            step: &'a str,
            output: &'a [u8],
        ) -> JournalFuture<'a, Result<(), String>> {
            let mut results = self.results.lock().unwrap();
            results.insert(step.to_owned(), output.to_vec());
            Box::pin(async { Ok(()) })
        }

        fn meter(&self, _: Arc<Meter>) {}

        fn log_line(&self, _: u32, _: Level, _: &str) {}

        fn progress(&self, _: u8, _: &str) {}
    }

    #[tokio::test]
    async fn read_large_results_from_the_journal_one_at_a_time() {
        let journal = Arc::new(Recorder::default());
        for (name, result) in [("a", "11"), ("b", "11"), ("small", "1")] {
            journal.record(name, result.as_bytes()).await.unwrap();
        }
        let mut steps = Steps::new(Some(journal.clone()), &Limits::default());
        steps.complete("c".into(), b"22".to_vec()).await.unwrap();
        let results = [
            ("b", Some("11")),
            ("c", Some("22")),
            ("d", None),
            ("small", Some("1")),
        ];
        for (name, result) in results {
            let got = steps.start(name).await.unwrap();
            assert_eq!(got.as_deref(), result.map(str::as_bytes), "{name}");
        }
        assert_eq!(*journal.calls.lock().unwrap(), ["names", "b", "c"]);
        let again = steps.complete("a".into(), b"2".to_vec()).await;
        assert!(matches!(again, Err(StepError::Refused(_))), "{again:?}");
        journal.results.lock().unwrap().remove("a");
        let gone = steps.start("a").await;
        assert!(matches!(gone, Err(StepError::Refused(why)) if why == "gone"));
    }

    #[tokio::test]
    async fn an_attempt_reads_and_records_its_steps_a_limited_number_of_times() {
        let journal = Arc::new(Recorder::default());
        journal.record("large", b"11").await.unwrap();
        journal.record("small", b"1").await.unwrap();
        let limits = Limits {
            steps: 3,
            ..Limits::default()
        };
        let mut steps = Steps::new(Some(journal.clone()), &limits);
        for _ in 0..CALLS_MIN {
            steps.start("large").await.unwrap();
        }
        let too_many = [
            steps.start("large").await.map(|_| ()),
            steps.complete("new".into(), b"1".to_vec()).await,
        ];
        for refused in too_many {
            assert!(
                matches!(&refused, Err(StepError::Refused(why)) if why.contains("limits.steps")),
                "{refused:?}"
            );
        }
        // The names and one result for each call.
        assert_eq!(journal.calls.lock().unwrap().len(), 1 + CALLS_MIN);
        assert!(journal.results.lock().unwrap().get("new").is_none());
        assert!(steps.start("small").await.is_ok(), "it is in memory");
    }

    #[tokio::test]
    async fn an_attempt_reads_a_limited_number_of_bytes_of_results() {
        let journal = Arc::new(Recorder::default());
        let result = format!("\"{}\"", "x".repeat(62));
        journal.record("large", result.as_bytes()).await.unwrap();
        let limits = Limits {
            steps_bytes: 64,
            ..Limits::default()
        };
        let mut steps = Steps::new(Some(journal.clone()), &limits);
        for _ in 0..BYTES_READ_FACTOR {
            steps.start("large").await.unwrap();
        }
        let refused = steps.start("large").await;
        assert!(
            matches!(&refused, Err(StepError::Refused(why)) if why.contains("limits.steps_bytes")),
            "{refused:?}"
        );
        assert_eq!(journal.calls.lock().unwrap().len(), 1 + BYTES_READ_FACTOR);
    }

    #[tokio::test]
    async fn count_the_results_of_earlier_attempts_too() {
        let journal = Arc::new(Recorder::default());
        journal.record("a", b"[1,2]").await.unwrap();
        let limits = Limits {
            steps_bytes: 8,
            ..Limits::default()
        };
        let mut steps = Steps::new(Some(journal), &limits);
        steps.complete("b".into(), b"[3]".to_vec()).await.unwrap();
        let full = steps.complete("c".into(), b"4".to_vec()).await;
        assert!(
            matches!(&full, Err(StepError::Refused(why)) if why.contains("maximum of 8 bytes")),
            "{full:?}"
        );
    }

    #[tokio::test]
    async fn run_each_step_without_a_journal() {
        let mut steps = Steps::new(None, &Limits::default());
        for _ in 0..2 {
            assert_eq!(steps.start("a").await.unwrap(), None);
            steps.complete("a".into(), b"1".to_vec()).await.unwrap();
        }
    }
}
