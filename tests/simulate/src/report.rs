//! The result of a simulation: as a value, as a table, and whether every guarantee held.

use std::fmt;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::scenario::Load;
use crate::server::Server;
use crate::witness::Witness;
use crate::{MS, Nanos, SECOND, Scenario};

/// A share may be off by this fraction of itself.
const SHARE_OFF_MAX: f64 = 0.05;

/// The result of a simulation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The name of the scenario.
    pub scenario: String,
    /// The seed of everything that was random.
    pub seed: u64,
    /// The number of hosts.
    pub hosts: usize,
    /// The slots of each host.
    pub slots: usize,
    /// The number of tenants.
    pub tenants: u32,
    /// The jobs that have ended.
    pub jobs: u64,
    /// The virtual time until the last of them ended.
    pub virtual_s: f64,
    /// Jobs per second of virtual time.
    pub jobs_per_s: f64,
    /// The number of claims.
    pub claims: u64,
    /// The share of the time of its cores during which the server worked.
    pub server_load: f64,
    /// The windows in which shares are compared.
    pub window_s: f64,
    /// Jain's index of the shares of tenants that have jobs throughout a window: the lowest of all windows. `None`
    /// without such a window.
    pub jain_min: Option<f64>,
    /// The number of these windows.
    pub windows: usize,
    /// The number of times that a limit was exceeded.
    pub exceeded: u64,
    /// The first of these, as text.
    pub first_exceeded: Option<String>,
    /// Tenants whose jobs could start, and did not.
    pub stuck: u64,
    /// Jobs that another host has adopted.
    pub adopted: u64,
    /// Claims that were released because no slot was free in time.
    pub released: u64,
    /// The classes of tenants.
    pub classes: Vec<ClassReport>,
}

/// What happened to the jobs of a class.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassReport {
    /// Its name.
    pub name: String,
    /// The number of its tenants.
    pub tenants: u32,
    /// The weight of each.
    pub weight: f64,
    /// The jobs that have ended.
    pub jobs: u64,
    /// Jobs per second of virtual time, until the last of them ended.
    pub jobs_per_s: f64,
    /// While tenants had waiting jobs: their share of the jobs, divided by the share to which their weight entitles
    /// them among tenants behind the same gates; 1 is exact. `None` if a gate limits each tenant, or if they never had
    /// jobs throughout a window.
    pub share: Option<f64>,
    /// The largest deviation of a tenant that is entitled to a thousand jobs or more: 0.01 is 1 % too many.
    pub worst: Option<f64>,
    /// The time from enqueue to start that half of the jobs do not exceed.
    pub delay_p50_ms: f64,
    /// The same for 99 of 100.
    pub delay_p99_ms: f64,
    /// The longest.
    pub delay_max_ms: f64,
    /// Tenants whose jobs could start, and did not.
    pub stuck: u64,
    /// All jobs are enqueued at the start, so delays depend mainly on their number.
    pub is_backlog: bool,
}

impl Report {
    pub(crate) fn of(scenario: &Scenario, witness: &Witness, server: &Server, time: Nanos) -> Self {
        let virtual_s = time as f64 / SECOND as f64;
        let per_s = |jobs: u64, time: Nanos| jobs as f64 * SECOND as f64 / time.max(1) as f64;
        let ms = |delay: Nanos| delay as f64 / MS as f64;
        let classes = scenario.classes.iter().zip(&witness.classes);
        let classes: Vec<ClassReport> = classes
            .map(|(class, seen)| ClassReport {
                name: class.name.clone(),
                tenants: class.tenants,
                weight: class.weight,
                jobs: seen.ended,
                jobs_per_s: per_s(seen.ended, seen.ended_at),
                share: (seen.entitled >= 1000.0).then(|| seen.received / seen.entitled),
                worst: seen.worst,
                delay_p50_ms: ms(seen.delays.percentile(0.5)),
                delay_p99_ms: ms(seen.delays.percentile(0.99)),
                delay_max_ms: ms(seen.delays.max()),
                stuck: seen.stuck,
                is_backlog: matches!(class.load, Load::Backlog { .. }),
            })
            .collect();
        let jobs = classes.iter().map(|class| class.jobs).sum();
        let cores = scenario.costs.cores.max(1) as f64;
        Self {
            scenario: scenario.name.clone(),
            seed: scenario.seed,
            hosts: scenario.hosts,
            slots: scenario.slots,
            tenants: scenario.tenants(),
            jobs,
            virtual_s,
            jobs_per_s: per_s(jobs, time),
            claims: server.claims,
            server_load: server.busy as f64 / (time.max(1) as f64 * cores),
            window_s: scenario.window as f64 / SECOND as f64,
            jain_min: witness.jain.iter().copied().min_by(f64::total_cmp),
            windows: witness.jain.len(),
            exceeded: witness.exceeded,
            first_exceeded: witness.first_exceeded.clone(),
            stuck: classes.iter().map(|class| class.stuck).sum(),
            adopted: witness.adopted,
            released: witness.released,
            classes,
        }
    }

