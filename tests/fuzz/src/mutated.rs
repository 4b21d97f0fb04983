//! Modules that are in order but for some bytes.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;

/// Larger ones take long to compile, and have nothing else in them.
const BYTES_MAX: u64 = 512 << 10;

/// The modules in this folder, in the order of their names.
pub(crate) fn guests(folder: &Path) -> Result<Vec<Vec<u8>>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let entry = entry?;
        if entry.metadata()?.len() <= BYTES_MAX {
            paths.push(entry.path());
        }
    }
    paths.sort();
    anyhow::ensure!(
        !paths.is_empty(),
        "{} has no small modules",
        folder.display()
    );
    paths
        .iter()
        .map(|path| fs::read(path).with_context(|| format!("read {}", path.display())))
        .collect()
}

/// One of them, with a few bytes changed, taken out, or copied to elsewhere.
pub(crate) fn made(random: &mut StdRng, guests: &[Vec<u8>]) -> Vec<u8> {
    let mut module = guests.choose(random).expect("there is one").clone();
    for _ in 0..random.random_range(1..8) {
        let at = random.random_range(0..module.len());
        let some = random.random_range(1..32).min(module.len() - at);
        match random.random_range(0..8) {
            0..4 => module[at] = random.random(),
            4 => module[at] ^= 1 << random.random_range(0..8),
            5 => drop(module.drain(at..at + some)),
            6 => {
                let from = random.random_range(0..module.len() - some + 1);
                module.copy_within(from..from + some, at);
            }
            _ => module.truncate(at.max(8)),
        }
    }
    module
}
