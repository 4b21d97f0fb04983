//! Parses and checks the options of `#[handler(…)]`.

mod capability;
mod gate;
mod schedule;

use std::ops::RangeInclusive;

use proc_macro2::{Ident, Span, TokenStream};
use syn::parse::{Parse, ParseStream, Parser};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Expr, ExprLit, Lit, LitStr, Token};

use self::capability::capabilities;
pub(crate) use self::gate::{During, Edge, Gate, Limit, OnConflict};
use self::schedule::{cron, time_zone};
use crate::duration::milliseconds;
use crate::limits::{
    ATTEMPTS_MAX, CONCURRENCY_MAX, GATES_MAX, GRACE_MS_MAX, LEASE_MS_MAX, LEASE_MS_MIN,
    MULTIPLIER_MAX, NAME_CHARS_MAX, RETRY_INITIAL_MS, STATEMENT_BYTES_MAX,
    STATEMENT_NAME_CHARS_MAX, STATEMENTS_MAX, WAIT_MS_MAX,
};

const KNOWN: &str = "name, version, description, max_attempts, retry_initial, retry_max, \
                     retry_multiplier, retry_jitter, lease, timeout, grace, concurrency, \
                     instances, schedule, schedule_time_zone, max_concurrent(…), throttle(…), \
                     batch(…), singleton(…), debounce(…), sql(…), capabilities";

/// The options that the author declared.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) name: String,
    pub(crate) version: Option<String>,
    pub(crate) description: Option<String>,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) retry_initial_ms: Option<u64>,
    pub(crate) retry_max_ms: Option<u64>,
    pub(crate) retry_multiplier: Option<f64>,
    pub(crate) retry_jitter: Option<f64>,
    pub(crate) lease_ms: Option<u64>,
    pub(crate) timeout_ms: Option<u64>,
    pub(crate) grace_ms: Option<u64>,
    pub(crate) concurrency: Option<u32>,
    pub(crate) reuse: bool,
    pub(crate) schedule: Option<String>,
    pub(crate) schedule_time_zone: Option<String>,
    pub(crate) gates: Vec<Gate>,
    pub(crate) statements: Vec<Statement>,
    pub(crate) capabilities: Vec<String>,
}

/// A SQL statement: `sql(name = "…", rows = 1, on_error = "retry")`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Statement {
    pub(crate) name: String,
    pub(crate) sql: String,
    pub(crate) rows: Option<u64>,
    pub(crate) retries: bool,
}

/// `name = value`, `sql(…)`, or a gate such as `throttle(…)`.
struct Setting {
    name: Ident,
    value: Value,
}

enum Value {
    Expr(Expr),
    /// The settings in the parentheses.
    Group(Punctuated<Setting, Token![,]>),
}

impl Parse for Setting {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let name: Ident = input.parse().map_err(|error| {
            let why = "expected an option, for instance `name = \"email.send\"`";
            syn::Error::new(error.span(), why)
        })?;
        if (name == "sql" || gate::kind(&name).is_some()) && input.peek(syn::token::Paren) {
            let inner;
            syn::parenthesized!(inner in input);
            let value = Value::Group(Punctuated::parse_terminated(&inner)?);
            return Ok(Self { name, value });
        }
        input
            .parse::<Token![=]>()
            .map_err(|_| syn::Error::new(name.span(), format!("expected `{name} = …`")))?;
        let value = Value::Expr(input.parse()?);
        Ok(Self { name, value })
    }
}

