//! Lanes behind limits, in virtual time: how many claims their jobs cost, and how many lanes these read.

use super::closed::{closed_by, gate, of_tenant, open};
use super::*;
use crate::job::{ClaimGate, ClaimLimit};

const MS: Duration = Duration::from_millis(1);

/// A gate of the modelled server.
struct Gate {
    gate: ClaimGate,
    /// The number of jobs that may run, or start in a period.
    max: usize,
    period: Duration,
}

impl Gate {
    /// All lanes share this number of running jobs.
    fn running(max: usize) -> Self {
        Self {
            gate: ClaimGate {
                name: "running".into(),
                ..gate(ClaimLimit::Running)
            },
            max,
            period: Duration::ZERO,
        }
    }

    /// All lanes share this number of starts in any period.
    fn rate(name: &str, max: usize, period_ms: u32) -> Self {
        Self {
            gate: ClaimGate {
                name: name.into(),
                ..gate(ClaimLimit::Starts)
            },
            max,
            period: period_ms * MS,
        }
    }

    /// Each tenant has a limit of its own.
    fn of_each(mut self) -> Self {
        self.gate.key = vec!["tenant".into()];
        self
    }

    fn is_rate(&self) -> bool {
        self.gate.limit == ClaimLimit::Starts
    }
}

/// A model of `rouse.claim`.
struct Server {
    gates: Vec<Gate>,
    /// The number of waiting jobs of each lane.
    waiting: HashMap<LaneId, usize>,
    /// The running jobs, by gate and key.
    running: HashMap<(usize, i64), usize>,
    /// The starts, by gate and key.
    starts: HashMap<(usize, i64), Vec<Duration>>,
    turn: i64,
}

impl Server {
    fn key(&self, number: usize, lane: LaneId) -> (usize, i64) {
        let is_shared = self.gates[number].gate.key.is_empty();
        (number, if is_shared { 0 } else { lane.0 })
    }

    /// The number of jobs of a lane that a gate permits.
    fn room(&self, number: usize, lane: LaneId, now: Duration) -> usize {
        let Gate { max, period, .. } = self.gates[number];
        let key = self.key(number, lane);
        let used = match self.gates[number].is_rate() {
            true => {
                let starts = self.starts.get(&key).into_iter().flatten();
                starts.filter(|start| **start + period > now).count()
            }
            false => self.running.get(&key).copied().unwrap_or(0),
        };
        max.saturating_sub(used)
    }

    /// The time after which a rate without room permits a start.
    fn wait(&self, number: usize, lane: LaneId, now: Duration) -> Option<Duration> {
        let Gate { max, period, .. } = self.gates[number];
        let starts = self.starts.get(&self.key(number, lane))?;
        let first = starts.len().checked_sub(max)?;
        let at = starts[first] + period;
        (at > now).then(|| at - now)
    }

    fn start(&mut self, lane: LaneId, now: Duration) -> ClaimedJob {
        *self.waiting.entry(lane).or_default() -= 1;
        for number in 0..self.gates.len() {
            let key = self.key(number, lane);
            *self.running.entry(key).or_default() += 1;
            self.starts.entry(key).or_default().push(now);
        }
        self.turn += 1;
        job(lane.0, self.turn)
    }

    fn end(&mut self, lane: LaneId) {
        for number in 0..self.gates.len() {
            let key = self.key(number, lane);
            *self.running.entry(key).or_default() -= 1;
        }
    }

