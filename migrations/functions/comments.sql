-- One sentence for each function that roles other than the owner may call: `\df+ rouse.*` shows it.

-- Producers.
COMMENT ON FUNCTION rouse.enqueue IS
    'Enqueues a job in the transaction of the caller and returns its id.';
COMMENT ON FUNCTION rouse.enqueue_unique IS
    'Enqueues a job with a unique key; returns its id or that of the job to which it gave way, whether this call created it, and how the job with the key differs.';
COMMENT ON FUNCTION rouse.enqueue_and_report IS
    'Enqueues a job like rouse.enqueue, and returns what rouse.enqueue_unique returns.';
COMMENT ON FUNCTION rouse.enqueue_many IS
    'Enqueues one job for each payload and returns their ids in the same order.';
COMMENT ON FUNCTION rouse.enqueue_flow IS
    'Enqueues a graph of jobs that wait for each other, and returns the id of the flow.';
COMMENT ON FUNCTION rouse.receipt IS
    'Returns the state of one job and when it was enqueued and ended; no row if it does not exist or is no longer kept.';
COMMENT ON FUNCTION rouse.job IS
    'Returns one job, live or finished; no row if it does not exist or is no longer kept.';
COMMENT ON FUNCTION rouse.result IS
    'Returns the result of a job that has succeeded, otherwise null.';
COMMENT ON FUNCTION rouse.outcomes IS
    'Returns the state of each of these jobs and, once it has ended, its result or error.';
COMMENT ON FUNCTION rouse.wait IS
    'Waits until all of these jobs have ended or the timeout has expired, and returns how each of them has ended.';
COMMENT ON FUNCTION rouse.flow IS
    'Returns the latest job of each name in a flow, each after those that it waits for.';
COMMENT ON FUNCTION rouse.chain IS
    'Returns the jobs of a chain in order, given any of them.';
COMMENT ON FUNCTION rouse.chain_result IS
    'Returns the result of the last job of a chain that has succeeded, otherwise null.';
COMMENT ON FUNCTION rouse.history IS
    'Returns the history of one job, oldest event first.';
COMMENT ON FUNCTION rouse.why IS
    'Explains what keeps a job from starting: a row for each reason, with what would change it.';
COMMENT ON FUNCTION rouse.job_log IS
    'Returns the log lines of the attempts of a job in order, after a given line.';

-- Schedules.
COMMENT ON FUNCTION rouse.schedule IS
    'Creates or replaces a schedule in the transaction of the caller; returns created, replaced or unchanged.';
COMMENT ON FUNCTION rouse.unschedule IS
    'Deletes a schedule; true if it existed. Its jobs stay.';
COMMENT ON FUNCTION rouse.pause_schedule IS
    'Pauses a schedule and returns the time at which it was paused; its live jobs continue.';
COMMENT ON FUNCTION rouse.resume_schedule IS
    'Resumes a paused schedule; true if it was paused. Due times in between are not caught up.';
COMMENT ON FUNCTION rouse.run_schedule IS
    'Enqueues a job of a schedule now and returns its id.';
COMMENT ON FUNCTION rouse.backfill_schedule IS
    'Requests jobs for the due times of a schedule between two times of the past; returns the id of the backfill.';

-- Admin actions.
COMMENT ON FUNCTION rouse.cancel IS
    'Cancels a queued or running job; true if it is cancelled now, false if it had ended otherwise or does not exist.';
COMMENT ON FUNCTION rouse.cancel_flow IS
    'Cancels live jobs of a flow, at most a given number, and returns how many; call it until it returns 0.';
COMMENT ON FUNCTION rouse.signal IS
    'Sends a signal to a job and ends its wait for that signal, now or once it waits; false if the job has ended.';
COMMENT ON FUNCTION rouse.retry_flow IS
    'Retries jobs of a flow that did not succeed, at most a given number, and returns how many; call it until it returns 0.';
COMMENT ON FUNCTION rouse.delete_flow IS
    'Deletes the queued jobs of a flow and returns how many; refused while one runs, or while other jobs wait for the flow.';
COMMENT ON FUNCTION rouse.cancel_chain IS
    'Cancels the live job of a chain; true if the chain is cancelled now, false if it had ended otherwise.';
COMMENT ON FUNCTION rouse.complete_chain IS
    'Ends the live job of a chain as succeeded, with this result, and with it the chain.';
COMMENT ON FUNCTION rouse.delete_chain IS
    'Deletes the queued job of a chain; refused while other jobs wait for the chain, unless cascade is true: then they are cancelled first, 1000 in each call. Call it until it returns true.';
