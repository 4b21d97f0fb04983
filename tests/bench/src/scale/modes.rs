//! Plain queues, fair queues, direct dispatch and shards side by side: a matrix of hosts and lanes, in ratios to the
//! probe of the same server. Each mode has a server of its own, so that no host reads the lanes of another mode.

use anyhow::{Context as _, Result};
use comfy_table::Table;
use rouse_workbench::percentiles::median;

use super::{Kind, Options, Scale};
use crate::backlog::Work;
use crate::drained::{self, Drained};
use crate::host::HostOptions;
use crate::report::{self, Report, Unit};
use crate::server::Server;
use crate::{Bench, probe};

/// The queue of all modes except the plain one.
const QUEUE: &str = "modes";
/// Lanes and hosts of the figures with targets.
const MOST_LANES: i64 = 10_000;
const MOST_HOSTS: usize = 8;

/// A way to distribute the jobs of a queue among hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Each lane is a queue.
    Plain,
    /// Each lane is a tenant of a fair queue.
    Drr,
    /// Each tenant has a worker. The lanes belong to workers.
    Direct,
    /// Each lane is a tenant of a fair queue with shards.
    Shards,
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
struct Cell {
    mode: Mode,
    hosts: usize,
    lanes: i64,
    per_s: f64,
    /// The ratio to the probe.
    ratio: f64,
}

impl Mode {
    const ALL: [Self; 4] = [Self::Plain, Self::Drr, Self::Direct, Self::Shards];

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Drr => "drr",
            Self::Direct => "direct",
            Self::Shards => "shards",
        }
    }

    /// The settings of the queue.
    fn sql(self) -> String {
        let settings = match self {
            Self::Plain => return String::new(),
            Self::Drr => "rouse.set_fair_share('modes', policy => 'drr')",
            Self::Direct => "rouse.set_dispatch('modes', 'hash')",
            Self::Shards => {
                "rouse.set_fair_share('modes', policy => 'drr'), rouse.set_shards('modes', 64)"
            }
        };
        format!("SELECT {settings}")
    }

    fn work(self, jobs: i64, lanes: i64) -> Work {
        let mut work = Work::noop(jobs);
        match self {
            Self::Plain if lanes > 1 => work.queues = Some(lanes),
            Self::Plain => {}
            Self::Drr | Self::Direct | Self::Shards => {
                work.tenants = Some((QUEUE, format!("'t' || n % {lanes}")));
            }
        }
        work
    }
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    let mut report = Report::new("scale");
    let mut cells = Vec::new();
    for mode in Mode::ALL {
        let of_mode = Server::during(bench, async |server| {
            let mut scale = Scale::new(bench, server, options, Kind::Modes)?;
            // If a cell fails, the cells that were measured before it still count.
            if let Err(error) = measure(&mut scale, mode, &mut cells).await {
                let failure = format!("scale, Modes, {}: {error:#}", mode.name());
                scale.report.failures.push(failure);
            }
            Ok(scale.report)
        })
        .await?;
        report.absorb(of_mode);
    }
    if let Some(kept) = kept(&cells, Mode::Shards, [1, MOST_HOSTS]) {
        let label =
            format!("shards, {MOST_LANES} lanes: {MOST_HOSTS} hosts compared with one host");
        report.add("scale.modes_shards.kept", label, kept, Unit::Ratio);
    }
    report.tables.push(table(&cells));
    Ok(report)
}

async fn measure(scale: &mut Scale<'_>, mode: Mode, cells: &mut Vec<Cell>) -> Result<()> {
    let (bench, server, jobs) = (scale.bench, scale.server, scale.jobs());
    let plain = Work::noop(jobs);
    let probes = probe::run(bench, server, jobs, &plain.payload).await?;
    let probe = median(probes)?;
    let name = mode.name();
    let label = format!("{name}; probe: rows claimed and deleted by plain SQL");
    let key = format!("modes_{name}.probe_per_s");
    scale.figure(&key, &label, probe, Unit::PerSecond);
    // Fair queues are also compared with one plain lane, before there are other lanes.
    let one_lane = match mode {
        Mode::Drr => {
            let drains = scale.drains("one plain lane", 1, &plain).await?;
            Some(median_per_s(&drains)?)
        }
        Mode::Plain | Mode::Direct | Mode::Shards => None,
    };
    let mut counts = scale.lanes();
    // The catalog only grows, so small numbers of lanes are measured first.
    counts.sort_unstable();
    let most = counts.last().copied().unwrap_or_default();
    let room =
        "UPDATE rouse.limits SET keyed_lanes_max = greatest(keyed_lanes_max, $1::integer + 1000)";
    let most = i32::try_from(most).context("convert the number of lanes")?;
    server.client.execute(room, &[&most]).await?;
    server.client.batch_execute(&mode.sql()).await?;
    for lanes in counts {
        // The lanes are added to the catalog beforehand, so that no cell includes their creation.
        let options = HostOptions::new(&scale.handlers);
        let first = mode.work(lanes, lanes);
        drained::drain(bench, server, &options, 1, &first).await?;
        let work = mode.work(jobs, lanes);
        for hosts in scale.options.hosts.clone() {
            let title = format!("{name}, {hosts} host(s), {lanes} lane(s)");
            let per_s = median_per_s(&scale.drains(&title, hosts, &work).await?)?;
            let ratio = per_s / probe;
            let key = format!("modes_{name}_{hosts}_{lanes}.ratio");
            let label = format!("{title}: ratio to the probe");
            scale.figure(&key, &label, ratio, Unit::Ratio);
            cells.push(Cell {
                mode,
                hosts,
                lanes,
                per_s,
                ratio,
            });
            if let (Some(one_lane), 1, MOST_LANES) = (one_lane, hosts, lanes) {
                let label = format!("drr, {lanes} lanes, one host: compared with one plain lane");
                scale.figure("modes_drr.kept", &label, per_s / one_lane, Unit::Ratio);
            }
        }
    }
    Ok(())
}

