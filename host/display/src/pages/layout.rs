//! The frame of every page: header, navigation, notices, and the part that is updated.

use maud::{DOCTYPE, Markup, html};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::sanitize::line;

/// The permissions of the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Role {
    /// Nothing, before a sign-in.
    #[default]
    Nobody,
    /// Read, without payloads, results, errors and logs: a user on another machine who has not signed in.
    Anonymous,
    /// Read.
    Viewer,
    /// Read and change.
    Operator,
}

/// The open page, as an entry of the navigation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NavPage {
    /// What happens now, and what needs attention.
    #[default]
    Overview,
    /// Lists of jobs, and individual jobs.
    Jobs,
    /// Graphs of jobs.
    Flows,
    /// Schedules.
    Schedules,
    /// Queues, fair share, gates.
    Queues,
    /// The fleet.
    Workers,
    /// What the fleet can run.
    Handlers,
    /// Admin actions.
    Audit,
}

/// Each with its path, its name, and its key after `g`.
const NAV_PAGES: [(NavPage, &str, &str, &str); 8] = [
    (NavPage::Overview, "/", "Overview", "o"),
    (NavPage::Jobs, "/jobs", "Jobs", "j"),
    (NavPage::Flows, "/flows", "Flows", "f"),
    (NavPage::Schedules, "/schedules", "Schedules", "s"),
    (NavPage::Queues, "/queues", "Queues", "q"),
    (NavPage::Workers, "/workers", "Workers", "w"),
    (NavPage::Handlers, "/handlers", "Handlers", "h"),
    (NavPage::Audit, "/audit", "Audit", "a"),
];

/// How a notice looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// It was done.
    Good,
    /// It was refused, or something is broken.
    Bad,
    /// Information.
    Plain,
}

/// The result of an action, shown once above the page.
#[derive(Debug, Clone)]
pub struct Notice {
    /// How it looks.
    pub tone: Tone,
    /// One or two sentences.
    pub text: String,
}

/// The frame of a page: the address of the dashboard, the user, the notice.
#[derive(Debug, Clone, Default)]
pub struct Chrome {
    /// The path of the dashboard, without a slash at its end, for instance `/ui`.
    pub base: String,
    /// The name of this installation; empty: none.
    pub instance: String,
    /// Its colour, as `#rrggbb`; empty: none.
    pub colour: String,
    /// The permissions of the user.
    pub role: Role,
    /// The name under which the user has signed in; empty on this machine.
    pub user: String,
    /// The token that forms send back; empty if the user can change nothing.
    pub csrf: String,
    /// True if users can sign in.
    pub can_sign_in: bool,
    /// True if this user has signed in with a token.
    pub can_sign_out: bool,
    /// Changes with each build, so that browsers read the new style and script.
    pub version: String,
    /// The address of a trace, with `{trace}` for its id; empty: none.
    pub trace_url: String,
    /// The result of the last action.
    pub notice: Option<Notice>,
}

impl Chrome {
    /// True if the user may change something.
    pub fn may_act(&self) -> bool {
        self.role == Role::Operator
    }

    /// True if the user may see payloads, results, errors and logs.
    pub fn may_read_contents(&self) -> bool {
        self.role >= Role::Viewer
    }

    /// A part of a path or a query.
    pub(super) fn encoded(&self, part: &str) -> String {
        utf8_percent_encode(part, NON_ALPHANUMERIC).to_string()
    }

    /// A form with one button. `asks`: a question before it is sent; empty: none.
    pub(super) fn button(&self, path: &str, label: &str, asks: &str, class: &str) -> Markup {
        html! {
            @if self.may_act() {
                form id={ "do" (path) } class="inline" method="post" action={ (self.base) (path) } {
                    (self.token())
                    button type="submit" class=(class) data-ask=[(!asks.is_empty()).then_some(asks)] { (label) }
                }
            }
        }
    }

    /// The hidden field that shows that a form comes from a page of this dashboard.
    pub(super) fn token(&self) -> Markup {
        html! { input type="hidden" name="csrf" value=(self.csrf); }
    }
}

/// The part of a page that is updated. `live`: the address of its updates; empty: it has none.
pub fn live_main(live: &str, body: &Markup) -> Markup {
    html! {
        main id="main" data-live=[(!live.is_empty()).then_some(live)] { (body) }
    }
}

/// A whole page. `main`: what [`live_main`] returned.
pub fn page(chrome: &Chrome, current: Option<NavPage>, title: &str, main: &Markup) -> Markup {
    let is_live = main.0.starts_with("<main id=\"main\" data-live");
    let title = match chrome.instance.is_empty() {
        true => format!("{} · Rouse", line(title)),
        false => format!("{} · {} · Rouse", line(title), line(&chrome.instance)),
    };
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="referrer" content="same-origin";
                title { (title) }
                link rel="icon" type="image/svg+xml" href={ (chrome.base) "/assets/icon.svg?" (chrome.version) };
                link rel="stylesheet" href={ (chrome.base) "/assets/rouse.css?" (chrome.version) };
                script defer src={ (chrome.base) "/assets/rouse.js?" (chrome.version) } {}
            }
            body {
                a class="skip" href="#main" { "Skip to the content" }
                (header(chrome, current, is_live))
                @if let Some(notice) = &chrome.notice {
                    (shown_notice(notice))
                }
                (main)
                footer { (user(chrome)) }
                (keys())
            }
        }
    }
}

