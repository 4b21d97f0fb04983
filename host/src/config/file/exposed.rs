//! Files of the host that handlers may change. A handler that can write into the handlers folder or `rouse.toml` can
//! grant itself everything else.

use std::path::{Path, PathBuf};

use super::File;
use super::resolved_path::ResolvedPath;
use crate::sandbox::Mode;

impl File {
    /// A sentence for each directory that is granted read-write and contains a file on which the host relies. Relative
    /// paths start at `folder`. `key_file`: the file with the worker's key, from here or from the command line.
    pub fn exposed(&self, folder: &Path, handlers: &Path, key_file: Option<&Path>) -> Vec<String> {
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
        let logins = self.handlers.values();
        let logins = logins.filter_map(|table| table.sql.as_ref()?.login.file.as_ref());
        own.extend(logins.map(|file| ("the login of a handler", folder.join(file))));
        own.extend(
            self.invoke_token_file(folder)
                .map(|file| ("the invoke token", file)),
        );
        own.extend(key_file.map(|file| ("the worker's key", file.to_path_buf())));
        let authorities = self.http_ca_file.as_ref();
        own.extend(authorities.map(|file| ("http_ca_file", folder.join(file))));
        let own: Vec<(&str, PathBuf, ResolvedPath)> = own
            .into_iter()
            .map(|(name, path)| (name, path.clone(), ResolvedPath::resolve(&path)))
            .collect();

        let mut warnings = Vec::new();
        for grant in settings
            .grants
            .0
            .iter()
            .filter(|grant| grant.mode == Mode::ReadWrite)
        {
            let dir = ResolvedPath::resolve(&grant.dir).end;
            let exposed = own
                .iter()
                .filter(|(.., resolved)| resolved.end == dir || resolved.is_beneath(&dir));
            warnings.extend(exposed.map(|(name, path, _)| {
                format!(
                    "{} may change {name} ({}), and so what the host runs, grants or trusts: it lies in {}, which is granted read-write; grant a directory of its own instead",
                    grant.handler,
                    path.display(),
                    grant.dir.display()
                )
            }));
        }
        warnings
    }

    /// Rejects grants that let a handler write machine code, which a host runs outside the sandbox.
    pub(super) fn check_cache(&self, folder: &Path) -> Result<(), String> {
        let Some(cache_dir) = self.cache_dir(folder) else {
            return Ok(());
        };
        let cache = ResolvedPath::resolve(&cache_dir);
        for (handler, table) in &self.handlers {
            for dir in &table.dirs {
                let grant = dir.grant(handler, folder);
                let resolved = ResolvedPath::resolve(&grant.dir);
                let is_in_it = resolved.end == cache.end || resolved.is_beneath(&cache.end);
                let writes = grant.mode == Mode::ReadWrite;
                if writes && (is_in_it || cache.is_beneath(&resolved.end)) {
                    return Err(format!(
                        "handlers.\"{handler}\".dirs at {}: handlers could write machine code into {}, the code cache, from which the host runs it unchecked, because {} is granted read-write; grant another directory, or set another cache_dir",
                        grant.at,
                        cache_dir.display(),
                        grant.dir.display()
                    ));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reject_a_code_cache_that_a_handler_may_write() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        std::fs::create_dir_all(folder.join("data/cache")).unwrap();
        std::os::unix::fs::symlink("data/cache", folder.join("link")).unwrap();
        let read = |cache: &str, dir: &str, mode: &str| {
            let text = format!(
                "cache_dir = \"{cache}\"\n[handlers.x]\ndirs = [{{ dir = \"{dir}\", at = \"/data\", mode = \"{mode}\" }}]"
            );
            let path = folder.join("rouse.toml");
            std::fs::write(&path, text).unwrap();
            File::read(Some(&path)).map(drop)
        };
        for (cache, dir) in [
            ("data/cache", "data"),
            ("data/cache", "data/cache"),
            ("data/cache", "data/cache/inner"),
            ("link", "data"),
            ("data/cache", "link"),
            ("data/../data/cache/deep", "data"),
        ] {
            let error = read(cache, dir, "read-write").expect_err("it is refused");
            let message = error.to_string();
            let words = "handlers.\"x\".dirs at /data: handlers could write machine code";
            assert!(message.contains(words), "{cache} {dir}: {message}");
            assert!(read(cache, dir, "read").is_ok(), "{cache} {dir}");
        }
        for (cache, dir) in [
            ("data/cache", "data/other"),
            ("off", "data"),
            ("cache", "data"),
        ] {
            let read = read(cache, dir, "read-write");
            assert!(read.is_ok(), "{cache} {dir}: {read:?}");
        }
    }

    #[test]
    fn warn_of_files_of_the_host_that_handlers_may_write() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let warnings = |grants: &str| {
            let text = format!(
                "cache_dir = \"off\"\nworker_key_file = \"state/key\"\nhttp_ca_file = \"ca/ca.pem\"\n[secrets.KEY]\nfile = \"keys/key\"\n[handlers.x]\ndirs = [{grants}]"
            );
            let path = folder.join("rouse.toml");
            std::fs::write(&path, text).unwrap();
            let (file, start) = File::read(Some(&path)).expect("a valid file");
            let key = file.worker_key_file(&start);
            file.exposed(&start, &folder.join("modules"), key.as_deref())
                .join("\n")
        };
        let all = warnings(r#"{ dir = ".", at = "/all", mode = "read-write" }"#);
        for name in [
            "the handlers folder",
            "rouse.toml",
            "handlers.lock",
            "a secret",
            "the worker's key",
            "http_ca_file",
        ] {
            assert!(
                all.contains(&format!("x may change {name} (")),
                "{name}: {all}"
            );
        }
        let secret = warnings(r#"{ dir = "keys", at = "/keys", mode = "read-write" }"#);
        assert!(
            secret.starts_with("x may change a secret (") && secret.lines().count() == 1,
            "{secret}"
        );
        for (dir, name) in [("state", "the worker's key"), ("ca", "http_ca_file")] {
            let warning = warnings(&format!(
                r#"{{ dir = "{dir}", at = "/data", mode = "read-write" }}"#
            ));
            let start = format!("x may change {name} (");
            assert!(warning.starts_with(&start), "{warning}");
            assert_eq!(warning.lines().count(), 1, "{warning}");
        }
        let modules = warnings(r#"{ dir = "modules", at = "/out", mode = "read-write" }"#);
        assert!(
            modules.starts_with("x may change the handlers folder ("),
            "{modules}"
        );
        assert_eq!(
            warnings(
                r#"{ dir = ".", at = "/all", mode = "read" }, { dir = "out", at = "/out", mode = "read-write" }"#
            ),
            ""
        );
    }
}