fn median_per_s(drains: &[Drained]) -> Result<f64> {
    median(drains.iter().map(Drained::jobs_per_s).collect())
}

/// The jobs per second of the second number of hosts, compared with the first one, if both were measured.
fn kept(cells: &[Cell], mode: Mode, hosts: [usize; 2]) -> Option<f64> {
    let [few, many] = hosts.map(|hosts| {
        let mut cells = cells.iter();
        cells.find(|c| c.mode == mode && c.hosts == hosts && c.lanes == MOST_LANES)
    });
    Some(many?.per_s / few?.per_s)
}

/// A row for each mode and number of hosts, and a column for each number of lanes.
fn table(cells: &[Cell]) -> Table {
    let mut lanes: Vec<i64> = cells.iter().map(|cell| cell.lanes).collect();
    lanes.sort_unstable();
    lanes.dedup();
    let columns = lanes.iter().map(|lanes| format!("{lanes} lane(s)"));
    let header = ["mode: ratio to the probe".to_owned(), "hosts".to_owned()];
    let mut rows: Vec<(Mode, usize)> = Vec::new();
    for cell in cells {
        if !rows.contains(&(cell.mode, cell.hosts)) {
            rows.push((cell.mode, cell.hosts));
        }
    }
    let rows = rows.into_iter().map(|(mode, hosts)| {
        let ratios = lanes.iter().map(|lanes| {
            let is_it = |c: &&Cell| (c.mode, c.hosts, c.lanes) == (mode, hosts, *lanes);
            let cell = cells.iter().find(is_it);
            cell.map_or_else(String::new, |cell| Unit::Ratio.format(cell.ratio))
        });
        let names = [mode.name().to_owned(), hosts.to_string()];
        names.into_iter().chain(ratios).collect()
    });
    report::matrix(header.into_iter().chain(columns).collect(), rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(mode: Mode, hosts: usize, lanes: i64, per_s: f64) -> Cell {
        Cell {
            mode,
            hosts,
            lanes,
            per_s,
            ratio: per_s / 100.0,
        }
    }

    #[test]
    fn hosts_are_compared_only_if_both_numbers_were_measured() {
        let mut cells = vec![
            cell(Mode::Shards, 1, MOST_LANES, 40.0),
            cell(Mode::Plain, 8, MOST_LANES, 50.0),
            cell(Mode::Shards, 8, 100, 60.0),
        ];
        assert_eq!(kept(&cells, Mode::Shards, [1, 8]), None);
        cells.push(cell(Mode::Shards, 8, MOST_LANES, 30.0));
        assert_eq!(kept(&cells, Mode::Shards, [1, 8]), Some(0.75));
    }

    #[test]
    fn the_table_has_a_row_for_each_mode_and_number_of_hosts() {
        let cells = [
            cell(Mode::Plain, 1, 1, 40.0),
            cell(Mode::Plain, 2, 1, 41.0),
            cell(Mode::Drr, 1, 100, 42.0),
        ];
        let table = table(&cells);
        assert_eq!(table.row_iter().count(), 3);
        let text = table.to_string();
        for part in ["1 lane(s)", "100 lane(s)", "0.400", "0.410", "0.420"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_plain_lane_is_a_queue_and_those_of_the_other_modes_are_tenants_of_one() {
        assert_eq!(Mode::Plain.work(10, 1).queues, None);
        assert_eq!(Mode::Plain.work(10, 100).queues, Some(100));
        for mode in [Mode::Drr, Mode::Direct, Mode::Shards] {
            let work = mode.work(10, 100);
            assert_eq!(work.tenants, Some((QUEUE, "'t' || n % 100".to_owned())));
            assert!(mode.sql().contains(&format!("'{QUEUE}'")), "{mode:?}");
        }
    }
}
