//! Open pages: their updates, and how many of them there may be.

use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::time::{sleep, timeout};

use super::access::{OPERATOR, TOKENS, sign_in};
use super::{Dashboard, ids, read_until};
use crate::support::TestDb;
use crate::support::worker::TIMEOUT;

#[tokio::test]
async fn an_open_page_is_updated_when_something_changes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = ids(&client, "SELECT rouse.enqueue('a.b', '{}')").await[0];
    let dashboard = Dashboard::start(&db, &[]);
    let page = dashboard.get(&format!("/jobs/{id}")).await.body;
    let live = format!(r#"data-live="/ui/live/jobs/{id}?""#);
    assert!(page.contains(&live), "{page}");
    let mut stream = dashboard.follow(&format!("/jobs/{id}")).await;
    let mut seen = String::new();
    read_until(&mut stream, &mut seen, "event: page").await;
    client
        .execute("SELECT rouse.fail($1, 'the mill is broken')", &[&id])
        .await
        .unwrap();
    read_until(&mut stream, &mut seen, "the mill is broken").await;

    // Browsers do not wait for a page that does not exist.
    dashboard.until("/jobs/999999", "event: gone").await;
}

#[tokio::test]
async fn too_many_open_pages_are_refused_until_one_is_closed() {
    let db = TestDb::new().await;
    let dashboard = Dashboard::start(&db, &[]);
    let mut open = Vec::new();
    for nth in 0..64 {
        let mut stream = dashboard.follow(&format!("/jobs?handler=h{nth}")).await;
        read_until(&mut stream, &mut String::new(), "event: page").await;
        open.push(stream);
    }
    let refused = dashboard.get("/live/jobs?handler=other").await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert!(refused.body.contains("too many pages"), "{}", refused.body);
    // Further readers of an open page do not count as further pages, but their number is limited too.
    for _ in 64..80 {
        let mut stream = dashboard.follow("/jobs?handler=h0").await;
        read_until(&mut stream, &mut String::new(), "event: page").await;
        open.push(stream);
    }
    let refused = dashboard.get("/live/jobs?handler=h0").await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    open.clear();
    let again = async {
        loop {
            let mut stream = dashboard.follow("/jobs?handler=other").await;
            let mut status = [0; 12];
            stream.read_exact(&mut status).await.unwrap();
            if status == *b"HTTP/1.1 200" {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(TIMEOUT, again)
        .await
        .expect("a page can be opened again");
}

#[tokio::test]
async fn pages_of_users_who_have_not_signed_in_leave_space_for_those_of_others() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let dashboard = Dashboard::start_at(&db, "0.0.0.0:0", &TOKENS[..1]);
    let operator = sign_in(&dashboard, OPERATOR).await;
    let holder = client.transaction().await.unwrap();
    let lock = "LOCK TABLE rouse.schedule IN ACCESS EXCLUSIVE MODE";
    holder.batch_execute(lock).await.unwrap();
    // The pages stay on the list although they are closed at once: they wait for the lock.
    for nth in 0..300 {
        let mut stream = dashboard.follow(&format!("/schedules?nth={nth}")).await;
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.unwrap();
    }
    let mut stream = dashboard.follow_as(&operator, "/queues").await;
    read_until(&mut stream, &mut String::new(), "event: page").await;
    holder.rollback().await.unwrap();
}
