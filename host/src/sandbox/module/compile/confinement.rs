//! The confinement of a compiler, which cannot reach files, servers, other processes or more privileged programs,
//! regardless of what a module does to it. The files that it needs are opened beforehand; after that, no files or
//! sockets can be opened.

use std::io;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, Ruleset, RulesetAttr as _, RulesetError, RulesetStatus,
    Scope,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The extent to which the kernel supports the confinement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sandbox) enum Confinement {
    /// Nothing: the kernel is older than Linux 5.13, or was built or started without Landlock.
    None,
    /// At least most of the file system; restricting truncation needs Linux 6.2, signals 6.12.
    Partial,
    /// All of it.
    Full,
}

/// The newest requested ABI: Linux 6.12.
const REQUESTED_ABI: ABI = ABI::V6;

/// Confines the calling thread, and threads that it starts, permanently.
///
/// # Errors
/// When the kernel supports Landlock and the call fails. Without Landlock, the thread still cannot gain privileges.
pub(super) fn confine() -> io::Result<Confinement> {
    let restrict = || -> Result<_, RulesetError> {
        Ruleset::default()
            .handle_access(AccessFs::from_all(REQUESTED_ABI))?
            .handle_access(AccessNet::from_all(REQUESTED_ABI))?
            .scope(Scope::from_all(REQUESTED_ABI))?
            .create()?
            // Without rules, nothing is allowed.
            .restrict_self()
    };
    let status = restrict().map_err(io::Error::other)?;
    if !status.no_new_privs {
        return Err(io::Error::other("it cannot set no_new_privs"));
    }
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => Confinement::Full,
        RulesetStatus::PartiallyEnforced => Confinement::Partial,
        RulesetStatus::NotEnforced => Confinement::None,
    })
}

/// Permanently prevents new descriptors, processes, threads and file growth in this process. Works without Landlock.
/// Root can still start processes and threads.
///
/// # Errors
/// When the system refuses a limit.
pub(super) fn close() -> io::Result<()> {
    // A child would have CPU time of its own, and could outlive the host.
    for resource in [Resource::Nofile, Resource::Nproc, Resource::Fsize] {
        lower_limit(resource, 0, 0)?;
    }
    Ok(())
}

/// Sets a limit, and never raises one that is already set.
pub(super) fn lower_limit(resource: Resource, current: u64, maximum: u64) -> io::Result<()> {
    let existing = getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let limit = Rlimit {
        current: Some(current.min(existing)),
        maximum: Some(maximum.min(existing)),
    };
    Ok(setrlimit(resource, limit)?)
}