impl Options {
    /// Reads the options. All errors are reported together.
    pub(crate) fn read(tokens: TokenStream) -> syn::Result<Self> {
        let settings = Punctuated::<Setting, Token![,]>::parse_terminated.parse2(tokens)?;
        let mut reader = Reader::default();
        let mut options = Self {
            name: String::new(),
            version: None,
            description: None,
            max_attempts: None,
            retry_initial_ms: None,
            retry_max_ms: None,
            retry_multiplier: None,
            retry_jitter: None,
            lease_ms: None,
            timeout_ms: None,
            grace_ms: None,
            concurrency: None,
            reuse: false,
            schedule: None,
            schedule_time_zone: None,
            gates: Vec::new(),
            statements: Vec::new(),
            capabilities: Vec::new(),
        };
        for Setting { name, value } in &settings {
            let o = &mut options;
            let value = match value {
                Value::Expr(value) => value,
                Value::Group(settings) if name == "sql" => {
                    o.statements.extend(reader.statement(name.span(), settings));
                    continue;
                }
                Value::Group(settings) => {
                    o.gates.extend(reader.gate(name, settings));
                    continue;
                }
            };
            if !reader.first_time(name) {
                continue;
            }
            match name.to_string().as_str() {
                "name" => o.name = reader.keep(handler_name(value)).unwrap_or_default(),
                "version" => o.version = reader.keep(nonempty(value)),
                "description" => o.description = reader.keep(nonempty(value)),
                "max_attempts" => o.max_attempts = reader.keep(bounded(value, ATTEMPTS_MAX)),
                "retry_initial" => {
                    o.retry_initial_ms = reader.keep(duration(value, 1..=WAIT_MS_MAX));
                }
                "retry_max" => o.retry_max_ms = reader.keep(duration(value, 1..=WAIT_MS_MAX)),
                "retry_multiplier" => {
                    o.retry_multiplier = reader.keep(number(value, 1.0, MULTIPLIER_MAX))
                }
                "retry_jitter" => o.retry_jitter = reader.keep(number(value, 0.0, 1.0)),
                "lease" => o.lease_ms = reader.keep(duration(value, LEASE_MS_MIN..=LEASE_MS_MAX)),
                "timeout" => o.timeout_ms = reader.keep(duration(value, 1..=WAIT_MS_MAX)),
                "grace" => o.grace_ms = reader.keep(duration(value, 1..=GRACE_MS_MAX)),
                "concurrency" => {
                    o.concurrency = reader.keep(bounded(value, CONCURRENCY_MAX));
                }
                "instances" => o.reuse = reader.keep(reuse(value)).unwrap_or_default(),
                "sql" => reader.fail(
                    name.span(),
                    "expected `sql(name = \"SELECT …\")`, once for each statement",
                ),
                "schedule" => o.schedule = reader.keep(cron(value)),
                "schedule_time_zone" => o.schedule_time_zone = reader.keep(time_zone(value)),
                "capabilities" => {
                    o.capabilities = reader.keep(capabilities(value)).unwrap_or_default();
                }
                other => reader.fail(
                    name.span(),
                    match gate::kind(name) {
                        Some((_, example)) => format!(
                            "expected `{other}(…)`, once for each gate, for instance `{example}`"
                        ),
                        None => format!("unknown option `{other}`; the options are {KNOWN}"),
                    },
                ),
            }
        }
        if !settings.iter().any(|setting| setting.name == "name") {
            reader.fail(
                Span::call_site(),
                "a handler needs a name: #[handler(name = \"email.send\")]",
            );
        }
        let is_set = settings
            .iter()
            .any(|setting| setting.name == "retry_initial");
        let initial = match is_set {
            true => options.retry_initial_ms,
            false => Some(RETRY_INITIAL_MS),
        };
        if let (Some(initial), Some(max)) = (initial, options.retry_max_ms)
            && initial > max
            && let Some(setting) = settings.iter().find(|setting| setting.name == "retry_max")
        {
            let default = match is_set {
                true => String::new(),
                false => format!(", which is {}s by default", RETRY_INITIAL_MS / 1000),
            };
            let why = format!("retry_max is shorter than retry_initial{default}");
            reader.fail(setting.span(), why);
        }
        if let Some(setting) = settings
            .iter()
            .find(|setting| setting.name == "schedule_time_zone")
            && !settings.iter().any(|setting| setting.name == "schedule")
        {
            reader.fail(
                setting.name.span(),
                "a time zone needs a schedule: schedule = \"0 3 * * *\"",
            );
        }
        let mut gates = settings.iter().filter(|setting| setting.is_gate());
        if let Some(setting) = gates.nth(GATES_MAX) {
            reader.fail(
                setting.name.span(),
                format!(
                    "a handler has at most {GATES_MAX} gates; one gate limits each key separately"
                ),
            );
        }
        let mut batches = settings
            .iter()
            .filter(|setting| setting.is_gate() && setting.name == "batch");
        if let Some(setting) = batches.nth(1) {
            reader.fail(setting.name.span(), "`batch` is set twice");
        }
        let mut statements = settings
            .iter()
            .filter(|setting| matches!(setting.value, Value::Group(_)) && setting.name == "sql");
        if let Some(setting) = statements.nth(STATEMENTS_MAX) {
            let why = format!("a handler has at most {STATEMENTS_MAX} statements");
            reader.fail(setting.name.span(), why);
        }
        for (index, statement) in options.statements.iter().enumerate() {
            let earlier = &options.statements[..index];
            if earlier.iter().any(|other| other.name == statement.name) {
                reader.fail(
                    Span::call_site(),
                    format!("the statement `{}` is declared twice", statement.name),
                );
            }
        }
        reader.finish(options)
    }
}