COMMENT ON FUNCTION rouse.complete IS
    'Ends a queued or running job as succeeded, with this result.';
COMMENT ON FUNCTION rouse.fail IS
    'Ends a queued or running job as failed with this message, regardless of its remaining attempts.';
COMMENT ON FUNCTION rouse.delete IS
    'Deletes a queued job: it counts as cancelled, and its history records the deletion. A running job is refused.';
COMMENT ON FUNCTION rouse.retry IS
    'Creates a new job from an ended one and returns its id; while a retry of it is live, returns the id of that retry.';
COMMENT ON FUNCTION rouse.retry_jobs IS
    'Retries one batch of ended jobs that match a filter and were never retried; returns them, the new jobs, those that could not be retried, and where to continue.';
COMMENT ON FUNCTION rouse.reschedule IS
    'Changes the time at which a queued job may start; a null time makes it ready at once.';
COMMENT ON FUNCTION rouse.set_priority IS
    'Changes the priority of a queued job.';
COMMENT ON FUNCTION rouse.replace_payload IS
    'Gives a queued job another payload, as a new job, and returns its id; the old one is cancelled and kept.';
COMMENT ON FUNCTION rouse.pause_queue IS
    'Stops claims from a queue and returns the time at which it was paused; running jobs continue.';
COMMENT ON FUNCTION rouse.resume_queue IS
    'Resumes a paused queue; true if it was paused.';
COMMENT ON FUNCTION rouse.purge_queue IS
    'Cancels ready jobs of a queue, the oldest of each lane first, and returns how many.';
COMMENT ON FUNCTION rouse.set_retention IS
    'Sets the number of days for which finished jobs of a queue are kept, and those that failed; 0 means the default retention.';
COMMENT ON FUNCTION rouse.set_payload_limit IS
    'Sets the maximum size of the payloads of a queue, in bytes.';
COMMENT ON FUNCTION rouse.set_default_retention IS
    'Sets the number of days for which finished jobs are kept if their queue has no retention of its own.';
COMMENT ON FUNCTION rouse.fair_keys IS
    'Returns the keys of fair queues that have jobs, with weight, ready and running jobs, and the age of the oldest.';
COMMENT ON FUNCTION rouse.set_fair_share IS
    'Sets how the jobs of a queue share its workers: tenants, handlers or sources take turns, with weights and a limit on jobs in flight.';
COMMENT ON FUNCTION rouse.gate_keys IS
    'Returns the keys of gates that have an effect now or have ready jobs, with running and ready jobs, how many may start, and when the gate opens.';
COMMENT ON FUNCTION rouse.set_dispatch IS
    'Sets how workers are chosen for the jobs of a queue when they are enqueued: in turn, by a hash of a key, at random, or not at all.';
COMMENT ON FUNCTION rouse.set_shards IS
    'Divides the lanes of a queue into shards, which workers lease; 0 means that they are not divided.';
COMMENT ON FUNCTION rouse.set_gate IS
    'Sets a gate: a limit on how many jobs run, how often they start, or which jobs of a burst are enqueued.';
COMMENT ON FUNCTION rouse.delete_gate IS
    'Deletes a gate and returns whether there was one.';
COMMENT ON FUNCTION rouse.challenge IS
    'Challenges a live worker to prove that it has the module of a handler; returns the nonce of the challenge.';
COMMENT ON FUNCTION rouse.challenge_answer IS
    'Returns the answer of a worker to a challenge, or null while there is none.';
COMMENT ON FUNCTION rouse.forget_worker IS
    'Removes the ended incarnations of a worker from the listings and returns how many there were; null: its heartbeat was ahead of the clock, call again.';
COMMENT ON FUNCTION rouse.clear_timeouts IS
    'Clears the timeout flag of all incarnations of a worker and returns how many had it.';
COMMENT ON FUNCTION rouse.set_state IS
    'Writes one key of the state of a handler, regardless of versions and quota.';
COMMENT ON FUNCTION rouse.delete_state IS
    'Deletes one key, or with a null key all keys, of the state of a handler for one tenant; returns how many.';

COMMENT ON FUNCTION rouse.audit IS
    'Lists the events since a time, the newest first: ended jobs and attempts, and records with the login of each admin action.';
COMMENT ON FUNCTION rouse.unlock_history IS
    'Allows this transaction to change history, and records the login and the reason.';

-- Workers.
COMMENT ON FUNCTION rouse.register IS
    'Registers one incarnation of a worker id with its key and capabilities.';
