use rouse_sdk::http::Request;
use rouse_sdk::{Handler, TestCtx};
use serde_json::{Value, json};

use super::*;

const URL: &str = "https://data.example/rates";

fn server(respond: impl FnMut(&Request) -> Result<Response, Error> + 'static) -> TestCtx {
    let ctx = TestCtx::new();
    ctx.on_http(respond);
    ctx
}

fn responding(status: u16, body: &'static [u8]) -> TestCtx {
    server(move |_| {
        let response = Response::new(status, body).with_header("etag", "\"v1\"");
        Ok(response.with_header("content-type", "application/json"))
    })
}

fn fetch_with(ctx: &TestCtx, payload: Value) -> Value {
    ctx.run::<super::fetch>(payload).unwrap()
}

fn refused(ctx: &TestCtx, payload: Value) -> Error {
    ctx.run::<super::fetch>(payload).unwrap_err()
}

#[test]
fn the_result_has_content_and_metadata() {
    let ctx = responding(200, b"{\"chf\": 1.07}");
    assert_eq!(
        fetch_with(
            &ctx,
            json!({"url": URL, "headers": {"accept": "application/json"}})
        ),
        json!({
            "status": 200, "url": URL, "content_type": "application/json", "etag": "\"v1\"", "not_modified": false,
            "bytes": 13, "sha256": "86ee8800f7acd6ac015a631e3de8085cd864f3b959429520698878a3cd561783",
            "json": {"chf": 1.07},
        })
    );
    let sent = ctx.requests().pop().unwrap();
    assert_eq!(sent.method, "GET");
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(
        sent.headers,
        [
            header("user-agent", USER_AGENT),
            header("accept", "application/json")
        ]
    );
}

#[test]
fn the_payload_may_set_the_user_agent() {
    let ctx = responding(200, b"1");
    fetch_with(&ctx, json!({"url": URL, "headers": {"User-Agent": "me"}}));
    let sent = ctx.requests().pop().unwrap();
    assert_eq!(sent.headers, [("User-Agent".to_owned(), "me".to_owned())]);
}

#[test]
fn json_is_in_the_result_with_every_digit() {
    let json = r#"{"b": 123456789012345678901234567890, "a": 0.10000000000000000000001}"#;
    let ctx = responding(200, json.as_bytes());
    let result = <super::fetch as Handler>::run(&ctx, format!("{{\"url\":\"{URL}\"}}").as_bytes());
    let result = String::from_utf8(result.unwrap()).unwrap();
    assert!(result.ends_with(&format!("\"json\":{json}}}")), "{result}");
}

#[test]
fn unchanged_content_is_not_fetched_again() {
    let ctx = server(|request| {
        let header = ("if-none-match".to_owned(), "\"v1\"".to_owned());
        assert!(request.headers.contains(&header));
        Ok(Response::new(304, "").with_header("etag", "\"v1\""))
    });
    assert_eq!(
        fetch_with(
            &ctx,
            json!({"url": URL, "etag": "\"v1\"", "to": "/nowhere/at-all"})
        ),
        json!({"status": 304, "url": URL, "etag": "\"v1\"", "not_modified": true})
    );
}

#[test]
fn a_response_without_content_that_is_not_a_redirect_names_its_status() {
    let error = refused(&responding(304, b""), json!({"url": URL}));
    assert!(error.permanent && error.kind == "http_304", "{error:?}");
    assert_eq!(
        error.message,
        format!(
            "{URL} responded with status 304 (not modified), but the payload has no `etag`: use `etag` instead of a condition in `headers`"
        )
    );
    for status in [300, 302] {
        let error = refused(&responding(status, b""), json!({"url": URL}));
        assert!(error.permanent, "{error:?}");
        assert_eq!(error.kind, format!("http_{status}"));
        assert_eq!(
            error.message,
            format!(
                "{URL} responded with status {status}, which has neither content nor a redirect that can be followed"
            )
        );
    }
}

#[test]
fn a_file_is_replaced_atomically_without_leftovers() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("deep/er/rates.json");
    let payload = json!({"url": URL, "to": to.to_str().unwrap()});
    for body in [&b"[1]"[..], b"[1, 2]"] {
        let result = fetch_with(&responding(200, body), payload.clone());
        assert_eq!(result["path"], payload["to"]);
        assert_eq!(result["bytes"], body.len());
        assert_eq!(result.get("json"), None);
        assert_eq!(fs::read(&to).unwrap(), body);
    }
    // A failed fetch leaves the existing file unchanged.
    refused(&responding(500, b"no"), payload);
    assert_eq!(fs::read(&to).unwrap(), b"[1, 2]");
    let files = fs::read_dir(to.parent().unwrap()).unwrap();
    assert_eq!(files.count(), 1);
}

