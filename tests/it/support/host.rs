//! A child process whose output can be waited for.

use std::{
    env,
    io::{BufRead, BufReader, Read},
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::worker::TIMEOUT;

/// The `rouse` that was built along with this test binary.
pub(crate) fn rouse_binary() -> PathBuf {
    built("rouse")
}

/// A program of the workspace that was built along with this test binary.
pub(crate) fn built(name: &str) -> PathBuf {
    let own = env::current_exe().expect("the path of the test binary");
    // target/<profile>/deps/it-<hash>
    let profile = own.ancestors().nth(2).expect("the target directory");
    let path = profile.join(name);
    assert!(
        path.is_file(),
        "{} is missing: run `cargo build --workspace --bin {name}`, or `cargo xtask test`, which builds it",
        path.display()
    );
    path
}

/// A `rouse` command without arguments, which shares the tests' cache of machine code.
pub(crate) fn rouse() -> Command {
    let mut command = Command::new(rouse_binary());
    command.env("ROUSE_CACHE_DIR", super::code_cache());
    if let Some(bin) = super::postgres_bin() {
        command.env("ROUSE_PG_BIN", bin);
    }
    command
}

/// A child process: `rouse …`, or any other. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Host {
    child: Child,
    output: Arc<Output>,
}

#[derive(Debug, Default)]
struct Output {
    lines: Mutex<Lines>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Lines {
    all: Vec<String>,
    /// Whether each line came from stderr.
    of_stderr: Vec<bool>,
    /// The number of the two streams that have ended.
    ended: usize,
}

impl Output {
    /// A test that fails while it waits poisons the lock, but the lines are still valid.
    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the lines contain what `find` returns. Panics with all lines if it takes too long, or if both
    /// streams end first.
    fn wait_for<T>(
        &self,
        timeout: Duration,
        missing: &str,
        find: impl Fn(&Lines) -> Option<T>,
    ) -> T {
        let until = Instant::now() + timeout;
        let mut lines = self.lock();
        loop {
            if let Some(found) = find(&lines) {
                return found;
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero() && lines.ended < 2,
                "{missing}; the output was:\n{}",
                lines.all.join("\n")
            );
            lines = self
                .changed
                .wait_timeout(lines, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Host {
    /// Starts `rouse` with these arguments and, in addition to the test's own, these variables.
    pub(crate) fn rouse(args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = rouse();
        command.args(args).envs(variables.iter().copied());
        Self::spawn(command)
    }

    /// Starts any command.
    pub(crate) fn spawn(command: Command) -> Self {
        let mut host = Self::spawn_with_unread_stderr(command);
        host.read_stderr();
        host
    }

    /// Starts any command. Nobody reads its stderr until [`read_stderr`](Self::read_stderr).
    pub(crate) fn spawn_with_unread_stderr(mut command: Command) -> Self {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("start {command:?}: {error}"));
        let output = Arc::new(Output::default());
        collect(
            child.stdout.take().expect("stdout is piped"),
            false,
            &output,
        );
        Self { child, output }
    }

    /// Starts to read the stderr of the process.
    pub(crate) fn read_stderr(&mut self) {
        let stderr = self.child.stderr.take();
        let stderr = stderr.expect("stderr is piped, and not read yet");
        collect(stderr, true, &self.output);
    }

    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line of stdout or stderr, past or future; panics with all output if it does not appear in time.
    pub(crate) fn line(&self, timeout: Duration, wanted: impl Fn(&str) -> bool) -> String {
        self.output
            .wait_for(timeout, "the line did not appear", |lines| {
                lines.all.iter().find(|line| wanted(line)).cloned()
            })
    }

    /// Waits until this many lines have appeared on stdout and stderr together, and returns them; panics with all
    /// output if they do not appear in time.
    pub(crate) fn first_lines(&self, timeout: Duration, count: usize) -> Vec<String> {
        let missing = format!("{count} lines did not appear");
        self.output.wait_for(timeout, &missing, |lines| {
            lines.all.get(..count).map(<[String]>::to_vec)
        })
    }

    /// All lines so far.
    pub(crate) fn output(&self) -> String {
        let lines = self.output.lock();
        lines.all.join("\n")
    }

    /// Sends a signal, for instance `libc::SIGTERM`, to this process alone.
    pub(crate) fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.child.id()).expect("process ids are positive");
        #[expect(unsafe_code, reason = "the standard library can only kill")]
        // SAFETY: a plain system call. The child is not reaped before `exit` or `drop`, which take `self`, so the id is
        // still its own.
        let result = unsafe { libc::kill(pid, signal) };
        assert_eq!(result, 0, "signal {signal} to {pid}");
    }

    /// Waits until the process has taken a pending signal. It then learns of the signal before it gets its next
    /// response from the database.
    pub(crate) async fn until_signal_is_taken(&self, timeout: Duration) {
        let path = format!("/proc/{}/status", self.pid());
        let is_pending = || {
            let status = std::fs::read_to_string(&path).unwrap();
            let pending = status
                .lines()
                .find_map(|line| line.strip_prefix("ShdPnd:"))
                .expect("the mask of the signals that are pending for the process");
            u64::from_str_radix(pending.trim(), 16).unwrap() != 0
        };
        let taken = async {
            while is_pending() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let taken = tokio::time::timeout(timeout, taken).await;
        taken.expect("the signal is taken");
    }

    /// Waits until it has ended on its own, and returns all of its stdout followed by all of its stderr, since the
    /// order between the two is unknown; panics with all output if it does not end in time.
    pub(crate) fn exit(mut self, timeout: Duration) -> (ExitStatus, String) {
        let text = self.output.wait_for(timeout, "it did not end", |lines| {
            let of = |stderr| {
                let lines = lines.all.iter().zip(&lines.of_stderr);
                lines.filter_map(move |(line, is)| (*is == stderr).then_some(line.as_str()))
            };
            // Both streams end with the process, unless a child of it keeps them open.
            (lines.ended == 2).then(|| of(false).chain(of(true)).collect::<Vec<_>>().join("\n"))
        });
        let status = self.child.wait().expect("the child can be waited for");
        (status, text)
    }

    /// Sends SIGTERM and waits until it has ended. Returns its output like [`exit`](Self::exit); panics with it if the
    /// process did not succeed.
    pub(crate) fn stop(self) -> String {
        self.signal(libc::SIGTERM);
        let (status, output) = self.exit(TIMEOUT);
        assert!(status.success(), "{status}: {output}");
        output
    }

    /// Kills it (SIGKILL) and waits until it has ended.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("the child can be killed");
        let status = self.child.wait().expect("the child can be waited for");
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{}", self.output());
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn collect(stream: impl Read + Send + 'static, is_stderr: bool, output: &Arc<Output>) {
    let output = Arc::clone(output);
    thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut bytes = Vec::new();
        while reader.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
            let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            bytes.clear();
            let mut lines = output.lock();
            lines.all.push(line);
            lines.of_stderr.push(is_stderr);
            drop(lines);
            output.changed.notify_all();
        }
        output.lock().ended += 1;
        output.changed.notify_all();
    });
}
