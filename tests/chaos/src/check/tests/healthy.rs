//! A world with every kind of event, in which every guarantee holds.

pub(super) mod flow;
pub(super) mod gate;
pub(super) mod suspension;

use serde_json::json;

use super::super::super::bank::Payment;
use super::super::super::ledger::{Event, Exit, Incident, Request, Response, Run};
use super::super::super::load::{JobSpec, WORK};
use super::super::super::plan::Fault;
use super::super::super::world::{
    Account, Attempt, BankLine, Call, Due, Evidence, Job, Progress, Record, Step, Try, Worker,
    World,
};

pub(super) const S: i64 = 1_000_000;
pub(super) const A: i64 = 1;
pub(super) const B: i64 = 2;
pub(super) const C: i64 = 3;

// The jobs of the healthy world.
pub(super) const QUICK: i64 = 10;
pub(super) const FLAKY: i64 = 11;
pub(super) const HOPELESS: i64 = 12;
pub(super) const ORPHAN: i64 = 13;
pub(super) const DOOMED: i64 = 14;
pub(super) const LATER: i64 = 15;
pub(super) const FAR: i64 = 16;
pub(super) const CANCELLED: i64 = 17;
pub(super) const COMPLETED: i64 = 18;
pub(super) const FAILED: i64 = 19;
pub(super) const KEYED: [i64; 2] = [20, 21];
pub(super) const AGAIN: [i64; 2] = [22, 23];
pub(super) const RELEASED: i64 = 24;
pub(super) const MOVED: i64 = 25;
pub(super) const STEPPED: i64 = 26;
pub(super) const FROZEN: i64 = 27;
pub(super) const STOPPED: i64 = 28;
pub(super) const WAITED: i64 = 29;
pub(super) const IN_LINE: i64 = 30;
pub(super) const NOTIFIED: i64 = 31;
pub(super) const LARGE: [i64; 2] = [32, 33];
pub(super) const CHILD: i64 = 34;
pub(super) const DROPPED: i64 = 35;
pub(super) const PAID: i64 = 36;
pub(super) const STAGED: i64 = 37;
pub(super) const UNPAID: i64 = 38;

/// Adds jobs to a world.
#[derive(Default)]
struct Builder(World);

impl Builder {
    fn call(&mut self, at_us: i64, request: Request, response: Response) {
        self.0.calls.push(Call {
            number: self.0.calls.len() as u64,
            request,
            sent_us: at_us,
            answered_us: at_us + 1_000,
            response,
        });
    }

    /// Adds a live job that was enqueued at `at_us`.
    fn job(&mut self, id: i64, at_us: i64, spec: JobSpec) -> &mut Job {
        let spec = JobSpec {
            n: id * 100,
            handler: WORK.into(),
            queue: "default".into(),
            ..spec
        };
        let run_at_us = spec.run_in_ms.map(|ms| at_us + ms * 1000);
        let job = Job {
            id,
            queue: spec.queue.clone(),
            handler: spec.handler.clone(),
            state: "queued".into(),
            unique_key: spec.unique_key.clone(),
            tenant: spec.tenant.clone(),
            n: spec.n,
            after: spec.after.clone(),
            chain: id,
            requested_us: at_us,
            available_us: run_at_us.unwrap_or(at_us),
            ..Job::default()
        };
        self.call(
            at_us,
            Request::Enqueue { spec, run_at_us },
            Response::Ok(id),
        );
        self.0.jobs.push(job);
        self.of(id)
    }

    fn of(&mut self, id: i64) -> &mut Job {
        let job = self.0.jobs.iter_mut().find(|job| job.id == id);
        job.expect("the job was built")
    }

    /// A worker claims the job, and no attempt starts.
    fn claim(&mut self, id: i64, attempt: i32, worker: i64, claimed_us: i64) {
        let job = self.of(id);
        job.attempt = attempt;
        job.worker = Some(worker);
        job.claimed_us = Some(claimed_us);
    }

    /// The job is cancelled.
    fn cancel(&mut self, id: i64, at_us: i64) {
        self.call(at_us, Request::Cancel { job: id }, Response::Ok(1));
        self.end(id, "cancelled", json!(null), at_us + 500);
    }

