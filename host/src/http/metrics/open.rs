//! The metrics in the format of OpenMetrics 1.0, which has exemplars:
//! <https://prometheus.io/docs/specs/om/open_metrics_spec/>.

use std::fmt::Write as _;
use std::time::SystemTime;

use crate::worker::Exemplars;

/// The media type of the format.
pub(super) const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The buckets that have exemplars.
const BUCKETS: &str = "rouse_attempt_seconds_bucket{";

/// Whether a client with this `Accept` header reads the format.
pub(super) fn is_accepted(accept: &str) -> bool {
    accept.split(',').any(|one| {
        let mut parts = one.split(';').map(str::trim);
        parts.next() == Some("application/openmetrics-text") && !parts.any(|part| part == "q=0")
    })
}

/// Converts Prometheus' text format to OpenMetrics. The two differ in the names of families of counters, which have no
/// `_total` in OpenMetrics, in blank lines, and in how they end.
pub(super) fn from_text(text: &str, exemplars: &Exemplars) -> String {
    let mut open = String::with_capacity(text.len() + text.len() / 8);
    for line in text.lines().filter(|line| !line.is_empty()) {
        match family(line) {
            Some(family) => open.push_str(&family),
            None => {
                open.push_str(line);
                push_exemplar(&mut open, line, exemplars);
            }
        }
        open.push('\n');
    }
    open.push_str("# EOF\n");
    open
}

/// The line about the family of a counter; `None` for all other lines.
fn family(line: &str) -> Option<String> {
    let (kind, rest) = line.strip_prefix("# ")?.split_once(' ')?;
    let (name, rest) = rest.split_once(' ')?;
    Some(format!("# {kind} {} {rest}", name.strip_suffix("_total")?))
}

fn push_exemplar(open: &mut String, line: &str, exemplars: &Exemplars) {
    let Some(labels) = line.strip_prefix(BUCKETS) else {
        return;
    };
    let label = |name: &str| {
        let (_, rest) = labels.split_once(name)?;
        Some(rest.split_once('"')?.0)
    };
    let (Some(handler), Some(bound)) = (label("handler=\""), label("le=\"")) else {
        return;
    };
    let bound = match bound {
        "+Inf" => f64::INFINITY,
        bound => bound.parse().unwrap_or(f64::INFINITY),
    };
    let Some(exemplar) = exemplars.get(handler, bound) else {
        return;
    };
    let since = exemplar.at.duration_since(SystemTime::UNIX_EPOCH);
    let at = since.map_or(0.0, |since| since.as_secs_f64());
    // Writing to a string does not fail.
    let _ = write!(
        open,
        " # {{trace_id=\"{}\"}} {} {at:.3}",
        exemplar.trace_id, exemplar.seconds
    );
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::worker::Exemplar;

    #[test]
    fn a_client_requests_the_format() {
        assert!(is_accepted(
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2"
        ));
        assert!(is_accepted("text/plain, application/openmetrics-text"));
        assert!(!is_accepted("text/plain;version=0.0.4"));
        assert!(!is_accepted("*/*"));
        assert!(!is_accepted("application/openmetrics-text; q=0"));
    }

    #[test]
    fn counters_lose_their_suffix_and_buckets_get_their_exemplars() {
        let exemplars = Exemplars::new(&[0.1, 1.0]);
        let exemplar = Exemplar {
            trace_id: "0af7651916cd43dd8448eb211c80319c".into(),
            seconds: 0.25,
            at: SystemTime::UNIX_EPOCH + Duration::from_millis(1_500),
        };
        exemplars.record("x", exemplar);
        let text = "\
# HELP rouse_attempts_total Attempts by outcome.
# TYPE rouse_attempts_total counter
rouse_attempts_total{handler=\"x\"} 2

# TYPE rouse_attempt_seconds histogram
rouse_attempt_seconds_bucket{handler=\"x\",le=\"0.1\"} 0
rouse_attempt_seconds_bucket{handler=\"x\",le=\"1\"} 2
rouse_attempt_seconds_bucket{handler=\"x\",le=\"+Inf\"} 2
rouse_attempt_seconds_sum{handler=\"x\"} 0.5

";
        let expected = "\
# HELP rouse_attempts Attempts by outcome.
# TYPE rouse_attempts counter
rouse_attempts_total{handler=\"x\"} 2
# TYPE rouse_attempt_seconds histogram
rouse_attempt_seconds_bucket{handler=\"x\",le=\"0.1\"} 0
rouse_attempt_seconds_bucket{handler=\"x\",le=\"1\"} 2 # {trace_id=\"0af7651916cd43dd8448eb211c80319c\"} 0.25 1.500
rouse_attempt_seconds_bucket{handler=\"x\",le=\"+Inf\"} 2
rouse_attempt_seconds_sum{handler=\"x\"} 0.5
# EOF
";
        assert_eq!(from_text(text, &exemplars), expected);
    }
}