impl Options {
    /// True if an attempt can process several jobs.
    pub(crate) fn takes_batches(&self) -> bool {
        let mut limits = self.gates.iter().map(|gate| &gate.limit);
        limits.any(|limit| matches!(limit, Limit::Batch { .. }))
    }
}

impl Setting {
    /// The location of its value.
    fn span(&self) -> Span {
        match &self.value {
            Value::Expr(value) => value.span(),
            Value::Group(_) => self.name.span(),
        }
    }

    fn is_gate(&self) -> bool {
        matches!(self.value, Value::Group(_)) && self.name != "sql"
    }
}

/// Collects the errors, so that one compilation shows them all.
#[derive(Default)]
struct Reader {
    seen: Vec<String>,
    /// The number of errors.
    count: usize,
    errors: Option<syn::Error>,
}

impl Reader {
    fn first_time(&mut self, name: &Ident) -> bool {
        let text = name.to_string();
        if self.seen.contains(&text) {
            self.fail(name.span(), format!("`{text}` is set twice"));
            return false;
        }
        self.seen.push(text);
        true
    }

    /// Reads a statement. Its text is the value of the setting whose name is not an option.
    fn statement(
        &mut self,
        span: Span,
        settings: &Punctuated<Setting, Token![,]>,
    ) -> Option<Statement> {
        let mut statement: Option<Statement> = None;
        let (mut rows, mut retries) = (None, false);
        for (index, Setting { name, value }) in settings.iter().enumerate() {
            let Value::Expr(value) = value else {
                self.fail(name.span(), "a statement cannot contain another one");
                continue;
            };
            let mut earlier = settings.iter().take(index);
            if (name == "rows" || name == "on_error") && earlier.any(|other| other.name == *name) {
                self.fail(name.span(), format!("`{name}` is set twice"));
                continue;
            }
            match name.to_string().as_str() {
                "rows" => rows = self.keep(row_count(value)),
                "on_error" => retries = self.keep(on_error(value)).unwrap_or_default(),
                _ if statement.is_some() => self.fail(
                    name.span(),
                    "`sql(…)` has one statement, and the options rows and on_error; write another `sql(…)` for the next one",
                ),
                text => {
                    statement = Some(Statement {
                        name: text.to_owned(),
                        sql: self.keep(statement_text(value)).unwrap_or_default(),
                        rows: None,
                        retries: false,
                    });
                    if !is_statement_name(text) {
                        let why = format!(
                            "the name of a statement must have 1 to {STATEMENT_NAME_CHARS_MAX} characters of a-z, \
                             0-9 and _, and must not start with a digit"
                        );
                        self.fail(name.span(), why);
                    }
                }
            }
        }
        if statement.is_none() {
            self.fail(
                span,
                "expected a statement: `sql(mark_paid = \"UPDATE … WHERE id = $1\", rows = 1)`",
            );
        }
        statement.map(|statement| Statement {
            rows,
            retries,
            ..statement
        })
    }

    fn keep<T>(&mut self, value: syn::Result<T>) -> Option<T> {
        match value {
            Ok(value) => Some(value),
            Err(error) => {
                self.add(error);
                None
            }
        }
    }

    fn fail(&mut self, span: Span, why: impl std::fmt::Display) {
        self.add(syn::Error::new(span, why));
    }

    fn add(&mut self, error: syn::Error) {
        self.count += 1;
        match &mut self.errors {
            Some(errors) => errors.combine(error),
            None => self.errors = Some(error),
        }
    }

    fn finish<T>(self, value: T) -> syn::Result<T> {
        self.errors.map_or(Ok(value), Err)
    }
}

