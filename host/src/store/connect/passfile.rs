//! Password files, as libpq reads them.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path, sync::Arc};

use tokio_postgres::{Config, config::Host};

use super::ConnectError;

/// The passwords of the hosts of a connection. Without a password file, no host has one.
#[derive(Clone, Default)]
pub(super) struct Passwords(Arc<[Option<String>]>);

impl Passwords {
    /// The password of the host at this index.
    pub(super) fn get(&self, index: usize) -> Option<&str> {
        self.0.get(index)?.as_deref()
    }
}

/// The password of each host, from the first line of the file that matches it (`host:port:database:user:password`, `*`
/// matches any value). There are none if the file does not exist, or if other users can read it: such a file is ignored
/// with a warning, as in libpq.
pub(super) fn look_up(path: &Path, config: &Config) -> Result<Passwords, ConnectError> {
    let failed = |error| ConnectError::PassFile {
        path: path.to_owned(),
        error,
    };
    let found = match fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Passwords::default()),
        Err(error) => return Err(failed(error)),
    };
    if !found.is_file() {
        tracing::warn!(path = %path.display(), "the password file is ignored, because it is not a regular file");
        return Ok(Passwords::default());
    }
    if found.mode() & 0o077 != 0 {
        tracing::warn!(
            path = %path.display(),
            "the password file is ignored, because other users can read it: run chmod 0600 on it"
        );
        return Ok(Passwords::default());
    }
    let text = fs::read_to_string(path).map_err(failed)?;
    let (hosts, ports) = (config.get_hosts().iter().enumerate(), config.get_ports());
    let passwords = hosts.map(|(index, host)| {
        let port = ports.get(index).or(ports.first()).copied().unwrap_or(5432);
        password_of(host, port, config, &text)
    });
    Ok(Passwords(passwords.collect()))
}

fn password_of(host: &Host, port: u16, config: &Config, file: &str) -> Option<String> {
    let host = match host {
        Host::Tcp(name) => name.clone(),
        // libpq: a connection to the default directory matches localhost.
        Host::Unix(directory)
            if directory == Path::new("/var/run/postgresql") || directory == Path::new("/tmp") =>
        {
            "localhost".into()
        }
        Host::Unix(directory) => directory.to_string_lossy().into_owned(),
    };
    let user = config.get_user().unwrap_or_default();
    let database = config.get_dbname().unwrap_or(user);
    let wanted = [host.as_str(), &port.to_string(), database, user];
    file.lines().find_map(|line| password_in(line, wanted))
}

fn password_in(line: &str, wanted: [&str; 4]) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let mut fields = Fields(line);
    for wanted in wanted {
        let field = fields.next()?;
        if field != "*" && unescape(field) != wanted {
            return None;
        }
    }
    fields.next().map(unescape)
}

/// Splits at colons that are not preceded by a backslash.
struct Fields<'a>(&'a str);

impl<'a> Iterator for Fields<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.0.is_empty() {
            return None;
        }
        let mut escaped = false;
        let end = self.0.find(|c| {
            let colon = c == ':' && !escaped;
            escaped = c == '\\' && !escaped;
            colon
        });
        let (field, rest) = match end {
            Some(end) => (&self.0[..end], &self.0[end + 1..]),
            None => (self.0, ""),
        };
        self.0 = rest;
        Some(field)
    }
}

fn unescape(field: &str) -> String {
    let mut text = String::with_capacity(field.len());
    let mut characters = field.chars();
    while let Some(c) = characters.next() {
        text.push(match c {
            '\\' => characters.next().unwrap_or('\\'),
            other => other,
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::password_in;

    #[test]
    fn the_fields_of_a_line_are_matched_with_stars_and_escapes() {
        let wanted = ["db.example", "5432", "jobs", "rouse"];
        let check = |line: &str, password: Option<&str>| {
            assert_eq!(password_in(line, wanted).as_deref(), password, "{line}");
        };
        check("db.example:5432:jobs:rouse:secret", Some("secret"));
        check("*:*:*:rouse:se\\:cr\\\\et", Some("se:cr\\et"));
        check("other:5432:jobs:rouse:secret", None);
        check("db.example:5432:jobs:other:secret", None);
        check("#*:*:*:*:secret", None);
        check("db.example:5432:jobs", None);
    }

    #[test]
    fn a_colon_in_a_name_can_be_written_with_a_backslash() {
        let line = "\\:\\:1:5432:jobs:rouse:secret";
        let wanted = ["::1", "5432", "jobs", "rouse"];
        assert_eq!(password_in(line, wanted).as_deref(), Some("secret"));
    }
}
