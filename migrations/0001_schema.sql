-- The tables of Rouse: small live tables, and history in daily partitions that are dropped. Functions, views, triggers
-- and privileges are in functions/, which `rouse migrate` applies after the migrations.

-- Legal moves: queued → running → succeeded | failed | timed_out | cancelled; running → queued (a retry, a suspension,
-- a released claim, or a loss); queued → succeeded | failed | cancelled (an admin action, a deadline, or a dependency
-- that has failed). The last four are final.
CREATE TYPE rouse.state AS ENUM ('queued', 'running', 'succeeded', 'failed', 'timed_out', 'cancelled');

-- In the order in which they are served.
CREATE TYPE rouse.priority AS ENUM ('high', 'normal', 'low');

-- Job ids and turns come from one sequence: a job's first turn is its id.
CREATE SEQUENCE rouse.turn_seq;

-- The catalog of queues: those with settings of their own. A queue needs no row to be used.
CREATE TABLE rouse.queue (
    name              text PRIMARY KEY CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$'),
    -- Every queue accepts a payload of up to 1 KiB, so that enqueue need not read the limit for it.
    payload_bytes_max integer NOT NULL DEFAULT 262144 CHECK (payload_bytes_max BETWEEN 1024 AND 67108864),
    created_at        timestamptz NOT NULL DEFAULT now(),
    -- The time since which the queue is paused; null if it is not.
    paused_at         timestamptz,
    -- For a queue without lanes: the time at which its last lane was used, recorded by rouse.maintain_lanes. Null if
    -- the queue was never used, or has lanes.
    used_at           timestamptz,
    -- The number of days for which its finished jobs are kept (null: keep_days of rouse.limits), and those that failed
    -- or timed out (null: as its other jobs).
    keep_days         smallint CHECK (keep_days BETWEEN 1 AND 3650),
    keep_failed_days  smallint CHECK (keep_failed_days BETWEEN 1 AND 3650),
    -- How jobs of the same priority are ordered: the keys take turns (drr, deficit round robin), or the lanes do
    -- (fifo).
    policy            text NOT NULL DEFAULT 'fifo' CHECK (policy IN ('fifo', 'drr')),
    -- This column and those below apply to drr only. The property of a job that is its key.
    fair_key          text NOT NULL DEFAULT 'tenant' CHECK (fair_key IN ('tenant', 'handler', 'source', 'tenant-and-handler')),
    -- The cost of a job for its key: a turn, or as much CPU time as the last jobs of its lane have used.
    charge            text NOT NULL DEFAULT 'jobs' CHECK (charge IN ('jobs', 'cpu')),
    -- The number of jobs of a key of weight 1 in each round.
    quantum           integer NOT NULL DEFAULT 1 CHECK (quantum BETWEEN 1 AND 1000),
    -- {"key": weight, …}, above 0; all other keys have the default weight.
    weights           jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(weights) = 'object'),
    default_weight    double precision NOT NULL DEFAULT 1 CHECK (default_weight BETWEEN 0.001 AND 1000),
    -- Jobs that have waited this long go first, in seconds, starting with the oldest; 0: never.
    starvation_s      integer NOT NULL DEFAULT 300 CHECK (starvation_s BETWEEN 0 AND 31536000),
    -- The maximum number of running jobs of a key across all workers; 0: no limit.
    max_in_flight     integer NOT NULL DEFAULT 0 CHECK (max_in_flight BETWEEN 0 AND 1000000),
    -- How a worker is chosen for each job when it is enqueued (functions/direct.sql); shared: none is.
    dispatch          text NOT NULL DEFAULT 'shared' CHECK (dispatch IN ('shared', 'round-robin', 'hash', 'random')),
    -- hash only: jobs with the same values of these properties go to the same worker.
    dispatch_key      text[] NOT NULL DEFAULT '{tenant}',
    -- The number of shards into which its lanes are divided, and which workers lease (functions/shards.sql); 0: its
    -- lanes are not divided, and all workers serve all of them.
    shards            integer NOT NULL DEFAULT 0 CHECK (shards = 0 OR shards BETWEEN 2 AND 1024)
);
-- Read by every claim: empty unless a queue is paused.
CREATE INDEX queue_paused ON rouse.queue (name) WHERE paused_at IS NOT NULL;
-- Read by every claim: empty unless a queue limits the jobs in flight.
CREATE INDEX queue_capped ON rouse.queue (name) WHERE policy = 'drr' AND max_in_flight > 0;
-- Read by every claim: empty unless a queue has shards.
CREATE INDEX queue_sharded ON rouse.queue (name) WHERE shards > 0;
-- Read by every settlement: empty unless a queue has its own retention.
CREATE INDEX queue_keeps ON rouse.queue (name) WHERE keep_days IS NOT NULL OR keep_failed_days IS NOT NULL;
INSERT INTO rouse.queue (name) VALUES ('default');

-- The catalog of lanes. A lane's id is computed from the other columns, so that two producers that add the same lane at
-- the same time do not wait for each other's transaction: each writes a row, and both rows describe the same lane. Only
-- `seq`, by which workers read new rows, is unique.
CREATE SEQUENCE rouse.lane_seq;
CREATE TABLE rouse.lane (
    seq      bigint PRIMARY KEY DEFAULT nextval('rouse.lane_seq'),
    id       bigint NOT NULL,
    queue    text NOT NULL,
    handler  text NOT NULL,
    priority rouse.priority NOT NULL,
    tags     text[] NOT NULL,
    -- The values by which a fair queue or a gate divides jobs, and which all jobs of this lane have: {"tenant": "acme",
    -- "$.region": "eu"}. Empty: there are none. *: the jobs for whose values no lane was left. See functions/gates.sql.
    key      text NOT NULL DEFAULT '',
    -- The incarnation of the worker whose inbox this lane is (functions/direct.sql), as in the key; null: any worker
    -- serves it.
    worker   bigint,
    -- In a row without a key: producers use lanes whose keys have values for these names instead. A copy of settings in
    -- rouse.queue and rouse.gate, kept in the row because every enqueue reads it. Null: they use this lane. Empty: they
    -- use this lane as well, but a gate acts when a job is enqueued.
    divided_by text[],
    -- The time at which it was added to the catalog, or at which rouse.maintain_lanes last found a job in it.
    used_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Null if it is open. See functions/lanes.sql.
    closed_at timestamptz,
    -- A copy of the contract of the handler: a predicate that is true for payloads that need a closer look; null: no
    -- payload does. Kept in the row, because every enqueue reads it. See rouse._copy_contracts.
    refuses   jsonpath
) WITH (toast_tuple_target = 8160);
ALTER TABLE rouse.lane ALTER COLUMN refuses SET STORAGE MAIN;
CREATE INDEX lane_key ON rouse.lane (handler, queue, priority, tags, key) WHERE closed_at IS NULL;
CREATE INDEX lane_id ON rouse.lane (id);
-- Read by every retry, release and suspension: empty unless a queue has direct dispatch.
CREATE INDEX lane_inbox ON rouse.lane (worker) WHERE worker IS NOT NULL;

