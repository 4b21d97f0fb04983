//! The meaning of connection settings, tested without Postgres.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    sync::{Arc, Mutex},
    thread,
};

use tempfile::NamedTempFile;

use super::{ConnectError, Connector, Host, SESSION, TargetSessionAttrs, at_host, session_options};

fn connector(url: &str, env: &[(&str, &str)]) -> Result<Connector, ConnectError> {
    let env = |name: &str| {
        let found = env.iter().find(|(variable, _)| *variable == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    Connector::new(Some(url).filter(|url| !url.is_empty()), &env)
}

fn target(url: &str, env: &[(&str, &str)]) -> String {
    connector(url, env).unwrap().target()
}

fn error(url: &str, env: &[(&str, &str)]) -> String {
    connector(url, env).unwrap_err().to_string()
}

#[test]
fn both_kinds_of_connection_string_are_equivalent() {
    let wanted = "jobs on db.example:6432 as ann";
    assert_eq!(
        target("postgres://ann:pw@db.example:6432/jobs", &[]),
        wanted
    );
    assert_eq!(
        target("postgresql://ann@db.example:6432/jobs?sslmode=require", &[]),
        wanted
    );
    let pairs = "host=db.example port = 6432 user='ann' dbname=jobs password='it''s'";
    assert_eq!(target(&pairs.replace("''", "\\'"), &[]), wanted);
}

#[test]
fn several_hosts_brackets_and_socket_directories_are_understood() {
    assert_eq!(
        target("postgres://ann@a:1,b:2/jobs", &[]),
        "jobs on a:1, b:2 as ann"
    );
    assert_eq!(
        target("postgres://ann@[::1]:6432/jobs", &[]),
        "jobs on ::1:6432 as ann"
    );
    let socket = "jobs on /run/pg/.s.PGSQL.5432 as ann";
    assert_eq!(target("postgres://ann@%2Frun%2Fpg/jobs", &[]), socket);
    assert_eq!(
        target("postgres:///jobs?host=/run/pg&user=ann", &[]),
        socket
    );
}

#[test]
fn pg_variables_apply_to_settings_that_the_string_omits() {
    let env = [
        ("PGHOST", "db.example"),
        ("PGUSER", "ann"),
        ("PGDATABASE", "jobs"),
        ("PGPORT", "6432"),
    ];
    assert_eq!(target("", &env), "jobs on db.example:6432 as ann");
    assert_eq!(
        target("postgres:///other", &env),
        "other on db.example:6432 as ann"
    );
    // A host in the string does not use PGPORT.
    assert_eq!(
        target("postgres://else.example", &env),
        "jobs on else.example:5432 as ann"
    );
}

#[test]
fn without_any_setting_the_error_names_the_settings() {
    let text = error("", &[("HOME", "/nonexistent"), ("USER", "ann")]);
    assert!(
        text.contains("DATABASE_URL") && text.contains("rouse dev"),
        "{text}"
    );
}

#[test]
fn exactly_the_libpq_sslmodes_are_accepted() {
    for mode in ["disable", "allow", "prefer", "require", "verify-full"] {
        let url = format!("postgres://ann@db.example/jobs?sslmode={mode}");
        let connector = connector(&url, &[]);
        assert!(connector.is_ok(), "{mode}: {connector:?}");
    }
    let text = error("postgres://ann@db.example/jobs?sslmode=always", &[]);
    assert!(
        text.contains("\"always\"") && text.contains("verify-full"),
        "{text}"
    );
    let text = error("postgres://ann@db.example/jobs", &[("PGSSLMODE", "yes")]);
    assert!(text.contains("PGSSLMODE"), "{text}");
}

#[test]
fn system_roots_require_a_mode_that_checks_the_name() {
    let url = "postgres://ann@db.example/jobs?sslrootcert=system";
    for weak in [
        format!("{url}&sslmode=verify-ca").as_str(),
        // Otherwise, every certificate that a public authority has signed would be trusted.
        "postgres://ann@db.example/jobs?sslmode=verify-ca",
    ] {
        let text = error(weak, &[]);
        assert!(text.contains("verify-ca is too weak"), "{text}");
        assert!(text.contains("use sslmode=verify-full"), "{text}");
    }
    let debug = format!("{:?}", connector(url, &[]).unwrap());
    assert!(debug.contains("VerifyFull"), "{debug}");
}

#[test]
fn an_unreadable_root_certificate_is_named() {
    let text = error(
        "postgres://ann@db.example/jobs?sslmode=verify-full&sslrootcert=/nonexistent",
        &[],
    );
    assert!(
        text.contains("sslrootcert") && text.contains("/nonexistent"),
        "{text}"
    );
    let empty = file("no certificate", 0o644);
    let text = error(
        &format!(
            "postgres://ann@db.example/jobs?sslmode=verify-ca&sslrootcert={}",
            empty.path().display()
        ),
        &[],
    );
    assert!(text.contains("no certificate in PEM format"), "{text}");
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    let text = error("postgres://ann@db.example/jobs?sslcert=/c", &[]);
    assert!(text.contains("sslcert"), "{text}");
    let text = error("postgres://ann@db.example/jobs", &[("PGSERVICE", "prod")]);
    assert!(text.contains("PGSERVICE"), "{text}");
    for (variable, value) in [
        ("PGSSLCERT", "/c"),
        ("PGSSLKEY", "/k"),
        ("PGSSLCRL", "/crl"),
        ("PGSSLCRLDIR", "/crl.d"),
        ("PGSSLCERTMODE", "require"),
        ("PGSSLMINPROTOCOLVERSION", "TLSv1.3"),
        ("PGSSLMAXPROTOCOLVERSION", "TLSv1.2"),
        ("PGREQUIRESSL", "1"),
        ("PGREQUIREAUTH", "scram-sha-256"),
        ("PGREQUIREPEER", "postgres"),
        ("PGGSSENCMODE", "require"),
    ] {
        let text = error("postgres://ann@db.example/jobs", &[(variable, value)]);
        assert!(text.ends_with(&format!("unset {variable}")), "{text}");
    }
    for mode in ["disable", "prefer"] {
        let env = [("PGGSSENCMODE", mode)];
        let connector = connector("postgres://ann@db.example/jobs", &env);
        assert!(connector.is_ok(), "{mode}: {connector:?}");
    }
    for fine in [
        "gssencmode=prefer",
        "sslcertmode=allow",
        "ssl_min_protocol_version=TLSv1.2",
        "requiressl=0",
    ] {
        let url = format!("postgres://ann@db.example/jobs?{fine}");
        assert!(Connector::from_url(&url, &|_| None).is_ok(), "{fine}");
    }
    let text = error("postgres://ann@db.example/jobs?gssencmode=require", &[]);
    assert!(text.contains("gssencmode"), "{text}");
    let env = [("PGSSLNEGOTIATION", "neither")];
    let text = error("postgres://ann@db.example/jobs", &env);
    assert!(text.contains("sslnegotiation"), "{text}");
    let text = error("postgres://ann@db.example/jobs?colour=red", &[]);
    assert!(text.contains("colour"), "{text}");
    let text = error("postgres://ann@db.example:many/jobs", &[]);
    assert!(text.contains("port"), "{text}");
}

#[test]
fn debug_output_and_errors_do_not_contain_passwords() {
    let connector = connector("postgres://ann:s3cret@db.example/jobs", &[]).unwrap();
    assert!(!format!("{connector:?} {:?}", connector.config).contains("s3cret"));
    for broken in [
        "postgres://ann:s3cret@[::1/jobs",
        "postgres://ann:s3cret@db.example:x/jobs",
        "postgres://ann:s3cret@db.example/jobs?x",
        "host=db.example password='s3cret",
        "mysql://ann:s3cret@db.example/jobs",
        "s3cret",
    ] {
        let error = self::connector(broken, &[]).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("s3cret"), "{error}");
    }
}

#[test]
fn a_password_file_is_used_only_if_it_is_private() {
    let line = "db.example:5432:jobs:ann:fr0mfile\n";
    let password = |mode| {
        let path = file(line, mode);
        let env = [("PGPASSFILE", path.path().to_str().unwrap())];
        let connector = connector("postgres://ann@db.example/jobs", &env).unwrap();
        connector.passwords.get(0).map(str::to_owned)
    };
    assert_eq!(password(0o600).as_deref(), Some("fr0mfile"));
    assert_eq!(password(0o640), None);
}

#[test]
fn a_password_in_the_string_takes_precedence_over_the_file() {
    let path = file("*:*:*:*:fr0mfile\n", 0o600);
    let env = [("PGPASSFILE", path.path().to_str().unwrap())];
    let connector = connector("postgres://ann:fr0murl@db.example/jobs", &env).unwrap();
    assert_eq!(connector.config.get_password(), Some(&b"fr0murl"[..]));
    assert_eq!(connector.passwords.get(0), None);
}

#[test]
fn the_password_file_is_searched_for_each_host() {
    let path = file("b:6432:jobs:ann:forb\n*:*:jobs:ann:others\n", 0o600);
    let env = [("PGPASSFILE", path.path().to_str().unwrap())];
    let passwords = |url: &str| {
        let connector = connector(url, &env).unwrap();
        [0, 1].map(|index| connector.passwords.get(index).map(str::to_owned))
    };
    let known = |password: &str| Some(password.to_owned());
    assert_eq!(
        passwords("postgres://ann@a,b:6432/jobs"),
        [known("others"), known("forb")]
    );
    // One port is that of all hosts.
    assert_eq!(
        passwords("host=b,a port=6432 user=ann dbname=jobs"),
        [known("forb"), known("others")]
    );
    assert_eq!(passwords("postgres://bob@a,b/jobs"), [None, None]);
}

#[test]
fn connections_have_a_name_and_detect_a_dead_network() {
    let config = connector("postgres://ann@db.example/jobs", &[])
        .unwrap()
        .config;
    assert_eq!(config.get_application_name(), Some("rouse"));
    assert_eq!(config.get_connect_timeout().unwrap().as_secs(), 10);
    assert_eq!(config.get_keepalives_idle().as_secs(), 30);
    let url =
        "postgres://ann@db.example/jobs?keepalives_idle=7&connect_timeout=3&application_name=me";
    let config = connector(url, &[]).unwrap().config;
    assert_eq!(config.get_application_name(), Some("me"));
    assert_eq!(config.get_connect_timeout().unwrap().as_secs(), 3);
    assert_eq!(config.get_keepalives_idle().as_secs(), 7);
}

#[test]
fn options_of_the_connection_string_are_kept_before_those_of_every_session() {
    let options = |url| {
        let config = connector(url, &[]).unwrap().config;
        session_options(config.get_options())
    };
    assert_eq!(options("postgres://ann@db.example/jobs"), SESSION);
    let given = options(
        "postgres://ann@db.example/jobs?options=-c%20work_mem%3D8MB%20-c%20statement_timeout%3D1",
    );
    assert_eq!(
        given,
        format!("-c work_mem=8MB -c statement_timeout=1 {SESSION}")
    );
}

#[test]
fn several_addresses_are_searched_for_one_that_accepts_writes() {
    let wanted = |url| {
        connector(url, &[])
            .unwrap()
            .config
            .get_target_session_attrs()
    };
    let (any, writes) = (TargetSessionAttrs::Any, TargetSessionAttrs::ReadWrite);
    assert_eq!(wanted("postgres://ann@a/jobs"), any);
    assert_eq!(wanted("postgres://ann@a,b/jobs"), writes);
    assert_eq!(
        wanted("postgres://ann@a,b/jobs?target_session_attrs=any"),
        any
    );
}

#[test]
fn each_of_several_hosts_has_its_own_address_and_port_and_all_other_settings() {
    const OTHERS: &str = "user=ann password=pw dbname=jobs options='-c work_mem=8MB' application_name=me \
                          sslmode=require sslnegotiation=direct channel_binding=require connect_timeout=3 \
                          tcp_user_timeout=7000 keepalives=0 keepalives_idle=7 keepalives_interval=8 keepalives_count=9 \
                          target_session_attrs=read-only load_balance_hosts=random";
    let config = |hosts: &str| connector(&format!("{hosts} {OTHERS}"), &[]).unwrap().config;
    let all = config("host=a,b hostaddr=10.0.0.1,10.0.0.2 port=1,2");
    assert!(at_host(&all, 0) == config("host=a hostaddr=10.0.0.1 port=1"));
    assert!(at_host(&all, 1) == config("host=b hostaddr=10.0.0.2 port=2"));
    let all = config("host=/run/pg,b port=1");
    let socket = at_host(&all, 0);
    assert_eq!(socket.get_hosts(), [Host::Unix("/run/pg".into())]);
    assert_eq!(socket.get_ports(), [1]);
    assert!(at_host(&all, 1) == config("host=b port=1"));
    let plain = connector("postgres://ann@b/jobs", &[]).unwrap().config;
    assert!(at_host(&plain, 0) == plain);
    for (invalid, why) in [
        (
            "host=a,b hostaddr=10.0.0.1",
            "`hostaddr` has 1 values for 2 hosts",
        ),
        ("host=a,b,c port=1,2", "`port` has 2 values for 3 hosts"),
    ] {
        let text = error(&format!("{invalid} {OTHERS}"), &[]);
        assert!(text.contains(why), "{text}");
    }
}

/// A server on this port requests the password of each connection, and refuses it. Returns the passwords, too.
fn requesting() -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let passwords = Arc::new(Mutex::new(Vec::new()));
    let seen = passwords.clone();
    let message = |client: &mut TcpStream| {
        let mut length = [0; 4];
        client.read_exact(&mut length).unwrap();
        let mut body = vec![0; u32::from_be_bytes(length) as usize - 4];
        client.read_exact(&mut body).unwrap();
        body
    };
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            message(&mut client);
            // AuthenticationCleartextPassword.
            client.write_all(b"R\0\0\0\x08\0\0\0\x03").unwrap();
            let mut kind = [0];
            // A client without a password closes the connection.
            if client.read_exact(&mut kind).is_err() {
                continue;
            }
            let password = message(&mut client);
            let password = String::from_utf8(password).unwrap();
            let password = password.trim_end_matches('\0').to_owned();
            seen.lock().unwrap().push(password);
            let fields = "SFATAL\0C28P01\0Mno\0\0";
            let length = u32::try_from(fields.len() + 4).unwrap().to_be_bytes();
            let answer = [&b"E"[..], &length, fields.as_bytes()].concat();
            client.write_all(&answer).unwrap();
        }
    });
    (port, passwords)
}

