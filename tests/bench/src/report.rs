//! The result of a benchmark: a human-readable table, JSON for scripts.

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Map, Value, json};

use super::targets::{TARGETS, Target, Verdict};

/// The name of the report of all benchmarks.
pub(super) const ALL: &str = "all";

/// The unit of a figure's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Ratio,
    PerSecond,
    Count,
    Seconds,
    Milliseconds,
    Microseconds,
    Bytes,
    Percent,
}

/// One measured value.
pub(super) struct Figure {
    /// Words joined by dots, such as `drain.ratio`: stable, for scripts and targets.
    pub(super) key: String,
    /// Human-readable description.
    pub(super) label: String,
    pub(super) value: f64,
    pub(super) unit: Unit,
}

/// The figures of one benchmark, or of several.
#[derive(Default)]
pub(super) struct Report {
    pub(super) bench: &'static str,
    /// The settings that the figures depend on.
    pub(super) settings: Value,
    pub(super) figures: Vec<Figure>,
    /// The figures again, side by side.
    pub(super) tables: Vec<Table>,
    /// Failed measurements, and figures beyond their bounds.
    pub(super) failures: Vec<String>,
}

impl Report {
    pub(super) fn new(bench: &'static str) -> Self {
        Self {
            bench,
            ..Self::default()
        }
    }

    pub(super) fn add(
        &mut self,
        key: impl Into<String>,
        label: impl Into<String>,
        value: f64,
        unit: Unit,
    ) {
        self.figures.push(Figure {
            key: key.into(),
            label: label.into(),
            value,
            unit,
        });
    }

    pub(super) fn value(&self, key: &str) -> Option<f64> {
        let figure = self.figures.iter().find(|figure| figure.key == key)?;
        Some(figure.value)
    }

    /// Adds the figures and failures of another report.
    pub(super) fn absorb(&mut self, other: Self) {
        self.settings = other.settings;
        self.figures.extend(other.figures);
        self.tables.extend(other.tables);
        self.failures.extend(other.failures);
    }

    pub(super) fn print(&self, as_json: bool) {
        if as_json {
            println!("{}", self.to_json());
            return;
        }
        println!("{}", self.to_table());
        for table in &self.tables {
            println!("{table}");
        }
        if self.bench == ALL {
            println!("{}", self.to_target_table());
        }
        let settings = self.settings.as_object().into_iter().flatten();
        let settings: Vec<_> = settings
            .map(|(name, value)| format!("{name} {}", value.to_string().trim_matches('"')))
            .collect();
        println!("{}", settings.join(", "));
        for failure in &self.failures {
            println!("FAILED: {failure}");
        }
    }

    fn to_table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_FULL_CONDENSED);
        table.set_header(["figure", "", "measured", "at least", "aim", "verdict"]);
        for figure in &self.figures {
            table.add_row(figure.row());
        }
        align(table)
    }

    /// All targets in order, including those without a measurement.
    fn to_target_table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_FULL_CONDENSED);
        table.set_header(["target", "", "measured", "at least", "aim", "verdict"]);
        for target in &TARGETS {
            match self.figures.iter().find(|figure| figure.key == target.key) {
                Some(figure) => table.add_row(figure.row()),
                None => table.add_row([target.key, "", "", "", "", "not measured"]),
            };
        }
        align(table)
    }

    fn to_json(&self) -> Value {
        let figures: Map<String, Value> = self
            .figures
            .iter()
            .map(|figure| (figure.key.clone(), figure.to_json()))
            .collect();
        json!({
            "bench": self.bench,
            "settings": self.settings,
            "figures": figures,
            "failures": self.failures,
        })
    }
}

