-- The tables of Rouse: small live tables, and history in daily partitions that are dropped. Functions, views, triggers and rights stand
-- in functions/, which `rouse migrate` applies after the migrations.

-- Legal moves: queued → running → succeeded | failed | timed_out | cancelled;
-- running → queued (a retry, or a claim given back); queued → cancelled. The last four are final.
CREATE TYPE rouse.state AS ENUM ('queued', 'running', 'succeeded', 'failed', 'timed_out', 'cancelled');

-- In the order in which they are served.
CREATE TYPE rouse.priority AS ENUM ('high', 'normal', 'low');

-- Job ids and turns come from one sequence: a job's first turn is its id.
CREATE SEQUENCE rouse.turn_seq;

-- The catalog of queues: settings of those that have any. A queue needs no row to be used.
CREATE TABLE rouse.queue (
    name              text PRIMARY KEY CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$'),
    -- A payload of up to 1 KiB fits every queue, so that enqueue need not look for its limit.
    payload_bytes_max integer NOT NULL DEFAULT 262144 CHECK (payload_bytes_max BETWEEN 1024 AND 67108864),
    created_at        timestamptz NOT NULL DEFAULT now(),
    -- Null: the queue goes on. Else nothing of it is claimed since then.
    paused_at         timestamptz,
    -- Of a queue whose lanes are gone, when one was used last, as rouse.maintain_lanes has seen it; null: never, or its lanes say so.
    used_at           timestamptz,
    -- For how many days its finished jobs are kept, and those of them that failed or timed out; null: as all are, and as its others are.
    keep_days         smallint CHECK (keep_days BETWEEN 1 AND 3650),
    keep_failed_days  smallint CHECK (keep_failed_days BETWEEN 1 AND 3650)
);
-- Served to every claim: empty where nothing is paused.
CREATE INDEX queue_paused ON rouse.queue (name) WHERE paused_at IS NOT NULL;
-- Served to every settlement: empty where all jobs are kept alike.
CREATE INDEX queue_keeps ON rouse.queue (name) WHERE keep_days IS NOT NULL OR keep_failed_days IS NOT NULL;
INSERT INTO rouse.queue (name) VALUES ('default');

-- The catalog of lanes. A lane's id is computed from the other columns, so that two producers who
-- meet a new lane at the same time need not wait for each other's transaction: each writes a row,
-- and both rows say the same. Nothing but `seq`, by which workers read what is new, is unique.
CREATE SEQUENCE rouse.lane_seq;
CREATE TABLE rouse.lane (
    seq      bigint PRIMARY KEY DEFAULT nextval('rouse.lane_seq'),
    id       bigint NOT NULL,
    queue    text NOT NULL,
    handler  text NOT NULL,
    priority rouse.priority NOT NULL,
    tags     text[] NOT NULL,
    -- When it was catalogued, or when rouse.maintain_lanes last saw a job in it.
    used_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Null: it is open. See functions/lanes.sql.
    closed_at timestamptz
);
CREATE INDEX lane_key ON rouse.lane (handler, queue, priority, tags) WHERE closed_at IS NULL;
CREATE INDEX lane_id ON rouse.lane (id);

-- What the owner may set for the whole database: one row.
CREATE TABLE rouse.limits (
    only_row              boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    -- Lanes of a handler. A worker looks at each lane of its handlers, again and again.
    lanes_per_handler_max integer NOT NULL DEFAULT 1000 CHECK (lanes_per_handler_max > 0),
    -- Lanes of all handlers. Each worker keeps the whole catalog in memory.
    lanes_max             integer NOT NULL DEFAULT 20000 CHECK (lanes_max > 0)
);
INSERT INTO rouse.limits DEFAULT VALUES;

