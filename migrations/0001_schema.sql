-- The tables of Rouse: small live tables, and history in daily partitions that are dropped.

REVOKE ALL ON SCHEMA rouse FROM PUBLIC;
GRANT USAGE ON SCHEMA rouse TO rouse_producer, rouse_worker, rouse_observer;

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
    payload_bytes_max integer NOT NULL DEFAULT 262144 CHECK (payload_bytes_max BETWEEN 2 AND 67108864),
    created_at        timestamptz NOT NULL DEFAULT now()
);
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
    tags     text[] NOT NULL
);
CREATE INDEX lane_key ON rouse.lane (handler, queue, priority, tags);
CREATE INDEX lane_id ON rouse.lane (id);

-- One row for each life of a worker.
CREATE TABLE rouse.worker (
    incarnation   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    worker_id     text NOT NULL CHECK (worker_id ~ '^[A-Za-z0-9_-]{1,64}$'),
    hostname      text NOT NULL,
    version       text NOT NULL,
    handlers      text[] NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT now(),
    seen_at       timestamptz NOT NULL DEFAULT now(),
    stopped_at    timestamptz
);

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
    available_at timestamptz NOT NULL CHECK (isfinite(available_at)),
    claimed_at   timestamptz,
    lease_until  timestamptz,
    -- Attempts begun, the running one included.
    attempt      integer NOT NULL DEFAULT 0 CHECK (attempt >= 0),
    -- How many of them were lost with their worker.
    lost         integer NOT NULL DEFAULT 0 CHECK (lost BETWEEN 0 AND attempt),
    -- Null: the handler's own.
    max_attempts integer CHECK (max_attempts BETWEEN 1 AND 1000),
    state        rouse.state NOT NULL DEFAULT 'queued',
    tenant       text,
    source       text,
    -- 'handler/key': unique among the live jobs of a handler, whose name has no slash.
    unique_key   text,
    payload      jsonb NOT NULL,
    CONSTRAINT job_is_live CHECK (state IN ('queued', 'running')),
    CONSTRAINT running_job_has_an_owner CHECK (
        (state = 'running') = (fence IS NOT NULL)
        AND (state = 'running') = (worker IS NOT NULL)
        AND (state = 'running') = (claimed_at IS NOT NULL)
        AND (state = 'running') = (lease_until IS NOT NULL)
        AND (state = 'queued' OR (turn IS NOT NULL AND attempt > 0)))
) WITH (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_cost_delay = 0
);
-- Serves claims: the next turns of a lane.
CREATE INDEX job_ready ON rouse.job (lane, turn) WHERE state = 'queued' AND turn IS NOT NULL;
-- Serves promotion: what is due next.
CREATE INDEX job_due ON rouse.job (available_at) WHERE state = 'queued' AND turn IS NULL;
-- Serves adoption: whose lease has run out.
CREATE INDEX job_lease ON rouse.job (lease_until) WHERE state = 'running';
CREATE UNIQUE INDEX job_unique_key ON rouse.job (unique_key) WHERE unique_key IS NOT NULL;

-- Finished jobs. Insert-only, one partition a day.
CREATE TABLE rouse.finished (
    id           bigint NOT NULL,
    lane         bigint NOT NULL,
    worker       bigint,
    retried_from bigint,
    requested_at timestamptz NOT NULL,
    available_at timestamptz NOT NULL,
    claimed_at   timestamptz,
    started_at   timestamptz,
    finished_at  timestamptz NOT NULL,
    attempt      integer NOT NULL,
    lost         integer NOT NULL,
    max_attempts integer,
    state        rouse.state NOT NULL CHECK (state NOT IN ('queued', 'running')),
    tenant       text,
    source       text,
    unique_key   text,
    payload      jsonb NOT NULL,
    result       jsonb,
    error        jsonb,
    CHECK ((state = 'succeeded') = (result IS NOT NULL)),
    CHECK ((state IN ('failed', 'timed_out')) = (error IS NOT NULL))
) PARTITION BY RANGE (finished_at);
CREATE INDEX finished_id ON rouse.finished (id);

-- Attempts that ended without finishing their job: failed ones that were retried, and lost ones.
-- Insert-only, one partition a day.
CREATE TABLE rouse.attempt (
    job        bigint NOT NULL,
    attempt    integer NOT NULL,
    lost       boolean NOT NULL,
    worker     bigint NOT NULL,
    claimed_at timestamptz NOT NULL,
    -- Null for a lost attempt: only its worker knew.
    started_at timestamptz,
    ended_at   timestamptz NOT NULL,
    error      jsonb NOT NULL
) PARTITION BY RANGE (ended_at);
CREATE INDEX attempt_job ON rouse.attempt (job);

-- Workers that have nothing to do and want a NOTIFY. Hints: lost in a server crash, and then the
-- workers' polls write them again.
CREATE UNLOGGED TABLE rouse.sleeper (
    worker bigint NOT NULL,
    -- '*': any queue.
    queue  text NOT NULL,
    until  timestamptz NOT NULL,
    PRIMARY KEY (queue, worker)
);

GRANT SELECT ON rouse.queue, rouse.lane, rouse.worker TO rouse_worker;
GRANT SELECT ON ALL TABLES IN SCHEMA rouse TO rouse_observer;
