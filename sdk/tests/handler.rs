//! The result of `#[handler]` on functions, as the host sees it.

use rouse_sdk::__private::{Entry, distinct, manifest};
use rouse_sdk::{Ctx, Error, Handler, Level, TestCtx, export, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

#[derive(Deserialize, JsonSchema)]
struct Letter {
    to: String,
    #[serde(default)]
    pages: Vec<Page>,
}

#[derive(Deserialize, JsonSchema)]
struct Page {
    number: u8,
}

#[derive(Debug, PartialEq, Serialize, JsonSchema)]
struct Receipt {
    sent_to: String,
    pages: usize,
}

/// Sends a letter.
///
/// By post.
#[handler(
    name = "letter.send",
    version = "3",
    max_attempts = 7,
    retry_initial = "500ms",
    retry_max = "1h",
    retry_multiplier = 3,
    retry_jitter = 0.5,
    lease = "30s",
    timeout = "5m",
    grace = "2s",
    concurrency = 4,
    max_concurrent(max = 5, key = "tenant"),
    throttle(max = 100, period = "1m", burst = 10, key = ["tenant", "$.to"]),
    throttle(max = 1, period = "1s"),
    singleton(key = "$.to"),
    singleton(during = "running", on_conflict = "refuse"),
    singleton(during = "period", period = "1h", on_conflict = "refuse"),
    debounce(period = "5s", max_wait = "1m"),
    debounce(period = "5s", edge = "leading"),
    instances = "reuse",
    capabilities = ["dirs"]
)]
fn send(ctx: &Ctx, letter: Letter) -> Result<Receipt, Error> {
    if letter.to.is_empty() {
        return Err(Error::permanent("no address").kind("no_address"));
    }
    ctx.warn(format_args!("attempt {}", ctx.job().attempt));
    Ok(Receipt {
        pages: letter
            .pages
            .iter()
            .map(|page| page.number)
            .max()
            .into_iter()
            .count(),
        sent_to: letter.to,
    })
}

#[handler(name = "letter.count")]
async fn count(letters: Vec<String>) -> usize {
    letters.len()
}

#[handler(name = "letter.parse")]
async fn parse(text: String) -> Result<u8, std::num::ParseIntError> {
    text.parse()
}

mod elsewhere {
    /// In a module of its own, in a public function of private types.
    #[rouse_sdk::handler(name = "letter.burn")]
    pub(super) fn burn(_ctx: &rouse_sdk::Ctx, _letter: super::Letter) {}
}

export!(send, count, parse, elsewhere::burn);

#[test]
fn the_function_can_still_be_called() {
    let ctx = TestCtx::for_job(|job| job.attempt = 2);
    let letter = Letter {
        to: "Ada".to_owned(),
        pages: Vec::new(),
    };
    let receipt = send(&ctx, letter).unwrap();
    assert_eq!(receipt.sent_to, "Ada");
    assert_eq!(ctx.logs()[0].level, Level::Warn);
    assert_eq!(ctx.logs()[0].message, "attempt 2");
}

#[test]
fn a_handler_runs_from_json_to_json() {
    let ctx = TestCtx::new();
    let result = ctx.run::<send>(json!({"to": "Ada", "pages": [{"number": 1}]}));
    assert_eq!(result.unwrap(), json!({"sent_to": "Ada", "pages": 1}));
    assert_eq!(ctx.run::<count>(json!(["a", "b"])).unwrap(), json!(2));
    let result = ctx.run::<elsewhere::burn>(json!({"to": ""})).unwrap();
    assert_eq!(result, json!(null));
}

#[test]
fn an_error_keeps_the_details_of_the_handler() {
    let error = TestCtx::new().run::<send>(json!({"to": ""})).unwrap_err();
    assert_eq!(error.kind, "no_address");
    assert!(error.permanent);
    let error = TestCtx::new().run::<parse>(json!("300")).unwrap_err();
    assert_eq!(error.message, "number too large to fit in target type");
    assert!(!error.permanent);
}

