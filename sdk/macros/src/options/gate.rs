//! Gates: `max_concurrent(…)`, `throttle(…)`, `batch(…)`, `singleton(…)` and `debounce(…)`. The host checks the same
//! rules when it loads the module.

use proc_macro2::{Ident, Span};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Expr, ExprArray, Token};

use super::{Reader, Setting, Value, bounded, duration, text};
use crate::limits::{GATE_BATCH_MAX, GATE_COUNT_MAX, GATE_PERIOD_MS_MAX, GATE_STARTS_MAX};

/// A gate that the handler declares.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Gate {
    pub(crate) limit: Limit,
    pub(crate) key: Vec<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Limit {
    MaxConcurrent {
        max: u32,
    },
    Throttle {
        max: u32,
        period_ms: u64,
        burst: Option<u32>,
    },
    Batch {
        max: u32,
        period_ms: Option<u64>,
    },
    Singleton {
        during: During,
        period_ms: Option<u64>,
        on_conflict: OnConflict,
    },
    Debounce {
        period_ms: u64,
        max_wait_ms: Option<u64>,
        edge: Edge,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) enum During {
    #[default]
    Queued,
    Running,
    Period,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) enum OnConflict {
    #[default]
    Keep,
    Replace,
    Refuse,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) enum Edge {
    #[default]
    Trailing,
    Leading,
}

/// The options of a kind of gate, and an example.
pub(super) fn kind(name: &Ident) -> Option<(&'static [&'static str], &'static str)> {
    let name = name.to_string();
    Some(match name.as_str() {
        "max_concurrent" => (&["max", "key"], "max_concurrent(max = 5, key = \"tenant\")"),
        "throttle" => (
            &["max", "period", "burst", "key"],
            "throttle(max = 100, period = \"1m\")",
        ),
        "batch" => (
            &["max", "period", "key"],
            "batch(max = 100, period = \"500ms\")",
        ),
        "singleton" => (
            &["key", "during", "period", "on_conflict"],
            "singleton(key = \"$.document\")",
        ),
        "debounce" => (
            &["period", "max_wait", "edge", "key"],
            "debounce(period = \"5s\", key = \"$.document\")",
        ),
        _ => return None,
    })
}

/// The options as written.
#[derive(Default)]
struct Written {
    key: Vec<String>,
    max: Option<u32>,
    burst: Option<u32>,
    period_ms: Option<u64>,
    max_wait_ms: Option<u64>,
    during: During,
    on_conflict: OnConflict,
    edge: Edge,
}

impl Reader {
    /// Reads a gate of this kind. `None` after an error.
    pub(super) fn gate(
        &mut self,
        name: &Ident,
        settings: &Punctuated<Setting, Token![,]>,
    ) -> Option<Gate> {
        let (options, example) = kind(name)?;
        let errors = self.count;
        let mut written = Written::default();
        let mut spans: Vec<(String, Span)> = Vec::new();
        for setting in settings {
            let option = setting.name.to_string();
            let Value::Expr(value) = &setting.value else {
                let why =
                    format!("`{name}(…)` cannot contain `{option}(…)`; write it after this one");
                self.fail(setting.name.span(), why);
                continue;
            };
            if !options.contains(&option.as_str()) {
                let options = options.join(", ");
                let why =
                    format!("`{name}(…)` has no option `{option}`; its options are {options}");
                self.fail(setting.name.span(), why);
                continue;
            }
            if spans.iter().any(|(seen, _)| *seen == option) {
                let why = format!("`{option}` is set twice");
                self.fail(setting.name.span(), why);
                continue;
            }
            match option.as_str() {
                "key" => written.key = self.keep(key(value)).unwrap_or_default(),
                "max" => written.max = self.keep(bounded(value, GATE_COUNT_MAX)),
                "burst" => written.burst = self.keep(bounded(value, GATE_COUNT_MAX)),
                "period" => {
                    written.period_ms = self.keep(duration(value, 1..=GATE_PERIOD_MS_MAX));
                }
                "max_wait" => {
                    written.max_wait_ms = self.keep(duration(value, 1..=GATE_PERIOD_MS_MAX));
                }
                "during" => written.during = self.keep(during(value)).unwrap_or_default(),
                "on_conflict" => {
                    written.on_conflict = self.keep(on_conflict(value)).unwrap_or_default();
                }
                _ => written.edge = self.keep(edge(value)).unwrap_or_default(),
            }
            spans.push((option, value.span()));
        }
        let span = |option: &str| {
            let mut spans = spans.iter();
            spans
                .find(|(seen, _)| seen == option)
                .map(|(_, span)| *span)
        };
        let mut needs = |option: &str| {
            if span(option).is_none() {
                let why = format!("`{name}(…)` needs `{option}`, for instance `{example}`");
                self.fail(name.span(), why);
            }
        };
        match name.to_string().as_str() {
            "max_concurrent" => needs("max"),
            "throttle" => {
                needs("max");
                needs("period");
                let is_large = written.max.is_some_and(|max| max > GATE_STARTS_MAX);
                if let (true, None, Some(span)) = (is_large, span("burst"), span("max")) {
                    let why = format!(
                        "without `burst`, a throttle lets at most {GATE_STARTS_MAX} jobs start in a period; add `burst = …`, \
                         the number that may start at once"
                    );
                    self.fail(span, why);
                }
            }
            "batch" => {
                needs("max");
                let is_large = written.max.is_some_and(|max| max > GATE_BATCH_MAX);
                if let (true, Some(span)) = (is_large, span("max")) {
                    self.fail(span, format!("a batch has at most {GATE_BATCH_MAX} jobs"));
                }
                let by_tenant = written.key.iter().any(|by| by == "tenant");
                if let (2, false, Some(span)) = (written.key.len(), by_tenant, span("key")) {
                    let why = "all jobs of a batch belong to one tenant: its key has at most one value besides \
                               \"tenant\"";
                    self.fail(span, why);
                }
            }
            "debounce" => {
                needs("period");
                if let (Some(period), Some(max_wait)) = (written.period_ms, written.max_wait_ms)
                    && max_wait < period
                {
                    let span = span("max_wait").unwrap_or(name.span());
                    self.fail(span, "max_wait is shorter than period");
                }
            }
            _ => match (written.during == During::Period, span("period")) {
                (true, None) => self.fail(
                    name.span(),
                    "a singleton with `during = \"period\"` needs a period, for instance `period = \"1h\"`",
                ),
                // After another error, `during` may have been misspelt.
                (false, Some(span)) if self.count == errors => self.fail(
                    span,
                    "a singleton has a period only with `during = \"period\"`",
                ),
                (true, Some(_)) | (false, _) => {}
            },
        }
        if written.on_conflict == OnConflict::Replace && written.during != During::Queued {
            let span = span("on_conflict").unwrap_or(name.span());
            self.fail(
                span,
                "a job is replaced only while it is queued: remove `during`",
            );
        }
        if self.count > errors {
            return None;
        }
        written.gate(name)
    }
}