#[tokio::test]
async fn each_host_gets_its_own_password_of_the_password_file() {
    let ((first, to_first), (second, to_second)) = (requesting(), requesting());
    let url = format!("postgres://ann@127.0.0.1:{first},127.0.0.1:{second}/jobs?sslmode=disable");
    let for_second = format!("127.0.0.1:{second}:jobs:ann:two\n");
    let for_both = format!("127.0.0.1:{first}:jobs:ann:one\n{for_second}");
    for (lines, passwords) in [(for_second, vec![]), (for_both, vec!["one"])] {
        let path = file(&lines, 0o600);
        let env = [("PGPASSFILE", path.path().to_str().unwrap())];
        for is_pooled in [false, true] {
            let connector = connector(&url, &env).unwrap();
            match is_pooled {
                false => assert!(connector.connect().await.is_err()),
                true => assert!(connector.pool(1).get().await.is_err()),
            }
            assert_eq!(std::mem::take(&mut *to_first.lock().unwrap()), passwords);
            assert_eq!(std::mem::take(&mut *to_second.lock().unwrap()), ["two"]);
        }
    }
}

/// A server on this port refuses each connection with this SQLSTATE. Returns whether each had `options`, too.
fn refusing(code: &'static str) -> (u16, Arc<Mutex<Vec<bool>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let tries = Arc::new(Mutex::new(Vec::new()));
    let seen = tries.clone();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let mut length = [0; 4];
            client.read_exact(&mut length).unwrap();
            let mut startup = vec![0; u32::from_be_bytes(length) as usize - 4];
            client.read_exact(&mut startup).unwrap();
            let name = b"options\0";
            let has_options = startup.windows(name.len()).any(|at| at == name);
            seen.lock().unwrap().push(has_options);
            let fields = format!("SFATAL\0C{code}\0Mno\0\0");
            let length = u32::try_from(fields.len() + 4).unwrap().to_be_bytes();
            let answer = [&b"E"[..], &length, fields.as_bytes()].concat();
            client.write_all(&answer).unwrap();
        }
    });
    (port, tries)
}

