//! The settings of direct invocations: whether they are on, which callers are admitted (also to the states of jobs), and
//! how many run at once.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context as _;
use tracing::warn;

use crate::config::{self, Environment, File};
use crate::http::{Access, Token};

/// The token that invocations need in production.
pub(super) const TOKEN: &str = "a token (ROUSE_INVOKE_TOKEN, or invoke_token_file in rouse.toml)";

/// The settings of invocations that are on.
pub(super) struct Offer {
    pub(super) access: Access,
    /// The maximum number of concurrent invocations, as far as the machine's memory allows.
    pub(super) max: usize,
    pub(super) payload_bytes_max: usize,
}

/// The callers that are admitted if no token is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cli) enum Tokenless {
    /// Programs on this machine, if the port is on loopback: `rouse dev`.
    ThisMachine,
    /// Nobody: `rouse serve`.
    Nobody,
}

/// The callers that may invoke, and read jobs: those with a token; if no token is set, `tokenless` decides.
pub(super) fn access(
    file: &File,
    folder: &Path,
    address: Option<SocketAddr>,
    tokenless: Tokenless,
) -> anyhow::Result<Option<Access>> {
    let Some(address) = address else {
        return Ok(None);
    };
    Ok(match (tokens(file, folder)?, tokenless) {
        (Some(tokens), _) => Some(Access::Tokens(tokens)),
        (None, Tokenless::ThisMachine) => Access::without_token(address),
        (None, Tokenless::Nobody) => None,
    })
}

/// Reads the settings. Invocations are on if a caller has access.
pub(super) fn offer(
    file: &File,
    access: Option<&Access>,
    address: Option<SocketAddr>,
    slots: usize,
    tokenless: Tokenless,
) -> Option<Offer> {
    let max = file.invoke_max().unwrap_or(slots);
    let address = address.filter(|_| max > 0)?;
    let Some(access) = access.cloned() else {
        // Warn an operator who requested them; for others, the first log lines report that they are off.
        if file.invoke_max().is_some() || tokenless == Tokenless::ThisMachine {
            warn!(%address, "invocations are off: they need {TOKEN}; set a token, or invoke_max = 0 if you want no invocations");
        }
        return None;
    };
    Some(Offer {
        access,
        max,
        payload_bytes_max: file.invoke_payload_bytes_max(),
    })
}

/// The tokens from the environment, or else from the file; `None` if neither is set.
pub(in crate::cli) fn tokens(file: &File, folder: &Path) -> anyhow::Result<Option<Vec<Token>>> {
    let (text, origin) = match Environment.restriction("ROUSE_INVOKE_TOKEN")? {
        Some(text) => (text, "ROUSE_INVOKE_TOKEN".to_string()),
        None => match file.invoke_token_file(folder) {
            Some(path) => (config::read_tokens(&path)?, path.display().to_string()),
            None => return Ok(None),
        },
    };
    let tokens = Token::read_lines(&text)
        .map_err(anyhow::Error::msg)
        .with_context(|| format!("read {origin}"))?;
    Ok(Some(tokens))
}
