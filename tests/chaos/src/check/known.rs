//! The world with indexes by job, by worker and by time.

use std::collections::HashMap;

use serde_json::Value;

use super::super::flows::FlowSpec;
use super::super::gates::Gated;
use super::super::ledger::{Event, Incident, Request, Response};
use super::super::load::JobSpec;
use super::super::settings;
use super::super::world::{Attempt, BankLine, Call, Evidence, Job, Record, Step, World};

/// A claim commits asynchronously, and the server writes commits to disk within a few tenths of a second. In a crash,
/// claims that were not yet written are lost.
pub(super) const FORGOTTEN_WITHIN_US: i64 = 3_000_000;
/// A claim that has not started within a second is released; a host checks for such claims every quarter of a second.
pub(super) const IN_LINE_US: i64 = 1_500_000;

/// A host listens again half a second to a second after it was cut off; then it tests whether notifications arrive.
pub(super) const NO_LISTEN_AFTER_CUT_US: i64 = 2_000_000;
/// While the server is down, the host waits longer each time: 1 s, 2 s, 4 s.
pub(super) const NO_LISTEN_AFTER_CRASH_US: i64 = 6_000_000;

/// A host sends a heartbeat when it has lost a lease or has reached the server again, which it tries every second.
const HEARTBEAT_WITHIN_US: i64 = 2_000_000;

pub(crate) struct Known<'a> {
    pub(crate) world: &'a World,
    evidence: HashMap<i64, Vec<&'a Evidence>>,
    attempts: HashMap<i64, Vec<&'a Attempt>>,
    records: HashMap<i64, Vec<&'a Record>>,
    steps: HashMap<i64, Vec<&'a Step>>,
    lines: HashMap<i64, Vec<&'a BankLine>>,
    calls: HashMap<i64, Vec<&'a Call>>,
    jobs: HashMap<i64, Vec<&'a Job>>,
    originals: HashMap<i64, Vec<&'a Job>>,
    chains: HashMap<i64, Vec<&'a Job>>,
    enqueued: HashMap<i64, Vec<&'a Job>>,
    specs: HashMap<i64, &'a JobSpec>,
    numbers: HashMap<i64, Vec<&'a Job>>,
    flow_specs: Vec<(&'a Call, &'a FlowSpec)>,
    /// The flow of each job of a flow whose enqueue was answered, by the number of the job.
    flows: HashMap<i64, i64>,
    flow_calls: HashMap<i64, Vec<&'a Call>>,
    worker_ids: HashMap<i64, &'a str>,
}

impl<'a> Known<'a> {
    pub(crate) fn of(world: &'a World) -> Self {
        let flow_specs = flow_specs(world);
        Self {
            world,
            evidence: by(&world.evidence, |e| Some(e.job)),
            attempts: by(&world.attempts, |a| Some(a.job)),
            records: by(&world.records, |r| r.job),
            steps: by(&world.steps, |s| Some(s.job)),
            lines: by(&world.lines, |line| Some(line.job)),
            calls: by(&world.calls, job_of),
            jobs: by(&world.jobs, |j| Some(j.id)),
            originals: by(&world.jobs, |j| j.retried_from.is_none().then_some(j.n)),
            chains: by(&world.jobs, |j| Some(j.chain)),
            enqueued: by(&world.jobs, |j| j.parent),
            specs: specs(world),
            numbers: by(&world.jobs, |j| Some(j.n)),
            flows: flows(&flow_specs),
            flow_specs,
            flow_calls: by(&world.calls, flow_of),
            worker_ids: world
                .workers
                .iter()
                .map(|w| (w.incarnation, w.worker_id.as_str()))
                .collect(),
        }
    }

    pub(super) fn evidence(&self, job: i64) -> &[&'a Evidence] {
        self.evidence.get(&job).map_or(&[], Vec::as_slice)
    }

    pub(super) fn attempts(&self, job: i64) -> &[&'a Attempt] {
        self.attempts.get(&job).map_or(&[], Vec::as_slice)
    }

