//! The cost of starting a host, printed for information: no times are asserted.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::sandbox_guest::{echo, smallest};
use crate::support::worker::TIMEOUT;
use crate::support::{Host, rouse_binary, scratch};

/// The same module with this many additional bytes, which the compiler ignores.
fn padded(module: Vec<u8>, bytes: usize) -> Vec<u8> {
    let mut section = vec![7];
    section.extend(b"padding");
    section.resize(bytes.max(8), 0x5a);
    let mut padded = module;
    padded.push(0);
    let mut left = section.len();
    while left > 0x7f {
        padded.push(0x80 | (left & 0x7f) as u8);
        left >>= 7;
    }
    padded.push(left as u8);
    padded.extend(section);
    padded
}

/// CPU time of all ended child processes of this process, and of their children.
fn cpu_of_children() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    #[expect(unsafe_code, reason = "the standard library has no getrusage")]
    // SAFETY: a plain system call that fills the value that it is given.
    let usage = unsafe {
        assert_eq!(
            libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr()),
            0
        );
        usage.assume_init()
    };
    let time = |it: libc::timeval| {
        Duration::from_secs(it.tv_sec as u64) + Duration::from_micros(it.tv_usec as u64)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Starts a host in a folder with this many modules, and prints the cost.
fn start(folder: &Path, cached: &str) {
    let (before, started) = (cpu_of_children(), Instant::now());
    let mut command = Command::new(rouse_binary());
    command
        .args(["serve", "--no-queue", "--http", "127.0.0.1:0"])
        .current_dir(folder)
        .env("ROUSE_CACHE_DIR", folder.join("cache"))
        .env("ROUSE_INVOKE_TOKEN", "0123456789abcdef0123456789abcdef")
        .env_remove("DATABASE_URL");
    let host = Host::spawn(command);
    host.line(TIMEOUT, |line| line.contains("module serves"));
    let first = started.elapsed();
    let timeout = Duration::from_secs(600);
    let loaded = host.line(timeout, |line| line.contains("modules loaded"));
    let all = started.elapsed();
    let output = host.stop();
    assert!(loaded.contains("refused=0"), "{output}");
    let counts = loaded.split_once(" refused=").expect("asserted above").1;
    println!(
        "{cached}: first {first:.2?}, all {all:.2?}, CPU of host and compilers {:.2?}; refused={counts}",
        cpu_of_children() - before
    );
}

#[test]
#[ignore = "measures; run it alone on a quiet machine, with an optimised host: -- --ignored --nocapture print_the_cost_of_a_start"]
fn print_the_cost_of_a_start() {
    let small: fn(&str) -> Vec<u8> = |handler| echo(handler, "1");
    for (count, module, bytes) in [
        (1000, smallest as fn(&str) -> Vec<u8>, 0),
        (1000, small, 0),
        (100, small, 20 << 20),
    ] {
        let folder = scratch("many");
        fs::create_dir(folder.join("handlers-wasm")).unwrap();
        fs::write(folder.join("rouse.toml"), "").unwrap();
        let mut size = 0;
        for n in 0..count {
            let module = padded(module(&format!("test.echo-{n:04}")), bytes);
            size = module.len();
            fs::write(folder.join(format!("handlers-wasm/{n:04}.wasm")), module).unwrap();
        }
        println!("{count} modules of {size} bytes");
        // This start brings the files into memory.
        start(&folder, "without cached code");
        start(&folder, "with cached code");
        fs::remove_dir_all(folder).unwrap();
    }
}
