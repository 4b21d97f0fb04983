//! The lock file and signatures that a file needs before it may serve.

use std::collections::BTreeSet;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::file::{self, Listed, QUIET, Stamp, Unusable};
use crate::sandbox::module::pin::lock_line;
use crate::sandbox::{Digest, Lock, ModuleBinding, Pin, PublicKey, Settings};

/// The maximum size of a lock file, enough for ten thousand lines.
const LOCK_BYTES_MAX: usize = 1 << 20;

/// A signature is 88 characters long.
const SIGNATURE_BYTES_MAX: u64 = 1 << 10;

/// Decides which files may start to serve.
///
/// A module that already serves continues until its file is removed, another version replaces it, or the host stops:
/// the files of one deployment arrive one after another, and no handler may be missing during a deployment.
pub(super) struct Verifier {
    /// The lock file when it was last read; `None` if it does not exist, or a system error prevented the read.
    stamp: Option<Stamp>,
    /// The lock file as it is now, and the time since which it has been unchanged.
    fresh: Option<(Stamp, Instant)>,
    rules: Arc<Rules>,
}

/// The rules in force at one moment.
pub(super) struct Rules {
    pin: Pin,
    /// All keys whose signatures are checked, each once: trusted keys, and keys to which names are bound.
    keys: Arc<[PublicKey]>,
    lock: Result<Lock, String>,
}

impl Verifier {
    pub(super) fn new(settings: &Settings) -> Self {
        let bindings = settings.modules.values().flatten();
        let keys = bindings.filter_map(|binding| match binding {
            ModuleBinding::Key(key) => Some(key),
            ModuleBinding::File(_) | ModuleBinding::Sha256(_) => None,
        });
        let keys: BTreeSet<&PublicKey> = keys.chain(&settings.pin.trusted_keys).collect();
        let mut verifier = Self {
            stamp: None,
            fresh: None,
            rules: Arc::new(Rules {
                pin: settings.pin.clone(),
                keys: keys.into_iter().copied().collect(),
                lock: Err("it does not exist".into()),
            }),
        };
        verifier.read_lock();
        verifier
    }

    /// True if signature files have to be read.
    pub(super) fn needs_signatures(&self) -> bool {
        self.rules.need_signatures()
    }

    /// The rules in force now.
    pub(super) fn rules(&self) -> Arc<Rules> {
        self.rules.clone()
    }

    /// The lock file in force now. When it changes, every file is checked again.
    pub(super) fn lock_stamp(&self) -> Option<Stamp> {
        self.stamp
    }

    /// Reads the lock file again if it has changed and is not being written to.
    pub(super) fn refresh(&mut self) {
        let Some(path) = &self.rules.pin.lock else {
            return;
        };
        let current = Stamp::at(path);
        if current == self.stamp {
            return;
        }
        let now = Instant::now();
        let quiet = current.is_none_or(|current| {
            let since = match self.fresh {
                Some((before, since)) if before == current => since,
                Some(_) | None => now,
            };
            self.fresh = Some((current, since));
            (now - since).max(current.age()) >= QUIET
        });
        if quiet {
            self.read_lock();
        }
    }

    fn read_lock(&mut self) {
        let Some(path) = self.rules.pin.lock.clone() else {
            return;
        };
        let Some(stamp) = Stamp::at(&path) else {
            self.stamp = None;
            self.set_lock(Err("it does not exist".into()));
            return;
        };
        let listed = Listed {
            path: path.clone(),
            stamp,
            signature: None,
        };
        let mut is_read = true;
        let text = match file::read(&listed, LOCK_BYTES_MAX) {
            Ok(Some(bytes)) => {
                String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text".to_string())
            }
            // It was written to in the meantime: the next scan finds another stamp.
            Ok(None) => return,
            Err(unusable) => {
                is_read = matches!(unusable, Unusable::UntilChanged(_));
                Err(unusable.why())
            }
        };
        // Without a stamp, the next scan reads it again.
        self.stamp = is_read.then_some(stamp);
        let lock = text.and_then(|text| text.parse());
        match &lock {
            Ok(_) => {
                tracing::info!(lock = %path.display(), "only modules listed in this lock file start to serve")
            }
            Err(why) if self.rules.lock.as_ref().err() == Some(why) => {}
            Err(why) => tracing::warn!(lock = %path.display(), "no module starts to serve: {why}"),
        }
        self.set_lock(lock);
    }

    fn set_lock(&mut self, lock: Result<Lock, String>) {
        self.rules = Arc::new(Rules {
            pin: self.rules.pin.clone(),
            keys: self.rules.keys.clone(),
            lock,
        });
    }
}

