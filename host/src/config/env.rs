//! The environment, read in one place.

use std::env::VarError;
use std::ffi::OsStr;
use std::path::PathBuf;

use anyhow::bail;

use crate::setting::Entry;

/// The environment of this process. Modules that need a variable receive this, or the value.
#[derive(Debug, Clone, Copy, Default)]
pub struct Environment;

impl Environment {
    /// The variables that Rouse reads, in addition to those that `rouse.toml` names for secrets.
    pub const VARIABLES: &'static [Entry] = &[
        Entry::new(
            "DATABASE_URL",
            "a URL",
            "`PG*`, else a `rouse dev` that runs in this folder",
            "The database",
        )
        .overridden_by(&["--database-url"]),
        Entry::new(
            "PG*",
            "as for libpq",
            "none",
            "`PGHOST`, `PGPASSFILE` and the others complete `DATABASE_URL`, or replace it",
        ),
        Entry::new(
            "ROUSE_LISTEN_URL",
            "a URL",
            "the database's own",
            "The address for notifications, if `DATABASE_URL` points to a transaction pooler",
        )
        .overridden_by(&["--listen-url"]),
        Entry::new(
            "ROUSE_DATA_DIR",
            "a path",
            "`./.rouse/pg`",
            "The data folder of the private Postgres",
        )
        .overridden_by(&["--data-dir"]),
        Entry::new(
            "ROUSE_PG_BIN",
            "a path",
            "`PATH` and the usual folders",
            "The folder with the programs of Postgres, for `rouse dev` and `rouse postgres`",
        ),
        Entry::new(
            "ROUSE_INVOKE_TOKEN",
            "a token",
            "`invoke_token_file` of rouse.toml",
            "The token that callers of `/invoke` and `/jobs` need; or several tokens, one per line",
        ),
        Entry::new(
            "ROUSE_FAIR_SHARE",
            "a JSON object with a table for each queue",
            "`fair_share` of rouse.toml",
            "How queues are shared, such as `{\"mail\": {\"policy\": \"drr\"}}`; for these queues it replaces the tables of rouse.toml",
        ),
        Entry::new(
            "ROUSE_UI",
            "`on` or `off`",
            "`on`",
            "Whether a host with `--http` serves the dashboard",
        ),
        Entry::new(
            "ROUSE_UI_DATABASE_URL",
            "a URL",
            "the host's own",
            "The login of the dashboard: `rouse_observer` to read, `rouse_operator` to change",
        ),
        Entry::new(
            "ROUSE_UI_OPERATOR_TOKEN",
            "a token",
            "none",
            "The token of operators of the dashboard",
        ),
        Entry::new(
            "ROUSE_UI_VIEWER_TOKEN",
            "a token",
            "none",
            "The token of viewers of the dashboard; if it is set, reading needs a sign-in",
        ),
        Entry::new(
            "ROUSE_UI_USER_HEADER",
            "the name of a header",
            "none",
            "The header in which a proxy sends the name of the authenticated user",
        ),
        Entry::new(
            "ROUSE_UI_OPERATORS",
            "names, separated by commas",
            "none",
            "The users behind the proxy who are operators",
        ),
        Entry::new(
            "ROUSE_UI_NAME",
            "a string",
            "none",
            "The name of this installation, shown on every page of the dashboard",
        ),
        Entry::new(
            "ROUSE_UI_COLOUR",
            "such as `#c2410c`",
            "none",
            "The colour of this installation on the dashboard",
        ),
        Entry::new(
            "ROUSE_UI_TRACE_URL",
            "a URL with `{trace}`",
            "none",
            "The address of a [trace](../guides/traces.md), to which the pages of jobs link",
        ),
        Entry::new(
            "ROUSE_UI_PREFIX",
            "a path such as `/ops`",
            "none",
            "The path that a proxy adds before `/ui`",
        ),
        Entry::new(
            "OTEL_*",
            "as for OpenTelemetry",
            "nothing is exported",
            "`OTEL_EXPORTER_OTLP_ENDPOINT` exports traces and the logs of guests; the [guide](../guides/traces.md#settings) lists the others",
        ),
        Entry::new(
            "TRACEPARENT",
            "a W3C traceparent",
            "none",
            "The trace of the jobs of `rouse enqueue`, unless it has `--trace`",
        ),
        Entry::new(
            "ROUSE_CACHE_DIR",
            "a path",
            "`rouse` in `XDG_CACHE_HOME`, else in `~/.cache`",
            "The folder of the code cache",
        )
        .overridden_by(&["cache_dir"]),
        Entry::new(
            "ROUSE_LOG",
            "such as `info,rouse=debug`",
            "depends on the command",
            "The filter of log lines",
        ),
    ];

    /// Rejects variables that Rouse reads and that are not UTF-8: [`get`](Self::get) would treat them as unset, and
    /// another database or a weaker setting would be used.
    ///
    /// # Errors
    /// If there is one. The error names the variable, but does not contain its value.
    pub fn check(self) -> anyhow::Result<()> {
        match std::env::vars_os().find(|(name, value)| is_broken(name, value)) {
            Some((name, _)) => bail!("{} is not UTF-8", name.display()),
            None => Ok(()),
        }
    }

    /// The variable's value; `None` if it is unset, empty or not UTF-8.
    pub fn get(self, name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    /// `$DATABASE_URL`.
    pub fn database_url(self) -> Option<String> {
        self.get("DATABASE_URL")
    }

    /// `$ROUSE_LISTEN_URL`: the address for notifications, if it is not the database's own.
    pub fn listen_url(self) -> Option<String> {
        self.get("ROUSE_LISTEN_URL")
    }

    /// The value of a variable that restricts access; `None` if it is unset.
    ///
    /// # Errors
    /// If it is set, and is empty or not UTF-8: an operator who sets it does not want to run without it.
    pub fn restriction(self, name: &str) -> anyhow::Result<Option<String>> {
        restriction(name, std::env::var(name))
    }

    /// `$ROUSE_FAIR_SHARE`: how queues are shared.
    pub fn fair_share(self) -> Option<String> {
        self.get("ROUSE_FAIR_SHARE")
    }

    /// `$ROUSE_DATA_DIR`: the folder in which `rouse dev` keeps its Postgres.
    pub fn data_dir(self) -> Option<PathBuf> {
        self.get("ROUSE_DATA_DIR").map(PathBuf::from)
    }

    /// The folder of the code cache: `$ROUSE_CACHE_DIR`, else `rouse` in `$XDG_CACHE_HOME`, else in `~/.cache`.
    pub fn cache_dir(self) -> Option<PathBuf> {
        cache_dir(|name| self.get(name))
    }

    /// `$ROUSE_LOG`: the log filter.
    pub fn log_filter(self) -> Option<String> {
        self.get("ROUSE_LOG")
    }

    /// The machine's name; `unknown` if the system does not give it.
    pub fn hostname(self) -> String {
        rustix::system::uname()
            .nodename()
            .to_str()
            .map_or_else(|_| "unknown".into(), str::to_string)
    }
}

