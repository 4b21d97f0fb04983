//! Updates of pages: the part of a page that changes is rendered again, and is sent if it has changed (server-sent
//! events).
//!
//! Users who look at the same page with the same permissions share one task. It ends when the last of them leaves, and
//! when the page no longer exists. If the database does not respond, the connections are closed, and the browsers try
//! again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Extension;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, Uri};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{self, Stream};
use rouse_display::pages::{Chrome, Role, live_main};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time;

use super::access::User;
use super::cached::pause;
use super::view::View;
use super::views::{self, Shown};
use super::{Ui, pairs, path_of};

/// The maximum number of pages that are updated at the same time.
const PAGES_MAX: usize = 64;
/// The maximum number of connections of users who have signed in, or are on this machine.
const USERS_MAX: usize = 80;
/// The maximum number of connections of other users, and of pages that are updated for them.
const ANONYMOUS_MAX: usize = 16;
/// The interval at which an empty comment is sent, so that proxies keep the connection open.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// After this time, a browser has to connect again, so that the role of its user is checked again.
const CHECKED_EVERY: Duration = Duration::from_secs(300);

/// The current state of a page.
#[derive(Debug, Clone, PartialEq)]
enum Page {
    /// It has not been read yet.
    Unread,
    /// Its HTML.
    Is(Arc<str>),
    /// The page no longer exists.
    Gone,
    /// It cannot be read.
    Lost,
}

/// A page that is being updated.
struct Followed {
    /// The role of its users.
    role: Role,
    page: watch::Sender<Page>,
}

/// The pages that are being updated, and permits for the connections of users.
#[derive(Clone)]
pub(super) struct Streams {
    pages: Arc<Mutex<HashMap<String, Followed>>>,
    users: Arc<Semaphore>,
    anonymous: Arc<Semaphore>,
}

impl Default for Streams {
    fn default() -> Self {
        Self {
            pages: Arc::default(),
            users: Arc::new(Semaphore::new(USERS_MAX)),
            anonymous: Arc::new(Semaphore::new(ANONYMOUS_MAX)),
        }
    }
}

impl Streams {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Followed>> {
        // Only the allocator can panic while the lock is held.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A permit for one more connection of a user with this role.
    fn permit(&self, role: Role) -> Option<OwnedSemaphorePermit> {
        let permits = match role {
            Role::Nobody | Role::Anonymous => &self.anonymous,
            Role::Viewer | Role::Operator => &self.users,
        };
        permits.clone().try_acquire_owned().ok()
    }
}

/// One connection.
struct Following {
    ui: Ui,
    pages: watch::Receiver<Page>,
    until: time::Instant,
    has_ended: bool,
    _permit: OwnedSemaphorePermit,
}

/// `GET /ui/live/…`: updates of the page at the rest of the path.
pub(super) async fn stream(
    State(ui): State<Ui>,
    Extension(user): Extension<User>,
    uri: Uri,
    RawQuery(query): RawQuery,
) -> Response {
    let path = path_of(&uri).strip_prefix("/live").unwrap_or_default();
    let Some(view) = View::from_path(path) else {
        return (StatusCode::NOT_FOUND, "there is no such page\n").into_response();
    };
    let full = (
        StatusCode::SERVICE_UNAVAILABLE,
        "too many pages are being updated\n",
    );
    let Some(permit) = ui.streams.permit(user.role) else {
        return full.into_response();
    };
    let query = query.unwrap_or_default();
    // Everything that the page depends on: the forms of an operator contain a token for the operator's name.
    let name = match user.role {
        Role::Operator => user.name.as_str(),
        Role::Nobody | Role::Anonymous | Role::Viewer => "",
    };
    let key = format!("{:?} {name} {path}?{query}", user.role);
    let Some(pages) = follow(&ui, key, view, query, ui.chrome(&user)) else {
        return full.into_response();
    };
    let following = Following {
        ui,
        pages,
        until: time::Instant::now() + CHECKED_EVERY,
        has_ended: false,
        _permit: permit,
    };
    Sse::new(events(following))
        .keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
        .into_response()
}

/// The events of one connection, until the page or the host ends, or the role of the user has to be checked again.
fn events(following: Following) -> impl Stream<Item = Result<Event, axum::Error>> {
    stream::unfold(following, async |mut it| {
        if it.has_ended {
            return None;
        }
        let event = loop {
            let page = tokio::select! {
                changed = it.pages.changed() => {
                    changed.ok()?;
                    it.pages.borrow_and_update().clone()
                }
                () = time::sleep_until(it.until) => {
                    it.has_ended = true;
                    break Event::default().event("again").data("again");
                }
                () = it.ui.stopping.cancelled() => return None,
            };
            match page {
                Page::Unread => {}
                Page::Is(html) => break Event::default().event("page").data(&*html),
                Page::Gone => {
                    it.has_ended = true;
                    break Event::default().event("gone").data("gone");
                }
                Page::Lost => return None,
            }
        };
        Some((Ok(event), it))
    })
}

/// The page, updated by the one task for it; `None` if there are too many pages.
fn follow(
    ui: &Ui,
    key: String,
    view: View,
    query: String,
    chrome: Chrome,
) -> Option<watch::Receiver<Page>> {
    let mut pages = ui.streams.lock();
    if let Some(followed) = pages.get(&key) {
        let mut page = followed.page.subscribe();
        // Sends the current page at once.
        page.mark_changed();
        return Some(page);
    }
    if is_full(&pages, chrome.role) {
        return None;
    }
    let (sender, page) = watch::channel(Page::Unread);
    let followed = Followed {
        role: chrome.role,
        page: sender.clone(),
    };
    pages.insert(key.clone(), followed);
    let listed = Listed {
        streams: ui.streams.clone(),
        key,
        page: sender,
    };
    tokio::spawn(update(ui.clone(), listed, view, query, chrome));
    Some(page)
}

/// True if no further page is updated for users with this role. A page that nobody follows any more stays on the list
/// until the database has responded, so connections alone would not keep anonymous users from filling the list.
fn is_full(pages: &HashMap<String, Followed>, role: Role) -> bool {
    let is_anonymous = |role: Role| role < Role::Viewer;
    let anonymous = || pages.values().filter(|it| is_anonymous(it.role)).count();
    pages.len() >= PAGES_MAX || is_anonymous(role) && anonymous() >= ANONYMOUS_MAX
}

/// A page on the list. It leaves the list when its task ends, for whatever reason.
struct Listed {
    streams: Streams,
    key: String,
    page: watch::Sender<Page>,
}

impl Listed {
    /// Leaves the list if nobody follows the page. This happens under the lock: a user who arrives now either finds the
    /// task, or starts another.
    fn leaves_unread(&self) -> bool {
        let mut pages = self.streams.lock();
        let is_unread = self.page.receiver_count() == 0;
        if is_unread {
            self.leave(&mut pages);
        }
        is_unread
    }