    pub(super) fn records(&self, job: i64) -> &[&'a Record] {
        self.records.get(&job).map_or(&[], Vec::as_slice)
    }

    pub(super) fn steps(&self, job: i64) -> &[&'a Step] {
        self.steps.get(&job).map_or(&[], Vec::as_slice)
    }

    /// The transactions with effects of this job.
    pub(super) fn lines(&self, job: i64) -> &[&'a BankLine] {
        self.lines.get(&job).map_or(&[], Vec::as_slice)
    }

    /// Rows with this id: exactly one, unless a rule is broken.
    pub(super) fn rows(&self, job: i64) -> &[&'a Job] {
        self.jobs.get(&job).map_or(&[], Vec::as_slice)
    }

    /// Rows that the enqueue with this number has created, without retries.
    pub(super) fn originals(&self, n: i64) -> &[&'a Job] {
        self.originals.get(&n).map_or(&[], Vec::as_slice)
    }

    /// Rows with this number: the job and its retries.
    pub(super) fn numbered(&self, n: i64) -> &[&'a Job] {
        self.numbers.get(&n).map_or(&[], Vec::as_slice)
    }

    /// Every flow that was requested, with its enqueue.
    pub(super) fn flow_specs(&self) -> &[(&'a Call, &'a FlowSpec)] {
        &self.flow_specs
    }

    /// Calls about the flow of this job, without its enqueue.
    pub(super) fn flow_calls(&self, job: &Job) -> &[&'a Call] {
        let flow = self.flows.get(&job.n);
        flow.map_or(&[], |flow| self.calls_of_flow(*flow))
    }

    /// Calls about this flow, without its enqueue.
    pub(super) fn calls_of_flow(&self, flow: i64) -> &[&'a Call] {
        self.flow_calls.get(&flow).map_or(&[], Vec::as_slice)
    }

    /// The jobs of this chain.
    pub(super) fn chain(&self, chain: i64) -> &[&'a Job] {
        self.chains.get(&chain).map_or(&[], Vec::as_slice)
    }

    /// Calls about this job, without its enqueue.
    pub(super) fn calls(&self, job: i64) -> &[&'a Call] {
        self.calls.get(&job).map_or(&[], Vec::as_slice)
    }

    /// The jobs that attempts of this job have enqueued, without those that continue its chain.
    pub(super) fn enqueued_by(&self, job: i64) -> &[&'a Job] {
        self.enqueued.get(&job).map_or(&[], Vec::as_slice)
    }

    /// Whether this attempt was suspended.
    pub(super) fn was_suspended(&self, evidence: &Evidence) -> bool {
        let attempts = self.attempts(evidence.job).iter();
        let mut suspended = attempts.filter(|a| a.wait.is_some());
        suspended.any(|a| {
            a.attempt == evidence.attempt
                && (a.claimed_us..=a.ended_us).contains(&evidence.started_us)
        })
    }

