//! The token for invocations: where it is required, and what works without it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use serde_json::json;

use super::{Call, JSON, NONE, TOKEN, command, loopback, post, serve, spawn_without_token};
use crate::http::get;
use crate::invoke::folder;
use crate::support::worker::TIMEOUT;
use crate::support::{Host, TestDb, free_port, rouse};

#[tokio::test]
async fn dev_accepts_local_invocations_without_a_token_and_refuses_web_pages_and_other_host_names()
{
    let folder = folder("");
    let address = loopback();
    let data = folder.join("pg");
    let mut dev = rouse();
    dev.args([
        "dev",
        "--http",
        &address,
        "--handlers",
        "handlers",
        "--data-dir",
    ])
    .arg(&data)
    .current_dir(&folder)
    .env("ROUSE_LOG", "info");
    let host = Host::spawn(dev);
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    let address = address.parse().unwrap();
    let call = async |headers: &[(&str, &str)]| {
        let headers: Vec<_> = headers.iter().copied().chain([NONE]).collect();
        let call = Call::send(address, "noop", &headers, "{\"n\": 1}").await;
        call.response().await.status
    };
    assert_eq!(call(&[JSON]).await, 200);
    assert_eq!(call(&[JSON, ("host", "localhost:1")]).await, 200);
    assert_eq!(call(&[JSON, ("host", "evil.example")]).await, 403);
    assert_eq!(call(&[JSON, ("origin", "http://evil.example")]).await, 403);
    // A proxy on this machine, which may forward calls from anyone.
    assert_eq!(call(&[JSON, ("x-forwarded-for", "192.0.2.1")]).await, 403);
    assert_eq!(call(&[]).await, 415);
    assert_eq!(call(&[("content-type", "text/plain")]).await, 415);
    let (status, _) = get(address, "/invoke/noop").await;
    assert!(status.contains("405"), "{status}");
    host.stop();
}

#[tokio::test]
async fn serve_without_a_token_refuses_invocations_and_explains_how_to_set_one() {
    let db = TestDb::new().await;
    let (folder, address) = (folder(""), loopback());
    let host = spawn_without_token(&folder, &[], &address, &db.url());
    host.line(TIMEOUT, |line| {
        line.contains("invocations are off") && line.contains("ROUSE_INVOKE_TOKEN")
    });
    host.line(TIMEOUT, |line| line.contains("worker started"));
    let refused = post(address.parse().unwrap(), "noop", "{\"n\": 1}").await;
    assert_eq!(
        (refused.status, &refused.body["error"]["kind"]),
        (403, &json!("off"))
    );
    let message = refused.body["error"]["message"].as_str().unwrap();
    for part in [
        "ROUSE_INVOKE_TOKEN",
        "invoke_token_file",
        "authorization: Bearer TOKEN",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    host.stop();

    // Without a queue, the host would have nothing to do.
    let (status, output) =
        spawn_without_token(&folder, &["--no-queue"], &loopback(), "").exit(TIMEOUT);
    assert!(!status.success(), "{output}");
    for part in ["nothing is left to do", "ROUSE_INVOKE_TOKEN"] {
        assert!(output.contains(part), "{part}: {output}");
    }
}

#[tokio::test]
async fn a_token_is_required_beyond_loopback_and_is_never_printed() {
    let folder = folder("");
    let all_interfaces = format!("0.0.0.0:{}", free_port());
    let (host, address) = serve(&folder, &all_interfaces, &[("ROUSE_INVOKE_TOKEN", TOKEN)]);
    let call = async |headers: &[(&str, &str)]| {
        let call = Call::send(address, "noop", headers, "{\"n\": 1}").await;
        call.response().await
    };
    host.line(TIMEOUT, |line| line.contains("for callers with a token"));
    let right = format!("Bearer {TOKEN}");
    assert_eq!(call(&[JSON, ("authorization", &right)]).await.status, 200);
    let without = call(&[JSON, NONE]).await;
    assert_eq!(without.status, 401);
    assert!(without.head.contains("www-authenticate: bearer"));
    let invalid = format!("{right}0");
    assert_eq!(call(&[JSON, ("authorization", &invalid)]).await.status, 401);
    host.signal(libc::SIGTERM);
    let (_, output) = host.exit(TIMEOUT);
    assert!(!output.contains(TOKEN), "{output}");

    // From a file that only its owner may read.
    let folder = crate::invoke::folder("invoke_token_file = \"token\"\n");
    let new = "fedcba9876543210fedcba9876543210";
    std::fs::write(folder.join("token"), format!("{TOKEN}\n{new}\n")).unwrap();
    let world_readable = spawn_without_token(&folder, &["--no-queue"], &loopback(), "");
    let (status, output) = world_readable.exit(TIMEOUT);
    assert!(
        !status.success() && output.contains("chmod 600"),
        "{output}"
    );
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(folder.join("token"), private).unwrap();
    let address = loopback();
    let host = spawn_without_token(&folder, &["--no-queue"], &address, "");
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    let address = address.parse().unwrap();
    assert_eq!(post(address, "noop", "{}").await.status, 200);
    let new = format!("Bearer {new}");
    let changed = Call::send(address, "noop", &[JSON, ("authorization", &new)], "{}").await;
    assert_eq!(changed.response().await.status, 200);
    let without = Call::send(address, "noop", &[JSON, NONE], "{}").await;
    assert_eq!(without.response().await.status, 401);
}

#[tokio::test]
async fn a_host_with_invocations_enabled_but_no_token_warns_that_they_are_off() {
    let folder = folder("invoke_max = 4\n");
    let db = TestDb::new().await;
    let all_interfaces = format!("0.0.0.0:{}", free_port());
    let url = db.url();
    let host = spawn_without_token(&folder, &[], &all_interfaces, &url);
    host.line(TIMEOUT, |line| {
        line.contains("WARN") && line.contains("invocations are off")
    });
    host.line(TIMEOUT, |line| line.contains("worker started"));
    let address = all_interfaces
        .replace("0.0.0.0", "127.0.0.1")
        .parse()
        .unwrap();
    let response = post(address, "noop", "{}").await;
    assert_eq!(response.status, 403);
    assert_eq!(response.body["error"]["kind"], "off");

    for (args, config, expected) in [
        (&["--no-queue"][..], "", "nothing is left to do"),
        (
            &[],
            "queue = \"off\"\ninvoke_max = 0\n",
            "nothing is left to do",
        ),
        (
            &["--no-queue", "--database-url", "x"],
            "",
            "cannot be used with",
        ),
    ] {
        let folder = crate::invoke::folder(config);
        let address = match config {
            "" => format!("0.0.0.0:{}", free_port()),
            _ => loopback(),
        };
        let (status, output) = spawn_without_token(&folder, args, &address, "").exit(TIMEOUT);
        assert!(
            !status.success() && output.contains(expected),
            "{args:?}: {output}"
        );
    }
    for (token, expected) in [
        (&b"guess me"[..], "at least 16 visible ASCII characters"),
        (b"", "is set but empty"),
        (b"\xff0123456789abcdef", "is not UTF-8"),
    ] {
        let mut bad = command(&folder, &["--no-queue"], &loopback());
        bad.env("ROUSE_INVOKE_TOKEN", OsStr::from_bytes(token));
        let (status, output) = Host::spawn(bad).exit(TIMEOUT);
        assert!(!status.success(), "{output}");
        assert!(
            output.contains("ROUSE_INVOKE_TOKEN") && output.contains(expected),
            "{output}"
        );
        assert!(!output.contains("guess me"), "{output}");
    }
}
