//! `rouse handlers`: the handlers of a folder of modules.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args as ClapArgs;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::gates;
use super::held::Held;
use super::in_force::{self, Setting};
use super::trouble::Trouble;
use crate::cli::PipesFail;
use crate::cli::compile_module::with_compiler;
use crate::cli::dev_file::Serves;
use crate::cli::host::HANDLERS_DIR;
use crate::cli::list::List;
use crate::cli::misspelt::Named;
use crate::cli::text::{as_json, plain};
use crate::config::File;
use crate::sandbox::{self, Capability, Catalog, Handler, HandlerSet, Missing, Sandbox, Withheld};
use crate::worker::{Overrides, Policy};

/// Options of `rouse handlers` without a command.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// The folder; default: that of a `rouse dev` that runs here, else handlers-wasm
    #[arg(long, value_name = "DIR")]
    pub(super) handlers: Option<PathBuf>,

    /// Settings; default: those of a `rouse dev` that serves the folder from here, else ./rouse.toml, if there is one
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,

    /// Print everything, schemas too, as one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

/// Fields as JSON text: a `Value` cannot hold every number of a schema.
pub(super) type Manifest = BTreeMap<String, Box<RawValue>>;

/// What `--json` prints.
#[derive(Serialize)]
struct Listed {
    handlers: Vec<Manifest>,
    refused: Vec<Value>,
    errors: Vec<String>,
    warnings: Vec<String>,
}

/// The folder and the settings that a command shows.
pub(in crate::cli) struct FolderLocation {
    pub(super) folder: PathBuf,
    config: Option<PathBuf>,
    /// True if the settings are those of a `rouse dev` that runs here.
    of_dev: bool,
}

impl FolderLocation {
    /// The named folder and settings. If one of them is not named, it is that of the `rouse dev` that runs here, or
    /// else the usual one. `dev` is called only if needed.
    pub(in crate::cli) fn resolve(
        folder: Option<&Path>,
        config: Option<&Path>,
        dev: impl FnOnce() -> Option<Serves>,
    ) -> Self {
        let dev = match (folder, config) {
            (Some(_), Some(_)) => None,
            _ => dev(),
        };
        let usual = || PathBuf::from(HANDLERS_DIR);
        let folder = match (folder, &dev) {
            (Some(folder), _) => folder.to_path_buf(),
            (None, Some(dev)) => dev.handlers.clone(),
            (None, None) => usual(),
        };
        let serves_folder = |dev: &Serves| {
            folder
                .canonicalize()
                .is_ok_and(|folder| folder == dev.handlers)
        };
        let of_dev = config.is_none() && dev.as_ref().is_some_and(serves_folder);
        Self {
            config: match of_dev {
                true => dev.and_then(|dev| dev.config),
                false => config.map(Path::to_path_buf),
            },
            folder,
            of_dev,
        }
    }
}

/// A loaded folder, with the settings.
pub(in crate::cli) struct Folder {
    pub(in crate::cli) handlers: Arc<HandlerSet>,
    /// True if the settings are those of a `rouse dev` that runs here.
    pub(super) of_dev: bool,
    overrides: Overrides,
    settings: sandbox::Settings,
    named: Named,
    pub(super) file: File,
    /// The folder at which relative paths in the settings start.
    start: PathBuf,
}

impl Folder {
    /// Loads the folder.
    pub(in crate::cli) async fn open(location: &FolderLocation) -> anyhow::Result<Self> {
        let (dir, config) = (location.folder.as_path(), location.config.as_deref());
        let (file, folder) = File::read(config)?;
        anyhow::ensure!(
            dir.is_dir(),
            "there is no folder {}; name another with --handlers DIR",
            dir.display()
        );
        let settings = file.sandbox(&folder, 1);
        let _pipes = PipesFail::start();
        let sandbox = Sandbox::start(with_compiler(settings.clone()))?;
        Ok(Self {
            handlers: Catalog::open(sandbox, dir).await?.current(),
            of_dev: location.of_dev,
            overrides: file.overrides(),
            settings,
            named: Named::from_file(&file),
            file,
            start: folder,
        })
    }

    /// The settings in force for a handler.
    pub(super) fn in_force(&self, handler: &Handler) -> Vec<Setting> {
        let mut policy = Policy::resolve(&handler.manifest, &self.overrides);
        policy.job_delay.get_or_insert(self.file.job_delay());
        in_force::settings(handler, &policy, &self.settings, &self.file)
    }

