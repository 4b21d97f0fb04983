//! The SQL statements that a handler may run, and the limits on them.

use crate::job::{SqlLimits, Statement};

/// The operator's grant of statements to a handler or a family of handlers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlGrant {
    /// The statements; `None` means all that the module declares.
    pub statements: Option<Vec<String>>,
    /// The limits.
    pub limits: SqlLimits,
}

/// The statements that one handler may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantedSql {
    /// The table of `rouse.toml` that grants them: it names the login.
    pub table: String,
    /// Declared by the module, and granted.
    pub statements: Vec<Statement>,
    /// The limits.
    pub limits: SqlLimits,
}

impl GrantedSql {
    /// The statement with this name.
    pub fn statement(&self, name: &str) -> Option<&Statement> {
        self.statements.iter().find(|it| it.name == name)
    }

    /// Keeps only the statements that a job's attenuation leaves.
    pub(in crate::sandbox) fn retain(mut self, leaves: impl Fn(&str) -> bool) -> Self {
        self.statements.retain(|it| leaves(&it.name));
        self
    }
}

impl SqlGrant {
    /// The declared statements that it covers.
    pub(in crate::sandbox) fn granted(&self, table: &str, declared: &[Statement]) -> GrantedSql {
        let covers = |it: &&Statement| {
            self.statements
                .as_ref()
                .is_none_or(|names| names.contains(&it.name))
        };
        GrantedSql {
            table: table.to_owned(),
            statements: declared.iter().filter(covers).cloned().collect(),
            limits: self.limits,
        }
    }
}
