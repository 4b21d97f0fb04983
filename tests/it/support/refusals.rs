//! Writes that the database refuses.

use tokio_postgres::Client;

use super::Host;
use super::worker::{TIMEOUT, until_true};

/// From now on, inserts into this table of rows that match this condition raise this error. `public.tries` counts such
/// inserts.
pub(crate) async fn refuse_inserts(client: &Client, table: &str, condition: &str, error: &str) {
    let sql = format!(
        "CREATE SEQUENCE public.tries;
         CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
             -- A sequence keeps its value whatever becomes of the statement.
             PERFORM nextval('public.tries');
             RAISE EXCEPTION {error};
         END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON {table} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION public.refuse()"
    );
    client.batch_execute(&sql).await.unwrap();
}

/// Waits until the host has tried a refused insert many times, with pauses that become longer, and asserts that it has
/// logged few of these lines.
pub(crate) async fn warnings_become_rare(
    client: &Client,
    host: &Host,
    is_warning: impl Fn(&str) -> bool,
) {
    host.line(TIMEOUT, &is_warning);
    until_true(client, "SELECT last_value >= 12 FROM public.tries").await;
    let output = host.output();
    let warnings = output.lines().filter(|line| is_warning(line)).count();
    // The tries usually take less than 31 s.
    let elapsed =
        "SELECT extract(epoch FROM clock_timestamp() - min(requested_at))::float8 FROM rouse.job";
    let elapsed: f64 = client.query_one(elapsed, &[]).await.unwrap().get(0);
    let logged_after = [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0];
    let most = logged_after.iter().filter(|s| **s <= elapsed).count();
    assert!(warnings <= most, "after {elapsed} s: {output}");
}
