//! Listens for wakeups. A hint only: the poll finds what a lost notification would have said.

use std::future::poll_fn;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_postgres::AsyncMessage;
use tokio_postgres::types::Type;

use super::connect::{ConnectError, Connector};
use super::{Store, StoreError};
use crate::job::{Incarnation, JobId, LaneId};

/// The channel on which sleeping workers are woken; see `rouse._notify`
/// (`migrations/functions/wake.sql`).
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

/// What is heard on the listening connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// There is something to do.
    Wakeup(Wakeup),
    /// Somebody else has changed this job, which the worker had claimed; none: all that it had.
    Changed(Option<JobId>),
    /// Somebody wants this worker to prove something.
    Challenged,
    /// What this worker has said to itself.
    Echo,
}

impl Heard {
    /// From the worker's own channel.
    fn own(note: &str) -> Self {
        match note {
            ECHO => Self::Echo,
            CHALLENGE => Self::Challenged,
            note => Self::Changed(note.parse().ok().map(JobId)),
        }
    }
}

const ECHO: &str = "echo";

/// See `rouse.challenge` (`migrations/functions/workers.sql`).
const CHALLENGE: &str = "challenge";

/// How long a worker waits for what it has said to itself.
pub const ECHO_WITHIN: Duration = Duration::from_secs(5);

/// How long it may take to leave.
const LEAVES_WITHIN: Duration = Duration::from_secs(1);

/// The channel of one life of a worker; see `rouse._expire_worker`, `rouse.adopt` and `rouse.cancel`
/// (`migrations/functions/workers.sql`).
fn own_channel(worker: Incarnation) -> String {
    format!("rouse_worker_{}", worker.0)
}

/// One connection that listens.
pub struct Listener {
    heard: mpsc::UnboundedReceiver<Heard>,
    // Dropping the client would end the connection.
    client: tokio_postgres::Client,
}

impl Listener {
    /// Connects and listens on [`WAKE_CHANNEL`] and on the worker's own channel. The answer may take as long as a connection.
    pub async fn start(connector: &Connector, worker: Incarnation) -> Result<Self, ConnectError> {
        let (client, mut connection) = connector.connect().await?;
        let (sender, heard) = mpsc::unbounded_channel();
        let going = tokio::spawn(async move {
            // Ends with the connection; the dropped sender tells the listener.
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notification(note) = message {
                    let heard = match note.channel() {
                        WAKE_CHANNEL => Heard::Wakeup(Wakeup::parse(note.payload())),
                        _ => Heard::own(note.payload()),
                    };
                    if sender.send(heard).is_err() {
                        break;
                    }
                }
            }
        });
        let listen = format!("LISTEN {WAKE_CHANNEL}; LISTEN {}", own_channel(worker));
        let answered = connector.answered(client.batch_execute(&listen)).await;
        if answered.is_err() {
            // It would be open until there is an answer.
            going.abort();
        }
        answered?;
        Ok(Self { heard, client })
    }

    /// True once the echo arrives; false where it does not within this time, or the connection ends.
    /// Wakeups that come before it are dropped.
    pub async fn hears_the_echo(&mut self, within: Duration) -> bool {
        let echo = async {
            while let Some(heard) = self.heard.recv().await {
                if matches!(heard, Heard::Echo) {
                    return true;
                }
            }
            false
        };
        tokio::time::timeout(within, echo).await.unwrap_or(false)
    }

    /// Ends the connection. Where it leads to a session that goes on, nothing listens there any more.
    pub async fn leave(self) {
        let unlisten = self.client.batch_execute("UNLISTEN *");
        // Where the connection is gone, so is what it has left.
        let _ = tokio::time::timeout(LEAVES_WITHIN, unlisten).await;
    }

    /// The next notification; none when the connection is gone.
    pub async fn next(&mut self) -> Option<Heard> {
        self.heard.recv().await
    }
}

impl Store {
    /// Notifies this worker itself: what its listening connection has to hear, unless that leads
    /// to another database, or through a pooler that gives its session to others.
    pub async fn echo(&self, worker: Incarnation) -> Result<(), StoreError> {
        self.query(
            "SELECT pg_notify($1, $2)",
            &[(&own_channel(worker), Type::TEXT), (&ECHO, Type::TEXT)],
        )
        .await?;
        Ok(())
    }
}
