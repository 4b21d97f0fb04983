//! Traces of jobs, from their producer through their attempts to requests and children, as a collector receives them.

mod batches;
mod exemplars;
mod producers;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::{Span, status::StatusCode};
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::example_effects;
use crate::payloads::{DAMAGE, REPAIR, large, query_number};
use crate::support::collector::{Behaviour, Collector, attribute, text};
use crate::support::web::web;
use crate::support::worker::{TIMEOUT, cancel, ended, enqueue, guests_dir, until_true};
use crate::support::{Host, TestDb, rouse, scratch};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PRODUCER: &str = "b7ad6b7169203331";

/// The trace context of a producer whose trace is recorded.
fn producer() -> String {
    format!("00-{TRACE}-{PRODUCER}-01")
}

/// A host that exports to this collector.
struct Traced {
    host: Host,
    collector: Collector,
}

impl Traced {
    async fn start(db: &TestDb, behaviour: Behaviour, variables: &[(&str, &str)]) -> Self {
        Self::start_at(db, behaviour, "off", variables).await
    }

    async fn start_at(
        db: &TestDb,
        behaviour: Behaviour,
        http: &str,
        variables: &[(&str, &str)],
    ) -> Self {
        Self::start_as(serve(db, http), behaviour, variables).await
    }

    async fn start_as(
        mut command: Command,
        behaviour: Behaviour,
        variables: &[(&str, &str)],
    ) -> Self {
        let collector = Collector::start(behaviour).await;
        command
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint())
            .envs(variables.iter().copied());
        let host = Host::spawn(command);
        host.line(TIMEOUT, |line| line.contains("worker started"));
        Self { host, collector }
    }

    /// Ends the host, which sends what it has recorded.
    fn stop(self) -> Collector {
        self.host.stop();
        self.collector
    }
}

/// The command of a host with the grants that the guests of these tests need.
fn serve(db: &TestDb, http: &str) -> Command {
    let folder: PathBuf = scratch("traces");
    let config = folder.join("rouse.toml");
    let settings = format!(
        "[[handlers.\"test.http.private\".http]]\n\
         hosts = [\"localhost\"]\nschemes = [\"http\"]\nports = [{}]\nprivate = true\n\
         [handlers.\"flow.*\"]\nenqueue = [\"flow.*\"]\n",
        web().plain
    );
    std::fs::write(&config, settings).unwrap();
    serve_from(db, http, &guests_dir(), &config)
}

fn serve_from(db: &TestDb, http: &str, handlers: &Path, config: &Path) -> Command {
    let mut command = rouse();
    command
        .args([
            "serve",
            "--http",
            http,
            "--worker-id",
            "traced",
            "--handlers",
        ])
        .arg(handlers)
        .arg("--config")
        .arg(config)
        .env("DATABASE_URL", db.url());
    command
}

/// A request of the guest to this path.
fn requests(path: &str) -> Value {
    json!({"requests": [{"url": format!("http://localhost:{}{path}?secret=1", web().plain)}]})
}

/// The `traceparent` header of the last request to this path.
fn sent_traceparent(path: &str) -> Value {
    web().seen(path).last().expect("a request")["headers"]["traceparent"].clone()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The spans of a job with this name, in the order of their starts.
fn spans_of_job(spans: &[Span], name: &str, job: i64) -> Vec<Span> {
    let job = Some(job.to_string());
    let is_of = |span: &&Span| {
        span.name == name && attribute(&span.attributes, "messaging.message.id") == job
    };
    let mut found: Vec<Span> = spans.iter().filter(is_of).cloned().collect();
    found.sort_by_key(|span| span.start_time_unix_nano);
    found
}

fn one(mut spans: Vec<Span>) -> Span {
    assert_eq!(spans.len(), 1, "{spans:#?}");
    spans.remove(0)
}

fn below<'a>(spans: &'a [Span], parent: &Span) -> Vec<&'a Span> {
    let is_below = |span: &&Span| span.parent_span_id == parent.span_id;
    spans.iter().filter(is_below).collect()
}

