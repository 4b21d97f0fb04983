use super::expiry::MISSING_MAX;
use super::*;
use crate::sandbox::Digest;

mod note;

fn owners(is_dev: bool) -> Owners {
    Owners {
        names: Names::default(),
        is_dev,
        note: None,
        changed: BTreeSet::new(),
        save_error: None,
    }
}

fn by(file: &str) -> Claimant<'_> {
    Claimant {
        file,
        digest: Digest::compute(file.as_bytes()),
        was_at_start: true,
        is_bound: false,
    }
}

fn there<'a>(files: &'a [&str]) -> impl Fn(&str) -> bool + 'a {
    |file| files.contains(&file)
}

fn contested(files: &[&str]) -> Ownership {
    Ownership::Contested(files.iter().map(|file| (*file).to_owned()).collect())
}

#[test]
fn a_name_stays_with_its_missing_file() {
    let mut owners = owners(false);
    let (mail, other) = (by("mail.wasm"), by("0.wasm"));
    assert_eq!(
        owners.ownership("x", &mail, there(&["mail.wasm"])),
        Ownership::Own
    );
    owners.take("x", &mail, false);
    let both = there(&["mail.wasm", "0.wasm"]);
    let present = Ownership::Present("mail.wasm".into());
    assert_eq!(owners.ownership("x", &other, both), present);
    let alone = there(&["0.wasm"]);
    let missing = Ownership::Missing("mail.wasm".into());
    assert_eq!(owners.ownership("x", &other, alone), missing);
    assert_eq!(
        owners.ownership("x", &mail, there(&["mail.wasm"])),
        Ownership::Own
    );

    // A file with the same content serves in the meantime, but does not gain the name.
    let copy = Claimant {
        digest: mail.digest,
        ..by("copy.wasm")
    };
    let alone = there(&["copy.wasm"]);
    assert_eq!(owners.ownership("x", &copy, alone), Ownership::StandIn);
    owners.stand_in("x", "copy.wasm");
    assert_eq!(owners.server("x"), Some("copy.wasm"));
    let changed = by("copy.wasm");
    assert_eq!(
        owners.ownership("x", &changed, there(&["copy.wasm"])),
        missing
    );
    let second = Claimant {
        digest: mail.digest,
        ..by("second.wasm")
    };
    let two = there(&["copy.wasm", "second.wasm"]);
    assert_eq!(owners.ownership("x", &second, two), missing);
}

#[test]
fn release_a_name_after_its_file_lacked_it_for_a_month() {
    let mut owners = owners(false);
    owners.take("x", &by("mail.wasm"), false);
    owners.take("y", &by("mail.wasm"), false);
    let both = ["mail.wasm", "0.wasm"];
    let now = SystemTime::now();
    owners.drop_others("mail.wasm", |name| name == "y", now);
    owners.drop_others("mail.wasm", |name| name == "y", now + MISSING_MAX / 2);
    owners.update_presence(now + MISSING_MAX / 2, there(&both));
    let dropped = Ownership::Dropped("mail.wasm".into());
    assert_eq!(owners.ownership("x", &by("0.wasm"), there(&both)), dropped);
    let bound = Claimant {
        is_bound: true,
        ..by("0.wasm")
    };
    assert_eq!(owners.ownership("x", &bound, there(&both)), Ownership::Own);
    owners.update_presence(now + MISSING_MAX, there(&both));
    assert_eq!(
        owners.ownership("x", &by("0.wasm"), there(&both)),
        Ownership::Own
    );

    owners.update_presence(now, there(&["0.wasm"]));
    owners.update_presence(now + MISSING_MAX / 2, there(&["0.wasm"]));
    let missing = Ownership::Missing("mail.wasm".into());
    assert_eq!(
        owners.ownership("y", &by("0.wasm"), there(&["0.wasm"])),
        missing
    );
    // The file comes back, and the month starts again.
    owners.update_presence(now + MISSING_MAX / 2, there(&both));
    owners.update_presence(now + MISSING_MAX / 2, there(&["0.wasm"]));
    owners.update_presence(now + MISSING_MAX, there(&["0.wasm"]));
    assert_eq!(
        owners.ownership("y", &by("0.wasm"), there(&["0.wasm"])),
        missing
    );
    owners.update_presence(now + MISSING_MAX / 2 + MISSING_MAX, there(&["0.wasm"]));
    assert_eq!(
        owners.ownership("y", &by("0.wasm"), there(&["0.wasm"])),
        Ownership::Own
    );
}

#[test]
fn two_files_with_a_name_at_startup_contest_it_until_a_table_binds_it() {
    let mut owners = owners(false);
    let both = ["0.wasm", "mail.wasm"];
    owners.take("x", &by("0.wasm"), true);
    assert_eq!(
        owners.ownership("x", &by("mail.wasm"), there(&both)),
        contested(&both)
    );
    let later = Claimant {
        was_at_start: false,
        ..by("mail.wasm")
    };
    let present = Ownership::Present("0.wasm".into());
    assert_eq!(owners.ownership("x", &later, there(&both)), present);
    let files = both.map(str::to_owned).into();
    let now = SystemTime::now();
    owners.contest("x", files, now, there(&both));
    assert_eq!(owners.server("x"), None);
    // One of them is removed: it may be the owner.
    for file in both {
        let alone = [file];
        assert_eq!(
            owners.ownership("x", &by(file), there(&alone)),
            contested(&both)
        );
    }
    let bound = Claimant {
        is_bound: true,
        ..by("mail.wasm")
    };
    assert_eq!(
        owners.ownership("x", &bound, there(&["mail.wasm"])),
        Ownership::Own
    );
    // A contest is forgotten a month after it has ended, and not while it continues.
    owners.update_presence(now + MISSING_MAX / 2, there(&both));
    owners.update_presence(now + MISSING_MAX, there(&["mail.wasm"]));
    assert_eq!(
        owners.ownership("x", &by("0.wasm"), there(&both)),
        contested(&both)
    );
    owners.update_presence(now + MISSING_MAX / 2 + MISSING_MAX, there(&["mail.wasm"]));
    assert_eq!(
        owners.ownership("x", &by("mail.wasm"), there(&["mail.wasm"])),
        Ownership::Own
    );
}