#[tokio::test]
async fn only_a_host_that_refuses_the_settings_of_sessions_is_tried_without_them() {
    // A server that starts, and a pooler.
    let ((starting, to_server), (pooler, to_pooler)) = (refusing("57P03"), refusing("08P01"));
    for hosts in [
        format!("127.0.0.1:{starting},127.0.0.1:{pooler}"),
        format!("127.0.0.1:{pooler},127.0.0.1:{starting}"),
    ] {
        let url = format!("postgres://ann@{hosts}/jobs?sslmode=disable");
        assert!(connector(&url, &[]).unwrap().connect().await.is_err());
        assert_eq!(std::mem::take(&mut *to_server.lock().unwrap()), [true]);
        assert_eq!(
            std::mem::take(&mut *to_pooler.lock().unwrap()),
            [true, false]
        );
    }
}

#[test]
fn tcp_settings_have_the_names_and_units_of_libpq() {
    let config = |settings: &str| {
        let url = format!("postgres://ann@db.example/jobs?{settings}");
        connector(&url, &[]).unwrap().config
    };
    let usual = config("");
    let set = config("tcp_user_timeout=7000&keepalives_count=5");
    assert_eq!(set.get_tcp_user_timeout().unwrap().as_secs(), 7);
    assert_eq!(set.get_keepalives_retries(), Some(5));
    let zero = config("tcp_user_timeout=0&keepalives_count=0");
    assert_eq!(zero.get_tcp_user_timeout(), usual.get_tcp_user_timeout());
    assert_eq!(
        zero.get_keepalives_retries(),
        usual.get_keepalives_retries()
    );
    for name in ["tcp_user_timeout", "keepalives_count"] {
        let text = error(&format!("postgres://ann@db.example/jobs?{name}=7s"), &[]);
        assert!(text.contains(name), "{text}");
    }
}

/// A file that is removed on drop.
fn file(text: &str, mode: u32) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    fs::write(&file, text).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
    file
}
