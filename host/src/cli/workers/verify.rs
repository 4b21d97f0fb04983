//! `rouse workers verify`: a worker proves that it can run a handler (SPEC row A9).

use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::{EXIT_REFUSED, EXIT_UNKNOWN};
use crate::cli::duration::duration;
use crate::cli::target::Target;
use crate::cli::text::{as_json, plain};

/// How often the answer is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// It has answered that it cannot.
const EXIT_CANNOT: u8 = 4;
/// It has not answered in time.
const EXIT_TIMEOUT: u8 = 5;

/// Options of `rouse workers verify`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
The worker instantiates the handler's module anew and answers with its version and the sha256 of its file, behind its \
key. Exit codes: 0 it can · 3 no such worker lives · 4 it cannot · 5 no answer in time · 6 it has 100 questions to answer")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The worker's id
    id: String,

    /// The handler
    handler: String,

    /// How long to wait for its answer
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    timeout: Duration,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Asks and waits.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let (id, handler) = (plain(&args.id), plain(&args.handler));
    let nonce = match store.challenge(&args.id, &args.handler).await {
        Ok(nonce) => nonce,
        Err(error) if error.is_unknown_worker() => {
            eprintln!(
                "rouse: {}",
                super::unlisted(&store, &args.id, "lives").await
            );
            return Ok(ExitCode::from(EXIT_UNKNOWN));
        }
        Err(error) if error.is_refused_by_state() => {
            eprintln!("rouse: {error}");
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
                "rouse: worker {id} has not answered within {}; one that hears no notifications (notify = false, a pooler) looks every 30 s, \
                 and one of an older version does not answer at all",
                humantime::format_duration(args.timeout)
            );
            return Ok(ExitCode::from(EXIT_TIMEOUT));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    };
    let has = answer["has"] == true;
    if args.json {
        println!(
            "{}",
            as_json(
                json!({"worker_id": args.id, "handler": args.handler, "nonce": nonce, "answer": answer})
            )
        );
    } else if has {
        println!("{}", proven(&id, &handler, &answer));
    } else {
        let why = plain(answer["why"].as_str().unwrap_or_default());
        eprintln!("rouse: worker {id} cannot run {handler}: {why}");
    }
    Ok(match has {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_CANNOT),
    })
}

fn proven(id: &str, handler: &str, answer: &Value) -> String {
    let text = |key: &str| plain(answer[key].as_str().unwrap_or_default());
    format!(
        "worker {id} can run {handler} {}, sha256 {}",
        text("version"),
        text("sha256")
    )
}
