//! One run: server, hosts, load and faults, until the queue is drained and the tables are written to files.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use rouse_workbench::database;
use rouse_workbench::guests;
use rouse_workbench::host_process::{self, Interruption};
use rouse_workbench::workspace::Workspace;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::bank;
use super::dump;
use super::faults::Faults;
use super::flow_producer::FlowProducer;
use super::folder::Folder;
use super::gates;
use super::hosts::Hosts;
use super::ledger::{Event, Ledger, Line, Run, now_us};
use super::load::QUEUES;
use super::module::Module;
use super::plan::{self, Planned};
use super::producers::{Producer, Recent};
use super::schedules;
use super::server::Server;
use super::settings::LINE_HOSTS;
use super::watch;

/// Compiling the module takes seconds on a busy machine.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_EVERY: Duration = Duration::from_millis(100);
const REPORT_EVERY: Duration = Duration::from_secs(10);

pub(super) fn run(
    workspace: &Workspace,
    settings: Run,
    folder: Folder,
    sabotage: Option<&str>,
) -> Result<()> {
    let rouse = workspace.build_rouse()?;
    let guests = guests::build_test_guests(workspace)?.join("p2");
    let module = Module::read(&guests, &folder.handlers())?;
    module.place(0)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut interruption = Interruption::watch()?;
        // The server's user must be able to reach its data, wherever the folder of the run is.
        let data = host_process::scratch_folder()?;
        // Hosts are started during the whole run, and a build may replace the binary in that time.
        let own = data.path().join("rouse");
        std::fs::copy(&rouse, &own).context("copy the rouse binary")?;
        let rouse = own;
        eprintln!(
            "starting Postgres and {} hosts; seed {}",
            settings.hosts, settings.seed
        );
        let server = Arc::new(Server::start(&rouse, &data.path().join("pg")).await?);
        let folder = Arc::new(folder);
        // Server and hosts are stopped, however the run ends.
        let done = tokio::select! {
            done = run_with(&rouse, settings, folder.clone(), server.clone(), module, sabotage) => done,
            signal = interruption.wait() => Err(anyhow!("{signal}")),
        };
        // The log is useful, but a missing log must not hide how the run ended.
        let _ = std::fs::copy(
            data.path().join("pg/server.log"),
            folder.path().join("postgres.log"),
        );
        let stopped = server.stop().await;
        done?;
        stopped
    })
}

async fn run_with(
    rouse: &std::path::Path,
    settings: Run,
    folder: Arc<Folder>,
    server: Arc<Server>,
    module: Module,
    sabotage: Option<&str>,
) -> Result<()> {
    bank::create(&database::connect(&server.url).await?).await?;
    gates::create(&database::connect(&server.url).await?).await?;
    if let Some(sql) = sabotage {
        let client = database::connect(&server.url).await?;
        client
            .batch_execute(sql)
            .await
            .context("run the sabotage script")?;
    }
    let length = Duration::from_secs_f64(settings.minutes * 60.0);
    let plan = plan::plan(settings.seed, length.as_millis() as u64, &settings.faults);
    save(&plan, &folder)?;
    let ledger = Arc::new(Ledger::create(&folder.ledger())?);
    ledger.write(&Line::Run(settings.clone()))?;
    let hosts = Arc::new(Hosts::start(
        rouse.to_owned(),
        server.url.clone(),
        folder.clone(),
        ledger.clone(),
        settings.hosts,
    )?);
    registered(&server, settings.hosts + LINE_HOSTS).await?;
    schedules::create(&database::connect(&server.url).await?).await?;

    eprintln!(
        "load and {} faults for {} minutes",
        plan.len(),
        settings.minutes
    );
    let recent = Arc::new(Recent::default());
    let faults = Arc::new(Faults {
        server: server.clone(),
        hosts: hosts.clone(),
        ledger: ledger.clone(),
        recent: recent.clone(),
        module,
        fault_jobs: AtomicI64::new(0),
    });
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for number in 0..settings.producers {
        let producer = Producer {
            seed: settings.seed,
            number,
            every: Duration::from_secs(1) * settings.producers as u32 / settings.rate,
            recent: recent.clone(),
            url: server.url.clone(),
            ledger: ledger.clone(),
        };
        tasks.spawn(producer.run(started + length));
    }
    let flows = FlowProducer {
        seed: settings.seed,
        url: server.url.clone(),
        ledger: ledger.clone(),
    };
    tasks.spawn(flows.run(started + length));
    tasks.spawn(faults.clone().run(plan, started));
    let work = async {
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        ledger.happened(now_us(), Event::LoadEnded)?;
        server.answers().await?;
        schedules::pause(&database::connect(&server.url).await?).await?;
        for queue in QUEUES {
            faults.resume(queue).await?;
        }
        eprintln!("draining");
        let left = dump::drained(&database::connect(&server.url).await?).await?;
        eprintln!("drained; {left} unexpected jobs are left");
        Ok::<_, anyhow::Error>(())
    };
    tokio::select! {
        done = work => done?,
        ended = hosts.supervise() => ended.context("supervise the hosts")?,
        failed = watch::progress(&server, &folder) => failed.context("watch the progress")?,
        () = report_progress(&server, &hosts, &recent, started) => {}
    }
    hosts.stop_all().await?;
    let client = database::connect(&server.url).await?;
    dump::write(&client, &folder).await
}

/// A line for each fault of the plan.
fn save(plan: &[Planned], folder: &Folder) -> Result<()> {
    let mut text = String::new();
    for planned in plan {
        text.push_str(&serde_json::to_string(planned)?);
        text.push('\n');
    }
    let path = folder.plan();
    std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))
}

async fn registered(server: &Server, hosts: usize) -> Result<()> {
    let client = database::connect(&server.url).await?;
    let started = Instant::now();
    loop {
        let registered: i64 = client
            .query_one("SELECT count(*) FROM rouse.worker", &[])
            .await?
            .get(0);
        if registered >= hosts as i64 {
            return Ok(());
        }
        if started.elapsed() > REGISTRATION_TIMEOUT {
            bail!(
                "only {registered} of {hosts} hosts have registered within {REGISTRATION_TIMEOUT:?}"
            );
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
}

/// Prints the state of the run every few seconds.
async fn report_progress(server: &Server, hosts: &Hosts, recent: &Recent, started: Instant) {
    loop {
        tokio::time::sleep(REPORT_EVERY).await;
        let live = match database::connect(&server.url).await {
            Ok(client) => client
                .query_one("SELECT count(*) FROM rouse.job", &[])
                .await
                .map_or_else(|_| "?".into(), |row| row.get::<_, i64>(0).to_string()),
            Err(_) => "server down".into(),
        };
        eprintln!(
            "{:>5} s: {} accepted, {} refused, {} unknown; {live} live; {} hosts serve",
            started.elapsed().as_secs(),
            recent.accepted.load(Ordering::Relaxed),
            recent.refused.load(Ordering::Relaxed),
            recent.unknown.load(Ordering::Relaxed),
            hosts.serving(),
        );
    }
}
