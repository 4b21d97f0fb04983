//! The payload of a job, as it comes from the command line.

use std::io::Read as _;

use anyhow::Context as _;

/// The argument, or for `-` what stands on standard input; refused where it is no JSON: a clear word here is better
/// than Postgres's or a guest's, which do not know about shells and quotes.
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
        .context("the payload is no JSON (is it quoted for the shell? '{\"text\": \"hello\"}')")?;
    Ok(payload)
}