impl Rules {
    fn need_signatures(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Checks the bytes of a file against the rules, and returns which of the keys in force signed them.
    ///
    /// # Errors
    /// If it may not serve.
    pub(super) fn check(
        &self,
        name: &str,
        path: &Path,
        digest: Digest,
        bytes: &[u8],
    ) -> Result<Vec<PublicKey>, Unusable> {
        if let Some(lock) = &self.pin.lock {
            let path = lock.display();
            match &self.lock {
                Err(why) => {
                    return Err(format!(
                        "it must be listed in {path}, which cannot be used: {why}; `rouse handlers lock` writes it"
                    )
                    .into());
                }
                Ok(lock) if !lock.allows(digest) => {
                    return Err(format!(
                        "it is not listed in {path}; if you trust it, run `rouse handlers lock` to list all files, or add this line: {}",
                        lock_line(digest, name)
                    )
                    .into());
                }
                Ok(_) => {}
            }
        }
        if !self.need_signatures() {
            return Ok(Vec::new());
        }
        let is_required = !self.pin.trusted_keys.is_empty();
        let signature = match read_signature(&file::signature_path(path)) {
            Ok(signature) => signature,
            Err(_) if !is_required => return Ok(Vec::new()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(format!(
                    "it has no signature {name}.sig; create one with a trusted key: `rouse handlers sign --key FILE {name}`"
                )
                .into());
            }
            Err(error) => {
                let what = format!("its signature {name}.sig");
                return Err(Unusable::unreadable(&what, &error));
            }
        };
        let keys = self.keys.iter().copied();
        let signed_by: Vec<PublicKey> = keys.filter(|key| key.signed(bytes, &signature)).collect();
        let mut trusted = self.pin.trusted_keys.iter();
        match !is_required || trusted.any(|key| signed_by.contains(key)) {
            true => Ok(signed_by),
            false => Err(format!(
                "its signature {name}.sig was not made with one of the trusted_keys, or the file was changed after it was signed"
            )
            .into()),
        }
    }
}

fn read_signature(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    file::open(path)?
        .take(SIGNATURE_BYTES_MAX)
        .read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_is_not_read_as_a_signature_or_as_a_lock_file() {
        let dir = tempfile::tempdir().unwrap();
        let (module, lock) = (dir.path().join("a.wasm"), dir.path().join("a.lock"));
        for pipe in [&file::signature_path(&module), &lock] {
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            let kind = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, pipe, kind, mode, 0).unwrap();
        }
        let refused = |pin: Pin| {
            let verifier = Verifier::new(&Settings {
                pin,
                ..Settings::default()
            });
            let bytes = b"a module";
            let checked = verifier
                .rules()
                .check("a.wasm", &module, Digest::compute(bytes), bytes);
            let why = checked.expect_err("it is not accepted").why();
            assert!(why.contains("it is not a regular file"), "{why}");
        };
        refused(Pin {
            trusted_keys: vec![("A".repeat(43) + "=").parse().unwrap()],
            ..Pin::default()
        });
        refused(Pin {
            lock: Some(lock.clone()),
            ..Pin::default()
        });
    }

    /// A socket can be listed, but the system refuses to open it.
    #[test]
    fn a_lock_file_is_read_again_after_a_system_error() {
        let dir = tempfile::tempdir().unwrap();
        let lock = dir.path().join("a.lock");
        let socket = std::os::unix::net::UnixListener::bind(&lock).unwrap();
        let mut verifier = Verifier::new(&Settings {
            pin: Pin {
                lock: Some(lock.clone()),
                ..Pin::default()
            },
            ..Settings::default()
        });
        let check = |verifier: &Verifier| {
            let bytes = b"a module";
            let digest = Digest::compute(bytes);
            verifier.rules().check("a.wasm", &lock, digest, bytes)
        };
        let why = check(&verifier).expect_err("it is not accepted").why();
        assert!(why.contains("it cannot be read"), "{why}");
        assert_eq!(verifier.lock_stamp(), None, "it counts as unread");
        drop(socket);
        std::fs::remove_file(&lock).unwrap();
        let line = lock_line(Digest::compute(b"a module"), "a.wasm");
        std::fs::write(&lock, line).unwrap();
        verifier.read_lock();
        check(&verifier).expect("it is accepted");
        assert!(verifier.lock_stamp().is_some());
    }

    #[test]
    fn a_signature_is_read_again_after_a_system_error() {
        let dir = tempfile::tempdir().unwrap();
        let module = dir.path().join("a.wasm");
        let _socket =
            std::os::unix::net::UnixListener::bind(file::signature_path(&module)).unwrap();
        let verifier = Verifier::new(&Settings {
            pin: Pin {
                trusted_keys: vec![("A".repeat(43) + "=").parse().unwrap()],
                ..Pin::default()
            },
            ..Settings::default()
        });
        let bytes = b"a module";
        let checked = verifier
            .rules()
            .check("a.wasm", &module, Digest::compute(bytes), bytes);
        assert!(matches!(checked, Err(Unusable::ForNow(_))), "{checked:?}");
    }

    #[test]
    fn check_a_repeated_key_once() {
        let key: PublicKey = ("A".repeat(43) + "=").parse().unwrap();
        let verifier = Verifier::new(&Settings {
            modules: [
                ("a".to_owned(), vec![ModuleBinding::Key(key); 50]),
                ("b".to_owned(), vec![ModuleBinding::Key(key)]),
            ]
            .into(),
            pin: Pin {
                trusted_keys: vec![key; 2],
                ..Pin::default()
            },
            ..Settings::default()
        });
        assert_eq!(*verifier.rules().keys, [key]);
    }
}
