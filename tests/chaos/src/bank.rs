//! Accounts in the database of a run, between which the effects of jobs move money.

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio_postgres::Client;

use super::load::JobSpec;
use super::random::Random;

/// The login of the handler.
pub(super) const LOGIN: &str = "chaos_pay";
/// Few accounts, so that two jobs may lock the same accounts in a different order.
pub(super) const ACCOUNTS: i64 = 12;
const TABLES: &str = "
    CREATE SCHEMA bank;
    CREATE TABLE bank.account (id bigint PRIMARY KEY, balance bigint NOT NULL);
    CREATE TABLE bank.line (job bigint NOT NULL, attempt integer NOT NULL, part text NOT NULL, amount bigint NOT NULL);";

/// Creates the tables and the login.
pub(super) async fn create(client: &Client) -> Result<()> {
    let sql = format!(
        "{TABLES}
         INSERT INTO bank.account SELECT n, 0 FROM generate_series(1, {ACCOUNTS}) AS n;
         CREATE ROLE {LOGIN} LOGIN IN ROLE rouse_handler;
         GRANT USAGE ON SCHEMA bank TO {LOGIN};
         GRANT SELECT, UPDATE ON bank.account TO {LOGIN};
         GRANT INSERT ON bank.line TO {LOGIN};"
    );
    let created = client.batch_execute(&sql).await;
    created.context("create the tables of the bank")
}

/// The connection string of the login, derived from that of the server. `worker` identifies the connections of a host.
pub(super) fn login_url(server: &str, worker: &str) -> Result<String> {
    let (scheme, rest) = server
        .split_once("://")
        .context("parse the connection string")?;
    let address = rest.split_once('@').map_or(rest, |(_, address)| address);
    Ok(format!(
        "{scheme}://{LOGIN}@{address}?application_name={worker}"
    ))
}

/// What a job of the handler [`PAY`](super::load::PAY) does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Payment {
    pub(super) from: i64,
    pub(super) to: i64,
    pub(super) amount: i64,
    /// True if it moves the money with a step; false if with its outcome.
    pub(super) staged: bool,
}

impl Payment {
    pub(super) fn draw(random: &mut Random) -> Self {
        let from = random.between(1, ACCOUNTS as u64) as i64;
        // Another account.
        let to = (from + random.between(1, ACCOUNTS as u64 - 1) as i64 - 1) % ACCOUNTS + 1;
        Self {
            from,
            to,
            amount: random.between(1, 1_000) as i64,
            staged: random.per_mille(500),
        }
    }

    pub(super) fn payload(&self, spec: &JobSpec) -> Value {
        json!({
            "n": spec.n,
            "from": self.from,
            "to": self.to,
            "amount": self.amount,
            "staged": self.staged,
            "sleep_ms": spec.sleep_ms,
            "fail_attempts": spec.fail_attempts,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn money_moves_between_two_accounts() {
        let mut random = Random::new(1, "payments");
        for _ in 0..1_000 {
            let payment = Payment::draw(&mut random);
            assert_ne!(payment.from, payment.to);
            assert!((1..=ACCOUNTS).contains(&payment.from), "{payment:?}");
            assert!((1..=ACCOUNTS).contains(&payment.to), "{payment:?}");
        }
    }

    #[test]
    fn the_login_has_the_address_of_the_server() {
        let url = login_url("postgres://postgres@127.0.0.1:5000/rouse", "host-1").unwrap();
        assert_eq!(
            url,
            "postgres://chaos_pay@127.0.0.1:5000/rouse?application_name=host-1"
        );
    }
}
