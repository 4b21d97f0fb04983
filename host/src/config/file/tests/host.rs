//! The settings of the whole host.

use std::path::Path;
use std::time::Duration;

use super::read;
use crate::config::{HostSettings, help, host_help, host_number};
use crate::setting::Overlay;

#[test]
fn every_key_may_be_left_out() {
    let worker = read("").unwrap().worker("here".into());
    assert_eq!(worker.poll_max, Duration::from_secs(2));
    assert!(worker.notify && worker.queues.is_empty());
}

#[test]
fn numbers_of_the_host_replace_their_defaults() {
    let file = read(
        "slots = 7\npoll_min = \"1s\"\npoll_max = \"1s\"\ndrain_timeout = \"0s\"\npromote_after = \"0s\"\npromote_share = 50\n\
         memory_total_mb = 64\ninvoke_max = 3\nhttp_timeout = \"5s\"\nmodule_tables_max = 9",
    )
    .unwrap();
    let worker = file.worker("here".into());
    assert_eq!((worker.slots, worker.promote_share), (7, 50));
    assert_eq!(worker.poll_min, worker.poll_max);
    assert_eq!(worker.drain_timeout, Duration::ZERO);
    assert_eq!(worker.promote_after, None, "0s: never");
    assert_eq!(worker.lost_max, 3, "the default");
    let sandbox = file.sandbox(Path::new("."), 1);
    assert_eq!(sandbox.memory_bytes_total_max, Some(64 << 20));
    assert_eq!(sandbox.http.timeout, Duration::from_secs(5));
    assert_eq!(sandbox.module_parts.tables, 9);
    assert_eq!(file.invoke_max(), Some(3));

    let unset = read("").unwrap();
    assert_eq!(unset.invoke_max(), None);
    assert_eq!(unset.invoke_payload_bytes_max(), 256 << 10);
    let sandbox = unset.sandbox(Path::new("."), 1);
    assert_eq!(sandbox.memory_bytes_total_max, None);
    let promoted = unset.worker("here".into()).promote_after;
    assert_eq!(promoted, Some(Duration::from_secs(900)));
}

#[test]
fn times_of_the_host_have_upper_bounds() {
    for key in ["drain_timeout", "promote_after"] {
        assert!(read(&format!("{key} = \"30days\"")).is_ok());
        let why = read(&format!("{key} = \"31days\"")).unwrap_err();
        let bounds = format!("{key} must be between 0s and 30days, not 31days");
        assert!(why.ends_with(&bounds), "{why}");
    }
    let why = read("poll_min = \"3s\"\npoll_max = \"2500ms\"").unwrap_err();
    let order = "poll_min must be at most poll_max, which is 2s 500ms, not 3s";
    assert!(why.ends_with(order), "{why}");
    // A worker lowers its default of poll_min.
    assert!(read("poll_max = \"1ms\"").is_ok());
}

#[test]
fn options_override_the_file_and_have_the_same_bounds() {
    let mut file = read("slots = 7\npoll_min = \"1s\"").unwrap();
    let options = Overlay::<HostSettings>::default();
    let options = options.with("slots", host_number("slots")("9").unwrap());
    file.override_host(options.clone()).unwrap();
    assert_eq!(file.worker("here".into()).slots, 9);
    assert_eq!(
        host_number("poll_max")("2h").unwrap_err(),
        "must be between 1ms and 1m, not 2h"
    );
    assert_eq!(
        host_number("slots")("0").unwrap_err(),
        "expected a whole number from 1 to 10000"
    );
    let why = file
        .override_host(options.with("poll_max", Duration::from_millis(500)))
        .unwrap_err();
    assert_eq!(
        why,
        "poll_min must be at most poll_max, which is 500ms, not 1s"
    );
}

#[test]
fn the_help_of_an_option_gives_bounds_and_default() {
    for (help, words) in [
        (
            host_help("poll_max"),
            "Longest wait between two polls, 1ms to 1m; default: 2s",
        ),
        (
            host_help("slots"),
            "Maximum number of attempts at the same time, 1 to 10000; default: 4 for each core",
        ),
        (
            help("worker_id"),
            "This worker's id: 1 to 64 letters, digits, - and _; default: a random one for each start",
        ),
    ] {
        assert_eq!(help, words);
    }
}
