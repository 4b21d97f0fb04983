//! Applies one operation to several items. A refused item does not stop the others, and a summary counts all of them.

use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::{Value, json};

use super::text::as_json;

/// The result for one item.
pub(super) struct Done {
    /// As text.
    pub(super) text: String,
    /// As JSON.
    pub(super) json: Value,
}

/// Why an item was refused.
pub(super) struct Refusal {
    /// The exit code of the command.
    pub(super) code: u8,
    /// The reason, in a sentence that names the item.
    pub(super) why: String,
}

/// Applies `act` to each item in order. `plural` names the items in the summary. The exit code is 0, or the highest
/// code of a refusal.
///
/// # Errors
/// The first error that is not a refusal; later items are not tried.
pub(super) async fn each<T>(
    all: &[T],
    plural: &str,
    in_json: bool,
    act: impl AsyncFn(&T) -> anyhow::Result<Result<Done, Refusal>>,
) -> anyhow::Result<ExitCode> {
    let (mut done, mut code) = (0, 0);
    let several = all.len() > 1;
    for item in all {
        let acted = match several {
            true => act(item).await.with_context(|| {
                format!("{done} of {} {plural} were done before this", all.len())
            })?,
            false => act(item).await?,
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
                // Messages of the database may already start with `rouse: `.
                let why = refusal.why.strip_prefix("rouse: ");
                eprintln!("rouse: {}", why.unwrap_or(&refusal.why));
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
