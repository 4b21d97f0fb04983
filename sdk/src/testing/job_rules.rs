//! The rules for the handlers and the options of jobs that the host checks when an attempt passes a job to it. A test
//! of the host (`host/src/sandbox/capability/jobs/options.rs`) includes this file and compares it with its own rules.

use serde_json::Value;

/// Checks the name of the handler.
pub(super) fn check_handler(name: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_word = |word: &str| {
        let first = word.bytes().next();
        let mut bytes = word.bytes();
        first.is_some_and(is_plain) && bytes.all(|b| is_plain(b) || b == b'-' || b == b'_')
    };
    match name.len() <= 128 && name.split('.').all(is_word) {
        true => Ok(()),
        false => Err(format!("'{name}' is not a handler name")),
    }
}

/// Checks the options of a job, except `after`.
pub(super) fn check_options(options: &Value) -> Result<(), String> {
    if let Some(queue) = options["queue"].as_str()
        && !(queue.len() <= 128 && is_word(queue))
    {
        return Err(format!("'{queue}' is not a queue name"));
    }
    if let Some(attempts) = options["max_attempts"].as_u64()
        && !(1..=1000).contains(&attempts)
    {
        return Err(format!(
            "max_attempts must be between 1 and 1000, not {attempts}"
        ));
    }
    if let Some(key) = options["unique_key"].as_str()
        && (key.is_empty() || key.len() > 1024 || key.chars().count() > 512)
    {
        return Err(
            "unique_key must have 1 to 512 characters and at most 1024 bytes, or be left out"
                .into(),
        );
    }
    if let Some(tags) = options["tags"].as_array() {
        let tags: Vec<&str> = tags.iter().filter_map(Value::as_str).collect();
        if tags.len() > 16 || !tags.iter().all(|tag| is_tag(tag)) {
            let tags = tags.join(",");
            return Err(format!(
                "tags must be a list of at most 16 tags, not {{{tags}}}"
            ));
        }
    }
    check_duration(options, "lease", 2_000, 86_400_000)?;
    check_duration(options, "timeout", 1, 2_592_000_000)?;
    check_duration(options, "job_timeout", 1, 316_224_000_000)
}

/// Checks a duration in the form that the SDK writes.
fn check_duration(options: &Value, option: &str, ms_min: u64, ms_max: u64) -> Result<(), String> {
    let time = options[option].as_str();
    let ms = time.and_then(|time| time.strip_suffix(" milliseconds"));
    match ms.and_then(|ms| ms.parse::<u64>().ok()) {
        Some(ms) if !(ms_min..=ms_max).contains(&ms) => Err(format!(
            "{option} must be between {ms_min} and {ms_max} milliseconds, not {ms}"
        )),
        Some(_) | None => Ok(()),
    }
}

fn is_tag(tag: &str) -> bool {
    let is_value =
        |value: &str| !value.is_empty() && value.bytes().all(|b| is_inner(b) || b == b'/');
    tag.len() <= 128
        && match tag.split_once('=') {
            Some((key, value)) => is_word(key) && is_value(value),
            None => is_word(tag),
        }
}

fn is_word(word: &str) -> bool {
    let first = word.bytes().next();
    first.is_some_and(|b| b.is_ascii_alphanumeric()) && word.bytes().all(is_inner)
}

fn is_inner(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte)
}
