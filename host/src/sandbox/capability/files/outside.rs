//! Paths outside granted directories that a guest tries.
//!
//! Without any directory, a language's library reports a missing file itself, without calling the host. So each guest
//! has an empty root, `/`, in which nothing can be created: paths outside granted directories lead there and are
//! recorded. Many libraries probe optional paths, so a recorded path is not a denial yet. It becomes one if the attempt
//! fails with an error that names the path or a missing file.

use std::fs::File;
use std::path::Path;
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, memfd_create};
use wasmtime_wasi::filesystem::Dir;
use wasmtime_wasi::{FsPerms, OpenMode};

use crate::sandbox::grants::{Granted, Mode, lines};
use crate::sanitize::line;

/// The guest path of the empty root.
pub(super) const ROOT: &str = "/";

/// The number of paths that are recorded: a library may search several directories before it gives up.
const PATHS_MAX: usize = 16;

/// The maximum size of a path, in bytes; the system accepts at most 4,096.
const PATH_BYTES_MAX: usize = 512;

/// The messages for a missing file in C and Python, Rust, JavaScript, and Go. 44 is WASI's error number.
const NOT_FOUND: [&str; 4] = [
    "No such file or directory",
    "os error 44",
    "ENOENT",
    "file does not exist",
];

/// The descriptor of the root. No call should reach it; in case one does, it is a file in memory.
pub(super) fn nowhere() -> Option<Dir> {
    static NOWHERE: OnceLock<Option<Dir>> = OnceLock::new();
    let new = || {
        let file = memfd_create("rouse-nowhere", MemfdFlags::CLOEXEC).ok()?;
        Some(Dir::new(
            File::from(file),
            FsPerms::ReadOnly,
            OpenMode::READ,
            true,
        ))
    };
    NOWHERE.get_or_init(new).clone()
}

/// Joins and normalizes a path; a very long path is truncated.
pub(super) fn joined(at: &str, path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    let mut bytes = 0;
    for part in at.split('/').chain(path.split('/')) {
        match part {
            "" | "." => {}
            ".." => bytes -= parts.pop().map_or(0, |part| part.len() + 1),
            part if bytes + part.len() > PATH_BYTES_MAX => {
                parts.push("…");
                break;
            }
            part => {
                bytes += part.len() + 1;
                parts.push(part);
            }
        }
    }
    format!("/{}", parts.join("/"))
}

/// The parent directory of a path.
pub(super) fn parent(path: &str) -> &str {
    match path.rsplit_once('/') {
        None | Some(("", _)) => ROOT,
        Some((parent, _)) => parent,
    }
}

/// The mount point that a grant needs for this path; `None` if only the operator knows. An entry of the root is assumed
/// to be a directory, unless its name looks like that of a file.
pub(super) fn mount(path: &str) -> Option<&str> {
    match parent(path) {
        ROOT => Some(path).filter(|path| path.len() > 1 && !path.contains('.')),
        parent => Some(parent),
    }
}

/// The paths outside granted directories that one attempt tried.
#[derive(Debug, Default)]
pub(in crate::sandbox) struct OutsidePaths {
    /// The newest last, without duplicates.
    paths: Vec<(String, bool)>,
}

impl OutsidePaths {
    pub(super) fn record(&mut self, path: String, changes: bool) {
        self.paths.retain(|(recorded, _)| *recorded != path);
        if self.paths.len() >= PATHS_MAX {
            self.paths.remove(0);
        }
        self.paths.push((path, changes));
    }

    /// The denial, if an attempt with this error message failed for lack of a grant.
    pub(in crate::sandbox) fn denial(&self, granted: &Granted, message: &str) -> Option<String> {
        let newest = || self.paths.iter().rev();
        let named = newest().find(|(path, _)| path.len() > 1 && message.contains(path.as_str()));
        let not_found = || NOT_FOUND.iter().any(|words| message.contains(words));
        let (path, changes) = named.or_else(|| newest().next().filter(|_| not_found()))?;
        // One grant should cover everything that the guest tried there.
        let is_under_mount =
            |other: &str| mount(path).is_some_and(|at| Path::new(other).starts_with(at));
        let changes =
            *changes || newest().any(|(other, changes)| *changes && is_under_mount(other));
        Some(not_granted(granted, path, changes))
    }
}

