//! Applies one operation to several items. A refused item does not stop the others, and a summary counts all of them.

use std::fmt;
use std::process::ExitCode;

use serde_json::{Value, json};

use super::text::{as_json, error_line, plain, without_prefix};
use crate::store::{StoreError, retry_conflicts};

/// An error that is not a refusal.
const EXIT_ERROR: u8 = 1;
/// Another transaction has locked the item.
const EXIT_LOCKED: u8 = 6;

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

/// Applies `act` to each item in order; again if a concurrent transaction made Postgres roll the change back. `noun` is
/// the word for an item; its plural ends in s. The exit code is 0, or the highest code of a refusal. An item that
/// another transaction has locked counts as refused; with several items, so does one with an error that does not
/// concern the others.
///
/// # Errors
/// The first error that is not a refusal; later items are not tried.
pub(super) async fn each<T: fmt::Display>(
    all: &[T],
    noun: &str,
    in_json: bool,
    act: impl AsyncFn(&T) -> anyhow::Result<Result<Done, Refusal>>,
) -> anyhow::Result<ExitCode> {
    let (mut done, mut code) = (0, 0);
    let several = all.len() > 1;
    for item in all {
        let acted = retry_conflicts(is_conflict, || async { act(item).await });
        let refusal = match acted.await {
            Ok(Ok(Done { text, json })) => {
                done += 1;
                match in_json {
                    true => println!("{}", as_json(json)),
                    false => println!("{text}"),
                }
                continue;
            }
            Ok(Err(refusal)) => refusal,
            Err(error) if is_locked(&error) || several && concerns_one_call(&error) => {
                let code = match is_locked(&error) {
                    true => EXIT_LOCKED,
                    false => EXIT_ERROR,
                };
                // The message of Postgres does not name the item.
                let (item, error) = (item.to_string(), format!("{error:#}"));
                let why = format!("{noun} {}: {}", plain(&item), without_prefix(&error));
                Refusal { code, why }
            }
            Err(error) if several => {
                let total = all.len();
                let before = format!("{done} of {total} {noun}s were done before this");
                return Err(error.context(before));
            }
            Err(error) => return Err(error),
        };
        code = code.max(refusal.code);
        eprintln!("{}", error_line(&refusal.why));
    }
    let refused = all.len() - done;
    if several {
        match in_json {
            true => println!("{}", as_json(json!({"done": done, "refused": refused}))),
            false => eprintln!(
                "rouse: {done} of {} {noun}s done, {refused} refused",
                all.len()
            ),
        }
    }
    Ok(ExitCode::from(code))
}

fn is_conflict(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<StoreError>();
    error.is_some_and(StoreError::is_conflict)
}

fn is_locked(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<StoreError>();
    error.is_some_and(StoreError::is_locked)
}

fn concerns_one_call(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<StoreError>();
    error.is_some_and(StoreError::concerns_one_call)
}