#[test]
fn a_proven_name_is_not_contested_at_the_next_start() {
    let mut owners = owners(false);
    owners.take("x", &by("mail.wasm"), true);
    assert!(!owners.knows("x", "mail.wasm"));
    owners.prove();
    assert!(owners.knows("x", "mail.wasm"));
    // It serves again at the next start.
    owners.take("x", &by("mail.wasm"), true);
    let both = there(&["0.wasm", "mail.wasm"]);
    let present = Ownership::Present("mail.wasm".into());
    assert_eq!(owners.ownership("x", &by("0.wasm"), both), present);
}

#[test]
fn in_development_a_name_is_free_as_soon_as_its_file_is_missing() {
    let mut owners = owners(true);
    owners.take("x", &by("mail.wasm"), false);
    let present = Ownership::Present("mail.wasm".into());
    let both = ["0.wasm", "mail.wasm"];
    assert_eq!(owners.ownership("x", &by("0.wasm"), there(&both)), present);
    assert_eq!(
        owners.ownership("x", &by("0.wasm"), there(&["0.wasm"])),
        Ownership::Own
    );
    let now = SystemTime::now();
    owners.contest("x", both.map(str::to_owned).into(), now, there(&both));
    assert_eq!(
        owners.ownership("x", &by("0.wasm"), there(&both)),
        contested(&both)
    );
    assert_eq!(
        owners.ownership("x", &by("0.wasm"), there(&["0.wasm"])),
        Ownership::Own
    );
}

#[test]
fn a_contest_drops_files_that_are_missing_or_without_the_name() {
    let mut owners = owners(true);
    let now = SystemTime::now();
    let all = ["a", "b", "c", "d", "e"];
    let contest = |owners: &mut Owners, there: &[&str]| {
        let files = all.map(str::to_owned).into();
        owners.contest("x", files, now, |file| there.contains(&file));
        owners.names.contested["x"].files.clone()
    };
    let files = |files: &[&str]| files.iter().map(|file| (*file).to_owned()).collect();
    let first: BTreeSet<String> = files(&all[..4]);
    assert_eq!(contest(&mut owners, &all), first);
    let there: BTreeSet<String> = files(&["a", "e"]);
    assert_eq!(contest(&mut owners, &["a", "e"]), there);
    // In development, a name is free as soon as the other files lack it.
    assert_eq!(
        owners.ownership("x", &by("e"), |_| true),
        contested(&["a", "e"])
    );
    owners.drop_others("a", |_| false, now);
    assert_eq!(owners.ownership("x", &by("e"), |_| true), Ownership::Own);
}

/// The names that a file is compared with when it serves.
fn names_of(owners: &Owners, file: &str) -> Vec<String> {
    owners.names.of(file).cloned().collect()
}

#[test]
fn a_file_that_serves_is_compared_with_its_own_names_only() {
    const FILES: usize = 1_000;
    let mut owners = owners(false);
    let (now, file) = (SystemTime::now(), |n: usize| format!("{n}.wasm"));
    for n in 0..FILES {
        owners.take(&format!("n{n}"), &by(&file(n)), false);
    }
    let mut visits = 0;
    for n in 0..FILES {
        visits += owners.names.of(&file(n)).count();
        let own = format!("n{n}");
        owners.drop_others(&file(n), |name| name == own, now);
    }
    assert_eq!(visits, FILES, "not the square of it");
}

#[test]
fn the_names_of_a_file_follow_its_gains_and_losses() {
    let mut owners = owners(false);
    let now = SystemTime::now();
    for name in ["w", "x", "y"] {
        owners.take(name, &by("a"), true);
    }
    assert_eq!(names_of(&owners, "a"), ["w", "x", "y"]);
    owners.take("w", &by("b"), true);
    let contested = ["a", "c"].map(str::to_owned).into();
    owners.contest("x", contested, now, |_| true);
    assert_eq!(names_of(&owners, "a"), ["x", "y"]);
    assert_eq!(names_of(&owners, "b"), ["w"]);
    assert_eq!(names_of(&owners, "c"), ["x"]);

    // The file serves without its names, of which one is not proven yet, and another one is contested.
    owners.drop_others("a", |_| false, now);
    assert!(names_of(&owners, "a").is_empty());
    assert_eq!(owners.owner("y"), None);
    // A name that is dropped after startup is kept for the file.
    owners.prove();
    owners.drop_others("b", |_| false, now);
    assert_eq!(names_of(&owners, "b"), ["w"]);
    owners.update_presence(now + MISSING_MAX, |_| true);
    assert!(names_of(&owners, "b").is_empty() && names_of(&owners, "c").is_empty());
}
