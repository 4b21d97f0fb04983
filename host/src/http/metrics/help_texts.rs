//! The help text of each metric, for the `# HELP` lines of the page. The same as in docs/reference/metrics.md.

use metrics::{describe_counter, describe_gauge, describe_histogram};

/// The names of the counters, and what they count.
const COUNTERS: [(&str, &str); 13] = [
    (
        "rouse_jobs_claimed_total",
        "Jobs claimed or adopted by this host.",
    ),
    ("rouse_attempts_total", "Attempts by outcome."),
    (
        "rouse_attempt_errors_total",
        "Attempts that did not succeed, by kind of error.",
    ),
    (
        "rouse_jobs_adopted_total",
        "Jobs that this host took over because their worker was dead or had stopped.",
    ),
    (
        "rouse_jobs_lost_total",
        "Lost jobs that this host found and that were not adopted at once.",
    ),
    (
        "rouse_lease_losses_total",
        "Attempts that had lost their job, by abort reason.",
    ),
    (
        "rouse_log_lines_lost_total",
        "Guest log lines that could not be kept with their attempts.",
    ),
    (
        "rouse_otlp_requests_total",
        "Requests to the collector of traces and logs, by signal and outcome.",
    ),
    (
        "rouse_invocations_total",
        "Handlers run without the queue, by outcome.",
    ),
    (
        "rouse_invocations_refused_total",
        "Refused calls to /invoke, by reason.",
    ),
    (
        "rouse_fair_selections_total",
        "Jobs claimed from fair queues, by key.",
    ),
    (
        "rouse_fair_deferrals_total",
        "Claims that did not take any job of a key although it had jobs.",
    ),
    (
        "rouse_fair_starvation_promotions_total",
        "Jobs that went first because they had waited too long.",
    ),
];

/// The names of the gauges, and what they show.
const GAUGES: [(&str, &str); 13] = [
    (
        "rouse_build_info",
        "1, with the version of this host as a label.",
    ),
    ("rouse_attempts_running", "Running attempts."),
    (
        "rouse_worker_timeouts",
        "Timed-out attempts that this worker's timeout flag counts.",
    ),
    (
        "rouse_handler_parked",
        "1 if the handler is parked on this host, otherwise 0.",
    ),
    ("rouse_invocations_running", "Running invocations."),
    (
        "rouse_jobs",
        "Jobs in the whole database by queue, handler and state, counted up to 10,000 per lane, about a million in all.",
    ),
    (
        "rouse_oldest_wait_seconds",
        "The time that the oldest ready job has waited.",
    ),
    (
        "rouse_fair_deficit",
        "The turns that a key of a fair queue has left in this round.",
    ),
    (
        "rouse_fair_oldest_ready_seconds",
        "The time that the oldest ready job of a key of a fair queue has waited.",
    ),
    (
        "rouse_dead_rows",
        "Dead rows, not vacuumed yet, in the table of live jobs.",
    ),
    (
        "rouse_oldest_transaction_seconds",
        "The age of the oldest transaction that keeps dead rows.",
    ),
    (
        "rouse_xmin_age_transactions",
        "The age in transactions of the oldest snapshot, prepared transaction or replication slot.",
    ),
    (
        "rouse_notification_queue_usage",
        "The used share of the server's notification queue, 0 to 1.",
    ),
];

/// The names of the histograms and summaries, and what they measure.
const HISTOGRAMS: [(&str, &str); 5] = [
    (
        "rouse_attempt_seconds",
        "The time in the sandbox, without that of middleware.",
    ),
    (
        "rouse_wait_seconds",
        "From the moment at which a job became ready to its claim.",
    ),
    (
        "rouse_scheduled_delay_seconds",
        "For scheduled jobs, and jobs that wait for others: from the enqueue to the moment at which they became ready.",
    ),
    ("rouse_settle_batch_jobs", "Outcomes per statement."),
    (
        "rouse_invocation_seconds",
        "From the call to the sandbox to its end, without the queue.",
    ),
];

/// Describes the metrics of this process to its recorder.
pub(super) fn describe() {
    for (name, help) in COUNTERS {
        describe_counter!(name, help);
    }
    for (name, help) in GAUGES {
        describe_gauge!(name, help);
    }
    for (name, help) in HISTOGRAMS {
        describe_histogram!(name, help);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn exactly_the_metrics_of_the_reference_page_have_a_help_text() {
        let page = include_str!("../../../../docs/reference/metrics.md");
        let rows = page
            .lines()
            .filter_map(|line| line.strip_prefix("| `rouse_"));
        let listed: BTreeSet<&str> = rows
            .filter_map(|row| row.split(['`', '{']).next())
            .collect();
        let all = COUNTERS.iter().chain(&GAUGES).chain(&HISTOGRAMS);
        let named: BTreeSet<&str> = all
            .filter_map(|(name, _)| name.strip_prefix("rouse_"))
            .collect();
        assert_eq!(named, listed);
    }
}
