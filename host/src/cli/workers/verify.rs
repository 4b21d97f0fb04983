//! `rouse workers verify`: asks a worker to prove that it has the module of a handler.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::{EXIT_REFUSED, EXIT_UNKNOWN};
use crate::cli::target::Target;
use crate::cli::text::{as_json, error_line, plain};
use crate::duration;
use crate::sandbox::Digest;

/// The interval at which the command polls for the answer.
const POLL_EVERY: Duration = Duration::from_millis(50);

/// The worker cannot run the handler, or does not prove that it has the file.
const EXIT_REFUTED: u8 = 4;
/// The worker did not answer in time.
const EXIT_TIMEOUT: u8 = 5;

/// Options of `rouse workers verify`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
The worker calls the module's `describe` in a new instance. Its answer, which is authenticated by its key, contains the \
version, the sha256 of its file, and a proof: the sha256 of the nonce followed by the file. With --module, the proof is \
compared with FILE; without it, the answer is not checked.

Exit codes: 0 the worker proves or claims that it can run the handler · 3 no such worker is alive · \
4 it cannot, or does not prove that it has FILE · \
5 no answer in time · \
6 it has left 100 challenges of the last 10 minutes unanswered, and gets no more")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The worker's id
    id: String,

    /// The handler
    handler: String,

    /// The module that the worker should have
    #[arg(long, value_name = "FILE")]
    module: Option<PathBuf>,

    /// How long to wait for its answer
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration::argument)]
    timeout: Duration,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Sends the challenge and waits for the answer.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let file = match &args.module {
        Some(path) => Some(
            std::fs::read(path).with_context(|| format!("read the module {}", path.display()))?,
        ),
        None => None,
    };
    let store = args.target.checked_store().await?;
    let (id, handler) = (plain(&args.id), plain(&args.handler));
    let nonce = match store.challenge(&args.id, &args.handler).await {
        Ok(nonce) => nonce,
        Err(error) if error.is_unknown_worker() => {
            eprintln!(
                "rouse: {}",
                super::unlisted(&store, &args.id, "is alive").await
            );
            return Ok(ExitCode::from(EXIT_UNKNOWN));
        }
        Err(error) if error.is_refused_by_state() => {
            eprintln!("{}", error_line(error));
            return Ok(ExitCode::from(EXIT_REFUSED));
        }
        Err(error) => return Err(error.into()),
    };
    let deadline = tokio::time::Instant::now() + args.timeout;
    let answer = loop {
        if let Some(answer) = store.challenge_answer(&nonce).await? {
            break answer;
        }
        if tokio::time::Instant::now() >= deadline {
            eprintln!(
                "rouse: worker {id} did not answer within {}; a worker without notifications (notify = false, a pooler) polls every 30 s, \
                 and a worker of an older version does not answer at all",
                humantime::format_duration(args.timeout)
            );
            return Ok(ExitCode::from(EXIT_TIMEOUT));
        }
        tokio::time::sleep(POLL_EVERY).await;
    };
    let verdict = Verdict::from_answer(&answer, &nonce, file.as_deref());
    let exit = match &verdict {
        Verdict::Proves | Verdict::Claims => ExitCode::SUCCESS,
        Verdict::Refuted(_) => ExitCode::from(EXIT_REFUTED),
    };
    if args.json {
        println!(
            "{}",
            as_json(json!({
                "worker_id": args.id, "handler": args.handler, "nonce": nonce, "answer": answer,
                "verdict": verdict.as_str(), "why": verdict.why(),
            }))
        );
        return Ok(exit);
    }
    let text = |key: &str| plain(answer[key].as_str().unwrap_or_default());
    let (version, sha256) = (text("version"), text("sha256"));
    match verdict {
        Verdict::Proves => println!(
            "worker {id} proves that it has the module of {handler} {version}, sha256 {sha256}"
        ),
        Verdict::Claims => println!(
            "worker {id} claims that it can run {handler} {version}, sha256 {sha256}; `--module FILE` checks its proof"
        ),
        Verdict::Refuted(why) => eprintln!("rouse: worker {id} {}", plain(&why)),
    }
    Ok(exit)
}

/// The verdict on an answer.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// The worker has the file.
    Proves,
    /// The worker claims that it can run the handler; its proof was not compared with a file.
    Claims,
    /// It cannot run the handler, or does not prove that it has the file; a sentence without its subject.
    Refuted(String),
}

impl Verdict {
    fn from_answer(answer: &Value, nonce: &str, file: Option<&[u8]>) -> Self {
        let text = |key: &str| answer[key].as_str().unwrap_or("no reason given");
        if answer["has"] != true {
            return Self::Refuted(format!("cannot run the handler: {}", text("why")));
        }
        let Some(file) = file else {
            return Self::Claims;
        };
        let own = Digest::compute(file).to_string();
        if answer["sha256"] != own.as_str() {
            return Self::Refuted(format!(
                "has another module: sha256 {}; the file has sha256 {own}",
                answer["sha256"].as_str().unwrap_or("(none given)")
            ));
        }
        match answer["proof"].as_str() {
            Some(proof) if proof == Digest::proof(nonce, file).to_string() => Self::Proves,
            Some(_) => Self::Refuted(
                "does not prove that it has the module: its proof does not match the file".into(),
            ),
            None => Self::Refuted(format!(
                "does not prove that it has the module: {}",
                text("unproven")
            )),
        }
    }

    /// The reason for a refutation.
    fn why(&self) -> Option<&str> {
        match self {
            Self::Proves | Self::Claims => None,
            Self::Refuted(why) => Some(why),
        }
    }

    fn as_str(&self) -> &'static str {
        match self {
            Self::Proves => "proves",
            Self::Claims => "claims",
            Self::Refuted(_) => "refuted",
        }
    }
}
