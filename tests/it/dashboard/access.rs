//! Access to the dashboard: roles, sign-ins, forms.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{Dashboard, form_token, ids, shop};
use crate::support::worker::TIMEOUT;
use crate::support::{Host, TestDb};

pub(super) const OPERATOR: &str = "operator-token-0123456789";
const VIEWER: &str = "viewer-token-0123456789";

pub(super) const TOKENS: &[(&str, &str)] = &[
    ("ROUSE_UI_OPERATOR_TOKEN", OPERATOR),
    ("ROUSE_UI_VIEWER_TOKEN", VIEWER),
];

/// The cookie that a sign-in with this token returns.
pub(super) async fn sign_in(dashboard: &Dashboard, token: &str) -> String {
    let response = dashboard
        .post("/sign-in", &format!("token={token}&next=%2Fjobs"))
        .await;
    assert_eq!(
        (response.status, response.header("location")),
        (303, Some("/ui/jobs")),
        "{}",
        response.body
    );
    let cookie = response.header("set-cookie").unwrap();
    assert!(
        cookie.contains("HttpOnly") && cookie.contains("SameSite=Lax"),
        "{cookie}"
    );
    cookie.split(';').next().unwrap().to_owned()
}

#[tokio::test]
async fn a_viewer_reads_and_an_operator_changes() {
    let db = shop().await;
    let client = db.client().await;
    let dashboard = Dashboard::start_at(&db, "0.0.0.0:0", TOKENS);
    let away = dashboard.get("/jobs?state=failed").await;
    assert_eq!(
        (away.status, away.header("location")),
        (303, Some("/ui/sign-in?next=%2Fjobs%3Fstate%3Dfailed"))
    );
    let refused = dashboard.post("/sign-in", "token=wrong").await;
    assert_eq!(refused.status, 403);
    assert!(
        refused.body.contains("not a token of this installation"),
        "{}",
        refused.body
    );
    let elsewhere = dashboard
        .post(
            "/sign-in",
            &format!("token={VIEWER}&next=%2F%2Fevil.example"),
        )
        .await;
    assert_eq!(elsewhere.header("location"), Some("/ui/"));

    let viewer = sign_in(&dashboard, VIEWER).await;
    let operator = sign_in(&dashboard, OPERATOR).await;
    let page = |cookie: String, path: String| {
        let dashboard = &dashboard;
        async move {
            dashboard
                .send("GET", &path, &[("Cookie", &cookie)], "")
                .await
        }
    };
    let id = ids(
        &client,
        "SELECT min(id) FROM rouse.jobs WHERE state = 'queued'",
    )
    .await[0];
    let path = format!("/jobs/{id}");
    let read = page(viewer.clone(), path.clone()).await;
    assert!(
        read.body.contains("Payload")
            && form_token(&read.body).is_some_and(|token| token.is_empty())
                | form_token(&read.body).is_none()
    );
    let own = page(operator.clone(), path.clone()).await;
    let token = form_token(&own.body).unwrap();

    let cancel = format!("{path}/cancel");
    let same = ("Sec-Fetch-Site", "same-origin");
    let form = format!("csrf={token}");
    for (who, headers, body) in [
        (
            "a viewer with an operator's token",
            vec![("Cookie", viewer.as_str()), same],
            form.as_str(),
        ),
        (
            "an operator without the form's token",
            vec![("Cookie", &operator), same],
            "",
        ),
        (
            "a page of another origin",
            vec![("Cookie", &operator), ("Sec-Fetch-Site", "cross-site")],
            &form,
        ),
        (
            "a form of another origin",
            vec![("Cookie", &operator), ("Origin", "http://evil.example")],
            &form,
        ),
        (
            "a request without any origin",
            vec![("Cookie", &operator)],
            &form,
        ),
    ] {
        let response = dashboard.send("POST", &cancel, &headers, body).await;
        assert_eq!(response.status, 403, "{who}: {}", response.body);
    }
    let stale = dashboard
        .send("POST", &cancel, &[("Cookie", &operator), same], "csrf=x")
        .await;
    assert!(
        stale.body.contains("the host has restarted"),
        "{}",
        stale.body
    );
    let nobody = dashboard.send("POST", &cancel, &[same], &form).await;
    assert_eq!(nobody.status, 401);
    let state = "SELECT id FROM rouse.jobs WHERE state = 'queued' AND id = (SELECT min(id) FROM rouse.jobs WHERE state = 'queued')";
    assert_eq!(ids(&client, state).await, [id], "nothing was changed");

    let done = dashboard
        .send("POST", &cancel, &[("Cookie", &operator), same], &form)
        .await;
    assert_eq!(done.status, 303, "{}", done.body);
    let notice = done.cookie();
    let cookies = format!("{operator}; {notice}");
    let shown = page(cookies, path).await;
    assert!(
        shown.body.contains(&format!("Job {id} is cancelled.")),
        "{}",
        shown.body
    );
    assert_ne!(ids(&client, state).await, [id]);
    // The record names the user in addition to the login.
    let by: String = client
        .query_one(
            "SELECT detail ->> 'by' FROM rouse.history($1) WHERE event = 'cancelled'",
            &[&id],
        )
        .await
        .unwrap()
        .get(0);
    assert!(by.ends_with(" for operator"), "{by}");
}