    fn claim(
        &mut self,
        orders: &[ClaimOrder],
        wanted: usize,
        now: Duration,
    ) -> (Vec<ClaimedJob>, Vec<ClosedLane>) {
        let numbers = 0..self.gates.len();
        let mut jobs = Vec::new();
        let mut counts = Vec::new();
        for order in orders {
            let rooms = numbers.clone();
            let rooms: Vec<usize> = rooms.map(|it| self.room(it, order.lane, now)).collect();
            let waiting = self.waiting.get(&order.lane).copied().unwrap_or(0);
            let left = wanted - jobs.len();
            let most = [order.max.unwrap_or(left), left, waiting].into_iter();
            let taken = most.chain(rooms.iter().copied()).min().unwrap_or(0);
            jobs.extend((0..taken).map(|_| self.start(order.lane, now)));
            counts.push((taken, rooms));
        }
        let mut closed = Vec::new();
        for (order, (taken, rooms)) in orders.iter().zip(counts) {
            let mut by = Vec::new();
            for number in numbers.clone() {
                let name = self.gates[number].gate.name.as_str();
                let wait = self.wait(number, order.lane, now);
                match self.gates[number].is_rate() {
                    true => by.extend(wait.map(|wait| (name, Some(wait)))),
                    // Decided with the room that the lane found at its turn.
                    false => by.extend((taken >= rooms[number]).then_some((name, None))),
                }
            }
            if !by.is_empty() {
                closed.push(closed_by(order.lane.0, &by));
            }
        }
        (jobs, closed)
    }
}

/// A worker without sweeps, and the modelled server.
struct Run {
    lanes: Lanes,
    server: Server,
    now: Duration,
    /// The ends of the running jobs.
    ends: Vec<(Duration, LaneId)>,
    /// The jobs that have started.
    started: Vec<LaneId>,
    /// The claims, and those that have taken no job.
    claims: usize,
    empty: usize,
    /// The number of lanes that the claims have read.
    read: usize,
}

impl Run {
    /// A worker that knows these lanes, each of which has this number of jobs.
    fn new(gates: Vec<Gate>, jobs: impl Iterator<Item = usize>) -> Self {
        let waiting: HashMap<LaneId, usize> = (1..).map(LaneId).zip(jobs).collect();
        let mut lanes = Lanes::default();
        lanes.set_gates(gates.iter().map(|gate| gate.gate.clone()).collect());
        let mut all: Vec<i64> = waiting.keys().map(|id| id.0).collect();
        all.sort_unstable();
        let all = all.into_iter().map(|n| of_tenant(n, n, &n.to_string()));
        lanes.learn(all.collect());
        lanes.serve(|_| Some(SERVED));
        let server = Server {
            gates,
            waiting,
            running: HashMap::new(),
            starts: HashMap::new(),
            turn: 0,
        };
        Self {
            lanes,
            server,
            now: Duration::ZERO,
            ends: Vec::new(),
            started: Vec::new(),
            claims: 0,
            empty: 0,
            read: 0,
        }
    }

    /// One look, as in `Claims::claim_queued`. True if the next one follows at once, as in `Claimer::handle_found`.
    /// `takes`: the run time of each job.
    fn look(&mut self, takes: impl Fn(usize) -> Duration) -> bool {
        let now = BootTime::default().plus(self.now);
        let mut jobs = 0;
        let (mut is_cut, mut has_others) = (false, false);
        let (mut finds_none, mut has_skipped) = (false, false);
        for _ in 0..4 {
            let wanted = WANTED - jobs;
            if wanted == 0 {
                break;
            }
            let mut orders = match finds_none {
                true => self.lanes.orders_of_many(After::Cursor),
                false => self.lanes.orders(After::Cursor, wanted),
            };
            let is_partial = self.lanes.leave_later_classes(&mut orders);
            if orders.is_empty() {
                break;
            }
            let (claimed, closed) = self.server.claim(&orders, wanted, self.now);
            self.claims += 1;
            self.empty += usize::from(claimed.is_empty());
            self.read += orders.len();
            let is_filled = claimed.len() >= wanted;
            let more = self
                .lanes
                .claimed_at(&orders, &claimed, &closed, is_filled, now);
            for job in &claimed {
                self.started.push(job.lane);
                self.ends
                    .push((self.now + takes(self.started.len()), job.lane));
            }
            jobs += claimed.len();
            is_cut |= more.used_up || more.opened;
            has_others |= more.opened;
            finds_none = claimed.is_empty();
            has_skipped = is_partial && (!closed.is_empty() || finds_none);
            if !is_partial || more.used_up || more.opened {
                break;
            }
        }
        match jobs {
            0 => has_others || has_skipped,
            _ => is_cut || has_skipped || jobs == WANTED,
        }
    }

