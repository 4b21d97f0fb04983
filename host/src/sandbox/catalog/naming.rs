//! Decides which handler names each module in the folder serves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;

use super::entry::Serving;
use super::folder::Folder;
use super::owners::{Claimant, NAMES_MAX, Ownership};
use crate::sandbox::Module;
use crate::sandbox::grants::lines;
use crate::sandbox::module::admission::Denied;

/// The maximum number of handlers in one folder. One row of the database stores the handlers of a worker
/// (`_check_capabilities` in migrations/functions/workers.sql allows this many).
const HANDLERS_MAX: usize = 10_000;

impl Folder {
    /// Lets waiting modules serve if they own their names, in the order in which they arrived. Returns true if
    /// something changed.
    pub(super) fn settle_names(&mut self) -> bool {
        let mut changed = false;
        let is_start_open = loop {
            let mut pass = Pass {
                is_start_open: self.is_start_open(),
                served_count: self.served_count(),
            };
            let entries = self.entries.iter();
            let mut waiting: Vec<(u64, String)> = entries
                .filter_map(|(file, entry)| Some((entry.waiting.as_ref()?.0, file.clone())))
                .collect();
            waiting.sort();
            // A module that starts to serve may release a name of its previous version for which another module waits.
            let waiting = waiting.iter();
            let settled = waiting.filter(|(_, file)| self.settle(file, &mut pass));
            if settled.count() == 0 {
                break pass.is_start_open;
            }
            changed = true;
        };
        if self.is_starting && !is_start_open {
            // The names of all files that were present at startup are known now.
            self.is_starting = false;
            self.owners.prove();
        }
        changed
    }

    /// Lets one waiting module serve, or records the reason why it does not. Returns true if something changed.
    fn settle(&mut self, file: &str, pass: &mut Pass) -> bool {
        let entry = self.entries.get_mut(file).expect("it was listed above");
        let Some((number, module)) = entry.waiting.clone() else {
            return false;
        };
        let names = match self.decide(file, &module, pass) {
            Decision::Wait => return false,
            Decision::Refuse(denied) => {
                let entry = self.entries.get_mut(file).expect("as above");
                return entry.deny(file, denied);
            }
            Decision::Serve(names) => names,
        };
        for (name, files) in &names.contested {
            let is_there = |other: &str| self.entries.contains_key(other);
            self.owners
                .contest(name, files.clone(), SystemTime::now(), is_there);
            for other in files.iter().filter(|other| *other != file) {
                let why = |other: &str| contested_by(name, other, files);
                pass.served_count -= usize::from(self.withdraw(other, name, why));
            }
        }
        let entry = self.entries.get_mut(file).expect("as above");
        let contested = names.contested.iter().next();
        let denied = contested.map(|(name, files)| Denied {
            why: contested_by(name, file, files),
            lines: Some(lines::module(name, file)),
        });
        let serves_already = entry
            .serving
            .as_ref()
            .is_some_and(|it| Arc::ptr_eq(&it.module, &module) && it.has_all_of(&names.own));
        if serves_already {
            return match denied {
                Some(denied) => entry.deny(file, denied),
                None => {
                    entry.waiting = None;
                    entry.accept();
                    true
                }
            };
        }

        let is_starting = self.is_starting;
        for (name, owner) in &names.own {
            if let Some(server) = self.owners.server(name).filter(|server| *server != file) {
                let server = server.to_owned();
                let why = |other: &str| belongs_to(name, other, file);
                pass.served_count -= usize::from(self.withdraw(&server, name, why));
            }
            if owner != file {
                tracing::warn!(
                    file,
                    handler = name,
                    "the handler's name belongs to {owner}, which is missing; this file has the same content and serves instead until either changes; to let it keep the name, put {} under [handlers.\"{name}\"] in rouse.toml",
                    lines::module_key(file)
                );
                self.owners.stand_in(name, file);
                continue;
            }
            self.owners
                .take(name, &self.claimant(file, &module, name), is_starting);
        }
        let has = |name: &str| names.own.contains_key(name) || names.contested.contains_key(name);
        self.owners.drop_others(file, has, SystemTime::now());
        let serving = Serving::new(&self.sandbox, module.clone(), &names.own);
        pass.served_count -= self.served_by(file);
        pass.served_count += serving.handlers.len();
        let entry = self.entries.get_mut(file).expect("as above");
        entry.serve(serving, self.sandbox.settings());
        if let Some(denied) = denied {
            entry.waiting = Some((number, module));
            entry.deny(file, denied);
        }
        true
    }

