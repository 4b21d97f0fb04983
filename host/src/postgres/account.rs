//! The operating-system user that runs the server.

use std::{
    fs, io,
    os::unix::{fs::MetadataExt, process::CommandExt},
    path::Path,
    process::Command,
};

use super::{StartError, error::Trying};

/// The user that runs the server: this process's own, or another when this process is root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Account {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) name: String,
    /// True if a child has to switch to this user.
    dropped: bool,
}

impl Account {
    /// This process's user; for root, the owner of the existing cluster, else `postgres`, else `nobody`.
    pub(super) fn choose(cluster: &Path) -> Result<Self, StartError> {
        let own = rustix::process::geteuid().as_raw();
        let passwd = match fs::read_to_string("/etc/passwd") {
            Ok(text) => text,
            // Slim containers have no passwd file. If initdb needs one, it reports that.
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).trying(|| "read /etc/passwd".into()),
        };
        if own != 0 {
            let gid = rustix::process::getegid().as_raw();
            let name = name_of(&passwd, own);
            return Ok(Self {
                uid: own,
                gid,
                name,
                dropped: false,
            });
        }
        // A cluster stays usable if it was created by another account.
        if let Ok(found) = fs::symlink_metadata(cluster)
            && found.uid() != 0
        {
            return Ok(Self {
                uid: found.uid(),
                gid: found.gid(),
                name: name_of(&passwd, found.uid()),
                dropped: true,
            });
        }
        ["postgres", "nobody"]
            .into_iter()
            .find_map(|candidate| {
                entries(&passwd)
                    .find(|entry| entry.0 == candidate && entry.1 != 0)
                    .map(|(name, uid, gid)| Self {
                        uid,
                        gid,
                        name: name.to_owned(),
                        dropped: true,
                    })
            })
            .ok_or(StartError::NoAccount)
    }

    /// Makes a command run as this account.
    pub(super) fn run_as(&self, command: &mut Command) {
        if self.dropped {
            // The standard library drops supplementary groups when it sets the uid as root.
            command.gid(self.gid).uid(self.uid);
        }
    }

    /// Gives a file or directory that this process has just created to the account.
    pub(super) fn own(&self, path: &Path) -> Result<(), StartError> {
        if self.dropped {
            std::os::unix::fs::lchown(path, Some(self.uid), Some(self.gid))
                .trying(|| format!("give {} to the user {}", path.display(), self.name))?;
        }
        Ok(())
    }

    /// Fails if an existing file or directory does not belong to the account.
    pub(super) fn must_own(&self, path: &Path) -> Result<(), StartError> {
        let found = fs::symlink_metadata(path)
            .trying(|| format!("read the owner of {}", path.display()))?;
        if found.uid() == self.uid {
            Ok(())
        } else {
            Err(StartError::ForeignFiles {
                path: path.to_owned(),
                owner: found.uid(),
                user: self.name.clone(),
            })
        }
    }
}

fn name_of(passwd: &str, uid: u32) -> String {
    entries(passwd)
        .find(|entry| entry.1 == uid)
        .map_or_else(|| format!("with id {uid}"), |entry| entry.0.to_owned())
}

/// Name, user id and group id of each line that has all three.
fn entries(passwd: &str) -> impl Iterator<Item = (&str, u32, u32)> {
    passwd.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some((name, uid, gid))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwd_lines_are_read_and_broken_ones_are_skipped() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\n+@nis\n\nnobody:x:65534:65533::/:/bin/false\n";
        let found: Vec<_> = entries(passwd).collect();
        assert_eq!(found, [("root", 0, 0), ("nobody", 65534, 65533)]);
        assert_eq!(name_of(passwd, 65534), "nobody");
        assert_eq!(name_of(passwd, 7), "with id 7");
    }
}