async fn trace_of(client: &Client, id: i64) -> Option<String> {
    let sql = "SELECT trace FROM rouse.jobs WHERE id = $1";
    client.query_one(sql, &[&id]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_leads_from_the_producer_through_attempts_to_steps_requests_and_children() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let traced = Traced::start(&db, Behaviour::Accept, &[]).await;

    let transaction = client.transaction().await.unwrap();
    let set = format!("SET LOCAL rouse.traceparent = '{}'", producer());
    transaction.batch_execute(&set).await.unwrap();
    let mut ids = Vec::new();
    for (handler, payload) in [
        ("test.http.private", requests("/traced")),
        ("test.steps", json!({"between": "fail"})),
        (
            "flow.children",
            json!({"jobs": [{"handler": "flow.children", "payload": {"jobs": []}}]}),
        ),
    ] {
        let sql = "SELECT rouse.enqueue($1, $2, queue => 'shop', tenant => 'acme')";
        let row = transaction
            .query_one(sql, &[&handler, &payload])
            .await
            .unwrap();
        ids.push(row.get::<_, i64>(0));
    }
    transaction.commit().await.unwrap();
    let [requesting, stepping, parent] = ids[..] else {
        unreachable!("there are three")
    };
    for id in ids {
        ended(&client, id).await;
    }
    let children = "SELECT id FROM rouse.jobs WHERE parent = $1";
    let child: i64 = client.query_one(children, &[&parent]).await.unwrap().get(0);
    ended(&client, child).await;
    let collector = traced.stop();
    let spans = collector.spans();
    let in_trace = spans.iter().all(|span| hex(&span.trace_id) == TRACE);
    assert!(in_trace, "{spans:#?}");

    // The enqueue is below the producer's span, and the attempt below the enqueue, and linked to it.
    let enqueued = one(spans_of_job(
        &spans,
        "enqueue test.http.private",
        requesting,
    ));
    assert_eq!(hex(&enqueued.parent_span_id), PRODUCER);
    assert_eq!(enqueued.kind(), SpanKind::Producer);
    assert_eq!(enqueued.start_time_unix_nano, enqueued.end_time_unix_nano);
    let attempt = one(spans_of_job(
        &spans,
        "process test.http.private",
        requesting,
    ));
    assert_eq!(attempt.kind(), SpanKind::Consumer);
    assert_eq!(attempt.parent_span_id, enqueued.span_id);
    assert_eq!(attempt.links[0].span_id, enqueued.span_id);
    assert!(attempt.start_time_unix_nano > enqueued.start_time_unix_nano);
    let value = |key: &str| attribute(&attempt.attributes, key).unwrap_or_default();
    assert_eq!(value("messaging.system"), "rouse");
    assert_eq!(value("messaging.destination.name"), "shop");
    assert_eq!(value("messaging.operation.type"), "process");
    assert_eq!(value("messaging.consumer.id"), "traced");
    assert_eq!(value("rouse.tenant"), "acme");
    assert_eq!(value("rouse.attempt"), "1");
    assert_eq!(value("rouse.outcome"), "succeeded");

    // The request is below the attempt, and the server gets its context; no query is recorded.
    let [request] = below(&spans, &attempt)[..] else {
        panic!("{spans:#?}")
    };
    assert_eq!(
        (request.name.as_str(), request.kind()),
        ("GET", SpanKind::Client)
    );
    let value = |key: &str| attribute(&request.attributes, key).unwrap_or_default();
    assert_eq!(value("url.path"), "/traced");
    assert_eq!(value("server.address"), "localhost");
    assert_eq!(value("http.response.status_code"), "200");
    let header = format!("00-{TRACE}-{}-01", hex(&request.span_id));
    assert_eq!(sent_traceparent("/traced"), header);

    // Both attempts are below the one enqueue; the second attempt has only the step that the first did not complete.
    let enqueued = one(spans_of_job(&spans, "enqueue test.steps", stepping));
    let attempts = spans_of_job(&spans, "process test.steps", stepping);
    let outcomes: Vec<_> = attempts
        .iter()
        .map(|span| {
            assert_eq!(span.parent_span_id, enqueued.span_id);
            attribute(&span.attributes, "rouse.outcome").unwrap()
        })
        .collect();
    assert_eq!(outcomes, ["retried", "succeeded"]);
    let failed = attempts[0].status.clone().unwrap();
    assert_eq!(failed.code(), StatusCode::Error);
    assert!(failed.message.contains("between the steps"), "{failed:?}");
    let kind = attribute(&attempts[0].attributes, "error.type");
    assert_eq!(kind.as_deref(), Some("guest_error"));
    let steps = |attempt| {
        let steps = below(&spans, attempt);
        let name = |span: &&Span| attribute(&span.attributes, "rouse.step").unwrap();
        steps.iter().map(name).collect::<Vec<_>>()
    };
    assert_eq!(steps(&attempts[0]).len(), 4, "{spans:#?}");
    assert_eq!(steps(&attempts[1]), ["second"]);

    // The enqueue of a child is below the attempt that has enqueued it.
    let attempt = one(spans_of_job(&spans, "process flow.children", parent));
    let enqueued = one(spans_of_job(&spans, "enqueue flow.children", child));
    assert_eq!(enqueued.parent_span_id, attempt.span_id);
    let below_it = one(spans_of_job(&spans, "process flow.children", child));
    assert_eq!(below_it.parent_span_id, enqueued.span_id);

    let resources = collector.resources();
    let name = attribute(&resources, "service.name");
    assert_eq!(name.as_deref(), Some("rouse"));
    let instance = attribute(&resources, "service.instance.id");
    assert_eq!(instance.as_deref(), Some("traced"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_producer_has_no_trace_has_one_of_its_own_with_all_its_attempts_and_lines() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let variables = [("OTEL_SERVICE_NAME", "mail")];
    let traced = Traced::start(&db, Behaviour::Accept, &variables).await;
    let flaky = enqueue(&client, "test.flaky", json!({"fail_until": 1})).await;
    let other = enqueue(&client, "noop", json!({"n": 1})).await;
    let logging = enqueue(&client, "test.print", json!({"line": "hello"})).await;
    for id in [flaky, other, logging] {
        ended(&client, id).await;
    }
    assert_eq!(trace_of(&client, flaky).await, None);
    let collector = traced.stop();
    let spans = collector.spans();
    let enqueued = one(spans_of_job(&spans, "enqueue test.flaky", flaky));
    assert_eq!(hex(&enqueued.parent_span_id), "");
    let attempts = spans_of_job(&spans, "process test.flaky", flaky);
    assert_eq!(attempts.len(), 2);
    for attempt in &attempts {
        assert_eq!(attempt.trace_id, enqueued.trace_id);
    }
    let of_other = one(spans_of_job(&spans, "process noop", other));
    assert_ne!(of_other.trace_id, enqueued.trace_id);
    let name = attribute(&collector.resources(), "service.name");
    assert_eq!(name.as_deref(), Some("mail"));

    let attempt = one(spans_of_job(&spans, "process test.print", logging));
    let lines = collector.lines();
    let lines: Vec<_> = lines
        .iter()
        .filter(|line| attribute(&line.attributes, "rouse.job.id") == Some(logging.to_string()))
        .collect();
    assert!(!lines.is_empty(), "{:#?}", collector.lines());
    for line in &lines {
        assert_eq!(line.trace_id, attempt.trace_id);
        assert_eq!(line.span_id, attempt.span_id);
        assert!(!line.severity_text.is_empty());
        assert!(!text(line.body.as_ref().unwrap()).is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sampler_drops_jobs_without_a_trace_and_follows_the_decision_of_producers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let variables = [("OTEL_TRACES_SAMPLER", "parentbased_always_off")];
    let traced = Traced::start(&db, Behaviour::Accept, &variables).await;
    let unsampled = producer().replace("-01", "-00");
    let enqueue_in = async |path: &str, trace: Option<String>| -> i64 {
        let sql = "SELECT rouse.enqueue('test.http.private', $1, trace => $2)";
        let row = client.query_one(sql, &[&requests(path), &trace]).await;
        row.unwrap().get(0)
    };
    let without = enqueue_in("/sampled/without", None).await;
    let dropped = enqueue_in("/sampled/dropped", Some(unsampled.clone())).await;
    let recorded = enqueue_in("/sampled/recorded", Some(producer())).await;
    for id in [without, dropped, recorded] {
        ended(&client, id).await;
    }
    let spans = traced.stop().spans();
    let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    one(spans_of_job(&spans, "process test.http.private", recorded));
    // The server of the request receives the decision.
    assert_eq!(sent_traceparent("/sampled/dropped"), unsampled);
    let sent = sent_traceparent("/sampled/without");
    assert!(sent.as_str().unwrap().ends_with("-00"), "{sent}");
}

#[tokio::test]
async fn without_an_endpoint_the_context_of_the_producer_is_passed_on_unchanged() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let host = Host::spawn(serve(&db, "off"));
    host.line(TIMEOUT, |line| line.contains("worker started"));
    let sql = "SELECT rouse.enqueue('test.http.private', $1, trace => $2)";
    let args = (requests("/untraced"), producer());
    let row = client.query_one(sql, &[&args.0, &args.1]).await.unwrap();
    let id: i64 = row.get(0);
    let jobs = json!({"jobs": [
        {"handler": "flow.children", "payload": {"jobs": []}},
        {"handler": "flow.children", "payload": {"jobs": []}, "queue": "other"},
    ]});
    let sql = "SELECT rouse.enqueue('flow.children', $1, trace => $2)";
    let row = client.query_one(sql, &[&jobs, &args.1]).await.unwrap();
    let parent: i64 = row.get(0);
    let plain = enqueue(&client, "test.http.private", requests("/plain")).await;
    for id in [id, parent, plain] {
        ended(&client, id).await;
    }
    assert_eq!(sent_traceparent("/untraced"), producer());
    assert_eq!(sent_traceparent("/plain"), Value::Null);
    let rows = client
        .query("SELECT trace FROM rouse.jobs WHERE parent = $1", &[&parent])
        .await
        .unwrap();
    let traces: Vec<Option<String>> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(traces, [Some(producer()), Some(producer())]);
    host.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_span_of_a_request_has_the_beginning_of_a_long_method_and_path() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let traced = Traced::start(&db, Behaviour::Accept, &[]).await;
    let long = "M".repeat(2_000);
    let mut payload = requests(&format!("/{long}"));
    payload["requests"][0]["method"] = json!(long);
    let id = enqueue(&client, "test.http.private", payload).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    let collector = traced.stop();
    let spans = collector.spans();
    let attempt = one(spans_of_job(&spans, "process test.http.private", id));
    let [request] = below(&spans, &attempt)[..] else {
        panic!("{spans:#?}")
    };
    let beginning = "M".repeat(1_024);
    assert_eq!(request.name, beginning);
    let value = |key: &str| attribute(&request.attributes, key).unwrap_or_default();
    assert_eq!(value("http.request.method"), beginning);
    assert_eq!(value("url.path"), format!("/{}", &beginning[1..]));
}

#[tokio::test]
async fn a_guest_can_send_a_trace_context_of_its_own() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let host = Host::spawn(serve(&db, "off"));
    host.line(TIMEOUT, |line| line.contains("worker started"));
    let mut payload = requests("/own");
    payload["requests"][0]["headers"] = json!({"traceparent": "its own"});
    let sql = "SELECT rouse.enqueue('test.http.private', $1, trace => $2)";
    let row = client
        .query_one(sql, &[&payload, &producer()])
        .await
        .unwrap();
    ended(&client, row.get(0)).await;
    assert_eq!(sent_traceparent("/own"), "its own");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_attempt_after_a_lost_first_one_is_below_the_enqueue() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _dead = db.worker().await;
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    client
        .execute(
            "UPDATE rouse.job SET state = 'running', attempt = 1, fence = 1, worker = (SELECT max(incarnation) FROM rouse.worker),
                 claimed_at = now(), lease_until = now() WHERE id = $1",
            &[&id],
        )
        .await
        .unwrap();
    let traced = Traced::start(&db, Behaviour::Accept, &[]).await;
    assert_eq!(ended(&client, id).await.attempt, 2);
    let spans = traced.stop().spans();
    let enqueued = one(spans_of_job(&spans, "enqueue noop", id));
    let attempt = one(spans_of_job(&spans, "process noop", id));
    assert_eq!(attempt.parent_span_id, enqueued.span_id);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_fails_before_its_start_has_a_span_below_the_enqueue() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let unreadable = format!("SELECT rouse.enqueue('noop', {})", large(1));
    let unreadable = query_number(&client, &unreadable).await;
    let damage = DAMAGE.replace("$1", &unreadable.to_string());
    client.batch_execute(&damage).await.unwrap();
    // Its settlement takes until `holder` lets it continue.
    client
        .batch_execute(
            "CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN PERFORM pg_advisory_xact_lock(1); RETURN new; END $$;
             CREATE TRIGGER wait BEFORE INSERT ON rouse.attempt FOR EACH ROW EXECUTE FUNCTION public.wait()",
        )
        .await
        .unwrap();
    let holder = db.client().await;
    let lock = "SELECT pg_advisory_lock(1)";
    holder.batch_execute(lock).await.unwrap();
    let traced = Traced::start(&db, Behaviour::Accept, &[]).await;
    let settling = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory')";
    until_true(&client, settling).await;
    let before_settlement = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap();
    let unlock = "SELECT pg_advisory_unlock(1)";
    holder.batch_execute(unlock).await.unwrap();
    let failed =
        format!("SELECT EXISTS (SELECT FROM rouse.attempt WHERE job = {unreadable} AND NOT lost)");
    until_true(&client, &failed).await;
    client.batch_execute(REPAIR).await.unwrap();
    let retry = format!("SELECT rouse.reschedule({unreadable}, now())");
    client.batch_execute(&retry).await.unwrap();
    assert_eq!(ended(&client, unreadable).await.state, "succeeded");
    let spans = traced.stop().spans();
    let enqueued = one(spans_of_job(&spans, "enqueue noop", unreadable));
    let attempts = spans_of_job(&spans, "process noop", unreadable);
    let ended_at = u128::from(attempts[0].end_time_unix_nano);
    assert!(ended_at <= before_settlement.as_nanos(), "{spans:#?}");
    let mut ends: Vec<_> = attempts
        .iter()
        .map(|span| {
            assert_eq!(span.parent_span_id, enqueued.span_id);
            let value = |key: &str| attribute(&span.attributes, key).unwrap_or_default();
            (value("rouse.outcome"), value("error.type"))
        })
        .collect();
    assert_eq!(ends.pop(), Some(("succeeded".into(), String::new())));
    // There is another one if the repair took long.
    assert!(!ends.is_empty(), "{spans:#?}");
    for end in ends {
        assert_eq!(end, ("retried".into(), "unrunnable".into()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_exports_only_logs_sends_no_trace_context_of_its_own() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let variables = [("OTEL_TRACES_EXPORTER", "none")];
    let traced = Traced::start(&db, Behaviour::Accept, &variables).await;
    let plain = enqueue(&client, "test.http.private", requests("/logs-only/plain")).await;
    let sql = "SELECT rouse.enqueue('test.http.private', $1, trace => $2)";
    let params = (requests("/logs-only/traced"), producer());
    let row = client.query_one(sql, &[&params.0, &params.1]).await;
    let with_trace: i64 = row.unwrap().get(0);
    let printing = enqueue(&client, "test.print", json!({"line": "hello"})).await;
    for id in [plain, with_trace, printing] {
        ended(&client, id).await;
    }
    assert_eq!(sent_traceparent("/logs-only/plain"), Value::Null);
    assert_eq!(sent_traceparent("/logs-only/traced"), producer());
    let collector = traced.stop();
    assert!(collector.spans().is_empty());
    assert!(!collector.lines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_whose_job_is_cancelled_has_a_span_that_says_so() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let traced = Traced::start(
        &db,
        Behaviour::Accept,
        &[("ROUSE_LOG", "info,rouse::job=debug")],
    )
    .await;
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    traced.host.line(TIMEOUT, |line| {
        line.contains("started") && line.contains(&format!("job.id={id}"))
    });
    cancel(&client, id).await;
    traced.host.line(TIMEOUT, |line| line.contains("dropped"));
    let spans = traced.stop().spans();
    let attempt = one(spans_of_job(&spans, "process test.wait-abort", id));
    let value = |key: &str| attribute(&attempt.attributes, key).unwrap_or_default();
    assert_eq!(
        (value("rouse.outcome"), value("error.type")),
        ("dropped".into(), "cancelled".into())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_never_responds_delays_neither_jobs_nor_the_end_of_the_host() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let variables = [
        ("OTEL_BSP_SCHEDULE_DELAY", "50"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "64"),
    ];
    let traced = Traced::start(&db, Behaviour::Hang, &variables).await;
    for n in 0..300 {
        enqueue(&client, "noop", json!({"n": n})).await;
    }
    let last = enqueue(&client, "noop", json!({"n": 300})).await;
    ended(&client, last).await;
    traced.collector.requested().await;
    let since = Instant::now();
    let collector = traced.stop();
    // The host spends at most five seconds each on sending its traces and its logs.
    assert!(
        since.elapsed() < Duration::from_secs(30),
        "{:?}",
        since.elapsed()
    );
    assert!(collector.spans().is_empty());
}

#[tokio::test]
async fn invalid_settings_of_the_exporters_end_the_host_with_an_error() {
    let db = TestDb::new().await;
    for (name, value, message) in [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf only"),
        (
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "not a URL",
            "set up the export of traces",
        ),
    ] {
        let mut command = serve(&db, "off");
        command
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
            .env(name, value);
        let (status, output) = Host::spawn(command).exit(TIMEOUT);
        assert!(!status.success() && output.contains(message), "{output}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_span_of_an_attempt_with_effects_says_whether_they_were_committed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = "traced_handler";
    let tables = example_effects::sql()[0].replace(example_effects::LOGIN, login);
    client.batch_execute(&tables).await.unwrap();
    client
        .batch_execute("INSERT INTO orders VALUES (1, 10)")
        .await
        .unwrap();
    let traced =
        Traced::start_as(example_effects::serving(&db, login), Behaviour::Accept, &[]).await;
    let mut ids = Vec::new();
    for _ in 0..2 {
        let id = enqueue(&client, "shop.pay", json!({"order": 1})).await;
        ended(&client, id).await;
        ids.push(id);
    }
    let spans = traced.stop().spans();
    let ends = ids.iter().map(|&id| {
        let attempt = one(spans_of_job(&spans, "process shop.pay", id));
        let value = |key: &str| attribute(&attempt.attributes, key).unwrap_or_default();
        (value("rouse.outcome"), value("error.type"))
    });
    let failed = ("failed".to_owned(), "effect_failed".to_owned());
    assert_eq!(
        ends.collect::<Vec<_>>(),
        [("succeeded".to_owned(), String::new()), failed]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_64_open_steps_of_an_attempt_have_spans() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let traced = Traced::start(&db, Behaviour::Accept, &[]).await;
    let id = enqueue(&client, "test.open-steps", json!({"steps": 80})).await;
    assert_eq!(ended(&client, id).await.result, Some(json!(80)));
    let spans = traced.stop().spans();
    let attempt = one(spans_of_job(&spans, "process test.open-steps", id));
    let name = |span: &&Span| attribute(&span.attributes, "rouse.step").unwrap();
    let mut steps: Vec<_> = below(&spans, &attempt).iter().map(name).collect();
    steps.sort();
    let mut first: Vec<_> = (1..=64).map(|nth| nth.to_string()).collect();
    first.sort();
    assert_eq!(steps, first);
}
