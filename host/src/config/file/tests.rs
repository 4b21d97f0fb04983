//! Tests of rouse.toml: which keys it may have, and what they mean.

use super::*;
use crate::config::Environment;
use crate::job::narrowest;
use crate::sandbox::{HttpScheme, Instances, Manifest, StateQuota};
use crate::setting::{Overlays, Settable, Setting};
use crate::worker::Policy;

fn read(text: &str) -> Result<File, String> {
    let dir = std::env::temp_dir().join(format!("rouse-config-{}", rand::random::<u64>()));
    std::fs::create_dir(&dir).unwrap();
    let path = dir.join("rouse.toml");
    std::fs::write(&path, text).unwrap();
    let read = File::read(Some(&path))
        .map(|(file, _)| file)
        .map_err(|e| e.to_string());
    std::fs::remove_dir_all(&dir).unwrap();
    read
}

#[test]
fn every_key_may_be_left_out() {
    let worker = read("").unwrap().worker("here".into());
    assert_eq!(worker.poll_max, Duration::from_secs(2));
    assert!(worker.notify && worker.queues.is_empty());
}

#[test]
fn the_page_has_every_key_and_no_other() {
    let page = include_str!("../../../../docs/reference/configuration.md");
    let (_, block) = page.split_once("```toml\n").expect("the page has a block");
    let (block, _) = block.split_once("\n```").expect("which ends");
    let file = read(block).unwrap();
    let keys: toml::Table = block.parse().unwrap();
    assert!(keys.len() > 15, "the whole block was read: {}", keys.len());
    assert_eq!(file.worker("other".into()).worker_id, "mail-1");
    for table in [
        "",
        "limits",
        "handlers.x",
        "handlers.x.state",
        "handlers.x.limits",
    ] {
        let head = match table {
            "" => String::new(),
            table => format!("[{table}]\n"),
        };
        let why = read(&format!("{head}no_such_key = 1")).unwrap_err();
        let (_, known) = why.split_once("expected one of ").expect("it names all");
        let known: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
        assert!(known.len() > 2, "{why}");
        // `concurrency` is refused, with what to do instead.
        for key in known.into_iter().filter(|key| *key != "concurrency") {
            let is_in_the_block = block.lines().any(|line| {
                line.starts_with(&format!("{key} = "))
                    || line.contains(&format!("[{key}"))
                    || line.contains(&format!(".{key}]"))
            });
            let has_a_row = page.contains(&format!("\n| `{key}` |"));
            assert!(is_in_the_block || has_a_row, "{key} of [{table}]");
        }
    }
    let misspelt = block.replacen("poll_max", "pol_max", 1);
    assert!(read(&misspelt).unwrap_err().contains("pol_max"));
}

