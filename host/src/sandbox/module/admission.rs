//! Which modules may have a handler's name, and what of the grants to that name is theirs.
//!
//! A module says itself what its handlers are called, and grants, secrets, state and jobs hang on that name. So an operator says
//! where a name comes from: `module` in a table of `rouse.toml` binds the names that the table covers to a file, to one very content,
//! or to whoever signs with a key. Of several tables that cover a name, the narrowest that says so counts.

use semver::Version;

use super::binding::{ModuleBinding, Origin};
use super::manifest::HandlerManifest;
use crate::job::{narrowest, narrowest_first, pattern_covers};
use crate::sandbox::Settings;
use crate::sandbox::grants::lines;

/// Why a module may not have a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::sandbox) struct Denied {
    /// A sentence that starts with "it …".
    pub(in crate::sandbox) why: String,
    /// The lines of `rouse.toml` that would allow it; none where they would not be the operator's wish.
    pub(in crate::sandbox) lines: Option<String>,
}

/// What a table grants to a module, and does not until it says which module it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Withheld {
    /// The handler's name or pattern, which the table has.
    pub table: String,
    /// In words of `rouse.toml`: `secrets`, `state`, `dirs`.
    pub what: &'static str,
    /// The lines of `rouse.toml` that would bind it to the module.
    pub lines: String,
}

impl Settings {
    /// Which table binds this handler, or every handler of this pattern, and to what.
    pub fn bound(&self, handler: &str) -> Option<(&str, &[ModuleBinding])> {
        let (table, to) = narrowest_first(&self.modules, handler).into_iter().next()?;
        Some((table, to.as_slice()))
    }

