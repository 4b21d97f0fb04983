//! Every `sslmode`, against a server with TLS.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    time::Instant,
};

use rouse::{
    postgres::{Server, Settings},
    store::connect::{ConnectError, Connector},
};

use crate::support::{database::connect, free_port, postgres_settings, scratch, worker::TIMEOUT};

/// A TLS server for one test, with one of the certificates.
struct TlsServer {
    server: Server,
    /// The directory of the root certificate files.
    folder: PathBuf,
}

impl TlsServer {
    async fn start(certificate: &str, key: &str) -> Self {
        let folder = scratch("tls");
        let settings = Settings {
            port: Some(free_port()),
            ..postgres_settings(folder.join("pg"))
        };
        let server = tokio::task::spawn_blocking(move || Server::start(&settings).unwrap())
            .await
            .unwrap();
        let cluster = server.data_dir().join("cluster");
        install(&cluster, "server.crt", certificate);
        install(&cluster, "server.key", key);
        connect(&server.url("postgres"))
            .await
            .batch_execute("ALTER SYSTEM SET ssl = on")
            .await
            .unwrap();
        let server_and_folder = Self { server, folder };
        server_and_folder.reload().await;
        server_and_folder
    }

    /// Waits until the server has applied its new settings: the first connection that it answers with TLS shows it.
    async fn reload(&self) {
        let client = connect(&self.server.url("postgres")).await;
        client
            .execute("SELECT pg_reload_conf()", &[])
            .await
            .unwrap();
        let until = Instant::now() + TIMEOUT;
        while let Err(error) = self.url("localhost", "require", None).connect().await {
            assert!(Instant::now() < until, "{error}: {}", self.log());
        }
    }

    /// A connector to the server at 127.0.0.1, under this name, in this mode, with these roots.
    fn url(&self, host: &str, mode: &str, roots: Option<&str>) -> Connector {
        let url = self.server.tcp_url("postgres").unwrap();
        let roots = roots.map_or_else(String::new, |pem| {
            let path = self.folder.join("root.crt");
            fs::write(&path, pem).unwrap();
            format!("&sslrootcert={}", path.display())
        });
        let url = url.replace("127.0.0.1", host);
        let url = format!("{url}?sslmode={mode}&hostaddr=127.0.0.1{roots}");
        Connector::from_url(&url, &|_| None).unwrap()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.server.log_path()).unwrap()
    }
}

const CA: &str = include_str!("certificates/ca.crt");
const OTHER_CA: &str = include_str!("certificates/other-ca.crt");
const SERVER: &str = include_str!("certificates/server.crt");
const SERVER_KEY: &str = include_str!("certificates/server.key");
const SELF_SIGNED: &str = include_str!("certificates/self-signed.crt");
const SELF_SIGNED_KEY: &str = include_str!("certificates/self-signed.key");
const VERSION_1: &str = include_str!("certificates/version-1.crt");

#[tokio::test]
async fn each_sslmode_encrypts_and_verifies_as_in_libpq() {
    let server = TlsServer::start(SERVER, SERVER_KEY).await;
    let assert_connects = async |host: &str, mode: &str, roots: Option<&str>, encrypted: bool| {
        let found = encryption(&server.url(host, mode, roots)).await;
        assert_eq!(found.unwrap(), encrypted, "{host} {mode}");
    };
    let refused = async |host: &str, mode: &str, roots: Option<&str>| {
        let error = encryption(&server.url(host, mode, roots))
            .await
            .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("sslrootcert"), "{host} {mode}: {text}");
        text
    };
    assert_connects("localhost", "disable", None, false).await;
    assert_connects("localhost", "allow", None, true).await;
    assert_connects("localhost", "prefer", None, true).await;
    // Encryption only: any certificate and any name are accepted.
    assert_connects("elsewhere.example", "require", None, true).await;
    // With a root certificate, `require` means `verify-ca`.
    assert_connects("elsewhere.example", "require", Some(CA), true).await;
    refused("localhost", "require", Some(OTHER_CA)).await;
    assert_connects("elsewhere.example", "verify-ca", Some(CA), true).await;
    let text = refused("localhost", "verify-ca", Some(OTHER_CA)).await;
    assert!(text.contains("UnknownIssuer"), "{text}");
    assert_connects("localhost", "verify-full", Some(CA), true).await;
    let text = refused("elsewhere.example", "verify-full", Some(CA)).await;
    assert!(text.contains("elsewhere.example"), "{text}");
    refused("127.0.0.1", "verify-full", Some(CA)).await;
    refused("localhost", "verify-full", Some(OTHER_CA)).await;
}

