//! A connection to the database of a `rouse` process.

use anyhow::{Context as _, Result};
use tokio_postgres::{Client, Config, NoTls};

/// Connects, and lets the connection work until the client is dropped.
pub async fn connect(url: &str) -> Result<Client> {
    open(&url.parse().context("read the address of the database")?).await
}

/// As [`connect`], to another database of the same server.
pub async fn connect_to(url: &str, database: &str) -> Result<Client> {
    let mut config: Config = url.parse().context("read the address of the database")?;
    open(config.dbname(database)).await
}

async fn open(config: &Config) -> Result<Client> {
    let (client, connection) = config
        .connect(NoTls)
        .await
        .with_context(|| format!("connect to {:?}", config.get_hosts()))?;
    // An error of the connection reaches the client as the error of its next query.
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
        .context("ask Postgres for its process id")?
        .get(0);
    text.trim()
        .parse()
        .context("read the process id of Postgres")
}