    /// Lets a module have the name of one of its handlers, as far as tables say whose it is.
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
                // A line for the file would be a weaker binding.
                let file = origin.file;
                return Err(Denied {
                    why: format!(
                        "it has the handler `{name}`, which [handlers.\"{table}\"] in rouse.toml binds to {to}; {file}.sig, a signature by that key, is missing or does not fit the file; `rouse handlers sign --key FILE {file}` makes it"
                    ),
                    lines: None,
                });
            }
            return Err(Denied {
                why: format!(
                    "it has the handler `{name}`, which [handlers.\"{table}\"] in rouse.toml binds to {to}; where it is to have it, put {} under [handlers.\"{name}\"]",
                    lines::module_key(origin.file)
                ),
                lines: Some(lines::module(name, origin.file)),
            });
        }
        let Some((table, least)) = narrowest_first(&self.versions_min, name).into_iter().next()
        else {
            return Ok(());
        };
        let said = &manifest.version;
        let why = match said.parse::<Version>() {
            Ok(version) if version >= *least => return Ok(()),
            Ok(_) => format!("wants {least} at least"),
            Err(_) => format!("wants {least} at least, with which this cannot be compared"),
        };
        Err(Denied {
            why: format!(
                "its handler `{name}` has the version {said}, and version_min of [handlers.\"{table}\"] in rouse.toml {why}"
            ),
            lines: None,
        })
    }

    /// True where secrets, state and directories of this table are for this module.
    pub fn grants_to(&self, table: &str, origin: Origin<'_>) -> bool {
        match narrowest(&self.modules, table) {
            Some(to) => to.iter().any(|binding| binding.is(origin)),
            None => false,
        }
    }

    /// The same of directories and state: those of one handler's own table are for whoever has its name.
    pub fn grants_own_to(&self, table: &str, origin: Origin<'_>) -> bool {
        self.grants_to(table, origin) || (!table.ends_with('*') && self.bound(table).is_none())
    }

    /// The same of secrets: while somebody develops, those of one handler's own table are so too.
    pub fn grants_secrets_to(&self, table: &str, origin: Origin<'_>) -> bool {
        match self.is_dev {
            true => self.grants_own_to(table, origin),
            false => self.grants_to(table, origin),
        }
    }

    /// What tables grant to this handler, and withhold because they do not say which module they are for.
    pub(in crate::sandbox) fn withheld(&self, handler: &str, origin: Origin<'_>) -> Vec<Withheld> {
        let withheld = |table: &String, what: &'static str, grants: bool| {
            let is_of_nobody = pattern_covers(table, handler) && self.bound(table).is_none();
            (is_of_nobody && !grants).then(|| Withheld {
                table: table.clone(),
                what,
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
        let mut all: Vec<Withheld> = secrets.chain(dirs).chain(states).collect();
        all.sort_by(|a, b| (&a.table, a.what).cmp(&(&b.table, b.what)));
        all.dedup();
        all
    }

    /// True where the handler has secrets of its own table only as long as somebody develops.
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

    /// True where somebody else who had this name would have files or state of its handler: its own table grants some, and
    /// no table binds it.
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
            ..Origin::of_tests()
        }
    }

    fn manifest(name: &str, version: &str) -> HandlerManifest {
        let text = format!(r#"{{"handlers":[{{"name":"{name}","version":"{version}"}}]}}"#);
        let mut manifest = Manifest::parse(&text).expect("a manifest");
        manifest.handlers.remove(0)
    }

    #[test]
    fn the_narrowest_table_that_binds_a_name_says_whose_it_is() {
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
            let denied = admits(name, file).expect_err("it is bound to another one");
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
    fn a_name_is_bound_to_a_content_or_to_a_key_whatever_the_file_is_called() {
        let key: PublicKey = ("A".repeat(43) + "=").parse().unwrap();
        let digest = Digest::of(b"module");
        let settings = settings(&[
            ("a", &[&format!("sha256:{digest}")]),
            ("b", &[&format!("ed25519:{key}")]),
        ]);
        let of_digest = Origin {
            digest,
            ..Origin::of_tests()
        };
        let signed = Origin {
            signed_by: &[key],
            ..Origin::of_tests()
        };
        let denied = settings.admit(&manifest("b", "1.0.0"), origin("b.wasm"));
        let denied = denied.expect_err("nobody has signed it");
        assert!(denied.why.contains("b.wasm.sig, a signature"), "{denied:?}");
        assert_eq!(denied.lines, None);
        let admits = |name: &str, origin| settings.admit(&manifest(name, "1.0.0"), origin).is_ok();
        assert!(admits("a", of_digest) && !admits("a", signed));
        assert!(admits("b", signed) && !admits("b", of_digest));
    }

    #[test]
    fn an_older_version_than_the_least_is_denied_and_so_is_one_that_cannot_be_compared() {
        let settings = Settings {
            versions_min: [("mail.*".to_owned(), Version::new(1, 10, 0))].into(),
            ..Settings::default()
        };
        let admits = |name: &str, version: &str| {
            let denied = settings.admit(&manifest(name, version), Origin::of_tests());
            denied.map_err(|denied| denied.why)
        };
        for version in ["1.10.0", "1.10.1", "2.0.0"] {
            assert_eq!(admits("mail.send", version), Ok(()));
        }
        for version in ["1.9.9", "1.10.0-rc.1", "0.0.0"] {
            let why = admits("mail.send", version).unwrap_err();
            assert!(why.contains("wants 1.10.0 at least"), "{why}");
        }
        let why = admits("mail.send", "newest").unwrap_err();
        assert!(why.contains("cannot be compared"), "{why}");
        assert_eq!(admits("other", "0.0.1"), Ok(()));
    }

    #[test]
    fn what_a_table_grants_is_for_the_module_that_it_is_bound_to() {
        let settings = settings(&[("mail.*", &["mail.wasm"]), ("pay.charge", &["pay.wasm"])]);
        let (mail, other) = (origin("mail.wasm"), origin("0.wasm"));
        // Of its own, and of a wider one.
        assert!(settings.grants_to("mail.*", mail) && settings.grants_to("mail.send", mail));
        assert!(
            !settings.grants_to("mail.*", other) && !settings.grants_own_to("mail.send", other)
        );
        // A wide table that says nothing is for nobody, also where the handler's name is bound.
        assert!(!settings.grants_to("*", mail) && !settings.grants_own_to("*", mail));
        // A table of one handler is for whoever has the name, but for secrets.
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
