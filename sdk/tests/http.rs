//! Requests of handlers, natively: responses set by a test, redirects, timeouts, the abort.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use rouse_sdk::http::{self, Request, Response};
use rouse_sdk::{AbortReason, Ctx, Result, TestCtx, block_on};

fn send(ctx: &Ctx, request: Request) -> Result<Response> {
    block_on(request.send(ctx))
}

/// Redirects `from` to `to` with this status, and echoes method, headers and body for other URLs.
fn redirecting(status: u16, from: &'static str, to: &'static str) -> TestCtx {
    let ctx = TestCtx::new();
    ctx.on_http(move |request| {
        if request.url == from {
            return Ok(Response::new(status, "").with_header("Location", to));
        }
        let mut names: Vec<_> = request.headers.iter().map(|(name, _)| &**name).collect();
        names.sort_unstable();
        let body = String::from_utf8_lossy(&request.body);
        let text = format!("{} {} {body}", request.method, names.join(","));
        Ok(Response::new(200, text))
    });
    ctx
}

#[test]
fn a_test_answers_and_inspects_requests() {
    let ctx = TestCtx::new();
    let error = send(&ctx, http::get("https://a.example/")).unwrap_err();
    assert!(
        error.permanent && error.message.contains("on_http"),
        "{error}"
    );

    ctx.on_http(|_| Ok(Response::new(200, r#"{"n": 7}"#)));
    let key = ctx.secret("KEY").unwrap();
    let request = http::put("https://a.example/x")
        .bearer(&key)
        .json(&[1, 2])
        .unwrap();
    let response = send(&ctx, request).unwrap();
    let body: serde_json::Value = response.json().unwrap();
    assert_eq!(body["n"], 7);
    assert_eq!(response.url, "https://a.example/x");
    let sent = ctx.requests().pop().unwrap();
    assert_eq!(
        (sent.method.as_str(), &sent.body[..]),
        ("PUT", &b"[1,2]"[..])
    );
    assert!(
        sent.headers
            .contains(&("authorization".into(), format!("Bearer {key}")))
    );
}

#[test]
fn later_attempts_at_a_job_keep_responses_and_settings() {
    let ctx = TestCtx::new();
    let settings = serde_json::json!({"limit": 3});
    ctx.set_settings(settings.clone());
    ctx.on_http(|_| Ok(Response::new(200, "")));
    let day = Duration::from_secs(24 * 60 * 60);
    let _ = ctx.attempt(|ctx| ctx.sleep("nap", day)).suspended();
    for later in [ctx.next_attempt(), ctx.resumed()] {
        let response = send(&later, http::get("https://a.example/")).unwrap();
        assert_eq!(response.status, 200);
        let kept: serde_json::Value = later.settings().unwrap();
        assert_eq!(kept, settings);
        assert_eq!(later.requests().len(), 1);
    }
}

#[test]
fn redirects_are_followed_on_request() {
    let from = "https://a.example/old";
    let ctx = redirecting(302, from, "new");
    assert_eq!(send(&ctx, http::get(from)).unwrap().status, 302);
    let response = send(&ctx, http::get(from).redirects(1)).unwrap();
    assert_eq!(
        (response.status, response.url.as_str()),
        (200, "https://a.example/new")
    );

    let ctx = redirecting(302, from, from);
    assert_eq!(
        send(&ctx, http::get(from).redirects(3)).unwrap().status,
        302
    );
    assert_eq!(ctx.requests().len(), 4, "no more redirects than requested");
}

#[test]
fn a_post_is_repeated_only_if_the_status_requires_it() {
    let from = "https://a.example/old";
    let post = || {
        let post = http::post(from)
            .header("x", "1")
            .header("authorization", "y");
        post.header("content-type", "text/plain")
            .body("hello")
            .redirects(1)
    };
    for (status, text) in [
        (301, "GET authorization,x "),
        (302, "GET authorization,x "),
        (303, "GET authorization,x "),
        (307, "POST authorization,content-type,x hello"),
        (308, "POST authorization,content-type,x hello"),
    ] {
        let ctx = redirecting(status, from, "/new");
        assert_eq!(
            send(&ctx, post()).unwrap().text().unwrap(),
            text,
            "{status}"
        );
    }
    for elsewhere in [
        "https://b.example/",
        "http://a.example/",
        "https://a.example:444/",
    ] {
        let ctx = redirecting(307, from, elsewhere);
        let text = send(&ctx, post()).unwrap();
        assert_eq!(
            text.text().unwrap(),
            "POST content-type,x hello",
            "{elsewhere}"
        );
    }
}

#[test]
fn a_request_ends_with_its_timeout_and_with_the_abort() {
    let ctx = TestCtx::new();
    let requests_made = Rc::new(Cell::new(0));
    let count = Rc::clone(&requests_made);
    ctx.on_http(move |_| {
        count.set(count.get() + 1);
        Ok(Response::new(200, ""))
    });
    let limited = http::get("https://a.example/").timeout(Duration::ZERO);
    // An immediate response is in time.
    assert!(send(&ctx, limited).is_ok());
    ctx.fire_abort(AbortReason::Cancelled);
    let error = send(&ctx, http::get("https://a.example/")).unwrap_err();
    assert_eq!((error.kind.as_ref(), error.permanent), ("aborted", false));
    assert_eq!(requests_made.get(), 1, "nothing is sent after the abort");
}

#[test]
fn an_invalid_url_is_refused_before_anything_is_sent() {
    let ctx = TestCtx::new();
    ctx.on_http(|_| Ok(Response::new(200, "")));
    for url in ["a.example", "ftp://a.example/", "https://"] {
        let error = send(&ctx, http::get(url)).unwrap_err();
        assert!(error.permanent && error.kind == "invalid_request", "{url}");
    }
    assert!(ctx.requests().is_empty());
}

#[test]
fn a_method_or_a_header_that_the_host_refuses_is_refused_before_anything_is_sent() {
    let ctx = TestCtx::new();
    ctx.on_http(|_| Ok(Response::new(200, "")));
    let get = || http::get("https://a.example/");
    for (request, why) in [
        (
            get().header("x y", "1"),
            "\"x y\" is not the name of a header",
        ),
        (get().header("", "1"), "\"\" is not the name of a header"),
        (
            get().header("Host", "b.example"),
            "cannot set the header Host",
        ),
        (get().header("connection", "close"), "the header connection"),
        (get().header("x-name", "secret\r\n"), "the header x-name"),
        (get().bearer("secret\0"), "the header authorization"),
        (Request::new("GE T", "https://a.example/"), "the method"),
        (Request::new("", "https://a.example/"), "the method"),
    ] {
        let error = send(&ctx, request).unwrap_err();
        assert!(
            error.permanent && error.kind == "invalid_request",
            "{error:?}"
        );
        assert!(error.message.contains(why), "{error} has no {why}");
        assert!(!error.message.contains("secret"), "{error}");
    }
    assert!(ctx.requests().is_empty());
    let fine = get().header("X-!#$%&'*+.^_`|~", "a\tü");
    assert_eq!(send(&ctx, fine).unwrap().status, 200);
}

#[test]
fn a_response_that_is_too_large_is_an_error_or_is_truncated() {
    let ctx = TestCtx::new();
    ctx.on_http(|_| Ok(Response::new(200, "123456")));
    let request = || http::get("https://a.example/");
    let error = send(&ctx, request().response_bytes_max(5)).unwrap_err();
    assert!(error.permanent && error.kind == "too_large", "{error:?}");
    assert!(error.message.contains("longer than 5 bytes"), "{error}");
    let truncated = send(&ctx, request().truncate_response(5)).unwrap();
    assert_eq!(
        (&truncated.body[..], truncated.is_truncated),
        (&b"12345"[..], true)
    );
    let whole = send(&ctx, request().truncate_response(6)).unwrap();
    assert_eq!(
        (&whole.body[..], whole.is_truncated),
        (&b"123456"[..], false)
    );
}

#[test]
fn a_signature_in_a_test_depends_on_name_and_message() {
    let ctx = TestCtx::new();
    let tag = |name: &str, message: &str| ctx.hmac_sha256(name, message).unwrap();
    assert_eq!(tag("A", "x").len(), 32);
    assert_eq!(tag("A", "x"), tag("A", "x"));
    assert_ne!(tag("A", "x"), tag("B", "x"));
    assert_ne!(tag("A", "x"), tag("A", "y"));
}