    /// What the producer of the job requested, or the payload of the job that has enqueued this one.
    pub(super) fn spec(&self, job: &Job) -> Option<&'a JobSpec> {
        self.specs.get(&job.n).copied()
    }

    /// The jobs behind gates.
    pub(super) fn gated(&self) -> impl Iterator<Item = (&'a Job, &'a Gated)> {
        let jobs = self.world.jobs.iter();
        jobs.filter_map(|job| Some((job, self.spec(job)?.gated.as_ref()?)))
    }

    pub(super) fn worker_id(&self, incarnation: i64) -> &'a str {
        self.worker_ids.get(&incarnation).copied().unwrap_or("?")
    }

    /// The number of crashes of the server that overlap this interval.
    pub(super) fn crashes(&self, from_us: i64, until_us: i64) -> usize {
        let crashes = self.world.happened.iter().filter(|h| {
            matches!(h.event, Event::ServerCrashed { .. })
                && h.from_us <= until_us
                && h.until_us >= from_us
        });
        crashes.count()
    }

    /// Whether the server may have forgotten the claim of this attempt.
    pub(super) fn forgotten(&self, evidence: &Evidence) -> bool {
        let started = evidence.started_us;
        self.crashes(started - IN_LINE_US, started + FORGOTTEN_WITHIN_US) > 0
    }

    /// Whether the database knows the claim under which this attempt has started.
    pub(super) fn is_claimed(&self, evidence: &Evidence) -> bool {
        let at_us = evidence.started_us;
        let number = evidence.attempt;
        let mut attempts = self.attempts(evidence.job).iter();
        let mut records = self.records(evidence.job).iter();
        let mut rows = self.rows(evidence.job).iter();
        attempts.any(|a| a.attempt == number && (a.claimed_us..=a.ended_us).contains(&at_us))
            || records
                .any(|r| r.event == "released" && r.attempt == Some(number) && r.at_us >= at_us)
            || rows.any(|job| {
                job.attempt == number
                    && job.claimed_us.is_some_and(|claimed_us| claimed_us <= at_us)
                    && job
                        .finished_us
                        .is_none_or(|finished_us| at_us <= finished_us)
            })
    }

    /// The time at which the attempt ended for the database. `None` if it never did.
    pub(super) fn over_us(&self, evidence: &Evidence) -> Option<i64> {
        let started = evidence.started_us;
        let number = evidence.attempt;
        let ends = self.attempts(evidence.job).iter();
        let ends = ends.filter(|a| a.attempt == number).map(|a| a.ended_us);
        let releases = self.records(evidence.job).iter();
        let releases = releases
            .filter(|r| r.event == "released" && r.attempt == Some(number))
            .map(|r| r.at_us);
        let job_end = self
            .rows(evidence.job)
            .iter()
            .filter_map(|job| job.finished_us);
        let next = self.evidence(evidence.job).iter().map(|e| e.started_us);
        ends.chain(releases)
            .chain(job_end)
            .chain(next)
            .filter(|at| *at > started)
            .min()
    }

    /// Whether this host has exited in this interval, for any reason.
    pub(super) fn is_gone(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        self.gone_us(worker, from_us, until_us).is_some()
    }

    /// When this host has exited in this interval, for any reason.
    pub(super) fn gone_us(&self, worker: &str, from_us: i64, until_us: i64) -> Option<i64> {
        let exits = self.world.happened.iter().filter_map(|h| {
            let (ended, at_us) = match &h.event {
                // The ledger line is written shortly after the kill.
                Event::HostKilled { worker } => (worker, h.from_us),
                Event::HostStopped { worker, .. } | Event::HostEnded { worker, .. } => {
                    (worker, h.until_us)
                }
                Event::HostFrozen { .. }
                | Event::BackendsTerminated { .. }
                | Event::ListenersCut { .. }
                | Event::LineCancelled { .. }
                | Event::IdShared { .. }
                | Event::JobCrashed { .. }
                | Event::ServerCrashed { .. }
                | Event::EffectsCut { .. }
                | Event::SleepersForgotten { .. }
                | Event::ModuleReplaced { .. }
                | Event::Skipped { .. }
                | Event::LoadEnded => return None,
            };
            let is_it = ended == worker && (from_us..=until_us).contains(&at_us);
            is_it.then_some(at_us)
        });
        exits.min()
    }

    /// Whether this host was frozen or has exited, for any reason, at any moment of this interval.
    pub(super) fn is_disturbed(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        self.is_frozen(worker, from_us, until_us) || self.is_gone(worker, from_us, until_us)
    }

    /// Whether this host was frozen at any moment of this interval.
    pub(super) fn is_frozen(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        self.world.happened.iter().any(|h| {
            matches!(&h.event, Event::HostFrozen { worker: frozen, .. } if frozen == worker)
                && h.from_us <= until_us
                && h.until_us >= from_us
        })
    }

    /// Whether this host did not serve this handler at any moment of this interval, because the handler's login did not
    /// answer.
    pub(super) fn waits_for_login(
        &self,
        worker: &str,
        handler: &str,
        from_us: i64,
        until_us: i64,
    ) -> bool {
        self.world.logins_away.iter().any(|away| {
            let ends_us = away
                .until_us
                .or_else(|| self.gone_us(worker, away.from_us, i64::MAX));
            away.worker == worker
                && away.handler == handler
                && away.from_us <= until_us
                && ends_us.is_none_or(|at| at >= from_us)
        })
    }

    /// Whether this host has crashed in this interval.
    pub(super) fn crashed(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        self.world.happened.iter().any(|h| match &h.event {
            // The host may be killed at the start of the entry or at its end.
            Event::HostKilled { worker: killed } => {
                killed == worker && h.from_us <= until_us && h.until_us >= from_us
            }
            // A host that ends because of an error exits with a status code, and is not killed by a signal.
            Event::HostEnded {
                worker: ended,
                status,
                ..
            } => {
                ended == worker
                    && status.starts_with("signal")
                    && (from_us..=until_us).contains(&h.until_us)
            }
            _ => false,
        })
    }

    /// Whether there was some time in which nothing prevented this host from sending a heartbeat.
    pub(super) fn could_heartbeat(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        let all = self.world.happened.iter();
        let prevents = |h: &&Incident| match &h.event {
            Event::ServerCrashed { .. }
            | Event::BackendsTerminated { .. }
            | Event::ListenersCut { .. } => true,
            Event::HostFrozen { worker: frozen, .. } => frozen == worker,
            _ => false,
        };
        let since = all.filter(prevents).map(|h| h.until_us);
        since.filter(|at| *at > from_us).chain([from_us]).any(|at| {
            let then = at + HEARTBEAT_WITHIN_US;
            then <= until_us
                && !self.is_disturbed(worker, at + 1, then)
                && !self.is_gone(worker, from_us, then)
                && !self.cuts(at + 1, then)
                && self.crashes(at + 1, then) == 0
        })
    }

    /// Whether connections were cut in this interval, listening ones or any.
    pub(super) fn cuts(&self, from_us: i64, until_us: i64) -> bool {
        self.world.happened.iter().any(|h| {
            let cuts = matches!(
                h.event,
                Event::BackendsTerminated { .. } | Event::ListenersCut { .. }
            );
            cuts && h.from_us <= until_us && h.until_us >= from_us
        })
    }

    /// Whether a host has received all notifications of this interval.
    pub(super) fn gets_notifications(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        settings::listens(worker)
            && !self.cuts(from_us - NO_LISTEN_AFTER_CUT_US, until_us)
            && self.crashes(from_us - NO_LISTEN_AFTER_CRASH_US, until_us) == 0
    }

    /// Whether connections were cut or the server was down in this interval. Cuts of all listening connections do not
    /// count.
    pub(super) fn has_other_trouble(&self, from_us: i64, until_us: i64) -> bool {
        let is_cut = self.world.happened.iter().any(|h| {
            matches!(h.event, Event::BackendsTerminated { .. })
                && h.from_us <= until_us
                && h.until_us >= from_us - NO_LISTEN_AFTER_CUT_US
        });
        is_cut || self.crashes(from_us - NO_LISTEN_AFTER_CRASH_US, until_us) > 0
    }

    /// Whether two hosts have shared this id.
    pub(super) fn is_shared(&self, worker: &str) -> bool {
        self.world
            .happened
            .iter()
            .any(|h| matches!(&h.event, Event::IdShared { worker: shared, .. } if shared == worker))
    }

    /// Whether a worker of this id has ever registered.
    pub(super) fn has_registered(&self, worker: &str) -> bool {
        self.worker_ids.values().any(|id| *id == worker)
    }

    /// The intervals in which this queue was certainly paused: from the response to a pause to the request of the next
    /// resume.
    pub(super) fn pauses(&self, queue: &str) -> Vec<(i64, i64)> {
        let resumes: Vec<&Call> = self
            .world
            .calls
            .iter()
            .filter(|call| matches!(&call.request, Request::Resume { queue: of } if of == queue))
            .collect();
        let pauses = self.world.calls.iter().filter(|call| {
            matches!(&call.request, Request::Pause { queue: of } if of == queue)
                && matches!(call.response, Response::Ok(_))
        });
        pauses
            .filter_map(|pause| {
                // A resume that was in flight may have taken effect after the pause.
                let until = resumes
                    .iter()
                    .filter(|resume| resume.answered_us >= pause.sent_us)
                    .map(|resume| resume.sent_us)
                    .min()
                    .unwrap_or(self.world.dumped_us);
                (pause.answered_us < until).then_some((pause.answered_us, until))
            })
            .collect()
    }
}

