//! Starts the server, waits until it is ready, and retries while an earlier one is shutting down.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

use super::{
    Settings, StartError, binaries::Binaries, error::Trying, home::Home, process::Process,
};

/// How long to wait for an earlier server on the same data to end.
const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the server may take to become ready, including crash recovery.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
const CHECK_EVERY: Duration = Duration::from_millis(5);
const RETRY_EVERY: Duration = Duration::from_millis(100);
/// The maximum length of the log excerpt in an error, bytes.
const TAIL_BYTES_MAX: usize = 4096;

/// The port of a server that does not listen on TCP: the name of its socket contains a port anyway.
pub(super) const SOCKET_PORT: u16 = 5432;

/// Starts the server and returns when it accepts connections.
pub(super) fn launch(
    settings: &Settings,
    home: &Home,
    binaries: &Binaries,
    socket_dir: &Path,
) -> Result<Process, StartError> {
    let log_path = home.log_path();
    let log = open_log(&log_path)?;
    let started = Instant::now();
    loop {
        let before = log.metadata().map_or(0, |found| found.len());
        let mut command = command(settings, home, binaries, socket_dir);
        let duplicate = || log.try_clone().trying(|| "duplicate the log file".into());
        command.stdout(duplicate()?).stderr(duplicate()?);
        if settings.cancel.is_cancelled() {
            return Err(StartError::Cancelled);
        }
        tracing::debug!("starting Postgres on {}", home.cluster().display());
        let process = Process::spawn(command).trying(|| "start postgres".into())?;

        let Some(ended) = watch(&process, &home.cluster(), &settings.cancel) else {
            return Ok(process);
        };
        let tail = tail(&log_path, before);
        match ended {
            Unready::Ended(_) if predecessor_is_running(&tail) => {
                if started.elapsed() < PREDECESSOR_TIMEOUT {
                    thread::sleep(RETRY_EVERY);
                    continue;
                }
                return Err(StartError::StillRunning {
                    pid: postmaster_pid(&home.cluster())
                        .map_or_else(String::new, |pid| format!(" (pid {pid})")),
                    cluster: home.cluster(),
                    waited_s: PREDECESSOR_TIMEOUT.as_secs(),
                    tail,
                });
            }
            Unready::Ended(status) => {
                return Err(match settings.port {
                    Some(port) if tail.contains("could not bind IPv4") => {
                        StartError::PortTaken { port }
                    }
                    Some(_) | None => StartError::Ended {
                        status: status.to_string(),
                        log: log_path,
                        tail,
                    },
                });
            }
            Unready::Cancelled => {
                // Dropping the process would stop the server without a checkpoint.
                process.stop();
                return Err(StartError::Cancelled);
            }
            Unready::Slow => {
                return Err(StartError::NotReady {
                    waited_s: READY_TIMEOUT.as_secs(),
                    log: log_path,
                    tail,
                });
            }
        }
    }
}

fn command(settings: &Settings, home: &Home, binaries: &Binaries, socket_dir: &Path) -> Command {
    let mut command = Command::new(binaries.program("postgres"));
    command.arg("-D").arg(home.cluster());
    command.arg("-k").arg(socket_dir);
    let mut set = |name: &str, value: &str| {
        command.arg("-c").arg(format!("{name}={value}"));
    };
    set("port", &settings.port.unwrap_or(SOCKET_PORT).to_string());
    let addresses = settings.port.map_or("", |_| "127.0.0.1");
    set("listen_addresses", addresses);
    set("max_connections", &settings.connections_max.to_string());
    set("cluster_name", "rouse");
    // The default search path starts with the schema that has the user's name, `rouse`: tables that people create would
    // be among Rouse's own.
    set("search_path", "public");
    if !settings.fsync {
        set("fsync", "off");
        set("full_page_writes", "off");
    }
    // The server would take defaults from these variables, which are meant for clients.
    for name in [
        "PGDATESTYLE",
        "PGTZ",
        "PGCLIENTENCODING",
        "PGDATA",
        "PGPORT",
    ] {
        command.env_remove(name);
    }
    command
        .env("LC_ALL", "C")
        .current_dir("/")
        .stdin(Stdio::null());
    home.account.run_as(&mut command);
    command
}

/// The reason why a started server is not ready.
enum Unready {
    Ended(ExitStatus),
    Cancelled,
    Slow,
}

/// Watches a starting server; `None` once it is ready.
fn watch(process: &Process, cluster: &Path, cancel: &CancellationToken) -> Option<Unready> {
    let started = Instant::now();
    loop {
        if let Some(status) = process.wait(CHECK_EVERY) {
            return Some(Unready::Ended(status));
        }
        if is_ready(cluster, process.pid()) {
            return None;
        }
        if cancel.is_cancelled() {
            return Some(Unready::Cancelled);
        }
        if started.elapsed() > READY_TIMEOUT {
            return Some(Unready::Slow);
        }
    }
}

/// `postmaster.pid` has the process id in its first line and the state in its eighth; `pg_ctl -w` waits for the same
/// state.
fn is_ready(cluster: &Path, pid: u32) -> bool {
    let Ok(text) = fs::read_to_string(cluster.join("postmaster.pid")) else {
        return false;
    };
    let mut lines = text.lines().map(str::trim);
    lines.next() == Some(pid.to_string().as_str()) && lines.nth(6) == Some("ready")
}

fn postmaster_pid(cluster: &Path) -> Option<u32> {
    let text = fs::read_to_string(cluster.join("postmaster.pid")).ok()?;
    text.lines().next()?.trim().parse().ok()
}

/// Recognises the messages of Postgres if another server, or its orphaned backends, are using the same data.
fn predecessor_is_running(tail: &str) -> bool {
    [
        "FATAL:  lock file",
        "FATAL:  pre-existing shared memory block",
    ]
    .iter()
    .any(|words| tail.contains(words))
}

/// Opens a new log for each start; the previous one is kept next to it.
fn open_log(path: &Path) -> Result<File, StartError> {
    match fs::rename(path, path.with_extension("log.1")) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).trying(|| format!("move {} aside", path.display())),
    }
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .trying(|| format!("open {}", path.display()))
}

/// The end of the log, from the position `from` on.
fn tail(path: &Path, from: u64) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    match read() {
        Ok(bytes) => {
            let end = &bytes[bytes.len().saturating_sub(TAIL_BYTES_MAX)..];
            String::from_utf8_lossy(end).trim_end().to_owned()
        }
        Err(error) => format!("(the log cannot be read: {error})"),
    }
}
