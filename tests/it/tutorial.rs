//! The tutorial, followed from its first block to its last, as a reader with several terminals would.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::page::{Block, assert_shown, blocks, is_as_shown, repository, run_sql};
use crate::support::worker::{TIMEOUT, guests_dir};
use crate::support::{
    CommandOutput, Host, TestDb, code_cache, free_port, rouse_binary, scratch, skip,
};

const PAGE: &str = "docs/tutorial.md";

/// Programs that run in their own terminals until they are stopped.
const PROGRAMS: [&str; 3] = ["rouse dev", "rouse serve", "python3 -u -m http.server"];

fn read(file: &str) -> String {
    fs::read_to_string(repository().join(file)).unwrap_or_else(|why| panic!("{file}: {why}"))
}

/// The output of the last block, or the program that it has started.
enum Printed {
    Text(String),
    Program(&'static str),
}

/// A reader who follows the page.
struct Reader {
    /// The working directory and the variables of the terminals, as left by `cd` and `export`.
    state: PathBuf,
    /// The folder in which the page starts.
    folder: PathBuf,
    /// Words of the page, with their replacements here.
    replacements: Vec<(&'static str, String)>,
    running: BTreeMap<&'static str, Host>,
    /// Lines of running programs that the page has shown, one entry for each occurrence.
    seen: Vec<(&'static str, String)>,
    printed: Printed,
}

impl Reader {
    /// A reader in a folder that looks like the clone after its handlers were built.
    fn new(db: &TestDb) -> Self {
        let folder = scratch("tutorial").join("rouse");
        let handlers = folder.join("handlers-wasm");
        fs::create_dir_all(&handlers).unwrap();
        fs::copy(
            guests_dir().join("text_stats.wasm"),
            handlers.join("text_stats.wasm"),
        )
        .unwrap();
        let login = |user: &str| db.url().replacen("rouse@", &format!("{user}@"), 1);
        let replacements = vec![
            ("postgres://postgres@localhost/shop", db.url()),
            (
                "postgres://shop_host:change-me-too@localhost/shop",
                login("shop_host:change-me-too"),
            ),
            (
                "postgres://shop_app:change-me@localhost/shop",
                login("shop_app:change-me"),
            ),
            ("127.0.0.1:8420", format!("127.0.0.1:{}", free_port())),
            ("8000", free_port().to_string()),
        ];
        Self {
            state: folder.with_file_name("state"),
            folder,
            replacements,
            running: BTreeMap::new(),
            seen: Vec::new(),
            printed: Printed::Text(String::new()),
        }
    }

    /// The text of a block, with the servers and ports of this test.
    fn localized(&self, text: &str) -> String {
        let replacements = self.replacements.iter();
        replacements.fold(text.to_owned(), |text, (word, replacement)| {
            text.replace(word, replacement)
        })
    }

    /// A shell that continues where the last one ended.
    fn shell(&self, script: &str) -> Command {
        let mut shell = Command::new("sh");
        let bin = rouse_binary();
        let bin = bin.parent().unwrap().display();
        let path = format!("{bin}:{}", std::env::var("PATH").unwrap());
        shell.env("PATH", path).env("ROUSE_CACHE_DIR", code_cache());
        for foreign in [
            "DATABASE_URL",
            "ROUSE_LOG",
            "ROUSE_DATA_DIR",
            "PGHOST",
            "PGDATABASE",
            "CARGO_TARGET_DIR",
        ] {
            shell.env_remove(foreign);
        }
        let resume = match self.state.exists() {
            true => format!(". '{}'\ncd \"$PWD\"\n", self.state.display()),
            false => String::new(),
        };
        let script = format!("set -e\n{resume}{script}");
        shell.args(["-c", &script]).stdin(Stdio::null());
        shell.current_dir(&self.folder);
        shell
    }

    /// Runs commands to their end.
    fn runs(&mut self, script: &str) {
        let script = format!(
            "exec 2>&1\n{script}\nexport PWD\nexport -p > '{}'\n",
            self.state.display()
        );
        let ran = CommandOutput::run(&mut self.shell(&script));
        ran.exits(0);
        self.printed = Printed::Text(ran.stdout);
        self.prepare_crate();
    }

    /// Gives the new crate the dependency versions of this repository, which need no network, and a target folder that
    /// is kept between runs.
    fn prepare_crate(&self) {
        let krate = self.folder.with_file_name("shop").join("invoice");
        if !krate.exists() || krate.join("Cargo.lock").exists() {
            return;
        }
        fs::copy(repository().join("Cargo.lock"), krate.join("Cargo.lock")).unwrap();
        let test_binary = std::env::current_exe().unwrap();
        let target = test_binary.ancestors().nth(3).unwrap().join("new-crate");
        fs::create_dir_all(&target).unwrap();
        symlink(target, krate.join("target")).unwrap();
    }

    /// Starts a long-running program in its own terminal.
    fn starts(&mut self, program: &'static str, command: &str) {
        let host = Host::spawn(self.shell(&format!("exec {command}")));
        assert!(
            self.running.insert(program, host).is_none(),
            "{program} is already running"
        );
        self.printed = Printed::Program(program);
    }

    /// Presses Ctrl-C.
    fn stops(&mut self, program: &str) {
        let host = self.running.remove(program).expect("a running program");
        self.seen.retain(|(of, _)| *of != program);
        host.signal(libc::SIGINT);
        let (status, output) = host.exit(TIMEOUT);
        assert!(status.success(), "{status}: {output}");
        self.printed = Printed::Text(output);
    }

    fn console(&mut self, block: &Block) {
        if block.text.contains("cargo build --workspace") {
            return assert_commands_match_other_pages(block);
        }
        let text = self.localized(&block.text);
        let last = text.trim_end().lines().last().unwrap();
        let Some(program) = PROGRAMS
            .into_iter()
            .find(|program| last.starts_with(program))
        else {
            return self.runs(&text);
        };
        let before = text.strip_suffix(&format!("{last}\n")).unwrap();
        if !before.is_empty() {
            self.runs(before);
        }
        self.starts(program, last);
    }

    /// Asserts that the lines of a block were printed by the commands before it, or by the program that the page names.
    fn sees(&mut self, block: &Block) {
        let block = &Block {
            text: self.localized(&block.text),
            kind: block.kind.clone(),
            before: block.before.clone(),
            line: block.line,
        };
        let named = PROGRAMS.into_iter().find(|program| {
            block.before.contains(&format!("`{program}`")) && self.running.contains_key(program)
        });
        let program = match (&self.printed, named) {
            (_, Some(program)) => program,
            (Printed::Program(program), None) => *program,
            (Printed::Text(text), None) => return assert_shown(text, block),
        };
        for shown in block.text.lines() {
            self.seen.push((program, shown.to_owned()));
            let times = self
                .seen
                .iter()
                .filter(|it| *it == &(program, shown.to_owned()));
            self.waits_for(program, shown, times.count());
        }
    }

    /// Waits until a program has printed a matching line this many times.
    fn waits_for(&self, program: &str, shown: &str, times: usize) {
        let host = &self.running[program];
        let until = Instant::now() + TIMEOUT;
        loop {
            let output = host.output();
            let printed = output.lines().filter(|line| is_as_shown(line, shown));
            if printed.count() >= times {
                return;
            }
            assert!(
                Instant::now() < until,
                "{program} has not printed {shown:?} {times} times:\n{output}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Writes the file that is named in the sentence before the block.
    fn writes(&self, block: &Block) {
        let names = block.before.split('`').skip(1).step_by(2);
        let file = names
            .filter(|name| name.ends_with(&format!(".{}", extension(&block.kind))))
            .last()
            .unwrap_or_else(|| panic!("no file is named before line {}", block.line));
        let text = self.localized(&block.text);
        fs::write(self.folder.with_file_name("shop").join(file), &text).unwrap();
        // The lines printed by a denial match those on the page.
        if let (Printed::Text(printed), true) = (&self.printed, block.before.contains("message")) {
            assert!(printed.contains(&text), "{text} is missing in {printed}");
        }
    }

    /// The database of this part of the page.
    fn url(&self) -> String {
        match self.running.get("rouse dev") {
            Some(dev) => {
                let line = dev.line(TIMEOUT, |line| line.starts_with("postgres: "));
                line.trim_start_matches("postgres: ").to_owned()
            }
            None => CommandOutput::run(&mut self.shell("printf %s \"$ADMIN_URL\"")).stdout,
        }
    }

    async fn follows(&mut self, block: &Block) {
        if let Some((_, rest)) = block.before.split_once("Press Ctrl-C in the terminal of `") {
            let program = rest.split('`').next().unwrap();
            self.stops(program);
        }
        match block.kind.as_str() {
            "console" => self.console(block),
            "text" => self.sees(block),
            "rust" | "toml" => self.writes(block),
            "sql" => {
                let client = crate::support::connect(&self.url()).await;
                run_sql(&client, block).await;
            }
            other => panic!("line {}: unknown kind of block: {other}", block.line),
        }
    }
}

fn extension(kind: &str) -> &str {
    match kind {
        "rust" => "rs",
        other => other,
    }
}

/// The commands that would build this tree again must also appear on the other pages and in the tests.
fn assert_commands_match_other_pages(block: &Block) {
    for line in block.text.lines() {
        let other_page = match line {
            "cargo build --workspace --bin rouse" | "export PATH=$PWD/target/debug:$PATH" => {
                "README.md"
            }
            "cargo xtask handlers" => "CONTRIBUTING.md",
            "rustup target add wasm32-wasip2" => "host/src/cli/new/README.md.in",
            other => panic!("no other page is compared with: {other}"),
        };
        assert!(
            read(other_page).contains(line),
            "{line} is missing in {other_page}"
        );
    }
}

fn is_installed(program: &str) -> bool {
    let mut command = Command::new(program);
    let ran = command.arg("--version").stdout(Stdio::null()).status();
    ran.is_ok_and(|status| status.success())
}

#[tokio::test]
async fn the_tutorial_works_from_its_first_block_to_its_last() {
    if let Some(missing) = ["python3", "curl"].into_iter().find(|it| !is_installed(it)) {
        skip(&format!("there is no {missing} on this machine"));
        return;
    }
    let db = TestDb::unmigrated().await;
    let mut reader = Reader::new(&db);
    for block in blocks(PAGE) {
        eprintln!("line {}", block.line);
        reader.follows(&block).await;
    }
    let left: Vec<_> = reader.running.keys().copied().collect();
    assert_eq!(
        left,
        ["python3 -u -m http.server"],
        "programs that the page leaves running"
    );
}