#[tokio::test]
async fn without_tokens_others_see_no_contents_and_change_nothing() {
    let db = shop().await;
    let client = db.client().await;
    let dashboard = Dashboard::start_at(&db, "0.0.0.0:0", &[]);
    let id = ids(
        &client,
        "SELECT min(id) FROM rouse.jobs WHERE state = 'failed'",
    )
    .await[0];
    for path in [
        format!("/jobs/{id}"),
        "/jobs?state=failed".into(),
        "/".into(),
        "/handlers/shop.mail".into(),
        "/audit".into(),
    ] {
        let page = dashboard
            .send("GET", &path, &[("Host", "jobs.example")], "")
            .await;
        assert_eq!(page.status, 200, "{path}");
        assert!(
            !page.body.contains("onerror=window"),
            "{path} shows contents: {}",
            page.body
        );
    }
    let raw = dashboard
        .send(
            "GET",
            &format!("/jobs/{id}/payload"),
            &[("Host", "jobs.example")],
            "",
        )
        .await;
    assert_eq!(raw.status, 403);
    // The matches of a filter would also reveal contents.
    for query in ["error=h", "payload=%2Fn%3D1", "kind=admin"] {
        let page = dashboard
            .send("GET", &format!("/jobs?{query}"), &[], "")
            .await;
        assert_eq!(page.status, 403, "{query}: {}", page.body);
        let live = dashboard
            .send("GET", &format!("/live/jobs?{query}"), &[], "")
            .await;
        assert!(
            live.body.contains("event: gone") && !live.body.contains("event: page"),
            "{query}: {live:?}"
        );
    }
    // The reason why a job waits quotes the error of its last attempt.
    client
        .batch_execute(
            "UPDATE rouse.job SET attempt = 1, available_at = now() + interval '1 hour', turn = NULL WHERE id = (SELECT max(id) FROM rouse.job);
             INSERT INTO rouse.attempt (job, attempt, lane, worker, claimed_at, started_at, ended_at, lost, error)
             SELECT id, 1, lane, 1, now(), now(), now(), false, '{\"kind\": \"guest_error\", \"message\": \"the password is swordfish\"}'
             FROM rouse.job WHERE id = (SELECT max(id) FROM rouse.job)",
        )
        .await
        .unwrap();
    let waits = ids(&client, "SELECT max(id) FROM rouse.job").await[0];
    let page = dashboard
        .send("GET", &format!("/jobs/{waits}"), &[], "")
        .await
        .body;
    assert!(!page.contains("swordfish"), "{page}");
    let own = Dashboard::start(&db, &[]);
    let page = own.get(&format!("/jobs/{waits}")).await.body;
    assert!(
        page.contains("swordfish"),
        "this machine may read it: {page}"
    );
    assert_eq!(
        dashboard
            .post(&format!("/jobs/{id}/retry"), "")
            .await
            .status,
        403
    );
}

#[tokio::test]
async fn on_loopback_only_this_machine_reads() {
    let db = TestDb::new().await;
    let dashboard = Dashboard::start(&db, &[]);
    assert_eq!(dashboard.get("/").await.status, 200);
    for headers in [
        &[("Host", "rebound.example")][..],
        &[("X-Forwarded-For", "1.2.3.4")],
    ] {
        let response = dashboard.send("GET", "/", headers, "").await;
        assert_eq!(response.status, 403, "{headers:?}");
        assert!(
            response.body.contains("ROUSE_UI_OPERATOR_TOKEN"),
            "{}",
            response.body
        );
    }
    let dashboard = Dashboard::start(&db, &TOKENS[..1]);
    assert_eq!(
        dashboard.get("/").await.status,
        200,
        "this machine may read without a token"
    );
    let foreign = dashboard
        .send("GET", "/", &[("Host", "rebound.example")], "")
        .await;
    assert_eq!(
        (foreign.status, foreign.header("location")),
        (303, Some("/ui/sign-in?next=%2F"))
    );
}

