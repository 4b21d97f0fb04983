//! Denials of file operations in granted directories: the path, and how to permit the operation.

use super::outside::mount;
use crate::sandbox::grants::{Granted, Mode, lines};
use crate::sanitize::line;

/// The denial, addressed to the operator, or to the producer if the job's grants allow only reading. `path`: as the
/// guest sees it. `changes`: the guest tried to change something there.
pub(super) fn denial(granted: &Granted, path: &str, changes: bool) -> String {
    let handler = &granted.handler;
    let (dir, at) = (granted.dir_of(path), mount(path));
    let path = line(path);
    if let Some(dir) = dir.filter(|dir| changes && dir.grant.mode == Mode::Read) {
        let grant = &dir.grant;
        let at = &grant.at;
        if granted.read_only_for_job.contains(at) {
            return format!(
                "the handler {handler} tried to change {path}, but the grants of this job allow only reading in {at}; enqueue it with \"{at}\" under \"dirs\" of its grants, or without that key"
            );
        }
        // Two grants of one path would be refused, so the lines replace this grant.
        return format!(
            "the handler {handler} tried to change {path}, but {at} is granted to it for reading only; to allow changes, replace that grant in rouse.toml with these lines:\n{}{}",
            lines::this_dir(
                &grant.handler,
                &grant.dir.display().to_string(),
                at,
                Mode::ReadWrite
            ),
            lines::RESTART_AND_RETRY
        );
    }
    let mode = match changes {
        true => Mode::ReadWrite,
        false => Mode::Read,
    };
    let at = at.filter(|_| dir.is_none());
    format!(
        "the handler {handler} tried to access {path}, but no path may lead out of a granted directory; to grant another directory, add these lines to rouse.toml, with your directory instead of …:\n{}",
        lines::to_paste(handler, &lines::dir(handler, at, mode), &granted.config)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::grants::{Grant, GrantedDir, Root};

    fn dir(at: &str, mode: Mode) -> GrantedDir {
        let grant = Grant {
            handler: "x.*".into(),
            dir: "/srv/files".into(),
            at: at.into(),
            mode,
            quota: None,
        };
        GrantedDir {
            root: Root::new(&grant.dir),
            grant,
            ledger: None,
        }
    }

    #[test]
    fn a_denial_names_the_path_and_how_to_permit_the_operation() {
        let granted = Granted {
            handler: "x.y".into(),
            dirs: vec![
                dir("/in", Mode::Read),
                dir("/out", Mode::Read),
                dir("/work", Mode::ReadWrite),
            ],
            read_only_for_job: vec!["/out".into()],
            ..Granted::default()
        };
        let by_operator = denial(&granted, "/in/a.txt", true);
        assert!(by_operator.contains("the handler x.y tried to change /in/a.txt"));
        assert!(
            by_operator.contains(
                "[[handlers.\"x.*\".dirs]]\ndir = \"/srv/files\"\nat = \"/in\"\nmode = \"read-write\"\n\n"
            ),
            "{by_operator}"
        );
        let by_job = denial(&granted, "/out/a.txt", true);
        assert!(by_job.contains("allow only reading in /out"), "{by_job}");
        assert!(!by_job.contains("rouse.toml"), "{by_job}");
        let out = denial(&granted, "/etc/passwd", false);
        assert!(
            out.contains("no path may lead out") && out.contains("at = \"/etc\""),
            "{out}"
        );
        let by_link = denial(&granted, "/work/link", true);
        assert!(
            by_link.contains("at = \"…\"\nmode = \"read-write\""),
            "{by_link}"
        );
    }

    #[test]
    fn a_path_adds_no_lines_to_a_denial() {
        let granted = Granted {
            handler: "x.y".into(),
            dirs: vec![dir("/in", Mode::Read)],
            ..Granted::default()
        };
        let lines = "\"]\n[handlers.\"*\"]\nfine_clocks = true\u{202e}";
        for path in [format!("/a{lines}/b"), format!("/in/{lines}")] {
            let denied = denial(&granted, &path, true);
            assert!(!denied.contains("\n[handlers.\"*\"]"), "{denied}");
            assert!(!denied.contains('\u{202e}'), "{denied}");
        }
    }
}
