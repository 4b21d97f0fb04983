//! Decides which modules may have a handler's name, and so get the grants to that name.
//!
//! A module chooses the names of its handlers, and grants, secrets, state and jobs depend on those names. So the
//! operator determines the module to which a name belongs: `module` in a table of `rouse.toml` binds the names that the
//! table covers to a file, to an exact content, or to the holder of a signing key. If several tables cover a name, the
//! most specific one that sets `module` counts.

use semver::Version;

use super::binding::{ModuleBinding, Origin};
use super::manifest::HandlerManifest;
use crate::job::{most_specific, most_specific_first, pattern_covers};
use crate::sandbox::Settings;
use crate::sandbox::grants::lines;

/// Why a module may not have a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::sandbox) struct Denied {
    /// A sentence that starts with "it …" or "its …".
    pub(in crate::sandbox) why: String,
    /// The lines of `rouse.toml` that would allow it; `None` if the operator would not want them.
    pub(in crate::sandbox) lines: Option<String>,
}

/// A grant that is withheld because its table does not name a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Withheld {
    /// The table's handler name or pattern.
    pub table: String,
    /// The kind of grant, as in `rouse.toml`: `secrets`, `state`, `dirs`, `sql`.
    pub what: &'static str,
    /// The lines of `rouse.toml` that would bind the table to the module.
    pub lines: String,
}

impl Settings {
    /// The table that binds this handler, or every handler of this pattern, and its bindings.
    pub fn bound(&self, handler: &str) -> Option<(&str, &[ModuleBinding])> {
        let (table, to) = most_specific_first(&self.modules, handler)
            .into_iter()
            .next()?;
        Some((table, to.as_slice()))
    }

    /// Checks whether tables allow a module to have the name of one of its handlers.
    pub(in crate::sandbox) fn admit(
        &self,
        manifest: &HandlerManifest,
        origin: Origin<'_>,
    ) -> Result<(), Denied> {
        let name = &manifest.name;
        if let Some((table, to)) = self.bound(name)
            && !to.iter().any(|binding| binding.is(origin))
        {
            let is_key = |binding: &ModuleBinding| matches!(binding, ModuleBinding::Key(_));
            let is_to_key = to.iter().any(is_key);
            let to: Vec<String> = to.iter().map(ModuleBinding::to_string).collect();
            let to = to.join(" or ");
            if is_to_key {
                // A binding to the file would be weaker.
                let file = origin.file;
                return Err(Denied {
                    why: format!(
                        "it has the handler `{name}`, which [handlers.\"{table}\"] in rouse.toml binds to {to}; {file}.sig, a signature by that key, is missing or does not match the file; create it with `rouse handlers sign --key FILE {file}`"
                    ),
                    lines: None,
                });
            }
            return Err(Denied {
                why: format!(
                    "it has the handler `{name}`, which [handlers.\"{table}\"] in rouse.toml binds to {to}; to give it the name, put {} under [handlers.\"{name}\"]",
                    lines::module_key(origin.file)
                ),
                lines: Some(lines::module(name, origin.file)),
            });
        }
        let Some((table, least)) = most_specific_first(&self.versions_min, name)
            .into_iter()
            .next()
        else {
            return Ok(());
        };
        let version = &manifest.version;
        let why = match manifest.version.parse::<Version>() {
            Ok(version) if version >= *least => return Ok(()),
            Ok(_) => format!("requires at least {least}"),
            Err(_) => format!("requires at least {least}, with which it cannot be compared"),
        };
        Err(Denied {
            why: format!(
                "its handler `{name}` has the version {version}, and version_min of [handlers.\"{table}\"] in rouse.toml {why}"
            ),
            lines: None,
        })
    }

    /// True if secrets, statements, state and directories of this table are for this module.
    pub fn grants_to(&self, table: &str, origin: Origin<'_>) -> bool {
        match most_specific(&self.modules, table) {
            Some(to) => to.iter().any(|binding| binding.is(origin)),
            None => false,
        }
    }

