//! The table that counts if several match a handler.

use std::path::Path;
use std::time::Duration;

use super::read;
use crate::job::most_specific;
use crate::sandbox::{Instances, Manifest};
use crate::setting::{Overlays, Settable};
use crate::worker::Policy;

#[test]
fn the_origin_of_a_value_is_the_most_specific_table_that_sets_it() {
    let file = read(
        "[limits]\nmemory_mb = 64\nsteps = 7\n[handlers.\"*\"]\nlease = \"5s\"\ninstances = \"fresh\"\n[handlers.\"my.*\".limits]\nmemory_mb = 16\n\
         [handlers.\"my.busy\".limits]\ncpu = \"2s\"\n[handlers.\"my.*\".state]\nkeys_max = 7",
    )
    .unwrap();
    fn origin<T: Settable>(tables: &Overlays<'_, T>, key: &str) -> Option<String> {
        let mut settings = T::SETTINGS.iter();
        settings.find(|setting| setting.key == key)?.origin(tables)
    }
    let limits = file.limits_of("my.busy");
    for (key, table) in [
        ("cpu", Some("[handlers.\"my.busy\".limits]")),
        ("memory_mb", Some("[handlers.\"my.*\".limits]")),
        (
            "memory_retry_mb",
            Some("2 × memory_mb of [handlers.\"my.*\".limits]"),
        ),
        ("steps", Some("[limits]")),
        ("handles", None),
    ] {
        assert_eq!(origin(&limits, key).as_deref(), table, "{key}");
    }
    let other = origin(&file.limits_of("other"), "memory_retry_mb");
    assert_eq!(other.as_deref(), Some("2 × memory_mb of [limits]"));
    let policy = file.policy_of("my.busy");
    let lease = origin(&policy, "lease");
    assert_eq!(lease.as_deref(), Some("[handlers.\"*\"]"));
    assert_eq!(origin(&policy, "grace"), None);
    let state = origin(&file.state_of("my.busy"), "keys_max");
    assert_eq!(state.as_deref(), Some("[handlers.\"my.*\".state]"));
    let instances = file.origin("my.busy", "instances");
    assert_eq!(instances.as_deref(), Some("[handlers.\"*\"]"));
    assert_eq!(file.origin("my.busy", "fine_clocks"), None);
    let state = file.table_of("my.busy", "state");
    assert_eq!(state.as_deref(), Some("[handlers.\"my.*\".state]"));
}

#[test]
fn instances_are_those_of_the_most_specific_table_that_sets_them() {
    let file = read(
        "[handlers.\"*\"]\ninstances = \"reuse\"\n[handlers.noop]\nlease = \"5s\"\n[handlers.\"a.*\"]\ninstances = \"fresh\"",
    )
    .unwrap();
    let sandbox = file.sandbox(Path::new("."), 4);
    let instances: Vec<_> = sandbox.instances.into_iter().collect();
    assert_eq!(
        instances,
        [
            ("*".into(), Instances::Reuse),
            ("a.*".into(), Instances::Fresh),
        ]
    );
}

#[test]
fn each_limit_is_that_of_the_most_specific_table_that_sets_it() {
    let file = read(
        "[limits]\nsteps = 7\nmemory_mb = 64\n[handlers.\"my.*\".limits]\nmemory_mb = 16\n\
         [handlers.\"my.busy\".limits]\ncpu = \"2s\"\n[handlers.\"my.busy\"]\nlease = \"5s\"",
    )
    .unwrap();
    let sandbox = file.sandbox(Path::new("."), 4);
    let limits = sandbox.limits("my.busy");
    assert_eq!((limits.memory_bytes, limits.steps), (16 << 20, 7));
    assert_eq!(limits.cpu, Duration::from_secs(2));
    assert_eq!(limits.more_memory(), Some(32 << 20));
    assert_eq!(sandbox.limits("my.other").cpu, Duration::from_secs(600));
    assert_eq!(sandbox.limits("noop").memory_bytes, 64 << 20);
}

