//! The `#[handler]` attribute of rouse-sdk.

mod duration;
mod expand;
mod limits;
mod options;

use proc_macro::TokenStream;

/// Turns a function into a handler.
///
/// The function takes the context and an input, or only an input, and may be plain or `async`: `fn(&Ctx, Input) ->
/// Result<Output, E>`, `fn(Input) -> Output`. The input is `serde::Deserialize + schemars::JsonSchema`, the output
/// `serde::Serialize + schemars::JsonSchema`, and the error can be any type that `?` turns into a `rouse_sdk::Error`.
/// The function itself is left unchanged. The types of a public function also have to be public.
///
/// | option | value | default |
/// |---|---|---|
/// | `name` | `"email.send"`: the name that jobs are enqueued under | required |
/// | `version` | text | the crate's version |
/// | `description` | text | the function's doc comment |
/// | `max_attempts` | the maximum number of attempts, 1 to 1,000 | 20 |
/// | `retry_initial` | `"10s"`: the wait after the first failed attempt, up to 30 days | 10 s |
/// | `retry_multiplier` | the factor by which each further wait grows, 1 to 1,000 | 2 |
/// | `retry_max` | `"5m"`: the longest wait, up to 30 days, and not shorter than the first | 3 h |
/// | `retry_jitter` | the random share of the wait, 0 to 1 | 0.2 |
/// | `lease` | `"1m"`: the duration of a claim without renewal, 2 seconds to a day | the host's default |
/// | `timeout` | `"1h"`: the run timeout of an attempt, up to 30 days | the host's default |
/// | `grace` | `"5s"`: from the abort signal to the hard stop, up to 10 minutes | the host's default |
/// | `concurrency` | the number of attempts of the handler that may run at the same time on one host | as many as there are slots |
/// | `instances` | `"reuse"`: an instance may serve many jobs, see the README | `"fresh"` |
/// | `schedule` | `"0 3 * * *"`: the times at which the handler runs, if the operator allows it; five cron fields, or six with seconds first | never |
/// | `schedule_time_zone` | `"Europe/Berlin"`: the time zone of the schedule | UTC |
/// | `max_concurrent(…)` | `max_concurrent(max = 5, key = "tenant")`: the number of jobs that run at the same time, on all hosts | any number |
/// | `throttle(…)` | `throttle(max = 100, period = "1m", burst = 10, key = "$.api")`: the number of jobs that start in a period; with `burst`, on average, and at most `burst` at once | any number |
/// | `batch(…)` | `batch(max = 100, period = "500ms", key = "$.list")`: up to `max` jobs of a tenant in one attempt, when `max` are ready, or when the first has waited for the period; without a period, those that are ready. The function takes `Vec<BatchJob<Input>>` and returns `Vec<Result<Output>>`, or a `Result` of that | one job in each attempt |
/// | `singleton(…)` | `singleton(key = "$.doc", during = "queued", on_conflict = "keep")`: while there is a job, no other is enqueued. `during`: `"queued"` (until it has started), `"running"` (until it has ended) or `"period"` (with `period = "1h"`, starting when it is enqueued). `on_conflict`: `"keep"` the earlier job, `"replace"` its payload, or `"refuse"` the enqueue | none |
/// | `debounce(…)` | `debounce(period = "5s", max_wait = "1m", key = "$.doc", edge = "trailing")`: a burst of jobs becomes one. `edge`: the last job runs, when none was enqueued for a period (`"trailing"`), or the first one, at once (`"leading"`). `max_wait`: the maximum duration of a burst | none |
/// | `sql(…)` | `sql(mark_paid = "UPDATE orders SET paid_at = now() WHERE id = $1", rows = 1, on_error = "retry")`: a SQL statement that the handler may run, if the operator grants it; one `sql(…)` for each statement. `rows`: the number of rows that it has to affect or return. `on_error`: `"fail"` (the default) or `"retry"` the job if Postgres refuses the data | none |
/// | `capabilities` | what the handler needs to be granted: `["http:api.example.com", "secrets:MAIL_KEY", "sign:HOOK_KEY", "dirs:/photos", "dirs:/out:read-write", "env:LANG", "settings:threshold", "state", "enqueue:photo.*", "fine_clocks"]`; `"dirs"`, without the part after the colon, means any directory, and so on | nothing |
///
/// The options from `max_concurrent` to `debounce` are gates. A handler has at most 8; each kind except `batch` may
/// occur several times. `key` is the scope of each limit: `"tenant"`, `"source"`, `"handler"`, `"queue"`, a path of the
/// payload such as `"$.customer.id"`, or a list of two of these; without it, there is one limit for all jobs of the
/// handler. Hosts write the gates to the database when they load the module.
///
/// Durations are a whole number and a unit: `ms`, `s`, `m`, `h` or `d`. Values are checked at compile time against the
/// limits of the host, which would otherwise refuse the whole module. For a schedule, the macro checks the number of
/// fields and their characters; for a time zone, it checks the spelling. The host checks the rest. The operator's
/// settings take precedence over all of these options.
///
/// See the documentation of `rouse_sdk` for a whole handler.
#[proc_macro_attribute]
pub fn handler(options: TokenStream, function: TokenStream) -> TokenStream {
    expand::handler(options.into(), function.into()).into()
}
