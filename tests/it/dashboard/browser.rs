//! The dashboard in a real browser.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::{Dashboard, ids, paths, shop};
use crate::support::browser::Browser;
use crate::support::worker::TIMEOUT;
use crate::support::{TestDb, free_port, scratch, skip};

/// The folder for the screenshots of the pages, outside the source tree.
fn screenshots() -> PathBuf {
    let folder = std::env::var_os("ROUSE_TEST_SCREENSHOTS")
        .map_or_else(|| scratch("dashboard-screenshots"), PathBuf::from);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// axe-core, which checks what screen readers need; `None`, after a message, if it is not installed.
fn axe() -> Option<String> {
    let file = std::env::var_os("ROUSE_TEST_AXE").map(PathBuf::from);
    let text = file.and_then(|file| std::fs::read_to_string(file).ok());
    if text.is_none() {
        skip("ROUSE_TEST_AXE does not name axe.min.js (npm pack axe-core)");
    }
    text
}

#[tokio::test]
async fn no_page_runs_untrusted_text_or_is_wider_than_a_phone_or_lacks_names_for_screen_readers() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let db = shop().await;
    let client = db.client().await;
    let dashboard = Dashboard::start(&db, &[]);
    let axe = axe();
    let folder = screenshots();
    for path in paths(&client).await {
        browser.set_width(1280).await;
        browser.open(&dashboard.url(&path)).await;
        browser.wait_for("Rouse").await;
        assert_eq!(
            browser.run("return window.hacked ?? null").await,
            Value::Null,
            "{path} runs untrusted text"
        );
        screenshot(&browser, &folder, &path, "light").await;
        if let Some(axe) = &axe {
            let found = found_by(axe, &browser).await;
            assert_eq!(found, json!([]), "{path}");
        }
        browser
            .run("document.documentElement.style.colorScheme = 'dark'")
            .await;
        screenshot(&browser, &folder, &path, "dark").await;
        if let Some(axe) = &axe {
            let found = found_by(axe, &browser).await;
            assert_eq!(found, json!([]), "{path}, dark");
        }
        browser.set_width(390).await;
        let width = browser
            .run("return [document.scrollingElement.scrollWidth, window.innerWidth]")
            .await;
        assert!(
            width[0].as_i64() <= width[1].as_i64().max(Some(500)),
            "{path} is {width} wide"
        );
        screenshot(&browser, &folder, &path, "phone").await;
    }
    browser.close().await;
}

async fn screenshot(browser: &Browser, folder: &Path, path: &str, kind: &str) {
    let name: String = path
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    browser
        .screenshot(folder.join(format!("{name}-{kind}.png")))
        .await;
}

/// The serious findings of axe-core on the open page.
async fn found_by(axe: &str, browser: &Browser) -> Value {
    // The page's policy forbids scripts, but not those of the driver.
    browser.run(axe).await;
    browser
        .run_async(
            "axe.run({resultTypes: ['violations']}).then(it => done(it.violations.filter(v => ['serious', 'critical'].includes(v.impact))
                .map(v => [v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 200) + ' | ' + n.failureSummary.slice(0, 300))])))",
        )
        .await
}

/// Makes the page believe that its reader has switched to another tab, or has come back.
async fn hide(browser: &Browser, is_hidden: bool) {
    let script = format!(
        "Object.defineProperty(document, 'hidden', {{configurable: true, get: () => {is_hidden}}});
         document.dispatchEvent(new Event('visibilitychange'))"
    );
    browser.run(&script).await;
}

#[tokio::test]
async fn a_job_changes_while_its_page_is_open_and_what_was_typed_stays() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = ids(&client, "SELECT rouse.enqueue('a.b', '{}')").await[0];
    let dashboard = Dashboard::start(&db, &[]);
    browser.open(&dashboard.url(&format!("/jobs/{id}"))).await;
    browser.wait_for("No worker is running").await;
    browser.click("#commands summary").await;
    client
        .execute("SELECT rouse.fail($1, 'the mill is broken')", &[&id])
        .await
        .unwrap();
    browser.wait_for("the mill is broken").await;
    assert_eq!(
        browser
            .run("return document.querySelector('#commands').open")
            .await,
        json!(true),
        "an open part stays open"
    );

    browser.open(&dashboard.url("/jobs")).await;
    browser.click("#filter summary").await;
    browser.type_into("input[name=handler]", "a.").await;
    browser.click("input[name=id]").await;
    client
        .batch_execute("SELECT rouse.enqueue('new.one', '{}')")
        .await
        .unwrap();
    browser.wait_for("new.one").await;
    let kept = browser
        .run("return [document.querySelector('input[name=handler]').value, document.querySelectorAll('input[name=id]:checked').length, document.querySelector('#filter').open]")
        .await;
    assert_eq!(kept, json!(["a.", 1, true]));

    // While the page is paused, nothing changes; then all changes arrive at once.
    browser.click("button.live").await;
    client
        .batch_execute("SELECT rouse.enqueue('second.one', '{}')")
        .await
        .unwrap();
    // Other readers get the update.
    dashboard.until("/jobs", "second.one").await;
    assert!(!browser.text().await.contains("second.one"));
    browser.click("button.live").await;
    browser.wait_for("second.one").await;

    // The same applies while the page is hidden.
    hide(&browser, true).await;
    // If the page were updated, it would show the first job before other readers see the second.
    for handler in ["third.one", "fourth.one"] {
        let enqueue = "SELECT rouse.enqueue($1, '{}')";
        client.execute(enqueue, &[&handler]).await.unwrap();
        dashboard.until("/jobs", handler).await;
    }
    assert!(!browser.text().await.contains("third.one"));
    hide(&browser, false).await;
    browser.wait_for("fourth.one").await;

    // The browser asks before an action that cannot be undone.
    let id = ids(&client, "SELECT max(id) FROM rouse.job").await[0];
    browser.open(&dashboard.url(&format!("/jobs/{id}"))).await;
    browser.click("button.risky").await;
    assert_eq!(browser.accept_question().await, "Cancel this job?");
    browser.wait_for(&format!("Job {id} is cancelled.")).await;
    browser.close().await;
}

