//! Errors that take the place of a page.

use axum::http::StatusCode;

use crate::store::StoreError;

/// Why there is no page.
pub(super) struct Problem {
    pub(super) status: StatusCode,
    pub(super) title: &'static str,
    pub(super) why: String,
    /// True for messages from the database, which anonymous users do not see.
    pub(super) is_of_database: bool,
}

impl Problem {
    pub(super) fn unknown(why: String) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            title: "Not found",
            why,
            is_of_database: false,
        }
    }

    pub(super) fn invalid(why: String) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            title: "Invalid request",
            why,
            is_of_database: false,
        }
    }

    pub(super) fn busy(why: String) -> Self {
        Self {
            status: StatusCode::TOO_MANY_REQUESTS,
            title: "Too many changes",
            why,
            is_of_database: false,
        }
    }

    pub(super) fn crowded() -> Self {
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            title: "Too many requests",
            why: "Too many users who have not signed in are waiting for pages. Try again in a few seconds.".into(),
            is_of_database: false,
        }
    }

    pub(super) fn needs_sign_in(what: &str) -> Self {
        Self {
            status: StatusCode::FORBIDDEN,
            title: "Not allowed",
            why: format!("Sign in to {what}."),
            is_of_database: false,
        }
    }

    pub(super) fn forbidden(what: &str) -> Self {
        Self {
            status: StatusCode::FORBIDDEN,
            title: "Not allowed",
            why: format!(
                "The login of this dashboard may not read {what}. It needs the role rouse_observer, and rouse_operator to change something; \
                 ROUSE_UI_DATABASE_URL can name another login."
            ),
            is_of_database: false,
        }
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        let is_refused = error.code().is_some_and(|code| code.code() == "42501");
        Self {
            status: match is_refused {
                true => StatusCode::FORBIDDEN,
                false => StatusCode::SERVICE_UNAVAILABLE,
            },
            title: match is_refused {
                true => "Not allowed",
                false => "The database does not respond",
            },
            why: error.to_string(),
            is_of_database: true,
        }
    }
}
