//! Calls to the database. The ledger records each request and its response.

use std::time::Duration;

use anyhow::{Result, ensure};
use rouse_workbench::database;
use tokio::time::timeout;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Error, Transaction};

use super::ledger::{Ledger, Request, Response};

const TIMEOUT: Duration = Duration::from_secs(20);
const RECONNECT_AFTER: Duration = Duration::from_millis(50);

/// A connection that reconnects when it is lost.
pub(super) struct Caller<'a> {
    url: &'a str,
    ledger: &'a Ledger,
    client: Option<Client>,
    /// Options of the next calls.
    pub(super) options: CallOptions,
}

/// Options of a call.
pub(super) struct CallOptions {
    /// Run the call in a transaction and roll it back.
    pub(super) roll_back: bool,
    /// How long to wait for the response.
    pub(super) timeout: Duration,
}

impl Default for CallOptions {
    fn default() -> Self {
        Self {
            roll_back: false,
            timeout: TIMEOUT,
        }
    }
}

impl CallOptions {
    /// Options of an enqueue that its producer rolls back, or whose response it awaits for this time only.
    pub(super) fn of_enqueue(roll_back: bool, hangs_up_us: Option<u64>) -> Self {
        Self {
            roll_back,
            timeout: hangs_up_us.map_or(TIMEOUT, Duration::from_micros),
        }
    }
}

impl<'a> Caller<'a> {
    pub(super) fn new(url: &'a str, ledger: &'a Ledger) -> Self {
        Self {
            url,
            ledger,
            client: None,
            options: CallOptions::default(),
        }
    }

    /// Sends a request, connecting first if necessary. The response to `sql` is one bigint. `None` if there is no
    /// connection: then nothing was sent.
    pub(super) async fn call(
        &mut self,
        request: Request,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Option<Response>> {
        let responses = self.call_together(vec![request], sql, params).await?;
        Ok(responses.and_then(|mut responses| responses.pop()))
    }

    /// Sends several requests in one statement, whose rows are the responses in the same order.
    pub(super) async fn call_together(
        &mut self,
        requests: Vec<Request>,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Option<Vec<Response>>> {
        let CallOptions {
            roll_back,
            timeout: limit,
        } = self.options;
        let ledger = self.ledger;
        let Some(client) = self.connected().await else {
            return Ok(None);
        };
        let calls: Vec<u64> = requests
            .into_iter()
            .map(|request| ledger.sent(request))
            .collect::<Result<_>>()?;
        let all = |response: Response| vec![response; calls.len()];
        let responses = match timeout(limit, send(client, sql, params, roll_back)).await {
            Ok(Ok(values)) if roll_back => {
                all(Response::Refused(format!("rolled back ({values:?})")))
            }
            Ok(Ok(values)) => values.into_iter().map(Response::Ok).collect(),
            Ok(Err(error)) => all(classify(&error)),
            Err(_elapsed) => all(Response::Unknown(format!("no response within {limit:?}"))),
        };
        ensure!(
            responses.len() == calls.len(),
            "{} responses to {} requests",
            responses.len(),
            calls.len()
        );
        if responses.iter().any(|a| matches!(a, Response::Unknown(_))) {
            self.client = None;
        }
        for (call, response) in calls.into_iter().zip(&responses) {
            ledger.answered(call, response.clone())?;
        }
        Ok(Some(responses))
    }

    /// Connects if necessary. `None` if the server does not answer.
    pub(super) async fn connected(&mut self) -> Option<&mut Client> {
        if self.client.as_ref().is_none_or(Client::is_closed) {
            self.client = match timeout(TIMEOUT, database::connect(self.url)).await {
                Ok(Ok(client)) => Some(client),
                // The server may be down: that is one of the faults.
                Ok(Err(_)) | Err(_) => {
                    tokio::time::sleep(RECONNECT_AFTER).await;
                    None
                }
            };
        }
        self.client.as_mut()
    }
}

async fn send(
    client: &mut Client,
    sql: &str,
    params: &[&(dyn ToSql + Sync)],
    roll_back: bool,
) -> Result<Vec<i64>, Error> {
    let rows = match roll_back {
        true => {
            let transaction: Transaction<'_> = client.transaction().await?;
            let rows = transaction.query(sql, params).await?;
            transaction.rollback().await?;
            rows
        }
        false => client.query(sql, params).await?,
    };
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// An error from the statement is a response. An error that ends the connection leaves open whether the statement took
/// effect.
fn classify(error: &Error) -> Response {
    match error.as_db_error() {
        Some(db) if db.severity() == "ERROR" => {
            Response::Refused(format!("{}: {}", db.code().code(), db.message()))
        }
        Some(db) => Response::Unknown(format!("{} {}", db.severity(), db.message())),
        None => Response::Unknown(error.to_string()),
    }
}
