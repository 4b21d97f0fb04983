//! The settings in force for a handler, each with its origin.

use serde_json::{Map, Value, json};

use crate::cli::list::List;
use crate::config::File;
use crate::sandbox::{Handler, Instances, Settings};
use crate::setting::{Overlays, Settable};
use crate::worker::Policy;

/// One setting.
pub(super) struct Setting {
    /// The object in the JSON: `limits`, `state`, or `None` for the handler's own.
    group: Option<&'static str>,
    /// The key in `rouse.toml`.
    key: &'static str,
    /// The key in the JSON, with its unit.
    json_key: String,
    value: Value,
    /// The value as `rouse.toml` writes it.
    text: String,
    /// The table that sets it, or one of the words below.
    from: String,
}

/// The origin of a value that neither a table nor the manifest sets.
const DEFAULT: &str = "default";
/// The origin of a value that the manifest sets.
const MODULE: &str = "module";

/// All settings in the order of the documentation, except those that are grants (`fine_clocks`, `schedule`).
pub(super) fn settings(
    handler: &Handler,
    policy: &Policy,
    settings: &Settings,
    file: &File,
) -> Vec<Setting> {
    let name = &handler.manifest.name;
    let mut all = numbers(None, policy, &file.policy_of(name), MODULE);
    for setting in &mut all {
        // A manifest cannot have this key: the value is that of the whole file.
        if setting.key == "job_delay" && setting.from == MODULE {
            setting.from = File::USUAL.into();
        }
        if setting.key == "concurrency" && policy.concurrency.is_none() {
            setting.value = Value::Null;
            setting.text = "as many as there are slots".into();
        }
    }
    all.push(instances(handler, settings, file));
    all.extend(numbers(
        Some("limits"),
        &handler.limits,
        &file.limits_of(name),
        DEFAULT,
    ));
    if let Some(quota) = &handler.state {
        all.extend(numbers(Some("state"), quota, &file.state_of(name), DEFAULT));
    }
    all
}

/// The numbers of a struct. `other` is the origin of a value that no table sets and that is not the default.
fn numbers<T: Settable>(
    group: Option<&'static str>,
    of: &T,
    tables: &Overlays<'_, T>,
    other: &str,
) -> Vec<Setting> {
    let settings = T::SETTINGS.iter().map(|setting| {
        let number = setting.get(of);
        let unset = || match number == setting.default() {
            true => DEFAULT.into(),
            false => other.into(),
        };
        Setting {
            group,
            key: setting.key,
            json_key: setting.json_key(),
            value: number.json(),
            text: number.written(),
            from: setting.origin(tables).unwrap_or_else(unset),
        }
    });
    settings.collect()
}

fn instances(handler: &Handler, settings: &Settings, file: &File) -> Setting {
    let name = &handler.manifest.name;
    let word = if handler.reuses { "reuse" } else { "fresh" };
    let wanted = settings.instances_of(name) == Instances::Reuse;
    let from = match file.origin(name, "instances") {
        None => DEFAULT.into(),
        Some(table) if wanted && !handler.reuses => {
            format!("module, which does not declare the reuse that {table} allows")
        }
        Some(table) => table,
    };
    Setting {
        group: None,
        key: "instances",
        json_key: "instances".into(),
        value: json!(word),
        text: format!("\"{word}\""),
        from,
    }
}

/// Adds the settings to the JSON of a handler, and their origins under `from`.
pub(super) fn add_to(manifest: &mut Map<String, Value>, settings: &[Setting]) {
    let mut from = Map::new();
    manifest.insert("limits".into(), json!({}));
    manifest.insert("state".into(), Value::Null);
    for setting in settings {
        let (name, value) = (setting.json_key.clone(), setting.value.clone());
        match setting.group {
            None => manifest.insert(name, value),
            Some(group) => {
                let inner = manifest.entry(group).or_insert(Value::Null);
                if inner.is_null() {
                    *inner = json!({});
                }
                inner
                    .as_object_mut()
                    .and_then(|inner| inner.insert(name, value))
            }
        };
        from.insert(setting.path(), json!(setting.from));
    }
    manifest.insert("from".into(), from.into());
}

impl Setting {
    /// For instance `limits.memory_mb`.
    fn path(&self) -> String {
        match self.group {
            None => self.key.to_owned(),
            Some(group) => format!("{group}.{}", self.key),
        }
    }

    /// True if the manifest has this key for the setting.
    pub(super) fn is_named(&self, key: &str) -> bool {
        self.group.unwrap_or(&self.json_key) == key
    }
}

/// A line for each setting: first those that are set, then, if `with_defaults`, those that are not.
pub(super) fn table(settings: &[Setting], with_defaults: bool) -> String {
    let mut table = List::new(["setting", "value", "from"]);
    let (usual, set): (Vec<&Setting>, Vec<&Setting>) =
        settings.iter().partition(|setting| setting.from == DEFAULT);
    let (shown, hidden) = match with_defaults {
        true => (usual, 0),
        false => (Vec::new(), usual.len()),
    };
    for setting in set.into_iter().chain(shown) {
        table.row([setting.path(), setting.text.clone(), setting.from.clone()]);
    }
    let text = table.text();
    match hidden {
        0 => text,
        1 => format!("{text}\n1 more has its default (--defaults prints it)"),
        hidden => {
            format!("{text}\n{hidden} more have their defaults (--defaults prints them)")
        }
    }
}
