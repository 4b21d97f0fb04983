use rouse_sdk::TestCtx;
use rouse_sdk::http::{Request, Response};
use serde_json::json;

use super::*;

fn provider(respond: impl FnMut(&Request) -> Result<Response, Error> + 'static) -> TestCtx {
    let ctx = TestCtx::for_job(|job| {
        job.id = 7;
        job.requested_at_ms = 5;
    });
    ctx.on_http(respond);
    ctx
}

fn responding(status: u16, body: &'static str) -> TestCtx {
    provider(move |_| Ok(Response::new(status, body)))
}

/// The payload of an email, with changes.
fn mail(change: Value) -> Value {
    let mut mail = json!({
        "provider": "resend", "secret": "KEY", "from": "Ada <ada@a.example>", "to": "bob@b.example", "subject": "Hi", "text": "Hello",
    });
    for (name, value) in change.as_object().unwrap() {
        mail[name] = value.clone();
    }
    mail
}

/// The last request, and its body.
fn sent(ctx: &TestCtx) -> (Request, Value) {
    let request = ctx.requests().pop().unwrap();
    let body = rouse_sdk::serde_json::from_slice(&request.body).unwrap();
    (request, body)
}

fn has(request: &Request, name: &str, value: &str) -> bool {
    request
        .headers
        .contains(&(name.to_owned(), value.to_owned()))
}

#[test]
fn resend_gets_its_format() {
    let ctx = responding(200, r#"{"id": "49a3999c"}"#);
    let payload = mail(
        json!({"to": ["bob@b.example", "eve@e.example"], "bcc": "me@a.example", "reply_to": "r@a.example", "html": "<p>Hello"}),
    );
    assert_eq!(
        ctx.run::<super::send>(payload).unwrap(),
        json!({"status": 200, "message_id": "49a3999c", "id": "job_5_7"})
    );
    let (request, body) = sent(&ctx);
    assert_eq!(request.url, "https://api.resend.com/emails");
    assert_eq!(request.method, "POST");
    assert!(has(&request, "authorization", "Bearer rouse-secret-KEY"));
    assert!(has(&request, "idempotency-key", "job_5_7"));
    assert!(has(&request, "content-type", "application/json"));
    assert!(has(&request, "user-agent", USER_AGENT));
    assert_eq!(
        body,
        json!({
            "from": "Ada <ada@a.example>", "to": ["bob@b.example", "eve@e.example"], "bcc": ["me@a.example"],
            "reply_to": "r@a.example", "subject": "Hi", "text": "Hello", "html": "<p>Hello",
        })
    );
}

#[test]
fn postmark_gets_its_format() {
    let ctx = responding(200, r#"{"ErrorCode": 0, "MessageID": "b7bc2f4a"}"#);
    let payload = mail(
        json!({"provider": "postmark", "to": ["bob@b.example", "eve@e.example"], "cc": ["me@a.example"], "id": "order-17"}),
    );
    assert_eq!(
        ctx.run::<super::send>(payload).unwrap(),
        json!({"status": 200, "message_id": "b7bc2f4a", "id": "order-17"})
    );
    let (request, body) = sent(&ctx);
    assert_eq!(request.url, "https://api.postmarkapp.com/email");
    assert!(has(&request, "x-postmark-server-token", "rouse-secret-KEY"));
    assert!(
        request
            .headers
            .iter()
            .all(|(name, _)| name != "authorization")
    );
    assert_eq!(
        body,
        json!({
            "From": "Ada <ada@a.example>", "To": "bob@b.example, eve@e.example", "Cc": "me@a.example", "Subject": "Hi",
            "TextBody": "Hello", "Metadata": {"id": "order-17"},
        })
    );
}

#[test]
fn any_other_provider_needs_a_url() {
    let ctx = responding(202, "");
    let payload = mail(json!({"provider": "generic", "url": "https://mail.example/send"}));
    assert_eq!(
        ctx.run::<super::send>(payload).unwrap(),
        json!({"status": 202, "id": "job_5_7"})
    );
    assert_eq!(sent(&ctx).0.url, "https://mail.example/send");
}

#[test]
fn every_attempt_has_the_same_id() {
    let busy = |_: &Request| Ok(Response::new(503, "").with_header("retry-after", "9"));
    let ctx = provider(busy);
    let error = ctx.run::<super::send>(mail(json!({}))).unwrap_err();
    assert_eq!(error.retry_after, Some(Duration::from_secs(9)));
    let again = ctx.next_attempt();
    again.run::<super::send>(mail(json!({}))).unwrap_err();
    for ctx in [ctx, again] {
        assert!(has(&sent(&ctx).0, "idempotency-key", "job_5_7"));
    }
}

#[test]
fn refused_mails_fail_permanently_and_other_errors_are_retried() {
    for (status, permanent) in [
        (308, true),
        (400, true),
        (401, true),
        (422, true),
        (429, false),
        (500, false),
    ] {
        let ctx = responding(status, r#"{"message": "no"}"#);
        let error = ctx.run::<super::send>(mail(json!({}))).unwrap_err();
        assert_eq!(error.permanent, permanent, "{status}");
    }
}

#[test]
fn a_provider_delays_a_mail_by_a_day_at_most() {
    let busy = provider(|_| Ok(Response::new(429, "").with_header("retry-after", "99999999999")));
    let error = busy.run::<super::send>(mail(json!({}))).unwrap_err();
    assert_eq!(error.retry_after, Some(RETRY_AFTER_MAX));
}

#[test]
fn invalid_payloads_are_refused_before_anything_is_sent() {
    let ctx = responding(200, "{}");
    for (change, says) in [
        (json!({"provider": "generic"}), "url"),
        (json!({"text": null}), "text"),
        (json!({"to": []}), "`to` is empty"),
        (json!({"id": "a b"}), "id must have"),
        (json!({"provider": "pigeon"}), "provider"),
        (json!({"attachments": []}), "attachments"),
    ] {
        let error = ctx.run::<super::send>(mail(change)).unwrap_err();
        assert!(
            error.permanent && error.kind == "invalid_payload",
            "{error:?}"
        );
        assert!(error.message.contains(says), "{error}");
    }
    assert!(ctx.requests().is_empty());
}
