-- All privileges of all roles, granted from scratch: applying this file restores privileges that were revoked or
-- dropped. Privileges of other roles are not changed.
--
--   rouse_enqueuer  enqueues, and reads the state of individual jobs
--   rouse_producer  the same; cancels and reads individual jobs; schedules, and changes the schedules of its own login
--   rouse_operator  the same; reads what observers read, and performs all admin actions
--   rouse_worker    the functions that hosts call
--   rouse_handler   the two functions with which hosts start a transaction in a session of a handler's login; they
--                   check the worker's key
--   rouse_observer  reads everything except keys and fences, changes nothing
--
-- Each privilege is granted to every role that has it. If a role were a member of another, it would have that role's
-- privileges in every database of the server, and only an administrator could repair that.

REVOKE ALL ON SCHEMA rouse FROM PUBLIC, rouse_enqueuer, rouse_producer, rouse_operator, rouse_worker, rouse_handler, rouse_observer;
REVOKE ALL ON ALL TABLES IN SCHEMA rouse FROM PUBLIC, rouse_enqueuer, rouse_producer, rouse_operator, rouse_worker, rouse_handler, rouse_observer;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA rouse FROM PUBLIC, rouse_enqueuer, rouse_producer, rouse_operator, rouse_worker, rouse_handler, rouse_observer;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA rouse FROM PUBLIC, rouse_enqueuer, rouse_producer, rouse_operator, rouse_worker, rouse_handler, rouse_observer;

GRANT USAGE ON SCHEMA rouse TO rouse_enqueuer, rouse_producer, rouse_operator, rouse_worker, rouse_handler, rouse_observer;
-- These tables show whether a database is migrated.
GRANT SELECT ON rouse.migration, rouse.definitions TO PUBLIC;

-- Enqueuers.
GRANT EXECUTE ON FUNCTION rouse.enqueue, rouse.enqueue_unique, rouse.enqueue_and_report, rouse.enqueue_many, rouse.enqueue_flow, rouse.receipt TO rouse_enqueuer, rouse_producer, rouse_operator;

-- Producers.
GRANT EXECUTE ON FUNCTION
    rouse.cancel, rouse.cancel_chain, rouse.cancel_flow, rouse.job, rouse.result, rouse.chain, rouse.chain_result, rouse.flow, rouse.history, rouse.job_log,
    rouse.outcomes, rouse.wait, rouse.why, rouse.signal,
    rouse.schedule, rouse.unschedule, rouse.pause_schedule, rouse.resume_schedule, rouse.run_schedule, rouse.backfill_schedule
    TO rouse_producer, rouse_operator;

-- Operators.
GRANT EXECUTE ON FUNCTION
    rouse.complete, rouse.complete_chain, rouse.fail, rouse.delete, rouse.delete_chain, rouse.delete_flow, rouse.retry, rouse.retry_flow, rouse.retry_jobs, rouse.reschedule,
    rouse.set_priority, rouse.replace_payload,
    rouse.pause_queue, rouse.resume_queue, rouse.purge_queue, rouse.set_retention, rouse.set_default_retention, rouse.set_payload_limit, rouse.set_fair_share, rouse.set_dispatch, rouse.set_shards, rouse.set_gate, rouse.delete_gate,
    rouse.challenge, rouse.challenge_answer, rouse.forget_worker, rouse.clear_timeouts, rouse.set_state, rouse.delete_state
    TO rouse_operator;

-- Workers. Each function checks the worker's key, except reads, and rouse.prepare_partitions, which only creates tables
-- that are missing.
GRANT EXECUTE ON FUNCTION
    rouse.register, rouse.heartbeat, rouse.declare_fair_share, rouse.lease_shards, rouse.outlived, rouse.unregister, rouse.sleep, rouse.awake,
    rouse.peek, rouse.newest_lanes, rouse.promote, rouse.continue_releases, rouse.enforce_deadlines, rouse.overdue, rouse.remaining, rouse.remaining_bound, rouse.depth, rouse.fair_keys,
    rouse.claim, rouse.claim_bound, rouse.claimed, rouse.orphans, rouse.adopt, rouse.settle, rouse.renew,
    rouse.recorded_steps, rouse.recorded_results, rouse.record_step, rouse.confirm, rouse.take_signal, rouse.returned_calls, rouse.parent_ends,
    rouse.report, rouse.report_usage, rouse.append_log,
    rouse.read_state, rouse.state_keys, rouse.write_state, rouse.erase_state,
    rouse.challenges, rouse.answer_challenge, rouse.take_audit_outbox,
    rouse.due_schedules, rouse.fire_schedules, rouse.fire_backfill, rouse.maintain_schedules,
    rouse.module_schedules, rouse.put_module_schedule, rouse.delete_module_schedule, rouse.declare_gates,
    rouse.recover_direct, rouse.prepare_partitions, rouse.maintain_partitions, rouse.maintain_lanes, rouse.maintain_dependencies,
    rouse.maintain_signals, rouse.maintain_flows, rouse.maintain_gate_keys
    TO rouse_worker;
