//! The recorded levels of the smoke test, each with the factor by which its figure may be worse.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use super::report::Report;
use super::targets::Better;

const HEAD: &str = "\
# The recorded figures of `cargo xtask bench smoke`, and the factor by which each may be worse. Levels are rewritten
# by `cargo xtask bench smoke --record`; everything else is edited by hand.
#
# Ratios and times depend on the machine and its load: they fail only if they are worse by a factor that noise does
# not explain. Counts and bytes depend on neither: a small excess fails. A change that raises a count on purpose records
# the new level in the same commit.
";

/// The file tests/bench/levels.toml.
#[derive(Deserialize)]
pub(super) struct Levels {
    #[serde(skip)]
    path: PathBuf,
    level: Vec<Level>,
}

/// One figure's level.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Level {
    figure: String,
    better: Better,
    level: f64,
    /// More than 1. The figure fails if it is worse than the level by more than this factor.
    worse_by: f64,
}

impl Levels {
    pub(super) fn read(root: &Path) -> Result<Self> {
        let path = root.join("tests/bench/levels.toml");
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let levels = Self::parse(&text).with_context(|| format!("read {}", path.display()))?;
        Ok(Self { path, ..levels })
    }

    fn parse(text: &str) -> Result<Self> {
        let levels: Self = toml::from_str(text)?;
        for level in &levels.level {
            ensure!(
                level.level > 0.0 && level.worse_by > 1.0,
                "{}: level must be above 0 and worse_by above 1",
                level.figure
            );
        }
        Ok(levels)
    }

    /// Returns one sentence for each figure beyond its bound.
    pub(super) fn check(&self, report: &Report) -> Vec<String> {
        self.level
            .iter()
            .filter_map(|level| level.check(report.value(&level.figure)))
            .collect()
    }

    /// Writes the measured figures as the new levels.
    pub(super) fn record(&mut self, report: &Report) -> Result<()> {
        for level in &mut self.level {
            level.level = report
                .value(&level.figure)
                .with_context(|| format!("{} was not measured", level.figure))?;
        }
        std::fs::write(&self.path, self.text())
            .with_context(|| format!("write {}", self.path.display()))
    }

    fn text(&self) -> String {
        let mut text = HEAD.to_owned();
        for level in &self.level {
            let better = match level.better {
                Better::Higher => "higher",
                Better::Lower => "lower",
            };
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                "\n[[level]]\nfigure = \"{}\"\nbetter = \"{better}\"\nlevel = {}\nworse_by = {:?}\n",
                level.figure,
                digits(level.level),
                level.worse_by
            );
        }
        text
    }
}

impl Level {
    fn bound(&self) -> f64 {
        match self.better {
            Better::Higher => self.level / self.worse_by,
            Better::Lower => self.level * self.worse_by,
        }
    }

    fn check(&self, value: Option<f64>) -> Option<String> {
        let name = &self.figure;
        let Some(value) = value else {
            return Some(format!("{name} was not measured"));
        };
        let fails = match self.better {
            Better::Higher => value < self.bound(),
            Better::Lower => value > self.bound(),
        };
        fails.then(|| {
            format!(
                "{name} is {}, far from the recorded level {}: the bound is {}. Fix the regression, or record the new \
                 level with `cargo xtask bench smoke --record` and give the reason in the commit",
                digits(value),
                digits(self.level),
                digits(self.bound())
            )
        })
    }
}

/// Three significant digits, as a TOML float.
fn digits(value: f64) -> String {
    let rounded: f64 = format!("{value:.2e}").parse().unwrap_or(value);
    format!("{rounded:?}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Unit;

    const TEXT: &str = "\
        [[level]]\nfigure = \"a.ratio\"\nbetter = \"higher\"\nlevel = 0.4\nworse_by = 2.0\n\
        [[level]]\nfigure = \"a.count\"\nbetter = \"lower\"\nlevel = 100.0\nworse_by = 1.15\n";

    fn report(ratio: f64, count: f64) -> Report {
        let mut report = Report::new("smoke");
        report.add("a.ratio", "", ratio, Unit::Ratio);
        report.add("a.count", "", count, Unit::Count);
        report
    }

    #[test]
    fn a_figure_fails_only_beyond_its_bound() {
        let levels = Levels::parse(TEXT).unwrap();
        assert_eq!(levels.check(&report(0.2, 114.0)), Vec::<String>::new());
        let failed = levels.check(&report(0.19, 116.0));
        assert!(
            failed[0].starts_with("a.ratio is 0.19, far from the recorded level 0.4"),
            "{failed:?}"
        );
        assert!(failed[1].starts_with("a.count is 116.0"), "{failed:?}");
        assert_eq!(levels.check(&Report::new("smoke")).len(), 2);
    }

    #[test]
    fn written_levels_can_be_read_again() {
        let mut levels = Levels::parse(TEXT).unwrap();
        levels.level[0].level = 0.123_456;
        let again = Levels::parse(&levels.text()).unwrap();
        assert_eq!(again.level[0].level, 0.123);
        assert_eq!(again.level[1].worse_by, 1.15);
    }
}
