//! All data of a run, read from its folder.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context as _, Result, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::folder::Folder;
use super::ledger::{Incident, Line, Request, Response, Run};
use super::load::JobSpec;
use super::suspending::Suspending;

/// The message that a host logs for a failed connection attempt (`host/src/store/connect/backoff.rs`).
const TRY: &str = "a connection did not open";
/// The messages that a host logs when it stops serving a handler whose login does not respond, and when it serves the
/// handler again (`host/src/worker/sql.rs`).
const LOGIN_AWAY: &str = "the login of the handler's SQL statements does not respond";
const LOGIN_BACK: &str = "the login of the handler's SQL statements responds again";

/// A request with its response. The response to a request that never got one counts as unknown at the end of the run.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) number: u64,
    pub(super) request: Request,
    pub(super) sent_us: i64,
    pub(super) answered_us: i64,
    pub(super) response: Response,
}

/// The evidence that an attempt has left outside the database.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Evidence {
    pub(super) worker: String,
    pub(super) job: i64,
    pub(super) attempt: i32,
    pub(super) nonce: String,
    pub(super) started_us: i64,
    /// When this attempt recorded its step; `None` if an earlier attempt had recorded it.
    pub(super) stepped_us: Option<i64>,
    /// When it did the work of its step, whether or not that was recorded. Only jobs that suspend leave this.
    pub(super) did_us: Option<i64>,
    /// Its last tick.
    pub(super) ticked_us: Option<i64>,
    pub(super) ended_us: Option<i64>,
}

/// A row of rouse.jobs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) id: i64,
    pub(super) queue: String,
    pub(super) handler: String,
    pub(super) tags: Vec<String>,
    pub(super) state: String,
    pub(super) unique_key: Option<String>,
    #[serde(default)]
    pub(super) tenant: Option<String>,
    pub(super) attempt: i32,
    pub(super) uncounted: i32,
    pub(super) retried_from: Option<i64>,
    pub(super) worker: Option<i64>,
    /// Digest of the module that ran last.
    pub(super) sha256: Option<String>,
    pub(super) n: i64,
    /// The chains that it waits or waited for, by name.
    #[serde(default)]
    pub(super) after: Option<Value>,
    /// The first job of its chain.
    #[serde(default)]
    pub(super) chain: i64,
    /// The job whose attempt has enqueued it.
    #[serde(default)]
    pub(super) parent: Option<i64>,
    /// What it waits for, if it is suspended.
    #[serde(default)]
    pub(super) wait: Option<Value>,
    #[serde(default)]
    pub(super) is_waiting: bool,
    /// The chain whose failure has cancelled it.
    #[serde(default)]
    pub(super) cancelled_after: Option<i64>,
    pub(super) result: Option<Value>,
    pub(super) error: Option<Value>,
    pub(super) requested_us: i64,
    pub(super) available_us: i64,
    pub(super) claimed_us: Option<i64>,
    pub(super) finished_us: Option<i64>,
}

/// A row of rouse.attempt.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Attempt {
    pub(super) job: i64,
    pub(super) attempt: i32,
    pub(super) lost: bool,
    pub(super) worker: i64,
    /// Null if it was suspended.
    pub(super) error: Value,
    /// What it waits for, if it was suspended.
    #[serde(default)]
    pub(super) wait: Option<Value>,
    /// Digest of the module that ran.
    pub(super) sha256: Option<String>,
    pub(super) claimed_us: i64,
    pub(super) ended_us: i64,
    /// `Some` only for a lost attempt.
    #[serde(default)]
    pub(super) lease_ended_us: Option<i64>,
}

/// A row of rouse.record; renewals are left out.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) job: Option<i64>,
    pub(super) queue: Option<String>,
    pub(super) event: String,
    pub(super) attempt: Option<i32>,
    pub(super) worker: Option<i64>,
    /// A released claim whose attempt had started.
    pub(super) started: bool,
    pub(super) at_us: i64,
}

/// A row of rouse.step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Step {
    pub(super) job: i64,
    pub(super) name: String,
    /// Null if this row is the start of a wait.
    pub(super) result: Value,
    #[serde(default)]
    pub(super) wait: Option<Value>,
    pub(super) attempt: i32,
    pub(super) worker: i64,
    pub(super) at_us: i64,
}

/// A row of rouse.progress, at one moment of the run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Progress {
    pub(super) job: i64,
    /// The nonce of the attempt that wrote it.
    pub(super) step: String,
    pub(super) reported_us: i64,
    /// The job's attempt, if the job still has the fence of the row.
    pub(super) attempt: Option<i32>,
    pub(super) worker: Option<i64>,
}

