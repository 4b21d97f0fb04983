//! What a compiler cannot reach, whatever a file makes of it: no file, no server, no process of others, and no program with more
//! rights than its own. What it needs is open by then.

use std::io;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, Ruleset, RulesetAttr as _, RulesetError, RulesetStatus,
    Scope,
};

/// How much of the fence the kernel knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sandbox) enum Fence {
    /// Nothing: it is older than Linux 5.13, or was built or started without Landlock.
    None,
    /// The file system at least; connections need Linux 6.7, signals and abstract sockets 6.12.
    Partial,
    /// All of it.
    Full,
}

/// The newest of what is asked for: Linux 6.12.
const WANTED: ABI = ABI::V6;

/// Fences the thread that calls this, and those that it starts, for good.
///
/// # Errors
/// When the kernel knows Landlock, and fails. Where it does not know it, the thread gets no new rights all the same.
pub(super) fn fence() -> io::Result<Fence> {
    let fence = || -> Result<_, RulesetError> {
        Ruleset::default()
            .handle_access(AccessFs::from_all(WANTED))?
            .handle_access(AccessNet::from_all(WANTED))?
            .scope(Scope::from_all(WANTED))?
            .create()?
            // Nothing is allowed that is not listed here.
            .restrict_self()
    };
    let status = fence().map_err(io::Error::other)?;
    if !status.no_new_privs {
        return Err(io::Error::other("it cannot give up getting new rights"));
    }
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => Fence::Full,
        RulesetStatus::PartiallyEnforced => Fence::Partial,
        RulesetStatus::NotEnforced => Fence::None,
    })
}

impl Fence {
    /// Says what the compilers of this host cannot be kept from.
    pub(in crate::sandbox) fn tell(self) {
        match self {
            Self::Full => {}
            Self::Partial => tracing::info!(
                "this kernel knows a part of Landlock: compilers reach no files, but they could connect somewhere or signal others (Linux 6.12 knows all of it)"
            ),
            Self::None => tracing::warn!(
                "this kernel has no Landlock (Linux 5.13, enabled at boot): compilers of modules are limited in time and memory, but could open what this user can"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{ErrorKind, Read as _};
    use std::net::{TcpListener, TcpStream};
    use std::process::Command;

    use super::*;

    #[test]
    fn who_is_fenced_opens_and_starts_nothing_and_keeps_what_was_open() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut open = File::open("/proc/self/statm").unwrap();
        let status = "/proc/thread-self/status";
        let fenced = std::thread::spawn(move || {
            let mut before = fs::File::open(status).unwrap();
            let fence = fence().expect("it can be fenced");
            let mut text = String::new();
            before.read_to_string(&mut text).unwrap();
            assert!(text.contains("NoNewPrivs:\t1"), "{text}");
            if fence == Fence::None {
                assert!(std::env::var_os("CI").is_none(), "CI has Landlock");
                eprintln!("skipped: this kernel has no Landlock");
                return;
            }
            let denied = |what: &str, error: Option<io::Error>| {
                let kind = error.map(|error| error.kind());
                assert_eq!(kind, Some(ErrorKind::PermissionDenied), "{what}");
            };
            denied("a file", File::open("/etc/passwd").err());
            denied("a list", fs::read_dir("/").err());
            denied("a new file", File::create("/tmp/fenced").err());
            denied("a program", Command::new("/bin/true").status().err());
            if fence == Fence::Full {
                denied("a server", TcpStream::connect(address).err());
                denied("a port", TcpListener::bind("127.0.0.1:0").err());
            }
            let mut text = String::new();
            open.read_to_string(&mut text).unwrap();
            assert!(!text.is_empty());
        });
        fenced.join().expect("nothing was possible");
        assert!(File::open("/etc/passwd").is_ok(), "others are free");
    }
}