COMMENT ON FUNCTION rouse.heartbeat IS
    'Renews the registration, changes capabilities, updates statistics, and expires workers without a heartbeat for 90 s.';
COMMENT ON FUNCTION rouse.outlived IS
    'Records that the host of an ended incarnation is alive, so that its lost attempts do not count as crashes.';
COMMENT ON FUNCTION rouse.unregister IS
    'Ends this incarnation and frees the jobs that it has claimed.';
COMMENT ON FUNCTION rouse.sleep IS
    'Requests notifications for these queues for a given time.';
COMMENT ON FUNCTION rouse.awake IS
    'Ends the request for notifications.';
COMMENT ON FUNCTION rouse.declare_fair_share IS
    'Sets how the jobs of a queue share its workers, according to the settings of a worker.';
COMMENT ON FUNCTION rouse.lease_shards IS
    'Leases shards of queues for the worker, or renews the lease, and returns its shards.';
COMMENT ON FUNCTION rouse.newest_lanes IS
    'Reads which lanes have newly enqueued jobs.';
COMMENT ON FUNCTION rouse.peek IS
    'Reads whether there is work: ready lanes, due jobs, orphans, new lanes.';
COMMENT ON FUNCTION rouse.continue_releases IS
    'Releases more of the jobs that wait for chains that have ended; true if there is more to do at once.';
COMMENT ON FUNCTION rouse.enforce_deadlines IS
    'Ends jobs whose job timeout has expired, and returns the number of deadlines that it has handled, those jobs, and when the next deadline passes.';
COMMENT ON FUNCTION rouse.promote IS
    'Gives due jobs their turn and returns when the next job is due.';
COMMENT ON FUNCTION rouse.overdue IS
    'Lists the lanes whose next job has waited too long.';
COMMENT ON FUNCTION rouse.claim IS
    'Claims ready jobs of these lanes.';
COMMENT ON FUNCTION rouse.claim_bound IS
    'Claims ready jobs of these lanes that come from these sources; returns their ids, and which sources had no ready job in which lane.';
COMMENT ON FUNCTION rouse.claimed IS
    'Returns the jobs of one claim of this worker; the ids of those that it has lost are left out.';
COMMENT ON FUNCTION rouse.orphans IS
    'Lists jobs whose lease has ended, with the facts on which the decision about them depends.';
COMMENT ON FUNCTION rouse.adopt IS
    'Takes over jobs whose lease has ended, checking their old fences; returns the ids of those taken over.';
COMMENT ON FUNCTION rouse.settle IS
    'Ends attempts behind their fences; returns the accepted and the locked jobs.';
COMMENT ON FUNCTION rouse.renew IS
    'Extends leases; returns the reason for each lease that is lost.';
COMMENT ON FUNCTION rouse.recorded_steps IS
    'Lists the recorded steps of jobs that are newer than those the worker knows, with the sizes of their results, and small results.';
COMMENT ON FUNCTION rouse.take_signal IS
    'Ends the wait of a job for a signal, if there is one or the wait has timed out.';
COMMENT ON FUNCTION rouse.returned_calls IS
    'Records and returns the ends of the jobs that a job has called.';
COMMENT ON FUNCTION rouse.parent_ends IS
    'Returns the ends of the chains that a job has waited for.';
COMMENT ON FUNCTION rouse.recorded_results IS
    'Returns results of recorded steps, as many as one response may hold.';
COMMENT ON FUNCTION rouse.record_step IS
    'Records the result of a step behind the fence; returns null or the reason for a refusal.';
COMMENT ON FUNCTION rouse.confirm IS
    'Returns whether an attempt whose settlement had no response still holds its job, has ended it, or has lost it.';
COMMENT ON FUNCTION rouse.settle_with_effects IS
    'Settles attempts that have succeeded, as the start of a transaction that continues with their effects.';
COMMENT ON FUNCTION rouse.record_step_with_effects IS
    'Records the result of a step, as the start of a transaction that continues with its effects.';
COMMENT ON FUNCTION rouse.report IS
    'Stores the progress of running attempts.';
COMMENT ON FUNCTION rouse.report_usage IS
    'Stores the resources that running attempts have used so far.';
COMMENT ON FUNCTION rouse.append_log IS
    'Stores log lines of attempts and returns how many are stored.';
COMMENT ON FUNCTION rouse.read_state IS
    'Reads one key of the state of the handler of a job.';
COMMENT ON FUNCTION rouse.state_keys IS
    'Lists keys of the state of the handler of a job.';
