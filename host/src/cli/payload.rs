//! The payload of a job, from the command line.

use std::io::Read as _;

use anyhow::Context as _;

/// The argument, or standard input for `-`. Refuses a payload that is not JSON, with a hint about shell quotes, which
/// errors of Postgres and guests could not give.
pub(super) fn read(argument: String) -> anyhow::Result<String> {
    let payload = match argument.as_str() {
        "-" => {
            let mut text = String::new();
            std::io::stdin()
                .read_to_string(&mut text)
                .context("read the payload from standard input")?;
            text
        }
        _ => argument,
    };
    serde_json::from_str::<serde::de::IgnoredAny>(&payload)
        .context("the payload is not JSON (is it quoted for the shell? '{\"text\": \"hello\"}')")?;
    Ok(payload)
}
