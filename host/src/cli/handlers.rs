//! `rouse handlers`: what a folder of modules has to offer.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use comfy_table::{Table, presets};
use serde_json::json;

use super::text::plain;
use crate::config::{Environment, File};
use crate::sandbox::{Catalog, Sandbox};
use crate::worker::Policy;

/// Options of `rouse handlers`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Exit codes: 0 every file serves · 1 one is refused, or the folder cannot be read"
)]
pub(super) struct Args {
    /// The folder
    #[arg(long, value_name = "DIR", default_value = "handlers-wasm")]
    handlers: PathBuf,

    /// Settings; default: ./rouse.toml, if there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Print everything, schemas too, as one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists; exit 1 when a file is refused.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (file, folder) = File::read(args.config.as_deref())?;
    let settings = file.worker(Environment.hostname());
    anyhow::ensure!(
        args.handlers.is_dir(),
        "there is no folder {}; name another with --handlers DIR",
        args.handlers.display()
    );
    let sandbox = Sandbox::start(file.sandbox(&folder, 1))?;
    let catalog = Catalog::open(sandbox, &args.handlers).await?;
    let handlers = catalog.current();
    let code = if handlers.refused.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    };
    let names = handlers.names();

    if args.json {
        let listed: Vec<_> = names
            .iter()
            .filter_map(|name| handlers.get(name))
            .map(|handler| {
                let manifest = &handler.manifest;
                let policy = Policy::resolve(manifest, &settings.overrides);
                json!({
                    "name": manifest.name,
                    "version": manifest.version,
                    "description": manifest.description,
                    "file": handler.module.file,
                    "sha256": handler.module.digest.to_string(),
                    "lease_ms": policy.lease.as_millis(),
                    "timeout_ms": policy.timeout.as_millis(),
                    "grace_ms": policy.grace.as_millis(),
                    "max_attempts": policy.retry.max_attempts,
                    "instances": if handler.reuses { "reuse" } else { "fresh" },
                    "capabilities": manifest.capabilities,
                    "input_schema": manifest.input_schema,
                    "output_schema": manifest.output_schema,
                })
            })
            .collect();
        let refused: Vec<_> = handlers
            .refused
            .iter()
            .map(|refusal| json!({"file": refusal.file, "why": refusal.why}))
            .collect();
        println!("{}", json!({"handlers": listed, "refused": refused}));
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
    for handler in names.iter().filter_map(|name| handlers.get(name)) {
        let manifest = &handler.manifest;
        let policy = Policy::resolve(manifest, &settings.overrides);
        table.add_row([
            plain(&manifest.name),
            plain(&manifest.version),
            handler.module.file.clone(),
            humantime::format_duration(policy.timeout).to_string(),
            policy.retry.max_attempts.to_string(),
            plain(&manifest.capabilities.join(", ")),
            plain(manifest.description.lines().next().unwrap_or_default()),
        ]);
    }
    println!("{}", table.trim_fmt());
    for refusal in &handlers.refused {
        println!("refused {}: {}", refusal.file, plain(&refusal.why));
    }
    Ok(code)
}