    /// The grants of a handler.
    pub(super) fn held(&self, handler: &Handler) -> Held<'_> {
        Held::for_handler(handler, &self.settings, &self.file)
    }

    /// A sentence for each grant that is withheld because its table is not bound to a module.
    fn unbound(&self) -> BTreeSet<String> {
        let handlers = self.handlers.handlers.values();
        let withheld = handlers.flat_map(|handler| {
            let file = &handler.module.file;
            handler.withheld.iter().map(move |withheld| {
                let (table, what, lines) =
                    (&withheld.table, withheld.what, withheld.lines.lines());
                let key = lines.last().unwrap_or_default();
                format!(
                    "[handlers.\"{table}\"] grants {what} without naming a module, so no module gets them: add {key} to the table for {file}"
                )
            })
        });
        withheld.collect()
    }

    /// The manifest of a handler, with the settings that the operator has overridden.
    pub(super) fn manifest(&self, handler: &Handler) -> Manifest {
        let manifest = &handler.manifest;
        let known = json!({
            "name": manifest.name,
            "version": manifest.version,
            "description": manifest.description,
            "file": handler.module.file,
            "sha256": handler.module.digest.to_string(),
            "owner": handler.owner,
            "bound_by": handler.bound_by.as_ref().map(|table| format!("[handlers.\"{table}\"]")),
            "withheld": handler.withheld.iter().map(withheld).collect::<Vec<_>>(),
            "requested": words(&manifest.capabilities),
            "granted": words(&handler.held()),
            "grants": self.held(handler).json(),
            "missing": handler.missing().iter().map(missing).collect::<Vec<_>>(),
            "statements": statements(handler),
            "gates": gates::json(&manifest.name, &manifest.gates),
        });
        let mut all = known.as_object().cloned().unwrap_or_default();
        in_force::add_to(&mut all, &self.in_force(handler));
        let fields = all.into_iter().map(|(key, value)| (key, raw(&value)));
        let mut fields: Manifest = fields.collect();
        for (key, schema) in [
            ("input_schema", &manifest.input_schema),
            ("output_schema", &manifest.output_schema),
        ] {
            let text = RawValue::from_string(schema.written().to_owned());
            fields.insert(key.into(), text.expect("a schema is JSON"));
        }
        fields
    }
}

fn raw(value: &Value) -> Box<RawValue> {
    to_raw_value(value).expect("a Value is JSON")
}

/// The SQL statements that the handler declares.
fn statements(handler: &Handler) -> Vec<Value> {
    let granted = |name: &str| handler.sql().and_then(|sql| sql.statement(name)).is_some();
    let statements = handler.manifest.statements.iter();
    let statements = statements.map(|it| {
        json!({
            "name": it.name,
            "sql": it.sql,
            "rows": it.rows,
            "on_error": it.on_error,
            "granted": granted(&it.name),
        })
    });
    statements.collect()
}

/// The capabilities as words, without duplicates.
fn words(capabilities: &[Capability]) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for word in capabilities.iter().map(Capability::to_string) {
        if !words.contains(&word) {
            words.push(word);
        }
    }
    words
}

fn missing(missing: &Missing) -> Value {
    json!({"what": missing.what.to_string(), "lines": missing.lines})
}

/// A sentence for each module whose manifest has keys that this host ignores.
fn ignored(handlers: &HandlerSet) -> BTreeSet<String> {
    let modules = handlers.handlers.values().map(|handler| &handler.module);
    let ignored =
        modules.filter_map(|module| Some(format!("{}: {}", module.file, module.ignores()?)));
    // A module occurs once for each of its handlers.
    ignored.collect()
}

fn withheld(withheld: &Withheld) -> Value {
    json!({"what": withheld.what, "from": format!("[handlers.\"{}\"]", withheld.table), "lines": withheld.lines})
}

/// Lists the handlers. Exits with 1 if a file is refused or a host would not start.
pub(super) async fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let location = FolderLocation::resolve(
        args.handlers.as_deref(),
        args.config.as_deref(),
        Serves::here,
    );
    let folder = Folder::open(&location).await?;
    if folder.of_dev {
        eprintln!(
            "rouse: handlers of {}, with the settings of the `rouse dev` here",
            location.folder.display()
        );
    }
    let handlers = &folder.handlers;
    for sentence in folder.named.unmatched(handlers) {
        eprintln!("rouse: {}", plain(&sentence));
    }
    let mut trouble = Trouble::find(&folder.file, &folder.start, &location.folder);
    trouble.warnings.extend(ignored(handlers));
    trouble.warnings.extend(folder.unbound());
    let code = match handlers.refused.is_empty() && trouble.errors.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    };

    if args.json {
        let refused = handlers.refused.iter();
        let listed = Listed {
            handlers: handlers
                .handlers
                .values()
                .map(|handler| folder.manifest(handler))
                .collect(),
            refused: refused
                .map(|refusal| json!({"file": refusal.file, "why": refusal.why, "lines": refusal.lines}))
                .collect(),
            errors: trouble.errors,
            warnings: trouble.warnings,
        };
        println!("{}", as_json(serde_json::to_string(&listed)?));
        return Ok(code);
    }

    let mut table = List::new([
        "handler",
        "version",
        "file",
        "timeout",
        "attempts",
        "requests",
        "what it does",
    ]);
    table.expendable(&["version", "attempts", "timeout", "requests", "file"]);
    for handler in handlers.handlers.values() {
        let manifest = &handler.manifest;
        let policy = Policy::resolve(manifest, &folder.overrides);
        table.row([
            plain(&manifest.name),
            plain(&manifest.version),
            handler.module.file.clone(),
            humantime::format_duration(policy.timeout).to_string(),
            policy.retry.max_attempts.to_string(),
            plain(&words(&manifest.capabilities).join(", ")),
            plain(manifest.description.lines().next().unwrap_or_default()),
        ]);
    }
    table.print(&format!("no handlers in {}", location.folder.display()));
    for refusal in &handlers.refused {
        println!("refused {}: {}", refusal.file, plain(&refusal.why));
        for line in refusal.lines.iter().flat_map(|lines| lines.lines()) {
            println!("    {}", plain(line));
        }
    }
    for error in &trouble.errors {
        println!("a host would not start: {}", plain(error));
    }
    for warning in &trouble.warnings {
        println!("warning: {}", plain(warning));
    }
    Ok(code)
}
