//! One verb for several things: each is done by itself, a refusal does not keep the others from being done, and a summary says
//! how many were.

use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::{Value, json};

use super::text::as_json;

/// What was done to one of them.
pub(super) struct Done {
    /// For people.
    pub(super) text: String,
    /// The same for programs.
    pub(super) json: Value,
}

/// Why nothing was done to one of them.
pub(super) struct Refusal {
    /// The exit code of the command.
    pub(super) code: u8,
    /// Why, in a sentence that names it.
    pub(super) why: String,
}

/// Does this to each, in their order. `plural`: what they are, for the summary. The exit code is 0, or the highest of the
/// refusals.
///
/// # Errors
/// The first that is no refusal; what comes behind it is not tried.
pub(super) async fn each<T>(
    all: &[T],
    plural: &str,
    in_json: bool,
    act: impl AsyncFn(&T) -> anyhow::Result<Result<Done, Refusal>>,
) -> anyhow::Result<ExitCode> {
    let (mut done, mut code) = (0, 0);
    let several = all.len() > 1;
    for one in all {
        let acted = match several {
            true => act(one).await.with_context(|| {
                format!("{done} of {} {plural} were done before this", all.len())
            })?,
            false => act(one).await?,
        };
        match acted {
            Ok(Done { text, json }) => {
                done += 1;
                match in_json {
                    true => println!("{}", as_json(json)),
                    false => println!("{text}"),
                }
            }
            Err(refusal) => {
                code = code.max(refusal.code);
                eprintln!("rouse: {}", refusal.why);
            }
        }
    }
    let refused = all.len() - done;
    if several {
        match in_json {
            true => println!("{}", as_json(json!({"done": done, "refused": refused}))),
            false => eprintln!(
                "rouse: {done} of {} {plural} done, {refused} refused",
                all.len()
            ),
        }
    }
    Ok(ExitCode::from(code))
}
