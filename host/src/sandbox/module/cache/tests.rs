use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;

fn engine() -> Engine {
    Engine::default()
}

/// A cache in a directory of its own, with one entry.
struct Cached {
    dir: tempfile::TempDir,
    cache: CodeCache,
    module: Digest,
}

impl Cached {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/down");
        let cache = CodeCache::open(&path, &engine()).expect("a cache");
        let module = Digest::compute(b"module");
        cache.put(module, b"code");
        Self { dir, cache, module }
    }

    fn entry(&self) -> PathBuf {
        self.cache.path.join(self.cache.name(self.module))
    }

    fn get(&self) -> Option<Vec<u8>> {
        self.cache.get(self.module)
    }

    /// Asserts that an entry is unusable, and is removed, after `act` has changed it.
    #[track_caller]
    fn assert_unusable_after(act: impl Fn(&Path)) {
        let cached = Self::new();
        act(&cached.entry());
        assert_eq!(cached.get(), None);
        assert!(
            fs::symlink_metadata(cached.entry()).is_err(),
            "it is removed"
        );
        cached.cache.put(cached.module, b"code");
        assert_eq!(cached.get().as_deref(), Some(&b"code"[..]));
    }
}

#[test]
fn another_host_finds_an_entry_and_no_partial_file_is_left() {
    let cached = Cached::new();
    assert_eq!(cached.get().as_deref(), Some(&b"code"[..]));
    assert_eq!(cached.cache.get(Digest::compute(b"another")), None);
    let other = CodeCache::open(&cached.cache.path, &engine()).unwrap();
    assert_eq!(other.get(cached.module).as_deref(), Some(&b"code"[..]));
    assert_eq!(fs::read_dir(&cached.cache.path).unwrap().count(), 1);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&cached.cache.path), 0o700);
    assert_eq!(mode(&cached.entry()), 0o600);
    assert!(cached.dir.path().exists());
}

#[test]
fn an_engine_with_other_settings_does_not_find_an_entry() {
    let cached = Cached::new();
    let mut config = wasmtime::Config::new();
    config.epoch_interruption(true);
    let other = CodeCache::open(&cached.cache.path, &Engine::new(&config).unwrap()).unwrap();
    assert_eq!(other.get(cached.module), None);
}

#[test]
fn remove_damaged_truncated_and_empty_entries() {
    Cached::assert_unusable_after(|entry| {
        let mut bytes = fs::read(entry).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(entry, bytes).unwrap();
    });
    Cached::assert_unusable_after(|entry| {
        let bytes = fs::read(entry).unwrap();
        fs::write(entry, &bytes[..bytes.len() - 1]).unwrap();
    });
    Cached::assert_unusable_after(|entry| fs::write(entry, &MAGIC[..5]).unwrap());
    Cached::assert_unusable_after(|entry| fs::write(entry, b"").unwrap());
}

#[test]
fn remove_links_pipes_and_files_that_others_may_write() {
    Cached::assert_unusable_after(|entry| {
        let elsewhere = entry.with_extension("elsewhere");
        fs::rename(entry, &elsewhere).unwrap();
        symlink(elsewhere, entry).unwrap();
    });
    Cached::assert_unusable_after(|entry| {
        fs::remove_file(entry).unwrap();
        rustix::fs::mknodat(CWD, entry, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    });
    Cached::assert_unusable_after(|entry| {
        fs::set_permissions(entry, fs::Permissions::from_mode(0o622)).unwrap();
    });
}

#[test]
fn never_return_the_code_of_one_module_for_another() {
    let cached = Cached::new();
    let another = Digest::compute(b"another");
    fs::copy(
        cached.entry(),
        cached.cache.path.join(cached.cache.name(another)),
    )
    .unwrap();
    assert_eq!(cached.cache.get(another), None);
    assert_eq!(cached.get().as_deref(), Some(&b"code"[..]));
}

#[test]
fn a_directory_that_others_may_write_to_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [0o777, 0o770, 0o702] {
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        assert!(CodeCache::open(dir.path(), &engine()).is_none(), "{mode:o}");
    }
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    assert!(CodeCache::open(dir.path(), &engine()).is_some());
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(CodeCache::open(&file, &engine()).is_none());
}

#[test]
fn do_not_trust_files_of_another_user() {
    let dir = tempfile::tempdir().unwrap();
    let mut stat = rustix::fs::stat(dir.path()).unwrap();
    assert_eq!(check_owner(&stat), Ok(()));
    stat.st_uid += 1;
    let why = check_owner(&stat).unwrap_err();
    assert!(why.starts_with("it belongs to user"), "{why}");
}

#[test]
fn remove_entries_unused_for_a_month_then_the_oldest_until_the_rest_fits() {
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    let file = |name: &str, hours: u64, bytes: u64| CachedFile {
        name: name.into(),
        bytes,
        used_at: now - Duration::from_secs(hours * 3600),
    };
    let half = CACHE_BYTES_MAX / 2;
    let listed = vec![
        file("new.code", 0, half),
        file("month.code", 24 * 31, 1),
        file("older.code", 3, 1),
        file(".1-2.part", 2, 1),
        file(".3-4.part", 0, 1),
        file("old.code", 2, half - 2),
    ];
    let mut removed = to_remove(listed, now);
    removed.sort();
    assert_eq!(removed, [".1-2.part", "month.code", "older.code"]);
}

#[test]
fn trim_the_cache_after_many_bytes_not_with_each_entry() {
    let cached = Cached::new();
    let unused = cached.cache.path.join("unused.code");
    fs::write(&unused, b"").unwrap();
    let long_ago = SystemTime::now() - 2 * UNUSED_MAX;
    let file = fs::File::options().write(true).open(&unused).unwrap();
    file.set_modified(long_ago).unwrap();

    for n in 0..100_u8 {
        cached.cache.put(Digest::compute(&[n]), b"code");
    }
    assert!(unused.exists(), "the cache has not been trimmed yet");
    let nearly = TRIM_EVERY_BYTES - 1;
    cached.cache.put_bytes.store(nearly, Ordering::Relaxed);
    cached.cache.put(Digest::compute(b"one more"), b"code");
    assert!(!unused.exists());
}