impl Written {
    /// `None` if something is missing.
    fn gate(self, name: &Ident) -> Option<Gate> {
        let limit = match name.to_string().as_str() {
            "max_concurrent" => Limit::MaxConcurrent { max: self.max? },
            "throttle" => Limit::Throttle {
                max: self.max?,
                period_ms: self.period_ms?,
                burst: self.burst,
            },
            "batch" => Limit::Batch {
                max: self.max?,
                period_ms: self.period_ms,
            },
            "debounce" => Limit::Debounce {
                period_ms: self.period_ms?,
                max_wait_ms: self.max_wait_ms,
                edge: self.edge,
            },
            _ => Limit::Singleton {
                during: self.during,
                period_ms: self.period_ms,
                on_conflict: self.on_conflict,
            },
        };
        Some(Gate {
            limit,
            key: self.key,
        })
    }
}

/// One value by which jobs are divided, or a list of up to two.
fn key(value: &Expr) -> syn::Result<Vec<String>> {
    let values: Vec<&Expr> = match value {
        Expr::Array(ExprArray { elems, .. }) => elems.iter().collect(),
        one => vec![one],
    };
    if values.len() > 2 {
        let why = "a key has at most two values";
        return Err(syn::Error::new(value.span(), why));
    }
    let mut key: Vec<String> = Vec::new();
    for value in values {
        let literal = text(value).map_err(|error| {
            let why = "expected a key such as \"tenant\" or \"$.customer.id\", or a list of two";
            syn::Error::new(error.span(), why)
        })?;
        let by = literal.value();
        if !divides(&by) {
            let why = format!(
                "`{by}` cannot be a key: write \"tenant\", \"source\", \"handler\", \"queue\", or a path of the \
                 payload such as \"$.customer.id\""
            );
            return Err(syn::Error::new(literal.span(), why));
        }
        if key.contains(&by) {
            let why = format!("the key has `{by}` twice");
            return Err(syn::Error::new(literal.span(), why));
        }
        key.push(by);
    }
    Ok(key)
}

/// True for a value by which jobs can be divided.
fn divides(by: &str) -> bool {
    let is_word = |word: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        (1..=64).contains(&word.len()) && word.chars().all(plain)
    };
    match by.strip_prefix("$.") {
        Some(path) => path.split('.').count() <= 8 && path.split('.').all(is_word),
        None => matches!(by, "tenant" | "source" | "handler" | "queue"),
    }
}

fn during(value: &Expr) -> syn::Result<During> {
    let literal = text(value)?;
    match literal.value().as_str() {
        "queued" => Ok(During::Queued),
        "running" => Ok(During::Running),
        "period" => Ok(During::Period),
        _ => Err(syn::Error::new(
            literal.span(),
            "expected \"queued\" (until the job has started), \"running\" (until it has ended) or \"period\" (for a \
             period after its enqueue)",
        )),
    }
}

fn on_conflict(value: &Expr) -> syn::Result<OnConflict> {
    let literal = text(value)?;
    match literal.value().as_str() {
        "keep" => Ok(OnConflict::Keep),
        "replace" => Ok(OnConflict::Replace),
        "refuse" => Ok(OnConflict::Refuse),
        _ => Err(syn::Error::new(
            literal.span(),
            "expected \"keep\" (the earlier job is kept), \"replace\" (it gets the payload of the new one) or \"refuse\" \
             (the enqueue is an error)",
        )),
    }
}

fn edge(value: &Expr) -> syn::Result<Edge> {
    let literal = text(value)?;
    match literal.value().as_str() {
        "trailing" => Ok(Edge::Trailing),
        "leading" => Ok(Edge::Leading),
        _ => Err(syn::Error::new(
            literal.span(),
            "expected \"trailing\" (the last job of a burst runs, after it) or \"leading\" (the first one, at once)",
        )),
    }
}
