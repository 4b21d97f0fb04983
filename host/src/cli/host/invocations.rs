//! What a host offers beside the queue: whether it may be asked directly, by whom, and how often at once.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context as _;
use tracing::warn;

use crate::config::{self, Environment, File};
use crate::http::{Access, Token};

/// What the settings say of invocations, where they are on.
pub(super) struct Offer {
    pub(super) access: Access,
    /// At the same time, as far as the machine holds as many.
    pub(super) max: usize,
    pub(super) payload_bytes_max: usize,
}

/// Reads the settings. On loopback invocations are on; on any other address only with a token.
pub(super) fn offer(
    file: &File,
    folder: &Path,
    address: Option<SocketAddr>,
    slots: usize,
) -> anyhow::Result<Option<Offer>> {
    let max = file.invoke_max().unwrap_or(slots);
    let Some(address) = address.filter(|_| max > 0) else {
        return Ok(None);
    };
    let Some(access) = Access::on(address, token(file, folder)?) else {
        warn!(
            %address,
            "invocations are off: others than this machine could ask for them; set ROUSE_INVOKE_TOKEN (or invoke_token_file in rouse.toml), or say that you want none with invoke_max = 0"
        );
        return Ok(None);
    };
    Ok(Some(Offer {
        access,
        max,
        payload_bytes_max: file.invoke_payload_bytes_max(),
    }))
}

/// The environment's, else the file's.
pub(in crate::cli) fn token(file: &File, folder: &Path) -> anyhow::Result<Option<Token>> {
    let (text, place) = match Environment.invoke_token()? {
        Some(text) => (text, "ROUSE_INVOKE_TOKEN".to_string()),
        None => match file.invoke_token_file(folder) {
            Some(path) => (config::read_token(&path)?, path.display().to_string()),
            None => return Ok(None),
        },
    };
    let token = Token::new(&text)
        .map_err(anyhow::Error::msg)
        .with_context(|| format!("read {place}"))?;
    Ok(Some(token))
}