/// The nonce in a result, or in the details of an error.
pub(super) fn nonce(job: Option<&Value>, error: Option<&Value>) -> Option<String> {
    let result = job.and_then(|result| result["nonce"].as_str());
    let details = error.and_then(|error| error["details"]["nonce"].as_str());
    result.or(details).map(str::to_owned)
}

pub(super) fn kind(error: Option<&Value>) -> &str {
    error
        .and_then(|error| error["kind"].as_str())
        .unwrap_or_default()
}

/// Whether an admin action has ended the job, according to its row.
pub(super) fn ended_by_an_admin(job: &Job) -> bool {
    (job.state == "cancelled" && job.cancelled_after.is_none())
        || kind(job.error.as_ref()) == "admin"
        || job
            .result
            .as_ref()
            .is_some_and(|r| r.get("by_admin").is_some())
}

/// Whether the job is suspended, at the end of the run.
pub(super) fn is_suspended(job: &Job) -> bool {
    job.finished_us.is_none() && job.wait.is_some()
}

/// Whether another job continues the chain of this one, according to its result.
pub(super) fn has_continued(job: &Job) -> bool {
    let result = job.result.as_ref();
    job.state == "succeeded" && result.is_some_and(|result| result["continued"] == true)
}

/// The job that a call is about.
fn job_of(call: &Call) -> Option<i64> {
    match &call.request {
        Request::Cancel { job }
        | Request::Complete { job, .. }
        | Request::Fail { job, .. }
        | Request::Retry { job }
        | Request::Reschedule { job, .. } => Some(*job),
        Request::Signal { job, .. } => Some(*job),
        Request::Enqueue { .. }
        | Request::EnqueueFlow { .. }
        | Request::CancelFlow { .. }
        | Request::RetryFlow { .. }
        | Request::DeleteFlow { .. }
        | Request::Pause { .. }
        | Request::Resume { .. } => None,
    }
}