-- One row for each life of a worker.
CREATE TABLE rouse.worker (
    incarnation   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    worker_id     text NOT NULL CHECK (worker_id ~ '^[A-Za-z0-9_-]{1,64}$'),
    hostname      text NOT NULL,
    version       text NOT NULL,
    handlers      text[] NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT now(),
    seen_at       timestamptz NOT NULL DEFAULT now(),
    stopped_at    timestamptz,
    -- sha256 of the key; null: a forgotten life.
    key_hash      bytea,
    platform      text NOT NULL DEFAULT '',
    -- {"handler": {"version": …, "grants": […], "max_attempts": …}, …}
    capabilities  jsonb NOT NULL DEFAULT '{}',
    -- Attempts at the same time.
    slots         integer NOT NULL DEFAULT 0,
    -- In order; none: all.
    queues        text[] NOT NULL DEFAULT '{}',
    tags          text[] NOT NULL DEFAULT '{}',
    draining_at   timestamptz,
    dead_at       timestamptz,
    -- Another host has taken the worker id over, with the same key.
    replaced_at   timestamptz,
    -- The host was heard of after this life was over: it has not crashed.
    outlived_at   timestamptz,
    stats         jsonb,
    stats_at      timestamptz,
    -- How often it has tried to write on a job that was another's.
    refused       bigint NOT NULL DEFAULT 0,
    -- The timeout flag: how many of its attempts ran into their run timeout since when, and the last of them. All null, and 0,
    -- until the first, and again once somebody has cleared it.
    timeouts          bigint NOT NULL DEFAULT 0,
    timed_out_since   timestamptz,
    timed_out_at      timestamptz,
    timed_out_job     bigint,
    timed_out_handler text,
    -- Null: it is listed. A forgotten life is not, and has lost all that it said of itself but its id, which the history of
    -- its jobs shows.
    forgotten_at  timestamptz,
    -- The login that registered it, and the only one that may write as this worker.
    login         name NOT NULL DEFAULT session_user,
    -- True: rouse.worker_login limits what it may claim.
    limited       boolean NOT NULL DEFAULT false
);
-- An id is unique among the living.
CREATE UNIQUE INDEX worker_living ON rouse.worker (worker_id) WHERE stopped_at IS NULL AND dead_at IS NULL;

-- Serves registration: whether two hosts share an id.
CREATE INDEX worker_replaced ON rouse.worker (worker_id) WHERE replaced_at IS NOT NULL AND outlived_at IS NOT NULL;

-- Limits of the logins of workers. A login without a row may register any worker id and serve all queues. Only the owner writes here;
-- a change applies to the workers that are registered at once (functions/logins.sql).
--
-- The lists hold names, and prefixes that end in *: 'mail-*' permits mail-1 and mail-2, '*' permits everything.
CREATE TABLE rouse.worker_login (
    -- Not its name: a role that is renamed keeps its limits.
    login       regrole PRIMARY KEY,
    worker_ids  text[] NOT NULL,
    queues      text[] NOT NULL,
    -- Tags that its workers may register. Jobs that require others are not for them.
    tags        text[] NOT NULL DEFAULT '{}',
    -- Handlers whose jobs its workers may claim, and whose state they may use.
    handlers    text[] NOT NULL DEFAULT '{*}',
    -- True: its workers drop expired history and log the admin actions on all queues.
    maintenance boolean NOT NULL DEFAULT false,
    CONSTRAINT worker_ids_are_patterns CHECK (array_to_string(worker_ids, ',', '!') ~ '^([A-Za-z0-9_-]{1,64}[*]?|[*])(,([A-Za-z0-9_-]{1,64}[*]?|[*]))*$'),
    CONSTRAINT queues_are_patterns CHECK (array_to_string(queues, ',', '!') ~ '^([A-Za-z0-9][A-Za-z0-9_.:-]{0,127}[*]?|[*])(,([A-Za-z0-9][A-Za-z0-9_.:-]{0,127}[*]?|[*]))*$'),
    CONSTRAINT tags_are_patterns CHECK (array_to_string(tags, ',', '!') ~ '^(([A-Za-z0-9][A-Za-z0-9_.:=/-]{0,127}[*]?|[*])(,([A-Za-z0-9][A-Za-z0-9_.:=/-]{0,127}[*]?|[*]))*)?$'),
    CONSTRAINT handlers_are_patterns CHECK (array_to_string(handlers, ',', '!') ~ '^([a-z0-9][a-z0-9_.-]{0,127}[*]?|[*])(,([a-z0-9][a-z0-9_.-]{0,127}[*]?|[*]))*$'),
    CONSTRAINT lists_are_short CHECK (greatest(cardinality(worker_ids), cardinality(queues), cardinality(tags), cardinality(handlers)) <= 1000)
);

-- What a worker was asked to prove, and what it has answered. Kept for a day.
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