GRANT SELECT ON rouse.queue, rouse.gate, rouse.lane, rouse.workers, rouse.handlers, rouse.backlog TO rouse_worker;

-- The logins of handlers.
GRANT EXECUTE ON FUNCTION rouse.settle_with_effects, rouse.record_step_with_effects TO rouse_handler;

-- Observers, and operators.
GRANT EXECUTE ON FUNCTION rouse.job, rouse.result, rouse.chain, rouse.chain_result, rouse.flow, rouse.history, rouse.audit, rouse.job_log, rouse.search_jobs, rouse.find_jobs,
    rouse.outcomes, rouse.wait, rouse.why,
    rouse.depth, rouse.fair_keys, rouse.gate_keys, rouse.remaining, rouse.remaining_bound
    TO rouse_observer, rouse_operator;
-- Views run with the privileges of their owner; these functions run with those of the reader.
GRANT EXECUTE ON FUNCTION rouse._usage, rouse._payload, rouse._by, rouse._count_flow TO rouse_observer, rouse_operator;
GRANT SELECT ON
    rouse.queue, rouse.gate, rouse.gate_key, rouse.lease_floor, rouse.shard, rouse.shard_lease, rouse.lane, rouse.limits, rouse.deadline, rouse.dependency, rouse.pending_release, rouse.kept_end, rouse.flow, rouse.schedule, rouse.schedule_run, rouse.backfill, rouse.finished, rouse.payload, rouse.attempt, rouse.record, rouse.step, rouse.signal, rouse.log, rouse.sleeper,
    rouse.handler_state, rouse.contract, rouse.contract_version, rouse.challenge, rouse.audit_outbox, rouse.worker_login,
    rouse.jobs, rouse.flows, rouse.schedules, rouse.queue_settings, rouse.queues, rouse.gates, rouse.backlog, rouse.workers, rouse.handlers, rouse.contracts, rouse.usage, rouse.top
    TO rouse_observer, rouse_operator;
-- All columns except the fence.
GRANT SELECT (id, lane, turn, worker, retried_from, chain, flow, flow_name, requested_at, available_at, claimed_at, lease_until, attempt, uncounted,
              max_attempts, blockers, state, bytes, tenant, source, unique_key, payload, payload_at, wake, memory_bytes, grants, lease_ms, timeout_ms,
              after, wait, origin, trace)
    ON rouse.job TO rouse_observer, rouse_operator;
GRANT SELECT (job, percent, step, at) ON rouse.progress TO rouse_observer, rouse_operator;
GRANT SELECT (job, worker, cpu_us, memory_bytes, host_calls, bytes_in, bytes_out, at) ON rouse.running TO rouse_observer, rouse_operator;
-- What people read of workers; not the hash of the key.
GRANT SELECT (worker_id, incarnation, hostname, platform, version, handlers, parked, capabilities, slots, queues, tags,
              registered_at, seen_at, draining_at, dead_at, replaced_at, outlived_at, stopped_at, stats, stats_at, refused, login, limited)
    ON rouse.worker TO rouse_worker, rouse_observer, rouse_operator;
GRANT SELECT (worker, worker_id, draining, handlers, parked, queues, tags, login, limited) ON rouse.live_worker TO rouse_observer, rouse_operator;
-- Partitions; rouse.prepare_partitions grants the privileges on new ones.
DO $$
DECLARE
    partition regclass;
BEGIN
    FOR partition IN
        SELECT c.oid FROM pg_class AS c WHERE c.relnamespace = 'rouse'::regnamespace AND c.relispartition AND c.relkind IN ('r', 'p')
    LOOP
        EXECUTE format('GRANT SELECT ON %s TO rouse_observer, rouse_operator', partition);
    END LOOP;
END
$$;
