//! Turns connection settings into connections.
//!
//! Supports everything that libpq users expect: URLs and key-value strings, `PG*` variables, password files, and every
//! `sslmode`. An invalid setting is reported before anything connects, by an error that names it. Errors and debug
//! output do not contain passwords.

mod backoff;
mod conninfo;
mod error;
mod passfile;
mod pool;
mod stream;
mod tls;
mod verify;

use std::{collections::HashSet, fmt, path::Path, sync::Arc, time::Duration};

use deadpool::managed::{Object, QueueMode};
use deadpool_postgres::{Manager, ManagerConfig, RecyclingMethod};
use rand::seq::SliceRandom as _;
use tokio::{runtime::Handle, sync::watch, task::JoinHandle};
use tokio_postgres::{
    Client, Config, Error, Socket,
    config::{Host, LoadBalanceHosts, SslMode as WireMode, TargetSessionAttrs},
    error::SqlState,
};

use backoff::Backoff;
pub use backoff::{Away, OpenError, Reach, backoff};
use conninfo::Params;
pub use error::ConnectError;
use error::next_step;
use passfile::Passwords;
use pool::QuietConnect;
pub(super) use pool::why;
pub use pool::{Opener, Pool, PooledClient};
pub use stream::{Handshake, TlsStream};
pub use tls::Tls;
use tls::{SslMode, roots};

/// Looks a variable up in the environment. Only `config` reads the real one.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The half of a connection that does the I/O: it has to be polled for the client to work.
pub type Connection = tokio_postgres::Connection<Socket, TlsStream<Socket>>;

/// The time that one address may take to respond, unless `connect_timeout` is set.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// After this much silence, TCP probes whether the server is alive …
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// … this often …
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// … and this many times, so that a dead server is detected within a minute.
const KEEPALIVE_RETRIES: u32 = 3;
/// The settings of every session, regardless of those of the role and the database. A statement that waits for a lock
/// and then counts needs a snapshot that is taken after the wait. Rouse itself limits the duration of statements and
/// the idle time of connections.
const SESSION: &str = "-c default_transaction_isolation=read\\ committed -c statement_timeout=0 -c idle_session_timeout=0";
/// The number of times that two connections compare their sessions. A pooler usually hands out the session that was
/// used last.
const SESSION_CHECKS: usize = 4;
/// A connection counts as lost if sent data is not acknowledged for this long.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(60);

/// Opens connections to one database. Clones share one backoff.
#[derive(Clone)]
pub struct Connector {
    config: Config,
    /// Those of the password file, if `config` has none.
    passwords: Passwords,
    tls: Tls,
    mode: SslMode,
    backoff: Arc<Backoff>,
}

/// True if the connection string contains a password; false if it cannot be parsed.
pub fn has_password(url: &str) -> bool {
    conninfo::parse(url).is_ok_and(|params| params.has("password"))
}

impl Connector {
    /// Reads the settings: those in `url` (the value of `DATABASE_URL`) first, then `PG*`
    /// variables, then libpq's defaults.
    ///
    /// # Errors
    /// If no setting names a database, or a setting cannot be used.
    pub fn new(url: Option<&str>, env: Environment<'_>) -> Result<Self, ConnectError> {
        let mut params = Params::from_env(env);
        match url.filter(|url| !url.trim().is_empty()) {
            Some(url) => params.overlay(conninfo::parse(url)?),
            None if !params.name_a_database() => return Err(ConnectError::NoDatabase),
            None => {}
        }
        let home = env("HOME").filter(|home| !home.is_empty());
        let root_cert = params.take("sslrootcert");
        let passfile = params.take("passfile");
        let mode = match params.take("sslmode") {
            Some(word) => SslMode::parse(&word)?,
            // libpq: the system's roots are allowed with the strictest mode only.
            None if root_cert.as_deref() == Some("system") => SslMode::VerifyFull,
            None => SslMode::Prefer,
        };
        let given = params.clone();
        params.refuse_unsupported()?;
        let mut config = params.into_config()?;
        complete(&mut config, &given, env);
        check_lists(&config)?;

        let only_sockets = config
            .get_hosts()
            .iter()
            .all(|h| matches!(h, Host::Unix(_)));
        // libpq ignores the mode on a Unix socket, which has no TLS.
        let mode = if only_sockets { SslMode::Disable } else { mode };
        config.ssl_mode(match mode {
            SslMode::Disable => WireMode::Disable,
            // libpq's `allow` tries plain text first; both modes take what the server offers.
            SslMode::Allow | SslMode::Prefer => WireMode::Prefer,
            SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull => WireMode::Require,
        });
        let (check, roots) = roots(mode, root_cert.as_deref(), home.as_deref())?;
        let tls = Tls::new(check, roots)?;
        let default = home.map(|home| format!("{home}/.pgpass"));
        let passwords = match passfile.or(default) {
            Some(file) if config.get_password().is_none() => {
                passfile::look_up(Path::new(&file), &config)?
            }
            _ => Passwords::default(),
        };
        let backoff = Backoff::new(config.get_user().unwrap_or_default());
        Ok(Self {
            config,
            passwords,
            tls,
            mode,
            backoff: Arc::new(backoff),
        })
    }

