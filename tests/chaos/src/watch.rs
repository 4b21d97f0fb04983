//! Records the progress of attempts, which is deleted soon after they end.

use std::fs::File;
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rouse_workbench::database;
use tokio_postgres::Client;

use super::folder::Folder;
use super::server::Server;

const POLL_EVERY: Duration = Duration::from_millis(300);
/// Reads the table itself, since rouse.jobs hides rows of another fence. The row and its job come from one snapshot.
const PROGRESS: &str = "SELECT json_build_object('job', p.job, 'step', p.step, 'reported_us', (extract(epoch FROM p.at) * 1000000)::bigint,
                              'attempt', j.attempt, 'worker', j.worker)::text
    FROM rouse.progress AS p LEFT JOIN rouse.job AS j ON j.id = p.job AND j.fence = p.fence";

/// Writes progress to a file until the future is dropped. Retries while the server is down.
pub(super) async fn progress(server: &Server, folder: &Folder) -> Result<()> {
    let path = folder.dump("progress");
    let mut file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    let mut client: Option<Client> = None;
    loop {
        tokio::time::sleep(POLL_EVERY).await;
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