    /// An attempt starts on a worker, a millisecond after its claim.
    fn start(&mut self, id: i64, attempt: i32, worker: i64, claimed_us: i64) {
        let evidence = Evidence {
            worker: format!("host-{worker}"),
            job: id,
            attempt,
            nonce: nonce(id, attempt),
            started_us: claimed_us + 1_000,
            ended_us: Some(claimed_us + 2_000),
            ..Evidence::default()
        };
        self.0.evidence.push(evidence);
        self.claim(id, attempt, worker, claimed_us);
    }

    /// The attempt ends without ending the job.
    fn attempt(&mut self, id: i64, lost: bool, ended_us: i64) {
        let job = self.of(id).clone();
        let details = json!({"attempt": job.attempt, "nonce": nonce(id, job.attempt)});
        self.0.attempts.push(Attempt {
            job: id,
            attempt: job.attempt,
            lost,
            worker: job.worker.expect("it has started"),
            error: match lost {
                true => json!({"kind": "lost"}),
                false => json!({"kind": "guest_error", "guest_kind": "flaky", "details": details}),
            },
            sha256: None,
            claimed_us: job.claimed_us.expect("it has started"),
            ended_us,
            lease_ended_us: lost.then_some(ended_us - 100_000),
            wait: None,
        });
        let job = self.of(id);
        job.uncounted += i32::from(lost);
        job.worker = None;
        job.claimed_us = None;
    }

    fn succeed(&mut self, id: i64, at_us: i64) {
        let job = self.of(id);
        job.state = "succeeded".into();
        job.result =
            Some(json!({"n": job.n, "attempt": job.attempt, "nonce": nonce(job.id, job.attempt)}));
        job.finished_us = Some(at_us);
    }

    fn end(&mut self, id: i64, state: &str, error: serde_json::Value, at_us: i64) {
        let job = self.of(id);
        job.state = state.into();
        job.error = (!error.is_null()).then_some(error);
        job.finished_us = Some(at_us);
    }

    fn happen(&mut self, from_us: i64, until_us: i64, event: Event) {
        self.0.happened.push(Incident {
            from_us,
            until_us,
            event,
        });
    }
}

/// Three jobs move 5 from account 1 to account 2. The first attempts of the first two fail, and the third job is
/// hopeless.
fn pay(b: &mut Builder) {
    for (id, staged) in [(PAID, false), (STAGED, true), (UNPAID, false)] {
        let spec = JobSpec {
            steps: staged,
            hopeless: id == UNPAID,
            fail_attempts: 1,
            payment: Some(Payment {
                from: 1,
                to: 2,
                amount: 5,
                staged,
            }),
            ..JobSpec::default()
        };
        b.job(id, 80 * S, spec);
        b.start(id, 1, A, 81 * S);
        let line = |attempt, part: &str, amount| BankLine {
            job: id,
            attempt,
            part: part.into(),
            amount,
        };
        if staged {
            b.0.evidence.last_mut().expect("it has started").stepped_us = Some(81 * S + 1_500);
            b.0.steps.push(Step {
                job: id,
                name: "first".into(),
                result: json!(nonce(id, 1)),
                wait: None,
                attempt: 1,
                worker: A,
                at_us: 81 * S + 1_400,
            });
            b.0.lines.push(line(1, "step", 5));
        }
        if id == UNPAID {
            let details = json!({"attempt": 1, "nonce": nonce(id, 1)});
            let error =
                json!({"kind": "guest_error", "guest_kind": "hopeless", "details": details});
            b.end(id, "failed", error, 82 * S);
            continue;
        }
        b.attempt(id, false, 82 * S);
        b.start(id, 2, B, 83 * S);
        b.0.lines.push(line(2, "end", if staged { 0 } else { 5 }));
        b.succeed(id, 84 * S);
        let result = b.of(id).result.as_mut();
        result.expect("it has succeeded")["first"] = json!(nonce(id, 1));
    }
    for (id, balance) in [(1, -10), (2, 10)] {
        b.0.accounts.push(Account { id, balance });
    }
}

pub(super) fn nonce(id: i64, attempt: i32) -> String {
    format!("{id}-{attempt}")
}

