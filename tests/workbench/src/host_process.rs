//! A temporary `rouse` process that is always stopped and cleaned up.

use std::collections::VecDeque;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A first start creates a database cluster, which takes a few seconds on a small machine under load.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// The host finishes its running attempts; the jobs of demo and benchmarks take milliseconds.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of log lines shown after a failure.
const LOG_LINES_MAX: usize = 60;

/// The process, with the end of its output.
pub struct HostProcess {
    name: String,
    child: Child,
    log: Log,
    ready: Option<oneshot::Receiver<Ready>>,
    readers: [JoinHandle<()>; 2],
}

/// The contents of the ready event.
pub struct Ready {
    /// URL of the database.
    pub url: Option<String>,
    /// The handlers that the process serves.
    pub handlers: Vec<String>,
}

type Log = Arc<Mutex<VecDeque<String>>>;

impl HostProcess {
    /// Starts a `rouse` command.
    pub fn start(command: std::process::Command) -> Result<Self> {
        let name = format!(
            "rouse {}",
            command
                .get_args()
                .next()
                .unwrap_or_default()
                .to_string_lossy()
        );
        let mut command = Command::from(command);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C in a terminal reaches only this program, which stops the process gracefully.
            .process_group(0)
            .kill_on_drop(true);
        stop_with_parent(&mut command);
        let mut child = command.spawn().with_context(|| format!("start `{name}`"))?;

        let log = Log::default();
        let (announce, ready) = oneshot::channel();
        let stdout = child.stdout.take().context("stdout is piped")?;
        let stderr = child.stderr.take().context("stderr is piped")?;
        let readers = [
            tokio::spawn(read_lines(stdout, log.clone(), Some(announce))),
            tokio::spawn(read_lines(stderr, log.clone(), None)),
        ];
        Ok(Self {
            name,
            child,
            log,
            ready: Some(ready),
            readers,
        })
    }

    /// Waits for the `{"event": "ready"}` that `rouse … --json` prints once it is ready.
    pub async fn ready(&mut self) -> Result<Ready> {
        let ready = self.ready.take().context("ready() was called twice")?;
        self.during(async {
            timeout(READY_TIMEOUT, ready)
                .await
                .with_context(|| format!("not ready after {READY_TIMEOUT:?}"))?
                .context("the process closed stdout before it was ready")
        })
        .await
    }

    /// The process id. `None` if the process has exited.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Does `work` while the process runs. If the work fails, the process exits on its own, or Ctrl-C or SIGTERM
    /// arrives, the process is stopped, and the error contains the end of its log.
    pub async fn during<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut interruption = Interruption::watch()?;
        let done = tokio::select! {
            done = work => done,
            status = self.child.wait() => match status {
                Ok(status) => Err(anyhow!("`{}` exited on its own: {status}", self.name)),
                Err(error) => Err(error.into()),
            },
            signal = interruption.wait() => Err(anyhow!("{signal}")),
        };
        match done {
            Ok(done) => Ok(done),
            Err(error) => bail!("{error:#}\n{}", self.end().await),
        }
    }

    /// Stops the process as an operator would, with SIGTERM, and waits for its end.
    pub async fn stop(&mut self) -> Result<ExitStatus> {
        if let Some(pid) = self.child.id().and_then(pid) {
            kill_process(pid, Signal::TERM).context("send SIGTERM")?;
        }
        match timeout(STOP_TIMEOUT, self.child.wait()).await {
            Ok(status) => Ok(status?),
            Err(_elapsed) => {
                self.child.kill().await?;
                bail!(
                    "`{}` did not stop within {STOP_TIMEOUT:?} and was killed",
                    self.name
                )
            }
        }
    }

    /// Stops the process after a failure, and returns the end of its log.
    pub async fn end(&mut self) -> String {
        let stopped = match self.stop().await {
            Ok(status) => format!("{status}"),
            Err(error) => format!("{error:#}"),
        };
        for reader in &mut self.readers {
            // The reader ends when its pipe is closed, which a grandchild may keep open: the wait is limited.
            let _ = timeout(Duration::from_secs(1), reader).await;
        }
        let mut text = format!(
            "--- the end of the log of `{}` ({stopped}) ---\n",
            self.name
        );
        for line in self.log.lock().unwrap_or_else(|e| e.into_inner()).iter() {
            text.push_str(line);
            text.push('\n');
        }
        text
    }
}

/// Watches for Ctrl-C and SIGTERM.
pub struct Interruption {
    interrupt: Signals,
    terminate: Signals,
}

impl Interruption {
    /// From now on neither signal terminates this process.
    pub fn watch() -> Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Waits for a signal, and returns its name.
    pub async fn wait(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "interrupted",
            _ = self.terminate.recv() => "terminated",
        }
    }

    /// Whether a signal has arrived since the watch started.
    pub async fn has_arrived(&mut self) -> bool {
        tokio::select! {
            biased;
            _ = self.wait() => true,
            () = std::future::ready(()) => false,
        }
    }
}

/// Reads a pipe to its end, keeps its last lines, and forwards the ready event.
async fn read_lines(
    pipe: impl AsyncRead + Unpin,
    log: Log,
    mut ready: Option<oneshot::Sender<Ready>>,
) {
    let mut lines = BufReader::new(pipe).lines();
    // A line that cannot be read ends the log, and thus the wait for the ready event.
    while let Ok(Some(line)) = lines.next_line().await {
        if let Ok(event) = serde_json::from_str::<Value>(&line)
            && event["event"] == "ready"
            && let Some(sender) = ready.take()
        {
            // The receiver is dropped if the start has timed out.
            let _ = sender.send(Ready::read(&event));
        }
        let mut log = log.lock().unwrap_or_else(|e| e.into_inner());
        if log.len() == LOG_LINES_MAX {
            log.pop_front();
        }
        log.push_back(line);
    }
}

impl Ready {
    fn read(event: &Value) -> Self {
        Self {
            url: event["url"].as_str().map(str::to_owned),
            handlers: event["handlers"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|name| name.as_str().map(str::to_owned))
                .collect(),
        }
    }
}

/// Whether a process with this id exists.
pub fn is_alive(id: u32) -> bool {
    pid(id).is_some_and(|pid| test_kill_process(pid).is_ok())
}

fn pid(id: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(id).ok()?)
}

/// Makes the kernel stop the process if this program is killed before it can do so.
#[cfg(target_os = "linux")]
pub fn stop_with_parent(command: &mut Command) {
    #[expect(
        unsafe_code,
        reason = "the standard library has no safe way to run code in the child"
    )]
    // SAFETY: between fork and exec only one prctl system call is made, which does not allocate anything.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            Ok(())
        });
    }
}

/// Other kernels do not offer such a function.
#[cfg(not(target_os = "linux"))]
pub fn stop_with_parent(_command: &mut Command) {}

/// A new folder on a disk, accessible to the user of the private Postgres.
pub fn scratch_folder() -> Result<TempDir> {
    // /tmp may be in memory, where fsync costs nothing.
    let base = match std::env::var_os("TMPDIR") {
        Some(dir) => PathBuf::from(dir),
        None if Path::new("/var/tmp").is_dir() => PathBuf::from("/var/tmp"),
        None => std::env::temp_dir(),
    };
    let folder = tempfile::Builder::new()
        .prefix("rouse-")
        .tempdir_in(&base)
        .with_context(|| format!("create a folder in {}", base.display()))?;
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
    Ok(folder)
}