    /// Looks when something has happened, until this many jobs have started.
    fn until_started(&mut self, jobs: usize, takes: impl Fn(usize) -> Duration) {
        loop {
            while self.look(&takes) {}
            if self.started.len() >= jobs {
                return;
            }
            let opening = self.lanes.next_opening();
            let opening = opening.map(|at| at.since(BootTime::default()));
            let end = self.ends.iter().map(|(at, _)| *at).min();
            let next = opening.into_iter().chain(end).min();
            self.now = self
                .now
                .max(next.expect("nothing is left that opens lanes"));
            self.lanes.open_due(BootTime::default().plus(self.now));
            let is_over = |(at, _): &mut (Duration, LaneId)| *at <= self.now;
            let ended: Vec<_> = self.ends.extract_if(.., is_over).collect();
            for (_, lane) in ended {
                self.server.end(lane);
                self.lanes.free(lane);
            }
        }
    }
}

/// This many lanes, each with a backlog.
fn backlogs(lanes: usize) -> impl Iterator<Item = usize> {
    std::iter::repeat_n(1_000_000, lanes)
}

/// A claim takes the only job that may run, and with that the only start of a period. Its response reports both gates:
/// the lanes wait for the end of the job, and the start of the rate is known. If they waited only for the end, it would
/// open two lanes, and a claim would find them closed by the rate.
#[test]
fn the_end_of_a_job_opens_no_lane_whose_rate_is_known_to_be_used_up() {
    let gates = || vec![Gate::running(1), Gate::rate("rate", 1, 100)];
    let mut run = Run::new(gates(), backlogs(20));
    while run.look(|_| MS) {}
    // One lane for each wanted job; the next claim finds the others.
    assert_eq!((run.claims, run.empty, run.started.len()), (2, 1, 1));
    assert_eq!(run.lanes.next_opening(), None, "they wait for the end");
    assert!(!run.lanes.free(run.started[0]));
    assert!(open(&run.lanes).is_empty());
    let at = BootTime::default().plus(100 * MS);
    assert_eq!(run.lanes.next_opening(), Some(at));
    assert!(run.lanes.open_due(at));
    assert_eq!(open(&run.lanes).len(), 2);
    // 60 jobs of 5 ms: 60 claims and some that close the lanes at the start. If they waited only for the end, each job
    // would cost an empty claim.
    for (lanes, at_start) in [(10, 0), (1_000, 6)] {
        let mut run = Run::new(gates(), backlogs(lanes));
        run.until_started(60, |_| 5 * MS);
        assert!(
            run.empty <= at_start,
            "{} of {} claims",
            run.empty,
            run.claims
        );
        assert_eq!(run.claims, 60 + run.empty);
    }
}

/// The rate opens while another job still runs, and the other way round.
#[test]
fn lanes_behind_a_gate_and_a_rate_cost_few_claims_that_take_nothing() {
    for (lanes, most) in [(10, 2), (1_000, 8)] {
        let gates = vec![Gate::running(2), Gate::rate("rate", 1, 200)];
        let mut run = Run::new(gates, backlogs(lanes));
        run.until_started(60, |nth| MS * [500, 100, 300][nth % 3]);
        assert!(run.empty <= most, "{} of {} claims", run.empty, run.claims);
        // A long job keeps the gate closed for longer than the rate, which opens a few lanes in the meantime.
        let gates = vec![Gate::running(1), Gate::rate("rate", 2, 200)];
        let mut run = Run::new(gates, backlogs(lanes));
        run.until_started(60, |nth| MS * if nth % 3 == 0 { 300 } else { 5 });
        assert!(run.empty <= 30, "{} of {} claims", run.empty, run.claims);
    }
}

