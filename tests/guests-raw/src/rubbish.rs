//! Results that a host must not store unchanged.

use crate::bindings::exports::rouse::handler::handlers::Failure;

type Answer = Result<Vec<u8>, Failure>;

pub(crate) fn empty(_: Vec<u8>) -> Answer {
    Ok(Vec::new())
}

pub(crate) fn not_json(_: Vec<u8>) -> Answer {
    Ok(b"not json".to_vec())
}

pub(crate) fn two_values(_: Vec<u8>) -> Answer {
    Ok(b"{} {}".to_vec())
}

pub(crate) fn invalid_utf8(_: Vec<u8>) -> Answer {
    Ok(vec![b'"', 0xff, 0xfe, b'"'])
}

/// 100,000 nested arrays: too deep for most recursive parsers.
pub(crate) fn deep(_: Vec<u8>) -> Answer {
    Ok(["[".repeat(100_000), "]".repeat(100_000)].concat().into())
}

/// Valid JSON, too large for `numeric` in Postgres.
pub(crate) fn huge_number(_: Vec<u8>) -> Answer {
    Ok(b"1e999999".to_vec())
}

pub(crate) fn nul_key(_: Vec<u8>) -> Answer {
    Ok(br#"{"\u0000": 1}"#.to_vec())
}

pub(crate) fn lone_surrogate(_: Vec<u8>) -> Answer {
    Ok(br#""\ud800""#.to_vec())
}

/// A failure whose kind and message contain NUL, and whose details are not JSON.
pub(crate) fn bad_details(_: Vec<u8>) -> Answer {
    Err(Failure {
        kind: "k\0".into(),
        message: "m\0".into(),
        details: Some(vec![0xff, b'{']),
        permanent: true,
        retry_after_ms: None,
    })
}

/// A failure of 16 MiB.
pub(crate) fn long_failure(_: Vec<u8>) -> Answer {
    Err(Failure {
        kind: "k".repeat(1 << 20),
        message: "m".repeat(8 << 20),
        details: Some(format!("\"{}\"", "d".repeat(7 << 20)).into()),
        permanent: true,
        retry_after_ms: None,
    })
}

pub(crate) fn endless_retry_after(_: Vec<u8>) -> Answer {
    Err(Failure {
        kind: "late".into(),
        message: "in half a billion years".into(),
        details: None,
        permanent: false,
        retry_after_ms: Some(u64::MAX),
    })
}
