//! Finds the server that another process of this user runs on a data directory.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{USER, home};

/// The connection string of the server that runs on this data directory; none where none does.
pub fn running_url(data_dir: &Path, database: &str) -> Option<String> {
    let wanted = fs::canonicalize(data_dir).ok()?;
    [home::fallback(&wanted), wanted]
        .into_iter()
        .find_map(|dir| socket_of(&dir.join("cluster/postmaster.pid")))
        .map(|(socket_dir, port)| {
            let socket_dir = socket_dir.to_string_lossy().replace('/', "%2F");
            format!("postgres://{USER}@{socket_dir}:{port}/{database}")
        })
}

/// The socket that a postmaster's pid file names, if it is there.
fn socket_of(pid_file: &Path) -> Option<(PathBuf, u16)> {
    // Its lines: pid, data directory, start time, port, socket directory, …
    let text = fs::read_to_string(pid_file).ok()?;
    let mut lines = text.lines().skip(3);
    let port: u16 = lines.next()?.parse().ok()?;
    let socket_dir = PathBuf::from(lines.next()?);
    // A server that was killed leaves its pid file behind; nothing answers there.
    let socket = socket_dir.join(format!(".s.PGSQL.{port}"));
    std::os::unix::net::UnixStream::connect(socket).ok()?;
    Some((socket_dir, port))
}
