//! Valid modules with some changed bytes.

use std::convert::Infallible;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use wasm_encoder::reencode::{self, Reencode, ReencodeComponent};
use wasm_encoder::{Component, Module};
use wasmparser::{CustomSectionReader, Parser};

/// The maximum size of a module, without debug information. Larger ones take a long time to compile and do not contain
/// other kinds of code.
const BYTES_MAX: usize = 512 << 10;

/// The small modules in this folder, sorted by name, without the custom sections (such as debug information) of their
/// core modules.
pub(crate) fn guests(folder: &Path) -> Result<Vec<Vec<u8>>> {
    let list = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    let paths = list.map(|entry| Ok(entry?.path()));
    let mut paths = paths.collect::<Result<Vec<_>>>()?;
    paths.sort();
    let mut guests = Vec::new();
    for path in paths {
        let whole = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        let mut component = Component::new();
        Stripped
            .parse_component(&mut component, Parser::new(0), &whole)
            .with_context(|| format!("parse {}", path.display()))?;
        let stripped = component.finish();
        if stripped.len() <= BYTES_MAX {
            guests.push(stripped);
        }
    }
    anyhow::ensure!(
        !guests.is_empty(),
        "no small module in {}",
        folder.display()
    );
    Ok(guests)
}

/// Copies all but custom sections.
struct Stripped;

impl Reencode for Stripped {
    type Error = Infallible;

    fn parse_custom_section(
        &mut self,
        _: &mut Module,
        _: CustomSectionReader<'_>,
    ) -> Result<(), reencode::Error> {
        Ok(())
    }
}

impl ReencodeComponent for Stripped {}

/// One of the modules, with a few bytes changed, removed, or copied elsewhere.
pub(crate) fn generate(random: &mut StdRng, guests: &[Vec<u8>]) -> Vec<u8> {
    let mut module = guests.choose(random).expect("a module").clone();
    // A module often stays valid after one change, and hardly ever after many.
    let changes = match random.random_ratio(3, 4) {
        true => 1,
        false => random.random_range(2..8),
    };
    for _ in 0..changes {
        let at = random.random_range(0..module.len());
        let some = random.random_range(1..32).min(module.len() - at);
        match random.random_range(0..16) {
            0..6 => module[at] = random.random(),
            6..13 => module[at] ^= 1 << random.random_range(0..8),
            13 => drop(module.drain(at..at + some)),
            14 => {
                let from = random.random_range(0..module.len() - some + 1);
                module.copy_within(from..from + some, at);
            }
            _ => module.truncate(at.max(8)),
        }
    }
    module
}
