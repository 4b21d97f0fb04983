//! PURE: trace contexts as text, and those that are derived from a job. The text is a `traceparent`, as in
//! <https://www.w3.org/TR/trace-context/#traceparent-header>.

use std::time::SystemTime;

use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};
use sha2::{Digest as _, Sha256};

/// True for a valid `traceparent`.
pub fn is_traceparent(text: &str) -> bool {
    parse(text).is_some()
}

/// Parses a `traceparent` of version 00, or of another version with the same fields. `None` if it is invalid.
pub(super) fn parse(text: &str) -> Option<SpanContext> {
    let mut parts = text.split('-');
    let mut part = |digits: usize| {
        let is_hexadecimal = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        parts
            .next()
            .filter(|part| part.len() == digits && part.bytes().all(is_hexadecimal))
    };
    let (version, trace, span, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
    if version == "ff" || parts.next().is_some() {
        return None;
    }
    let context = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        TraceFlags::new(u8::from_str_radix(flags, 16).ok()?),
        true,
        TraceState::default(),
    );
    context.is_valid().then_some(context)
}

/// The `traceparent` of a context. Only the sampled flag is passed on.
pub(super) fn traceparent(context: &SpanContext) -> String {
    format!(
        "00-{}-{}-{:02x}",
        context.trace_id(),
        context.span_id(),
        context.trace_flags() & TraceFlags::SAMPLED
    )
}

/// The trace of a job whose producer has none: the same on each host and in each attempt.
pub(super) fn trace_of(job: i64, requested_at: SystemTime) -> TraceId {
    let since = requested_at.duration_since(SystemTime::UNIX_EPOCH);
    let micros = since.map_or(0, |since| since.as_micros());
    let hash = Sha256::new()
        .chain_update(b"rouse trace")
        .chain_update(job.to_be_bytes())
        .chain_update(micros.to_be_bytes())
        .finalize();
    let (bytes, _) = hash.split_first_chunk().expect("it has 32 bytes");
    TraceId::from_bytes(*bytes)
}

/// The span of a job's enqueue: the same on each host and in each attempt.
pub(super) fn enqueue_of(job: i64, trace: TraceId) -> SpanId {
    let hash = Sha256::new()
        .chain_update(b"rouse enqueue")
        .chain_update(job.to_be_bytes())
        .chain_update(trace.to_bytes())
        .finalize();
    let (bytes, _) = hash.split_first_chunk().expect("it has 32 bytes");
    SpanId::from_bytes(*bytes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_is_parsed_and_written_again() {
        let context = parse(VALID).unwrap();
        assert!(context.is_sampled() && context.is_remote());
        assert_eq!(traceparent(&context), VALID);
        let unsampled = parse(&VALID.replace("-01", "-02")).unwrap();
        assert_eq!(traceparent(&unsampled), VALID.replace("-01", "-00"));
    }

    #[test]
    fn an_invalid_traceparent_is_ignored() {
        let zeros = |digits: usize| "0".repeat(digits);
        for invalid in [
            String::new(),
            "null".into(),
            VALID.to_uppercase(),
            VALID.replacen("00", "ff", 1),
            format!("{VALID}-00"),
            format!("00-{}-b7ad6b7169203331-01", zeros(32)),
            format!("00-0af7651916cd43dd8448eb211c80319c-{}-01", zeros(16)),
            VALID.replace("0af7", "0ag7"),
            VALID.replace("-b7ad", "-+7ad"),
        ] {
            assert_eq!(parse(&invalid), None, "{invalid:?}");
        }
    }

    #[test]
    fn a_job_has_the_same_trace_and_enqueue_everywhere_and_no_other_job_has_them() {
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        let trace = trace_of(7, at);
        assert_eq!(trace, trace_of(7, at));
        assert_ne!(trace, trace_of(8, at));
        assert_ne!(trace, trace_of(7, at + Duration::from_micros(1)));
        assert_eq!(enqueue_of(7, trace), enqueue_of(7, trace));
        assert_ne!(enqueue_of(7, trace), enqueue_of(8, trace));
        assert_ne!(enqueue_of(7, trace), enqueue_of(7, trace_of(8, at)));
    }
}