#[tokio::test]
async fn a_proxy_names_the_user_and_may_put_a_path_before_it() {
    let db = TestDb::new().await;
    let variables = [
        ("ROUSE_UI_USER_HEADER", "X-User"),
        ("ROUSE_UI_OPERATORS", "ada, eve"),
        ("ROUSE_UI_PREFIX", "/ops"),
        ("ROUSE_UI_NAME", "shop <live>"),
        ("ROUSE_UI_COLOUR", "#c2410c"),
    ];
    let dashboard = Dashboard::start(&db, &variables);
    let read = async |user: &str| {
        let headers = [
            ("Host", "jobs.example"),
            ("X-Forwarded-For", "1.2.3.4"),
            ("X-User", user),
        ];
        dashboard.send("GET", "/queues", &headers, "").await
    };
    let ada = read("ada").await.body;
    assert!(
        ada.contains("Signed in as ada") && ada.contains("change everything"),
        "{ada}"
    );
    assert!(
        ada.contains(r#"href="/ops/ui/jobs""#) && ada.contains(r#"src="/ops/ui/assets/rouse.js?"#),
        "{ada}"
    );
    assert!(
        ada.contains("shop &lt;live&gt;") && ada.contains("#c2410c"),
        "{ada}"
    );
    let bob = read("bob").await.body;
    assert!(bob.contains("change nothing"), "{bob}");
    let nobody = dashboard
        .send("GET", "/queues", &[("Host", "jobs.example")], "")
        .await;
    assert_eq!(nobody.status, 403);
    assert!(
        nobody.body.contains("did not send the name of the user"),
        "{nobody:?}"
    );
}

#[tokio::test]
async fn a_login_that_may_only_read_shows_why_it_cannot_change() {
    let db = shop().await;
    let client = db.client().await;
    client
        .batch_execute("DO $$ BEGIN CREATE ROLE dashboard_reader LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$; GRANT rouse_observer TO dashboard_reader")
        .await
        .unwrap();
    let url = db
        .url()
        .replacen("postgres://", "postgres://dashboard_reader:@", 1);
    let user_at = url.find('@').unwrap();
    let rest = url[user_at + 1..]
        .split_once('@')
        .map_or(&url[user_at + 1..], |(_, rest)| rest);
    let url = format!("postgres://dashboard_reader@{rest}");
    let dashboard = Dashboard::start(&db, &[("ROUSE_UI_DATABASE_URL", &url)]);
    let page = dashboard.get("/workers").await;
    assert_eq!(page.status, 200, "{}", page.body);
    let token = dashboard.form_token("/queues").await;
    let refused = dashboard
        .post("/queues/mail/pause", &format!("csrf={token}"))
        .await;
    assert_eq!(refused.status, 303);
    let notice = refused.cookie();
    let shown = dashboard
        .send("GET", "/queues", &[("Cookie", &notice)], "")
        .await;
    assert!(shown.body.contains("permission denied"), "{}", shown.body);
}

#[tokio::test]
async fn clients_that_never_finish_a_sign_in_do_not_keep_others_out() {
    let db = TestDb::new().await;
    let dashboard = Dashboard::start_at(&db, "0.0.0.0:0", TOKENS);
    let mut open = Vec::new();
    // There are more clients than the dashboard keeps connections.
    for _ in 0..200 {
        let mut stream = TcpStream::connect(dashboard.address).await.unwrap();
        let head = format!(
            "POST /ui/sign-in HTTP/1.1\r\nHost: {}\r\nSec-Fetch-Site: none\r\nContent-Length: 100\r\n\r\ntoken=",
            dashboard.address
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        open.push(stream);
    }
    let page = timeout(TIMEOUT, dashboard.get("/sign-in")).await;
    assert_eq!(page.expect("one of them is closed").status, 200);
}

#[tokio::test]
async fn a_client_that_tries_too_many_sign_ins_does_not_keep_others_out() {
    let db = TestDb::new().await;
    let dashboard = Dashboard::start_at(&db, "0.0.0.0:0", TOKENS);
    let try_from_elsewhere = async || -> String {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        let mut stream = socket.connect(dashboard.address).await.unwrap();
        let request = format!(
            "POST /ui/sign-in HTTP/1.1\r\nHost: {}\r\nSec-Fetch-Site: same-origin\r\nContent-Length: 11\r\nConnection: close\r\n\r\ntoken=wrong",
            dashboard.address
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    };
    let mut tries = 0;
    while !try_from_elsewhere().await.starts_with("HTTP/1.1 429") {
        tries += 1;
        assert!(tries < 1000);
    }
    sign_in(&dashboard, OPERATOR).await;
}

#[tokio::test]
async fn requests_of_users_who_have_not_signed_in_wait_in_a_limited_number() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let dashboard = Dashboard::start_at(&db, "0.0.0.0:0", &[]);
    let holder = client.transaction().await.unwrap();
    let lock = "LOCK TABLE rouse.schedule IN ACCESS EXCLUSIVE MODE";
    holder.batch_execute(lock).await.unwrap();
    // Updates of open pages do not count.
    let mut open_pages = Vec::new();
    for nth in 0..8 {
        let mut page = dashboard.follow(&format!("/schedules?nth={nth}")).await;
        let mut status = [0; 12];
        page.read_exact(&mut status).await.unwrap();
        open_pages.push(page);
    }
    let mut requests = JoinSet::new();
    for _ in 0..40 {
        let mut stream = TcpStream::connect(dashboard.address).await.unwrap();
        let request = format!(
            "GET /ui/schedules HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
            dashboard.address
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        requests.spawn(async move {
            let mut response = String::new();
            stream.read_to_string(&mut response).await.unwrap();
            response
        });
    }
    for _ in 32..40 {
        let refused = timeout(TIMEOUT, requests.join_next()).await;
        let refused = refused.expect("it does not wait").unwrap().unwrap();
        assert!(
            refused.starts_with("HTTP/1.1 503") && refused.contains("Too many users"),
            "{refused}"
        );
    }
    holder.rollback().await.unwrap();
    while let Some(shown) = requests.join_next().await {
        let shown = shown.unwrap();
        assert!(shown.starts_with("HTTP/1.1 200"), "{shown}");
    }
}

#[tokio::test]
async fn invalid_settings_are_refused_before_anything_is_served() {
    let db = TestDb::new().await;
    let url = db.url();
    for (name, value, words) in [
        ("ROUSE_UI", "maybe", "it can be on or off"),
        (
            "ROUSE_UI_OPERATOR_TOKEN",
            "short",
            "at least 16 visible ASCII characters",
        ),
        (
            "ROUSE_UI_OPERATORS",
            "ada",
            "set ROUSE_UI_USER_HEADER to the header",
        ),
        (
            "ROUSE_UI_USER_HEADER",
            "not a header",
            "is not the name of a header",
        ),
        (
            "ROUSE_UI_COLOUR",
            "red",
            "expected a colour such as #c2410c",
        ),
        ("ROUSE_UI_PREFIX", "ops/", "expected a path such as /ops"),
        ("ROUSE_UI", "off", "the dashboard is off"),
        // Access is never granted because a value is missing.
        ("ROUSE_UI_OPERATOR_TOKEN", "", "is set but empty"),
        ("ROUSE_UI_VIEWER_TOKEN", "", "is set but empty"),
        ("ROUSE_UI_USER_HEADER", "", "is set but empty"),
        ("ROUSE_UI_DATABASE_URL", "", "is set but empty"),
    ] {
        let host = Host::rouse(
            &["ui", "--http", "127.0.0.1:0"],
            &[("DATABASE_URL", &url), (name, value)],
        );
        let (status, output) = host.exit(TIMEOUT);
        assert!(
            !status.success() && output.contains(words),
            "{name}={value}: {output}"
        );
    }
    let same = [
        ("DATABASE_URL", url.as_str()),
        ("ROUSE_UI_OPERATOR_TOKEN", OPERATOR),
        ("ROUSE_UI_VIEWER_TOKEN", OPERATOR),
    ];
    let (_, output) = Host::rouse(&["ui", "--http", "127.0.0.1:0"], &same).exit(TIMEOUT);
    assert!(output.contains("are the same"), "{output}");
}
