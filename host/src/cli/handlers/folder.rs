//! `rouse handlers`: what a folder of modules has to offer.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args as ClapArgs;
use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::held::Held;
use super::in_force::{self, Setting};
use super::origin::Tables;
use super::trouble::Trouble;
use crate::cli::compile_module::with_compiler;
use crate::cli::host::HANDLERS_DIR;
use crate::cli::misspelt::Named;
use crate::cli::text::{as_json, plain};
use crate::config::File;
use crate::sandbox::{self, Capability, Catalog, Handler, HandlerSet, Missing, Sandbox, Withheld};
use crate::worker::{Overrides, Policy};

/// Options of `rouse handlers` without a command.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// The folder
    #[arg(long, value_name = "DIR", default_value = HANDLERS_DIR)]
    pub(super) handlers: PathBuf,

    /// Settings; default: ./rouse.toml, if there is one
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,

    /// Print everything, schemas too, as one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

/// What a folder has, under the settings.
pub(super) struct Folder {
    pub(super) handlers: Arc<HandlerSet>,
    /// What stands in `rouse.toml`; nothing where there is none.
    pub(super) config: String,
    /// Which file that is; none: there is none.
    pub(super) config_file: Option<PathBuf>,
    overrides: Overrides,
    settings: sandbox::Settings,
    pub(super) tables: Tables,
    named: Named,
    file: File,
    /// Where relative paths of the file start.
    beside: PathBuf,
}

impl Folder {
    /// `option` is the one that names another folder.
    pub(super) async fn open(
        dir: &Path,
        option: &str,
        config: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let (file, folder) = File::read(config)?;
        let path = config.unwrap_or(Path::new(File::USUAL));
        let text = std::fs::read_to_string(path);
        let config_file = text.is_ok().then(|| path.to_path_buf());
        // One that has to be there was read just now.
        let text = text.unwrap_or_default();
        anyhow::ensure!(
            dir.is_dir(),
            "there is no folder {}; name another with {option} DIR",
            dir.display()
        );
        let settings = file.sandbox(&folder, 1);
        let sandbox = Sandbox::start(with_compiler(settings.clone()))?;
        Ok(Self {
            handlers: Catalog::open(sandbox, dir).await?.current(),
            tables: Tables::read(&text),
            config: text,
            config_file,
            overrides: file.overrides(),
            settings,
            named: Named::of(&file),
            file,
            beside: folder,
        })
    }

    /// What holds for a handler.
    pub(super) fn in_force(&self, handler: &Handler) -> Vec<Setting> {
        let policy = Policy::resolve(&handler.manifest, &self.overrides);
        in_force::settings(handler, &policy, &self.settings, &self.tables)
    }

    /// What it is granted.
    pub(super) fn held(&self, handler: &Handler) -> Held<'_> {
        Held::of(handler, &self.settings, &self.tables)
    }

    /// A sentence for each table that grants something to whatever module has such a name, and therefore to none.
    fn unbound(&self) -> BTreeSet<String> {
        let handlers = self.handlers.handlers.values();
        let withheld = handlers.flat_map(|handler| {
            let file = &handler.module.file;
            handler.withheld.iter().map(move |one| {
                let (table, what, lines) = (&one.table, one.what, one.lines.lines());
                let key = lines.last().unwrap_or_default();
                format!(
                    "[handlers.\"{table}\"] has {what} for whatever module has such a name, and grants them to none until it names one: put under it {key} for {file}"
                )
            })
        });
        withheld.collect()
    }

    /// What a module says of a handler, with the operator's settings over it.
    pub(super) fn manifest(&self, handler: &Handler) -> Value {
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
            "asked": words(&manifest.capabilities),
            "granted": words(&handler.held()),
            "grants": self.held(handler).json(),
            "missing": handler.missing().iter().map(missing).collect::<Vec<_>>(),
            "input_schema": manifest.input_schema.written(),
            "output_schema": manifest.output_schema.written(),
        });
        let mut all = known.as_object().cloned().unwrap_or_default();
        in_force::add_to(&mut all, &self.in_force(handler));
        all.into()
    }
}

/// Each of them once: two grants of one server are one word.
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

fn withheld(withheld: &Withheld) -> Value {
    json!({"what": withheld.what, "from": format!("[handlers.\"{}\"]", withheld.table), "lines": withheld.lines})
}

/// Lists; exit 1 when a file is refused, or a host would not start.
pub(super) async fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let folder = Folder::open(&args.handlers, "--handlers", args.config.as_deref()).await?;
    let handlers = &folder.handlers;
    for sentence in folder.named.astray(handlers) {
        eprintln!("rouse: {}", plain(&sentence));
    }
    let mut trouble = Trouble::of(&folder.file, &folder.beside, &args.handlers);
    trouble.warnings.extend(folder.unbound());
    let code = match handlers.refused.is_empty() && trouble.errors.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    };

    if args.json {
        let listed: Vec<_> = handlers
            .handlers
            .values()
            .map(|handler| folder.manifest(handler))
            .collect();
        let refused: Vec<_> = handlers
            .refused
            .iter()
            .map(
                |refusal| json!({"file": refusal.file, "why": refusal.why, "lines": refusal.lines}),
            )
            .collect();
        let Trouble { errors, warnings } = trouble;
        println!(
            "{}",
            as_json(
                json!({"handlers": listed, "refused": refused, "errors": errors, "warnings": warnings})
            )
        );
        return Ok(code);
    }

    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([
        "handler",
        "version",
        "file",
        "timeout",
        "attempts",
        "asks for",
        "what it does",
    ]);
    for handler in handlers.handlers.values() {
        let manifest = &handler.manifest;
        let policy = Policy::resolve(manifest, &folder.overrides);
        table.add_row([
            plain(&manifest.name),
            plain(&manifest.version),
            handler.module.file.clone(),
            humantime::format_duration(policy.timeout).to_string(),
            policy.retry.max_attempts.to_string(),
            plain(&words(&manifest.capabilities).join(", ")),
            plain(manifest.description.lines().next().unwrap_or_default()),
        ]);
    }
    println!("{}", table.trim_fmt());
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
