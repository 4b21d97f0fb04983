//! A running private server.

use std::{path::Path, path::PathBuf, time::Duration};

use super::{
    Settings, StartError, USER,
    binaries::Binaries,
    cluster,
    home::Home,
    launch::{SOCKET_PORT, launch},
    process::Process,
    socket,
};

/// A running private server. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    // Dropped before the lock in `home`: the directory is free only after the server has ended.
    process: Process,
    socket_dir: PathBuf,
    port: Option<u16>,
    password: Option<String>,
    home: Home,
}

impl Server {
    /// Starts the server and returns when it accepts connections. Blocks for about a second the first time and for
    /// about 0.1 s at later starts; also for up to 15 s while the server of a crashed host is still shutting down.
    ///
    /// # Errors
    /// See [`StartError`]: each message explains what to do next.
    pub fn start(settings: &Settings) -> Result<Self, StartError> {
        let home = Home::open(&settings.data_dir)?;
        let cluster = home.cluster();
        let (search, cancel) = (&settings.search, &settings.cancel);
        let binaries = Binaries::find(search, &home.account, &home.dir, &cluster, cancel)?;
        cluster::ensure(&home, &binaries, settings)?;
        let password = match settings.port {
            Some(_) => Some(cluster::password(&home)?),
            None => None,
        };
        let socket_dir = socket::directory(&home)?;
        let process = launch(settings, &home, &binaries, &socket_dir)?;
        Ok(Self {
            process,
            socket_dir,
            port: settings.port,
            password,
            home,
        })
    }

    /// A connection string for a database over the Unix socket, for libpq and tokio-postgres. The databases `postgres`
    /// and `template1` always exist.
    pub fn url(&self, database: &str) -> String {
        let directory = self.socket_dir.to_string_lossy().replace('/', "%2F");
        let port = self.port.map(|port| format!(":{port}"));
        format!(
            "postgres://{USER}@{directory}{}/{}",
            port.unwrap_or_default(),
            encode(database)
        )
    }

    /// A connection string for a database over TCP, with its password; `None` if no port was requested.
    pub fn tcp_url(&self, database: &str) -> Option<String> {
        let (port, password) = (self.port?, self.password.as_deref()?);
        let database = encode(database);
        Some(format!(
            "postgres://{USER}:{password}@127.0.0.1:{port}/{database}"
        ))
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The directory of its files, which may differ from the requested one; see [`Settings::data_dir`].
    pub fn data_dir(&self) -> &Path {
        &self.home.dir
    }

    /// The server's own log.
    pub fn log_path(&self) -> PathBuf {
        self.home.log_path()
    }

    /// The directory of its Unix socket.
    pub fn socket_dir(&self) -> &Path {
        &self.socket_dir
    }

    /// The port in the socket's name, and the TCP port if one was requested.
    pub fn port(&self) -> u16 {
        self.port.unwrap_or(SOCKET_PORT)
    }

    /// True until the server has ended for any reason.
    pub fn is_running(&self) -> bool {
        self.process.wait(Duration::ZERO).is_none()
    }

    /// Stops the server: connections are cut, and a checkpoint is written. Blocks until it has ended; after 30 s it is
    /// stopped without a checkpoint.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.process.stop().is_some() {
            // If this fails, an empty directory in /tmp remains, or it contains other files.
            let _ = std::fs::remove_dir(&self.socket_dir);
        }
    }
}

/// Percent-encodes characters that have a special meaning in connection strings.
pub(super) fn encode(name: &str) -> String {
    name.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' | b'.' => {
                char::from(byte).to_string()
            }
            other => format!("%{other:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::encode;

    #[test]
    fn percent_encode_database_names() {
        assert_eq!(encode("rouse_1-a.b"), "rouse_1-a.b");
        assert_eq!(encode("a/b?c é"), "a%2Fb%3Fc%20%C3%A9");
    }
}