    /// Like [`new`](Self::new), with a connection string.
    ///
    /// # Errors
    /// If a setting cannot be used.
    pub fn from_url(url: &str, env: Environment<'_>) -> Result<Self, ConnectError> {
        Self::new(Some(url), env)
    }

    /// Opens one connection, for LISTEN, migrations or commands.
    ///
    /// # Errors
    /// If the server cannot be reached, is not trusted, or refuses the user. [`ConnectError::Away`]: an earlier try has
    /// failed, and the backoff has not passed.
    pub async fn connect(&self) -> Result<(Client, Connection), ConnectError> {
        let opened = self.backoff.open(self.timeout(), self.opening(), why);
        opened.await.map_err(|not| match not {
            OpenError::Failed(error) => ConnectError::failed(self.target(), &error),
            OpenError::Silent(waited) => self.timed_out(waited),
            OpenError::Away(away) => ConnectError::Away {
                target: self.target(),
                why: away.why,
            },
        })
    }

    fn opening(&self) -> impl Future<Output = Result<(Client, Connection), Error>> + use<> {
        let (config, tls) = (self.config.clone(), self.tls.clone());
        let passwords = self.passwords.clone();
        async move { open(&config, &passwords, &tls).await }
    }

    fn timed_out(&self, waited: Duration) -> ConnectError {
        ConnectError::TimedOut {
            target: self.target(),
            waited_s: waited.as_secs(),
        }
    }

    /// Sends the server a request to cancel the statement of this connection.
    ///
    /// # Errors
    /// If the request cannot be sent. The server does not report whether it has cancelled anything.
    pub(super) async fn cancel(&self, client: &Client) -> Result<(), Error> {
        client.cancel_token().cancel_query(self.tls.clone()).await
    }

    /// Permanently takes a connection out of its pool, and sends the server a request to cancel its statement: a
    /// session that waits for a lock does not notice that its connection was closed, and keeps its own locks while it
    /// waits.
    pub(super) fn abandon(&self, client: PooledClient) {
        let client = Object::take(client);
        if client.is_closed() {
            return;
        }
        // Without a runtime this process is about to end.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let connector = self.clone();
        runtime.spawn(async move {
            // Nothing can be cancelled if the server does not respond at all.
            let _ = tokio::time::timeout(super::RESPONSE_TIMEOUT, connector.cancel(&client)).await;
        });
    }

    /// Waits until the server is reached or the backoff has passed.
    pub async fn ready(&self) {
        self.backoff.ready().await;
    }

    /// Ends the backoff, for a call that cannot wait.
    pub fn try_now(&self) {
        self.backoff.try_now();
    }

    /// Ends the backoff because another login has reached the server; the next failure is followed by the shortest
    /// wait.
    pub fn start_over(&self) {
        self.backoff.start_over();
    }

    /// Watches whether connections open.
    pub fn reach(&self) -> watch::Receiver<Reach> {
        self.backoff.reach()
    }