/// Folders that contain files which Rouse reads, such as `~/.postgresql/root.crt` and the code cache.
const FOLDERS: [&str; 2] = ["HOME", "XDG_CACHE_HOME"];

/// True for a variable that Rouse reads, whose value is not UTF-8.
fn is_broken(name: &OsStr, value: &OsStr) -> bool {
    let is_read = |name: &str| {
        let keys = Environment::VARIABLES.iter().map(|entry| entry.key);
        keys.chain(FOLDERS).any(|key| match key.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == key,
        })
    };
    value.to_str().is_none() && name.to_str().is_some_and(is_read)
}

fn restriction(name: &str, value: Result<String, VarError>) -> anyhow::Result<Option<String>> {
    match value {
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => bail!("{name} is not UTF-8"),
        Ok(value) if value.is_empty() => {
            bail!("{name} is set but empty: give it a value, or unset it")
        }
        Ok(value) => Ok(Some(value)),
    }
}

fn cache_dir(get: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    // The XDG specification requires that relative paths are ignored.
    let absolute = |name: &str| get(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
    let home = || absolute("HOME").map(|home| home.join(".cache"));
    get("ROUSE_CACHE_DIR")
        .map(PathBuf::from)
        .or_else(|| Some(absolute("XDG_CACHE_HOME").or_else(home)?.join("rouse")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn a_variable_that_restricts_access_has_a_value_or_is_unset() {
        let read = |value| restriction("X", value).map_err(|error| error.to_string());
        assert_eq!(read(Err(VarError::NotPresent)), Ok(None));
        assert_eq!(read(Ok("secret".into())), Ok(Some("secret".into())));
        let empty = read(Ok(String::new())).unwrap_err();
        assert!(empty.contains("X is set but empty"), "{empty}");
        let broken = read(Err(VarError::NotUnicode("secret".into()))).unwrap_err();
        assert_eq!(broken, "X is not UTF-8");
    }

    #[test]
    fn variables_that_rouse_reads_are_utf_8() {
        let latin_1 = OsStr::from_bytes(b"caf\xe9");
        for name in [
            "DATABASE_URL",
            "ROUSE_LISTEN_URL",
            "PGSSLROOTCERT",
            "OTEL_SERVICE_NAME",
            "HOME",
            "XDG_CACHE_HOME",
        ] {
            assert!(is_broken(OsStr::new(name), latin_1), "{name}");
            assert!(!is_broken(OsStr::new(name), OsStr::new("café")), "{name}");
        }
        assert!(!is_broken(OsStr::new("EDITOR"), latin_1));
    }

    #[test]
    fn the_environment_names_the_folder_of_the_code_cache() {
        let dir = |set: &[(&str, &str)]| {
            let found = cache_dir(|name| {
                let set = set.iter().find(|(key, _)| *key == name);
                set.map(|(_, value)| (*value).to_string())
            });
            found.map(|dir| dir.display().to_string())
        };
        let home = ("HOME", "/home/a");
        assert_eq!(dir(&[home]).as_deref(), Some("/home/a/.cache/rouse"));
        let xdg = ("XDG_CACHE_HOME", "/fast");
        assert_eq!(dir(&[home, xdg]).as_deref(), Some("/fast/rouse"));
        assert_eq!(
            dir(&[home, ("XDG_CACHE_HOME", "fast")]).as_deref(),
            Some("/home/a/.cache/rouse")
        );
        assert_eq!(
            dir(&[home, xdg, ("ROUSE_CACHE_DIR", "own")]).as_deref(),
            Some("own")
        );
        assert_eq!(dir(&[]), None);
    }
}
