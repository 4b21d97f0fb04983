//! `rouse invoke`: runs one handler once, without a queue or a database.

mod profile_file;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args as ClapArgs;
use serde::Serialize;
use serde_json::value::RawValue;

use profile_file::ProfileFile;

use super::PipesFail;
use super::attempt_error;
use super::host::HANDLERS_DIR;
use super::nearest::{did_you_mean, nearest};
use super::open_files;
use super::payload;
use super::settings::sandbox_settings;
use super::signals::Signals;
use super::text::{as_json, plain};
use crate::config::File;
use crate::duration;
use crate::invoke::{Call, InvokeOutcome, Invoked, once};
use crate::job::{AbortReason, AttemptError, ErrorKind};
use crate::sandbox::{AbortHandle, Catalog, Handler, HandlerSet, Profile, Sandbox};
use crate::telemetry;
use crate::worker::Policy;

/// The handler failed.
const EXIT_FAILED: u8 = 1;
/// The payload is not JSON; clap uses the same code for invalid options.
const EXIT_USAGE: u8 = 2;
/// There is no such handler.
const EXIT_UNKNOWN: u8 = 3;
/// It ran longer than its run timeout.
const EXIT_TIMEOUT: u8 = 5;
/// The host could not run it.
const EXIT_UNRUNNABLE: u8 = 6;
/// Ctrl-C or SIGTERM; 128 + SIGINT, as in shells.
const EXIT_INTERRUPTED: u8 = 130;

/// Options of `rouse invoke`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
The result goes to standard output, logs and errors to standard error. The handler sees attempt 1 of 1 and a \
negative job id, different for each call; nothing is retried, and nothing is kept.
  rouse invoke text.stats '{\"text\": \"hello\"}'\n\
With --profile the handler is sampled every millisecond while it computes; waiting is not recorded. Give it enough work:
  rouse invoke text.stats - --profile out.json < text.json\n\
Exit codes: 0 succeeded · 1 the handler failed · 2 usage, or the payload is not JSON · 3 no such handler · \
5 it ran longer than its timeout · 6 it could not be run (settings, folder, sandbox) · 130 Ctrl-C or SIGTERM")]
pub(super) struct Args {
    /// The handler, for instance text.stats
    handler: String,

    /// The payload; `-` reads it from standard input
    #[arg(value_name = "JSON", default_value = "{}")]
    payload: String,

    /// The folder with the handlers (*.wasm)
    #[arg(long, value_name = "DIR", default_value = HANDLERS_DIR)]
    handlers: PathBuf,

    /// Settings: memory, granted directories …; default: ./rouse.toml, if there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// How long it may run, for instance 90s; default: the handler's own
    #[arg(long, value_name = "TIME", value_parser = duration::argument_above_zero)]
    timeout: Option<Duration>,

    /// The queue that the handler sees
    #[arg(long, value_name = "NAME", default_value = "default")]
    queue: String,

    /// The tenant that the handler sees
    #[arg(long)]
    tenant: Option<String>,

    /// Print one JSON object: the outcome, the result or error, and what the call used
    #[arg(long)]
    json: bool,

    /// Write a CPU profile to this file, for https://profiler.firefox.com
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
}

/// Runs the handler and prints what it returns.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match invoke(args).await {
        Ok(code) => Ok(ExitCode::from(code)),
        Err(error) => {
            eprintln!("rouse: {error:#}");
            Ok(ExitCode::from(EXIT_UNRUNNABLE))
        }
    }
}

async fn invoke(args: Args) -> anyhow::Result<u8> {
    let mut signals = Signals::install()?;
    // Check the payload before anything is compiled.
    let payload = match payload::read(args.payload) {
        Ok(payload) => payload,
        Err(error) => {
            eprintln!("rouse: {error:#}");
            return Ok(EXIT_USAGE);
        }
    };
    let profile = args.profile.map(ProfileFile::create).transpose()?;
    let (file, folder) = File::read(args.config.as_deref())?;
    let mut settings = sandbox_settings(&file, &folder, 1, Some(&args.handler))?;
    if profile.is_some() {
        settings.tick = Profile::EVERY;
    }
    open_files::raise_limit();
    let pipes = PipesFail::start();
    let sandbox = Sandbox::start(settings)?;
    let loading = Catalog::open(sandbox.clone(), &args.handlers);
    let Some(catalog) = signals.unless(loading).await else {
        return Ok(EXIT_INTERRUPTED);
    };
    let catalog = catalog?;
    let handlers = catalog.current();
    let Some(handler) = handlers.get(&args.handler).cloned() else {
        telemetry::line(&unknown(&args.handler, &args.handlers, &handlers));
        return Ok(EXIT_UNKNOWN);
    };
    let mut policy = Policy::resolve(&handler.manifest, &file.overrides());
    policy.timeout = args.timeout.unwrap_or(policy.timeout);
    let call = Call {
        payload: payload.into_bytes(),
        queue: args.queue,
        tenant: args.tenant,
        profile: profile.as_ref().map(|_| Arc::new(Profile::start())),
    };
    let recorded = call.profile.clone();
    let mut invoked = run_until_a_signal(&sandbox, &handler, policy, call, &mut signals).await?;
    drop(pipes);
    if let (InvokeOutcome::TimedOut(error), Some(timeout)) = (&mut invoked.outcome, args.timeout) {
        let timeout = humantime::format_duration(timeout);
        error.message = format!("it ran longer than --timeout {timeout}");
    }
    match args.json {
        true => println!("{}", as_json(record(&handler, &invoked)?)),
        false => print(&handler, &invoked)?,
    }
    if let (Some(file), Some(recorded)) = (profile, recorded) {
        file.write(&recorded, &handler.manifest.name)?;
    }
    Ok(exit_code(&invoked.outcome))
}