    /// Opens one connection and drives it in the background until the client is dropped.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn client(&self) -> Result<Client, ConnectError> {
        Ok(self.driven(self.connect().await?).0)
    }

    fn driven(&self, (client, connection): (Client, Connection)) -> (Client, JoinHandle<()>) {
        let target = self.target();
        let driver = tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::warn!(%target, %error, "a database connection ended");
            }
        });
        (client, driver)
    }

    /// Opens one more connection in addition to an open one. If it fails, the server still counts as reached.
    async fn another(&self) -> Result<(Client, JoinHandle<()>), ConnectError> {
        Ok(self.driven(self.answered(self.opening()).await?))
    }

    /// True if connections share their sessions, as behind a pooler in transaction mode: state that one of them leaves
    /// in a session (LISTEN, for instance) is visible to all others. Two connections query alternately which session
    /// they are using.
    ///
    /// A pooler that gives each connection its own session does not share any. A very busy pooler may escape detection.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn shares_sessions(&self) -> Result<bool, ConnectError> {
        let (first, driving_first) = self.driven(self.connect().await?);
        let (second, driving_second) = self.another().await?;
        let looking = async {
            let mut sessions = [HashSet::new(), HashSet::new()];
            for _ in 0..SESSION_CHECKS {
                for (client, seen) in [&first, &second].into_iter().zip(&mut sessions) {
                    let rows = client.query_typed("SELECT pg_backend_pid()", &[]).await?;
                    seen.extend(rows.iter().map(|row| row.get::<_, i32>(0)));
                }
            }
            let [first, second] = sessions;
            Ok(first.len() > 1 || second.len() > 1 || !first.is_disjoint(&second))
        };
        let shared = self.answered(looking).await;
        // Without a response, the connections would stay open until it arrives.
        driving_first.abort();
        driving_second.abort();
        shared
    }

    /// Waits for the server's response on an open connection, for at most the time that opening one may take.
    pub(super) async fn answered<T>(
        &self,
        response: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, ConnectError> {
        let timeout = self.timeout();
        match tokio::time::timeout(timeout, response).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(ConnectError::failed(self.target(), &error)),
            Err(_) => Err(self.timed_out(timeout)),
        }
    }

    /// A pool of at most `size` connections. Nothing is opened yet.
    ///
    /// It hands out the connection that was returned last. A session reads the catalog and makes its plans when it
    /// first calls a function, which takes milliseconds: if connections took turns, every session would do so for every
    /// function.
    pub fn pool(&self, size: usize) -> Pool {
        let manager = Manager::from_connect(
            self.config.clone(),
            QuietConnect {
                passwords: self.passwords.clone(),
                tls: self.tls.clone(),
            },
            ManagerConfig {
                recycling_method: RecyclingMethod::Fast,
            },
        );
        let opener = Opener::new(manager, self.backoff.clone(), self.timeout());
        Pool::builder(opener)
            .max_size(size)
            .queue_mode(QueueMode::Lifo)
            .build()
            .expect("a pool without timeouts needs no runtime")
    }

    /// The address, without secrets: `database on host:port as user`.
    pub fn target(&self) -> String {
        let ports = self.config.get_ports();
        let hosts: Vec<String> = self
            .config
            .get_hosts()
            .iter()
            .enumerate()
            .map(|(index, host)| {
                let port = ports.get(index).or(ports.first()).copied().unwrap_or(5432);
                match host {
                    Host::Tcp(name) => format!("{name}:{port}"),
                    Host::Unix(directory) => format!("{}/.s.PGSQL.{port}", directory.display()),
                }
            })
            .collect();
        let user = self.user();
        let database = self.config.get_dbname().unwrap_or(user);
        format!("{database} on {} as {user}", hosts.join(", "))
    }

    /// The name of the role.
    pub(super) fn user(&self) -> &str {
        self.config.get_user().unwrap_or("the system's user")
    }

    /// The time limit for opening a connection: TLS and login can hang even after the server has accepted the
    /// connection. Each host may be tried twice.
    fn timeout(&self) -> Duration {
        let hosts = u32::try_from(self.config.get_hosts().len()).unwrap_or(u32::MAX);
        self.config
            .get_connect_timeout()
            .copied()
            .unwrap_or(CONNECT_TIMEOUT)
            .saturating_mul(hosts.saturating_mul(2))
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("target", &self.target())
            .field("sslmode", &self.mode)
            .finish_non_exhaustive()
    }
}

