//! Old versions of rows, which a transaction that stays open keeps.

use tokio_postgres::Client;

use super::TestDb;

/// A client with an open transaction. It keeps all versions of rows, and all index entries, that are there now or are
/// written later.
pub(crate) async fn keep_versions(db: &TestDb) -> Client {
    let client = db.client().await;
    client
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")
        .await
        .unwrap();
    client
}

/// The number of index entries and of pages of these tables that statements read, whether or not the versions of rows
/// there are visible. Their transaction is rolled back.
pub(crate) async fn entries_read(client: &Client, tables: &[&str], statements: &str) -> i64 {
    const READ: &str = "SELECT coalesce(sum(CASE c.relkind WHEN 'i' THEN pg_stat_get_xact_tuples_returned(c.oid)
                                                           ELSE pg_stat_get_xact_blocks_fetched(c.oid) END), 0)::bigint
         FROM pg_class AS c LEFT JOIN pg_index AS i ON i.indexrelid = c.oid
         WHERE coalesce(i.indrelid, c.oid) = ANY ($1::text[]::regclass[])";
    client.batch_execute("BEGIN").await.unwrap();
    let before: i64 = client.query_one(READ, &[&tables]).await.unwrap().get(0);
    client.batch_execute(statements).await.unwrap();
    let after: i64 = client.query_one(READ, &[&tables]).await.unwrap().get(0);
    client.batch_execute("ROLLBACK").await.unwrap();
    after - before
}