/// A row of rouse.dependency.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Dependency {
    /// The job that waits.
    pub(super) job: i64,
    pub(super) chain: i64,
}

/// A row of rouse.signal: no wait has taken it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct KeptSignal {
    pub(super) job: i64,
    pub(super) name: String,
    pub(super) mark: i64,
}

/// A row of bank.line: a transaction with effects of this attempt.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct BankLine {
    pub(super) job: i64,
    pub(super) attempt: i32,
    /// `step` or `end`.
    pub(super) part: String,
    /// The amount that it has moved; 0 if another transaction of the job moves the money.
    pub(super) amount: i64,
}

/// A row of bank.account.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Account {
    pub(super) id: i64,
    pub(super) balance: i64,
}

/// A row of rouse.schedule_run, or a job of a schedule that has none.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Due {
    pub(super) schedule: String,
    pub(super) due_us: Option<i64>,
    pub(super) job: Option<i64>,
    /// The number of jobs that have this id.
    pub(super) jobs: i64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Worker {
    pub(super) incarnation: i64,
    pub(super) worker_id: String,
}

/// A failed connection attempt, read from the host's log.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Try {
    pub(super) worker: String,
    /// Each login has a backoff of its own.
    pub(super) login: String,
    pub(super) at_us: i64,
    /// Number of consecutive failures, including this one.
    pub(super) failures: u32,
    /// False if it was in flight when another attempt failed.
    pub(super) counted: bool,
}

/// A host does not serve a handler, because the handler's login does not respond. Read from the host's log.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LoginAway {
    pub(super) worker: String,
    pub(super) handler: String,
    pub(super) from_us: i64,
    /// `None` if the log of the host ends before the login responds again.
    pub(super) until_us: Option<i64>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct World {
    pub(super) run: Run,
    pub(super) calls: Vec<Call>,
    pub(super) happened: Vec<Incident>,
    pub(super) evidence: Vec<Evidence>,
    pub(super) jobs: Vec<Job>,
    pub(super) attempts: Vec<Attempt>,
    pub(super) records: Vec<Record>,
    pub(super) steps: Vec<Step>,
    pub(super) progress: Vec<Progress>,
    pub(super) workers: Vec<Worker>,
    pub(super) due: Vec<Due>,
    pub(super) dependencies: Vec<Dependency>,
    pub(super) signals: Vec<KeptSignal>,
    pub(super) lines: Vec<BankLine>,
    pub(super) accounts: Vec<Account>,
    /// The jobs that attempts enqueue, with the settings that their payloads have.
    pub(super) parts: Vec<JobSpec>,
    pub(super) tries: Vec<Try>,
    pub(super) logins_away: Vec<LoginAway>,
    pub(super) dumped_us: i64,
}

impl Evidence {
    /// The time of its last evidence after the start.
    pub(super) fn last_us(&self) -> Option<i64> {
        let steps = self.stepped_us.max(self.did_us);
        self.ended_us.max(steps).max(self.ticked_us)
    }
}

impl World {
    pub(super) fn read(folder: &Folder) -> Result<Self> {
        let logs = host_logs(&folder.hosts())?;
        let mut world = Self {
            evidence: evidence(&folder.evidence())?,
            jobs: rows(&folder.dump("jobs"))?,
            attempts: rows(&folder.dump("attempts"))?,
            records: rows(&folder.dump("records"))?,
            steps: rows(&folder.dump("steps"))?,
            progress: rows(&folder.dump("progress"))?,
            workers: rows(&folder.dump("workers"))?,
            due: rows(&folder.dump("due"))?,
            dependencies: rows(&folder.dump("dependencies"))?,
            signals: rows(&folder.dump("signals"))?,
            lines: rows(&folder.dump("lines"))?,
            accounts: rows(&folder.dump("accounts"))?,
            tries: tries(&logs)?,
            logins_away: logins_away(&logs)?,
            ..Self::default()
        };
        let dumped = folder.dump("dumped");
        world.dumped_us = fs::read_to_string(&dumped)
            .with_context(|| format!("read {}", dumped.display()))?
            .trim()
            .parse()?;
        world.take_ledger(rows(&folder.ledger())?);
        world.add_parts();
        Ok(world)
    }

    /// Derives the jobs that attempts enqueue from the requests.
    pub(super) fn add_parts(&mut self) {
        for call in &self.calls {
            if let Request::Enqueue { spec, .. } = &call.request
                && let Some(suspending) = &spec.suspending
            {
                let parts = suspending.parts().into_iter();
                self.parts
                    .extend(parts.map(|part| Suspending::part(spec, part)));
            }
        }
    }

