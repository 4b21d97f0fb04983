//! What a guest is told that did something to a file which is not permitted.

use crate::sandbox::grants::{Granted, GrantedDir, Mode};

/// What was denied, with whoever can change it: the operator, or whoever enqueues the job where it was the job that left reading only.
pub(super) fn denial(granted: &Granted) -> String {
    let taken = &granted.only_read_for_job;
    let by_operator =
        |dir: &GrantedDir| dir.grant.mode == Mode::Read && !taken.contains(&dir.grant.at);
    let mut why = Vec::new();
    if taken.is_empty() || granted.dirs.iter().any(by_operator) {
        why.push("directories are granted for reading only unless rouse.toml has mode = \"read-write\" there".to_owned());
    }
    why.extend(taken.iter().map(|at| {
        format!("the grants of this job leave only reading of {at} (enqueue it with \"{at}\" under \"dirs\" of its grants, or without)")
    }));
    format!(
        "the handler did something to a file that is not permitted: {}, and no path leads out of a directory",
        why.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::grants::{Grant, Root};

    fn dir(at: &str, mode: Mode) -> GrantedDir {
        let grant = Grant {
            handler: "x".into(),
            dir: "/tmp".into(),
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
    fn a_denial_names_who_can_change_it() {
        let said = |dirs, taken: &[&str]| {
            denial(&Granted {
                dirs,
                only_read_for_job: taken.iter().map(|at| (*at).to_owned()).collect(),
                ..Granted::default()
            })
        };
        let by_operator = said(vec![dir("/in", Mode::Read)], &[]);
        assert!(by_operator.contains("rouse.toml") && !by_operator.contains("this job"));
        let by_job = said(vec![dir("/out", Mode::Read)], &["/out"]);
        assert!(by_job.contains("reading of /out") && !by_job.contains("rouse.toml"));
        let by_either = vec![dir("/in", Mode::Read), dir("/out", Mode::Read)];
        let either = said(by_either, &["/out"]);
        assert!(either.contains("reading of /out") && either.contains("rouse.toml"));
    }
}