#[tokio::test]
async fn an_operator_finds_failed_jobs_and_retries_them_all() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.enqueue('bulk.job', '{}') FROM generate_series(1, 10000);
             SELECT count(rouse.fail(id, 'no route to host')) FROM (SELECT id FROM rouse.job) AS j",
        )
        .await
        .unwrap();
    let dashboard = Dashboard::start(&db, &[]);
    browser.open(&dashboard.url("/")).await;
    browser.wait_for("no route to host").await;
    browser
        .click("section[aria-label='Failures of the last hour'] td.number a")
        .await;
    browser.wait_for("Retry all").await;
    browser.click("button[value=retry-all]").await;
    browser.wait_for("10,000").await;
    browser.click("button.main").await;
    browser.wait_for("10,000 retried").await;
    let live = ids(&client, "SELECT count(*) FROM rouse.job").await[0];
    assert_eq!(live, 10_000);
    browser.close().await;
}

#[tokio::test]
async fn a_flow_grows_on_an_open_page() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let db = shop().await;
    let client = db.client().await;
    let dashboard = Dashboard::start(&db, &[]);
    let flow = ids(&client, "SELECT id FROM rouse.flow").await[0];
    browser
        .open(&dashboard.url(&format!("/flows/{flow}")))
        .await;
    browser.wait_for("Graph").await;
    let boxes = "return [...document.querySelectorAll('svg.graph g.node')].map(it => it.getAttribute('class'))";
    assert_eq!(
        browser.run(boxes).await,
        json!(["node quiet", "node quiet", "node quiet"])
    );
    client
        .batch_execute("SELECT rouse.complete(id) FROM rouse.job WHERE flow_name = 'a'")
        .await
        .unwrap();
    browser.wait_for("1\nsucceeded").await;
    assert_eq!(
        browser.run(boxes).await,
        json!(["node good", "node quiet", "node quiet"])
    );
    browser.close().await;
}

#[tokio::test]
async fn a_page_reports_that_its_host_has_stopped_and_continues_when_it_is_back() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let db = shop().await;
    let address = format!("127.0.0.1:{}", free_port());
    let dashboard = Dashboard::start_at(&db, &address, &[]);
    browser.open(&dashboard.url("/queues")).await;
    browser.wait_for("live").await;
    drop(dashboard);
    browser.wait_for("lost").await;
    let token = "return document.querySelector('input[name=csrf]').value";
    let old = browser.run(token).await;
    let _dashboard = Dashboard::start_at(&db, &address, &[]);
    browser.wait_for("live").await;
    // The page now has the forms of the new process.
    let until = tokio::time::Instant::now() + TIMEOUT;
    while browser.run(token).await == old {
        assert!(
            tokio::time::Instant::now() < until,
            "the forms are still the old ones"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    browser
        .click("form[action$='/queues/mail/pause'] button")
        .await;
    browser.wait_for("Queue mail is paused").await;
    browser.close().await;
}

#[tokio::test]
async fn ten_megabytes_and_deep_nesting_are_shown_in_part_and_are_whole_behind_a_link() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "INSERT INTO rouse.queue (name, payload_bytes_max) VALUES ('wide', 16777216)",
        )
        .await
        .unwrap();
    let dashboard = Dashboard::start(&db, &[]);
    for payload in [
        "to_jsonb(repeat('<script>window.hacked=1</script>', 330000))",
        "(repeat('[', 2000) || repeat(']', 2000))::jsonb",
    ] {
        let enqueue = format!("SELECT rouse.enqueue('a.b', {payload}, queue => 'wide')");
        let id = ids(&client, &enqueue).await[0];
        browser.open(&dashboard.url(&format!("/jobs/{id}"))).await;
        browser.wait_for("No worker is running").await;
        let seen = browser
            .run("return [window.hacked ?? null, document.documentElement.innerHTML.length < 500000, document.scrollingElement.scrollWidth <= window.innerWidth]")
            .await;
        assert_eq!(seen, json!([null, true, true]), "{payload}");
        let raw = dashboard.get(&format!("/jobs/{id}/payload")).await;
        let bytes =
            format!("SELECT octet_length(payload::text)::bigint FROM rouse.jobs WHERE id = {id}");
        let bytes = ids(&client, &bytes).await[0];
        assert_eq!(i64::try_from(raw.body.len()).unwrap(), bytes);
    }
    browser.close().await;
}

#[tokio::test]
async fn the_keyboard_goes_to_pages_and_moves_through_rows() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let db = shop().await;
    let dashboard = Dashboard::start(&db, &[]);
    browser.open(&dashboard.url("/")).await;
    browser.wait_for("Overview").await;
    browser.type_into("body", "gj").await;
    browser.wait_for("Filter").await;
    browser.type_into("body", "jj").await;
    let place = browser
        .run("return [...document.querySelectorAll('tbody tr a.row')].indexOf(document.activeElement)")
        .await;
    assert_eq!(place, json!(1));
    browser.close().await;
}
