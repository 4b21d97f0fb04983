use std::time::SystemTime;

use super::{by, owners, there};
use crate::sandbox::catalog::owners::expiry::MISSING_MAX;
use crate::sandbox::catalog::owners::note::{CONTEST_FILES_MAX, NAMES_MAX};
use crate::sandbox::catalog::owners::{Claimant, Owners, Ownership};
use crate::sandbox::module::cache::NOTE_BYTES_MAX;
use crate::sandbox::{Sandbox, Settings};

/// A file name that is longer in JSON than any valid one, which has at most 255 bytes.
fn longest(n: usize) -> String {
    format!("{n:05}{}", "\u{fffd}".repeat(250))
}

#[test]
fn a_full_note_can_be_read_back() {
    let mut owners = owners(false);
    let now = SystemTime::now();
    let name = |n: usize| format!("{n:0128}");
    for n in 0..NAMES_MAX {
        assert!(owners.can_save([name(n)].iter()), "{n}");
        owners.take(&name(n), &by(&longest(n)), false);
        let files = (0..2 * CONTEST_FILES_MAX).map(longest);
        owners.contest(&name(n), files.collect(), now, |_| true);
    }
    let text = serde_json::to_vec(&owners.names).unwrap();
    assert!(text.len() as u64 <= NOTE_BYTES_MAX, "{}", text.len());
    // Known names can still be saved, and a bound name serves without being saved.
    assert!(owners.can_save([name(7)].iter()) && !owners.can_save(["x".to_owned()].iter()));
    owners.take("x", &by("mail.wasm"), false);
    assert!(owners.names.owned["x"].is_unsaved);
    let other = Claimant {
        is_bound: true,
        ..by("0.wasm")
    };
    let present = Ownership::Present("mail.wasm".into());
    assert_eq!(
        owners.ownership("x", &other, there(&["mail.wasm"])),
        present
    );
}

#[test]
fn two_hosts_on_one_folder_merge_their_notes() {
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings {
        attempts_max: 1,
        cache_dir: Some(dir.path().join("cache")),
        ..Settings::default()
    };
    let sandbox = Sandbox::start(settings).unwrap();
    let read = || Owners::read(&sandbox, dir.path()).unwrap();
    let (mut one, mut other) = (read(), read());
    one.take("x", &by("x.wasm"), false);
    one.take("missing", &by("missing.wasm"), false);
    other.take("y", &by("y.wasm"), false);
    other.take("unproven", &by("z.wasm"), true);
    let cache = sandbox.cache.as_ref().unwrap();
    let (_, note) = one.note.as_ref().unwrap();
    let lock = cache.lock_note(note).unwrap().unwrap();
    one.save();
    assert!(read().names.owned.is_empty(), "another host is writing");
    drop(lock);
    one.save();
    other.save();
    one.update_presence(SystemTime::now() - MISSING_MAX, |file| {
        file != "missing.wasm"
    });
    one.update_presence(SystemTime::now(), |file| file != "missing.wasm");
    one.save();
    let saved: Vec<String> = read().names.owned.into_keys().collect();
    assert_eq!(saved, ["x", "y"]);
    assert_eq!(read().names.of("x.wasm").count(), 1);
    other.prove();
    other.save();
    let saved: Vec<String> = read().names.owned.into_keys().collect();
    assert_eq!(saved, ["unproven", "x", "y"]);
}