#[test]
fn a_payload_that_does_not_match_is_a_permanent_error_with_its_location() {
    let cases = [
        (
            json!({"to": "A", "pages": [{"number": 1}, {"number": 256}]}),
            "pages[1].number: ",
        ),
        (json!({"pages": []}), "missing field `to`"),
        (json!(null), "invalid type: null"),
        (json!({"to": 3}), "to: invalid type: integer `3`"),
    ];
    for (payload, why) in cases {
        let ctx = TestCtx::new();
        let error = send::run(&ctx, payload.to_string().as_bytes()).unwrap_err();
        assert_eq!(error.kind, "invalid_payload");
        assert!(error.permanent);
        assert!(error.message.contains(why), "{error} has no {why}");
        // The host refuses it before it calls the handler.
        let error = ctx.run::<send>(payload).unwrap_err();
        assert_eq!((&*error.kind, error.permanent), ("invalid_payload", true));
        let start = "payload does not match the schema";
        assert!(error.message.starts_with(start), "{error}");
    }
}

/// The schemas are narrower than the types.
#[derive(Deserialize, Serialize, JsonSchema)]
struct Share {
    #[schemars(range(min = 0.0, max = 1.0))]
    part: f64,
    /// In seconds, as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    seconds: Option<u32>,
}

#[handler(name = "letter.share")]
fn share(share: Share) -> Share {
    Share {
        part: 1.0 / share.part,
        ..share
    }
}

#[test]
fn payload_and_result_are_checked_against_the_schemas_as_on_a_host() {
    let ctx = TestCtx::new();
    for (payload, why) in [
        (
            json!({"part": 2.0, "seconds": "7"}),
            "at /part: expected at most 1",
        ),
        (
            json!({"part": 1.0, "seconds": 7}),
            "at /seconds: expected a string",
        ),
    ] {
        let error = ctx.run::<share>(payload).unwrap_err();
        assert_eq!((&*error.kind, error.permanent), ("invalid_payload", true));
        assert!(error.message.contains(why), "{error} has no {why}");
    }
    // It matches the schema, but not the type.
    let typed = json!({"part": 1.0, "seconds": "7"});
    let error = ctx.run::<share>(typed).unwrap_err();
    assert_eq!((&*error.kind, error.permanent), ("invalid_payload", true));
    assert!(error.message.contains("invalid type: string"), "{error}");

    #[handler(name = "letter.ratio")]
    fn ratio(parts: (f64, f64)) -> f64 {
        parts.0 / parts.1
    }
    assert_eq!(ctx.run::<ratio>(json!([1, 2])).unwrap(), json!(0.5));
    // Not a number: JSON has only null for it.
    let error = ctx.run::<ratio>(json!([0, 0])).unwrap_err();
    assert_eq!((&*error.kind, error.permanent), ("invalid_result", false));
    let start = "result does not match the schema: expected a number, got null";
    assert!(error.message.starts_with(start), "{error}");
}

#[derive(Deserialize, JsonSchema)]
struct Lookahead {
    #[schemars(regex(pattern = r"^(?=a)"))]
    text: String,
}

#[test]
#[should_panic(expected = "the input_schema of the handler letter.look is invalid")]
fn a_schema_that_the_host_refuses_is_reported() {
    #[handler(name = "letter.look")]
    fn look(payload: Lookahead) -> String {
        payload.text
    }
    let _ = TestCtx::new().run::<look>(json!({"text": "a"}));
}

#[test]
fn bytes_that_are_not_one_json_value_are_an_invalid_payload() {
    for payload in [&b""[..], b"{", b"[] []", b"\xff", b"\"\xff\""] {
        let error = count::run(&TestCtx::new(), payload).unwrap_err();
        assert_eq!(error.kind, "invalid_payload", "{error}");
        assert!(error.permanent);
    }
}

#[test]
fn a_result_that_json_cannot_hold_is_a_permanent_error() {
    #[handler(name = "bad")]
    fn bad(_input: ()) -> std::collections::BTreeMap<Vec<u8>, u8> {
        [(vec![1], 1)].into()
    }
    let error = TestCtx::new().run::<bad>(json!(null)).unwrap_err();
    assert_eq!(error.kind, "invalid_result");
    assert!(error.permanent);
}