/// Runs the handler. Ctrl-C or SIGTERM sends it the abort signal; a second signal stops it at once.
async fn run_until_a_signal(
    sandbox: &Arc<Sandbox>,
    handler: &Arc<Handler>,
    policy: Policy,
    call: Call,
    signals: &mut Signals,
) -> anyhow::Result<Invoked> {
    let abort = AbortHandle::new();
    let grace = policy.grace;
    let run = {
        let (sandbox, handler, abort) = (sandbox.clone(), handler.clone(), abort.clone());
        async move { once(&sandbox, &handler, &policy, call, abort).await }
    };
    let mut running = sandbox.guests().spawn(run);
    for grace in [grace, Duration::ZERO] {
        tokio::select! {
            invoked = &mut running => return invoked.context("run the handler"),
            () = signals.next() => abort.abort(AbortReason::Cancelled, grace),
        }
    }
    running.await.context("run the handler")
}

fn exit_code(outcome: &InvokeOutcome) -> u8 {
    match outcome {
        InvokeOutcome::Succeeded(_) => 0,
        InvokeOutcome::Failed(error) if error.kind == ErrorKind::Unrunnable => EXIT_UNRUNNABLE,
        InvokeOutcome::Failed(_) => EXIT_FAILED,
        InvokeOutcome::TimedOut(_) => EXIT_TIMEOUT,
        InvokeOutcome::Stopped(_) => EXIT_INTERRUPTED,
    }
}

/// The message for an unknown handler: the handlers of the folder, and the refused files.
pub(super) fn unknown(wanted: &str, folder: &std::path::Path, handlers: &HandlerSet) -> String {
    let names = handlers.names();
    let mut text = format!(
        "rouse: no handler {} in {}; ",
        plain(wanted),
        folder.display()
    );
    text.push_str(&match names.is_empty() {
        true => "the folder has no handler".to_string(),
        false => format!("its handlers are {}", plain(&names.join(", "))),
    });
    text.push_str(&did_you_mean(nearest(
        wanted,
        names.iter().map(String::as_str),
    )));
    for refusal in &handlers.refused {
        text.push_str(&format!(
            "\nrouse: refused {}: {}",
            refusal.file,
            plain(&refusal.why)
        ));
    }
    text
}

fn print(handler: &Handler, invoked: &Invoked) -> anyhow::Result<()> {
    let name = plain(&handler.manifest.name);
    let report = |ending: &str, error: &AttemptError| -> anyhow::Result<()> {
        let error = serde_json::to_value(error).context("print the error")?;
        eprint!("rouse: {name} {ending}\n{}", attempt_error::lines(&error));
        Ok(())
    };
    match &invoked.outcome {
        InvokeOutcome::Succeeded(result) => println!("{}", as_json(result.get())),
        InvokeOutcome::Failed(error) => report("failed", error)?,
        InvokeOutcome::TimedOut(error) => report("ran longer than its run timeout", error)?,
        InvokeOutcome::Stopped(reason) => {
            eprintln!("rouse: {name} was stopped ({})", reason.as_str())
        }
    }
    Ok(())
}

/// What `--json` prints.
#[derive(Serialize)]
struct Record<'a> {
    handler: &'a str,
    version: &'a str,
    outcome: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a AttemptError>,
    wall_ms: f64,
    cpu_ms: f64,
    memory_bytes: u64,
    host_calls: u32,
    bytes_in: u64,
    bytes_out: u64,
}

fn record(handler: &Handler, invoked: &Invoked) -> anyhow::Result<String> {
    let ms = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
    let (result, error) = match &invoked.outcome {
        InvokeOutcome::Succeeded(result) => (Some(&**result), None),
        InvokeOutcome::Failed(error) | InvokeOutcome::TimedOut(error) => (None, Some(error)),
        InvokeOutcome::Stopped(_) => (None, None),
    };
    let used = invoked.used.unwrap_or_default();
    serde_json::to_string(&Record {
        handler: &handler.manifest.name,
        version: &handler.manifest.version,
        outcome: invoked.outcome.word(),
        result,
        error,
        wall_ms: ms(invoked.wall),
        cpu_ms: ms(used.cpu),
        memory_bytes: used.memory_bytes_peak,
        host_calls: used.host_calls,
        bytes_in: used.bytes_in,
        bytes_out: used.bytes_out,
    })
    .context("print the outcome")
}