impl Confinement {
    /// Logs the actions that the confinement cannot prevent on this host.
    pub(in crate::sandbox) fn log(self) {
        match self {
            Self::Full => {}
            Self::Partial => tracing::info!(
                "this kernel supports part of Landlock: compilers cannot open files or connections, but could signal other processes of this user (before Linux 6.12) and truncate its files (before 6.2)"
            ),
            Self::None => tracing::warn!(
                "this kernel has no Landlock (Linux 5.13, enabled at boot): compilers of modules are limited in time and memory and cannot open files or connections, but could remove, rename and truncate files of this user and signal its processes"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_confined_thread_opens_and_starts_nothing_and_keeps_open_files() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut open = File::open("/proc/self/statm").unwrap();
        let status = "/proc/thread-self/status";
        let confined = std::thread::spawn(move || {
            let mut before = fs::File::open(status).unwrap();
            let confinement = confine().expect("it can be confined");
            let mut text = String::new();
            before.read_to_string(&mut text).unwrap();
            assert!(text.contains("NoNewPrivs:\t1"), "{text}");
            if confinement == Confinement::None {
                assert!(std::env::var_os("CI").is_none(), "CI has Landlock");
                eprintln!("skipped: this kernel has no Landlock");
                return;
            }
            let denied = |action: &str, error: Option<io::Error>| {
                let kind = error.map(|error| error.kind());
                assert_eq!(kind, Some(ErrorKind::PermissionDenied), "{action}");
            };
            denied("a file", File::open("/etc/passwd").err());
            denied("a list", fs::read_dir("/").err());
            denied("a new file", File::create("/tmp/confined").err());
            denied("a program", Command::new("/bin/true").status().err());
            if confinement == Confinement::Full {
                denied("a server", TcpStream::connect(address).err());
                denied("a port", TcpListener::bind("127.0.0.1:0").err());
            }
            let mut text = String::new();
            open.read_to_string(&mut text).unwrap();
            assert!(!text.is_empty());
        });
        confined.join().expect("the confinement denied everything");
        assert!(
            File::open("/etc/passwd").is_ok(),
            "other threads are not confined"
        );
    }

    #[test]
    #[ignore = "limits its process: a_closed_process_makes_no_descriptor_and_no_process runs it in a process of its own"]
    fn closed() {
        let mut open = File::open("/proc/self/statm").unwrap();
        let (mut reads, mut writes) = io::pipe().unwrap();
        close().expect("it can be closed");
        let denied = |action: &str, error: Option<io::Error>, code: i32| {
            let error = error.and_then(|error| error.raw_os_error());
            assert_eq!(error, Some(code), "{action}");
        };
        denied("a file", File::open("/dev/null").err(), libc::EMFILE);
        denied("a pipe", io::pipe().err(), libc::EMFILE);
        // The copy's number must be at least 3, which is above the limit.
        denied("a copy", open.try_clone().err(), libc::EINVAL);
        let socket = UnixStream::connect("/run/postgresql/.s.PGSQL.5432");
        denied("a Unix socket", socket.err(), libc::EMFILE);
        let socket = UnixDatagram::unbound();
        denied("a datagram socket", socket.err(), libc::EMFILE);
        let socket = UdpSocket::bind("127.0.0.1:0");
        denied("a UDP socket", socket.err(), libc::EMFILE);
        let socket = TcpStream::connect("127.0.0.1:1");
        denied("a TCP socket", socket.err(), libc::EMFILE);
        if rustix::process::getuid().is_root() {
            eprintln!("skipped: root may start processes");
        } else {
            let program = Command::new("/bin/true").status();
            denied("a process", program.err(), libc::EAGAIN);
            let thread = std::thread::Builder::new().spawn(|| {});
            denied("a thread", thread.err(), libc::EAGAIN);
        }
        // Open descriptors keep working.
        let mut text = String::new();
        open.read_to_string(&mut text).unwrap();
        assert!(!text.is_empty());
        writes.write_all(b"x").unwrap();
        drop(writes);
        reads.read_to_string(&mut text).unwrap();
        assert!(text.ends_with('x'));
        println!("it is closed");
    }

    #[test]
    fn a_closed_process_makes_no_descriptor_and_no_process() {
        let test = std::env::current_exe().unwrap();
        let mut command = Command::new(&test);
        let folder = tempfile::tempdir().unwrap();
        if rustix::process::getuid().is_root() {
            // Another user may not be able to read this program where it is.
            let everyone = fs::Permissions::from_mode(0o755);
            fs::set_permissions(folder.path(), everyone).unwrap();
            // Another process copies it: if this one had the copy open for writing while another test starts a child,
            // it could not be executed until that child runs its program.
            let copy = folder.path().join("test");
            let copied = Command::new("cp").arg(&test).arg(&copy).status();
            assert!(copied.unwrap().success());
            command = Command::new(&copy);
            command.uid(65_534).gid(65_534);
        }
        let output = command
            .args([
                "--exact",
                "sandbox::module::compile::confinement::tests::closed",
            ])
            .args(["--ignored", "--nocapture", "--test-threads", "1"])
            .current_dir("/")
            .output()
            .expect("it starts");
        let stdout = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && stdout.contains("it is closed"),
            "{stdout}{errors}"
        );
        assert!(!errors.contains("skipped"), "{errors}");
    }
}