    fn take_ledger(&mut self, lines: Vec<Line>) {
        let mut indexes = HashMap::new();
        for line in lines {
            match line {
                Line::Run(run) => self.run = run,
                Line::Happened(happened) => self.happened.push(happened),
                Line::Sent {
                    at_us,
                    call,
                    request,
                } => {
                    indexes.insert(call, self.calls.len());
                    self.calls.push(Call {
                        number: call,
                        request: *request,
                        sent_us: at_us,
                        answered_us: self.dumped_us,
                        response: Response::Unknown("never answered".into()),
                    });
                }
                Line::Answered {
                    at_us,
                    call,
                    response,
                } => {
                    if let Some(index) = indexes.get(&call) {
                        self.calls[*index].answered_us = at_us;
                        self.calls[*index].response = response;
                    }
                }
            }
        }
    }
}

fn rows<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    text.lines()
        .map(|line| serde_json::from_str(line))
        .collect::<Result<_, _>>()
        .with_context(|| format!("read {}", path.display()))
}

/// The log of each host, with the host's name.
fn host_logs(folder: &Path) -> Result<Vec<(String, String)>> {
    let mut logs = Vec::new();
    for host in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let host = host?;
        let worker = host.file_name().to_string_lossy().into_owned();
        let log = fs::read(host.path().join("log"))
            .with_context(|| format!("read the log of {worker}"))?;
        logs.push((worker, String::from_utf8_lossy(&log).into_owned()));
    }
    Ok(logs)
}

/// The failed connection attempts of all hosts, in order per host.
fn tries(logs: &[(String, String)]) -> Result<Vec<Try>> {
    let mut found = Vec::new();
    for (worker, log) in logs {
        for line in log.lines().filter(|line| line.contains(TRY)) {
            let failed = failed_try(worker, line)
                .with_context(|| format!("read the log line of {worker}: {line}"))?;
            found.push(failed);
        }
    }
    Ok(found)
}

/// Reads `2026-01-01T00:00:00.123456Z DEBUG …: a connection did not open failures=2 counted=true login="…" …`.
fn failed_try(worker: &str, line: &str) -> Result<Try> {
    Ok(Try {
        worker: worker.to_owned(),
        at_us: logged_us(line)?,
        login: field(line, "login").context("no login")?.to_owned(),
        failures: field(line, "failures").context("no failures")?.parse()?,
        counted: field(line, "counted").context("no counted")?.parse()?,
    })
}

/// The times in which hosts did not serve a handler, because its login did not respond.
fn logins_away(logs: &[(String, String)]) -> Result<Vec<LoginAway>> {
    let mut found: Vec<LoginAway> = Vec::new();
    for (worker, log) in logs {
        for line in log.lines() {
            let is_back = line.contains(LOGIN_BACK);
            if !is_back && !line.contains(LOGIN_AWAY) {
                continue;
            }
            let unread = || format!("read the log line of {worker}: {line}");
            let at_us = logged_us(line).with_context(unread)?;
            let handler = field(line, "handler").with_context(unread)?;
            let is_it = |away: &&mut LoginAway| away.worker == *worker && away.handler == handler;
            match found.iter_mut().rev().find(is_it) {
                Some(away) if is_back => _ = away.until_us.get_or_insert(at_us),
                Some(_) | None if is_back => {}
                Some(_) | None => found.push(LoginAway {
                    worker: worker.clone(),
                    handler: handler.to_owned(),
                    from_us: at_us,
                    until_us: None,
                }),
            }
        }
    }
    Ok(found)
}

/// The time of a log line, in microseconds.
fn logged_us(line: &str) -> Result<i64> {
    let at = line.split_ascii_whitespace().next().unwrap_or_default();
    let at = humantime::parse_rfc3339(at)?.duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(i64::try_from(at.as_micros())?)
}

/// The value of a field of a log line, without its quotes. It must not contain spaces.
fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let mut words = line.split_ascii_whitespace();
    let value = words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
    Some(value.trim_matches('"'))
}

