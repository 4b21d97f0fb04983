//! A real browser (Debian's chromium), driven through its WebDriver.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

use super::{Host, free_port, skip};

/// How long a page may take to show something, on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The key of an element's id in responses (<https://www.w3.org/TR/webdriver2/#elements>).
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A browser with one window. It ends with its driver.
pub(crate) struct Browser {
    port: u16,
    session: String,
    _driver: Host,
}

impl Browser {
    /// Starts a browser. `None`, after a message, if this machine does not have chromium.
    pub(crate) async fn start() -> Option<Self> {
        if Command::new("chromedriver")
            .arg("--version")
            .output()
            .is_err()
        {
            skip("there is no chromium on this machine (apt-get install chromium chromium-driver)");
            return None;
        }
        let port = free_port();
        let mut command = Command::new("chromedriver");
        command.arg(format!("--port={port}"));
        let driver = Host::spawn(command);
        driver.line(TIMEOUT, |line| line.contains("started successfully"));
        let options = json!({"args": [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--force-color-profile=srgb", "--window-size=1280,900",
        ]});
        let wanted = json!({"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}});
        let mut browser = Self {
            port,
            session: String::new(),
            _driver: driver,
        };
        let made = browser
            .send("POST", "", &wanted)
            .await
            .expect("chromium starts");
        browser.session = format!("/{}", made["sessionId"].as_str().expect("a session"));
        Some(browser)
    }

    /// One command of the protocol; the error is the driver's message.
    async fn send(&self, method: &str, command: &str, body: &Value) -> Result<Value, String> {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let request = Request::builder()
            .method(method)
            .uri(format!(
                "http://127.0.0.1:{}/session{}{command}",
                self.port, self.session
            ))
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .expect("a request");
        let client = Client::builder(TokioExecutor::new()).build_http();
        let response = client.request(request).await.expect("the driver answers");
        let body = response
            .into_body()
            .collect()
            .await
            .expect("the whole response");
        let mut body: Value = serde_json::from_slice(&body.to_bytes()).expect("JSON");
        let value = body["value"].take();
        match value["error"].is_string() {
            true => Err(value["message"].as_str().unwrap_or_default().to_owned()),
            false => Ok(value),
        }
    }

    async fn post(&self, command: &str, body: &Value) -> Value {
        let done = self.send("POST", command, body).await;
        done.unwrap_or_else(|error| panic!("{command} {body}: {error}"))
    }

    /// Opens an address.
    pub(crate) async fn open(&self, url: &str) {
        self.post("/url", &json!({"url": url})).await;
    }

    /// Runs a script, and returns what it returns.
    pub(crate) async fn run(&self, script: &str) -> Value {
        self.post("/execute/sync", &json!({"script": script, "args": []}))
            .await
    }

    /// Runs a script that calls `done` with its result, and returns that.
    pub(crate) async fn run_async(&self, script: &str) -> Value {
        let script = format!("const done = arguments[arguments.length - 1]; {script}");
        self.post("/execute/async", &json!({"script": script, "args": []}))
            .await
    }

    /// The text that a reader sees.
    pub(crate) async fn text(&self) -> String {
        let text = self.run("return document.body.innerText").await;
        text.as_str().unwrap_or_default().to_owned()
    }

    /// Waits until the reader sees this text.
    pub(crate) async fn wait_for(&self, wanted: &str) {
        let until = Instant::now() + TIMEOUT;
        loop {
            let text = self.text().await;
            if text.contains(wanted) {
                return;
            }
            assert!(
                Instant::now() < until,
                "{wanted:?} did not appear in:\n{text}"
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Clicks the first element that this selector finds.
    pub(crate) async fn click(&self, selector: &str) {
        let command = format!("{}/click", self.find(selector).await);
        self.post(&command, &json!({})).await;
    }

    /// Types into the first element that this selector finds.
    pub(crate) async fn type_into(&self, selector: &str, text: &str) {
        let command = format!("{}/value", self.find(selector).await);
        self.post(&command, &json!({"text": text})).await;
    }

    async fn find(&self, selector: &str) -> String {
        let found = self
            .post(
                "/element",
                &json!({"using": "css selector", "value": selector}),
            )
            .await;
        format!("/element/{}", found[ELEMENT].as_str().expect("an element"))
    }

    /// Confirms the question that is open; returns its text.
    pub(crate) async fn accept_question(&self) -> String {
        let text = self
            .send("GET", "/alert/text", &Value::Null)
            .await
            .expect("a question is open");
        self.post("/alert/accept", &json!({})).await;
        text.as_str().unwrap_or_default().to_owned()
    }

    /// Makes the window this wide.
    pub(crate) async fn set_width(&self, width: u32) {
        self.post("/window/rect", &json!({"width": width, "height": 900}))
            .await;
    }

    /// Saves what the window shows.
    pub(crate) async fn screenshot(&self, to: PathBuf) {
        let taken = self
            .send("GET", "/screenshot", &Value::Null)
            .await
            .expect("a screenshot");
        let png = STANDARD
            .decode(taken.as_str().expect("a picture"))
            .expect("Base64");
        std::fs::write(&to, png).unwrap_or_else(|error| panic!("write {}: {error}", to.display()));
    }

    /// Ends the browser.
    pub(crate) async fn close(self) {
        self.send("DELETE", "", &Value::Null)
            .await
            .expect("the browser ends");
    }
}