-- Limits on which jobs run, start or are enqueued (functions/gates.sql), set by rouse.set_gate or declared by modules.
CREATE TABLE rouse.gate (
    name        text PRIMARY KEY,
    kind        text NOT NULL CHECK (kind IN ('max_concurrent', 'throttle', 'batch', 'singleton', 'debounce')),
    -- Null: the jobs of all queues, or of all handlers.
    queue       text,
    handler     text,
    key         text[] NOT NULL DEFAULT '{}',
    max         integer,
    period_ms   bigint,
    burst       integer,
    during      text,
    on_conflict text,
    edge        text,
    max_wait_ms bigint,
    -- The handler whose module declares it. Null: an operator has set it.
    declared_by text
);
-- Read by every claim: empty unless a gate acts there.
CREATE INDEX gate_claims ON rouse.gate (name) WHERE kind IN ('max_concurrent', 'throttle', 'batch');
-- Read by enqueues into lanes that have a gate.
CREATE INDEX gate_enqueues ON rouse.gate (handler) WHERE kind IN ('singleton', 'debounce');

-- The state of the keys of gates. A row without an effect (`until` has passed, and `job` has ended) may be missing;
-- rouse.maintain_gate_keys removes such rows.
CREATE TABLE rouse.gate_key (
    gate   text COLLATE "C" NOT NULL,
    key    text COLLATE "C" NOT NULL,
    -- throttle: the times of the starts in the last period, or null with a burst.
    starts timestamptz[],
    -- throttle: the time until which starts count, or at which the bucket is full again. singleton and debounce: the
    -- time until which the gate is closed, whatever the job does.
    until  timestamptz NOT NULL,
    -- singleton and debounce: the last job that was let through, and the time of that.
    job    bigint,
    since  timestamptz,
    PRIMARY KEY (gate, key)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);

-- For gates that count running jobs: each running job behind the gate has a lease that ends at this time or later. So a
-- claim does not read the index entries that a transaction which is open all day keeps for jobs that have ended. A gate
-- without a row has no such time.
CREATE TABLE rouse.lease_floor (
    gate        text COLLATE "C" PRIMARY KEY,
    lease_until timestamptz NOT NULL
);