#[tokio::test]
async fn the_pool_uses_the_same_tls() {
    let server = TlsServer::start(SERVER, SERVER_KEY).await;
    let pool = server.url("localhost", "verify-full", Some(CA)).pool(2);
    let client = pool.get().await.unwrap();
    let row = client.query_one(ENCRYPTION, &[]).await.unwrap();
    assert!(row.get::<_, bool>(0));
    let pool = server
        .url("localhost", "verify-full", Some(OTHER_CA))
        .pool(2);
    assert!(pool.get().await.is_err());
}

#[tokio::test]
async fn a_login_can_be_bound_to_the_connection() {
    let server = TlsServer::start(SERVER, SERVER_KEY).await;
    let connector = server.url("localhost", "require&channel_binding=require", None);
    assert!(encryption(&connector).await.unwrap());
    let connector = server.url("localhost", "disable&channel_binding=require", None);
    let error = encryption(&connector).await.unwrap_err();
    assert!(error.to_string().contains("channel binding"), "{error}");
}

#[tokio::test]
async fn a_self_signed_certificate_is_trusted_if_it_is_the_root() {
    let server = TlsServer::start(SELF_SIGNED, SELF_SIGNED_KEY).await;
    let connector = server.url("localhost", "verify-full", Some(SELF_SIGNED));
    assert!(encryption(&connector).await.unwrap());
    for (host, roots) in [("elsewhere.example", SELF_SIGNED), ("localhost", CA)] {
        let connector = server.url(host, "verify-full", Some(roots));
        assert!(encryption(&connector).await.is_err(), "{host}");
    }
}

#[tokio::test]
async fn require_accepts_even_a_version_1_certificate() {
    let server = TlsServer::start(VERSION_1, SERVER_KEY).await;
    let connector = server.url("localhost", "require", None);
    assert!(encryption(&connector).await.unwrap());
}

#[tokio::test]
async fn a_server_without_tls_is_refused_unless_plaintext_is_allowed() {
    let settings = Settings {
        port: Some(free_port()),
        ..postgres_settings(scratch("plain").join("pg"))
    };
    let server = Server::start(&settings).unwrap();
    let url = server.tcp_url("postgres").unwrap();
    let connector =
        |mode: &str| Connector::from_url(&format!("{url}?sslmode={mode}"), &|_| None).unwrap();
    assert!(!encryption(&connector("prefer")).await.unwrap());
    let error = encryption(&connector("require")).await.unwrap_err();
    assert!(
        error.to_string().contains("does not support TLS"),
        "{error}"
    );
    // A Unix socket is not encrypted in any mode.
    let url = format!("{}?sslmode=verify-full", server.url("postgres"));
    let connector = Connector::from_url(&url, &|_| None).unwrap();
    assert!(!encryption(&connector).await.unwrap());
}

#[tokio::test]
async fn a_wrong_password_is_an_error_that_names_its_source_but_not_the_password() {
    let settings = Settings {
        port: Some(free_port()),
        ..postgres_settings(scratch("password").join("pg"))
    };
    let server = Server::start(&settings).unwrap();
    let url = format!(
        "postgres://rouse:wr0ng@127.0.0.1:{}/postgres",
        server.port()
    );
    let connector = Connector::from_url(&url, &|_| None).unwrap();
    let error = connector.connect().await.err().unwrap();
    let text = format!("{error} {error:?}");
    assert!(
        text.contains("PGPASSWORD") && !text.contains("wr0ng"),
        "{text}"
    );
}

const ENCRYPTION: &str = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";

async fn encryption(connector: &Connector) -> Result<bool, ConnectError> {
    let client = connector.client().await?;
    Ok(client.query_one(ENCRYPTION, &[]).await.unwrap().get(0))
}

/// Writes a file where the server finds it, owned by the server and private.
fn install(cluster: &Path, name: &str, text: &str) {
    let path = cluster.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let owner = fs::metadata(cluster).unwrap();
    chown(path, Some(owner.uid()), Some(owner.gid())).unwrap();
}
