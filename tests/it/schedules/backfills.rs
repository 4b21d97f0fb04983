//! Due times of the past.

use rouse::worker::Settings;
use tokio_postgres::Client;

use super::{REFUSE_JOBS_OF_BAD, block_gated_jobs, one, schedule, shown};
use crate::support::TestDb;
use crate::support::database::refusal;
use crate::support::worker::{TestWorker, until_true};

#[tokio::test]
async fn a_backfill_enqueues_each_due_time_once_however_often_it_is_requested() {
    let db = TestDb::new().await;
    let client = db.client().await;
    schedule(&client, "'a', 'test.nobody-has-this', cron => '30 2 * * *', time_zone => 'Europe/Berlin', due_key => 'at', jitter => '1 hour'").await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    for _ in 0..2 {
        // Both changes of the clock in 2024.
        for (since, before) in [("2024-03-30", "2024-04-02"), ("2024-10-26", "2024-10-29")] {
            let sql = format!(
                "SELECT rouse.backfill_schedule('a', '{since}T00:00:00Z', '{before}T00:00:00Z')"
            );
            client.batch_execute(&sql).await.unwrap();
        }
        until_true(
            &client,
            "SELECT bool_and(finished_at IS NOT NULL) FROM rouse.backfill",
        )
        .await;
    }
    worker.drain().await;
    let rows = client
        .query("SELECT payload ->> 'at' FROM rouse.jobs WHERE state = 'queued' AND available_at <= now() ORDER BY id", &[])
        .await
        .unwrap();
    let times: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(
        times,
        [
            "2024-03-30T01:30:00Z",
            // 2:30 does not exist on this day.
            "2024-03-31T01:00:00Z",
            "2024-04-01T00:30:00Z",
            "2024-10-26T00:30:00Z",
            // 2:30 exists twice on this day.
            "2024-10-27T00:30:00Z",
            "2024-10-28T01:30:00Z",
        ]
    );
    let enqueued: Vec<i32> = client
        .query("SELECT enqueued FROM rouse.backfill ORDER BY id", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(enqueued, [3, 3, 0, 0]);
}

#[tokio::test]
async fn a_large_backfill_is_done_in_batches_and_one_that_is_too_large_shows_an_error() {
    let db = TestDb::new().await;
    let client = db.client().await;
    schedule(&client, "'a', 'test.nobody-has-this', cron => '0 * * * *'").await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    client
        .batch_execute(
            "SELECT rouse.backfill_schedule('a', '2024-01-01T00:00:00Z', '2024-01-11T10:00:00Z');
             SELECT rouse.backfill_schedule('a', '2020-01-01T00:00:00Z', '2024-01-01T00:00:00Z')",
        )
        .await
        .unwrap();
    until_true(
        &client,
        "SELECT bool_and(finished_at IS NOT NULL) FROM rouse.backfill",
    )
    .await;
    worker.drain().await;
    let backfills = shown(&client, "a").await["backfills"].take();
    assert_eq!(
        backfills.as_array().map(Vec::len),
        Some(1),
        "the last one that is finished"
    );
    let error = backfills[0]["error"].as_str().unwrap();
    assert!(error.contains("more than 10000 due times"), "{error}");
    assert_eq!(
        one::<i64>(&client, "SELECT count(*) FROM rouse.job").await,
        250
    );
}

/// Waits until the backfill of this schedule has finished, before any of this number of others.
async fn until_only_finished(client: &Client, schedule: &str, others: i64) {
    let finished =
        format!("SELECT finished_at IS NOT NULL FROM rouse.backfill WHERE schedule = '{schedule}'");
    until_true(client, &finished).await;
    let unfinished = "SELECT count(*) FROM rouse.backfill WHERE finished_at IS NULL";
    assert_eq!(one::<i64>(client, unfinished).await, others);
}

/// A trigger of the operator raises an error that says nothing about the data. There are as many of these backfills as
/// a host lists at once.
#[tokio::test]
async fn backfills_that_cannot_be_continued_do_not_delay_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for name in ["bad", "good"] {
        let sql = format!("'{name}', 'test.nobody-has-this', cron => '0 * * * *'");
        schedule(&client, &sql).await;
    }
    client.batch_execute(REFUSE_JOBS_OF_BAD).await.unwrap();
    client
        .batch_execute(
            "SELECT rouse.backfill_schedule('bad', '2024-01-01T00:00:00Z', '2024-01-02T00:00:00Z')
             FROM generate_series(1, 10);
             SELECT rouse.backfill_schedule('good', '2024-01-01T00:00:00Z', '2024-01-02T00:00:00Z')",
        )
        .await
        .unwrap();
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_only_finished(&client, "good", 10).await;
    client
        .batch_execute("DROP TRIGGER refuse ON rouse.job")
        .await
        .unwrap();
    until_true(
        &client,
        "SELECT bool_and(finished_at IS NOT NULL) FROM rouse.backfill",
    )
    .await;
    worker.drain().await;
}