-- The lease of a worker on its shards of a queue (functions/shards.sql). A claim locks the row until it commits.
CREATE TABLE rouse.shard_lease (
    worker bigint NOT NULL,
    queue  text NOT NULL,
    -- A hash of what the worker can run. Workers with the same hash divide the shards among themselves.
    serves bigint NOT NULL,
    until  timestamptz NOT NULL,
    PRIMARY KEY (worker, queue)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
-- These indexes serve claims and renewals (the leases of a worker that have not ended) and divisions (the leases of a
-- queue). Each renewal, every second, leaves an old version of the row, which a transaction that is open all day keeps.
-- Through the primary key, all of these versions would be read each time; here they come before the range that is read.
-- Only the renewal itself reads them, because the primary key has to stay unique.
CREATE INDEX shard_lease_worker ON rouse.shard_lease (worker, until);
CREATE INDEX shard_lease_queue ON rouse.shard_lease (queue, until);

-- Leased shards. A shard without a row is free. A row is deleted with its lease.
CREATE TABLE rouse.shard (
    queue  text NOT NULL,
    serves bigint NOT NULL,
    shard  integer NOT NULL,
    worker bigint NOT NULL,
    PRIMARY KEY (queue, serves, shard),
    FOREIGN KEY (worker, queue) REFERENCES rouse.shard_lease (worker, queue) ON DELETE CASCADE
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX shard_worker ON rouse.shard (worker, queue, shard);

-- Settings of the whole database: one row. keep_days is set by rouse.set_default_retention, the others by the owner.
CREATE TABLE rouse.limits (
    only_row              boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    -- The maximum number of lanes of one handler. A worker polls each lane of its handlers.
    lanes_per_handler_max integer NOT NULL DEFAULT 1000 CHECK (lanes_per_handler_max > 0),
    -- The maximum number of lanes of all handlers. Each worker keeps the whole catalog in memory.
    lanes_max             integer NOT NULL DEFAULT 20000 CHECK (lanes_max > 0),
    -- The maximum number of lanes of keys of fair queues and gates: further keys of a handler share one lane. Also the
    -- maximum number of inboxes (direct dispatch).
    keyed_lanes_max       integer NOT NULL DEFAULT 20000 CHECK (keyed_lanes_max >= 0),
    gates_max             integer NOT NULL DEFAULT 200 CHECK (gates_max > 0),
    -- The number of jobs that an attempt may enqueue, including those that these jobs enqueue in turn. The count starts
    -- over with a resumed attempt, and with the next job of the chain.
    descendants_max       integer NOT NULL DEFAULT 10000 CHECK (descendants_max > 0),
    -- The maximum depth to which these jobs may be nested.
    depth_max             integer NOT NULL DEFAULT 20 CHECK (depth_max > 0),
    schedules_max         integer NOT NULL DEFAULT 10000 CHECK (schedules_max > 0),
    -- The maximum number of incarnations of workers that a limited login has registered and that are still listed. The
    -- last one of each worker is listed until it is forgotten, so a login could otherwise fill the database with them.
    incarnations_max      integer NOT NULL DEFAULT 100000 CHECK (incarnations_max > 0),
    -- The response to an enqueue for an unknown handler, once a contract is published: an error, a notice, or silence.
    -- Null means a notice. A handler is unknown if it has no contract and no live worker has it.
    unknown_handlers      text CHECK (unknown_handlers IN ('error', 'notice', 'silence')),
    -- The number of days for which finished jobs are kept, unless their queue has a retention of its own; also applies
    -- to steps, log lines and rows about due times.
    keep_days             smallint NOT NULL DEFAULT 7 CHECK (keep_days BETWEEN 1 AND 3650)
);
INSERT INTO rouse.limits DEFAULT VALUES;

-- One row for each incarnation of a worker. Each heartbeat leaves an old version of the row, which a transaction that is
-- open all day keeps. The primary key ends with the time of the heartbeat, so that a search for the newest version finds
-- it first, and a heartbeat does not compare it with all old ones. rouse.register checks that an incarnation is new.
CREATE TABLE rouse.worker (
    incarnation   bigint GENERATED ALWAYS AS IDENTITY,
    worker_id     text NOT NULL CHECK (worker_id ~ '^[A-Za-z0-9_-]{1,64}$'),
    hostname      text NOT NULL,
    version       text NOT NULL,
    handlers      text[] NOT NULL,
    -- The handlers whose jobs wait because the database lacks what their SQL statements need.
    parked        text[] NOT NULL DEFAULT '{}',
    registered_at timestamptz NOT NULL DEFAULT now(),
    seen_at       timestamptz NOT NULL DEFAULT now(),
    stopped_at    timestamptz,
    -- SHA-256 of the key; null for a forgotten incarnation.
    key_hash      bytea,
    platform      text NOT NULL DEFAULT '',
    -- {"handler": {"version": …, "grants": […], "max_attempts": …}, …}; empty once the incarnation has ended.
    capabilities  jsonb NOT NULL DEFAULT '{}',
    -- The capabilities of the handlers whose modules declare schedules, [{"key": handler, "value": {…}}, …]. They are
    -- read without the others, which may be megabytes.
    schedules     jsonb NOT NULL GENERATED ALWAYS AS (
        jsonb_path_query_array(capabilities, '$.keyvalue() ? (exists (@.value.schedule))', '{}', true)) STORED,
    -- The number of heartbeats that have changed the capabilities.
    changes       bigint NOT NULL DEFAULT 0,
    -- The maximum number of concurrent attempts.
    slots         integer NOT NULL DEFAULT 0,
    -- In the order in which they are served; empty means all.
    queues        text[] NOT NULL DEFAULT '{}',
    tags          text[] NOT NULL DEFAULT '{}',
    draining_at   timestamptz,
    dead_at       timestamptz,
    -- The time at which another host took over the worker id, with the same key.
    replaced_at   timestamptz,
    -- The time at which the host was seen alive after the end of this incarnation: it has not crashed.
    outlived_at   timestamptz,
    stats         jsonb,
    stats_at      timestamptz,
    -- The number of times it has tried to write to a job that was not its own.
    refused       bigint NOT NULL DEFAULT 0,
    -- The timeout flag: the number of its attempts that reached their run timeout, the time of the first, and the last
    -- one. 0 and null before the first, and after the flag is cleared.
    timeouts          bigint NOT NULL DEFAULT 0,
    timed_out_since   timestamptz,
    timed_out_at      timestamptz,
    timed_out_job     bigint,
    timed_out_handler text,
    -- Null while it is listed. A forgotten incarnation is not listed, and everything that it reported is deleted except
    -- its id, which the history of its jobs shows.
    forgotten_at  timestamptz,
    -- The login that registered it; only this login may write as this worker.
    login         name NOT NULL DEFAULT session_user,
    -- True if rouse.worker_login limits what it may claim.
    limited       boolean NOT NULL DEFAULT false,
    PRIMARY KEY (incarnation, seen_at)
);
-- Counts the listed incarnations of a limited login.
CREATE INDEX worker_of_limited ON rouse.worker (login) WHERE limited AND forgotten_at IS NULL;

-- The live workers, with what their calls and enqueues with direct dispatch read of them. A trigger copies it from
-- rouse.worker (functions/workers.sql). In rouse.worker, each heartbeat writes a version of a row; here, only a change
-- writes one.
CREATE TABLE rouse.live_worker (
    -- The incarnation.
    worker    bigint PRIMARY KEY,
    -- A worker id is unique among live workers.
    worker_id text NOT NULL UNIQUE,
    key_hash  bytea,
    draining  boolean NOT NULL,
    handlers  text[] NOT NULL,
    parked    text[] NOT NULL,
    queues    text[] NOT NULL,
    tags      text[] NOT NULL,
    login     name NOT NULL,
    limited   boolean NOT NULL
);

-- Serves registration: it checks whether two hosts share an id.
CREATE INDEX worker_replaced ON rouse.worker (worker_id) WHERE replaced_at IS NOT NULL AND outlived_at IS NOT NULL;

-- Limits of the logins of workers. A login without a row may register any worker id and serve all queues. Only the
-- owner writes here; a change applies at once to registered workers (functions/logins.sql).
--
-- The lists contain names, and prefixes that end in *: 'mail-*' permits mail-1 and mail-2, '*' permits everything.
CREATE TABLE rouse.worker_login (
    -- Not the name, so that a renamed role keeps its limits.
    login       regrole PRIMARY KEY,
    worker_ids  text[] NOT NULL,
    queues      text[] NOT NULL,
    -- Tags that its workers may register. They do not get jobs that require other tags.
    tags        text[] NOT NULL DEFAULT '{}',
    -- Handlers whose jobs its workers may claim, and whose state they may use.
    handlers    text[] NOT NULL DEFAULT '{*}',
    -- True if its workers drop expired history and log the admin actions on all queues.
    maintenance boolean NOT NULL DEFAULT false,
    CONSTRAINT worker_ids_are_patterns CHECK (array_to_string(worker_ids, ',', '!') ~ '^([A-Za-z0-9_-]{1,64}[*]?|[*])(,([A-Za-z0-9_-]{1,64}[*]?|[*]))*$'),
    CONSTRAINT queues_are_patterns CHECK (array_to_string(queues, ',', '!') ~ '^([A-Za-z0-9][A-Za-z0-9_.:-]{0,127}[*]?|[*])(,([A-Za-z0-9][A-Za-z0-9_.:-]{0,127}[*]?|[*]))*$'),
    CONSTRAINT tags_are_patterns CHECK (array_to_string(tags, ',', '!') ~ '^(([A-Za-z0-9][A-Za-z0-9_.:=/-]{0,127}[*]?|[*])(,([A-Za-z0-9][A-Za-z0-9_.:=/-]{0,127}[*]?|[*]))*)?$'),
    CONSTRAINT handlers_are_patterns CHECK (array_to_string(handlers, ',', '!') ~ '^([a-z0-9][a-z0-9_.-]{0,127}[*]?|[*])(,([a-z0-9][a-z0-9_.-]{0,127}[*]?|[*]))*$'),
    CONSTRAINT lists_are_short CHECK (greatest(cardinality(worker_ids), cardinality(queues), cardinality(tags), cardinality(handlers)) <= 1000)
);

-- Challenges to workers, and their answers. Kept for a day.
CREATE TABLE rouse.challenge (
    nonce       uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    worker      bigint NOT NULL,
    handler     text NOT NULL,
    who         text NOT NULL DEFAULT session_user,
    asked_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    answered_at timestamptz,
    answer      jsonb,
    CHECK ((answer IS NULL) = (answered_at IS NULL))
);
CREATE INDEX challenge_open ON rouse.challenge (worker) WHERE answered_at IS NULL;
-- Serves the removal of old challenges.
CREATE INDEX challenge_asked ON rouse.challenge (asked_at);

-- Live jobs: queued or running. Narrow rows, which are deleted as soon as their job is finished.
CREATE TABLE rouse.job (
    id           bigint PRIMARY KEY,
    lane         bigint NOT NULL,
    -- The job's position in its lane; null while the job waits for available_at.
    turn         bigint,
    fence        bigint,
    worker       bigint,
    retried_from bigint,
    -- The first job of its chain; null: it is the first one itself.
    chain        bigint,
    -- Its flow, and its name there; null: none.
    flow         bigint,
    flow_name    text,
    requested_at timestamptz NOT NULL,
    available_at timestamptz NOT NULL,
    claimed_at   timestamptz,
    lease_until  timestamptz,
    -- The number of started attempts, including the running one.
    attempt      integer NOT NULL DEFAULT 0,
    -- The number of started attempts that do not count towards max_attempts: they were lost with their worker,
    -- suspended, or given back after their start.
    uncounted    integer NOT NULL DEFAULT 0,
    -- Null means the handler's own.
    max_attempts integer,
    -- The number of chains that it waits for; null: none. While it waits, it has no turn.
    blockers     integer,
    state        rouse.state NOT NULL DEFAULT 'queued',
    -- The size of the job in the result of a claim apart from the columns that every row has, in bytes: payload,
    -- tenant, source, grants and trace as text. Stored, because computing it would mean reading the payload, and the
    -- size in the table is not a guide: a number such as 1e100000 is small there, and compressed values shrink to as
    -- little as 1/90. Not a generated column, because Postgres parses the expression again for every statement that
    -- writes.
    bytes        integer NOT NULL,
    tenant       text,
    source       text,
    -- 'handler/key': unique among the live jobs of a handler, whose name has no slash, and of a tenant.
    unique_key   text,
    -- Null if the payload is in rouse.payload, under payload_at.
    payload      jsonb,
    payload_at   timestamptz,
    -- True on the row whose commit decides whether a worker is notified: the only row of a call, or the last one. Null
    -- on all others.
    wake         boolean,
    -- The memory of the next attempt, bytes; null means the handler's own. Set after an attempt that ran out of memory.
    memory_bytes bigint CHECK (memory_bytes > 0),
    -- The job's attenuated grants; null means all grants of the handler.
    grants       jsonb,
    -- The lease of its claims and the run timeout of its attempts; null means the handler's own. rouse._time_ms has
    -- their bounds.
    lease_ms     bigint,
    timeout_ms   bigint,
    -- The chains that it waits or waited for, by name: {"charge": 17, "reserve": {"job": 18, "on_failure": "run"}}.
    after        jsonb,
    -- While the job is suspended (queued, without a turn): what it waits for (functions/suspensions.sql). Otherwise
    -- meaningless.
    wait         jsonb,
    -- The job whose attempt has enqueued it, and how many jobs it may enqueue in turn, with theirs
    -- (functions/children.sql): {"parent": 17, "depth": 1, "descendants": 312}; null: none.
    origin       jsonb,
    -- The trace context of its producer, a W3C traceparent; null: none.
    trace        text,
    -- Postgres parses the text of each CHECK again for every statement that writes, which was more than half the cost
    -- of an insert, so one short constraint replaces six long ones. Two rules are left out, because only the functions
    -- can write: that max_attempts is at most 1000 (rouse._lane), and that a running job has a turn and an attempt
    -- (rouse.claim).
    CONSTRAINT job_is_sound CHECK (
        -- Live: queued or running.
        state < 'succeeded'
        -- A running job has all of these, a queued job none.
        AND num_nonnulls(nullif(state, 'queued'), fence, worker, claimed_at, lease_until) IN (0, 5)
        AND uncounted BETWEEN 0 AND attempt
        AND max_attempts > 0
        AND isfinite(available_at)
        AND num_nulls(payload, payload_at) = 1
        AND num_nulls(blockers, turn) > 0)
) WITH (
    -- Each page has space for a second version of every row on it, so that the claim's version is on the same page, and
    -- its WAL contains only the changes instead of the whole row: 345 bytes per claim instead of 442. The table is 40 %
    -- larger.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_cost_delay = 0
);
-- Serves claims: the next turns of a lane.
CREATE INDEX job_ready ON rouse.job (lane, turn) WHERE state = 'queued' AND turn IS NOT NULL;
-- Serves claims by source: the next turns of a lane that come from it.
CREATE INDEX job_source ON rouse.job (lane, source, turn) WHERE state = 'queued' AND turn IS NOT NULL AND source IS NOT NULL;
-- Serves promotion: the next due jobs, without those that wait for others.
CREATE INDEX job_due ON rouse.job (available_at) WHERE state = 'queued' AND turn IS NULL AND blockers IS NULL;
-- Serves the count of scheduled and waiting jobs, for each lane.
CREATE INDEX job_waiting ON rouse.job (lane) WHERE state = 'queued' AND turn IS NULL;
-- Serves adoption: leases that have ended.
CREATE INDEX job_lease ON rouse.job (lease_until) WHERE state = 'running';
-- Null tenants count as equal.
CREATE UNIQUE INDEX job_unique_key ON rouse.job (unique_key, coalesce(tenant, '')) WHERE unique_key IS NOT NULL;
-- At most one retry of each finished job is live.
CREATE UNIQUE INDEX job_retry ON rouse.job (retried_from) WHERE retried_from IS NOT NULL;
-- Serves flows: their live jobs.
CREATE INDEX job_flow ON rouse.job (flow) WHERE flow IS NOT NULL;
-- A chain has one live job at a time.
CREATE UNIQUE INDEX job_chain ON rouse.job (chain) WHERE chain IS NOT NULL;

-- Serves the removal of old payloads.
CREATE INDEX job_payload ON rouse.job (payload_at) WHERE payload_at IS NOT NULL;

-- Chains that live jobs wait for, one row for each (functions/dependencies.sql). Deleted when the chain or the job has
-- ended.
CREATE TABLE rouse.dependency (
    chain      bigint NOT NULL,
    -- If the chain fails: cancel the job, run it nevertheless, or wait until the chain has been retried and has
    -- succeeded.
    on_failure text NOT NULL CHECK (on_failure IN ('cancel', 'run', 'wait')),
    job        bigint NOT NULL
);
-- Each index serves only its own searches, so that no plan chooses the wrong one, not even while the statistics are
-- empty.
CREATE INDEX dependency_chain ON rouse.dependency (chain, on_failure);
CREATE INDEX dependency_job ON rouse.dependency (job);

-- Deadlines of the jobs that were enqueued with a job timeout (functions/deadlines.sql); other jobs have no row.
-- Deleted when the deadline has passed, even if the job has ended earlier, so that the end of a job never requires a
-- search for its deadline.
CREATE TABLE rouse.deadline (
    job         bigint PRIMARY KEY,
    deadline_at timestamptz NOT NULL,
    -- The time at which the deadline is enforced: the deadline itself, or later if another transaction had locked the
    -- job.
    try_at      timestamptz NOT NULL,
    -- The job timeout, for the error message.
    timeout_ms  bigint NOT NULL
) WITH (
    -- As for rouse.job: dead rows are at the front of deadline_due, where each search starts.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000
);
CREATE INDEX deadline_due ON rouse.deadline (try_at);

-- Flows: graphs of jobs that were enqueued in one call (functions/flows.sql). The jobs refer to their flow. A row is
-- deleted when none of its jobs is kept any more.
CREATE TABLE rouse.flow (
    id           bigint PRIMARY KEY DEFAULT nextval('rouse.turn_seq'),
    name         text CHECK (length(name) BETWEEN 1 AND 200),
    tenant       text,
    requested_at timestamptz NOT NULL,
    -- The number of jobs with which it was enqueued. A listing reads about as many rows.
    jobs         integer NOT NULL
);

-- Schedules: each enqueues a job whenever it is due (functions/schedules.sql). Hosts compute the due times.
CREATE TABLE rouse.schedule (
    name            text COLLATE "C" PRIMARY KEY CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$'),
    -- The arguments of its jobs, as in rouse.enqueue.
    handler         text NOT NULL,
    payload         jsonb NOT NULL,
    queue           text NOT NULL,
    tenant          text,
    source          text,
    priority        rouse.priority NOT NULL,
    max_attempts    integer,
    tags            text[] NOT NULL,
    grants          jsonb,
    lease           interval,
    timeout         interval,
    job_timeout     interval,
    -- The key of the payload that gets the due time; null: none.
    due_key         text,
    -- When it is due: five or six fields, and the time zone in which they are interpreted.
    cron            text NOT NULL,
    time_zone       text NOT NULL,
    overlap         text NOT NULL CHECK (overlap IN ('skip', 'queue', 'allow', 'cancel')),
    catch_up        text NOT NULL CHECK (catch_up IN ('none', 'one', 'all')),
    -- Missed due times that are older than this are not caught up; null: all are, whatever their age.
    catch_up_window interval CHECK (catch_up_window > interval '0'),
    jitter          interval NOT NULL CHECK (jitter BETWEEN interval '0' AND interval '1 day'),
    -- The version of the module that has declared it; null: a login has created it.
    module_version  text,
    -- The login that has created it, or that of a worker whose module has declared it.
    login           name NOT NULL,
    created_at      timestamptz NOT NULL,
    changed_at      timestamptz NOT NULL,
    -- The time since which it is paused; null if it is not.
    paused_at       timestamptz,
    -- Drawn from rouse.turn_seq with each change, so that what a host has decided applies only to the row that it has
    -- read.
    revision        bigint NOT NULL,
    -- All due times up to this one have been handled.
    handled_until   timestamptz NOT NULL,
    -- The next due time; null: a host has to compute it; infinity: none.
    next_at         timestamptz,
    -- The next five due times.
    upcoming        timestamptz[] NOT NULL DEFAULT '{}',
    -- The reason why no host can compute its due times, or why its last job was not enqueued; null: there is no error.
    error           text,
    -- The last job that it has enqueued, except those that a login has started while the previous job was live.
    last_job        bigint
) WITH (fillfactor = 70);
-- Serves the search for the next due schedules.
CREATE INDEX schedule_due ON rouse.schedule (coalesce(next_at, '-infinity')) WHERE paused_at IS NULL;

-- The outcome of each due time. Insert-only. Old rows are deleted by rouse.maintain_schedules.
CREATE TABLE rouse.schedule_run (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schedule text COLLATE "C" NOT NULL,
    -- Null if a login started it (rouse.run_schedule).
    due_at   timestamptz,
    at       timestamptz NOT NULL,
    -- enqueued: a job was enqueued; queued: one that waits for the previous one; replaced: one after the previous one
    -- was cancelled; backfilled; manual: started by a login. Without a job: skipped, because the previous one was live;
    -- missed: this due time, and perhaps earlier ones, were too old; refused: rouse.enqueue raised an error.
    outcome  text NOT NULL CHECK (outcome IN ('enqueued', 'queued', 'replaced', 'backfilled', 'manual', 'skipped', 'missed', 'refused')),
    job      bigint,
    error    text,
    CHECK ((job IS NULL) = (outcome IN ('skipped', 'missed', 'refused')))
);
-- A due time has at most one job.
CREATE UNIQUE INDEX schedule_run_due ON rouse.schedule_run (schedule, due_at) WHERE job IS NOT NULL;
CREATE INDEX schedule_run_last ON rouse.schedule_run (schedule, id);
CREATE INDEX schedule_run_at ON rouse.schedule_run (at);

-- Requests to enqueue jobs for due times of the past, from `since` up to, but not including, `before`.
CREATE TABLE rouse.backfill (
    id            bigint PRIMARY KEY DEFAULT nextval('rouse.turn_seq'),
    schedule      text COLLATE "C" NOT NULL,
    -- The expression and the time zone as they were when the backfill was requested.
    cron          text NOT NULL,
    time_zone     text NOT NULL,
    since         timestamptz NOT NULL,
    before        timestamptz NOT NULL,
    -- Due times up to this one have been handled; null: none yet.
    handled_until timestamptz,
    -- The number of jobs that were enqueued: a due time that already had a job does not get another.
    enqueued      integer NOT NULL DEFAULT 0,
    requested_at  timestamptz NOT NULL,
    who           name NOT NULL,
    finished_at   timestamptz,
    error         text
);
CREATE INDEX backfill_open ON rouse.backfill (id) WHERE finished_at IS NULL;
CREATE INDEX backfill_schedule ON rouse.backfill (schedule);

-- Chains that have ended while some of their dependencies remain: there are too many for one transaction, or their jobs
-- are locked.
CREATE TABLE rouse.pending_release (
    chain     bigint PRIMARY KEY,
    succeeded boolean NOT NULL,
    noted_at  timestamptz NOT NULL,
    -- The time of the next try.
    try_at    timestamptz NOT NULL
);
CREATE INDEX pending_release_due ON rouse.pending_release (try_at);

-- The ends of chains whose rows in rouse.finished were dropped, kept as long as live jobs may read them
-- (functions/dependencies.sql).
CREATE TABLE rouse.kept_end (
    chain  bigint PRIMARY KEY,
    -- The job that ended last.
    job    bigint NOT NULL,
    state  rouse.state NOT NULL,
    result jsonb,
    error  jsonb
);

-- Large payloads (functions/payloads.sql): written once, when the job is enqueued; rows of rouse.job and rouse.finished
-- refer to them. Insert-only, one partition a day.
CREATE TABLE rouse.payload (
    job     bigint NOT NULL,
    -- The JSON text for the handler. If this column were jsonb, each claim would have to generate the text again.
    payload text NOT NULL,
    -- The day of its partition: payload_at of the job, or later if the job was still live when that partition was
    -- dropped.
    kept_at timestamptz NOT NULL
) PARTITION BY RANGE (kept_at);
-- A job that gates have merged with newer ones has several rows; its payload is the one at payload_at, or the last copy
-- of it.
CREATE INDEX payload_job ON rouse.payload (job, kept_at);
-- Compressed, and on the same page as the other columns if it fits, so that no second lookup is needed.
ALTER TABLE rouse.payload ALTER COLUMN payload SET STORAGE MAIN;
-- lz4 is several times as fast as Postgres' own compression, but not every build of the server has it.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_settings WHERE name = 'default_toast_compression' AND 'lz4' = ANY (enumvals)) THEN
        ALTER TABLE rouse.payload ALTER COLUMN payload SET COMPRESSION lz4;
    END IF;
END
$$;

-- Finished jobs. Insert-only, one partition a day for those with the default retention, and others for each retention
-- that a queue has set (functions/partitions.sql).
CREATE TABLE rouse.finished (
    id                bigint NOT NULL,
    lane              bigint NOT NULL,
    worker            bigint,
    retried_from      bigint,
    -- As in rouse.job.
    chain             bigint,
    -- True if its attempt has continued the chain with another job; null: it has not.
    continued         boolean,
    flow              bigint,
    flow_name         text,
    requested_at      timestamptz NOT NULL,
    available_at      timestamptz NOT NULL,
    claimed_at        timestamptz,
    started_at        timestamptz,
    finished_at       timestamptz NOT NULL,
    attempt           integer NOT NULL,
    uncounted         integer NOT NULL,
    max_attempts      integer,
    state             rouse.state NOT NULL CHECK (state NOT IN ('queued', 'running')),
    tenant            text,
    source            text,
    unique_key        text,
    -- As in rouse.job.
    payload           jsonb,
    payload_at        timestamptz,
    result            jsonb,
    error             jsonb,
    -- The resources of the last attempt; all null if none ran, or if an admin action ended the job (only its worker
    -- knew them). CPU time of the guest and of its host calls, in microseconds.
    cpu_us            bigint,
    memory_peak_bytes bigint,
    host_calls        integer,
    -- Over the network.
    bytes_in          bigint,
    bytes_out         bigint,
    -- The SHA-256 of the module that ran.
    digest            bytea CHECK (length(digest) = 32),
    grants            jsonb,
    -- The handler of the last attempt, if its worker has bound the job's source to one; null means the lane's.
    handler           text,
    lease_ms          bigint,
    timeout_ms        bigint,
    -- As in rouse.job.
    after             jsonb,
    origin            jsonb,
    trace             text,
    -- The number of days for which it is kept; 0 means the default retention.
    keep_days         smallint NOT NULL DEFAULT 0,
    CHECK ((state = 'succeeded') = (result IS NOT NULL)),
    CHECK ((state IN ('failed', 'timed_out')) = (error IS NOT NULL)),
    CHECK (num_nulls(payload, payload_at) = 1)
) PARTITION BY LIST (keep_days);
CREATE TABLE rouse.finished_default PARTITION OF rouse.finished FOR VALUES IN (0) PARTITION BY RANGE (finished_at);
CREATE INDEX finished_id ON rouse.finished (id);
-- Serves the search for the jobs of a chain, apart from the first.
CREATE INDEX finished_chain ON rouse.finished (chain, id) WHERE chain IS NOT NULL;
-- Serves flows: their ended jobs.
CREATE INDEX finished_flow ON rouse.finished (flow) WHERE flow IS NOT NULL;
-- Serves rouse.audit: jobs that ended since a given time. It indexes ranges of pages, so it costs inserts almost
-- nothing.
CREATE INDEX finished_at ON rouse.finished USING brin (finished_at) WITH (pages_per_range = 32, autosummarize = on);
-- Serves the removal of old payloads: it finds those that are still referred to by jobs that are kept longer than
-- others, or that ended more than a day after they were enqueued.
CREATE INDEX finished_payload ON rouse.finished (payload_at)
    WHERE payload_at IS NOT NULL AND (keep_days > 0 OR finished_at - payload_at > interval '24 hours');
-- Serves the search for jobs that did not succeed, which are few.
CREATE INDEX finished_unsuccessful ON rouse.finished (id) WHERE state <> 'succeeded';

-- Attempts that ended without finishing their job: failed ones that were retried, suspended ones, and lost ones.
-- Insert-only, one partition a day.
CREATE TABLE rouse.attempt (
    job               bigint NOT NULL,
    attempt           integer NOT NULL,
    lost              boolean NOT NULL,
    worker            bigint NOT NULL,
    claimed_at        timestamptz NOT NULL,
    -- Null for a lost attempt: only its worker knew the time.
    started_at        timestamptz,
    ended_at          timestamptz NOT NULL,
    error             jsonb,
    -- What a suspended attempt waits for; then there is no error.
    wait              jsonb,
    lane              bigint,
    tenant            text,
    -- As in rouse.finished.
    cpu_us            bigint,
    memory_peak_bytes bigint,
    host_calls        integer,
    bytes_in          bigint,
    bytes_out         bigint,
    digest            bytea CHECK (length(digest) = 32),
    handler           text,
    CHECK (num_nulls(error, wait) = 1)
) PARTITION BY RANGE (ended_at);
CREATE INDEX attempt_job ON rouse.attempt (job);
CREATE INDEX attempt_ended ON rouse.attempt USING brin (ended_at) WITH (pages_per_range = 32, autosummarize = on);

CREATE SEQUENCE rouse.record_seq;

-- Events of jobs and queues other than attempts. Insert-only, one partition a day.
CREATE TABLE rouse.record (
    -- Many records may have the same time.
    id      bigint NOT NULL DEFAULT nextval('rouse.record_seq'),
    at      timestamptz NOT NULL,
    job     bigint,
    queue   text,
    -- released, renewed, cancelled, completed, failed, retried, rescheduled, priority_set, deleted, purged (of a job,
    -- and of a queue); paused, resumed, retention_set, default_retention_set, payload_limit_set, fair_share_set,
    -- dispatch_set, shards_set; gate_set, gate_deleted; flow_cancelled, flow_retried, flow_deleted; schedule_created,
    -- schedule_replaced, schedule_paused, schedule_resumed, schedule_deleted, schedule_run, schedule_backfilled;
    -- forgotten, timeouts_cleared; state_set, state_deleted; history_unlocked.
    event   text NOT NULL,
    attempt integer,
    worker  bigint,
    -- The login, unless a worker did it.
    who     text,
    detail  jsonb,
    -- The user of the dashboard on whose behalf the login acted, as reported by the login.
    reader  text DEFAULT nullif(left(current_setting('rouse.reader', true), 200), '')
) PARTITION BY RANGE (at);
CREATE INDEX record_job ON rouse.record (job) WHERE job IS NOT NULL;
-- Serves the list of admin actions (host/src/store/admin_records.sql), which leaves out the jobs of a purge and of an
-- action on a flow.
CREATE INDEX record_of_people ON rouse.record (at, id)
    WHERE who IS NOT NULL AND (job IS NULL OR event <> 'purged' AND NOT coalesce(detail ? 'flow', false));
CREATE INDEX record_at ON rouse.record USING brin (at) WITH (pages_per_range = 32, autosummarize = on);

-- Admin actions of which no host has reported yet that it has logged them. Unlogged: a server crash can keep some of
-- them out of the logs, but never out of rouse.record.
CREATE UNLOGGED TABLE rouse.audit_outbox (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL,
    job      bigint,
    queue    text,
    event    text NOT NULL,
    attempt  integer,
    who      text NOT NULL,
    detail   jsonb,
    -- The worker that received it last, in order to log it.
    taken_by bigint,
    taken_at timestamptz
);

-- Steps: their results, and the starts of those that wait. Insert-only, one partition a day.
CREATE TABLE rouse.step (
    job     bigint NOT NULL,
    name    text NOT NULL CHECK (length(name) BETWEEN 1 AND 200),
    -- As the handler wrote it: json, which preserves every byte, not jsonb.
    result  json,
    -- In the row that was written when the wait of this step started: what it waits for. A result follows in another
    -- row, except after a sleep. The last row counts.
    wait    jsonb,
    attempt integer NOT NULL,
    worker  bigint NOT NULL,
    at      timestamptz NOT NULL,
    -- The day of its partition: `at`, or later if its job was still live when that partition was dropped, or earlier if
    -- the clock was set back before its wait was rescheduled.
    kept_at timestamptz NOT NULL,
    CHECK (num_nulls(result, wait) = 1)
) PARTITION BY RANGE (kept_at);
CREATE INDEX step_job ON rouse.step (job, name);

-- Signals that no wait has taken yet (functions/suspensions.sql). Deleted when one takes it, or by maintenance after
-- the job has ended.
CREATE TABLE rouse.signal (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job     bigint NOT NULL,
    name    text NOT NULL CHECK (length(name) BETWEEN 1 AND 200),
    payload json NOT NULL,
    at      timestamptz NOT NULL
);
-- Serves waits: the oldest signal of a job with this name.
CREATE INDEX signal_job ON rouse.signal (job, name, id);

-- Output and log lines of attempts, one row per line. Insert-only, one partition a day.
CREATE TABLE rouse.log (
    job     bigint NOT NULL,
    attempt integer NOT NULL,
    -- Counted from 1 within the attempt.
    line    integer NOT NULL,
    worker  bigint NOT NULL,
    at      timestamptz NOT NULL,
    level   text NOT NULL CHECK (level IN ('trace', 'debug', 'info', 'warn', 'error')),
    text    text NOT NULL
) PARTITION BY RANGE (at);
CREATE INDEX log_job ON rouse.log (job);

-- Progress of running attempts. Unlogged: after a server crash, the attempts report it again. A row is ignored if its
-- fence is not that of the job.
CREATE UNLOGGED TABLE rouse.progress (
    job     bigint PRIMARY KEY,
    fence   bigint NOT NULL,
    percent smallint NOT NULL CHECK (percent BETWEEN 0 AND 100),
    step    text NOT NULL CHECK (length(step) <= 200),
    at      timestamptz NOT NULL
);

-- Resource usage of running attempts that have run for a few seconds, reported every few seconds. Unlogged: after a
-- server crash, it is reported again. A row is ignored if its fence is not that of the job.
CREATE UNLOGGED TABLE rouse.running (
    job          bigint PRIMARY KEY,
    fence        bigint NOT NULL,
    worker       bigint NOT NULL,
    cpu_us       bigint NOT NULL,
    memory_bytes bigint NOT NULL,
    host_calls   integer NOT NULL,
    bytes_in     bigint NOT NULL,
    bytes_out    bigint NOT NULL,
    at           timestamptz NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX running_worker ON rouse.running (worker);

-- State that handlers keep between jobs.
CREATE TABLE rouse.handler_state (
    handler text COLLATE "C" NOT NULL CHECK (handler ~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' AND length(handler) <= 128),
    -- Empty for jobs without a tenant.
    tenant  text COLLATE "C" NOT NULL CHECK (length(tenant) <= 200),
    key     text COLLATE "C" NOT NULL CHECK (length(key) BETWEEN 1 AND 200),
    value   bytea NOT NULL CHECK (octet_length(value) <= 16777216),
    -- The size that counts towards the quota.
    bytes   integer NOT NULL GENERATED ALWAYS AS (octet_length(key) + octet_length(value)) STORED,
    -- Different after each write, and never reused: drawn by the writer.
    version bigint NOT NULL CHECK (version > 0),
    set_at  timestamptz NOT NULL,
    -- The quota is summed from the index, without the values.
    PRIMARY KEY (handler, tenant, key) INCLUDE (bytes)
    -- Space for a new version of a row on the same page: if its size is unchanged, the index is unchanged too.
) WITH (fillfactor = 70);

-- Contracts: what producers may enqueue for a handler, made from its input schema (functions/contract.sql). One row for
-- each handler, and the row '*' while there is any other row.
CREATE TABLE rouse.contract (
    handler         text COLLATE "C" PRIMARY KEY CHECK (handler = '*' OR handler ~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' AND length(handler) <= 128),
    -- A predicate that is true only for payloads that no version accepts; null: every payload is accepted. The lanes
    -- have copies.
    refuses         jsonpath,
    -- The time at which the handler was removed: no worker had it, and a publication left it out. The function of a
    -- removed handler raises an error. Null: it was not removed.
    removed_at      timestamptz,
    -- Its typed function, the only one of this name in this schema.
    function_schema name,
    function_name   name,
    -- [{"name": …, "type": …, "required": …, "default": …}, …], in order; empty if the function takes the payload as a
    -- whole.
    parameters      jsonb NOT NULL DEFAULT '[]',
    -- The statement that created the function, and its comment.
    definition      text NOT NULL DEFAULT '',
    comment         text NOT NULL DEFAULT '',
    published_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    published_by    name NOT NULL DEFAULT session_user
);
CREATE UNIQUE INDEX contract_function ON rouse.contract (function_schema, function_name);

-- The versions of contracts: one row for each input schema of a handler. A payload that any version accepts is
-- accepted.
CREATE TABLE rouse.contract_version (
    handler      text COLLATE "C" NOT NULL,
    -- The SHA-256 of the schema.
    digest       text NOT NULL CHECK (digest ~ '^[0-9a-f]{64}$'),
    -- The version of the module that was published last with this schema.
    version      text NOT NULL,
    -- The SHA-256 of each module that was published with this schema, and of which a live worker may still serve this
    -- handler.
    modules      text[] NOT NULL,
    schema       json NOT NULL,
    -- The predicate of this version; null: it accepts every payload.
    refuses      text,
    -- The same rules by location, to find the one that a refused payload violates.
    rules        jsonb NOT NULL,
    published_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (handler, digest)
);

-- Locks between functions: rows that only the owner can lock, because any login of the database can hold an advisory
-- lock. A name maps to one of 1,024 slots; names that share a slot wait for each other, but this is rare and brief.
CREATE TABLE rouse.lock (
    purpose text NOT NULL,
    slot    integer NOT NULL,
    PRIMARY KEY (purpose, slot)
);
INSERT INTO rouse.lock (purpose, slot)
SELECT purpose, slot FROM unnest(ARRAY['register', 'state', 'retry_jobs', 'gate', 'shards']) AS purpose, generate_series(0, 1023) AS slot;

-- One row: 244 random bits, which are part of the keys of the advisory locks of rouse._notify, so that no other login
-- can compute and hold such a key.
CREATE TABLE rouse.wake_salt (
    salt bytea NOT NULL
);
INSERT INTO rouse.wake_salt (salt) VALUES (uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()));

-- Idle workers that want a NOTIFY. These rows are hints: a server crash loses them, and the workers' polls write them
-- again.
CREATE UNLOGGED TABLE rouse.sleeper (
    worker bigint NOT NULL,
    -- '*' means any queue.
    queue  text NOT NULL,
    until  timestamptz NOT NULL
);
-- These indexes serve reads of requests that have not ended: of any, of those for a queue, and of those of a worker.
-- Each request leaves an old version of its row, which a transaction that is open all day keeps; these come before the
-- range that is read. With a key, a new row would be compared with all of them.
CREATE INDEX sleeper_until ON rouse.sleeper (until);
CREATE INDEX sleeper_queue ON rouse.sleeper (queue, until);
CREATE INDEX sleeper_worker ON rouse.sleeper (worker, until);
