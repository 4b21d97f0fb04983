//! Listens for wakeups. They are hints: if a notification is lost, the poll finds its jobs.

use std::future::poll_fn;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_postgres::AsyncMessage;
use tokio_postgres::types::Type;

use super::connect::{ConnectError, Connector};
use super::{Store, StoreError};
use crate::job::{Incarnation, JobId, LaneId};

/// The channel that wakes sleeping workers; see `rouse._notify` (`migrations/functions/wake.sql`).
pub const WAKE_CHANNEL: &str = "rouse_wake";

/// The content of a wakeup: the queue and the lane that have work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wakeup {
    /// The queue of the job.
    pub queue: String,
    /// The lane of a ready job; `None` if the job was scheduled for later.
    pub lane: Option<LaneId>,
}

impl Wakeup {
    /// `<queue> <lane>`, or `<queue>` alone. The name of a queue contains no spaces.
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

/// A notification that the listening connection has received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notification {
    /// There is something to do.
    Wakeup(Wakeup),
    /// Another session has changed this job, which the worker had claimed; `None` means any of its jobs.
    Changed(Option<JobId>),
    /// The time at which the next schedule is due may have changed.
    Schedules,
    /// This worker has been challenged.
    Challenged,
    /// The worker's own notification to itself.
    Echo,
}

impl Notification {
    /// Parses a notification on the worker's own channel.
    fn own(note: &str) -> Self {
        match note {
            ECHO => Self::Echo,
            CHALLENGE => Self::Challenged,
            note => match note.strip_prefix(WAKE) {
                Some(note) => Self::Wakeup(Wakeup::parse(note)),
                None => Self::Changed(note.parse().ok().map(JobId)),
            },
        }
    }
}

const ECHO: &str = "echo";

/// The note of `rouse._wake_for_schedules` (`migrations/functions/schedules.sql`). No queue has this name.
const SCHEDULES: &str = "*schedules";

/// See `rouse.challenge` (`migrations/functions/workers.sql`).
const CHALLENGE: &str = "challenge";

/// The prefix of the content of a wakeup for the inbox of the worker; see `rouse._notify`
/// (`migrations/functions/wake.sql`).
const WAKE: &str = "wake ";

/// The time that a worker waits for its own notification.
pub const ECHO_TIMEOUT: Duration = Duration::from_secs(5);

/// The time limit for closing the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The channel of one incarnation of a worker; see `rouse._hint` and its callers (`wake.sql`, `workers.sql`,
/// `adopt.sql` and `admin.sql` in `migrations/functions/`).
fn own_channel(worker: Incarnation) -> String {
    format!("rouse_worker_{}", worker.0)
}

/// One connection that listens.
pub struct Listener {
    notifications: mpsc::UnboundedReceiver<Notification>,
    // Dropping the client would end the connection.
    client: tokio_postgres::Client,
}

impl Listener {
    /// Connects and listens on [`WAKE_CHANNEL`] and on the worker's own channel. The response may take as long as
    /// opening a connection.
    pub async fn start(connector: &Connector, worker: Incarnation) -> Result<Self, ConnectError> {
        let (client, mut connection) = connector.connect().await?;
        let (sender, notifications) = mpsc::unbounded_channel();
        let driver = tokio::spawn(async move {
            // Ends with the connection; dropping the sender signals the end to the listener.
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notification(note) = message {
                    let notification = match note.channel() {
                        WAKE_CHANNEL if note.payload() == SCHEDULES => Notification::Schedules,
                        WAKE_CHANNEL => Notification::Wakeup(Wakeup::parse(note.payload())),
                        _ => Notification::own(note.payload()),
                    };
                    if sender.send(notification).is_err() {
                        break;
                    }
                }
            }
        });
        let listen = format!("LISTEN {WAKE_CHANNEL}; LISTEN {}", own_channel(worker));
        let answered = connector.answered(client.batch_execute(&listen)).await;
        if answered.is_err() {
            // Without a response, the connection would stay open until one arrives.
            driver.abort();
        }
        answered?;
        Ok(Self {
            notifications,
            client,
        })
    }

    /// True once the echo arrives; false if it does not arrive within `timeout`, or if the connection ends. Wakeups
    /// that arrive before it are dropped.
    pub async fn receives_echo(&mut self, timeout: Duration) -> bool {
        let echo = async {
            while let Some(notification) = self.notifications.recv().await {
                if matches!(notification, Notification::Echo) {
                    return true;
                }
            }
            false
        };
        tokio::time::timeout(timeout, echo).await.unwrap_or(false)
    }

    /// Stops listening and ends the connection. A pooler may keep its session open; UNLISTEN cleans that up.
    pub async fn close(self) {
        let unlisten = self.client.batch_execute("UNLISTEN *");
        // If the connection is broken, its session has ended too.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, unlisten).await;
    }

    /// The next notification; `None` if the connection has ended.
    pub async fn next(&mut self) -> Option<Notification> {
        self.notifications.recv().await
    }
}

impl Store {
    /// Notifies this worker itself. Its listening connection receives the notification, unless that connection leads to
    /// another database, or through a pooler that shares its sessions.
    pub async fn echo(&self, worker: Incarnation) -> Result<(), StoreError> {
        self.query(
            "SELECT pg_notify($1, $2)",
            &[(&own_channel(worker), Type::TEXT), (&ECHO, Type::TEXT)],
        )
        .await?;
        Ok(())
    }
}