/// A world with every kind of event, in which every guarantee holds.
pub(super) fn healthy() -> World {
    let mut b = Builder::default();
    b.0.run = Run {
        lease_us: 5 * S,
        lost_max: 3,
        rate: 1,
        minutes: 1.0,
        faults: vec![Fault::KillHost],
        ..Run::default()
    };
    b.0.dumped_us = 1_000 * S;
    for incarnation in [A, B, C] {
        b.0.workers.push(Worker {
            incarnation,
            worker_id: format!("host-{incarnation}"),
        });
    }
    for second in 0..3 {
        b.0.due.push(Due {
            schedule: "chaos-1".into(),
            due_us: Some(second * S),
            job: Some(900 + second),
            jobs: 1,
        });
    }
    let plain = JobSpec::default;

    b.job(QUICK, 10 * S, plain());
    b.start(QUICK, 1, A, 11 * S);
    b.succeed(QUICK, 12 * S);

    let flaky = JobSpec {
        fail_attempts: 1,
        ..plain()
    };
    b.job(FLAKY, 10 * S, flaky);
    b.start(FLAKY, 1, A, 11 * S);
    b.attempt(FLAKY, false, 12 * S);
    b.start(FLAKY, 2, B, 13 * S);
    b.succeed(FLAKY, 14 * S);

    let hopeless = JobSpec {
        hopeless: true,
        ..plain()
    };
    b.job(HOPELESS, 10 * S, hopeless);
    b.start(HOPELESS, 1, A, 11 * S);
    let details = json!({"attempt": 1, "nonce": nonce(HOPELESS, 1)});
    let error = json!({"kind": "guest_error", "guest_kind": "hopeless", "details": details});
    b.end(HOPELESS, "failed", error, 12 * S);

    // Host C is killed while it runs this one.
    b.job(ORPHAN, 20 * S, plain());
    b.start(ORPHAN, 1, C, 21 * S);
    b.0.evidence.last_mut().expect("it has started").ended_us = None;
    b.happen(
        22 * S,
        22 * S,
        Event::HostKilled {
            worker: "host-3".into(),
        },
    );
    b.attempt(ORPHAN, true, 26 * S);
    b.start(ORPHAN, 2, A, 26 * S);
    b.succeed(ORPHAN, 27 * S);

    // Host B is frozen while it runs this one, and survives.
    b.job(FROZEN, 20 * S, plain());
    b.start(FROZEN, 1, B, 121 * S);
    b.0.evidence.last_mut().expect("it has started").ended_us = None;
    b.happen(
        122 * S,
        129 * S,
        Event::HostFrozen {
            worker: "host-2".into(),
            jobs: Vec::new(),
        },
    );
    b.attempt(FROZEN, true, 127 * S);
    b.start(FROZEN, 2, A, 127 * S);
    b.succeed(FROZEN, 128 * S);

    // Host B is stopped while it runs this one, and releases it.
    b.job(STOPPED, 140 * S, plain());
    b.start(STOPPED, 1, B, 141 * S);
    b.0.evidence.last_mut().expect("it has started").nonce = "given back in the end".into();
    b.0.evidence.last_mut().expect("it has started").ended_us = None;
    b.happen(
        142 * S,
        143 * S,
        Event::HostStopped {
            worker: "host-2".into(),
            status: "exit status: 0".into(),
            clean: true,
        },
    );
    b.0.records.push(Record {
        job: Some(STOPPED),
        event: "released".into(),
        attempt: Some(1),
        worker: Some(B),
        started: true,
        at_us: 143 * S - 1,
        ..Record::default()
    });
    b.of(STOPPED).uncounted = 1;
    b.start(STOPPED, 2, A, 143 * S);
    b.succeed(STOPPED, 144 * S);

    // One waits for jobs that succeed and fail, and the other is cancelled because of the failure.
    let after = |after| JobSpec {
        after: Some(after),
        ..plain()
    };
    let parents = json!({"q": QUICK, "h": {"job": HOPELESS, "on_failure": "run"}});
    b.job(CHILD, 10 * S, after(parents));
    b.start(CHILD, 1, A, 13 * S);
    b.succeed(CHILD, 14 * S);
    b.job(DROPPED, 10 * S, after(json!({"h": HOPELESS})));
    b.end(DROPPED, "cancelled", json!(null), 12 * S);
    b.of(DROPPED).cancelled_after = Some(HOPELESS);

    // The host of this one is killed three times.
    b.job(DOOMED, 30 * S, plain());
    let killed = || Event::HostKilled {
        worker: "host-2".into(),
    };
    for (attempt, at) in [(1, 31), (2, 41)] {
        b.start(DOOMED, attempt, B, at * S);
        b.happen((at + 4) * S, (at + 4) * S, killed());
        b.attempt(DOOMED, true, (at + 5) * S);
    }
    b.start(DOOMED, 3, B, 60 * S);
    b.happen(64 * S, 64 * S, killed());
    b.of(DOOMED).uncounted = 3;
    b.end(DOOMED, "failed", json!({"kind": "lost"}), 76 * S);

    let later = JobSpec {
        run_in_ms: Some(5_000),
        ..plain()
    };
    b.job(LATER, 10 * S, later.clone());
    b.start(LATER, 1, A, 15 * S);
    b.succeed(LATER, 16 * S);
    b.job(MOVED, 10 * S, later);
    let moved = Request::Reschedule {
        job: MOVED,
        run_at_us: Some(18 * S),
    };
    b.call(11 * S, moved, Response::Ok(1));
    b.start(MOVED, 1, A, 18 * S);
    b.succeed(MOVED, 19 * S);
    let far = JobSpec {
        run_in_ms: Some(10_000_000),
        ..plain()
    };
    b.job(FAR, 10 * S, far);

    b.job(CANCELLED, 10 * S, plain());
    b.call(11 * S, Request::Cancel { job: CANCELLED }, Response::Ok(1));
    b.end(CANCELLED, "cancelled", json!(null), 11 * S);
    b.job(COMPLETED, 10 * S, plain());
    let mark = "by hand".to_string();
    let complete = Request::Complete {
        job: COMPLETED,
        mark: mark.clone(),
    };
    b.call(11 * S, complete, Response::Unknown("lost".into()));
    let job = b.of(COMPLETED);
    job.state = "succeeded".into();
    job.result = Some(json!({"by_admin": mark}));
    job.finished_us = Some(11 * S);
    b.job(FAILED, 10 * S, plain());
    let fail = Request::Fail {
        job: FAILED,
        mark: mark.clone(),
    };
    b.call(11 * S, fail, Response::Ok(1));
    b.end(
        FAILED,
        "failed",
        json!({"kind": "admin", "message": mark}),
        11 * S,
    );

    // One after another with the same key.
    let keyed = JobSpec {
        unique_key: Some("k".into()),
        ..plain()
    };
    for (id, at) in KEYED.into_iter().zip([10, 20]) {
        b.job(id, at * S, keyed.clone());
        b.start(id, 1, A, (at + 1) * S);
        b.succeed(id, (at + 2) * S);
    }

    // Retries of the first job, one after another.
    for (id, at) in AGAIN.into_iter().zip([30, 40]) {
        b.call(at * S, Request::Retry { job: QUICK }, Response::Ok(id));
        b.0.jobs.push(Job {
            id,
            queue: "default".into(),
            handler: WORK.into(),
            retried_from: Some(QUICK),
            n: QUICK * 100,
            requested_us: at * S,
            available_us: at * S,
            ..Job::default()
        });
        b.start(id, 1, A, (at + 1) * S);
        b.succeed(id, (at + 2) * S);
    }

    // The first claim of this one was released.
    b.job(RELEASED, 70 * S, plain());
    b.start(RELEASED, 1, B, 71 * S);
    b.0.evidence.last_mut().expect("it has started").nonce = "given back".into();
    b.0.records.push(Record {
        job: Some(RELEASED),
        event: "released".into(),
        attempt: Some(1),
        worker: Some(B),
        started: true,
        at_us: 72 * S,
        ..Record::default()
    });
    b.of(RELEASED).uncounted = 1;
    b.start(RELEASED, 2, A, 73 * S);
    b.succeed(RELEASED, 74 * S);

    // The first attempt of this one has done its step, and the second got its result.
    let stepped = JobSpec {
        steps: true,
        fail_attempts: 1,
        ..plain()
    };
    b.job(STEPPED, 80 * S, stepped);
    b.start(STEPPED, 1, A, 81 * S);
    b.0.evidence.last_mut().expect("it has started").stepped_us = Some(81 * S + 1_500);
    b.0.steps.push(Step {
        job: STEPPED,
        name: "first".into(),
        result: json!(nonce(STEPPED, 1)),
        wait: None,
        attempt: 1,
        worker: A,
        at_us: 81 * S + 1_400,
    });
    b.attempt(STEPPED, false, 82 * S);
    b.start(STEPPED, 2, B, 83 * S);
    b.0.progress.push(Progress {
        job: STEPPED,
        step: nonce(STEPPED, 2),
        reported_us: 83 * S + 500_000,
        attempt: Some(2),
        worker: Some(B),
    });
    // The progress of the first attempt is deleted a moment later.
    b.0.progress.push(Progress {
        job: STEPPED,
        step: nonce(STEPPED, 1),
        reported_us: 81 * S + 1_200,
        attempt: None,
        worker: None,
    });
    b.succeed(STEPPED, 84 * S);
    let result = b.of(STEPPED).result.as_mut();
    result.expect("it has succeeded")["first"] = json!(nonce(STEPPED, 1));

    pay(&mut b);

    // Cancelled before it has started.
    b.job(IN_LINE, 150 * S, plain());
    b.claim(IN_LINE, 1, A, 150 * S);
    b.cancel(IN_LINE, 150 * S + 300_000);

    // Cancelled while host A could not listen.
    let ticking = JobSpec {
        ticks: true,
        sleep_ms: 7_000,
        ..plain()
    };
    b.job(NOTIFIED, 160 * S, ticking);
    b.start(NOTIFIED, 1, A, 160 * S);
    let evidence = b.0.evidence.last_mut().expect("it has started");
    (evidence.ended_us, evidence.ticked_us) = (None, Some(162 * S));
    b.happen(161 * S, 161 * S + 5_000, Event::ListenersCut { count: 2 });
    b.cancel(NOTIFIED, 161 * S + 200_000);

    // Host B is frozen when it has claimed these two. One of them is cancelled while it is frozen.
    for id in LARGE {
        b.job(id, 169 * S, plain());
        b.claim(id, 1, B, 170 * S - 5_000);
    }
    let frozen = Event::HostFrozen {
        worker: "host-2".into(),
        jobs: LARGE.to_vec(),
    };
    b.happen(170 * S, 181 * S, frozen);
    b.cancel(LARGE[1], 171 * S);
    b.attempt(LARGE[0], true, 175 * S);
    b.start(LARGE[0], 2, A, 175 * S);
    b.succeed(LARGE[0], 176 * S);

    // Two hosts have this id; the first of them stops, and is refused when it is started again.
    let exits = [(180, 190), (191, 192)].map(|(from, until)| Exit {
        host: 0,
        from_us: from * S,
        until_us: until * S,
    });
    for exit in &exits {
        let ended = Event::HostEnded {
            worker: "host-9".into(),
            status: "exit status: 1".into(),
            up_us: exit.until_us - exit.from_us,
        };
        b.happen(exit.from_us, exit.until_us, ended);
    }
    let shared = Event::IdShared {
        worker: "host-9".into(),
        exits: exits.to_vec(),
    };
    b.happen(185 * S, 195 * S, shared);

    let (queue, other) = ("default".to_string(), "default".to_string());
    b.call(100 * S, Request::Pause { queue }, Response::Ok(1));
    b.job(WAITED, 105 * S, plain());
    b.start(WAITED, 1, A, 110 * S + 2_000);
    b.succeed(WAITED, 111 * S);
    // These were refused or got no response, and have no job.
    for (n, response) in [
        (9_001, Response::Refused("no".into())),
        (9_002, Response::Unknown("cut".into())),
    ] {
        let spec = JobSpec { n, ..plain() };
        let request = Request::Enqueue {
            spec,
            run_at_us: None,
        };
        b.call(112 * S, request, response);
    }
    b.call(110 * S, Request::Resume { queue: other }, Response::Ok(1));
    let stopped = Event::HostStopped {
        worker: "host-1".into(),
        status: "exit status: 0".into(),
        clean: true,
    };
    b.happen(900 * S, 901 * S, stopped);

    suspension::add(&mut b);
    gate::add(&mut b);
    flow::add(&mut b);

    // Host C reconnects after each of two outages.
    for (at_ms, failures, counted) in [
        (300_000, 1, true),
        (300_010, 1, false),
        (300_700, 2, true),
        (301_900, 3, true),
        (320_000, 1, true),
        (320_900, 2, true),
    ] {
        b.0.tries.push(Try {
            worker: "host-3".into(),
            login: "chaos_host".into(),
            at_us: at_ms * 1000,
            failures,
            counted,
        });
    }
    b.0
}