#[test]
fn memory_of_a_table_sets_the_memory_of_the_next_attempt() {
    let text = "[limits]\nmemory_mb = 128\nmemory_retry_mb = 256\n[handlers.image.limits]\nmemory_mb = 512";
    let sandbox = read(text).unwrap().sandbox(Path::new("."), 4);
    assert_eq!(sandbox.limits("image").more_memory(), Some(1 << 30));
    let firm = read(&format!("{text}\nmemory_retry_mb = 512")).unwrap();
    let limits = firm.sandbox(Path::new("."), 4).limits("image");
    assert_eq!(limits.more_memory(), None);
}

#[test]
fn lease_timeout_retries_and_instances_are_those_of_the_most_specific_table_that_sets_them() {
    let file = read(
        "[handlers.\"mail.*\"]\ntimeout = \"10m\"\ninstances = \"reuse\"\nretry_max = \"1m\"\nconcurrency = 3\n\
         [handlers.\"mail.send\"]\nmax_attempts = 7\n[[handlers.\"mail.send\".http]]\nhosts = [\"a.example\"]",
    )
    .unwrap();
    let manifest = r#"{"handlers": [{"name": "mail.send", "concurrency": 8}, {"name": "text.stats", "concurrency": 8}]}"#;
    let manifest = Manifest::parse(manifest).unwrap();
    let other = Policy::resolve(&manifest.handlers[1], &file.overrides());
    assert_eq!(other.concurrency, Some(8), "the module's own");
    let policy = Policy::resolve(&manifest.handlers[0], &file.overrides());
    assert_eq!(policy.concurrency, Some(3));
    assert_eq!(policy.timeout, Duration::from_secs(600));
    assert_eq!(policy.retry.max, Duration::from_secs(60));
    assert_eq!(policy.retry.max_attempts, 7);
    assert_eq!(policy.lease, Duration::from_secs(60), "the module's own");
    let instances = file.sandbox(Path::new("."), 4).instances;
    assert_eq!(
        most_specific(&instances, "mail.send"),
        Some(&Instances::Reuse)
    );
}

#[test]
fn the_most_specific_table_with_variables_or_settings_counts() {
    let file = read(
        "[handlers.\"*\".env]\nA = \"1\"\n[handlers.\"*\".settings]\nwide = true\n\
         [handlers.\"image.*\"]\nfine_clocks = true\n[handlers.\"image.plain\"]\nfine_clocks = false\n\
         [handlers.\"image.*\".settings]\nat = 2026-01-01\nlist = [1, 2.5]\n[handlers.\"image.*\".settings.deep]\nx = \"y\"",
    )
    .unwrap();
    let sandbox = file.sandbox(Path::new("."), 4);
    assert_eq!(sandbox.env["*"]["A"], "1");
    assert!(!sandbox.env.contains_key("image.*"));
    assert_eq!(
        sandbox.handler_settings["image.*"],
        serde_json::json!({"at": "2026-01-01", "list": [1, 2.5], "deep": {"x": "y"}})
    );
    let clocks = ["image.crop", "image.plain", "noop"];
    let clocks = clocks.map(|name| most_specific(&sandbox.fine_clocks, name).copied());
    assert_eq!(clocks, [Some(true), Some(false), None]);
}

#[test]
fn state_is_granted_by_its_table_and_each_size_is_that_of_the_most_specific_that_sets_it() {
    let file = read(
        "[handlers.\"mail.*\".state]\nbytes_max = 100000\n[handlers.\"mail.send\"]\nlease = \"5s\"\n[handlers.\"mail.read\".state]\nkeys_max = 7",
    )
    .unwrap();
    let state = file.sandbox(Path::new("."), 4).state;
    let sizes = |name: &str| {
        let quota = most_specific(&state, name);
        quota.map(|quota| (quota.keys_max, quota.bytes_max))
    };
    let found = ["mail.send", "mail.read", "noop"].map(sizes);
    assert_eq!(found, [Some((1_000, 100_000)), Some((7, 100_000)), None]);
}
