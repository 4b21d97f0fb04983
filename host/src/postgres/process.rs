//! A child process that does not outlive this one.

use std::{
    io,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, ExitStatus},
    sync::{Arc, Condvar, Mutex, PoisonError, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

/// The time limit of a clean stop: connections are cut at once, then a checkpoint is written.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// A child that gets SIGINT from the kernel when this process ends for any reason.
#[derive(Debug)]
pub(super) struct Process {
    pid: Pid,
    exit: Arc<Exit>,
    /// The kernel sends the signal when the *thread* that created the child ends, so this thread lives exactly as long
    /// as the child.
    keeper: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Exit {
    status: Mutex<Option<ExitStatus>>,
    changed: Condvar,
}

impl Process {
    pub(super) fn spawn(mut command: Command) -> io::Result<Self> {
        let host = rustix::process::getpid();
        let prepare = move || {
            // A separate session: Ctrl-C at the terminal reaches only the host, which stops the child in order.
            rustix::process::setsid()?;
            rustix::process::set_parent_process_death_signal(Some(Signal::INT))?;
            // If the host died before the death signal was set, the signal would never come.
            if rustix::process::getppid() != Some(host) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        };
        // Runs after the change of user, which would have cleared the death signal.
        #[expect(
            unsafe_code,
            reason = "pre_exec is the only place for the death signal"
        )]
        // SAFETY: between fork and exec only async-signal-safe calls are made: three plain
        // system calls, no allocation, no lock.
        unsafe {
            command.pre_exec(prepare);
        }

        let exit = Arc::new(Exit::default());
        let seen = Arc::clone(&exit);
        let (started, start) = mpsc::channel();
        let keeper = thread::Builder::new()
            .name("postgres-keeper".into())
            .spawn(move || match command.spawn() {
                Ok(child) => {
                    // The receiver waits below until it has this message.
                    let _ = started.send(Ok(child.id()));
                    keep(child, &seen);
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                }
            })?;
        let pid = start
            .recv()
            .map_err(|_| io::Error::other("the keeper thread ended"))??;
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        Ok(Self {
            pid: pid.ok_or_else(|| io::Error::other("no valid process id"))?,
            exit,
            keeper: Some(keeper),
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Waits until the child has ended, for at most `timeout`.
    pub(super) fn wait(&self, timeout: Duration) -> Option<ExitStatus> {
        let status = self.exit.lock();
        *self
            .exit
            .changed
            .wait_timeout_while(status, timeout, |status| status.is_none())
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// Requests a clean stop and waits for the end; `None` if it takes too long.
    pub(super) fn stop(&self) -> Option<ExitStatus> {
        self.signal(Signal::INT);
        self.wait(STOP_TIMEOUT)
    }

    /// Sends a signal, unless the child has ended.
    pub(super) fn signal(&self, signal: Signal) {
        // The keeper reaps under the same lock, so the pid cannot have been reused.
        let status = self.exit.lock();
        if status.is_none() {
            // It can only fail if the child no longer exists, and then there is nothing to signal.
            let _ = rustix::process::kill_process(self.pid, signal);
        }
    }
}

impl Exit {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<ExitStatus>> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::QUIT);
        if self.wait(Duration::from_secs(5)).is_none() {
            self.signal(Signal::KILL);
        }
        if let Some(keeper) = self.keeper.take() {
            // A panic of the thread has already been printed; the child has ended or was killed.
            let _ = keeper.join();
        }
    }
}

fn keep(mut child: Child, exit: &Exit) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // Leaves the child unreaped, so that its pid is not reused before the lock is held.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = rustix::process::waitid(WaitId::Pid(pid), options)
        {
        }
    }
    let mut status = exit.lock();
    // Without a status, the child has ended anyway; 1 means "not cleanly".
    *status = Some(child.wait().unwrap_or(ExitStatus::from_raw(1 << 8)));
    exit.changed.notify_all();
}
