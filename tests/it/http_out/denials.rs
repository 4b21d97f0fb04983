//! Requests that are denied: by grant, by address, and after a redirect.

use std::process::Stdio;

use serde_json::{Value, json};

use super::{OWN, guests, http};
use crate::support::rouse;
use crate::support::web::web;

#[tokio::test]
async fn an_ungranted_request_is_denied_permanently_with_the_lines_that_allow_it() {
    let guests = guests().await;
    let (plain, tls) = (web().plain, web().tls);
    for (handler, method, url, lines) in [
        (
            "test.http.none",
            "GET",
            http("localhost", "/denied"),
            format!(
                "[[handlers.\"test.http.none\".http]]\nhosts = [\"localhost\"]\nschemes = [\"http\"]\nports = [{plain}]\nmethods = [\"GET\"]"
            ),
        ),
        (
            "test.http.other",
            "POST",
            http("here.web.test", "/denied"),
            "methods = [\"POST\"]".into(),
        ),
        (
            "test.http.other",
            "GET",
            format!("https://here.web.test:{tls}/denied"),
            format!("hosts = [\"here.web.test\"]\nports = [{tls}]\n"),
        ),
        (
            "test.http.private",
            "GET",
            "http://localhost/denied".into(),
            "schemes = [\"http\"]\nmethods".into(),
        ),
        (
            "test.http.private",
            "GET",
            http("elsewhere.example", "/denied"),
            "hosts = [\"elsewhere.example\"]\n".into(),
        ),
        (
            "test.http.private",
            "CONNECT",
            http("localhost", "/denied"),
            "a tunnel".into(),
        ),
    ] {
        let payload = json!({"requests": [{"method": method, "url": url}]});
        let denial = guests.denial(handler, payload).await;
        assert!(denial.contains(handler), "{denial}");
        assert!(
            denial.contains(&lines),
            "{lines:?} is missing in {denial:?}"
        );
    }
    assert!(web().seen("/denied").is_empty());
}

#[tokio::test]
async fn no_name_resolves_to_a_private_address() {
    let guests = guests().await;
    for (host, part) in [
        ("localhost", "127.0.0.1"),
        ("inside.test", "10.0.0.1"),
        ("mapped.test", "::ffff:127.0.0.1"),
        ("translated.test", "64:ff9b::7f00:1"),
        ("metadata.test", "serve credentials"),
        ("zero.test", "not the address of a server"),
        (
            "own.test",
            "leads to 93.184.215.14, which is an address of this machine",
        ),
        (OWN, "an address of this machine"),
        ("127.0.0.1", "private = true"),
        ("[::1]", "hosts = [\"::1\"]"),
        ("[::ffff:127.0.0.1]", "private = true"),
        ("10.0.0.1", "private = true"),
        ("169.254.169.254", "serve credentials"),
        ("2130706433", "dotted decimal"),
        ("0x7f.1", "dotted decimal"),
        ("0177.0.0.1", "dotted decimal"),
        ("127.1", "dotted decimal"),
        ("user@localhost", "user name"),
        ("localhost@here.web.test", "user name"),
    ] {
        let payload = json!({"requests": [{"url": http(host, "/inside")}]});
        let denial = guests.denial("test.http.public", payload).await;
        assert!(denial.contains(part), "{host}: {denial}");
    }
    assert!(web().seen("/inside").is_empty());
}

#[tokio::test]
async fn private_names_cannot_reach_metadata_services_and_listed_addresses_are_reachable() {
    let guests = guests().await;
    for host in ["metadata.test", "zero.test"] {
        let payload = json!({"requests": [{"url": http(host, "/metadata")}]});
        guests.denial("test.http.private", payload).await;
    }
    let request = json!({"url": http("127.0.0.1", "/listed")});
    let echo = guests.echo("test.http.other", request).await;
    assert_eq!(echo["path"], "/listed");
}

#[tokio::test]
async fn the_connection_goes_to_the_address_that_was_checked() {
    let guests = guests().await;
    // A second lookup would lead elsewhere, but there is no second lookup.
    let request = json!({"url": http("rebound.test", "/rebound")});
    let echo = guests.echo("test.http.private", request).await;
    assert_eq!(echo["path"], "/rebound");
    // A new connection looks the name up again, and its address is checked again.
    let tls = format!("https://rebound.test:{}/rebound", web().tls);
    let payload = json!({"requests": [{"url": tls}]});
    let denial = guests.denial("test.http.private", payload).await;
    assert!(denial.contains("169.254.169.254"), "{denial}");
}

#[tokio::test]
async fn a_redirect_is_checked_like_any_other_request() {
    let guests = guests().await;
    let to = |to: &str| json!({"url": http("localhost", &format!("/redirect/302?to={to}")), "redirects": 3, "headers": {"authorization": "Bearer x"}});
    let echo = guests.echo("test.http.private", to("/redirected")).await;
    assert_eq!(echo["path"], "/redirected");
    assert_eq!(echo["headers"]["authorization"], "Bearer x");
    let there = http("there.web.test", "/redirected");
    let echo = guests.echo("test.http.private", to(&there)).await;
    assert_eq!(echo["headers"]["authorization"], Value::Null);
    for target in [
        http("elsewhere.example", "/redirected"),
        http("metadata.test", "/redirected"),
        format!("http://localhost@there.web.test:{}/", web().plain),
        "http://localhost:1/".into(),
    ] {
        let payload = json!({"requests": [to(&target)]});
        let denial = guests.denial("test.http.private", payload).await;
        assert!(
            denial.contains("test.http.private requested GET"),
            "{denial}"
        );
    }
    // A redirect is not followed unless the guest requests it.
    let request = json!([{"url": http("localhost", "/redirect/307?to=/x")}]);
    let responses = guests.responses("test.http.private", request).await;
    assert_eq!(responses[0]["status"], 307);
}

#[tokio::test]
async fn the_lines_printed_by_a_denial_allow_the_request() {
    let folder = crate::invoke::folder("");
    let toml = folder.join("rouse.toml");
    let url = http("localhost", "/allowed-now");
    let payload = json!({"requests": [{"method": "POST", "url": url}]}).to_string();
    let invoke = async || {
        let mut command = rouse();
        command
            .args(["invoke", "--json", "test.http.none", &payload])
            .args(["--handlers", "handlers"])
            .current_dir(&folder)
            .env_remove("ROUSE_LOG")
            .stdin(Stdio::null());
        let output = tokio::task::spawn_blocking(move || command.output());
        let output = output.await.unwrap().expect("run the command");
        serde_json::from_slice::<Value>(&output.stdout).expect("one JSON object")
    };
    // First nothing is granted, then nothing on this machine.
    for lacks in ["which is not granted to it", "not a public address"] {
        let invoked = invoke().await;
        let message = invoked["error"]["message"].as_str().expect("an error");
        assert!(message.contains(lacks), "{message}");
        let (_, lines) = message.split_once(":\n").expect("lines to copy");
        let lines = lines.split("\n\n").next().expect("the lines to copy");
        let mut text = std::fs::read_to_string(&toml).unwrap();
        text += lines;
        std::fs::write(&toml, text + "\n").unwrap();
    }
    let invoked = invoke().await;
    assert_eq!(
        invoked["result"]["responses"][0]["status"], 200,
        "{invoked}"
    );
}