    /// Like [`grants_to`](Self::grants_to), for directories and state: if no table binds an individual handler's name,
    /// the grants of its table apply to any module that has the name.
    pub fn grants_own_to(&self, table: &str, origin: Origin<'_>) -> bool {
        self.grants_to(table, origin) || (!table.ends_with('*') && self.bound(table).is_none())
    }

    /// Like [`grants_to`](Self::grants_to), for secrets and statements: in development, an individual handler's table
    /// works without a binding.
    pub fn grants_secrets_to(&self, table: &str, origin: Origin<'_>) -> bool {
        match self.is_dev {
            true => self.grants_own_to(table, origin),
            false => self.grants_to(table, origin),
        }
    }

    /// The grants to this handler that are withheld because their tables do not name a module.
    pub(in crate::sandbox) fn withheld(&self, handler: &str, origin: Origin<'_>) -> Vec<Withheld> {
        let withheld = |table: &String, kind: &'static str, grants: bool| {
            let is_unbound = pattern_covers(table, handler) && self.bound(table).is_none();
            (is_unbound && !grants).then(|| Withheld {
                table: table.clone(),
                what: kind,
                lines: lines::module(table, origin.file),
            })
        };
        let secrets = self.secret_grants.iter().filter_map(|grant| {
            let table = &grant.handler;
            withheld(table, "secrets", self.grants_secrets_to(table, origin))
        });
        let dirs = self.grants.0.iter().filter_map(|grant| {
            let table = &grant.handler;
            withheld(table, "dirs", self.grants_own_to(table, origin))
        });
        let states = self
            .state
            .keys()
            .filter_map(|table| withheld(table, "state", self.grants_own_to(table, origin)));
        let sql = self
            .sql
            .keys()
            .filter_map(|table| withheld(table, "sql", self.grants_secrets_to(table, origin)));
        let mut all: Vec<Withheld> = secrets.chain(dirs).chain(states).chain(sql).collect();
        all.sort_by(|a, b| (&a.table, a.what).cmp(&(&b.table, b.what)));
        all.dedup();
        all
    }

    /// True if the handler gets the secrets of its own table in development only.
    pub(in crate::sandbox) fn withholds_outside_dev(
        &self,
        handler: &str,
        origin: Origin<'_>,
    ) -> bool {
        let own = self
            .secret_grants
            .iter()
            .any(|grant| grant.handler == handler);
        own && self.grants_own_to(handler, origin) && !self.grants_to(handler, origin)
    }

    /// True if another module that took this name would get files or state of its handler: its own table grants some,
    /// and no table binds it.
    pub(in crate::sandbox) fn is_worth_having(&self, handler: &str) -> bool {
        let of_dirs = self.grants.0.iter().any(|grant| grant.handler == handler);
        (of_dirs || self.state.contains_key(handler)) && self.bound(handler).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::{Digest, Manifest, PublicKey};

    fn settings(bound: &[(&str, &[&str])]) -> Settings {
        let parsed = bound.iter().map(|(table, to)| {
            let to = to.iter().map(|text| text.parse().expect("a binding"));
            ((*table).to_owned(), to.collect())
        });
        Settings {
            modules: parsed.collect(),
            ..Settings::default()
        }
    }

    fn origin(file: &'static str) -> Origin<'static> {
        Origin {
            file,
            ..Origin::for_tests()
        }
    }

    fn manifest(name: &str, version: &str) -> HandlerManifest {
        let text = format!(r#"{{"handlers":[{{"name":"{name}","version":"{version}"}}]}}"#);
        let mut manifest = Manifest::parse(&text).expect("a manifest");
        manifest.handlers.remove(0)
    }

    #[test]
    fn the_most_specific_binding_table_decides_which_module_has_a_name() {
        let settings = settings(&[
            ("*", &["all.wasm"]),
            ("mail.*", &["mail.wasm", "post.wasm"]),
            ("mail.send", &["send.wasm"]),
        ]);
        let admits = |name: &str, file| settings.admit(&manifest(name, "1.0.0"), origin(file));
        for (name, file) in [
            ("mail.send", "send.wasm"),
            ("mail.read", "mail.wasm"),
            ("mail.read", "post.wasm"),
            ("other", "all.wasm"),
        ] {
            assert_eq!(admits(name, file), Ok(()), "{name} {file}");
        }
        for (name, file, to) in [
            ("mail.send", "mail.wasm", "send.wasm"),
            ("mail.read", "all.wasm", "mail.wasm or post.wasm"),
            ("other", "mail.wasm", "all.wasm"),
        ] {
            let denied = admits(name, file).expect_err("it is bound to another module");
            assert!(
                denied.why.contains(&format!("binds to {to};")),
                "{denied:?}"
            );
            let lines = format!("[handlers.\"{name}\"]\nmodule = \"{file}\"");
            assert_eq!(denied.lines, Some(lines));
        }
        assert_eq!(settings.bound("mail.read").unwrap().0, "mail.*");
    }

    #[test]
    fn bind_a_name_to_a_content_or_a_key_regardless_of_the_file_name() {
        let key: PublicKey = ("A".repeat(43) + "=").parse().unwrap();
        let digest = Digest::compute(b"module");
        let settings = settings(&[
            ("a", &[&format!("sha256:{digest}")]),
            ("b", &[&format!("ed25519:{key}")]),
        ]);
        let of_digest = Origin {
            digest,
            ..Origin::for_tests()
        };
        let signed = Origin {
            signed_by: &[key],
            ..Origin::for_tests()
        };
        let denied = settings.admit(&manifest("b", "1.0.0"), origin("b.wasm"));
        let denied = denied.expect_err("it is not signed");
        assert!(denied.why.contains("b.wasm.sig, a signature"), "{denied:?}");
        assert_eq!(denied.lines, None);
        let admits = |name: &str, origin| settings.admit(&manifest(name, "1.0.0"), origin).is_ok();
        assert!(admits("a", of_digest) && !admits("a", signed));
        assert!(admits("b", signed) && !admits("b", of_digest));
    }

    #[test]
    fn deny_versions_below_the_minimum_and_incomparable_ones() {
        let settings = Settings {
            versions_min: [("mail.*".to_owned(), Version::new(1, 10, 0))].into(),
            ..Settings::default()
        };
        let admits = |name: &str, version: &str| {
            let denied = settings.admit(&manifest(name, version), Origin::for_tests());
            denied.map_err(|denied| denied.why)
        };
        for version in ["1.10.0", "1.10.1", "2.0.0"] {
            assert_eq!(admits("mail.send", version), Ok(()));
        }
        for version in ["1.9.9", "1.10.0-rc.1", "0.0.0"] {
            let why = admits("mail.send", version).unwrap_err();
            assert!(why.contains("requires at least 1.10.0"), "{why}");
        }
        let why = admits("mail.send", "newest").unwrap_err();
        assert!(why.contains("cannot be compared"), "{why}");
        assert_eq!(admits("other", "0.0.1"), Ok(()));
    }

    #[test]
    fn the_grants_of_a_table_are_for_the_module_that_it_names() {
        let settings = settings(&[("mail.*", &["mail.wasm"]), ("pay.charge", &["pay.wasm"])]);
        let (mail, other) = (origin("mail.wasm"), origin("0.wasm"));
        // A table of its own, and a less specific one.
        assert!(settings.grants_to("mail.*", mail) && settings.grants_to("mail.send", mail));
        assert!(
            !settings.grants_to("mail.*", other) && !settings.grants_own_to("mail.send", other)
        );
        // A pattern's table without a binding does not grant anything, even if the handler's name is bound elsewhere.
        assert!(!settings.grants_to("*", mail) && !settings.grants_own_to("*", mail));
        // An individual handler's table is for any module with the name, except for secrets.
        assert!(settings.grants_own_to("noop", other));
        assert!(!settings.grants_secrets_to("noop", other));
        let dev = Settings {
            is_dev: true,
            ..settings
        };
        assert!(dev.grants_secrets_to("noop", other));
        assert!(!dev.grants_secrets_to("*", other) && !dev.grants_secrets_to("pay.charge", other));
    }
}
