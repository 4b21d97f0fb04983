//! Listens for wakeups. A hint only: the poll finds what a lost notification would have said.

use std::future::poll_fn;

use tokio::sync::mpsc;
use tokio_postgres::AsyncMessage;

use super::connect::{ConnectError, Connector};

/// The channel on which `rouse.enqueue` wakes sleeping workers; the payload is the queue.
pub const WAKE_CHANNEL: &str = "rouse_wake";

/// One connection that listens.
pub struct Listener {
    notifications: mpsc::UnboundedReceiver<String>,
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
                    && sender.send(note.payload().to_string()).is_err()
                {
                    break;
                }
            }
        });
        client
            .batch_execute(&format!("LISTEN {WAKE_CHANNEL}"))
            .await
            .map_err(|error| ConnectError::failed(connector.target(), error))?;
        Ok(Self {
            notifications,
            _client: client,
        })
    }

    /// The queue that the next notification names; none when the connection is gone.
    pub async fn next(&mut self) -> Option<String> {
        self.notifications.recv().await
    }
}
