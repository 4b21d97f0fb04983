//! Charts, drawn on the server.

use maud::{Markup, html};

use super::cells;
use crate::when;

const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 150.0;

/// The throughput of the fleet at a point in time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sample {
    /// When, seconds since 1970.
    pub at: f64,
    /// Jobs that ended since the sample before, per second.
    pub ended_per_s: f64,
    /// Jobs that failed in the last minute, per second.
    pub failed_per_s: f64,
}

/// Lines through the samples of the last hour.
pub(super) fn throughput(samples: &[Sample], now: f64) -> Markup {
    let top = samples
        .iter()
        .map(|it| it.ended_per_s.max(it.failed_per_s))
        .fold(0.0, f64::max);
    let (Some(first), true) = (samples.first(), samples.len() > 1) else {
        return html! { p class="soft" { "The chart starts when the dashboard starts: the first data appears within a few seconds." } };
    };
    let top = round_up(top);
    let span = (now - first.at).max(1.0);
    let points = |of: fn(&Sample) -> f64| {
        let points = samples.iter().map(|it| {
            let x = (it.at - first.at) / span * WIDTH;
            let y = HEIGHT - of(it) / top * (HEIGHT - 8.0);
            format!("{},{}", px(x), px(y))
        });
        points.collect::<Vec<_>>().join(" ")
    };
    let last = samples.last().copied().unwrap_or_default();
    let label = format!(
        "Jobs per second over {}: now {} ended, {} failed; the scale ends at {}",
        when::short(span),
        rate(last.ended_per_s),
        rate(last.failed_per_s),
        rate(top)
    );
    html! {
        div class="plot" {
            // Text in the drawing would be stretched with it. Screen readers use its label.
            div class="scale" aria-hidden="true" {
                @for share in [1.0, 0.5, 0.0] { span { (rate(top * share)) } }
            }
            svg class="chart" viewBox="0 0 1000 150" preserveAspectRatio="none" height="150" role="img" aria-label=(label) {
                @for share in [0.0, 0.5, 1.0] {
                    @let y = px(HEIGHT - share * (HEIGHT - 8.0));
                    line class="axis" x1="0" x2="1000" y1=(y) y2=(y) vector-effect="non-scaling-stroke" {}
                }
                polyline class="line busy" points=(points(|it| it.ended_per_s)) vector-effect="non-scaling-stroke" {}
                polyline class="line bad" points=(points(|it| it.failed_per_s)) vector-effect="non-scaling-stroke" {}
            }
            div class="span" aria-hidden="true" { span { (when::short(span)) " ago" } span { "now" } }
        }
        p class="legend" {
            span { (swatch("busy")) (rate(last.ended_per_s)) " ended per second" }
            span { (swatch("bad")) (rate(last.failed_per_s)) " failed per second" }
        }
    }
}

/// A length in a drawing.
pub(super) fn px(length: f64) -> String {
    format!("{length:.1}")
}

/// A small square in a colour, for legends.
pub(super) fn swatch(tone: &str) -> Markup {
    html! { svg viewBox="0 0 10 10" aria-hidden="true" { rect class=(tone) width="10" height="10" rx="2" {} } }
}

/// The next of 1, 2, 5, 10, 20 …
fn round_up(value: f64) -> f64 {
    let mut step = 1.0;
    for factor in [2.0, 2.5, 2.0].into_iter().cycle() {
        if step >= value {
            break;
        }
        step *= factor;
    }
    step
}

/// A rate with as many digits as it needs.
pub(super) fn rate(per_s: f64) -> String {
    match per_s {
        ..0.05 => "0".to_owned(),
        ..10.0 => format!("{per_s:.1}"),
        _ => cells::number(per_s.round() as i64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_ends_at_a_round_number() {
        for (value, top) in [
            (0.0, 1.0),
            (1.5, 2.0),
            (3.0, 5.0),
            (7.0, 10.0),
            (18_500.0, 20_000.0),
        ] {
            assert_eq!(round_up(value), top, "{value}");
        }
        assert_eq!(
            (rate(0.01), rate(2.34), rate(18_499.6)),
            ("0".into(), "2.3".into(), "18,500".into())
        );
    }

    #[test]
    fn samples_become_two_lines_and_a_single_sample_a_hint() {
        let sample = |at, ended_per_s| Sample {
            at,
            ended_per_s,
            failed_per_s: 0.0,
        };
        let drawn = throughput(&[sample(0.0, 1.0), sample(5.0, 2.0)], 10.0).into_string();
        assert!(drawn.contains(r#"points="0.0,79.0 500.0,8.0""#), "{drawn}");
        assert!(
            throughput(&[sample(0.0, 1.0)], 1.0)
                .into_string()
                .contains("starts when")
        );
    }
}