/// If they had only the longest wait, all of them would open when it ends: with 1,000 lanes, each start would cost
/// seven claims, which would read all lanes.
#[test]
fn lanes_that_several_rates_keep_closed_open_two_at_a_time_when_the_last_one_permits_a_start() {
    let mut run = Run::new(
        vec![Gate::rate("rate", 1, 100), Gate::rate("slow", 1, 150)],
        backlogs(1_000),
    );
    while run.look(|_| MS) {}
    assert!(open(&run.lanes).is_empty());
    let at = |ms: u32| BootTime::default().plus(ms * MS);
    assert_eq!(run.lanes.next_opening(), Some(at(150)));
    assert!(!run.lanes.open_due(at(100)));
    assert!(run.lanes.open_due(at(150)));
    assert_eq!(open(&run.lanes).len(), 2);
    run.now = 150 * MS;
    let (claims, read) = (run.claims, run.read);
    run.until_started(60, |_| 5 * MS);
    assert_eq!((run.claims - claims, run.read - read), (59, 118));
}

/// The rates are used up at different times.
#[test]
fn a_lane_whose_next_rate_opens_later_than_the_one_it_waits_for_moves_on_without_a_claim() {
    let mut lanes = Lanes::default();
    let gates = ["rate", "slow"].map(|name| ClaimGate {
        name: name.into(),
        ..gate(ClaimLimit::Starts)
    });
    lanes.set_gates(gates.into());
    lanes.learn((1..=3).map(|n| of_tenant(n, n, "a")).collect());
    lanes.serve(|_| Some(SERVED));
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    let now = BootTime::now();
    for lane in 1..=2 {
        lanes.close(&closed_by(lane, &[("rate", seconds(2))]), true, now);
    }
    // Another lane has used up the other rate since.
    let both = [("rate", seconds(2)), ("slow", seconds(7))];
    lanes.close(&closed_by(3, &both), true, now);
    assert_eq!(lanes.next_opening(), Some(now.plus(Duration::from_secs(2))));
    assert!(!lanes.open_due(now.plus(Duration::from_secs(2))));
    assert_eq!(lanes.next_opening(), Some(now.plus(Duration::from_secs(7))));
    assert!(lanes.open_due(now.plus(Duration::from_secs(7))));
    assert_eq!(
        open(&lanes),
        [1, 2],
        "in the order in which they were closed"
    );
}

/// Each lane is behind a shared limit and a rate of its own, both of which are used up most of the time.
#[test]
fn the_rates_of_tenants_behind_a_shared_limit_are_not_tried_before_they_open() {
    let own_rate = || Gate::rate("rate", 1, 1_000).of_each();
    let mut run = Run::new(vec![Gate::running(2), own_rate()], backlogs(10));
    run.until_started(60, |_| 50 * MS);
    assert!(run.empty <= 3, "{} of {} claims", run.empty, run.claims);
    // A limit of each tenant: a claim takes one job of each, and so does the next one.
    let of_each = vec![Gate::running(1).of_each(), own_rate()];
    let mut run = Run::new(of_each, backlogs(10));
    run.until_started(100, |_| 50 * MS);
    assert_eq!((run.claims, run.empty), (10, 0));
}

/// The jobs of two lanes have used up the limit together. The first of these lanes had found room for two.
#[test]
fn a_limit_that_several_lanes_have_used_up_together_opens_no_other_lanes() {
    let one_job = |lanes: usize| std::iter::repeat_n(1, lanes);
    let mut run = Run::new(vec![Gate::running(2)], one_job(20));
    while run.look(|_| MS) {}
    // The second claim finds the lanes that the first one left out.
    assert_eq!((run.claims, run.empty, run.started.len()), (2, 1, 2));
    // The first lane of each claim waits for a rate of its own.
    let own_rate = Gate::rate("rate", 1, 1_000).of_each();
    let mut run = Run::new(vec![Gate::running(2), own_rate], backlogs(1_000));
    run.until_started(60, |_| 50 * MS);
    assert!(run.empty <= 20, "{} of {} claims", run.empty, run.claims);
}

