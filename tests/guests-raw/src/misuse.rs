//! Wrong host calls, or far too many of them.

use crate::bindings::exports::rouse::handler::handlers::Failure;
use crate::bindings::rouse::handler::context::{self, Level};
use crate::bindings::wasi::io::poll;

type Answer = Result<Vec<u8>, Failure>;

/// A line that would overwrite a terminal and forge lines in a log.
pub(crate) fn log_escapes(_: Vec<u8>) -> Answer {
    context::log(
        Level::Info,
        "\u{1b}[2Jcleared\r\nsecond line\0\u{9b}31m\u{202e}",
    );
    Ok(b"null".to_vec())
}

pub(crate) fn log_flood(_: Vec<u8>) -> Answer {
    for line in 0..100_000 {
        context::log(Level::Error, &format!("line {line}"));
    }
    Ok(b"null".to_vec())
}

pub(crate) fn long_log(_: Vec<u8>) -> Answer {
    context::log(Level::Info, &"x".repeat(16 << 20));
    Ok(b"null".to_vec())
}

pub(crate) fn percent(_: Vec<u8>) -> Answer {
    context::progress(255, &"step\n".repeat(100_000));
    Ok(b"null".to_vec())
}

/// Takes handles until the host refuses.
pub(crate) fn hoard_handles(_: Vec<u8>) -> Answer {
    let signal = context::abort();
    let mut hoard = Vec::new();
    loop {
        hoard.push(signal.subscribe());
    }
}

/// According to WASI, this traps.
pub(crate) fn poll_nothing(_: Vec<u8>) -> Answer {
    poll::poll(&[]);
    Ok(b"null".to_vec())
}

/// A pollable that outlives the signal from which it was made.
pub(crate) fn drop_signal_first(_: Vec<u8>) -> Answer {
    let signal = context::abort();
    let pollable = signal.subscribe();
    drop(signal);
    let ready = pollable.ready();
    Ok(ready.to_string().into())
}

/// Reports a panic, and returns as if nothing had happened.
pub(crate) fn panicked_but_fine(_: Vec<u8>) -> Answer {
    context::panicked("no panic at all", "nowhere:1:1");
    Ok(b"\"fine\"".to_vec())
}
