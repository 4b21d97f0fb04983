//! The environment, read in one place.

use std::path::PathBuf;

/// The environment of this process. Rooms that need a variable are handed this, or its value.
#[derive(Debug, Clone, Copy, Default)]
pub struct Environment;

impl Environment {
    /// The variable's value; none where it is unset, empty or no UTF-8.
    pub fn get(self, name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    /// `$DATABASE_URL`.
    pub fn database_url(self) -> Option<String> {
        self.get("DATABASE_URL")
    }

    /// `$ROUSE_LISTEN_URL`: where to listen for notifications, if not at the database's own address.
    pub fn listen_url(self) -> Option<String> {
        self.get("ROUSE_LISTEN_URL")
    }

    /// `$ROUSE_INVOKE_TOKEN`: what invocations have to show.
    pub fn invoke_token(self) -> Option<String> {
        self.get("ROUSE_INVOKE_TOKEN")
    }

    /// `$ROUSE_DATA_DIR`: where `rouse dev` keeps its Postgres.
    pub fn data_dir(self) -> Option<PathBuf> {
        self.get("ROUSE_DATA_DIR").map(PathBuf::from)
    }

    /// `$ROUSE_LOG`: the log filter.
    pub fn log_filter(self) -> Option<String> {
        self.get("ROUSE_LOG")
    }

    /// The machine's name; `unknown` where it cannot be told.
    pub fn hostname(self) -> String {
        rustix::system::uname()
            .nodename()
            .to_str()
            .map_or_else(|_| "unknown".into(), str::to_string)
    }
}
