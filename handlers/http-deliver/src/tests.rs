use rouse_sdk::http::Request;
use rouse_sdk::{Handler, TestCtx};

use super::*;

const URL: &str = "https://hooks.example/in";

/// An attempt at job 7 with this response from the receiver.
fn receiver(respond: impl FnMut(&Request) -> Result<Response, Error> + 'static) -> TestCtx {
    let ctx = TestCtx::for_job(|job| {
        job.id = 7;
        job.requested_at_ms = 1_700_000_000_123;
    });
    ctx.on_http(respond);
    ctx
}

fn responding(status: u16, body: &'static str) -> TestCtx {
    receiver(move |_| Ok(http::Response::new(status, body)))
}

fn refused(ctx: &TestCtx, payload: Value) -> Error {
    ctx.run::<super::deliver>(payload).unwrap_err()
}

fn header<'a>(request: &'a Request, name: &str) -> Option<&'a str> {
    let mut named = request.headers.iter().filter(|(own, _)| own == name);
    let found = named.next().map(|(_, value)| value.as_str());
    assert!(named.next().is_none(), "{name} is there once");
    found
}

#[test]
fn a_delivery_is_posted_and_signed_and_its_response_is_stored() {
    let ctx = responding(202, "queued\0");
    let payload = json!({"url": URL, "body": {"n": 1}, "secret": "KEY", "headers": {"x-own": "1"}});
    let result = ctx.run::<super::deliver>(payload).unwrap();
    let id = "msg_1700000000123_7";
    assert_eq!(
        result,
        json!({"status": 202, "id": id, "response": "queued\u{fffd}", "response_is_truncated": false})
    );

    let sent = ctx.requests().pop().unwrap();
    assert_eq!((sent.method.as_str(), sent.url.as_str()), ("POST", URL));
    assert_eq!(sent.body, br#"{"n":1}"#);
    assert_eq!(header(&sent, "content-type"), Some("application/json"));
    assert_eq!(header(&sent, "x-own"), Some("1"));
    assert_eq!(header(&sent, "webhook-id"), Some(id));
    assert_eq!(header(&sent, "idempotency-key"), Some(id));
    let timestamp = header(&sent, "webhook-timestamp").unwrap();
    assert!(timestamp.parse::<u64>().unwrap() > 1_700_000_000);
    let signed = format!("{id}.{timestamp}.{{\"n\":1}}");
    let tag = STANDARD.encode(ctx.hmac_sha256("KEY", signed).unwrap());
    assert_eq!(
        header(&sent, "webhook-signature"),
        Some(&*format!("v1,{tag}"))
    );
}

#[test]
fn every_attempt_has_the_same_id_and_the_payload_may_set_it() {
    let ctx = responding(200, "");
    let again = ctx.next_attempt();
    let of =
        |ctx: &TestCtx, payload: Value| ctx.run::<super::deliver>(payload).unwrap()["id"].clone();
    let first = of(&ctx, json!({"url": URL}));
    assert_eq!(first, of(&again, json!({"url": URL})));
    assert_eq!(of(&ctx, json!({"url": URL, "id": "order-17"})), "order-17");
    let sent = ctx.requests().pop().unwrap();
    assert_eq!(header(&sent, "idempotency-key"), Some("order-17"));
}

#[test]
fn without_body_and_secret_their_headers_are_omitted() {
    let ctx = responding(204, "");
    ctx.run::<super::deliver>(json!({"url": URL, "method": "DELETE"}))
        .unwrap();
    let sent = ctx.requests().pop().unwrap();
    assert_eq!(sent.method, "DELETE");
    assert!(sent.body.is_empty());
    assert_eq!(header(&sent, "content-type"), None);
    assert_eq!(header(&sent, "webhook-signature"), None);
}

/// The only request of a job whose payload is this text.
fn sent_of(payload: &str) -> Request {
    let ctx = responding(200, "");
    <super::deliver as Handler>::run(&ctx, payload.as_bytes()).unwrap();
    ctx.requests().pop().unwrap()
}

#[test]
fn a_body_is_sent_with_every_digit_and_in_order() {
    for body in [
        r#"{"id": 123456789012345678901234567890, "at": 0.10000000000000000000001, "a": 1.0}"#,
        r#""\u00fc""#,
        "18446744073709551616",
    ] {
        let sent = sent_of(&format!(
            r#"{{"body": {body}, "url": "{URL}", "secret": "KEY"}}"#
        ));
        assert_eq!(String::from_utf8(sent.body).unwrap(), body);
    }
}

#[test]
fn a_null_body_is_sent_and_a_missing_one_is_not() {
    let sent = sent_of(&format!(r#"{{"url": "{URL}", "body": null}}"#));
    assert_eq!(sent.body, b"null");
    assert_eq!(header(&sent, "content-type"), Some("application/json"));
    let sent = sent_of(&format!(r#"{{"url": "{URL}"}}"#));
    assert!(sent.body.is_empty());
    assert_eq!(header(&sent, "content-type"), None);
}

#[test]
fn a_body_may_be_any_json_and_may_be_omitted() {
    let schema = <super::deliver as Handler>::input_schema().to_value();
    assert_eq!(schema["properties"]["body"].get("type"), None);
    assert_eq!(schema["properties"]["body"].get("default"), None);
    assert_eq!(schema["required"], json!(["url"]));
}

#[test]
fn the_payload_may_set_the_content_type() {
    let ctx = responding(200, "");
    let kind = "application/cloudevents+json";
    let payload =
        json!({"url": URL, "body": [1], "headers": {"Content-Type": kind, "User-Agent": "me"}});
    ctx.run::<super::deliver>(payload).unwrap();
    let sent = ctx.requests().pop().unwrap();
    assert_eq!(header(&sent, "Content-Type"), Some(kind));
    assert_eq!(header(&sent, "content-type"), None);
    assert_eq!(header(&sent, "user-agent"), None);
}

#[test]
fn temporary_errors_are_retried_and_others_fail_permanently() {
    for (status, permanent) in [
        (400, true),
        (401, true),
        (404, true),
        (410, true),
        (408, false),
        (425, false),
        (429, false),
        (500, false),
        (503, false),
    ] {
        let error = refused(&responding(status, "no"), json!({"url": URL}));
        assert_eq!(error.permanent, permanent, "{status}");
        assert_eq!(error.kind, format!("http_{status}"));
        let details = json!({"status": status, "id": "msg_1700000000123_7"});
        assert_eq!(error.details, Some(details));
    }
    let ctx = receiver(|_| Err(Error::retryable("connection refused").kind("http")));
    let error = refused(&ctx, json!({"url": URL}));
    assert!(!error.permanent && error.kind == "http");
}

#[test]
fn the_receiver_sets_the_time_of_the_next_attempt() {
    let busy = |when: &'static str| {
        receiver(move |_| Ok(http::Response::new(503, "").with_header("Retry-After", when)))
    };
    let error = refused(&busy("120"), json!({"url": URL}));
    assert_eq!(error.retry_after, Some(Duration::from_secs(120)));
    let error = refused(&busy("Sun, 06 Nov 1994 08:49:37 GMT"), json!({"url": URL}));
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
    assert_eq!(error.retry_at, Some(at));
    // It is not delayed by more than a day.
    let error = refused(&busy("99999999999"), json!({"url": URL}));
    assert_eq!(error.retry_after, Some(RETRY_AFTER_MAX));
    let now = SystemTime::now();
    let error = refused(&busy("Sat, 06 Nov 2094 08:49:37 GMT"), json!({"url": URL}));
    let at = error.retry_at.unwrap();
    assert!((now..now + 2 * RETRY_AFTER_MAX).contains(&at), "{at:?}");
}

#[test]
fn a_redirect_is_not_followed_and_not_retried() {
    let ctx = receiver(|_| {
        Ok(http::Response::new(308, "").with_header("location", "https://evil.example/"))
    });
    let error = refused(&ctx, json!({"url": URL, "body": 1}));
    assert!(error.permanent);
    assert_eq!(error.kind, "redirected");
    assert!(
        error.message.contains("308 to https://evil.example/"),
        "{error}"
    );
    assert_eq!(ctx.requests().len(), 1);
}

#[test]
fn a_response_that_neither_accepts_nor_redirects_names_its_status() {
    for (status, location) in [(302, None), (304, None), (304, Some("/elsewhere"))] {
        let ctx = receiver(move |_| {
            let response = http::Response::new(status, "");
            Ok(match location {
                None => response,
                Some(to) => response.with_header("location", to),
            })
        });
        let error = refused(&ctx, json!({"url": URL}));
        assert!(error.permanent, "{error:?}");
        assert_eq!(error.kind, format!("http_{status}"));
        assert_eq!(
            error.message,
            format!(
                "{URL} responded with status {status}, which neither accepts the delivery nor names another address"
            )
        );
    }
}

#[test]
fn errors_contain_no_password_from_a_url() {
    let url = "https://ada:hunter2@hooks.example/in";
    for status in [404, 308] {
        let ctx =
            receiver(move |_| Ok(http::Response::new(status, "no").with_header("location", url)));
        let message = refused(&ctx, json!({"url": url})).message;
        assert!(message.contains("https://hooks.example/in"), "{message}");
        assert!(!message.contains("hunter2"), "{message}");
    }
}

#[test]
fn a_long_response_is_truncated() {
    let ctx = receiver(|_| Ok(http::Response::new(200, "x".repeat(5000))));
    let result = ctx.run::<super::deliver>(json!({"url": URL})).unwrap();
    assert_eq!(result["response"].as_str().map(str::len), Some(4096));
    assert_eq!(result["response_is_truncated"], true);
}

#[test]
fn invalid_payloads_are_refused_before_anything_is_sent() {
    let ctx = responding(200, "");
    for (payload, says) in [
        (json!({"url": URL, "id": "a.b"}), "id must have"),
        (json!({"url": URL, "id": ""}), "id must have"),
        (json!({"url": URL, "id": "x".repeat(65)}), "id must have"),
        (json!({"url": URL, "timeout_ms": 0}), "timeout_ms"),
        (
            json!({"url": URL, "headers": {"Webhook-Id": "x"}}),
            "Webhook-Id",
        ),
        (
            json!({"url": URL, "method": "post", "body": {"n": 1}}),
            "method",
        ),
        (json!({"url": URL, "retries": 3}), "retries"),
        (json!({"body": 1}), "url"),
    ] {
        let error = refused(&ctx, payload);
        assert!(
            error.permanent && error.kind == "invalid_payload",
            "{error:?}"
        );
        assert!(error.message.contains(says), "{error}");
    }
    assert!(ctx.requests().is_empty());
}
