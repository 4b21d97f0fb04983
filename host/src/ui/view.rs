//! The pages of the dashboard and their paths.

use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use rouse_display::pages::NavPage;

/// A page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum View {
    Overview,
    Jobs,
    Job(i64),
    Flows,
    Flow(i64),
    Schedules,
    Schedule(String),
    Queues,
    Queue(String),
    Workers,
    Worker(String),
    Handlers,
    Handler(String),
    Audit,
    Bulk(u64),
}

impl View {
    /// The page at this path, the part after [`super::PATH`].
    pub(super) fn from_path(path: &str) -> Option<Self> {
        let path = path.strip_prefix('/')?;
        let parts: Vec<&str> = path.split('/').collect();
        let name = |part: &str| {
            let name = percent_decode_str(part).decode_utf8().ok()?;
            (!name.is_empty()).then(|| name.into_owned())
        };
        let id = |part: &str| part.parse().ok().filter(|id: &i64| *id > 0);
        Some(match parts[..] {
            [""] => Self::Overview,
            ["jobs"] => Self::Jobs,
            ["jobs", part] => Self::Job(id(part)?),
            ["flows"] => Self::Flows,
            ["flows", part] => Self::Flow(id(part)?),
            ["schedules"] => Self::Schedules,
            ["schedules", part] => Self::Schedule(name(part)?),
            ["queues"] => Self::Queues,
            ["queues", part] => Self::Queue(name(part)?),
            ["workers"] => Self::Workers,
            ["workers", part] => Self::Worker(name(part)?),
            ["handlers"] => Self::Handlers,
            ["handlers", part] => Self::Handler(name(part)?),
            ["audit"] => Self::Audit,
            ["bulk", part] => Self::Bulk(part.parse().ok()?),
            _ => return None,
        })
    }

    /// Its path.
    pub(super) fn path(&self) -> String {
        let named = |place: &str, name: &str| {
            format!("/{place}/{}", utf8_percent_encode(name, NON_ALPHANUMERIC))
        };
        match self {
            Self::Overview => "/".to_owned(),
            Self::Jobs => "/jobs".to_owned(),
            Self::Job(id) => format!("/jobs/{id}"),
            Self::Flows => "/flows".to_owned(),
            Self::Flow(id) => format!("/flows/{id}"),
            Self::Schedules => "/schedules".to_owned(),
            Self::Schedule(name) => named("schedules", name),
            Self::Queues => "/queues".to_owned(),
            Self::Queue(name) => named("queues", name),
            Self::Workers => "/workers".to_owned(),
            Self::Worker(name) => named("workers", name),
            Self::Handlers => "/handlers".to_owned(),
            Self::Handler(name) => named("handlers", name),
            Self::Audit => "/audit".to_owned(),
            Self::Bulk(number) => format!("/bulk/{number}"),
        }
    }

    pub(super) fn nav_page(&self) -> NavPage {
        match self {
            Self::Overview => NavPage::Overview,
            Self::Jobs | Self::Job(_) | Self::Bulk(_) => NavPage::Jobs,
            Self::Flows | Self::Flow(_) => NavPage::Flows,
            Self::Schedules | Self::Schedule(_) => NavPage::Schedules,
            Self::Queues | Self::Queue(_) => NavPage::Queues,
            Self::Workers | Self::Worker(_) => NavPage::Workers,
            Self::Handlers | Self::Handler(_) => NavPage::Handlers,
            Self::Audit => NavPage::Audit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_has_one_path_and_is_found_by_it() {
        for view in [
            View::Overview,
            View::Jobs,
            View::Job(i64::MAX),
            View::Flow(7),
            View::Queue("a b/c:ü".into()),
            View::Schedule("nightly".into()),
            View::Worker("w-1".into()),
            View::Handler("email.send".into()),
            View::Audit,
            View::Bulk(3),
        ] {
            assert_eq!(
                View::from_path(&view.path()).as_ref(),
                Some(&view),
                "{}",
                view.path()
            );
        }
        for path in [
            "",
            "/nothing",
            "/jobs/0",
            "/jobs/x",
            "/jobs/1/2/3",
            "/queues/",
            "/queues/%ff",
        ] {
            assert_eq!(View::from_path(path), None, "{path}");
        }
    }
}
