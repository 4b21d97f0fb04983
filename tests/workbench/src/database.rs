//! Connections to the database of a `rouse` process.

use anyhow::{Context as _, Result};
use tokio_postgres::{Client, Config, NoTls};

/// Connects. The connection runs in a task until the client is dropped.
pub async fn connect(url: &str) -> Result<Client> {
    open(&url.parse().context("parse the database URL")?).await
}

/// Like [`connect`], to another database of the same server.
pub async fn connect_to(url: &str, database: &str) -> Result<Client> {
    let mut config: Config = url.parse().context("parse the database URL")?;
    open(config.dbname(database)).await
}

async fn open(config: &Config) -> Result<Client> {
    let (client, connection) = config
        .connect(NoTls)
        .await
        .with_context(|| format!("connect to {:?}", config.get_hosts()))?;
    // The client gets a connection error with its next query.
    tokio::spawn(connection);
    Ok(client)
}

/// The process id of the server.
pub async fn postmaster(client: &Client) -> Result<u32> {
    let text: String = client
        .query_one(
            "SELECT split_part(pg_read_file('postmaster.pid'), E'\\n', 1)",
            &[],
        )
        .await
        .context("query the process id of Postgres")?
        .get(0);
    text.trim()
        .parse()
        .context("parse the process id of Postgres")
}
