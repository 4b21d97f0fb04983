//! A handler that can run: its manifest, and the operator's grants to it.

use std::sync::Arc;

use crate::job::Statement;
use crate::job::declared::DeclaredSchedule;
use crate::sandbox::capability::{HandlerState, HttpAccess, SqlAccess};
use crate::sandbox::grants::{Granted, Grantings, granted_capabilities, lines, missing};
use crate::sandbox::{
    Attenuation, Capability, GrantedSql, HandlerManifest, Journal, Limits, Missing, Module,
    StateQuota, Withheld,
};

/// A handler that can run.
#[derive(Debug)]
pub struct Handler {
    /// Its manifest.
    pub manifest: HandlerManifest,
    /// Its module.
    pub module: Arc<Module>,
    /// The manifest's name, shared with log events.
    pub(in crate::sandbox) name: Arc<str>,
    pub(in crate::sandbox) granted: Arc<Granted>,
    /// The limits of its attempts.
    pub limits: Limits,
    pub(in crate::sandbox) http: Arc<HttpAccess>,
    /// The quota of its state; `None` means that it has no state.
    pub state: Option<StateQuota>,
    pub(in crate::sandbox) sql: Arc<SqlAccess>,
    /// The operator grants state, but the job's attenuation removes it.
    pub(in crate::sandbox) state_is_removed: bool,
    /// Its instances may serve many jobs: module and operator both allow it.
    pub reuses: bool,
    /// The file that owns its name: the file of its module, or a missing file that had the same content.
    pub owner: String,
    /// The table of `rouse.toml` that binds its name. `None` means that the name belongs to the file that served it
    /// first.
    pub bound_by: Option<String>,
    /// Grants that are withheld because their tables do not name a module.
    pub withheld: Vec<Withheld>,
}

/// The kinds of capabilities that an operator can grant, as returned by [`Handler::granted`].
pub const GRANTS: [&str; 11] = [
    "files",
    "http",
    "secrets",
    "sign",
    "state",
    "env",
    "settings",
    "fine_clocks",
    "enqueue",
    "schedule",
    "sql",
];

impl Handler {
    /// The kinds of capabilities that it is granted.
    pub fn granted(&self) -> Vec<&'static str> {
        let granted = [
            !self.granted.dirs.is_empty(),
            self.http.sends(),
            !self.http.sent_names().is_empty(),
            !self.http.signing_names().is_empty(),
            self.state.is_some(),
            !self.granted.env.is_empty(),
            self.granted.settings.is_some(),
            self.granted.fine_clocks,
            !self.granted.enqueue.is_empty(),
            self.granted.schedule,
            !self.statements().is_empty(),
        ];
        GRANTS
            .into_iter()
            .zip(granted)
            .filter_map(|(word, granted)| granted.then_some(word))
            .collect()
    }

    /// The schedule that its module declares, if the operator allows it.
    pub fn schedule(&self) -> Option<&DeclaredSchedule> {
        let declared = self.manifest.schedule.as_ref();
        declared.filter(|_| self.granted.schedule)
    }

    /// The SQL statements that it may run; `None` if no table grants it any.
    pub fn sql(&self) -> Option<&Arc<GrantedSql>> {
        self.sql.granted.as_ref()
    }

    fn statements(&self) -> &[Statement] {
        self.sql().map_or(&[], |granted| &granted.statements)
    }

    /// Everything that it is granted, in manifest notation.
    pub fn held(&self) -> Vec<Capability> {
        let statements = self.statements().iter();
        let statements = statements.map(|it| Capability::Sql(Some(it.name.clone())));
        let mut held = granted_capabilities(&self.granted, &self.http, self.state);
        held.extend(statements);
        held
    }

    /// The capabilities that it declares and is not granted.
    pub fn missing(&self) -> Vec<Missing> {
        let requested = &self.manifest.capabilities;
        let granted = Grantings {
            granted: &self.granted,
            http: &self.http,
            state: self.state,
            sql: self.sql.granted.as_deref(),
        };
        let missing = missing(&self.name, requested, granted);
        let binding =
            (self.bound_by.is_none()).then(|| lines::module(&self.name, &self.module.file));
        let with_binding = |one: Missing| {
            let lines = match (&one.what, &binding) {
                // Secrets and statements are granted to bound modules only.
                (
                    Capability::Secrets(_) | Capability::Sign(_) | Capability::Sql(_),
                    Some(binding),
                ) => {
                    let own = one.lines.as_deref().unwrap_or_default();
                    Some(format!("{binding}\n\n{own}"))
                }
                _ => one.lines,
            };
            Missing {
                lines: self.lines_to_bind(&one.what).or(lines),
                what: one.what,
            }
        };
        missing.into_iter().map(with_binding).collect()
    }

    /// The lines that would grant this by binding the tables that withhold it; `None` if no table withholds it.
    fn lines_to_bind(&self, capability: &Capability) -> Option<String> {
        let kind = match capability {
            Capability::Secrets(_) | Capability::Sign(_) => "secrets",
            Capability::Dirs(_) => "dirs",
            Capability::State => "state",
            Capability::Sql(_) => "sql",
            Capability::Http(_)
            | Capability::Env(_)
            | Capability::Settings(_)
            | Capability::FineClocks
            | Capability::Enqueue(_)
            | Capability::Schedule
            | Capability::Unknown(_) => return None,
        };
        let withheld = self.withheld.iter().filter(|it| it.what == kind);
        let lines: Vec<&str> = withheld.map(|it| it.lines.as_str()).collect();
        (!lines.is_empty()).then(|| lines.join("\n\n"))
    }

    /// The handler's state for one attempt.
    pub(in crate::sandbox) fn state_for(&self, journal: Option<Arc<dyn Journal>>) -> HandlerState {
        let mut withheld = self.withheld.iter();
        let unbound = withheld.find(|withheld| withheld.what == "state");
        HandlerState::new(
            self.name.clone(),
            self.state,
            self.state_is_removed,
            unbound.map(|withheld| withheld.lines.clone()),
            &self.limits,
            journal,
        )
    }

    /// The handler with a job's attenuation applied. Its instances serve that job alone.
    pub fn attenuated(&self, job: &Attenuation) -> Arc<Self> {
        Arc::new(Self {
            manifest: self.manifest.clone(),
            module: self.module.clone(),
            name: self.name.clone(),
            granted: Arc::new(self.granted.attenuated(job)),
            limits: self.limits.attenuated(job),
            http: self.http.attenuated(job),
            state: self.state.filter(|_| job.leaves_state()),
            state_is_removed: self.state.is_some() && !job.leaves_state(),
            sql: self.sql.attenuated(job),
            reuses: false,
            owner: self.owner.clone(),
            bound_by: self.bound_by.clone(),
            withheld: self.withheld.clone(),
        })
    }
}
