//! A connection to the database of a `rouse` process.

use anyhow::{Context as _, Result};
use tokio_postgres::{Client, NoTls};

/// Connects, and lets the connection work until the client is dropped.
pub(crate) async fn connect(url: &str) -> Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls)
        .await
        .with_context(|| format!("connect to {url}"))?;
    // An error of the connection reaches the client as the error of its next query.
    tokio::spawn(connection);
    Ok(client)
}
