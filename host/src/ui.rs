//! The dashboard: reads rows, checks the user's permissions, sends the pages of `rouse-display`.
//!
//! It reads as `rouse … --json` does, through a store of its own, so that users and workers never wait for each other's
//! connections. It never writes except for an operator's form (`actions`). Values that several users look at are read
//! once (`cached`), and each read for updates is followed by a pause in proportion to its duration, so that ten users
//! with the same page open cost the database as much as one.

mod access;
mod actions;
mod bulk;
mod cached;
mod live;
mod problem;
mod raw;
mod reads;
mod samples;
mod view;
mod views;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, RawQuery, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::{get, post};
use rouse_display::pages::{self, Chrome, Pairs, Role, live_main, message, page};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::sandbox::Catalog;
use crate::store::Store;

use access::User;
pub use access::{Access, Proxy, Tokens};
use bulk::Bulks;
use live::Streams;
use problem::Problem;
use reads::Reads;
use view::View;
use views::Shown;

/// The path of the dashboard.
pub const PATH: &str = "/ui";
/// The maximum number of connections of users, for pages and their updates.
pub const CONNECTIONS_MAX: usize = 128;
/// The maximum number of pages that are read for anonymous users at once.
const ANONYMOUS_READS_MAX: usize = 2;
/// The maximum number of requests of anonymous users that wait for their pages at once. Each keeps a connection of the
/// host open, which may be needed for its health.
const ANONYMOUS_REQUESTS_MAX: usize = 32;
/// The maximum size of a form, in bytes: a selection of jobs, or the result of one.
const FORM_BYTES_MAX: usize = 4 << 20;
/// The maximum size of a sign-in form, in bytes: a token, and the page to go to.
const SIGN_IN_BYTES_MAX: usize = 16 << 10;
/// The restrictions of a page: no inline script, no inline style, no frame, nothing from elsewhere.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

/// The appearance and the address of this installation.
#[derive(Debug, Clone, Default)]
pub struct Look {
    /// Its name; empty: none.
    pub instance: String,
    /// Its colour, as `#rrggbb`; empty: none.
    pub colour: String,
    /// The address of a trace in another program, with `{trace}` for its id; empty: none.
    pub trace_url: String,
    /// The path before [`PATH`] in the addresses that browsers see, for instance `/ops`; empty: nothing.
    pub prefix: String,
}

/// The dashboard. Cheap to clone.
#[derive(Clone)]
pub struct Ui {
    reads: Arc<Reads>,
    access: Arc<Access>,
    look: Arc<Look>,
    streams: Streams,
    bulks: Bulks,
    /// Permits for pages that are read for anonymous users, so that they leave connections for other users.
    anonymous_reads: Arc<Semaphore>,
    /// Permits for requests of anonymous users that wait for their pages.
    anonymous_requests: Arc<Semaphore>,
    stopping: CancellationToken,
}

impl std::fmt::Debug for Ui {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ui")
            .field("look", &self.look)
            .finish_non_exhaustive()
    }
}

impl Ui {
    /// A dashboard for this database. `catalog`: the modules of this host, if it has any. It runs until `stopping` is
    /// cancelled.
    pub fn start(
        store: Store,
        catalog: Option<Arc<Catalog>>,
        access: Access,
        look: Look,
        stopping: CancellationToken,
    ) -> Self {
        let reads = Arc::new(Reads::new(store.cancelling(), catalog));
        tokio::spawn(samples::sample_forever(
            reads.store.clone(),
            reads.samples.clone(),
            stopping.clone(),
        ));
        Self {
            reads,
            access: Arc::new(access),
            look: Arc::new(look),
            streams: Streams::default(),
            bulks: Bulks::default(),
            anonymous_reads: Arc::new(Semaphore::new(ANONYMOUS_READS_MAX)),
            anonymous_requests: Arc::new(Semaphore::new(ANONYMOUS_REQUESTS_MAX)),
            stopping,
        }
    }

