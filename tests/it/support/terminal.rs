//! A command on a terminal, as people see it.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::FromRawFd as _;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use super::worker::TIMEOUT;

/// Runs a command to its end on a terminal with this many columns, and returns everything that it wrote.
pub(crate) fn on_terminal(command: Command, columns: u16) -> String {
    run(command, columns, None)
}

/// Like [`on_terminal`], for a command that runs until a signal: it gets SIGTERM once it has written this.
pub(crate) fn on_terminal_until(command: Command, wanted: &str) -> String {
    run(command, 80, Some(wanted))
}

fn run(mut command: Command, columns: u16, until: Option<&str>) -> String {
    let (mut terminal, its_end) = terminal(columns);
    let own = || Stdio::from(its_end.try_clone().expect("another descriptor"));
    command.stdin(Stdio::null()).stdout(own()).stderr(own());
    let mut child = command.spawn().expect("start the command");
    // `Command` keeps copies of the descriptors, which would keep the terminal open.
    drop((command, its_end));
    // Without a timeout, the test would wait forever for a command that never writes what is wanted.
    let (done, ended) = mpsc::channel::<()>();
    let id = child.id().to_string();
    let watching = thread::spawn(move || {
        if ended.recv_timeout(2 * TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            let _ = Command::new("kill").args(["-KILL", &id]).status();
        }
    });
    // A character may arrive in two parts.
    let (mut written, mut bytes) = (Vec::new(), [0; 4096]);
    let mut signalled = until.is_none();
    // Once the last process has closed the other end, reading is an error (EIO).
    while let Ok(read @ 1..) = terminal.read(&mut bytes) {
        written.extend_from_slice(&bytes[..read]);
        let is_wanted = |wanted: &str| String::from_utf8_lossy(&written).contains(wanted);
        if !signalled && until.is_some_and(is_wanted) {
            let pid = child.id().to_string();
            let sent = Command::new("kill").args(["-TERM", &pid]).status();
            assert!(sent.expect("kill").success());
            signalled = true;
        }
    }
    drop(done);
    watching.join().expect("it does not panic");
    let written = String::from_utf8_lossy(&written);
    assert!(
        child.wait().expect("wait for the command").success(),
        "{written}"
    );
    written.replace("\r\n", "\n")
}

fn terminal(columns: u16) -> (File, File) {
    let size = libc::winsize {
        ws_row: 24,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let (mut ours, mut its) = (-1, -1);
    #[expect(unsafe_code, reason = "the standard library has no terminals")]
    // SAFETY: both descriptors are written by a call that succeeds and are not owned elsewhere; name and settings are
    // null.
    unsafe {
        let opened = libc::openpty(
            &raw mut ours,
            &raw mut its,
            std::ptr::null_mut(),
            std::ptr::null(),
            &raw const size,
        );
        assert_eq!(opened, 0, "a terminal");
        (File::from_raw_fd(ours), File::from_raw_fd(its))
    }
}
