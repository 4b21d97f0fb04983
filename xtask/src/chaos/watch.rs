//! Watches what running attempts say of their progress: it is gone when they have ended.

use std::fs::File;
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio_postgres::Client;

use super::folder::Folder;
use super::server::Server;
use crate::database;

const LOOK_EVERY: Duration = Duration::from_millis(300);
/// The attempt and what is said of it come from one snapshot.
const PROGRESS: &str = "SELECT json_build_object('job', id, 'attempt', attempt, 'worker', worker, 'step', progress->>'step')::text
    FROM rouse.jobs WHERE progress IS NOT NULL";

/// Notes it down, for ever. A server that is down is tried again.
pub(super) async fn progress(server: &Server, folder: &Folder) -> Result<()> {
    let path = folder.dump("progress");
    let mut file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    let mut client: Option<Client> = None;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if client.is_none() {
            client = database::connect(&server.url).await.ok();
        }
        let Some(connected) = &client else {
            continue;
        };
        match connected.query(PROGRESS, &[]).await {
            Ok(rows) => {
                let lines = rows
                    .iter()
                    .map(|row| format!("{}\n", row.get::<_, &str>(0)));
                file.write_all(lines.collect::<String>().as_bytes())?;
            }
            Err(_) => client = None,
        }
    }
}