/// The database has reserved all of its room for the first lane, which has two ready jobs. Only one is overdue.
#[test]
fn a_claim_of_overdue_jobs_does_not_show_that_a_limit_is_used_up() {
    let mut lanes = Lanes::default();
    lanes.set_gates(vec![Gate::running(2).gate]);
    lanes.learn((1..=3).map(|n| of_tenant(n, n, "a")).collect());
    lanes.serve(|_| Some(SERVED));
    let full = |lane| closed_by(lane, &[("running", None)]);
    let now = BootTime::now();
    lanes.close(&full(3), true, now);
    let filter = OverdueFilter {
        max: 2,
        waited: Duration::from_secs(900),
    };
    let overdue = [(LaneId(1), filter), (LaneId(2), filter)];
    let orders = lanes.promoted(&overdue, WANTED);
    lanes.claimed_at(&orders, &[job(1, 1)], &[full(2)], false, now);
    assert_eq!(open(&lanes), [1, 2, 3]);
}

/// A worker that knows many lanes, of which these have jobs.
fn busy_among_many(gates: Vec<Gate>, busy: &[i64]) -> Run {
    let jobs = (1..=200).map(|n| if busy.contains(&n) { 1_000_000 } else { 0 });
    let mut run = Run::new(gates, jobs);
    run.lanes.mark_all_empty();
    for lane in busy {
        run.lanes.mark_active(LaneId(*lane));
    }
    run
}

/// Each claim reads the lanes without known jobs, too, and finds them closed. If they opened like the others, they
/// would go first, because they have used nothing of the limit: each job would cost several claims, and some of the
/// lanes that have jobs would get none.
#[test]
fn lanes_without_jobs_cost_no_claims_behind_a_limit_that_others_use_up() {
    let limits: [fn() -> Vec<Gate>; 4] = [
        || vec![Gate::rate("rate", 1, 100)],
        || vec![Gate::running(1)],
        || vec![Gate::running(3)],
        || vec![Gate::running(1), Gate::rate("rate", 1, 100)],
    ];
    let lanes: [&[i64]; 2] = [&[100], &[1, 100, 200]];
    for gates in limits {
        for busy in lanes {
            let mut run = busy_among_many(gates(), busy);
            run.until_started(60, |nth| MS * [5, 6, 7, 8, 9][nth % 5]);
            assert!(run.empty <= 2, "{} of {} claims", run.empty, run.claims);
            assert!(
                run.read <= 60 * 60,
                "{} lanes in {} claims",
                run.read,
                run.claims
            );
            for lane in busy {
                let of_lane = run.started.iter().filter(|id| id.0 == *lane).count();
                let share = run.started.len() / busy.len();
                assert!(of_lane.abs_diff(share) <= 3, "{of_lane} of {share}");
            }
        }
    }
}

#[test]
fn a_job_in_a_lane_that_was_closed_without_jobs_starts_soon() {
    let limits: [fn() -> Gate; 2] = [|| Gate::rate("rate", 1, 100), || Gate::running(1)];
    for gate in limits {
        let mut run = busy_among_many(vec![gate()], &[100]);
        run.until_started(10, |_| 5 * MS);
        // No notification announces it. Each start opens a few lanes without known jobs.
        run.server.waiting.insert(LaneId(90), 1_000_000);
        run.until_started(60, |_| 5 * MS);
        assert!(run.started.contains(&LaneId(90)));
        // One that is announced has its turn at once.
        let closed = |id: &LaneId| run.lanes.is_closed(*id) && !run.started.contains(id);
        let closed = (1..=200).map(LaneId).find(closed).expect("a closed lane");
        run.server.waiting.insert(closed, 1);
        assert!(!run.lanes.mark_active(closed), "it waits for the limit");
        run.until_started(run.started.len() + 1, |_| 5 * MS);
        assert_eq!(run.started.last(), Some(&closed));
    }
}
