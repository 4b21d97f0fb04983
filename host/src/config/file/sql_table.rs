//! `[handlers."…".sql]`: the SQL statements that a handler may run, and the login that runs them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::de::{Error as _, MapAccess};
use serde::{Deserialize, Deserializer};

use super::File;
use crate::config::env::Environment;
use crate::config::token_file::read_text;
use crate::job::{SqlLimits, pattern_covers};
use crate::sandbox::SqlGrant;
use crate::setting::table::{self, Table};
use crate::setting::{Entry, Overlay};
use crate::store::connect::{Connector, has_password};

/// The statements of a handler.
#[derive(Debug, Default)]
pub(super) struct SqlTable {
    pub(super) login: LoginTable,
    statements: Statements,
    limits: Overlay<SqlLimits>,
}

/// Where the connection string of a login is read from.
#[derive(Debug, Default)]
pub(super) struct LoginTable {
    url: Option<String>,
    env: Option<String>,
    pub(super) file: Option<PathBuf>,
}

/// Which of the declared statements are granted.
#[derive(Debug, Default)]
enum Statements {
    #[default]
    None,
    All,
    These(Vec<String>),
}

impl Table for SqlTable {
    type Numbers = SqlLimits;
    const EXPECTED: &'static str =
        "a table such as { login = { env = \"BILLING_URL\" }, statements = [\"mark_paid\"] }";
    const ENTRIES: &'static [Entry] = &[
        Entry::required(
            "login",
            "a table",
            "The login in Rouse's database that runs the statements, as a connection string: `{ env = \"VARIABLE\" }`, `{ file = \"PATH\" }` (only its owner may read it), or `{ url = \"…\" }` without a password",
        ),
        Entry::required(
            "statements",
            "a list of names, `\"all\"`",
            "The statements of the module that are granted",
        ),
    ];

    fn numbers(&mut self) -> Option<&mut Overlay<SqlLimits>> {
        Some(&mut self.limits)
    }

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "login" => self.login = map.next_value()?,
            "statements" => self.statements = map.next_value()?,
            key => unreachable!("{key} has a row, and is not read"),
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for SqlTable {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        table::read(input)
    }
}

impl Table for LoginTable {
    type Numbers = ();
    const EXPECTED: &'static str = "a table such as { env = \"BILLING_URL\" }";
    const ENTRIES: &'static [Entry] = &[
        Entry::new(
            "url",
            "a connection string without a password",
            "none",
            "The connection string itself",
        ),
        Entry::new(
            "env",
            "a name",
            "none",
            "The environment variable that has the connection string",
        ),
        Entry::new(
            "file",
            "a path",
            "none",
            "The file with the connection string, which only its owner may read; relative to the folder of `rouse.toml`",
        ),
    ];

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "url" => self.url = Some(map.next_value()?),
            "env" => self.env = Some(map.next_value()?),
            "file" => self.file = Some(map.next_value()?),
            key => unreachable!("{key} has a row, and is not read"),
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for LoginTable {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        table::read(input)
    }
}

impl<'de> Deserialize<'de> for Statements {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Word(String),
            Names(Vec<String>),
        }
        match Written::deserialize(input) {
            Ok(Written::Word(word)) if word == "all" => Ok(Self::All),
            Ok(Written::Names(names)) => Ok(Self::These(names)),
            Ok(Written::Word(_)) | Err(_) => Err(D::Error::custom(
                "statements must be a list of names such as [\"mark_paid\"], or \"all\"",
            )),
        }
    }
}

impl SqlTable {
    /// Rejects an invalid table.
    pub(super) fn check(&self) -> Result<(), String> {
        let LoginTable { url, env, file } = &self.login;
        let given = [url.is_some(), env.is_some(), file.is_some()];
        if given.into_iter().filter(|given| *given).count() != 1 {
            return Err("login needs one of url, env and file".into());
        }
        if url.as_deref().is_some_and(has_password) {
            return Err(
                "login: the url has a password; put it into a variable or a file, and name that with env or file"
                    .into(),
            );
        }
        Ok(())
    }

    pub(super) fn grant(&self) -> SqlGrant {
        SqlGrant {
            statements: match &self.statements {
                Statements::None => Some(Vec::new()),
                Statements::All => None,
                Statements::These(names) => Some(names.clone()),
            },
            limits: self.limits.over(&SqlLimits::default()),
        }
    }

    pub(super) fn limits(&self) -> &Overlay<SqlLimits> {
        &self.limits
    }
}

impl LoginTable {
    fn read(&self, folder: &Path, environment: Environment) -> anyhow::Result<Connector> {
        let url = match (&self.url, &self.env, &self.file) {
            (Some(url), _, _) => url.clone(),
            (None, Some(name), _) => environment
                .get(name)
                .with_context(|| format!("the variable {name} is not set"))?,
            (None, None, Some(file)) => read_text(&folder.join(file), "connection string")?,
            (None, None, None) => anyhow::bail!("it has none of url, env and file"),
        };
        let connector = Connector::from_url(&url, &|name| environment.get(name))?;
        Ok(connector)
    }
}

impl File {
    /// The logins of handlers, by the handler name or pattern of their table: of all handlers, or of this one.
    ///
    /// # Errors
    /// If a connection string is missing, is readable by others, or cannot be used. The error names its table.
    pub fn sql_logins(
        &self,
        folder: &Path,
        environment: Environment,
        handler: Option<&str>,
    ) -> anyhow::Result<BTreeMap<String, Connector>> {
        let wanted = |pattern: &str| handler.is_none_or(|name| pattern_covers(pattern, name));
        let tables = self.handlers.iter().filter(|(pattern, _)| wanted(pattern));
        let tables = tables.filter_map(|(pattern, table)| Some((pattern, table.sql.as_ref()?)));
        let logins = tables.map(|(pattern, table)| {
            let login = table.login.read(folder, environment);
            let login = login.with_context(|| {
                format!("read the login of [handlers.\"{pattern}\".sql] in rouse.toml")
            })?;
            Ok((pattern.clone(), login))
        });
        logins.collect()
    }
}