    /// The guarantees that did not hold, as text.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.exceeded > 0 {
            let first = self.first_exceeded.as_deref().unwrap_or_default();
            faults.push(format!(
                "limits were exceeded {} times; the first: {first}",
                self.exceeded
            ));
        }
        for class in &self.classes {
            if class.stuck > 0 {
                faults.push(format!(
                    "{} tenants of `{}` are stuck: their jobs could start, and did not",
                    class.stuck, class.name
                ));
            }
            let off = class.share.map(|share| share - 1.0);
            let mut off = off.into_iter().chain(class.worst);
            if let Some(off) = off.rfind(|off| off.abs() > SHARE_OFF_MAX) {
                faults.push(format!(
                    "the shares of `{}` are off by {:.1} %; at most {:.0} % is permitted",
                    class.name,
                    off * 100.0,
                    SHARE_OFF_MAX * 100.0
                ));
            }
        }
        faults
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}, seed {}: {} jobs of {} tenants on {} hosts with {} slots",
            self.scenario,
            self.seed,
            grouped(self.jobs),
            grouped(u64::from(self.tenants)),
            grouped(self.hosts as u64),
            self.slots
        )?;
        writeln!(
            f,
            "{:.1} s of virtual time, {} jobs/s, {} claims of {:.1} jobs, server load {:.0} %",
            self.virtual_s,
            grouped(self.jobs_per_s as u64),
            grouped(self.claims),
            self.jobs as f64 / self.claims.max(1) as f64,
            self.server_load * 100.0
        )?;
        writeln!(f, "{}", self.table())?;
        let (windows, window_s) = (self.windows, self.window_s);
        match self.jain_min {
            Some(jain) => writeln!(
                f,
                "Jain's index of the shares: {jain:.4} in the worst of {windows} windows of {window_s} s"
            )?,
            None => writeln!(
                f,
                "shares of tenants cannot be compared: no window of {window_s} s in which two had jobs throughout"
            )?,
        }
        if self.adopted + self.released > 0 {
            let (adopted, released) = (grouped(self.adopted), grouped(self.released));
            writeln!(
                f,
                "{adopted} jobs were adopted, {released} claims given back"
            )?;
        }
        write!(
            f,
            "limits exceeded: {}, tenants stuck: {}",
            grouped(self.exceeded),
            grouped(self.stuck)
        )
    }
}

impl Report {
    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
        let delays = ["delay p50", "p99", "max"];
        let header = [
            "class", "tenants", "weight", "jobs", "jobs/s", "share", "worst",
        ];
        table.set_header(header.into_iter().chain(delays));
        for class in &self.classes {
            let percent = |off: f64| format!("{:+.2} %", off * 100.0);
            table.add_row([
                class.name.clone(),
                grouped(u64::from(class.tenants)),
                class.weight.to_string(),
                grouped(class.jobs),
                grouped(class.jobs_per_s as u64),
                class
                    .share
                    .map_or("–".to_owned(), |share| format!("{share:.4}")),
                class.worst.map_or("–".to_owned(), percent),
                duration(class.delay_p50_ms),
                duration(class.delay_p99_ms),
                duration(class.delay_max_ms),
            ]);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }
}

fn duration(ms: f64) -> String {
    match ms {
        ms if ms >= 10_000.0 => format!("{:.1} s", ms / 1000.0),
        ms if ms >= 100.0 => format!("{ms:.0} ms"),
        ms => format!("{ms:.1} ms"),
    }
}

/// A number with commas.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        let numbers = [0, 999, 1_000, 123_456, 100_000_000].map(grouped);
        assert_eq!(numbers, ["0", "999", "1,000", "123,456", "100,000,000"]);
    }

    #[test]
    fn durations_have_the_unit_that_suits_them() {
        let texts = [0.04, 99.94, 250.4, 12_345.0].map(duration);
        assert_eq!(texts, ["0.0 ms", "99.9 ms", "250 ms", "12.3 s"]);
    }
}
