//! `rouse handlers types`: each language checks what it prints, and its calls enqueue jobs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rouse::worker::Settings;
use serde_json::{Value, json};

use crate::sandbox_guest::guest;
use crate::support::libraries::{Libraries, NPM, PIP};
use crate::support::worker::{TestWorker, guests_dir, watched};
use crate::support::{CommandOutput, TestDb, rouse_without_database, scratch, skip};

/// What `--lang rust` prints for the handlers of `handlers_dir`, as a part of this program.
#[allow(
    dead_code,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "it is generated, and this program uses a part of it"
)]
mod generated {
    include!("types/generated.rs");
}

const NODE: Libraries = Libraries {
    folder: "types/node",
    lock: "package-lock.json",
    install: NPM,
};

const PYTHON: Libraries = Libraries {
    folder: "types/python",
    lock: "requirements.txt",
    install: PIP,
};

/// Shapes that generated code has to get right, and names that attack it.
fn hostile() -> Vec<u8> {
    let texts = [
        "*/ x",
        "\"\"\"",
        "\\",
        "'",
        "`",
        "a\nb",
        "\u{2028}",
        "class",
        "self",
        "type",
        "2fa",
        "",
        "-",
        "a,b",
        "é",
        "${x}",
        "//",
        "Self",
        "a b",
        "a-b",
        "@ts-ignore",
        "type: ignore",
        "mypy: ignore-errors",
        "```",
    ];
    let properties: serde_json::Map<String, Value> = texts
        .iter()
        .map(|text| {
            (
                (*text).to_owned(),
                json!({"type": "string", "description": text, "enum": texts}),
            )
        })
        .collect();
    let shapes = json!({
        "type": "object",
        "required": ["tree", "shape", "nothing", "maybe"],
        "properties": {
            "tree": {"$ref": "#/$defs/tree"},
            "shape": {"oneOf": [
                {"type": "object", "required": ["kind", "radius"], "properties": {"kind": {"const": "circle"}, "radius": {"type": "number"}}},
                {"type": "object", "title": "a */ square", "required": ["kind"], "properties": {"kind": {"const": "square"}, "side": {"type": "integer"}}}]},
            "nothing": {"type": "null"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
            "mixed": {"type": ["string", "integer", "array"], "items": {"type": "object", "properties": {"a": true}}},
            "map": {"type": "object", "additionalProperties": {"type": "array", "items": {"enum": [1, 2, null]}}},
            "mode": {"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]},
            "flag": {"const": true},
            "both": {"allOf": [{"type": "object"}, {"required": ["x"]}]},
            "result": {"type": "object", "required": ["status"], "properties": {"status": {"type": "integer"}},
                "oneOf": [{"required": ["body"], "properties": {"body": {"type": "string"}, "extra": {"type": "string"}}},
                          {"properties": {"body": {"type": "string"}, "extra": {"type": "null"}}}]},
            "pair": {"type": "array", "prefixItems": [{"type": "string"}]},
            "forest": {"$ref": "#/$defs/forest"}
        },
        "$defs": {
            "tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "all": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "required": ["all"]},
            "forest": {"type": "array", "items": {"$ref": "#/$defs/forest"}}
        }
    });
    let handler = |name: &str, input: Value, output: Value| json!({"name": name, "description": texts.concat(), "input_schema": input, "output_schema": output});
    let named =
        json!({"type": "object", "properties": properties, "required": texts[..9].to_vec()});
    let manifest = json!({"handlers": [
        handler("bad.names", named, json!(true)),
        handler("bad.shapes", shapes, json!({"type": ["string", "null"]})),
        // Names that would collide in generated code.
        handler("a.b", json!({"type": "string"}), json!({"$ref": "#/$defs/payload", "$defs": {"payload": {"type": "integer"}}})),
        handler("a-b", json!(false), json!({"type": "array", "items": {"type": "string"}})),
        handler("a.b-payload", json!(true), json!(true)),
        handler("job", json!(true), json!(true)),
        handler("result", json!(true), json!(true)),
        handler("import", json!(true), json!(true)),
    ]});
    guest(
        &manifest.to_string(),
        "(call $return_ok (local.get $payload) (local.get $payload_len))",
    )
}

/// A folder with the shipped handlers and the hostile ones.
fn handlers_dir() -> PathBuf {
    let folder = scratch("types").join("handlers");
    fs::create_dir(&folder).unwrap();
    for name in ["text_stats.wasm", "email_send.wasm", "http_fetch.wasm"] {
        fs::copy(guests_dir().join(name), folder.join(name)).unwrap();
    }
    fs::write(folder.join("hostile.wasm"), hostile()).unwrap();
    folder
}

fn types(handlers: &Path, lang: &str) -> String {
    let handlers = handlers.to_str().unwrap();
    let folder = scratch("types-config");
    let output = folder.join("output");
    let args = ["handlers", "types", "--handlers", handlers, "--lang", lang];
    let printed = rouse_without_database(&args, &folder);
    assert_eq!(printed.code, 0, "{}", printed.stderr);
    let written = rouse_without_database(
        &[&args[..], &["--output", output.to_str().unwrap()]].concat(),
        &folder,
    );
    assert_eq!((written.code, written.stdout.as_str()), (0, ""));
    assert_eq!(
        fs::read_to_string(output).unwrap(),
        printed.stdout,
        "it prints the same each time"
    );
    printed.stdout
}

async fn ran(mut command: Command) -> CommandOutput {
    tokio::task::spawn_blocking(move || CommandOutput::run(&mut command))
        .await
        .unwrap()
}

/// Sets the variables from which clients read the address of the test's database.
fn connects(command: &mut Command, db: &TestDb) {
    let address = db.address();
    command
        .env(
            "DATABASE_URL",
            format!("postgres://{}@/{}", address.user, address.database),
        )
        .env("PGHOST", &address.directory)
        .env_remove("PGPORT");
}

#[tokio::test]
async fn typescript_checks_the_types_and_a_typed_call_returns_a_typed_result() {
    let libraries = match NODE.installed() {
        Ok(libraries) => libraries,
        Err(why) => return skip(&format!("no TypeScript: {why}")),
    };
    let folder = scratch("types-ts");
    fs::write(folder.join("jobs.ts"), types(&handlers_dir(), "ts")).unwrap();
    fs::write(folder.join("package.json"), r#"{"type": "module"}"#).unwrap();
    fs::write(
        folder.join("tsconfig.json"),
        r#"{"compilerOptions": {"strict": true, "noUncheckedIndexedAccess": true, "module": "nodenext", "target": "es2022",
            "outDir": "out", "types": ["node"], "skipLibCheck": true}}"#,
    )
    .unwrap();
    fs::write(
        folder.join("main.ts"),
        r#"
        import pg from "pg";
        import { badShapes, result, textStats, type BadShapesPayload } from "./jobs.js";
        const client = new pg.Client({ connectionString: process.env["DATABASE_URL"] });
        await client.connect();
        const tree = { all: [{ all: [] }] };
        const shapes: BadShapesPayload = { tree, shape: { kind: "square", side: 2 }, nothing: null, maybe: null, mode: "c", mixed: 7 };
        // @ts-expect-error: there is no such mode
        shapes.mode = "d";
        shapes.result = { status: 200, body: "ok", extra: 1 };
        // @ts-expect-error: the body is a text
        shapes.result = { status: 200, body: 1 };
        // @ts-expect-error: the text is missing
        void (() => textStats(client, {}));
        void badShapes;
        await client.query("BEGIN");
        const job = await textStats(client, { text: "one two" }, { priority: "high", tags: [], maxAttempts: 2, lease: "30 seconds" });
        await client.query("COMMIT");
        let found = await result(client, job);
        while (found === null) {
            await new Promise((done) => setTimeout(done, 20));
            found = await result(client, job);
        }
        const words: number = found.words;
        console.log("words", words);
        await client.end();
        "#,
    )
    .unwrap();
    std::os::unix::fs::symlink(libraries.join("node_modules"), folder.join("node_modules"))
        .unwrap();
    let mut tsc = Command::new("node");
    tsc.arg("node_modules/typescript/bin/tsc")
        .current_dir(&folder);
    ran(tsc).await.exits(0);

    let db = TestDb::new().await;
    let (catalog, _modules) = watched(&["text_stats.wasm"]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    let mut node = Command::new("node");
    node.arg(folder.join("out/main.js"));
    connects(&mut node, &db);
    ran(node).await.exits(0).prints("words 2");
    worker.drain().await;
}

#[tokio::test]
async fn mypy_checks_the_types_and_a_typed_call_returns_a_typed_result() {
    let libraries = match PYTHON.installed() {
        Ok(libraries) => libraries,
        Err(why) => return skip(&format!("no mypy: {why}")),
    };
    let folder = scratch("types-py");
    fs::write(folder.join("jobs.py"), types(&handlers_dir(), "py")).unwrap();
    fs::write(
        folder.join("main.py"),
        r#"
import os
import time
from datetime import timedelta

import psycopg

import jobs

shapes: jobs.BadShapesPayload = {
    "tree": {"all": [{"all": []}]},
    "shape": {"kind": "square", "side": 2},
    "nothing": None,
    "maybe": None,
    "mode": "c",
}
shapes["mode"] = "d"  # type: ignore[typeddict-item]
invalid: jobs.TextStatsPayload = {}  # type: ignore[typeddict-item]

with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
    with connection.transaction():
        job = jobs.text_stats(connection, {"text": "one two"}, {"priority": "high", "tags": [], "lease": timedelta(seconds=30)})
    found = jobs.result(connection, job)
    while found is None:
        time.sleep(0.02)
        found = jobs.result(connection, job)
    words: int = found["words"]
    print("words", words)
"#,
    )
    .unwrap();
    let mut mypy = Command::new(libraries.join("venv/bin/mypy"));
    mypy.args(["--strict", "jobs.py", "main.py"])
        .current_dir(&folder);
    ran(mypy).await.exits(0);

    let db = TestDb::new().await;
    let (catalog, _modules) = watched(&["text_stats.wasm"]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    let mut python = Command::new(libraries.join("venv/bin/python"));
    python.arg("main.py").current_dir(&folder);
    connects(&mut python, &db);
    ran(python).await.exits(0).prints("words 2");
    worker.drain().await;
}

#[tokio::test]
async fn the_types_for_rust_compile_and_a_typed_call_returns_a_typed_result() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/it/types/generated.rs");
    let printed = types(&handlers_dir(), "rust");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(file, &printed).unwrap();
    }
    assert!(
        fs::read_to_string(file).unwrap() == printed,
        "{file} is not what `rouse handlers types --lang rust` prints: run this test with UPDATE_DOCS=1, and build again"
    );

    let db = TestDb::new().await;
    let mut client = db.client().await;
    let (catalog, _modules) = watched(&["text_stats.wasm"]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    let payload: generated::TextStatsPayload =
        serde_json::from_value(json!({"text": "one two"})).unwrap();
    let options = generated::EnqueueOptions {
        priority: Some("high"),
        lease: Some("30 seconds"),
        ..Default::default()
    };
    let transaction = client.transaction().await.unwrap();
    let job = generated::text_stats(&transaction, &payload, &options)
        .await
        .unwrap();
    assert_eq!(job.result(&transaction).await.unwrap(), None);
    transaction.commit().await.unwrap();
    let found = loop {
        match job.result(&client).await.unwrap() {
            Some(found) => break found,
            None => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    assert_eq!(found.words, 2);
    worker.drain().await;

    // Values keep their form.
    let shapes = json!({"tree": {"all": [{"all": []}]}, "shape": {"kind": "square", "side": 2}, "nothing": null, "maybe": null, "mode": "c"});
    let read: generated::BadShapesPayload = serde_json::from_value(shapes.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), shapes);
    let invalid =
        json!({"tree": {"all": []}, "shape": {"kind": "oval"}, "nothing": null, "maybe": null});
    assert!(serde_json::from_value::<generated::BadShapesPayload>(invalid).is_err());
}

#[tokio::test]
async fn the_types_for_go_are_go_and_the_schemas_are_json() {
    let handlers = handlers_dir();
    let go = types(&handlers, "go");
    for line in [
        "func TextStats(ctx context.Context, db Querier, payload TextStatsPayload, options *EnqueueOptions) (Job[TextStatsResult], error) {",
        "\tText string `json:\"text\"`",
    ] {
        assert!(go.contains(line), "{line}: {go}");
    }
    let schemas: Value = serde_json::from_str(&types(&handlers, "json-schema")).unwrap();
    assert_eq!(
        schemas["text.stats"]["payload"]["required"],
        json!(["text"])
    );
    // The code needs only an interface of pgx, which is written here: no module is fetched.
    let folder = scratch("types-go");
    let pgx = folder.join("pgx");
    fs::create_dir(&pgx).unwrap();
    for (file, text) in [
        (folder.join("jobs.go"), &*go),
        (
            folder.join("go.mod"),
            "module jobs\ngo 1.18\nrequire github.com/jackc/pgx/v5 v5.0.0\nreplace github.com/jackc/pgx/v5 => ./pgx\n",
        ),
        (
            pgx.join("go.mod"),
            "module github.com/jackc/pgx/v5\ngo 1.18\n",
        ),
        (
            pgx.join("pgx.go"),
            "package pgx\n\ntype Row interface{ Scan(dest ...any) error }\n",
        ),
    ] {
        fs::write(file, text).unwrap();
    }
    let mut vet = Command::new("go");
    vet.args(["vet", "."])
        .current_dir(&folder)
        .env("GOFLAGS", "-mod=mod")
        .env("GOPROXY", "off");
    match vet.output() {
        Ok(output) => assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => skip(&format!(
            "go does not start (apt-get install golang-go): {error}"
        )),
    }
}

#[test]
fn a_pattern_without_a_handler_is_an_error() {
    let handlers = handlers_dir();
    let args = [
        "handlers",
        "types",
        "no.*",
        "--lang",
        "ts",
        "--handlers",
        handlers.to_str().unwrap(),
    ];
    let refused = rouse_without_database(&args, &scratch("types-none"));
    assert_eq!(refused.code, 1);
    assert!(
        refused
            .stderr
            .contains("no handler of the folder is called no.*"),
        "{}",
        refused.stderr
    );
}
