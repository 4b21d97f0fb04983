//! `rouse dev`: a private Postgres and a worker in one command, without any setup.

mod jobs;

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args as ClapArgs;
use serde_json::json;
use tokio_util::task::AbortOnDropHandle;

pub(super) use self::jobs::Jobs;
use super::contract;
use super::dev_file::Serves;
use super::example;
use super::host::dashboard;
use super::host::invocations::Tokenless;
use super::host::{Databases, Host, HostArgs, Written};
use super::postgres::{Private, PrivateArgs};
use super::signals::{Signals, stopped_early};
use super::text::{as_json, plain};
use crate::config::{Environment, Queue};
use crate::sandbox::{Handler, HandlerSet};
use crate::store::connect::Connector;
use crate::worker::Middleware;

/// The log filter if ROUSE_LOG is not set. The lines of [`Jobs`] are printed in addition.
pub(super) const LOG_FILTER: &str = "info,wasmtime_wasi_http=error,rouse::job=off";

/// Options of `rouse dev`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    private: PrivateArgs,
    #[command(flatten)]
    host: HostArgs,

    /// The address of /healthz, /readyz, /metrics, /invoke, /jobs/ID and the dashboard /ui/; port 0: any free port;
    /// `off`: none. Unless it is on loopback, anyone who can reach it can read the dashboard, except payloads, results,
    /// errors and logs; $ROUSE_UI_VIEWER_TOKEN requires a sign-in
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    http: String,

    /// Print events as JSON, one object per line
    #[arg(long)]
    json: bool,
}

/// Serves until a signal, then also stops the private Postgres.
pub(super) async fn run(
    args: Args,
    jobs: &Jobs,
    middleware: Vec<Arc<dyn Middleware>>,
) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::install()?;
    // Read the settings first: a mistake in them leaves nothing behind.
    let mut written = args.host.read()?;
    let handlers = &args.host.handlers;
    std::fs::create_dir_all(handlers)
        .with_context(|| format!("cannot create the handlers folder {}", handlers.display()))?;
    written.is_dev = true;
    anyhow::ensure!(
        written.queue == Queue::On,
        "rouse.toml has queue = \"off\", which leaves nothing to do for a private Postgres; use `rouse serve`"
    );
    let Some(private) = args.private.start(&mut signals).await? else {
        stopped_early();
        return Ok(ExitCode::SUCCESS);
    };
    let done = tokio::select! {
        done = serve(&args, &private, written, signals, jobs, middleware) => done,
        error = private.died() => Err(error),
    };
    jobs.end();
    // Shut the server down, including after an error.
    private.stop().await?;
    done?;
    Ok(ExitCode::SUCCESS)
}

/// Loads the handlers and works until a signal.
async fn serve(
    args: &Args,
    private: &Private,
    written: Written,
    mut signals: Signals,
    jobs: &Jobs,
    middleware: Vec<Arc<dyn Middleware>>,
) -> anyhow::Result<()> {
    let prepare = Host::prepare(&args.host, written, &args.http, Tokenless::ThisMachine);
    let Some(host) = signals.unless(prepare).await else {
        stopped_early();
        return Ok(());
    };
    let host = host?;
    Serves::new(&args.host.handlers, args.host.config_file())?.write(private.data_dir())?;
    let connector = Connector::from_url(&private.url, &|name| Environment.get(name))?;
    let databases = Databases {
        listen_connector: connector.clone(),
        connector,
    };
    let (catalog, http) = (host.catalog.clone(), host.http_address());
    let publishing = tokio::spawn(contract::publish_forever(
        databases.connector.clone(),
        catalog.clone(),
    ));
    let _publishing = AbortOnDropHandle::new(publishing);
    let ready = async {
        let handlers = catalog.tried().await;
        print_ready(
            args,
            &private.url,
            private.tcp_url.as_deref(),
            http,
            &handlers,
        )?;
        jobs.print(args.json)
            .context("start the thread that prints the ends of jobs")
    };
    let mut working = pin!(host.work(Some(databases), signals, middleware));
    tokio::select! {
        done = &mut working => return done,
        ready = ready => ready?,
    }
    working.await
}

