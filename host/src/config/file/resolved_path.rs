//! Resolves paths: the directory at the end, and the names along the path.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

/// Linux follows at most this many links.
const LINKS_MAX: usize = 40;

/// A resolved path, with the names along it.
pub(super) struct ResolvedPath {
    /// Its end, with all links resolved: one name for each directory, even if it does not exist yet.
    pub(super) end: PathBuf,
    /// Each name along the path, resolved. A process that can replace one of these determines where the path leads.
    names: Vec<PathBuf>,
}

impl ResolvedPath {
    /// Resolves a path, relative to the working directory, as far as it exists.
    pub(super) fn resolve(path: &Path) -> Self {
        // Without a working directory, no relative path can be opened either.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
        let (mut end, mut names, mut links) = (PathBuf::from("/"), Vec::new(), 0);
        let mut todo = parts(&path);
        while let Some(part) = todo.pop() {
            match Path::new(&part).components().next() {
                Some(Component::RootDir) => end = PathBuf::from("/"),
                Some(Component::ParentDir) => {
                    end.pop();
                }
                Some(Component::Normal(name)) => {
                    end.push(name);
                    names.push(end.clone());
                    if links < LINKS_MAX
                        && let Ok(target) = end.read_link()
                    {
                        links += 1;
                        end.pop();
                        todo.append(&mut parts(&target));
                    }
                }
                Some(Component::CurDir | Component::Prefix(_)) | None => {}
            }
        }
        Self { end, names }
    }

    /// True if the path leads through an entry of this directory.
    pub(super) fn is_beneath(&self, dir: &Path) -> bool {
        self.names
            .iter()
            .any(|name| name != dir && name.starts_with(dir))
    }
}

/// The components, the last one first.
fn parts(path: &Path) -> Vec<OsString> {
    let parts = path.components().rev();
    parts.map(|part| part.as_os_str().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn every_name_along_a_path_counts_and_links_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let at = |name: &str| root.join(name);
        std::fs::create_dir_all(at("work/sub")).unwrap();
        std::fs::create_dir(at("else")).unwrap();
        symlink("../else", at("work/link")).unwrap();
        symlink(at("work/link"), at("far")).unwrap();
        symlink("loop", at("loop")).unwrap();
        for (path, end, beneath) in [
            ("work", "work", false),
            ("./work/../work/.", "work", false),
            ("work/sub/..", "work", true),
            ("work/sub", "work/sub", true),
            ("work/not/yet", "work/not/yet", true),
            ("work/not/../../else", "else", true),
            // Its end is elsewhere, but a handler that may write to `work` could replace the link.
            ("work/link", "else", true),
            ("far", "else", true),
            ("far/../else", "else", true),
            ("workshop", "workshop", false),
            ("loop/x", "loop/x", false),
        ] {
            let resolved = ResolvedPath::resolve(&at(path));
            assert_eq!(resolved.end, at(end), "{path}");
            assert_eq!(resolved.is_beneath(&at("work")), beneath, "{path}");
        }
    }
}