    /// Decides which of a module's names are its own.
    fn decide(&self, file: &str, module: &Module, pass: &Pass) -> Decision {
        let settings = self.sandbox.settings();
        let mut names = Names::default();
        let mut waits = false;
        let mut is_new = None;
        for manifest in &module.manifest.handlers {
            if let Err(denied) = settings.admit(manifest, module.origin()) {
                return Decision::Refuse(denied);
            }
            let name = &manifest.name;
            let by = self.claimant(file, module, name);
            // If a table binds the name, a file that the table excludes does not count.
            let may_have_it = |other: &str| {
                let entry = self.entries.get(other);
                entry.is_some_and(|it| {
                    !by.is_bound
                        || it.serves(name)
                        || it.loading.is_some()
                        || it.waits_for(name, settings)
                })
            };
            match self.owners.ownership(name, &by, may_have_it) {
                Ownership::Own => {
                    let is_safe = by.is_bound
                        || settings.is_dev
                        || !settings.is_worth_having(name)
                        || self.owners.knows(name, file);
                    waits |= pass.is_start_open && !is_safe;
                    if !by.is_bound && self.owners.owner(name).is_none() {
                        is_new = Some(name);
                    }
                    names.own.insert(name.clone(), file.to_owned());
                }
                Ownership::StandIn => {
                    let owner = self.owners.owner(name).unwrap_or(file);
                    names.own.insert(name.clone(), owner.to_owned());
                }
                Ownership::Present(owner) => {
                    return Decision::Refuse(Denied {
                        why: belongs_to(name, file, &owner),
                        lines: Some(lines::module(name, file)),
                    });
                }
                Ownership::Dropped(owner) => {
                    let owner = format!("{owner}, a file whose current version lacks it");
                    return Decision::Refuse(Denied {
                        why: belongs_to(name, file, &owner),
                        lines: Some(lines::module(name, file)),
                    });
                }
                Ownership::Missing(owner) => {
                    return Decision::Refuse(Denied {
                        why: belongs_to(name, file, &format!("{owner}, a file that is missing")),
                        lines: Some(lines::module(name, file)),
                    });
                }
                Ownership::Contested(files) => {
                    names.contested.insert(name.clone(), files);
                }
            }
        }
        let others = pass.served_count - self.served_by(file);
        if others + names.own.len() > HANDLERS_MAX {
            return Decision::Refuse(Denied {
                why: format!(
                    "it has {} handlers, and the other files of the folder serve {others}; a folder can serve at most {HANDLERS_MAX}",
                    names.own.len()
                ),
                lines: None,
            });
        }
        if let Some(name) = is_new
            && !self.owners.can_save(names.own.keys())
        {
            return Decision::Refuse(Denied {
                why: too_many_names(name, file),
                lines: Some(lines::module(name, file)),
            });
        }
        match waits {
            true => Decision::Wait,
            false => Decision::Serve(names),
        }
    }

    /// The number of handlers that all files serve.
    fn served_count(&self) -> usize {
        let serving = self.entries.values().filter_map(|it| it.serving.as_ref());
        serving.map(|serving| serving.handlers.len()).sum()
    }

    /// The number of handlers that this file serves.
    fn served_by(&self, file: &str) -> usize {
        let serving = self.entries.get(file).and_then(|it| it.serving.as_ref());
        serving.map_or(0, |serving| serving.handlers.len())
    }

    fn claimant<'a>(&self, file: &'a str, module: &Module, name: &str) -> Claimant<'a> {
        Claimant {
            file,
            digest: module.digest,
            was_at_start: self.entries.get(file).is_some_and(|it| it.was_at_start),
            is_bound: self.sandbox.settings().bound(name).is_some(),
        }
    }

    /// Stops a file from serving a handler; the file then waits for the name. Returns false if it did not serve the
    /// handler.
    fn withdraw(&mut self, file: &str, name: &str, why: impl FnOnce(&str) -> String) -> bool {
        let Some(entry) = self.entries.get_mut(file) else {
            return false;
        };
        let Some(serving) = &mut entry.serving else {
            return false;
        };
        if !serving.stop_serving(name) {
            return false;
        }
        let module = serving.module.clone();
        tracing::warn!(file, handler = name, "handler withdrawn");
        let number = self.started;
        entry.waiting.get_or_insert((number, module));
        let lines = Some(lines::module(name, file));
        entry.deny(
            file,
            Denied {
                why: why(file),
                lines,
            },
        );
        true
    }
}

/// The state of the whole folder during one pass over the waiting modules. It is determined once for each pass, because
/// otherwise every file would be visited again for each module.
struct Pass {
    /// A file that was present at startup may still turn out to claim a name.
    is_start_open: bool,
    /// The number of handlers that all files serve now.
    served_count: usize,
}

/// The decision about a waiting module.
enum Decision {
    /// It is too early to decide.
    Wait,
    Refuse(Denied),
    Serve(Names),
}

/// The names of a module that may serve.
#[derive(Default)]
struct Names {
    /// The names that it serves, with the file that owns each.
    own: BTreeMap<String, String>,
    /// The names that no file serves, with the files that claim them.
    contested: BTreeMap<String, BTreeSet<String>>,
}

fn belongs_to(name: &str, file: &str, owner: &str) -> String {
    format!(
        "it has the handler `{name}`, which belongs to {owner}; to give it to {file}, put {} under [handlers.\"{name}\"] in rouse.toml and restart the host",
        lines::module_key(file)
    )
}

fn too_many_names(name: &str, file: &str) -> String {
    format!(
        "it has the handler `{name}`, and this host has reached the limit of {NAMES_MAX} recorded names; to give it to {file}, put {} under [handlers.\"{name}\"] in rouse.toml and restart the host",
        lines::module_key(file)
    )
}

fn contested_by(name: &str, file: &str, files: &BTreeSet<String>) -> String {
    let others: Vec<&str> = files
        .iter()
        .map(String::as_str)
        .filter(|other| *other != file)
        .collect();
    format!(
        "it has the handler `{name}`, which {} had when a host started; its owner is unknown, so none of these files serves it; to give it to {file}, put {} under [handlers.\"{name}\"] in rouse.toml and restart the host",
        others.join(" and "),
        lines::module_key(file)
    )
}
