-- The records that functions take or pass on. A field of a record that workers send is defined twice: in its type here,
-- and in the struct in host/src/store/ with `#[postgres(name = "…")]`.
--
-- A type never changes after its release, because a record with another number of fields is rejected: a new field
-- requires a new type (settlement_2), a new signature of the function, and a new protocol number (PROTOCOL in
-- host/src/store/migrate/sources.rs).
DO $$
BEGIN
    -- A lane to claim from: the jobs whose turn is after `after`, with this lease.
    --   max        the maximum number of its jobs; null: as many as are wanted
    --   waited_ms  of the next `max` jobs, only those that have waited this long (as in rouse.overdue); null: any
    IF to_regtype('rouse.claim_order') IS NULL THEN
        CREATE TYPE rouse.claim_order AS (lane bigint, after bigint, lease_ms bigint, max integer, waited_ms bigint);
    END IF;
    -- Not sent by workers: a lane of a claim, and the key of a gate that limits it (gates.sql).
    --   room     max_concurrent: the number of its jobs that may start; batch: the number of its jobs that fill
    --            batches, or have waited long enough; throttle: null
    --   wait_ms  throttle: the time until a job may start; null: one may start now. batch: the time until the next look
    --            for the remaining jobs
    IF to_regtype('rouse.gated_lane') IS NULL THEN
        CREATE TYPE rouse.gated_lane AS (lane bigint, gate text, key text, room integer, wait_ms bigint);
    END IF;
    -- The decision about an orphan.
    --   fence     that of the lost attempt
    --   next      running: this worker claims it, with lease_ms; queued: it waits for delay_ms; failed
    --   crashes   the number of crashes on which the decision is based
    IF to_regtype('rouse.adoption') IS NULL THEN
        CREATE TYPE rouse.adoption AS (id bigint, fence bigint, next text, crashes bigint, delay_ms bigint, lease_ms bigint);
    END IF;
    -- The end of an attempt.
    --   state       succeeded, failed, timed_out, cancelled: the job's final state;
    --               queued with an error: retry after delay_ms; queued with a result: suspended,
    --               and the result is the wait (suspensions.sql); queued with neither: the claim is
    --               released, and the attempt does not count
    --   started_us  microseconds from the claim to the real start; null: it never started
    --   retry_at    retry at this time instead
    --   next_memory_bytes  memory of the next attempt, bytes; null: unchanged
    --   cpu_us … digest    the resources used, and the SHA-256 of the module that ran; null: nothing ran
    --   handler     the handler that ran, if it is not the job's; null: the job's
    IF to_regtype('rouse.settlement') IS NULL THEN
        CREATE TYPE rouse.settlement AS (
            id bigint, fence bigint, state text, started_us bigint, result jsonb, error jsonb, delay_ms bigint, retry_at timestamptz,
            next_memory_bytes bigint, cpu_us bigint, memory_peak_bytes bigint, host_calls integer, bytes_in bigint, bytes_out bigint,
            digest bytea, handler text);
    END IF;
    -- A job that an attempt enqueues.
    --   parent   the job of the attempt
    --   kind     child; call: the parent waits for it; next: it continues the parent's chain
    --   step     of a call
    --   options  arguments of rouse.enqueue; null: none
    --   trace    the trace context of the attempt; null: none
    IF to_regtype('rouse.new_job') IS NULL THEN
        CREATE TYPE rouse.new_job AS (parent bigint, kind text, step text, handler text, payload jsonb, options jsonb, trace text);
    END IF;
    -- Not sent by workers: what the jobs that an attempt enqueues inherit from the attempt's own job (children.sql),
    -- without the payload.
    IF to_regtype('rouse.parent_job') IS NULL THEN
        CREATE TYPE rouse.parent_job AS (
            id bigint, lane bigint, chain bigint, flow bigint, flow_name text, tenant text, grants jsonb, origin jsonb);
    END IF;
    -- The progress of an attempt.
    IF to_regtype('rouse.progress_report') IS NULL THEN
        CREATE TYPE rouse.progress_report AS (id bigint, fence bigint, percent integer, step text);
    END IF;
    -- The resources that an attempt has used so far.
    IF to_regtype('rouse.attempt_usage') IS NULL THEN
        CREATE TYPE rouse.attempt_usage AS (
            id bigint, fence bigint, cpu_us bigint, memory_bytes bigint, host_calls integer, bytes_in bigint, bytes_out bigint);
    END IF;
    -- A line that an attempt printed or logged, with its age in milliseconds.
    IF to_regtype('rouse.log_line') IS NULL THEN
        CREATE TYPE rouse.log_line AS (id bigint, attempt integer, line integer, age_ms bigint, level text, text text);
    END IF;
    -- A schedule whose due times up to handled_until are handled, if its revision is still this one.
    --   next_at   the next due time; null: there is none
    --   upcoming  the next five due times
    --   error     the reason why they cannot be computed; null: they can
    IF to_regtype('rouse.schedule_change') IS NULL THEN
        CREATE TYPE rouse.schedule_change AS (
            name text, revision bigint, handled_until timestamptz, next_at timestamptz, upcoming timestamptz[], error text);
    END IF;
    -- The decision about a due time of a schedule.
    --   action  enqueue; queue: behind the previous job; replace: cancel the previous job first; skip, miss, refuse: no
    --           job
    --   run_at  the due time with jitter; null: at once
    --   error   with refuse: the reason
    IF to_regtype('rouse.schedule_firing') IS NULL THEN
        CREATE TYPE rouse.schedule_firing AS (name text, due_at timestamptz, action text, run_at timestamptz, error text);
    END IF;
END
$$;