#[test]
fn the_manifest_contains_the_declared_options() {
    let mut manifest = manifest(&[Entry::of::<send>(), Entry::of::<count>()]);
    let sdk = concat!("rouse-sdk ", env!("CARGO_PKG_VERSION"));
    assert_eq!(manifest["sdk"], sdk);

    let mut handlers = manifest["handlers"].take();
    let sent = &mut handlers[0];
    let input_schema = sent["input_schema"].take();
    assert_eq!(input_schema["title"], "Letter");
    assert_eq!(input_schema["required"], json!(["to"]));
    assert_eq!(
        input_schema["properties"]["pages"]["items"]["$ref"],
        "#/$defs/Page"
    );
    let output_schema = sent["output_schema"].take();
    assert_eq!(output_schema["properties"]["sent_to"]["type"], "string");
    assert_eq!(
        *sent,
        json!({
            "name": "letter.send",
            "version": "3",
            "description": "Sends a letter.\n\nBy post.",
            "input_schema": null,
            "output_schema": null,
            "max_attempts": 7,
            "retry_initial_ms": 500,
            "retry_multiplier": 3.0,
            "retry_max_ms": 3_600_000,
            "retry_jitter": 0.5,
            "lease_ms": 30_000,
            "timeout_ms": 300_000,
            "grace_ms": 2_000,
            "concurrency": 4,
            "gates": [
                {"kind": "max_concurrent", "max": 5, "key": ["tenant"]},
                {"kind": "throttle", "max": 100, "period_ms": 60_000, "burst": 10, "key": ["tenant", "$.to"]},
                {"kind": "throttle", "max": 1, "period_ms": 1_000},
                {"kind": "singleton", "key": ["$.to"]},
                {"kind": "singleton", "during": "running", "on_conflict": "refuse"},
                {"kind": "singleton", "during": "period", "period_ms": 3_600_000, "on_conflict": "refuse"},
                {"kind": "debounce", "period_ms": 5_000, "max_wait_ms": 60_000},
                {"kind": "debounce", "period_ms": 5_000, "edge": "leading"},
            ],
            "instances": "reuse",
            "capabilities": ["dirs"],
        })
    );
}

#[test]
fn the_manifest_omits_undeclared_options() {
    let manifest = manifest(&[Entry::of::<count>()]);
    let fields: Vec<_> = manifest["handlers"][0]
        .as_object()
        .unwrap()
        .keys()
        .collect();
    assert_eq!(fields, ["input_schema", "name", "output_schema", "version"]);
    assert_eq!(
        manifest["handlers"][0]["version"],
        env!("CARGO_PKG_VERSION")
    );
}

#[test]
fn names_that_share_a_start_are_distinct() {
    assert!(distinct(&["a", "ab", "b", "A"]));
    assert!(!distinct(&["a", "b", "a"]));
}

#[test]
fn a_failed_step_is_the_same_step_when_it_is_retried() {
    let ctx = TestCtx::new();
    let charge = |works: bool| {
        ctx.step("charge", || match works {
            true => Ok(17),
            false => Err(Error::retryable("no response")),
        })
    };
    assert!(charge(false).is_err());
    assert_eq!(charge(true).unwrap(), 17);
    // The same for a step that is dropped before it is done.
    let endless = ctx.step_async("charge", std::future::pending::<Result<i32, Error>>());
    let nap = rouse_sdk::sleep(std::time::Duration::from_millis(1));
    let raced = rouse_sdk::block_on(rouse_sdk::race(endless, nap));
    assert!(matches!(raced, rouse_sdk::Either::Second(())));
    assert_eq!(charge(true).unwrap(), 17);
    assert_eq!(ctx.steps_done(), ["charge", "charge#2"]);
    // The next attempt does not repeat either charge.
    let next = ctx.next_attempt();
    for _ in 0..2 {
        let recorded = next.step("charge", || -> Result<i32, Error> { panic!("done before") });
        assert_eq!(recorded.unwrap(), 17);
    }
}

#[handler(name = "ping")]
fn ping(_ctx: &Ctx, _payload: ()) -> &'static str {
    "pong"
}