    /// The routes of the pages.
    pub fn router(self) -> Router {
        let at = |path: &str| format!("{PATH}{path}");
        let assets = Router::new()
            .route(
                &at("/assets/rouse.css"),
                get(async || asset("text/css", pages::STYLE)),
            )
            .route(
                &at("/assets/rouse.js"),
                get(async || asset("text/javascript", pages::SCRIPT)),
            )
            .route(
                &at("/assets/icon.svg"),
                get(async || asset("image/svg+xml", pages::ICON)),
            )
            .route("/", get(to_the_overview))
            .route(PATH, get(to_the_overview));
        Router::new()
            .route(
                &at("/sign-in"),
                get(actions::sign_in_page)
                    .post(actions::sign_in)
                    .layer(DefaultBodyLimit::max(SIGN_IN_BYTES_MAX)),
            )
            .route(&at("/sign-out"), post(actions::sign_out))
            .route(&at("/live/"), get(live::stream))
            .route(&at("/live/{*path}"), get(live::stream))
            .route(&at("/job"), get(to_the_job))
            .route(&at("/jobs/{id}/payload"), get(raw::payload))
            .route(&at("/jobs/{id}/result"), get(raw::result))
            .route(&at("/"), get(show))
            .route(&at("/{*path}"), get(show).post(actions::act))
            .layer(DefaultBodyLimit::max(FORM_BYTES_MAX))
            .layer(middleware::from_fn_with_state(self.clone(), admit))
            .merge(assets)
            .layer(middleware::map_response(hardened))
            .with_state(self)
    }

    /// The path under which browsers find the dashboard.
    fn base(&self) -> String {
        format!("{}{PATH}", self.look.prefix)
    }

    /// The frame of a page for this user.
    fn chrome(&self, user: &User) -> Chrome {
        Chrome {
            base: self.base(),
            instance: self.look.instance.clone(),
            colour: self.look.colour.clone(),
            trace_url: self.look.trace_url.clone(),
            role: user.role,
            user: user.name.clone(),
            csrf: self.access.form_token(user),
            can_sign_in: self.access.has_tokens(),
            can_sign_out: user.has_session,
            version: asset_version(),
            notice: user.notice.clone(),
        }
    }
}

async fn to_the_overview(State(ui): State<Ui>) -> Redirect {
    Redirect::to(&format!("{}/", ui.base()))
}

/// The page of the job whose id was entered.
async fn to_the_job(
    State(ui): State<Ui>,
    axum::Extension(user): axum::Extension<User>,
    RawQuery(query): RawQuery,
) -> Response {
    let query = pairs(&query.unwrap_or_default());
    match query.get("job").and_then(|id| id.parse::<i64>().ok()) {
        Some(id) => Redirect::to(&format!("{}/jobs/{id}", ui.base())).into_response(),
        None => {
            let why = "The id of a job is a number, such as 42.";
            ui.problem_for(&user, StatusCode::BAD_REQUEST, "Invalid request", why)
        }
    }
}

/// The part of the path after [`PATH`].
fn path_of(uri: &Uri) -> &str {
    uri.path().strip_prefix(PATH).unwrap_or_default()
}

/// A part of the hash of the assets.
fn asset_version() -> String {
    use sha2::{Digest as _, Sha256};
    static VERSION: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let hash = || {
        let mut hash = Sha256::new();
        for asset in [pages::STYLE, pages::SCRIPT, pages::ICON] {
            hash.update(asset);
        }
        let digest = hash.finalize();
        digest
            .iter()
            .take(6)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    };
    VERSION.get_or_init(hash).clone()
}

fn asset(kind: &'static str, text: &'static str) -> Response {
    // The address contains the hash of the assets.
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "public, max-age=31536000, immutable"),
    ];
    (headers, text).into_response()
}