/// The evidence of all hosts, read from file names.
fn evidence(folder: &Path) -> Result<Vec<Evidence>> {
    let mut found: HashMap<(String, String), Evidence> = HashMap::new();
    let mut later = Vec::new();
    for host in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let host = host?;
        let worker = host.file_name().to_string_lossy().into_owned();
        for file in fs::read_dir(host.path())? {
            let name = file?.file_name().to_string_lossy().into_owned();
            let parts: Vec<&str> = name.split('.').collect();
            let [job, attempt, nonce, at_us, kind] = parts[..] else {
                bail!("{worker}/{name} is not a file of evidence");
            };
            let at_us: i64 = at_us.parse()?;
            let key = (worker.clone(), nonce.to_owned());
            match kind {
                "start" => {
                    let evidence = Evidence {
                        worker: worker.clone(),
                        job: job.parse()?,
                        attempt: attempt.parse()?,
                        nonce: nonce.to_owned(),
                        started_us: at_us,
                        ..Evidence::default()
                    };
                    if found.insert(key, evidence).is_some() {
                        bail!("two attempts on {worker} have the nonce {nonce}");
                    }
                }
                _ => later.push((key, at_us, kind.to_owned())),
            }
        }
    }
    for (key, at_us, kind) in later {
        let Some(evidence) = found.get_mut(&key) else {
            bail!(
                "the attempt {} on {} has evidence but no start",
                key.1,
                key.0
            );
        };
        match kind.as_str() {
            "step" => evidence.stepped_us = Some(at_us),
            "did" => evidence.did_us = Some(at_us),
            "tick" => evidence.ticked_us = evidence.ticked_us.max(Some(at_us)),
            "end" => evidence.ended_us = Some(at_us),
            _ => bail!("{kind} is not a kind of evidence"),
        }
    }
    let mut all: Vec<_> = found.into_values().collect();
    all.sort_by(|a, b| (a.started_us, &a.nonce).cmp(&(b.started_us, &b.nonce)));
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evidence_is_read_from_the_names_of_files() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path().join("host-0");
        fs::create_dir(&host).unwrap();
        for name in [
            "7.1.aa.100.start",
            "7.1.aa.110.did",
            "7.1.aa.120.step",
            "7.1.aa.140.tick",
            "7.1.aa.130.tick",
            "7.1.aa.150.end",
            "7.2.bb.120.start",
        ] {
            fs::write(host.join(name), "").unwrap();
        }
        let found = evidence(dir.path()).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].attempt, found[0].ended_us), (1, Some(150)));
        assert_eq!(found[0].did_us, Some(110));
        assert_eq!(found[0].stepped_us, Some(120));
        assert_eq!(found[0].ticked_us, Some(140));
        assert_eq!(found[0].last_us(), Some(150));
        assert_eq!((found[1].attempt, found[1].ended_us), (2, None));
        fs::write(host.join("9.1.cc.100.end"), "").unwrap();
        assert!(evidence(dir.path()).is_err());
    }

    #[test]
    fn failed_connection_attempts_are_read_from_the_log() {
        let log = "1970-01-01T00:00:01.000000Z  INFO rouse: serving\n\
                   1970-01-01T00:00:02.000500Z DEBUG rouse::store::connect::backoff: a connection did not open failures=3 counted=true login=\"chaos_host\" why=\"refused\"\n";
        let logs = |log: &str| [("host-0".to_owned(), log.to_owned())];
        let expected = Try {
            worker: "host-0".into(),
            login: "chaos_host".into(),
            at_us: 2_000_500,
            failures: 3,
            counted: true,
        };
        assert_eq!(tries(&logs(log)).unwrap(), [expected]);
        assert!(tries(&logs("later: a connection did not open")).is_err());
    }

    #[test]
    fn logins_that_do_not_respond_are_read_from_the_log() {
        let log = "1970-01-01T00:00:02.000500Z  WARN rouse::worker::sql: the login of the handler's SQL statements does not respond; its jobs wait handler=\"chaos.pay\" login=\"rouse as chaos_pay\"\n\
                   1970-01-01T00:00:03.000000Z  INFO rouse::worker::sql: the login of the handler's SQL statements responds again handler=\"chaos.pay\"\n\
                   1970-01-01T00:00:04.000000Z  WARN rouse::worker::sql: the login of the handler's SQL statements does not respond; its jobs wait handler=\"chaos.pay\" login=\"rouse as chaos_pay\"\n";
        let away = |from_us, until_us| LoginAway {
            worker: "host-0".into(),
            handler: "chaos.pay".into(),
            from_us,
            until_us,
        };
        let expected = [away(2_000_500, Some(3_000_000)), away(4_000_000, None)];
        let logs = [("host-0".to_owned(), log.to_owned())];
        assert_eq!(logins_away(&logs).unwrap(), expected);
    }

    #[test]
    fn a_request_without_a_response_is_unknown() {
        let mut world = World::default();
        let request = Request::Cancel { job: 1 };
        let sent = |call| Line::Sent {
            at_us: 5,
            call,
            request: Box::new(request.clone()),
        };
        let response = Line::Answered {
            at_us: 9,
            call: 2,
            response: Response::Ok(1),
        };
        world.take_ledger(vec![sent(1), sent(2), response]);
        assert!(matches!(world.calls[0].response, Response::Unknown(_)));
        assert_eq!(world.calls[1].response, Response::Ok(1));
        assert_eq!(world.calls[1].answered_us, 9);
    }
}