/// Opens a session at the first host that accepts it.
async fn open(
    config: &Config,
    passwords: &Passwords,
    tls: &Tls,
) -> Result<(Client, Connection), Error> {
    let mut order: Vec<usize> = (0..config.get_hosts().len()).collect();
    if config.get_load_balance_hosts() == LoadBalanceHosts::Random {
        order.shuffle(&mut rand::rng());
    }
    let mut failed = None;
    for index in order {
        let mut at_host = at_host(config, index);
        if let Some(password) = passwords.get(index) {
            at_host.password(password);
        }
        match open_at(&at_host, tls).await {
            Ok(opened) => return Ok(opened),
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.expect("`complete` adds a host if there is none"))
}

/// Opens a session with [`SESSION`], or without it if a pooler refuses session settings. `config` has one host: with
/// several hosts, tokio-postgres reports only the error of the last one.
async fn open_at(config: &Config, tls: &Tls) -> Result<(Client, Connection), Error> {
    let mut with_settings = config.clone();
    with_settings.options(session_options(config.get_options()));
    match with_settings.connect(tls.clone()).await {
        Err(error) if refuses_options(&error) => config.connect(tls.clone()).await,
        opened => opened,
    }
}

/// The settings for one of the hosts. A `Config` cannot drop hosts, so all others are copied.
fn at_host(all: &Config, index: usize) -> Config {
    let mut one = Config::new();
    match &all.get_hosts()[index] {
        Host::Tcp(name) => one.host(name),
        Host::Unix(directory) => one.host_path(directory),
    };
    if let Some(address) = all.get_hostaddrs().get(index) {
        one.hostaddr(*address);
    }
    let ports = all.get_ports();
    if let Some(port) = ports.get(index).or(ports.first()) {
        one.port(*port);
    }
    if let Some(user) = all.get_user() {
        one.user(user);
    }
    if let Some(password) = all.get_password() {
        one.password(password);
    }
    if let Some(dbname) = all.get_dbname() {
        one.dbname(dbname);
    }
    if let Some(options) = all.get_options() {
        one.options(options);
    }
    if let Some(name) = all.get_application_name() {
        one.application_name(name);
    }
    if let Some(timeout) = all.get_connect_timeout() {
        one.connect_timeout(*timeout);
    }
    if let Some(timeout) = all.get_tcp_user_timeout() {
        one.tcp_user_timeout(*timeout);
    }
    if let Some(interval) = all.get_keepalives_interval() {
        one.keepalives_interval(interval);
    }
    if let Some(retries) = all.get_keepalives_retries() {
        one.keepalives_retries(retries);
    }
    one.keepalives(all.get_keepalives())
        .keepalives_idle(all.get_keepalives_idle())
        .ssl_mode(all.get_ssl_mode())
        .ssl_negotiation(all.get_ssl_negotiation())
        .channel_binding(all.get_channel_binding())
        .target_session_attrs(all.get_target_session_attrs())
        .load_balance_hosts(all.get_load_balance_hosts());
    one
}

/// The options of the connection string, and then those of Rouse, which take precedence.
fn session_options(given: Option<&str>) -> String {
    given.map_or_else(|| SESSION.to_owned(), |given| format!("{given} {SESSION}"))
}

/// True for the errors of poolers that do not accept session settings: PgBouncer reports a protocol violation, others
/// report that the feature is not supported.
fn refuses_options(error: &Error) -> bool {
    let refusals = [
        SqlState::PROTOCOL_VIOLATION,
        SqlState::FEATURE_NOT_SUPPORTED,
    ];
    error.code().is_some_and(|code| refusals.contains(code))
}

/// Refuses lists of addresses and ports that do not match the hosts.
fn check_lists(config: &Config) -> Result<(), ConnectError> {
    let hosts = config.get_hosts().len();
    let (addresses, ports) = (config.get_hostaddrs().len(), config.get_ports().len());
    let (name, count) = if ![0, hosts].contains(&addresses) {
        ("hostaddr", addresses)
    } else if ![0, 1, hosts].contains(&ports) {
        ("port", ports)
    } else {
        return Ok(());
    };
    Err(ConnectError::BadValue {
        why: format!("`{name}` has {count} values for {hosts} hosts"),
    })
}

/// Fills in the settings that were not given.
fn complete(config: &mut Config, given: &Params, env: Environment<'_>) {
    if config.get_hosts().is_empty() {
        // If only an address is given, the certificate is checked against it.
        for address in config.get_hostaddrs().to_vec() {
            config.host(address.to_string());
        }
    }
    if config.get_hosts().is_empty() {
        let port = config.get_ports().first().copied().unwrap_or(5432);
        let socket = format!(".s.PGSQL.{port}");
        match ["/var/run/postgresql", "/tmp"]
            .into_iter()
            .find(|directory| Path::new(directory).join(&socket).exists())
        {
            Some(directory) => config.host_path(directory),
            None => config.host("localhost"),
        };
    }
    // Several hosts are a primary and its standbys.
    if config.get_hosts().len() > 1 && !given.has("target_session_attrs") {
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    }
    if config.get_user().is_none()
        && let Some(user) = env("USER").or_else(|| env("LOGNAME"))
    {
        config.user(user);
    }
    if config.get_application_name().is_none() {
        config.application_name("rouse");
    }
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(CONNECT_TIMEOUT);
    }
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(UNACKNOWLEDGED_MAX);
    }
    if !given.has("keepalives_idle") {
        config.keepalives_idle(KEEPALIVE_IDLE);
    }
    if config.get_keepalives_interval().is_none() {
        config.keepalives_interval(KEEPALIVE_INTERVAL);
    }
    if config.get_keepalives_retries().is_none() {
        config.keepalives_retries(KEEPALIVE_RETRIES);
    }
}

#[cfg(test)]
mod tests;