/// Authenticates the user before a body is read.
async fn admit(State(ui): State<Ui>, mut request: axum::extract::Request, next: Next) -> Response {
    let path = path_of(request.uri()).to_owned();
    let is_sign_in = path == "/sign-in";
    let is_form = !request.method().is_safe();
    match ui
        .access
        .user(request.method(), request.headers(), is_sign_in)
    {
        Ok(user) if is_form && user.role < Role::Operator && !is_sign_in && path != "/sign-out" => {
            let why = "You may read this dashboard, but not change anything.";
            ui.problem_for(&user, StatusCode::FORBIDDEN, "Not allowed", why)
        }
        Ok(user) => {
            // A notice is shown once. The response to a form sets a new one.
            let had_notice = user.notice.is_some() && !is_form;
            request.extensions_mut().insert(user);
            let mut response = next.run(request).await;
            if had_notice && !path.starts_with("/live") {
                let gone = ui.access.no_notice(&ui.base());
                response.headers_mut().append(header::SET_COOKIE, gone);
            }
            response
        }
        Err(access::Refused::SignIn) => {
            let query = request.uri().query().map(|query| format!("?{query}"));
            let next = format!("{path}{}", query.unwrap_or_default());
            let next =
                percent_encoding::utf8_percent_encode(&next, percent_encoding::NON_ALPHANUMERIC);
            match request.method().is_safe() && !path.starts_with("/live") {
                true => Redirect::to(&format!("{}/sign-in?next={next}", ui.base())).into_response(),
                false => ui.problem(
                    StatusCode::UNAUTHORIZED,
                    "Sign in",
                    "Sign in, and try again.",
                ),
            }
        }
        Err(access::Refused::Unnamed) => {
            let why = "The proxy in front of the dashboard did not send the name of the user (ROUSE_UI_USER_HEADER).";
            ui.problem(StatusCode::FORBIDDEN, "Refused", why)
        }
        Err(access::Refused::Foreign(why)) => ui.problem(StatusCode::FORBIDDEN, "Refused", &why),
    }
}

impl Ui {
    /// A page with a message, for a user who is not signed in.
    fn problem(&self, status: StatusCode, title: &str, why: &str) -> Response {
        self.problem_for(&User::default(), status, title, why)
    }

    /// The page of a problem. Anonymous users do not see messages from the database, which can name servers and quote
    /// rows.
    fn problem_page(&self, user: &User, problem: &Problem) -> Response {
        let is_hidden = problem.is_of_database && user.role < Role::Viewer;
        if problem.is_of_database {
            tracing::warn!(
                error = problem.why,
                "a page of the dashboard cannot be read"
            );
        }
        let why = match is_hidden {
            true => "The reason is in the log of the host.",
            false => &problem.why,
        };
        self.problem_for(user, problem.status, problem.title, why)
    }

    fn problem_for(&self, user: &User, status: StatusCode, title: &str, why: &str) -> Response {
        let main = live_main("", &message(title, why));
        html(
            status,
            page(&self.chrome(user), None, title, &main).into_string(),
        )
    }
}

fn html(status: StatusCode, text: String) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (status, headers, text).into_response()
}

/// The headers of every response.
async fn hardened(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "same-origin"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ] {
        headers
            .entry(name)
            .or_insert(HeaderValue::from_static(value));
    }
    response
}

/// A page.
async fn show(
    State(ui): State<Ui>,
    axum::Extension(user): axum::Extension<User>,
    uri: Uri,
    RawQuery(query): RawQuery,
) -> Response {
    let query = query.unwrap_or_default();
    let chrome = ui.chrome(&user);
    let Some(view) = View::from_path(path_of(&uri)) else {
        let why = format!("There is no page {}.", path_of(&uri));
        return ui.problem_for(&user, StatusCode::NOT_FOUND, "Not found", &why);
    };
    match views::render_once(&ui, &chrome, &view, &pairs(&query)).await {
        Ok(Shown {
            title,
            body,
            is_live,
        }) => {
            let live = match is_live {
                true => format!("{}/live{}?{query}", ui.base(), path_of(&uri)),
                false => String::new(),
            };
            let main = live_main(&live, &body);
            html(
                StatusCode::OK,
                page(&chrome, Some(view.nav_page()), &title, &main).into_string(),
            )
        }
        Err(problem) => ui.problem_page(&user, &problem),
    }
}

/// The decoded fields of a query or a form.
fn pairs(query: &str) -> Pairs {
    Pairs(
        form_urlencoded::parse(query.as_bytes())
            .into_owned()
            .collect(),
    )
}