-- Live jobs: queued or running. Narrow, and a row leaves as soon as its job is finished.
CREATE TABLE rouse.job (
    id           bigint PRIMARY KEY,
    lane         bigint NOT NULL,
    -- The place in the lane; null while the job waits for available_at.
    turn         bigint,
    fence        bigint,
    worker       bigint,
    retried_from bigint,
    requested_at timestamptz NOT NULL,
    available_at timestamptz NOT NULL,
    claimed_at   timestamptz,
    lease_until  timestamptz,
    -- Attempts started, the running one included.
    attempt      integer NOT NULL DEFAULT 0,
    -- How many of them were lost with their worker.
    lost         integer NOT NULL DEFAULT 0,
    -- Null: the handler's own.
    max_attempts integer,
    state        rouse.state NOT NULL DEFAULT 'queued',
    -- What a claim sends of it besides the columns that every row has, bytes: payload, tenant, source and grants as text. Kept, because the payload would have to be read
    -- for that, and what the table takes is no guide: a number such as 1e100000 is small there, and what compresses is a ninetieth at best.
    -- Not generated: Postgres reads the expression again for every statement that writes.
    bytes        integer NOT NULL,
    tenant       text,
    source       text,
    -- 'handler/key': unique among the live jobs of a handler, whose name has no slash, and of a tenant.
    unique_key   text,
    -- Null: it stands in rouse.payload, since payload_at.
    payload      jsonb,
    payload_at   timestamptz,
    -- True on the row whose commit decides whether a worker is notified: the only row, or the last one,
    -- of a call. Null on all others.
    wake         boolean,
    -- The memory of the next attempt, bytes; null: the handler's own. Set after an attempt that ran out of it.
    memory_bytes bigint CHECK (memory_bytes > 0),
    -- What the job leaves of the grants of its handler; null: all.
    grants       jsonb,
    -- The lease of its claims and the run timeout of its attempts; null: the handler's own. rouse._time_ms has their bounds.
    lease_ms     bigint,
    timeout_ms   bigint,
    -- Postgres reads the text of each CHECK again for every statement that writes, which was more than
    -- half the price of an insert: one short constraint says what six long ones would. Left out, because
    -- nothing but the functions can write: that max_attempts is at most 1000 (rouse._lane), and that a
    -- running job has a turn and an attempt (rouse.claim).
    CONSTRAINT job_is_sound CHECK (
        -- Live: queued or running.
        state < 'succeeded'
        -- A running job has all of these, a queued one none.
        AND num_nonnulls(nullif(state, 'queued'), fence, worker, claimed_at, lease_until) IN (0, 5)
        AND lost BETWEEN 0 AND attempt
        AND max_attempts > 0
        AND isfinite(available_at)
        AND num_nulls(payload, payload_at) = 1)
) WITH (
    -- Room on each page for the next version of every row on it: the claim's new version then stands on
    -- the same page, and its WAL holds what has changed instead of the whole row. 345 bytes for a
    -- claim instead of 442; the table is larger by two fifths.
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
-- Serves promotion: what is due next.
CREATE INDEX job_due ON rouse.job (available_at) WHERE state = 'queued' AND turn IS NULL;
-- Serves the count of what waits for its time, for each lane.
CREATE INDEX job_waiting ON rouse.job (lane) WHERE state = 'queued' AND turn IS NULL;
-- Serves adoption: whose lease has run out.
CREATE INDEX job_lease ON rouse.job (lease_until) WHERE state = 'running';
-- No tenant is an empty one.
CREATE UNIQUE INDEX job_unique_key ON rouse.job (unique_key, coalesce(tenant, '')) WHERE unique_key IS NOT NULL;
-- Of each finished job at most one retry is live.
CREATE UNIQUE INDEX job_retry ON rouse.job (retried_from) WHERE retried_from IS NOT NULL;

-- Serves the removal of old payloads.
CREATE INDEX job_payload ON rouse.job (payload_at) WHERE payload_at IS NOT NULL;

-- Payloads that are large (functions/payloads.sql): written once, by the enqueue; rows of rouse.job and rouse.finished refer to them.
-- Insert-only, one partition a day.
CREATE TABLE rouse.payload (
    job     bigint NOT NULL,
    -- JSON text: what a handler gets. Each claim would have to write it anew from jsonb.
    payload text NOT NULL,
    -- The day of its partition: payload_at of the job, or later where the job was still there when that partition was dropped.
    kept_at timestamptz NOT NULL
) PARTITION BY RANGE (kept_at);
CREATE INDEX payload_job ON rouse.payload (job);
-- Compressed, and beside the other columns where it fits a page then: no second lookup for each.
ALTER TABLE rouse.payload ALTER COLUMN payload SET STORAGE MAIN;
-- Compresses several times as fast as Postgres' own; not every server is built with it.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_settings WHERE name = 'default_toast_compression' AND 'lz4' = ANY (enumvals)) THEN
        ALTER TABLE rouse.payload ALTER COLUMN payload SET COMPRESSION lz4;
    END IF;
END
$$;

-- Finished jobs. Insert-only, one partition a day for those that are kept as long as all are, and others for each length of time that a
-- queue has set (functions/partitions.sql).
CREATE TABLE rouse.finished (
    id                bigint NOT NULL,
    lane              bigint NOT NULL,
    worker            bigint,
    retried_from      bigint,
    requested_at      timestamptz NOT NULL,
    available_at      timestamptz NOT NULL,
    claimed_at        timestamptz,
    started_at        timestamptz,
    finished_at       timestamptz NOT NULL,
    attempt           integer NOT NULL,
    lost              integer NOT NULL,
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
    -- What the last attempt has used; all null where nothing ran, and where somebody else has ended the job (only its worker knew).
    -- CPU time of the guest and of the host calls that it made, microseconds.
    cpu_us            bigint,
    memory_peak_bytes bigint,
    host_calls        integer,
    -- Over the network.
    bytes_in          bigint,
    bytes_out         bigint,
    -- The SHA-256 of the module that ran.
    digest            bytea CHECK (length(digest) = 32),
    grants            jsonb,
    -- The handler that ran in the last attempt, where its worker has bound the job's source to one; null: the lane's.
    handler           text,
    lease_ms          bigint,
    timeout_ms        bigint,
    -- For how many days it is kept; 0: as long as all are.
    keep_days         smallint NOT NULL DEFAULT 0,
    CHECK ((state = 'succeeded') = (result IS NOT NULL)),
    CHECK ((state IN ('failed', 'timed_out')) = (error IS NOT NULL)),
    CHECK (num_nulls(payload, payload_at) = 1)
) PARTITION BY LIST (keep_days);
CREATE TABLE rouse.finished_default PARTITION OF rouse.finished FOR VALUES IN (0) PARTITION BY RANGE (finished_at);
CREATE INDEX finished_id ON rouse.finished (id);
-- Serves rouse.audit: what ended since. A range of pages, which inserts do not pay for.
CREATE INDEX finished_at ON rouse.finished USING brin (finished_at) WITH (pages_per_range = 32, autosummarize = on);
-- Serves the removal of old payloads: which of them are still referred to by jobs that are kept for longer than others, or ended more
-- than a day after they were enqueued.
CREATE INDEX finished_payload ON rouse.finished (payload_at)
    WHERE payload_at IS NOT NULL AND (keep_days > 0 OR finished_at - payload_at > interval '24 hours');
-- Serves the search for jobs that did not succeed, which are few.
CREATE INDEX finished_unsuccessful ON rouse.finished (id) WHERE state <> 'succeeded';

-- Attempts that ended without finishing their job: failed ones that were retried, and lost ones.
-- Insert-only, one partition a day.
CREATE TABLE rouse.attempt (
    job               bigint NOT NULL,
    attempt           integer NOT NULL,
    lost              boolean NOT NULL,
    worker            bigint NOT NULL,
    claimed_at        timestamptz NOT NULL,
    -- Null for a lost attempt: only its worker knew.
    started_at        timestamptz,
    ended_at          timestamptz NOT NULL,
    error             jsonb NOT NULL,
    lane              bigint,
    tenant            text,
    -- As in rouse.finished.
    cpu_us            bigint,
    memory_peak_bytes bigint,
    host_calls        integer,
    bytes_in          bigint,
    bytes_out         bigint,
    digest            bytea CHECK (length(digest) = 32),
    handler           text
) PARTITION BY RANGE (ended_at);
CREATE INDEX attempt_job ON rouse.attempt (job);
CREATE INDEX attempt_ended ON rouse.attempt USING brin (ended_at) WITH (pages_per_range = 32, autosummarize = on);

-- What was done to jobs and queues besides their attempts. Insert-only, one partition a day.
CREATE TABLE rouse.record (
    at      timestamptz NOT NULL,
    job     bigint,
    queue   text,
    -- released, renewed, cancelled, completed, failed, retried, rescheduled, deleted, purged (of a job, and of a queue); paused,
    -- resumed, retention_set; forgotten, timeouts_cleared; state_put, state_removed; history_unlocked.
    event   text NOT NULL,
    attempt integer,
    worker  bigint,
    -- The login, where no worker did it.
    who     text,
    detail  jsonb
) PARTITION BY RANGE (at);
CREATE INDEX record_job ON rouse.record (job) WHERE job IS NOT NULL;
CREATE INDEX record_at ON rouse.record USING brin (at) WITH (pages_per_range = 32, autosummarize = on);

-- Admin actions that no host has logged yet. Unlogged: a crash of the server keeps some of it out of logs, and nothing out of
-- rouse.record.
CREATE UNLOGGED TABLE rouse.audit_outbox (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL,
    job     bigint,
    queue   text,
    event   text NOT NULL,
    attempt integer,
    who     text NOT NULL,
    detail  jsonb
);

-- Results of steps. Insert-only, one partition a day.
CREATE TABLE rouse.step (
    job     bigint NOT NULL,
    name    text NOT NULL CHECK (length(name) BETWEEN 1 AND 200),
    -- As the handler wrote it: json, which keeps each byte, not jsonb.
    result  json NOT NULL,
    attempt integer NOT NULL,
    worker  bigint NOT NULL,
    at      timestamptz NOT NULL,
    -- The day of its partition: `at`, or later where its job still lived when that partition was dropped.
    kept_at timestamptz NOT NULL
) PARTITION BY RANGE (kept_at);
CREATE INDEX step_job ON rouse.step (job);

-- What attempts print and log, a row for each line. Insert-only, one partition a day.
CREATE TABLE rouse.log (
    job     bigint NOT NULL,
    attempt integer NOT NULL,
    -- From 1, within the attempt.
    line    integer NOT NULL,
    worker  bigint NOT NULL,
    at      timestamptz NOT NULL,
    level   text NOT NULL CHECK (level IN ('trace', 'debug', 'info', 'warn', 'error')),
    text    text NOT NULL
) PARTITION BY RANGE (at);
CREATE INDEX log_job ON rouse.log (job);

-- How far running attempts are. Unlogged: after a crash of the server they say it again. A row says nothing
-- once its fence is not that of the job.
CREATE UNLOGGED TABLE rouse.progress (
    job     bigint PRIMARY KEY,
    fence   bigint NOT NULL,
    percent smallint NOT NULL CHECK (percent BETWEEN 0 AND 100),
    step    text NOT NULL CHECK (length(step) <= 200),
    at      timestamptz NOT NULL
);

-- What running attempts have used so far: those that have run for some seconds, told every few seconds. Unlogged: after
-- a crash of the server it is told again. A row says nothing once its fence is not that of the job.
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

-- What handlers keep between jobs.
CREATE TABLE rouse.handler_state (
    handler text COLLATE "C" NOT NULL CHECK (handler ~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' AND length(handler) <= 128),
    -- Empty, as no tenant is: of jobs without one.
    tenant  text COLLATE "C" NOT NULL CHECK (length(tenant) <= 200),
    key     text COLLATE "C" NOT NULL CHECK (length(key) BETWEEN 1 AND 200),
    value   bytea NOT NULL CHECK (octet_length(value) <= 16777216),
    -- What counts towards the quota.
    bytes   integer NOT NULL GENERATED ALWAYS AS (octet_length(key) + octet_length(value)) STORED,
    -- Another one with each write, and none comes back: drawn by whoever writes.
    version bigint NOT NULL CHECK (version > 0),
    set_at  timestamptz NOT NULL,
    -- The quota is summed in it, without the values.
    PRIMARY KEY (handler, tenant, key) INCLUDE (bytes)
    -- Room for a new version of a row beside the old one: where its size stays, the index does, too.
) WITH (fillfactor = 70);

-- Locks by which functions wait for each other: rows that only the owner can lock. Any login of the database can hold an advisory
-- lock. A name falls on one of 1,024 slots: names that share one wait for each other, which is rare and short.
CREATE TABLE rouse.lock (
    purpose text NOT NULL,
    slot    integer NOT NULL,
    PRIMARY KEY (purpose, slot)
);
INSERT INTO rouse.lock (purpose, slot)
SELECT purpose, slot FROM unnest(ARRAY['register', 'state', 'retry_jobs']) AS purpose, generate_series(0, 1023) AS slot;

-- One row: 244 random bits, which are part of the keys of the advisory locks of rouse._notify. Nobody can hold a key that he cannot
-- compute.
CREATE TABLE rouse.wake_salt (
    salt bytea NOT NULL
);
INSERT INTO rouse.wake_salt (salt) VALUES (uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()));

-- Workers that have nothing to do and want a NOTIFY. Hints: lost in a server crash, and then the
-- workers' polls write them again.
CREATE UNLOGGED TABLE rouse.sleeper (
    worker bigint NOT NULL,
    -- '*': any queue.
    queue  text NOT NULL,
    until  timestamptz NOT NULL,
    PRIMARY KEY (queue, worker)
);
