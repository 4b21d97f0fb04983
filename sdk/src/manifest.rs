//! The manifest: JSON that describes a module to the host.

use serde_json::{Map, Value, json};

use crate::handler::{
    Definition, During, Edge, Entry, Gate, GateLimit, Instances, OnConflict, OnError, Statement,
};

/// The manifest of a module with these handlers. Options that a handler does not declare are omitted, so that the
/// host's defaults apply.
pub fn manifest(entries: &[Entry]) -> Value {
    json!({
        "sdk": concat!("rouse-sdk ", env!("CARGO_PKG_VERSION")),
        "handlers": entries.iter().map(handler).collect::<Vec<_>>(),
    })
}

fn handler(entry: &Entry) -> Value {
    let Definition {
        name,
        version,
        description,
        max_attempts,
        retry_initial_ms,
        retry_max_ms,
        retry_multiplier,
        retry_jitter,
        lease_ms,
        timeout_ms,
        grace_ms,
        concurrency,
        instances,
        schedule,
        schedule_time_zone,
        gates,
        statements,
        capabilities,
    } = entry.definition;
    Value::Object(object([
        ("name", Some(name.into())),
        ("version", Some(version.into())),
        (
            "description",
            (!description.is_empty()).then(|| description.into()),
        ),
        ("input_schema", Some((entry.input_schema)().into())),
        ("output_schema", Some((entry.output_schema)().into())),
        ("max_attempts", max_attempts.map(Value::from)),
        ("retry_initial_ms", retry_initial_ms.map(Value::from)),
        ("retry_multiplier", retry_multiplier.map(Value::from)),
        ("retry_max_ms", retry_max_ms.map(Value::from)),
        ("retry_jitter", retry_jitter.map(Value::from)),
        ("lease_ms", lease_ms.map(Value::from)),
        ("timeout_ms", timeout_ms.map(Value::from)),
        ("grace_ms", grace_ms.map(Value::from)),
        ("concurrency", concurrency.map(Value::from)),
        (
            "instances",
            match instances {
                Instances::Fresh => None,
                Instances::Reuse => Some("reuse".into()),
            },
        ),
        (
            "schedule",
            schedule.map(|cron| {
                let zone = schedule_time_zone.map(Value::from);
                object([("cron", Some(cron.into())), ("time_zone", zone)]).into()
            }),
        ),
        (
            "gates",
            (!gates.is_empty()).then(|| gates.iter().map(gate).collect()),
        ),
        (
            "statements",
            (!statements.is_empty()).then(|| statements.iter().map(statement).collect()),
        ),
        (
            "capabilities",
            (!capabilities.is_empty()).then(|| capabilities.into()),
        ),
    ]))
}

fn gate(gate: &Gate) -> Value {
    let Gate { limit, key } = *gate;
    let mut gate = match limit {
        GateLimit::MaxConcurrent { max } => object([
            ("kind", Some("max_concurrent".into())),
            ("max", Some(max.into())),
        ]),
        GateLimit::Throttle {
            max,
            period_ms,
            burst,
        } => object([
            ("kind", Some("throttle".into())),
            ("max", Some(max.into())),
            ("period_ms", Some(period_ms.into())),
            ("burst", burst.map(Value::from)),
        ]),
        GateLimit::Batch { max, period_ms } => object([
            ("kind", Some("batch".into())),
            ("max", Some(max.into())),
            ("period_ms", period_ms.map(Value::from)),
        ]),
        GateLimit::Singleton {
            during,
            period_ms,
            on_conflict,
        } => {
            let during = match during {
                During::Queued => None,
                During::Running => Some("running".into()),
                During::Period => Some("period".into()),
            };
            let on_conflict = match on_conflict {
                OnConflict::Keep => None,
                OnConflict::Replace => Some("replace".into()),
                OnConflict::Refuse => Some("refuse".into()),
            };
            object([
                ("kind", Some("singleton".into())),
                ("during", during),
                ("period_ms", period_ms.map(Value::from)),
                ("on_conflict", on_conflict),
            ])
        }
        GateLimit::Debounce {
            period_ms,
            max_wait_ms,
            edge,
        } => {
            let edge = match edge {
                Edge::Trailing => None,
                Edge::Leading => Some("leading".into()),
            };
            object([
                ("kind", Some("debounce".into())),
                ("period_ms", Some(period_ms.into())),
                ("max_wait_ms", max_wait_ms.map(Value::from)),
                ("edge", edge),
            ])
        }
    };
    if !key.is_empty() {
        gate.insert("key".into(), key.into());
    }
    Value::Object(gate)
}

fn statement(statement: &Statement) -> Value {
    Value::Object(object([
        ("name", Some(statement.name.into())),
        ("sql", Some(statement.sql.into())),
        ("rows", statement.rows.map(Value::from)),
        (
            "on_error",
            match statement.on_error {
                OnError::Fail => None,
                OnError::Retry => Some("retry".into()),
            },
        ),
    ]))
}

fn object<const N: usize>(fields: [(&str, Option<Value>); N]) -> Map<String, Value> {
    fields
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?)))
        .collect()
}