#[test]
fn leftovers_of_a_stopped_attempt_are_removed_by_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("rates.json");
    let payload = json!({"url": URL, "to": to.to_str().unwrap()});
    let ctx = TestCtx::for_job(|job| {
        job.id = 7;
        job.attempt = 3;
    });
    let left = |of: &str| {
        let part = folder.path().join(format!("rates.json.{of}.part"));
        fs::write(&part, "[1").unwrap();
        part
    };
    let own = [left("7-1"), left("7-2")];
    // Another job may be writing it.
    let others = left("8-1");
    ctx.on_http(|_| Ok(Response::new(503, "not now")));
    refused(&ctx, payload);
    assert!(own.iter().all(|part| !part.exists()) && others.exists());
}

#[test]
fn a_temporary_file_that_cannot_be_renamed_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("taken");
    fs::create_dir_all(to.join("by-a-folder")).unwrap();
    refused(
        &responding(200, b"1"),
        json!({"url": URL, "to": to.to_str().unwrap()}),
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn an_unwritable_file_fails_permanently() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let to = file.path().join("under-a-file");
    let error = refused(&responding(200, b"1"), json!({"url": URL, "to": to}));
    assert!(error.permanent && error.kind == "file_denied", "{error:?}");
    assert!(error.message.contains("read-write"), "{error}");
}

#[test]
fn redirects_are_followed_up_to_the_limit() {
    let around = || server(|_| Ok(Response::new(302, "").with_header("location", "/again")));
    let ctx = around();
    let error = refused(&ctx, json!({"url": URL, "redirects": 2}));
    assert!(error.permanent && error.kind == "redirected");
    assert_eq!(ctx.requests().len(), 3);
    let ctx = around();
    refused(&ctx, json!({"url": URL}));
    assert_eq!(ctx.requests().len(), 6, "5 by default");
}

#[test]
fn temporary_errors_are_retried_and_others_fail_permanently() {
    for (status, permanent) in [(404, true), (403, true), (429, false), (502, false)] {
        let error = refused(&responding(status, b"no"), json!({"url": URL}));
        assert_eq!(error.permanent, permanent, "{status}");
    }
}

#[test]
fn errors_contain_no_password_from_a_url() {
    let url = "https://ada:hunter2@data.example/rates";
    for status in [404, 308] {
        let ctx = server(move |_| Ok(Response::new(status, "no").with_header("location", url)));
        let message = refused(&ctx, json!({"url": url, "redirects": 0})).message;
        assert!(message.contains("https://data.example/rates"), "{message}");
        assert!(!message.contains("hunter2"), "{message}");
    }
}

#[test]
fn a_server_delays_a_job_by_a_day_at_most() {
    let busy = server(|_| Ok(Response::new(503, "").with_header("retry-after", "99999999999")));
    let error = refused(&busy, json!({"url": URL}));
    assert_eq!(error.retry_after, Some(RETRY_AFTER_MAX));
}

#[test]
fn a_response_that_is_too_large_is_refused() {
    let payload = json!({"url": URL, "bytes_max": 2});
    let error = refused(&responding(200, b"123"), payload);
    assert!(error.permanent && error.kind == "too_large", "{error:?}");
    assert_eq!(
        fetch_with(&responding(200, b"12"), json!({"url": URL, "bytes_max": 2}))["json"],
        12
    );
}

#[test]
fn invalid_payloads_are_refused_before_anything_is_sent() {
    let ctx = responding(200, b"1");
    for (payload, says) in [
        (json!({"url": URL, "bytes_max": 0}), "bytes_max"),
        (json!({"url": URL, "bytes_max": 3 << 20}), "bytes_max"),
        (
            json!({"url": URL, "to": "/x", "bytes_max": 33 << 20}),
            "bytes_max",
        ),
        (json!({"url": URL, "redirects": 21}), "redirects"),
        (json!({"url": URL, "timeout_ms": 540_001}), "timeout_ms"),
        (json!({"url": URL, "method": "POST"}), "method"),
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
