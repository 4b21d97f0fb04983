//! Writes that wait for a lock of the test.

use tokio_postgres::Client;

use super::TestDb;

/// From now on, inserts into this table of rows that match this condition need a lock. The session that is returned
/// holds it until the end of its transaction. `public.held_up` counts how often such rows were inserted.
pub(crate) async fn hold_up(db: &TestDb, client: &Client, table: &str, condition: &str) -> Client {
    let other = db.client().await;
    other
        .batch_execute("BEGIN; SELECT pg_advisory_xact_lock(77001)")
        .await
        .unwrap();
    let sql = format!(
        "CREATE SEQUENCE public.held_up;
         CREATE FUNCTION public.take_lock() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
             PERFORM nextval('public.held_up');
             PERFORM pg_advisory_xact_lock(77001);
             RETURN NEW;
         END $$;
         CREATE TRIGGER take_lock BEFORE INSERT ON {table} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION public.take_lock()"
    );
    client.batch_execute(&sql).await.unwrap();
    other
}

/// The same for the ends of jobs.
pub(crate) async fn hold_up_ends(db: &TestDb, client: &Client, condition: &str) -> Client {
    hold_up(db, client, "rouse.finished", condition).await
}

/// Whether such a row was inserted, for [`until_true`](super::worker::until_true).
pub(crate) const IS_HELD_UP: &str = "SELECT is_called FROM public.held_up";