    fn leave(&self, pages: &mut HashMap<String, Followed>) {
        // Another task may have the key by now.
        if pages
            .get(&self.key)
            .is_some_and(|followed| followed.page.same_channel(&self.page))
        {
            pages.remove(&self.key);
        }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.leave(&mut self.streams.lock());
    }
}

/// The pause after a read that took this long, and the one before it. A single slow read may have waited for a new
/// connection, or for a busy machine: after 0.5 s, the page would not change for more than a minute.
fn pause_after(took: Duration, before: Duration) -> Duration {
    pause(took.min(before))
}

/// Reads the page repeatedly until nobody follows it, or it cannot be read.
async fn update(ui: Ui, listed: Listed, view: View, query: String, chrome: Chrome) {
    let page = &listed.page;
    let live = format!("{}/live{}?{query}", ui.base(), view.path());
    // The notice of an action is above the part that is updated.
    let chrome = Chrome {
        notice: None,
        ..chrome
    };
    let pairs = pairs(&query);
    let mut took_before = Duration::ZERO;
    while !ui.stopping.is_cancelled() {
        let since = Instant::now();
        let now = match views::render(&ui, &chrome, &view, &pairs).await {
            Ok(Shown { body, .. }) => {
                // Events cannot have carriage returns.
                let html = live_main(&live, &body).into_string().replace('\r', "");
                Page::Is(html.into())
            }
            Err(problem) if problem.status.is_client_error() => Page::Gone,
            Err(_) => Page::Lost,
        };
        let has_ended = !matches!(now, Page::Is(_));
        page.send_if_modified(|before| {
            let differs = *before != now;
            if differs {
                *before = now;
            }
            differs
        });
        if has_ended {
            return;
        }
        let took = since.elapsed();
        tokio::select! {
            () = time::sleep(pause_after(took, took_before)) => {}
            () = page.closed() => {}
            () = ui.stopping.cancelled() => {}
        }
        took_before = took;
        if listed.leaves_unread() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_two_slow_reads_in_a_row_make_the_updates_rare() {
        let (fast, slow) = (Duration::from_millis(5), Duration::from_millis(500));
        let expected = Duration::from_secs(2);
        assert_eq!(pause_after(slow, Duration::ZERO), expected);
        assert_eq!(pause_after(slow, fast), expected);
        assert_eq!(pause_after(fast, slow), expected);
        assert_eq!(pause_after(slow, slow), Duration::from_secs(75));
    }
}
