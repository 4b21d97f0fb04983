//! Guests that try to reach outside of their sandbox.

use std::fs;
use std::net::{TcpListener, TcpStream, UdpSocket};

use rouse_sdk::{Ctx, Error, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize, JsonSchema)]
pub(crate) struct ReadFile {
    path: String,
}

/// Returns the contents of a file.
#[handler(name = "test.read-file", max_attempts = 1, capabilities = ["dirs"])]
pub(crate) fn read_file(payload: ReadFile) -> Result<String, Error> {
    Ok(fs::read_to_string(payload.path)?)
}

/// Checks whether a file exists, and then fails for another reason.
#[handler(
    name = "test.probe-file",
    max_attempts = 2,
    retry_initial = "1ms",
    retry_jitter = 0.0
)]
pub(crate) fn probe_file(payload: ReadFile) -> Result<(), Error> {
    let there = fs::metadata(&payload.path).is_ok() || fs::read(&payload.path).is_ok();
    Err(Error::retryable(format!("the server is busy ({there})")))
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct WriteFile {
    path: String,
    text: String,
}

/// Writes a file.
#[handler(name = "test.write-file", max_attempts = 1, capabilities = ["dirs"])]
pub(crate) fn write_file(payload: WriteFile) -> Result<(), Error> {
    Ok(fs::write(payload.path, payload.text)?)
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Env {
    /// The address to connect to; the default refuses connections.
    #[serde(default = "anywhere")]
    connect_to: String,
}

fn anywhere() -> String {
    "127.0.0.1:1".to_owned()
}

/// Returns everything that it can find out about its environment: with nothing granted, the lists are empty
/// and each access fails.
#[handler(name = "test.env", max_attempts = 1)]
pub(crate) fn env(payload: Env) -> Value {
    fn outcome<T>(result: std::io::Result<T>) -> Value {
        match result {
            Ok(_) => json!("allowed"),
            Err(error) => json!({"error": error.to_string()}),
        }
    }
    fn names(folder: &str) -> Value {
        match fs::read_dir(folder) {
            Ok(entries) => entries
                .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
                .collect(),
            Err(error) => json!({"error": error.to_string()}),
        }
    }
    let vars: Vec<String> = std::env::vars_os()
        .map(|(name, _)| name.to_string_lossy().into_owned())
        .collect();
    let args: Vec<String> = std::env::args_os()
        .map(|arg| arg.to_string_lossy().into_owned())
        .collect();
    let mut line = String::new();
    let stdin_bytes = std::io::stdin().read_line(&mut line).unwrap_or(0);
    json!({
        "vars": vars,
        "args": args,
        "root": names("/"),
        "here": names("."),
        "passwd": outcome(fs::read("/etc/passwd")),
        "tcp": outcome(TcpStream::connect(&payload.connect_to)),
        "listen": outcome(TcpListener::bind("127.0.0.1:0")),
        "udp": outcome(UdpSocket::bind("127.0.0.1:0")),
        "stdin_bytes": stdin_bytes,
    })
}

#[derive(Deserialize)]
struct Settings {
    threshold: u32,
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Ask {
    variable: String,
}

/// Returns one of its settings and the value of a variable.
#[handler(
    name = "test.settings",
    max_attempts = 3,
    capabilities = ["settings:threshold", "env:GREETING", "http:api.example.com"]
)]
pub(crate) fn settings(ctx: &Ctx, payload: Ask) -> Result<Value, Error> {
    let settings: Settings = ctx.settings()?;
    Ok(json!({"threshold": settings.threshold, "variable": std::env::var(payload.variable).ok()}))
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Print {
    line: String,
    #[serde(default = "once")]
    times: usize,
}

fn once() -> usize {
    1
}

/// Prints a line to standard output and to standard error, `times` times.
#[handler(name = "test.print", max_attempts = 1)]
pub(crate) fn print(payload: Print) -> usize {
    for _ in 0..payload.times {
        println!("out: {}", payload.line);
        eprintln!("err: {}", payload.line);
    }
    payload.times
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Connect {
    to: String,
}

/// Connects to an address, and fails if it cannot.
#[handler(name = "test.connect", max_attempts = 3)]
pub(crate) fn connect(payload: Connect) -> Result<(), Error> {
    TcpStream::connect(payload.to)?;
    Ok(())
}