fn print_ready(
    args: &Args,
    url: &str,
    tcp_url: Option<&str>,
    http: Option<SocketAddr>,
    handlers: &HandlerSet,
) -> anyhow::Result<()> {
    let folder: PathBuf = std::fs::canonicalize(&args.host.handlers)?;
    let mut out = Vec::new();
    if args.json {
        let event = json!({
            "event": "ready",
            "url": url,
            "tcp_url": tcp_url,
            "http": http.map(|address| format!("http://{address}")),
            "dashboard": http.and_then(dashboard::url),
            "handlers_dir": folder,
            "handlers": handlers.names(),
            "slow": handlers.slow,
            "refused": handlers.refused.iter().map(|refusal| json!({"file": refusal.file, "why": refusal.why, "lines": refusal.lines})).collect::<Vec<_>>(),
        });
        writeln!(out, "{}", as_json(event))?;
    } else {
        if let Some(url) = http.and_then(dashboard::url) {
            writeln!(out, "open:     {url}   (the dashboard)")?;
        }
        writeln!(out, "postgres: {url}")?;
        if let Some(url) = tcp_url {
            writeln!(out, "postgres: {url}")?;
        }
        if let Some(address) = http {
            writeln!(out, "metrics:  http://{address}/metrics")?;
        }
        let names = handlers.names();
        writeln!(
            out,
            "ready:    {} from {}",
            match names.len() {
                1 => "1 handler".to_string(),
                count => format!("{count} handlers"),
            },
            folder.display()
        )?;
        for name in &names {
            writeln!(out, "          {name}")?;
        }
        for file in &handlers.slow {
            writeln!(out, "          {file} is still being loaded")?;
        }
        match example(handlers) {
            None if !handlers.refused.is_empty() => {
                writeln!(
                    out,
                    "          none: {}",
                    match handlers.refused.len() {
                        1 => "1 file is refused".to_string(),
                        count => format!("{count} files are refused"),
                    }
                )?;
                for refusal in &handlers.refused {
                    writeln!(
                        out,
                        "          refused {}: {}",
                        refusal.file,
                        plain(&refusal.why)
                    )?;
                }
            }
            None => writeln!(
                out,
                "          none yet: put *.wasm files there (`cargo xtask handlers` builds those of this repository, `rouse new NAME` starts one of your own)"
            )?,
            Some((handler, payload)) => {
                writeln!(out, "try:      psql '{url}'")?;
                out.write_all(call(handler, payload.as_deref()).as_bytes())?;
                writeln!(
                    out,
                    "then:     rouse job ID   (in this folder; Ctrl-C here stops everything)"
                )?;
            }
        }
    }
    let mut stdout = std::io::stdout().lock();
    // The reader may have closed the pipe. An error would end a host that may be running jobs.
    let _ = stdout.write_all(&out).and_then(|()| stdout.flush());
    Ok(())
}

/// The handler of an example call, preferably one without grants, and its payload, quoted for SQL, if there is a simple
/// one that matches the handler's schema.
fn example(handlers: &HandlerSet) -> Option<(&str, Option<String>)> {
    let needs_nothing = |handler: &&Arc<Handler>| handler.manifest.capabilities.is_empty();
    let handler = handlers
        .get("text.stats")
        .or_else(|| handlers.handlers.values().find(needs_nothing))
        .or_else(|| handlers.handlers.values().next())?;
    let payload = example::payload(&handler.manifest.input_schema);
    let quoted = payload.map(|payload| as_json(payload).replace('\'', "''"));
    Some((&handler.manifest.name, quoted))
}

/// The lines with an example call.
fn call(handler: &str, payload: Option<&str>) -> String {
    let line =
        |payload: &str| format!("          SELECT rouse.enqueue('{handler}', '{payload}');\n");
    match payload {
        Some(payload) => line(payload),
        None => {
            line("PAYLOAD")
                + &format!(
                    "          PAYLOAD: JSON that matches the handler's schema (`rouse handlers show {handler} --schema`)\n"
                )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_without_an_example_payload_names_what_is_expected() {
        assert_eq!(
            call("a.b", Some("{}")),
            "          SELECT rouse.enqueue('a.b', '{}');\n"
        );
        let lines = call("a.b", None);
        assert!(lines.contains("('a.b', 'PAYLOAD');\n"), "{lines}");
        assert!(
            lines.contains("rouse handlers show a.b --schema"),
            "{lines}"
        );
    }
}