/// A page with a sentence: an error, or that something does not exist.
pub fn message(title: &str, text: &str) -> Markup {
    html! {
        div class="title" { h1 { (line(title)) } }
        section class="card" { p { (line(text)) } }
    }
}

fn header(chrome: &Chrome, current: Option<NavPage>, is_live: bool) -> Markup {
    html! {
        header class="top" {
            div class="bar" {
                a class="brand" href={ (chrome.base) "/" } {
                    img src={ (chrome.base) "/assets/icon.svg?" (chrome.version) } alt="";
                    "Rouse"
                    @if !chrome.instance.is_empty() {
                        span class="instance" {
                            @if is_colour(&chrome.colour) {
                                svg viewBox="0 0 10 10" aria-hidden="true" {
                                    circle cx="5" cy="5" r="5" fill=(chrome.colour) {}
                                }
                            }
                            (line(&chrome.instance))
                        }
                    }
                }
                nav class="pages" aria-label="Pages" {
                    @for (this, path, name, key) in NAV_PAGES {
                        a href={ (chrome.base) (path) } data-key=(key)
                            aria-current=[(current == Some(this)).then_some("page")] { (name) }
                    }
                }
                div class="tools" {
                    @if is_live {
                        button type="button" class="live" title="Live updates: pause or resume (p)" { "live" }
                    }
                    button type="button" class="theme" aria-label="Colours" { "◐" }
                }
            }
        }
    }
}

fn shown_notice(notice: &Notice) -> Markup {
    let (class, role) = match notice.tone {
        Tone::Good => ("notice good", "status"),
        Tone::Bad => ("notice bad", "alert"),
        Tone::Plain => ("notice", "status"),
    };
    html! {
        div class="above" { p class=(class) role=(role) { (line(&notice.text)) } }
    }
}

fn user(chrome: &Chrome) -> Markup {
    html! {
        @match chrome.role {
            Role::Operator => { "You can read and change everything." },
            Role::Viewer => { "You can read everything and change nothing." },
            Role::Nobody => {},
            Role::Anonymous => { "You can read everything except payloads, results, errors and logs, and change nothing." },
        }
        @if !chrome.user.is_empty() { " Signed in as " (line(&chrome.user)) ". " }
        @if chrome.can_sign_out {
            form class="inline" method="post" action={ (chrome.base) "/sign-out" } {
                (chrome.token())
                button type="submit" { "Sign out" }
            }
        } @else if chrome.can_sign_in && chrome.user.is_empty() {
            " " a href={ (chrome.base) "/sign-in" } { "Sign in" }
        }
        " Press " kbd { "?" } " for keyboard shortcuts."
    }
}

fn keys() -> Markup {
    let help = [
        ("g, then the first letter", "go to a page: g j for jobs"),
        ("/", "search"),
        ("j, k", "next and previous row"),
        ("p", "pause live updates, or resume them"),
        ("Esc", "leave a field"),
    ];
    html! {
        dialog class="keys card" aria-label="Keyboard shortcuts" {
            h2 { "Keyboard shortcuts" }
            dl class="facts" {
                @for (key, what) in help { dt { kbd { (key) } } dd { (what) } }
            }
            form method="dialog" { button { "Close" } }
        }
    }
}

/// True for `#` and six hexadecimal digits.
fn is_colour(text: &str) -> bool {
    text.len() == 7 && text.starts_with('#') && text[1..].bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chrome() -> Chrome {
        Chrome {
            base: "/ui".into(),
            instance: "<b>shop</b>".into(),
            colour: "#12ab9f".into(),
            ..Chrome::default()
        }
    }

    #[test]
    fn a_page_escapes_names_and_has_no_inline_script_or_style() {
        let main = live_main("/ui/live/", &message("a", "b"));
        let page = page(&chrome(), Some(NavPage::Jobs), "x", &main).into_string();
        assert!(page.contains("&lt;b&gt;shop"), "{page}");
        assert!(page.contains("fill=\"#12ab9f\""));
        assert!(page.contains("aria-current=\"page\">Jobs"));
        assert!(
            !page.contains("style=") && !page.contains("onclick="),
            "{page}"
        );
        assert!(page.contains("class=\"live\""));
    }

    #[test]
    fn only_operators_have_buttons_and_only_colours_are_written() {
        let mut chrome = chrome();
        assert_eq!(chrome.button("/x", "Do", "", "").into_string(), "");
        chrome.role = Role::Operator;
        chrome.csrf = "abc".into();
        let button = chrome.button("/x", "Do", "sure?", "risky").into_string();
        assert!(button.contains("value=\"abc\"") && button.contains("data-ask=\"sure?\""));
        assert!(!is_colour("red") && !is_colour("#12345g") && is_colour("#00FF00"));
    }
}