/// The flow that a call is about.
fn flow_of(call: &Call) -> Option<i64> {
    match call.request {
        Request::CancelFlow { flow }
        | Request::RetryFlow { flow, .. }
        | Request::DeleteFlow { flow } => Some(flow),
        _ => None,
    }
}

fn flow_specs(world: &World) -> Vec<(&Call, &FlowSpec)> {
    let specs = world.calls.iter().filter_map(|call| match &call.request {
        Request::EnqueueFlow { spec } => Some((call, spec)),
        _ => None,
    });
    specs.collect()
}

fn flows(specs: &[(&Call, &FlowSpec)]) -> HashMap<i64, i64> {
    let mut flows = HashMap::new();
    for (call, spec) in specs {
        if let Response::Ok(flow) = call.response {
            flows.extend(spec.nodes.iter().map(|node| (node.spec.n, flow)));
        }
    }
    flows
}

fn specs(world: &World) -> HashMap<i64, &JobSpec> {
    let specs = world.calls.iter().filter_map(|call| match &call.request {
        Request::Enqueue { spec, .. } => Some((spec.n, spec)),
        _ => None,
    });
    let parts = world.parts.iter().map(|spec| (spec.n, spec));
    let flows = flow_specs(world).into_iter();
    let nodes = flows.flat_map(|(_, flow)| flow.nodes.iter().map(|node| (node.spec.n, &node.spec)));
    specs.chain(parts).chain(nodes).collect()
}

fn by<T>(all: &[T], key: impl Fn(&T) -> Option<i64>) -> HashMap<i64, Vec<&T>> {
    let mut found: HashMap<i64, Vec<&T>> = HashMap::new();
    for item in all {
        if let Some(key) = key(item) {
            found.entry(key).or_default().push(item);
        }
    }
    found
}