/// `UPDATE_DOCS=1 cargo test -p rouse-host --lib` writes them.
#[test]
fn the_tables_of_the_page_are_those_of_the_code() {
    fn rows<T: Settable>() -> Vec<String> {
        T::SETTINGS.iter().map(Setting::row).collect()
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/configuration.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let mut wanted = page.clone();
    for (name, rows) in [
        ("host", host_settings::rows()),
        ("handlers", rows::<Policy>()),
        ("limits", rows::<Limits>()),
        ("state", rows::<StateQuota>()),
    ] {
        let head = "| Key | Default | Bounds | Meaning |\n|---|---|---|---|";
        let table = format!("{head}\n{}", rows.join("\n"));
        let (start, end) = (
            format!("<!-- {name}: from the code -->\n"),
            "\n<!-- end -->",
        );
        let (before, rest) = wanted.split_once(&start).expect("the table has a start");
        let (_, after) = rest.split_once(end).expect("the table has an end");
        wanted = format!("{before}{start}\n{table}\n{end}{after}");
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    } else {
        assert!(
            page == wanted,
            "{} is not what the code says; write it with UPDATE_DOCS=1 cargo test -p rouse-host --lib",
            path.display()
        );
    }
}

#[test]
fn defaults_are_within_their_bounds() {
    fn check<T: Settable>() {
        for setting in T::SETTINGS {
            let mut table = Overlay::<T>::default();
            table.insert(setting, setting.default());
            assert_eq!(table.check("default"), Ok(()));
        }
    }
    check::<Policy>();
    check::<Limits>();
    check::<StateQuota>();
}

#[test]
fn the_origin_of_a_value_is_the_narrowest_table_that_sets_it() {
    let file = read(
        "[limits]\nmemory_mb = 64\nsteps = 7\n[handlers.\"*\"]\nlease = \"5s\"\n[handlers.\"my.*\".limits]\nmemory_mb = 16\n\
         [handlers.\"my.busy\".limits]\ncpu = \"2s\"\n[handlers.\"my.*\".state]\nkeys_max = 7",
    )
    .unwrap();
    fn origin<T: Settable>(tables: &Overlays<'_, T>, key: &str) -> Option<String> {
        let mut settings = T::SETTINGS.iter();
        settings.find(|setting| setting.key == key)?.origin(tables)
    }
    let limits = file.limits_of("my.busy");
    for (key, table) in [
        ("cpu", Some("[handlers.\"my.busy\".limits]")),
        ("memory_mb", Some("[handlers.\"my.*\".limits]")),
        (
            "memory_retry_mb",
            Some("2 × memory_mb of [handlers.\"my.*\".limits]"),
        ),
        ("steps", Some("[limits]")),
        ("handles", None),
    ] {
        assert_eq!(origin(&limits, key).as_deref(), table, "{key}");
    }
    let other = origin(&file.limits_of("other"), "memory_retry_mb");
    assert_eq!(other.as_deref(), Some("2 × memory_mb of [limits]"));
    let policy = file.policy_of("my.busy");
    let lease = origin(&policy, "lease");
    assert_eq!(lease.as_deref(), Some("[handlers.\"*\"]"));
    assert_eq!(origin(&policy, "grace"), None);
    let state = origin(&file.state_of("my.busy"), "keys_max");
    assert_eq!(state.as_deref(), Some("[handlers.\"my.*\".state]"));
    let state = file.table_of("my.busy", "state");
    assert_eq!(state.as_deref(), Some("[handlers.\"my.*\".state]"));
}

#[test]
fn a_limit_that_no_host_enforces_is_refused_with_what_to_do() {
    let why = read("[handlers.\"image.*\"]\nconcurrency = 2").unwrap_err();
    for part in ["concurrency = 2", "no host enforces", "`slots`"] {
        assert!(why.contains(part), "{part}: {why}");
    }
}

#[test]
fn directories_are_relative_to_the_file() {
    let file = read(
        "[handlers.\"image.*\"]\nlease = \"30s\"\ndirs = [{ dir = \"photos\", at = \"/in\" }, { dir = \"/out\", at = \"/out\", mode = \"read-write\" }]",
    )
    .unwrap();
    let sandbox = file.sandbox(Path::new("/etc/rouse"), 4);
    let dirs: Vec<_> = sandbox
        .grants
        .0
        .iter()
        .map(|grant| grant.dir.clone())
        .collect();
    assert_eq!(
        dirs,
        [PathBuf::from("/etc/rouse/photos"), PathBuf::from("/out")]
    );
}

#[test]
fn a_directory_has_one_quota_and_a_handler_sees_one_directory_at_a_path() {
    let folder = tempfile::tempdir().unwrap();
    let at = |of: &str| folder.path().join(of).display().to_string();
    std::fs::create_dir(at("one")).unwrap();
    std::os::unix::fs::symlink(at("one"), at("same")).unwrap();
    let granted = |handler: &str, dir: &str, at: &str, more: &str| {
        format!("[[handlers.\"{handler}\".dirs]]\ndir = \"{dir}\"\nat = \"{at}\"\n{more}\n")
    };
    let one = |handler: &str, at_guest: &str, quota: &str| {
        let more = format!("mode = \"read-write\"\n{quota}");
        granted(handler, &at("one"), at_guest, &more)
    };
    let same = granted(
        "b",
        &at("same"),
        "/else",
        "mode = \"read-write\"\nbytes_max = 7",
    );

    let error = read(&(one("a.*", "/out", "bytes_max = 8") + &same)).unwrap_err();
    for part in [
        "handlers.\"a.*\".dirs at /out",
        "handlers.\"b\".dirs at /else",
        "quota",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(read(&(one("a", "/out", "") + &same)).is_err());
    assert!(read(&(one("a", "/out", "bytes_max = 7") + &same)).is_ok());
    // A read-only entry has no quota.
    let reads = granted("a", &at("one"), "/in", "");
    assert!(read(&(reads.clone() + &same)).is_ok());

    let two = granted("*", "two", "/in", "");
    let error = read(&(reads.clone() + &two)).unwrap_err();
    for part in ["handlers.\"*\".dirs", "handlers.\"a\".dirs", "/in"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(read(&(granted("a", "two", "/in", "") + &reads)).is_err());
    let writes = granted("*", &at("one"), "/in", "mode = \"read-write\"");
    assert!(read(&(reads.clone() + &writes)).is_err());
    let as_all = granted("*", &at("same"), "/in", "");
    assert!(read(&(reads.clone() + &as_all)).is_ok(), "the same twice");
    assert!(read(&(granted("b", "two", "/in", "") + &reads)).is_ok());
}

#[test]
fn no_directory_lies_in_another_that_handlers_may_change() {
    let folder = tempfile::tempdir().unwrap();
    let at = |of: &str| folder.path().join(of).display().to_string();
    std::fs::create_dir_all(at("work/in")).unwrap();
    std::os::unix::fs::symlink("/etc", at("work/link")).unwrap();
    let granted = |handler: &str, dir: &str, place: &str, mode: &str| {
        let dir = at(dir);
        format!(
            "[[handlers.\"{handler}\".dirs]]\ndir = \"{dir}\"\nat = \"{place}\"\nmode = \"{mode}\"\n"
        )
    };
    let outer = granted("a", "work", "/work", "read-write");
    for beneath in ["work/in", "work/later", "work/in/..", "work/link"] {
        for handler in ["a", "b"] {
            for mode in ["read", "read-write"] {
                let inner = granted(handler, beneath, "/in", mode);
                let error = read(&(outer.clone() + &inner)).unwrap_err();
                for part in [&at("work"), &at(beneath), "at /work", "at /in", "beside"] {
                    assert!(error.contains(part), "{part}: {error}");
                }
                // In either order.
                let error = read(&(inner + &granted("z", "work", "/work", "read-write")));
                assert!(error.unwrap_err().contains("beside"), "{beneath}");
            }
        }
    }
    let same = granted("b", "work", "/else", "read");
    assert!(read(&(outer.clone() + &same)).is_ok(), "the same directory");
    let beside = granted("b", "workshop", "/in", "read-write");
    assert!(read(&(outer + &beside)).is_ok());
    let reads = granted("a", "work", "/work", "read");
    let within = granted("b", "work/in", "/in", "read-write");
    assert!(
        read(&(reads + &within)).is_ok(),
        "no handler can replace it"
    );
}

#[test]
fn a_handler_sees_a_directory_under_a_path_in_one_spelling() {
    let at = |at: &str| {
        read(&format!(
            "[handlers.x]\ndirs = [{{ dir = \"a\", at = {at:?} }}]"
        ))
    };
    for place in ["/", "/out", "/out/a.b", "/..out", "/ö"] {
        assert!(at(place).is_ok(), "{place}");
    }
    for place in [
        "",
        ".",
        "out",
        "../x",
        "//",
        "//out",
        "/out/",
        "/out//in",
        "/./out",
        "/out/../out",
        "/..",
    ] {
        let error = at(place).unwrap_err();
        assert!(error.contains(&format!("at = {place:?}")), "{error}");
        assert!(error.contains("like \"/photos\""), "{error}");
    }
}

#[test]
fn requests_and_secrets_are_granted_by_handler() {
    let file = read(
        "[secrets.KEY]\nenv = \"PATH\"\n[[handlers.\"mail.*\".http]]\nhosts = [\"api.example.com\", \"*.example.org\"]\n[handlers.\"mail.send\"]\nsecrets = [{ name = \"KEY\", hosts = [\"api.example.com\"], headers = [\"Authorization\"] }]",
    )
    .unwrap();
    let folder = Path::new("/etc/rouse");
    let sandbox = file.sandbox(folder, 4);
    let grant = &sandbox.http_grants[0];
    assert_eq!(grant.handler, "mail.*");
    assert_eq!(grant.schemes, [HttpScheme::Https]);
    assert!(!grant.private && grant.ports.is_empty() && grant.methods.is_empty());
    let grant = &sandbox.secret_grants[0];
    assert_eq!((grant.handler.as_str(), grant.body), ("mail.send", false));
    assert_eq!(grant.headers, ["authorization"]);
    let secrets = file.secrets(folder, Environment, None).unwrap();
    assert!(secrets.0.contains_key("KEY"));
    assert!(!format!("{secrets:?}").contains("/bin"));
    let secrets_of = |file: &File, of| file.secrets(folder, Environment, Some(of)).unwrap();
    assert_eq!(secrets_of(&file, "mail.send"), secrets);
    assert!(secrets_of(&file, "mail.read").0.is_empty());

    let file = read("[secrets.KEY]\nenv = \"ROUSE_NOBODY_SETS_THIS\"").unwrap();
    assert!(secrets_of(&file, "mail.send").0.is_empty());
    let error = file.secrets(folder, Environment, None).unwrap_err();
    let text = format!("{error:#}");
    assert!(
        text.contains("secrets.KEY") && text.contains("ROUSE_NOBODY_SETS_THIS"),
        "{text}"
    );
}

#[test]
fn a_secret_that_handlers_sign_with_needs_no_host_and_must_be_a_key() {
    let text = "[secrets.KEY]\nfile = \"key\"\n[handlers.\"http.deliver\"]\nsecrets = [{ name = \"KEY\", sign = true }]";
    let file = read(text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let grant = &file.sandbox(folder.path(), 4).secret_grants[0];
    assert!(grant.sign && grant.hosts.is_empty() && !grant.body);
    let secrets = |key: &str| {
        let path = folder.path().join("key");
        std::fs::write(&path, key).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, mode).unwrap();
        file.secrets(folder.path(), Environment, None)
    };
    assert!(secrets("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").is_ok());
    let error = format!("{:#}", secrets("whsec_no base64").unwrap_err());
    assert!(
        error.contains("secrets.KEY") && error.contains("base64"),
        "{error}"
    );
}

#[test]
fn instances_are_those_of_the_narrowest_table_that_sets_them() {
    let file = read(
        "[handlers.\"*\"]\ninstances = \"reuse\"\n[handlers.noop]\nlease = \"5s\"\n[handlers.\"a.*\"]\ninstances = \"fresh\"",
    )
    .unwrap();
    let sandbox = file.sandbox(Path::new("."), 4);
    let instances: Vec<_> = sandbox.instances.into_iter().collect();
    assert_eq!(
        instances,
        [
            ("*".into(), Instances::Reuse),
            ("a.*".into(), Instances::Fresh),
        ]
    );
}

#[test]
fn each_limit_is_that_of_the_narrowest_table_that_sets_it() {
    let file = read(
        "[limits]\nsteps = 7\nmemory_mb = 64\n[handlers.\"my.*\".limits]\nmemory_mb = 16\n\
         [handlers.\"my.busy\".limits]\ncpu = \"2s\"\n[handlers.\"my.busy\"]\nlease = \"5s\"",
    )
    .unwrap();
    let sandbox = file.sandbox(Path::new("."), 4);
    let limits = sandbox.limits("my.busy");
    assert_eq!((limits.memory_bytes, limits.steps), (16 << 20, 7));
    assert_eq!(limits.cpu, Duration::from_secs(2));
    assert_eq!(limits.more_memory(), Some(32 << 20));
    assert_eq!(sandbox.limits("my.other").cpu, Duration::from_secs(600));
    assert_eq!(sandbox.limits("noop").memory_bytes, 64 << 20);
}

#[test]
fn memory_of_a_table_sets_the_memory_of_the_next_attempt() {
    let text = "[limits]\nmemory_mb = 128\nmemory_retry_mb = 256\n[handlers.image.limits]\nmemory_mb = 512";
    let sandbox = read(text).unwrap().sandbox(Path::new("."), 4);
    assert_eq!(sandbox.limits("image").more_memory(), Some(1 << 30));
    let firm = read(&format!("{text}\nmemory_retry_mb = 512")).unwrap();
    let limits = firm.sandbox(Path::new("."), 4).limits("image");
    assert_eq!(limits.more_memory(), None);
}

#[test]
fn lease_timeout_retries_and_instances_are_those_of_the_narrowest_table_that_sets_them() {
    let file = read(
        "[handlers.\"mail.*\"]\ntimeout = \"10m\"\ninstances = \"reuse\"\nretry_max = \"1m\"\n\
         [handlers.\"mail.send\"]\nmax_attempts = 7\n[[handlers.\"mail.send\".http]]\nhosts = [\"a.example\"]",
    )
    .unwrap();
    let manifest = r#"{"handlers": [{"name": "mail.send"}]}"#;
    let manifest = Manifest::parse(manifest).unwrap();
    let policy = Policy::resolve(&manifest.handlers[0], &file.overrides());
    assert_eq!(policy.timeout, Duration::from_secs(600));
    assert_eq!(policy.retry.max, Duration::from_secs(60));
    assert_eq!(policy.retry.max_attempts, 7);
    assert_eq!(policy.lease, Duration::from_secs(60), "the module's own");
    let instances = file.sandbox(Path::new("."), 4).instances;
    assert_eq!(narrowest(&instances, "mail.send"), Some(&Instances::Reuse));
}

#[test]
fn the_narrowest_table_with_variables_or_settings_counts() {
    let file = read(
        "[handlers.\"*\".env]\nA = \"1\"\n[handlers.\"*\".settings]\nwide = true\n\
         [handlers.\"image.*\"]\nfine_clocks = true\n[handlers.\"image.plain\"]\nfine_clocks = false\n\
         [handlers.\"image.*\".settings]\nat = 2026-01-01\nlist = [1, 2.5]\n[handlers.\"image.*\".settings.deep]\nx = \"y\"",
    )
    .unwrap();
    let sandbox = file.sandbox(Path::new("."), 4);
    assert_eq!(sandbox.env["*"]["A"], "1");
    assert!(!sandbox.env.contains_key("image.*"));
    assert_eq!(
        sandbox.handler_settings["image.*"],
        serde_json::json!({"at": "2026-01-01", "list": [1, 2.5], "deep": {"x": "y"}})
    );
    let clocks = ["image.crop", "image.plain", "noop"];
    let clocks = clocks.map(|name| narrowest(&sandbox.fine_clocks, name).copied());
    assert_eq!(clocks, [Some(true), Some(false), None]);
}

#[test]
fn state_is_granted_by_its_table_and_each_size_is_that_of_the_narrowest_that_sets_it() {
    let file = read(
        "[handlers.\"mail.*\".state]\nbytes_max = 100000\n[handlers.\"mail.send\"]\nlease = \"5s\"\n[handlers.\"mail.read\".state]\nkeys_max = 7",
    )
    .unwrap();
    let state = file.sandbox(Path::new("."), 4).state;
    let sizes = |name: &str| {
        let quota = narrowest(&state, name);
        quota.map(|quota| (quota.keys_max, quota.bytes_max))
    };
    let found = ["mail.send", "mail.read", "noop"].map(sizes);
    assert_eq!(found, [Some((1_000, 100_000)), Some((7, 100_000)), None]);
}

#[test]
fn invalid_hosts_are_refused_by_name_when_the_file_is_read() {
    let long = format!("{}.example", "a".repeat(64));
    let longest = [&*"a".repeat(63); 4].join(".");
    for host in [
        "a..b",
        ".a",
        "a.b..",
        "",
        ".",
        "*.",
        "*..a",
        "*.*.a",
        "a.*",
        "a.example/",
        "a.example:443",
        "https://a.example",
        "a.example ",
        "a.example?x",
        "-a.example",
        "a-.example",
        "ü.example",
        "[::1",
        "::1%eth0",
        "1.2.3",
        "0x7f.1",
        &long,
        &longest,
    ] {
        for text in [
            format!("[[handlers.x.http]]\nhosts = [\"b.example\", \"{host}\"]"),
            format!(
                "[secrets.K]\nenv = \"A\"\n[handlers.x]\nsecrets = [{{ name = \"K\", hosts = [\"{host}\"], body = true }}]"
            ),
        ] {
            let error = read(&text).expect_err(host);
            assert!(error.contains(&format!("the host {host:?}:")), "{error}");
        }
    }
}

#[test]
fn a_mistake_is_named_with_its_key() {
    for (text, part) in [
        ("quues = [\"a\"]", "quues"),
        ("slots = 0", "slots"),
        ("poll_max = \"5 minutes\"", "poll_max"),
        ("poll_max = \"soon\"", "\"soon\" is not a duration such as"),
        ("queues = []", "queues is empty"),
        ("queue = \"no\"", "queue"),
        ("invoke_max = 10001", "invoke_max"),
        ("invoke_payload_bytes_max = 1", "invoke_payload_bytes_max"),
        ("queues = [\"a b\"]", "\"a b\" is not a name"),
        ("tags = [\"\"]", "\"\" is not a name"),
        ("compilations_max = 0", "compilations_max"),
        ("compile_cpu = \"500ms\"", "compile_cpu"),
        ("compile_memory_mb = 10", "compile_memory_mb"),
        ("module_core_instances_max = 3", "module_core_instances_max"),
        ("module_memories_max = 65", "module_memories_max"),
        ("module_tables_max = 1", "module_tables_max"),
        ("pin = \"loose\"", "pin"),
        ("trusted_keys = [\"short\"]", "trusted_keys"),
        ("worker_id = \"a b\"", "worker_id"),
        ("[handlers.x]\nlease = \"1s\"", "lease"),
        ("memory_mb = 16", "memory_mb"),
        ("[limits]\nmemory_mb = 0", "limits.memory_mb"),
        (
            "[limits]\nmemory_retry_mb = 64",
            "limits.memory_retry_mb must be at least memory_mb, which is 128, not 64",
        ),
        ("[handlers.x.limits]\nsteps = 100001", "limits.steps"),
        ("[handlers.x.limits]\ncpu = \"0s\"", "limits.cpu"),
        ("[handlers.x]\ninstances = \"keep\"", "keep"),
        ("[handlers.x.state]\nkeys_max = 10001", "state.keys_max"),
        (
            "[handlers.x.state]\nvalue_bytes_max = 0",
            "state.value_bytes_max",
        ),
        ("[handlers.x.state]\nkeys = 1", "keys"),
        ("[[handlers.x.http]]\nhosts = []", "grants nothing"),
        ("[[handlers.x.http]]\nhosts = [\"a:443\"]", "a:443"),
        (
            "[[handlers.x.http]]\nhosts = [\"a\"]\nmethods = [\"get\"]",
            "\"get\"",
        ),
        (
            "[[handlers.x.http]]\nhosts = [\"a\"]\nschemes = [\"ftp\"]",
            "ftp",
        ),
        ("[secrets.K]\nenv = \"A\"\nfile = \"b\"", "secrets.K"),
        (
            "[handlers.x]\nsecrets = [{ name = \"K\", hosts = [\"a\"], body = true }]",
            "no [secrets.K]",
        ),
        (
            "[secrets.K]\nenv = \"A\"\n[handlers.x]\nsecrets = [{ name = \"K\", hosts = [\"a\"] }]",
            "K is sent nowhere",
        ),
        (
            "[secrets.K]\nenv = \"A\"\n[handlers.x]\nsecrets = [{ name = \"K\", headers = [\"a\"], sign = true }]",
            "K is sent nowhere: it needs hosts",
        ),
        ("http_timeout = \"0s\"", "http_timeout"),
        ("[limits]\nhttp_bytes = 1", "limits.http_bytes"),
        ("[handlers.\"ima*\"]\nlease = \"5s\"", "ima*"),
        (
            "[handlers.x]\ndirs = [{ dir = \"a\", at = \"/a\", mode = \"append\" }]",
            "append",
        ),
        (
            "[handlers.x]\ndirs = [{ dir = \"a\", at = \"/a\", bytes_max = 5 }]",
            "mode = \"read-write\"",
        ),
        (
            "[[handlers.x.dirs]]\ndir = \"a\"\nat = \"/a\"\nmode = \"read-write\"\nfiles_max = 0",
            "files_max",
        ),
        ("[handlers.x.env]\n\"A=B\" = \"c\"", "A=B"),
        ("[handlers.x.env]\nA = 1", "string"),
        ("[handlers.x.settings]\na = nan", "JSON cannot express it"),
        ("[handlers.x]\nsettings = 1", "settings"),
        (
            "poll_min = \"3s\"",
            "poll_min, the shortest wait, is longer than poll_max, which is 2s",
        ),
        (
            "[handlers.\"a.*\"]\nretry_max = \"1s\"\n[handlers.\"a.b\"]\nretry_initial = \"2s\"",
            "handlers.\"a.b\".retry_initial must be at most retry_max, which is 1s, not 2s",
        ),
        (
            "[handlers.\"a.*\".state]\nbytes_max = 10\n[handlers.\"a.b\".state]\nvalue_bytes_max = 11",
            "handlers.\"a.b\".state.value_bytes_max must be at most bytes_max, which is 10, not 11",
        ),
        (
            "[handlers.\"a.*\".limits]\nmemory_mb = 512\n[handlers.\"a.b\".limits]\nmemory_retry_mb = 256",
            "handlers.\"a.b\".limits.memory_retry_mb must be at least memory_mb, which is 512, not 256",
        ),
    ] {
        let message = read(text).unwrap_err();
        assert!(message.contains(part), "{text}: {message}");
    }
}

#[test]
fn a_value_of_another_type_is_refused_with_what_is_expected() {
    for (text, part) in [
        ("poll_max = 5", "such as \"90s\" or \"5m\""),
        ("[limits]\ncpu = 10", "a duration with its unit, in quotes"),
        (
            "[secrets.API_KEY]\nenv = \"A\"\n[handlers.x]\nsecrets = [\"API_KEY\"]",
            "a table such as { name = \"KEY\", hosts",
        ),
        ("[secrets]\nAPI_KEY = 1", "where the secret is read from"),
        ("[handlers.x]\nhttp = [\"a\"]", "a table such as { hosts"),
        (
            "[handlers.x.http]\nhosts = [\"a\"]",
            "a table in double brackets, [[…]]",
        ),
        ("[handlers.x.secrets]\nname = \"A\"", "double brackets"),
        ("[handlers.x.dirs]\ndir = \"A\"", "double brackets"),
        (
            "[handlers.mail.bulk.send.limits]\ncpu = \"2s\"",
            "in quotes: [handlers.\"mail.bulk.send\"], not [handlers.mail.bulk.send]",
        ),
        (
            "[[handlers.x.http]]\nhosts = [\"a.example:8080\"]",
            "its port goes into `ports`",
        ),
        (
            "[[handlers.x.http]]\nhosts = [\"http://a.example\"]",
            "its scheme into `schemes`",
        ),
    ] {
        let message = read(text).unwrap_err();
        assert!(message.contains(part), "{text}: {message}");
        assert!(!message.contains("struct"), "{text}: {message}");
    }
    let quoted = read("[handlers.\"mail.send\".limts]\ncpu = \"2s\"").unwrap_err();
    assert!(!quoted.contains("in quotes"), "{quoted}");
}

#[test]
fn errors_never_contain_a_secret() {
    for text in [
        "[secrets.KEY]\nvalue = \"hunter2hunter2\"",
        "[secrets]\nKEY = { secret = \"hunter2hunter2\" }",
        "[secrets]\nKEY = [\"hunter2hunter2\"]",
        "[secrets]\nKEY = hunter2hunter2",
        "secrets = \"hunter2hunter2\"",
        "secrets.KEY = \"hunter2hunter2",
        "[secrets.KEY]\nenv = [\"hunter2hunter2\"]",
        "[handlers.x]\nsecrets = [{ name = \"KEY\", value = \"hunter2hunter2\" }]",
        "[handlers.x]\nsecrets = \"hunter2hunter2, expected\"",
        "[[handlers.x.secrets]]\nname = \"KEY\"\nvalue = \"hunter2hunter2\"",
    ] {
        let message = read(text).unwrap_err();
        assert!(!message.contains("hunter2"), "{text}: {message}");
        assert!(
            message.contains("line ") || message.contains("secrets."),
            "{text}: {message}"
        );
    }
}

#[test]
fn a_secret_in_the_file_itself_is_not_repeated() {
    let message = read("[secrets]\nAPI_KEY = \"hunter2hunter2\"").unwrap_err();
    let words = "secrets.API_KEY says where the secret is read from, and is not the secret itself";
    assert!(message.contains(words), "{message}");
    assert!(!message.contains("hunter2"), "{message}");
}

#[test]
fn a_named_file_must_exist() {
    let message = File::read(Some(Path::new("/nowhere/rouse.toml"))).unwrap_err();
    assert!(message.to_string().contains("/nowhere/rouse.toml"));
}

#[test]
fn a_table_binds_its_names_to_one_module_or_to_several() {
    let folder = tempfile::tempdir().unwrap();
    let read = |text: &str| {
        let path = folder.path().join("rouse.toml");
        std::fs::write(&path, text).unwrap();
        File::read(Some(&path)).map(|(file, beside)| file.sandbox(&beside, 1))
    };
    let digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let settings = read(&format!(
        "[handlers.\"mail.send\"]\nmodule = \"mail.wasm\"\nversion_min = \"1.2.0\"\n\
         [handlers.\"mail.*\"]\nmodule = [\"mail.wasm\", \"sha256:{digest}\"]\n"
    ));
    let settings = settings.expect("a valid file");
    let bound = |name: &str| {
        let (_, to) = settings.bound(name).expect("it is bound");
        to.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(bound("mail.send"), ["mail.wasm"]);
    assert_eq!(
        bound("mail.read"),
        ["mail.wasm", &format!("sha256:{digest}")]
    );
    assert_eq!(settings.versions_min["mail.send"].to_string(), "1.2.0");
    for (line, words) in [
        ("module = \"mail\"", "does not name a module"),
        ("module = []", "or a list of such"),
        ("module = 7", "or a list of such"),
        ("module = [\"mail.wasm\", \"sha256:0\"]", "is not a sha256"),
        ("version_min = \"new\"", "is not a version such as"),
    ] {
        let error = read(&format!("[handlers.x]\n{line}\n")).expect_err("it is refused");
        assert!(error.to_string().contains(words), "{line}: {error}");
    }
}
