//! Denials of file operations in granted directories: the path, and what would permit it.

use super::elsewhere::mount;
use crate::sandbox::grants::{Granted, Mode, lines};

/// The denial, and who can change it: the operator, or the enqueuer if the job's grants allow only reading. `path`:
/// as the guest sees it. `changes`: the guest tried to change something there.
pub(super) fn denial(granted: &Granted, path: &str, changes: bool) -> String {
    let handler = &granted.handler;
    let dir = granted.dir_of(path);
    if let Some(dir) = dir.filter(|dir| changes && dir.grant.mode == Mode::Read) {
        let grant = &dir.grant;
        let at = &grant.at;
        if granted.only_read_for_job.contains(at) {
            return format!(
                "the handler {handler} tried to change {path}, and the grants of this job leave only reading of {at}; enqueue it with \"{at}\" under \"dirs\" of its grants, or without"
            );
        }
        // Two grants of one path would be refused, so the lines replace this one.
        return format!(
            "the handler {handler} tried to change {path}, and {at} is granted to it for reading only; this in rouse.toml, instead of that grant, would allow it:\n{}{}",
            lines::this_dir(
                &grant.handler,
                &grant.dir.display().to_string(),
                at,
                Mode::ReadWrite
            ),
            lines::THEN_AGAIN
        );
    }
    let mode = match changes {
        true => Mode::ReadWrite,
        false => Mode::Read,
    };
    let at = mount(path).filter(|_| dir.is_none());
    format!(
        "the handler {handler} asked for {path}, and no path leads out of a granted directory; these lines in rouse.toml would grant another one, with your directory for …:\n{}",
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
    fn a_denial_names_the_path_and_who_can_change_it() {
        let granted = Granted {
            handler: "x.y".into(),
            dirs: vec![
                dir("/in", Mode::Read),
                dir("/out", Mode::Read),
                dir("/work", Mode::ReadWrite),
            ],
            only_read_for_job: vec!["/out".into()],
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
        assert!(by_job.contains("leave only reading of /out"), "{by_job}");
        assert!(!by_job.contains("rouse.toml"), "{by_job}");
        let out = denial(&granted, "/etc/passwd", false);
        assert!(
            out.contains("no path leads out") && out.contains("at = \"/etc\""),
            "{out}"
        );
        let by_link = denial(&granted, "/work/link", true);
        assert!(
            by_link.contains("at = \"…\"\nmode = \"read-write\""),
            "{by_link}"
        );
    }
}