COMMENT ON FUNCTION rouse.write_state IS
    'Writes one key of the state of the handler of a job, behind the fence and within the quota.';
COMMENT ON FUNCTION rouse.erase_state IS
    'Deletes one key of the state of the handler of a job, behind the fence.';
COMMENT ON FUNCTION rouse.challenges IS
    'Lists the open challenges of this incarnation.';
COMMENT ON FUNCTION rouse.answer_challenge IS
    'Answers one challenge; false if it is not open.';
COMMENT ON FUNCTION rouse.take_audit_outbox IS
    'Deletes admin actions that this worker has logged, and returns others that it has to log.';
COMMENT ON FUNCTION rouse.due_schedules IS
    'Lists the schedules that are due, unfinished backfills, and when the next schedule is due.';
COMMENT ON FUNCTION rouse.fire_schedules IS
    'Writes the outcomes of due times, for schedules that have not changed since they were listed; returns their names.';
COMMENT ON FUNCTION rouse.fire_backfill IS
    'Enqueues the next jobs of a backfill; false if another host has continued it.';
COMMENT ON FUNCTION rouse.maintain_schedules IS
    'Deletes old rows about due times and finished backfills.';
COMMENT ON FUNCTION rouse.module_schedules IS
    'Lists the schedules that modules of live workers declare, and those that hosts have created for modules.';
COMMENT ON FUNCTION rouse.put_module_schedule IS
    'Creates or replaces the schedule of a handler as its module declares it.';
COMMENT ON FUNCTION rouse.delete_module_schedule IS
    'Deletes the schedule of a handler whose module no longer declares it; true if it existed.';
COMMENT ON FUNCTION rouse.declare_gates IS
    'Sets the gates that the module of a handler declares, and deletes those that it declared before; true if that changes any.';
COMMENT ON FUNCTION rouse.maintain_partitions IS
    'Drops expired partitions, stale progress and stale usage.';
COMMENT ON FUNCTION rouse.maintain_lanes IS
    'Closes lanes that have had no job for a day and removes those that nothing refers to.';
COMMENT ON FUNCTION rouse.recover_direct IS
    'Moves jobs from the inboxes of workers that no longer take them to shared lanes.';
COMMENT ON FUNCTION rouse.maintain_dependencies IS
    'Finds jobs that wait for chains that have ended.';
COMMENT ON FUNCTION rouse.maintain_signals IS
    'Deletes signals to jobs that have ended, and returns where to continue.';
COMMENT ON FUNCTION rouse.maintain_flows IS
    'Deletes flows of which no job is kept, and returns where to continue.';
COMMENT ON FUNCTION rouse.maintain_gate_keys IS
    'Deletes the keys of gates that no longer have an effect, and returns where to continue.';
COMMENT ON FUNCTION rouse.prepare_partitions IS
    'Creates the partitions of today and the next days; returns how many.';

-- Observers.
COMMENT ON FUNCTION rouse.search_jobs IS
    'Returns the ids of jobs that match a filter, the newest first, examining a bounded number of jobs, and where to continue.';
COMMENT ON FUNCTION rouse.find_jobs IS
    'Returns jobs that match a filter, the newest first, examining a bounded number of jobs.';
COMMENT ON FUNCTION rouse.depth IS
    'Counts the jobs of each lane: ready, scheduled, running.';
COMMENT ON FUNCTION rouse.remaining IS
    'Counts the jobs of a queue by handler and required tags: ready, due, scheduled, running.';
COMMENT ON FUNCTION rouse.remaining_bound IS
    'Counts the jobs of a queue that come from these sources and could run now.';
COMMENT ON FUNCTION rouse._payload IS
    'Returns the payload of a job, from its row or from rouse.payload; the view rouse.jobs calls it with the privileges of the reader.';
COMMENT ON FUNCTION rouse._by IS
    'Formats the login of an admin action and the user of the dashboard on whose behalf it acted.';
COMMENT ON FUNCTION rouse._count_flow IS
    'Counts the jobs of a flow in each state; the view rouse.flows calls it with the privileges of the reader.';
COMMENT ON FUNCTION rouse._usage IS
    'Formats the resource usage of an attempt as JSON; the view rouse.jobs calls it with the privileges of the reader.';

-- Contracts.
COMMENT ON FUNCTION rouse.publish_contracts IS
    'Publishes the contracts of handlers in one transaction and returns the changes; for the owner.';
COMMENT ON FUNCTION rouse.delete_contracts IS
    'Deletes contracts with their typed functions and returns the handlers that had one; for the owner.';