#[test]
fn a_handler_without_input_accepts_a_job_without_a_payload() {
    let ctx = TestCtx::new();
    for payload in [json!({}), json!(null)] {
        assert_eq!(ctx.run::<ping>(payload).unwrap(), json!("pong"));
    }
    let error = ctx.run::<ping>(json!({"a": 1})).unwrap_err();
    assert!(
        format!("{error:?}").contains("invalid_payload"),
        "{error:?}"
    );
}

#[handler(name = "letter.maybe")]
fn maybe(letter: Option<Letter>) -> Option<String> {
    letter.map(|letter| letter.to)
}

#[test]
fn a_handler_with_optional_input_accepts_a_job_without_a_payload() {
    let ctx = TestCtx::new();
    for payload in [json!({}), json!(null)] {
        assert_eq!(ctx.run::<maybe>(payload).unwrap(), json!(null));
    }
    let letter = json!({"to": "Ada"});
    assert_eq!(ctx.run::<maybe>(letter).unwrap(), json!("Ada"));
    let error = ctx.run::<maybe>(json!({"pages": []})).unwrap_err();
    assert_eq!(error.kind, "invalid_payload");
}

mod batches {
    use rouse_sdk::{BatchJob, Error, Handler, Result, TestCtx, handler};
    use serde_json::{Value, json};

    /// Halves even numbers. Fails as a whole if there is a zero.
    #[handler(name = "demo.halve", batch(max = 10, period = "1s", key = "$.list"))]
    fn halve(jobs: Vec<BatchJob<u32>>) -> Result<Vec<Result<u32>>> {
        if jobs.iter().any(|job| job.payload == 0) {
            return Err(Error::retryable("a zero").kind("zero"));
        }
        let half = |job: &BatchJob<u32>| match job.payload % 2 {
            0 => Ok(job.payload / 2),
            _ => Err(Error::permanent("odd")),
        };
        Ok(jobs.iter().map(half).collect())
    }

    /// Forgets the last job.
    #[handler(name = "demo.forget", batch(max = 10))]
    fn forget(jobs: Vec<BatchJob<Value>>) -> Vec<Result<Value>> {
        jobs.into_iter()
            .skip(1)
            .map(|job| Ok(job.payload))
            .collect()
    }

    fn kinds(outcomes: &[Result<Value>]) -> Vec<String> {
        let kind = |outcome: &Result<Value>| match outcome {
            Ok(result) => result.to_string(),
            Err(error) => error.kind.to_string(),
        };
        outcomes.iter().map(kind).collect()
    }

    #[test]
    fn each_job_of_a_batch_has_its_outcome() {
        let ctx = TestCtx::new();
        let outcomes = ctx.run_batch::<halve>(vec![json!(4), json!(3), json!("x"), json!(8)]);
        assert_eq!(kinds(&outcomes), ["2", "error", "invalid_payload", "4"]);
        assert_eq!(kinds(&ctx.run_batch::<halve>(vec![json!(6)])), ["3"]);
        assert_eq!(ctx.run::<halve>(json!(6)).unwrap(), json!(3));
        assert_eq!(
            kinds(&ctx.run_batch::<halve>(vec![json!("x"); 2])),
            ["invalid_payload"; 2]
        );
        assert!(ctx.run_batch::<halve>(Vec::new()).is_empty());
    }

    #[test]
    fn an_error_of_the_batch_is_that_of_each_job() {
        let ctx = TestCtx::new();
        let outcomes = ctx.run_batch::<halve>(vec![json!(4), json!("x"), json!(0)]);
        assert_eq!(kinds(&outcomes), ["zero", "invalid_payload", "zero"]);
        let outcomes = ctx.run_batch::<forget>(vec![json!(1), json!(2)]);
        assert_eq!(kinds(&outcomes), ["invalid_batch"; 2]);
        assert_eq!(
            kinds(&ctx.run_batch::<forget>(vec![json!(1)])),
            ["invalid_batch"]
        );
    }

    #[test]
    fn the_schemas_are_those_of_one_job() {
        let schema = serde_json::to_value(halve::input_schema()).unwrap();
        assert_eq!(schema["type"], "integer");
        let schema = serde_json::to_value(halve::output_schema()).unwrap();
        assert_eq!(schema["type"], "integer");
    }
}
