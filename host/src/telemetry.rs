//! Logs on stderr: readable lines, or JSON for machines.

use std::str::FromStr;

use anstream::{AutoStream, ColorChoice};
use tracing_subscriber::layer::{Layer, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Registry, fmt};

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// One readable line per event, in colour on a terminal, unless `NO_COLOR` or `CLICOLOR=0` say otherwise.
    #[default]
    Text,
    /// One JSON object per event.
    Json,
}

impl FromStr for LogFormat {
    type Err = TelemetryError;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(TelemetryError::Format(other.to_owned())),
        }
    }
}

/// A log setting that cannot be used.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum TelemetryError {
    /// The filter cannot be read.
    #[error(
        "ROUSE_LOG is {filter:?}, which is no filter ({why}): write for instance info, or rouse=debug,warn"
    )]
    Filter {
        /// The value.
        filter: String,
        /// What is wrong with it.
        why: String,
    },
    /// There is no such format.
    #[error("there is no log format {0:?}: choose text or json")]
    Format(String),
}

/// What is logged where nobody says otherwise: `info`, without what guests can make wasmtime-wasi-http say as often as they like.
pub const USUAL: &str = "info,wasmtime_wasi_http=error";

/// Whatever else hears of events; its filter is its own.
pub type Listener = Box<dyn Layer<Registry> + Send + Sync>;

/// Sends what happens in this process to stderr, as far as `filter`, the value of `ROUSE_LOG`, lets it through, and to `listener`. Where
/// logs have been set up already, as in a test, they stay as they are.
///
/// # Errors
/// Where the filter cannot be read. Then nothing is set up.
pub fn init(
    format: LogFormat,
    filter: &str,
    listener: Option<Listener>,
) -> Result<(), TelemetryError> {
    let filter = parse(filter)?;
    let lines = fmt::layer()
        .with_writer(std::io::stderr)
        // Whoever read them may be gone. Saying so would be written to the same place, with a panic of the task that
        // has logged something.
        .log_internal_errors(false)
        .with_ansi(AutoStream::choice(&std::io::stderr()) != ColorChoice::Never);
    let lines = match format {
        LogFormat::Text => lines.compact().with_filter(filter).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_filter(filter).boxed(),
    };
    let set = Registry::default().with(listener).with(lines).try_init();
    // It fails only where somebody was first, and then that one's choice stands.
    drop::<Result<(), _>>(set);
    Ok(())
}

fn parse(filter: &str) -> Result<EnvFilter, TelemetryError> {
    EnvFilter::try_new(filter).map_err(|error| TelemetryError::Filter {
        filter: filter.to_owned(),
        why: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_up_twice_changes_nothing_and_does_not_panic() {
        assert_eq!(init(LogFormat::Text, USUAL, None), Ok(()));
        assert_eq!(init(LogFormat::Json, "rouse=debug,warn", None), Ok(()));
    }

    #[test]
    fn a_bad_filter_names_the_variable() {
        let error = init(LogFormat::Text, "rouse=loud", None).unwrap_err();
        assert!(
            error.to_string().starts_with("ROUSE_LOG is \"rouse=loud\""),
            "{error}"
        );
    }

    #[test]
    fn formats_are_read_from_words() {
        assert_eq!("json".parse(), Ok(LogFormat::Json));
        let error = "xml".parse::<LogFormat>().unwrap_err();
        assert!(error.to_string().contains("text or json"), "{error}");
    }
}
