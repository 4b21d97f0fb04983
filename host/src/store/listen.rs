//! Listens for wakeups. A hint only: the poll finds what a lost notification would have said.

use std::future::poll_fn;

use tokio::sync::mpsc;
use tokio_postgres::AsyncMessage;

use super::connect::{ConnectError, Connector};
use crate::job::LaneId;

/// The channel on which sleeping workers are woken; see `rouse._notify`
/// (`migrations/0008_wakeups_at_commit.sql`).
pub const WAKE_CHANNEL: &str = "rouse_wake";

/// What a notification says: there is something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wakeup {
    /// The queue that has it.
    pub queue: String,
    /// The lane that has a job which is ready; none: a job was scheduled for later.
    pub lane: Option<LaneId>,
}

impl Wakeup {
    /// `<queue> <lane>`, or `<queue>` alone. A queue's name has no space.
    fn parse(note: &str) -> Self {
        match note.split_once(' ') {
            Some((queue, lane)) => Self {
                queue: queue.to_string(),
                lane: lane.parse().ok().map(LaneId),
            },
            None => Self {
                queue: note.to_string(),
                lane: None,
            },
        }
    }
}

/// One connection that listens.
pub struct Listener {
    notifications: mpsc::UnboundedReceiver<Wakeup>,
    // Dropping the client would end the connection.
    _client: tokio_postgres::Client,
}

impl Listener {
    /// Connects and listens on [`WAKE_CHANNEL`].
    pub async fn start(connector: &Connector) -> Result<Self, ConnectError> {
        let (client, mut connection) = connector.connect().await?;
        let (sender, notifications) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            // Ends with the connection; the dropped sender tells the listener.
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notification(note) = message
                    && sender.send(Wakeup::parse(note.payload())).is_err()
                {
                    break;
                }
            }
        });
        client
            .batch_execute(&format!("LISTEN {WAKE_CHANNEL}"))
            .await
            .map_err(|error| ConnectError::failed(connector.target(), &error))?;
        Ok(Self {
            notifications,
            _client: client,
        })
    }

    /// The next notification; none when the connection is gone.
    pub async fn next(&mut self) -> Option<Wakeup> {
        self.notifications.recv().await
    }
}
