//! Which signals are exported, by the standard variables of OpenTelemetry:
//! <https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/>. The exporters read the others
//! (headers, sampler, resource) themselves; they read the timeouts too, which also apply to the host's HTTP client.

use std::time::Duration;

use anyhow::bail;
use http::{HeaderName, HeaderValue};
use percent_encoding::percent_decode_str;

use super::Environment;
use crate::traces::{Signals, is_traceparent};

impl Environment {
    /// The signals that have an endpoint.
    ///
    /// # Errors
    /// If a variable requests something that Rouse does not support: the operator who set it relies on it.
    pub fn otlp(self) -> anyhow::Result<Signals> {
        signals(&|name| self.get(name))
    }

    /// `$TRACEPARENT`: the trace of the process that has started this one. An invalid one is ignored: it was not set
    /// for Rouse alone.
    pub fn traceparent(self) -> Option<String> {
        self.get("TRACEPARENT").filter(|text| is_traceparent(text))
    }
}

fn signals(get: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<Signals> {
    let is_disabled = get("OTEL_SDK_DISABLED").is_some_and(|it| it.eq_ignore_ascii_case("true"));
    if is_disabled {
        return Ok(Signals::default());
    }
    check_sampler(get)?;
    let resource = get("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    let has = |key: &str| {
        let mut keys = resource.split(',').filter_map(|one| one.split_once('='));
        keys.any(|(own, _)| own.trim() == key)
    };
    let (traces, logs) = (is_exported("TRACES", get)?, is_exported("LOGS", get)?);
    if traces || logs {
        check_numbers(get)?;
    }
    Ok(Signals {
        traces,
        logs,
        has_name: get("OTEL_SERVICE_NAME").is_some() || has("service.name"),
        has_instance_id: has("service.instance.id"),
        traces_timeout: timeout("TRACES", get)?,
        logs_timeout: timeout("LOGS", get)?,
        spans_max_is_set: get("OTEL_BSP_MAX_QUEUE_SIZE").is_some(),
        lines_max_is_set: get("OTEL_BLRP_MAX_QUEUE_SIZE").is_some(),
    })
}

/// A variable of the exporter of this signal: its name and its value. A variable for one signal takes precedence.
fn setting(
    signal: &str,
    rest: &str,
    get: &dyn Fn(&str) -> Option<String>,
) -> Option<(String, String)> {
    let own = format!("OTEL_EXPORTER_OTLP_{signal}_{rest}");
    let general = format!("OTEL_EXPORTER_OTLP_{rest}");
    let own_value = get(&own).map(|value| (own, value));
    own_value.or_else(|| get(&general).map(|value| (general, value)))
}

/// The timeout of one request with this signal.
fn timeout(signal: &str, get: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<Option<Duration>> {
    let Some((name, text)) = setting(signal, "TIMEOUT", get) else {
        return Ok(None);
    };
    match text.parse() {
        Ok(ms @ 1..=600_000) => Ok(Some(Duration::from_millis(ms))),
        _ => bail!("{name} is {text:?}; expected milliseconds, 1 to 600000"),
    }
}

/// The SDK uses its own defaults for numbers that it cannot parse, and allocates a queue of any size at once.
fn check_numbers(get: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<()> {
    for (name, unit, range) in [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "spans", 1..=1_000_000_u64),
        ("OTEL_BLRP_MAX_QUEUE_SIZE", "log records", 1..=1_000_000),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "spans", 1..=1_000_000),
        (
            "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE",
            "log records",
            1..=1_000_000,
        ),
        ("OTEL_BSP_SCHEDULE_DELAY", "milliseconds", 1..=600_000),
        ("OTEL_BLRP_SCHEDULE_DELAY", "milliseconds", 1..=600_000),
    ] {
        let Some(text) = get(name) else { continue };
        let number = text.parse::<u64>();
        if !number.is_ok_and(|number| range.contains(&number)) {
            let (min, max) = (range.start(), range.end());
            bail!("{name} is {text:?}; expected a number of {unit}, {min} to {max}");
        }
    }
    Ok(())
}

/// The SDK only logs a warning about an invalid sampler, and records everything.
fn check_sampler(get: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<()> {
    let Some(sampler) = get("OTEL_TRACES_SAMPLER") else {
        return Ok(());
    };
    let kind = sampler.strip_prefix("parentbased_").unwrap_or(&sampler);
    match kind {
        "always_on" | "always_off" => Ok(()),
        "traceidratio" => {
            let ratio = get("OTEL_TRACES_SAMPLER_ARG").unwrap_or_default();
            let is_ratio = |ratio: f64| (0.0..=1.0).contains(&ratio);
            if !ratio.parse().is_ok_and(is_ratio) {
                bail!("OTEL_TRACES_SAMPLER_ARG is {ratio:?}; for {sampler} it has to be 0 to 1");
            }
            Ok(())
        }
        _ => bail!(
            "OTEL_TRACES_SAMPLER is {sampler:?}; it can be always_on, always_off, traceidratio, or parentbased_ before one of these"
        ),
    }
}

fn is_exported(signal: &str, get: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<bool> {
    let setting = |rest: &str| setting(signal, rest, get);
    let exporter = format!("OTEL_{signal}_EXPORTER");
    match get(&exporter).as_deref() {
        None | Some("otlp") => {}
        Some("none") => return Ok(false),
        Some(other) => bail!("{exporter} is {other:?}; it can be otlp or none"),
    }
    if setting("ENDPOINT").is_none() {
        return Ok(false);
    }
    if let Some((name, protocol)) = setting("PROTOCOL").filter(|(_, it)| it != "http/protobuf") {
        bail!(
            "{name} is {protocol:?}, but Rouse exports by http/protobuf only: unset it, and use the endpoint of the collector for HTTP, \
             usually port 4318"
        );
    }
    for key in ["CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"] {
        if let Some((name, _)) = setting(key) {
            bail!(
                "{name} is set, but Rouse trusts the certificates of the system: unset it, and install the certificate there"
            );
        }
    }
    if let Some((name, way)) = setting("COMPRESSION").filter(|(_, it)| it != "none") {
        bail!("{name} is {way:?}, but Rouse exports without compression: unset it");
    }
    if let Some((name, headers)) = setting("HEADERS") {
        check_headers(&name, &headers)?;
    }
    Ok(true)
}

/// The SDK leaves out entries that are not headers. The error does not quote them: they may contain a password.
fn check_headers(name: &str, headers: &str) -> anyhow::Result<()> {
    let is_header = |entry: &str| {
        entry.split_once('=').is_some_and(|(key, value)| {
            let value = percent_decode_str(value.trim()).decode_utf8_lossy();
            HeaderName::from_bytes(key.trim().as_bytes()).is_ok()
                && !value.is_empty()
                && HeaderValue::from_str(&value).is_ok()
        })
    };
    let mut entries = headers.split(',').map(str::trim);
    match entries.position(|entry| !entry.is_empty() && !is_header(entry)) {
        None => Ok(()),
        Some(at) => bail!(
            "entry {} of {name} is not a header; expected NAME=VALUE, with a comma between two headers (a comma in a value is %2C)",
            at + 1
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_from(set: &[(&str, &str)]) -> Result<Signals, String> {
        let get = |name: &str| {
            let found = set.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        signals(&get).map_err(|error| error.to_string())
    }

    fn signals_from(set: &[(&str, &str)]) -> Result<(bool, bool), String> {
        all_from(set).map(|signals| (signals.traces, signals.logs))
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318");

    #[test]
    fn nothing_is_exported_without_an_endpoint() {
        assert_eq!(signals_from(&[]), Ok((false, false)));
        assert_eq!(
            signals_from(&[("OTEL_TRACES_EXPORTER", "otlp")]),
            Ok((false, false))
        );
        assert_eq!(
            signals_from(&[ENDPOINT, ("OTEL_SDK_DISABLED", "TRUE")]),
            Ok((false, false))
        );
    }

    #[test]
    fn each_signal_can_have_an_endpoint_and_be_switched_off() {
        assert_eq!(signals_from(&[ENDPOINT]), Ok((true, true)));
        assert_eq!(
            signals_from(&[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")]),
            Ok((true, false))
        );
        assert_eq!(
            signals_from(&[ENDPOINT, ("OTEL_LOGS_EXPORTER", "none")]),
            Ok((true, false))
        );
    }

    #[test]
    fn the_timeout_of_one_signal_takes_precedence_over_the_general_one() {
        let timeouts = |set: &[(&str, &str)]| {
            let signals = all_from(set).unwrap();
            [signals.traces_timeout, signals.logs_timeout].map(|it| it.map(|it| it.as_millis()))
        };
        let general = ("OTEL_EXPORTER_OTLP_TIMEOUT", "2000");
        let traces = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "30000");
        assert_eq!(timeouts(&[ENDPOINT]), [None, None]);
        assert_eq!(timeouts(&[ENDPOINT, general]), [Some(2_000), Some(2_000)]);
        assert_eq!(timeouts(&[ENDPOINT, traces]), [Some(30_000), None]);
        assert_eq!(timeouts(&[general, traces]), [Some(30_000), Some(2_000)]);
        let logs = ("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "0");
        let error = all_from(&[ENDPOINT, logs]).unwrap_err();
        assert!(
            error.starts_with("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT is"),
            "{error}"
        );
    }

    #[test]
    fn unsupported_options_of_exporters_are_refused() {
        let refused = |name, value| signals_from(&[ENDPOINT, (name, value)]).unwrap_err();
        let grpc = refused("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
        assert!(
            grpc.contains("http/protobuf only") && grpc.contains("4318"),
            "{grpc}"
        );
        let traces = refused("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json");
        assert!(
            traces.starts_with("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
            "{traces}"
        );
        assert_eq!(
            refused("OTEL_TRACES_EXPORTER", "zipkin"),
            "OTEL_TRACES_EXPORTER is \"zipkin\"; it can be otlp or none"
        );
        let gzip = refused("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip");
        assert!(gzip.contains("without compression"), "{gzip}");
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca.pem"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
            ("OTEL_TRACES_SAMPLER", "sometimes"),
            ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
        ] {
            assert!(refused(name, value).contains("OTEL_"), "{name}");
        }
        for (name, value) in [
            ("OTEL_BSP_MAX_QUEUE_SIZE", "16k"),
            ("OTEL_BLRP_MAX_QUEUE_SIZE", "0"),
            ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1000001"),
            ("OTEL_BLRP_SCHEDULE_DELAY", "1s"),
        ] {
            let error = refused(name, value);
            let start = format!("{name} is {value:?}; expected a number of ");
            assert!(error.starts_with(&start), "{error}");
            assert_eq!(signals_from(&[(name, value)]), Ok((false, false)));
        }
        for (headers, entry) in [
            ("Bearer hunter2", 1),
            ("authorization: Bearer hunter2", 1),
            ("x-one=1,,hunter2", 3),
            ("x one=hunter2", 1),
            ("x-one=1,x-two=", 2),
            ("x-one=hunter2%0A", 1),
        ] {
            let error = refused("OTEL_EXPORTER_OTLP_HEADERS", headers);
            let start = format!("entry {entry} of OTEL_EXPORTER_OTLP_HEADERS is not a header");
            assert!(
                error.starts_with(&start) && !error.contains("hunter2"),
                "{error}"
            );
        }
        let lines = refused("OTEL_EXPORTER_OTLP_LOGS_HEADERS", "x");
        assert!(lines.contains("OTEL_EXPORTER_OTLP_LOGS_HEADERS"), "{lines}");
        for headers in [
            "authorization=Bearer abc==",
            " x-one = 1%2C2 , X-Two=%C3%BC,",
        ] {
            let headers = ("OTEL_EXPORTER_OTLP_HEADERS", headers);
            assert_eq!(signals_from(&[ENDPOINT, headers]), Ok((true, true)));
        }
        let ratio = [
            ENDPOINT,
            ("OTEL_TRACES_SAMPLER", "traceidratio"),
            ("OTEL_TRACES_SAMPLER_ARG", "0.01"),
        ];
        assert_eq!(signals_from(&ratio), Ok((true, true)));
        let http = signals_from(&[ENDPOINT, ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")]);
        assert_eq!(http, Ok((true, true)));
    }
}