/// A host tries ten of them at once, one of which waits for 250 ms, and each of them again after at most a second. If
/// it always tried the first ones, they would come up again before the host has tried the last one.
#[tokio::test]
async fn a_hundred_backfills_whose_jobs_a_producer_blocks_do_not_prevent_others() {
    let db = TestDb::new().await;
    let (client, mut producer) = (db.client().await, db.client().await);
    let open = block_gated_jobs(&client, &mut producer).await;
    for n in 0..10 {
        schedule(&client, &format!("'s{n}', 'gated', cron => '0 0 1 1 *'")).await;
    }
    schedule(&client, "'free', 'plain', cron => '0 0 1 1 *'").await;
    client
        .batch_execute(
            "SELECT rouse.backfill_schedule('s' || s, '2024-01-01T00:00:00Z', '2024-01-02T00:00:00Z')
             FROM generate_series(0, 9) AS s, generate_series(1, 10);
             SELECT rouse.backfill_schedule('free', '2024-01-01T00:00:00Z', '2024-01-02T00:00:00Z')",
        )
        .await
        .unwrap();
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_only_finished(&client, "free", 100).await;
    open.rollback().await.unwrap();
    until_true(
        &client,
        "SELECT bool_and(finished_at IS NOT NULL AND error IS NULL) FROM rouse.backfill",
    )
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn backfills_are_listed_in_turn() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    for name in ["a", "b"] {
        schedule(&client, &format!("'{name}', 'x', cron => '0 0 1 1 *'")).await;
    }
    let requested = client
        .query(
            "SELECT rouse.backfill_schedule(s, '2024-01-01T00:00:00Z', '2024-01-02T00:00:00Z')
             FROM unnest(ARRAY['a', 'b']) AS s, generate_series(1, 6)",
            &[],
        )
        .await
        .unwrap();
    let mut ids: Vec<i64> = requested.iter().map(|row| row.get(0)).collect();
    ids.sort_unstable();
    let listed = async |except: &[i64], after: Option<i64>| -> Vec<i64> {
        let due = store.due_schedules(1, None, &[], except, after).await;
        let backfills = due.unwrap().backfills;
        backfills.iter().map(|backfill| backfill.id).collect()
    };
    assert_eq!(listed(&[], None).await, ids[..10]);
    let next = [&ids[10..], &ids[..8]].concat();
    assert_eq!(listed(&[], Some(ids[9])).await, next);
    assert_eq!(listed(&ids[..2], Some(ids[11])).await, ids[2..]);
}

#[tokio::test]
async fn a_backfill_of_impossible_times_is_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    schedule(&client, "'a', 'x', cron => '* * * * *'").await;
    for times in [
        "now(), now() - interval '1 day'",
        "now(), now() + interval '1 day'",
        "NULL, now()",
        "'-infinity', now()",
        "now() - interval '1 day', NULL",
    ] {
        let refused = refusal(
            &client,
            &format!("SELECT rouse.backfill_schedule('a', {times})"),
        )
        .await;
        assert!(
            refused.contains("since must be earlier than before, and both in the past"),
            "{refused}"
        );
    }
    let ten = "SELECT rouse.backfill_schedule('a', now() - interval '1 day', now()) FROM generate_series(1, 10)";
    client.batch_execute(ten).await.unwrap();
    let refused = refusal(
        &client,
        "SELECT rouse.backfill_schedule('a', now() - interval '1 day', now())",
    )
    .await;
    assert!(
        refused.contains("already has 10 unfinished backfills"),
        "{refused}"
    );
}
