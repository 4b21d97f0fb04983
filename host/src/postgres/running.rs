//! Finds the server that another process of this user is running on a data directory.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::server::encode;
use super::{USER, home};

/// A server that another process is running.
#[derive(Debug, Clone)]
pub struct Running {
    /// The directory of its files.
    pub data_dir: PathBuf,
    socket_dir: PathBuf,
    port: u16,
}

impl Running {
    /// The server that is running on this data directory; `None` if there is none.
    pub fn find(data_dir: &Path) -> Option<Self> {
        let wanted = fs::canonicalize(data_dir).ok()?;
        [home::fallback(&wanted), wanted]
            .into_iter()
            .find_map(|data_dir| {
                let (socket_dir, port) = socket_of(&data_dir.join("cluster/postmaster.pid"))?;
                Some(Self {
                    data_dir,
                    socket_dir,
                    port,
                })
            })
    }

    /// A connection string for one of its databases.
    pub fn url(&self, database: &str) -> String {
        let socket_dir = self.socket_dir.to_string_lossy().replace('/', "%2F");
        let database = encode(database);
        format!("postgres://{USER}@{socket_dir}:{}/{database}", self.port)
    }
}

/// The socket that a postmaster's pid file names, if it exists.
fn socket_of(pid_file: &Path) -> Option<(PathBuf, u16)> {
    // Its lines: pid, data directory, start time, port, socket directory, …
    let text = fs::read_to_string(pid_file).ok()?;
    let mut lines = text.lines().skip(3);
    let port: u16 = lines.next()?.parse().ok()?;
    let socket_dir = PathBuf::from(lines.next()?);
    // A killed server leaves its pid file behind, but no socket.
    let socket = socket_dir.join(format!(".s.PGSQL.{port}"));
    std::os::unix::net::UnixStream::connect(socket).ok()?;
    Some((socket_dir, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_database_is_percent_encoded() {
        let server = Running {
            data_dir: "/data".into(),
            socket_dir: "/tmp/rouse".into(),
            port: 5433,
        };
        let url = server.url("a/b?c");
        assert_eq!(url, "postgres://rouse@%2Ftmp%2Frouse:5433/a%2Fb%3Fc");
    }
}
