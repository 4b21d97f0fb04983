//! Open pages.

use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::time::{sleep, timeout};

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