fn text(value: &Expr) -> syn::Result<&LitStr> {
    match value {
        Expr::Lit(ExprLit {
            lit: Lit::Str(text),
            ..
        }) => Ok(text),
        _ => Err(syn::Error::new(value.span(), "expected text in quotes")),
    }
}

fn nonempty(value: &Expr) -> syn::Result<String> {
    let text = text(value)?;
    if text.value().trim().is_empty() {
        return Err(syn::Error::new(text.span(), "expected text; this is empty"));
    }
    Ok(text.value())
}

fn handler_name(value: &Expr) -> syn::Result<String> {
    let literal = text(value)?;
    let name = literal.value();
    let good = name.len() <= NAME_CHARS_MAX && name.split('.').all(is_word);
    if good {
        return Ok(name);
    }
    Err(syn::Error::new(
        literal.span(),
        format!(
            "`{name}` is not a handler name: write words of a-z, 0-9, _ and - that start with a letter or digit, \
             joined by dots, at most {NAME_CHARS_MAX} characters in total, for instance `email.send`"
        ),
    ))
}

fn is_word(word: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    word.starts_with(plain) && word.chars().all(|c| plain(c) || c == '_' || c == '-')
}

fn statement_text(value: &Expr) -> syn::Result<String> {
    let sql = nonempty(value)?;
    if sql.len() > STATEMENT_BYTES_MAX || sql.contains('\0') {
        let why = format!(
            "the text of a statement is at most {STATEMENT_BYTES_MAX} bytes long, without NUL"
        );
        return Err(syn::Error::new(value.span(), why));
    }
    Ok(sql)
}

fn is_statement_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    name.len() <= STATEMENT_NAME_CHARS_MAX
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(plain)
}

/// True for `"retry"`, false for `"fail"`.
fn on_error(value: &Expr) -> syn::Result<bool> {
    let literal = text(value)?;
    match literal.value().as_str() {
        "fail" => Ok(false),
        "retry" => Ok(true),
        _ => Err(syn::Error::new(
            literal.span(),
            "expected \"fail\" (the job fails) or \"retry\" (it is retried)",
        )),
    }
}

fn row_count(value: &Expr) -> syn::Result<u64> {
    if let Expr::Lit(ExprLit {
        lit: Lit::Int(number),
        ..
    }) = value
        && let Ok(count) = number.base10_parse::<u64>()
    {
        return Ok(count);
    }
    let why = "expected a whole number, the number of rows that the statement affects";
    Err(syn::Error::new(value.span(), why))
}

/// True for `"reuse"`, false for `"fresh"`.
fn reuse(value: &Expr) -> syn::Result<bool> {
    let literal = text(value)?;
    match literal.value().as_str() {
        "fresh" => Ok(false),
        "reuse" => Ok(true),
        _ => Err(syn::Error::new(
            literal.span(),
            "expected \"fresh\" (one job for each instance) or \"reuse\" (many)",
        )),
    }
}

fn duration(value: &Expr, range_ms: RangeInclusive<u64>) -> syn::Result<u64> {
    let literal = text(value).map_err(|error| {
        let why = "expected a duration in quotes, for instance \"30s\"";
        syn::Error::new(error.span(), why)
    })?;
    milliseconds(literal, range_ms)
}

fn bounded(value: &Expr, max: u32) -> syn::Result<u32> {
    if let Expr::Lit(ExprLit {
        lit: Lit::Int(number),
        ..
    }) = value
        && let Ok(count) = number.base10_parse::<u32>()
        && (1..=max).contains(&count)
    {
        return Ok(count);
    }
    let why = format!("expected a whole number from 1 to {max}");
    Err(syn::Error::new(value.span(), why))
}

fn number(value: &Expr, min: f64, max: f64) -> syn::Result<f64> {
    let number = match value {
        Expr::Lit(ExprLit {
            lit: Lit::Float(number),
            ..
        }) => number.base10_parse::<f64>().ok(),
        Expr::Lit(ExprLit {
            lit: Lit::Int(number),
            ..
        }) => number.base10_parse::<f64>().ok(),
        _ => None,
    };
    number
        .filter(|number| (min..=max).contains(number))
        .ok_or_else(|| {
            let why = format!("expected a number from {min} to {max}");
            syn::Error::new(value.span(), why)
        })
}

#[cfg(test)]
mod tests;
