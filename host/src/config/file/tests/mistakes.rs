//! Mistakes, and how their errors name them.

use std::path::Path;

use super::read;
use crate::config::File;

#[test]
fn errors_name_the_key() {
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
        ("promote_share = 0", "promote_share"),
        ("promote_share = 256", "promote_share"),
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
        (
            "[handlers.x]\nconcurrency = 0",
            "concurrency must be between 1 and 1000000, not 0",
        ),
        (
            "[handlers.\"x.*\"]\nconcurrency = 1000001",
            "concurrency must be between 1 and 1000000, not 1000001",
        ),
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
        ("[handlers.x.sql]\nstatements = \"all\"", "login"),
        ("[handlers.x.sql]\nlogin = { env = \"A\" }", "statements"),
        (
            "[handlers.x.sql]\nlogin = { env = \"A\" }\nstatements = \"some\"",
            "or \"all\"",
        ),
        (
            "[handlers.x.sql]\nlogin = { env = \"A\", file = \"b\" }\nstatements = \"all\"",
            "handlers.\"x\".sql: login needs one of url, env and file",
        ),
        (
            "[handlers.x.sql]\nlogin = { url = \"postgres://a:b@c/d\" }\nstatements = \"all\"",
            "the url has a password",
        ),
        (
            "[handlers.x.sql]\nlogin = { env = \"A\" }\nstatements = \"all\"\nconnections_max = 0",
            "sql.connections_max",
        ),
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
            "poll_min must be at most poll_max, which is 2s, not 3s",
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
fn a_value_of_another_type_is_rejected_with_the_expected_type() {
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
fn a_named_file_must_exist() {
    let message = File::read(Some(Path::new("/nowhere/rouse.toml"))).unwrap_err();
    assert!(message.to_string().contains("/nowhere/rouse.toml"));
}
