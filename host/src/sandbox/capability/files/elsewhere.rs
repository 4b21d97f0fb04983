//! What a guest looks for where no directory is granted to it.
//!
//! Without any directory, the library of a language says by itself that there is no such file, and the host never hears of it. So
//! each guest has a root, `/`, in which nothing is found and nothing can be made: paths that lie in no granted directory lead
//! there, and are noted. Many libraries try out paths that need not be there, so it is no denial yet: it becomes one where the
//! attempt fails, and what it says names the path or a file that is not there.

use std::fs::File;
use std::path::Path;
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, memfd_create};
use wasmtime_wasi::filesystem::Dir;
use wasmtime_wasi::{FsPerms, OpenMode};

use crate::sandbox::grants::{Granted, Mode, lines};

/// Where guests see the directory in which there is nothing.
pub(super) const ROOT: &str = "/";

/// Paths that are kept: a library may look into some directories before it gives up.
const PATHS_MAX: usize = 16;

/// Of a path; the system takes no more than 4,096.
const PATH_BYTES_MAX: usize = 512;

/// What errors of files that are not there say, in C and Python, Rust, JavaScript, and Go. 44 is WASI's number for it.
const NOT_FOUND: [&str; 4] = [
    "No such file or directory",
    "os error 44",
    "ENOENT",
    "file does not exist",
];

/// What stands behind the root. No call reaches it; it is a file in memory, in case one did.
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

/// A path in a directory, as guests write it, without `.` and `..`; cut where nobody would read on.
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

/// The directory in which something is.
pub(super) fn parent(path: &str) -> &str {
    match path.rsplit_once('/') {
        None | Some(("", _)) => ROOT,
        Some((parent, _)) => parent,
    }
}

/// Where a directory would have to be seen for something to be found at this path; none: only the operator knows. What stands in
/// the root is a directory itself, unless its name looks like a file's.
pub(super) fn mount(path: &str) -> Option<&str> {
    match parent(path) {
        ROOT => Some(path).filter(|path| path.len() > 1 && !path.contains('.')),
        parent => Some(parent),
    }
}

/// What one attempt has looked for where no directory is granted.
#[derive(Debug, Default)]
pub(in crate::sandbox) struct Elsewhere {
    /// The newest last, each once.
    paths: Vec<(String, bool)>,
}

impl Elsewhere {
    pub(super) fn note(&mut self, path: String, changes: bool) {
        self.paths.retain(|(noted, _)| *noted != path);
        if self.paths.len() >= PATHS_MAX {
            self.paths.remove(0);
        }
        self.paths.push((path, changes));
    }

    /// What was denied, if an attempt that says this has failed for want of a grant.
    pub(in crate::sandbox) fn denial(&self, granted: &Granted, said: &str) -> Option<String> {
        let newest = || self.paths.iter().rev();
        let named = newest().find(|(path, _)| path.len() > 1 && said.contains(path.as_str()));
        let not_found = || NOT_FOUND.iter().any(|words| said.contains(words));
        let (path, changes) = named.or_else(|| newest().next().filter(|_| not_found()))?;
        // One grant has to do for all that it wanted there.
        let is_there = |other: &str| mount(path).is_some_and(|at| Path::new(other).starts_with(at));
        let changes = *changes || newest().any(|(other, changes)| *changes && is_there(other));
        Some(not_granted(granted, path, changes))
    }
}

/// Of a path in no directory that is granted.
fn not_granted(granted: &Granted, path: &str, changes: bool) -> String {
    let handler = &granted.handler;
    let lies_in = |at: &&String| *path == **at || path.starts_with(&format!("{at}/"));
    if let Some(at) = granted.taken_by_job.iter().find(lies_in) {
        return format!(
            "the handler {handler} asked for {path}, which the grants of this job leave out; enqueue it with \"{at}\" under \"dirs\" of its grants, or without"
        );
    }
    let mode = match changes {
        true => Mode::ReadWrite,
        false => Mode::Read,
    };
    format!(
        "the handler {handler} asked for {path}, and no directory that has it is granted; these lines in rouse.toml would grant one, with your directory for …:\n{}",
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
            taken_by_job: vec!["/left".into()],
            ..Granted::default()
        }
    }

    #[test]
    fn paths_are_shown_as_guests_mean_them() {
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
    fn only_a_failure_that_tells_of_a_missing_file_is_for_want_of_a_grant() {
        let mut elsewhere = Elsewhere::default();
        let granted = granted();
        let of = |elsewhere: &Elsewhere, said: &str| elsewhere.denial(&granted, said);
        assert_eq!(
            of(&elsewhere, "No such file or directory"),
            None,
            "it looked for none"
        );
        elsewhere.note("/data/in.csv".into(), false);
        elsewhere.note("/usr/lib/optional".into(), false);
        assert_eq!(of(&elsewhere, "the server is busy"), None);
        let named = of(&elsewhere, "cannot read /data/in.csv").expect("it is named");
        assert!(named.contains("asked for /data/in.csv"), "{named}");
        assert!(named.contains("dir = \"…\"\nat = \"/data\"\n\n"), "{named}");
        for said in NOT_FOUND {
            let newest = of(&elsewhere, said).expect("the newest is meant");
            assert!(newest.contains("/usr/lib/optional"), "{newest}");
        }
        elsewhere.note("/out.txt".into(), true);
        let at_the_root = of(&elsewhere, "ENOENT").expect("it is meant");
        assert!(
            at_the_root.contains("at = \"…\"\nmode = \"read-write\""),
            "{at_the_root}"
        );
        // The directory itself, which it first looked for and then wanted to make.
        elsewhere.note("/thumbs/a.jpg.part".into(), true);
        elsewhere.note("/thumbs".into(), false);
        let itself = of(&elsewhere, "cannot write /thumbs/a.jpg").expect("it is named");
        assert!(
            itself.contains("at = \"/thumbs\"\nmode = \"read-write\""),
            "{itself}"
        );
        elsewhere.note("/left/a".into(), false);
        let left_out = of(&elsewhere, "ENOENT").expect("it is meant");
        assert!(left_out.contains("enqueue it with \"/left\""), "{left_out}");
    }

    #[test]
    fn no_guest_makes_the_host_keep_many_paths() {
        let mut elsewhere = Elsewhere::default();
        for n in 0..10 * PATHS_MAX {
            elsewhere.note(format!("/{n}"), false);
            elsewhere.note("/again".into(), false);
        }
        assert_eq!(elsewhere.paths.len(), PATHS_MAX);
        let newest = elsewhere.paths.last().map(|(path, _)| path.as_str());
        assert_eq!(newest, Some("/again"));
    }
}