/// A table of numbers whose first column contains names.
pub(super) fn matrix(header: Vec<String>, rows: Vec<Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    table.set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Aligns numbers to the right.
fn align(mut table: Table) -> Table {
    for column in table.column_iter_mut().skip(2).take(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

impl Figure {
    /// The figure in one line, to be shown as soon as it is known.
    pub(super) fn line(&self) -> String {
        let value = self.unit.format(self.value);
        format!("{}: {value} ({})", self.key, self.label)
    }

    fn row(&self) -> [String; 6] {
        let target = Target::of(&self.key);
        let bound = |bound: fn(&Target) -> f64| {
            target.map_or_else(String::new, |t| t.bound(bound(t), self.unit))
        };
        [
            self.key.clone(),
            self.label.clone(),
            self.unit.format(self.value),
            bound(|target| target.at_least),
            bound(|target| target.aim),
            self.verdict().map_or("", Verdict::word).to_owned(),
        ]
    }

    fn verdict(&self) -> Option<Verdict> {
        Target::of(&self.key).map(|target| target.verdict(self.value))
    }

    fn to_json(&self) -> Value {
        let mut json = json!({
            "value": rounded(self.value),
            "unit": self.unit.name(),
            "label": self.label,
        });
        if let (Some(target), Some(verdict)) = (Target::of(&self.key), self.verdict()) {
            json["at_least"] = target.at_least.into();
            json["aim"] = target.aim.into();
            json["verdict"] = verdict.word().into();
        }
        json
    }
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Self::Ratio => "ratio",
            Self::PerSecond => "per_s",
            Self::Count => "count",
            Self::Seconds => "s",
            Self::Milliseconds => "ms",
            Self::Microseconds => "us",
            Self::Bytes => "bytes",
            Self::Percent => "percent",
        }
    }

    /// Formats a value in this unit for display.
    pub(super) fn format(self, value: f64) -> String {
        match self {
            Self::Ratio => format!("{value:.3}"),
            Self::PerSecond if value >= 100.0 => format!("{} /s", grouped(value)),
            Self::PerSecond => format!("{value:.2} /s"),
            Self::Count if value >= 100.0 => grouped(value),
            Self::Count => format!("{value:.1}"),
            Self::Seconds => format!("{value:.2} s"),
            Self::Milliseconds => format!("{value:.2} ms"),
            Self::Microseconds => format!("{value:.1} µs"),
            Self::Bytes if value.abs() >= 10e6 => format!("{:.0} MB", value / 1e6),
            Self::Bytes => format!("{} B", grouped(value)),
            Self::Percent => format!("{value:.2} %"),
        }
    }
}

/// Separates thousands with commas.
fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    if value < 0.0 {
        format!("-{text}")
    } else {
        text
    }
}

/// Rounds to five significant digits: more would suggest false precision.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_formatted_for_display() {
        assert_eq!(Unit::PerSecond.format(1_234_567.8), "1,234,568 /s");
        assert_eq!(Unit::PerSecond.format(0.5), "0.50 /s");
        assert_eq!(Unit::Bytes.format(921.6), "922 B");
        assert_eq!(Unit::Bytes.format(120e6), "120 MB");
        assert_eq!(Unit::Count.format(-1000.0), "-1000.0");
        assert_eq!(rounded(0.123_456_78), 0.12346);
    }

    #[test]
    fn the_line_of_a_figure_has_its_key_its_value_and_its_label() {
        let mut report = Report::new("scale");
        report.add("scale.fair_1.per_s", "jobs", 12_345.6, Unit::PerSecond);
        let line = "scale.fair_1.per_s: 12,346 /s (jobs)";
        assert_eq!(report.figures[0].line(), line);
    }

    #[test]
    fn a_figure_with_a_target_has_its_verdict() {
        let mut report = Report::new("drain");
        report.add("drain.ratio", "ratio to the probe", 0.41, Unit::Ratio);
        report.add("drain.jobs", "jobs", 5.0, Unit::Count);
        let json = report.to_json();
        assert_eq!(json["figures"]["drain.ratio"]["verdict"], "at least");
        assert_eq!(json["figures"]["drain.jobs"].get("verdict"), None);
        assert!(report.to_table().to_string().contains("≥ 0.550"));
    }
}