/// The denial for a path outside granted directories.
fn not_granted(granted: &Granted, path: &str, changes: bool) -> String {
    let (handler, shown) = (&granted.handler, line(path));
    let lies_in = |at: &&String| *path == **at || path.starts_with(&format!("{at}/"));
    if let Some(at) = granted.removed_by_job.iter().find(lies_in) {
        return format!(
            "the handler {handler} tried to access {shown}, which the grants of this job leave out; enqueue it with \"{at}\" under \"dirs\" of its grants, or without that key"
        );
    }
    let mode = match changes {
        true => Mode::ReadWrite,
        false => Mode::Read,
    };
    format!(
        "the handler {handler} tried to access {shown}, which is not in a granted directory; to grant one, add these lines to rouse.toml, with your directory instead of …:\n{}",
        lines::to_paste(
            handler,
            &lines::dir(handler, mount(path), mode),
            &granted.config
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted() -> Granted {
        Granted {
            handler: "x".into(),
            removed_by_job: vec!["/left".into()],
            ..Granted::default()
        }
    }

    #[test]
    fn normalize_paths_as_guests_see_them() {
        for (at, path, joined_path) in [
            ("/", "etc/passwd", "/etc/passwd"),
            ("/in", "a/./b//c", "/in/a/b/c"),
            ("/in", "../secret", "/secret"),
            ("/in", "../../../x", "/x"),
            ("/in", "", "/in"),
            ("/", ".", "/"),
        ] {
            assert_eq!(joined(at, path), joined_path);
        }
        assert!(joined("/", &"x/".repeat(10_000)).len() < PATH_BYTES_MAX + 10);
        assert_eq!(
            (parent("/a/b"), parent("/a"), parent("/")),
            ("/a", "/", "/")
        );
    }

    #[test]
    fn only_errors_about_missing_files_become_denials() {
        let mut outside = OutsidePaths::default();
        let granted = granted();
        let of = |outside: &OutsidePaths, message: &str| outside.denial(&granted, message);
        assert_eq!(
            of(&outside, "No such file or directory"),
            None,
            "it tried no path"
        );
        outside.record("/data/in.csv".into(), false);
        outside.record("/usr/lib/optional".into(), false);
        assert_eq!(of(&outside, "the server is busy"), None);
        let named = of(&outside, "cannot read /data/in.csv").expect("a denial");
        assert!(named.contains("tried to access /data/in.csv"), "{named}");
        assert!(named.contains("dir = \"…\"\nat = \"/data\"\n\n"), "{named}");
        for message in NOT_FOUND {
            let newest = of(&outside, message).expect("a denial of the newest path");
            assert!(newest.contains("/usr/lib/optional"), "{newest}");
        }
        outside.record("/out.txt".into(), true);
        let at_the_root = of(&outside, "ENOENT").expect("a denial");
        assert!(
            at_the_root.contains("at = \"…\"\nmode = \"read-write\""),
            "{at_the_root}"
        );
        // The directory itself, which the guest first searched for and then tried to create.
        outside.record("/thumbs/a.jpg.part".into(), true);
        outside.record("/thumbs".into(), false);
        let itself = of(&outside, "cannot write /thumbs/a.jpg").expect("a denial");
        assert!(
            itself.contains("at = \"/thumbs\"\nmode = \"read-write\""),
            "{itself}"
        );
        outside.record("/left/a".into(), false);
        let left_out = of(&outside, "ENOENT").expect("a denial");
        assert!(left_out.contains("enqueue it with \"/left\""), "{left_out}");
    }

    #[test]
    fn limit_the_number_of_recorded_paths() {
        let mut outside = OutsidePaths::default();
        for n in 0..10 * PATHS_MAX {
            outside.record(format!("/{n}"), false);
            outside.record("/again".into(), false);
        }
        assert_eq!(outside.paths.len(), PATHS_MAX);
        let newest = outside.paths.last().map(|(path, _)| path.as_str());
        assert_eq!(newest, Some("/again"));
    }

    #[test]
    fn a_path_adds_no_lines_to_a_denial() {
        let mut outside = OutsidePaths::default();
        let path = "/a\"]\n[handlers.\"*\"]\nfine_clocks = true\u{202e}/b";
        outside.record(path.into(), true);
        let denied = outside.denial(&granted(), "No such file or directory");
        let denied = denied.expect("a denial");
        assert!(!denied.contains("\n[handlers.\"*\"]"), "{denied}");
        assert!(!denied.contains('\u{202e}'), "{denied}");
        assert!(denied.contains("at = \"…\"\n"), "{denied}");
    }
}
