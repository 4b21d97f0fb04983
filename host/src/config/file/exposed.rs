//! Which of the host's own files handlers may change: whoever writes into the handlers folder or into `rouse.toml` grants himself
//! the rest.

use std::path::{Path, PathBuf};

use super::File;
use super::way::Way;
use crate::sandbox::Mode;

impl File {
    /// A sentence for each directory that is granted for writing and has something in it on which the host relies. `folder`: where
    /// relative paths of the file start.
    pub fn exposed(&self, folder: &Path, handlers: &Path) -> Vec<String> {
        let settings = self.sandbox(folder, 1);
        let secrets = self
            .secrets
            .values()
            .filter_map(|secret| secret.file.as_ref());
        let mut own: Vec<(&str, PathBuf)> = vec![
            ("the handlers folder", handlers.into()),
            (
                "rouse.toml",
                self.path
                    .clone()
                    .unwrap_or_else(|| folder.join(Self::USUAL)),
            ),
            ("handlers.lock", Self::lock_file(folder)),
        ];
        own.extend(secrets.map(|file| ("a secret", folder.join(file))));
        own.extend(
            self.invoke_token_file(folder)
                .map(|file| ("the invoke token", file)),
        );
        own.extend(settings.cache_dir.map(|dir| ("the code cache", dir)));
        let own: Vec<(&str, PathBuf, Way)> = own
            .into_iter()
            .map(|(what, path)| (what, path.clone(), Way::of(&path)))
            .collect();

        let mut said = Vec::new();
        for grant in settings
            .grants
            .0
            .iter()
            .filter(|grant| grant.mode == Mode::ReadWrite)
        {
            let dir = Way::of(&grant.dir).end;
            let exposed = own
                .iter()
                .filter(|(.., way)| way.end == dir || way.is_beneath(&dir));
            said.extend(exposed.map(|(what, path, _)| {
                format!(
                    "{} may change {what} ({}), and so what the host runs and grants: it lies in {}, which is granted read-write; grant a directory of its own instead",
                    grant.handler,
                    path.display(),
                    grant.dir.display()
                )
            }));
        }
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_host_relies_on_is_named_where_handlers_may_write_it() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let said = |grants: &str| {
            let text = format!(
                "cache_dir = \"cache\"\n[secrets.KEY]\nfile = \"keys/key\"\n[handlers.x]\ndirs = [{grants}]"
            );
            let path = folder.join("rouse.toml");
            std::fs::write(&path, text).unwrap();
            let (file, beside) = File::read(Some(&path)).expect("a valid file");
            file.exposed(&beside, &folder.join("modules")).join("\n")
        };
        let all = said(r#"{ dir = ".", at = "/all", mode = "read-write" }"#);
        for what in [
            "the handlers folder",
            "rouse.toml",
            "handlers.lock",
            "a secret",
            "the code cache",
        ] {
            assert!(
                all.contains(&format!("x may change {what} (")),
                "{what}: {all}"
            );
        }
        let one = said(r#"{ dir = "keys", at = "/keys", mode = "read-write" }"#);
        assert!(
            one.starts_with("x may change a secret (") && one.lines().count() == 1,
            "{one}"
        );
        let modules = said(r#"{ dir = "modules", at = "/out", mode = "read-write" }"#);
        assert!(
            modules.starts_with("x may change the handlers folder ("),
            "{modules}"
        );
        assert_eq!(
            said(
                r#"{ dir = ".", at = "/all", mode = "read" }, { dir = "out", at = "/out", mode = "read-write" }"#
            ),
            ""
        );
    }
}
