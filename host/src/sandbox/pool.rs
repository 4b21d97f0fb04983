//! The number of attempts that this machine can hold at once.

use std::fs;
use std::path::Path;

/// The maximum for one process: the figures below were measured up to this number.
const ATTEMPTS_MAX: usize = 10_000;

/// Memory mappings of a live instance: 2 for its stack, and up to 4 for each of its memories (initial part, growth,
/// out of bounds, guard). Measured by `host/examples/attempt_cost.rs`, `held`: 5.8 for a Rust guest.
const MAPS_PER_STACK: usize = 2;
const MAPS_PER_MEMORY: usize = 4;

/// The divisor of the share of a process's mappings that is reserved for everything else: 1/13.
const MAPS_SPARE_SHARE: usize = 13;

/// Address space of one memory: 4 GiB, which the compiler assumes to be reserved, and the guard behind it.
const MEMORY_RESERVED_BYTES: usize = (4 << 30) + (32 << 20);

/// Address space for the memories of all attempts, which must be contiguous: of a process's 128 TiB, the largest free
/// range starts below the program, which Linux places at two thirds (85 TiB).
const RESERVED_BYTES_MAX: usize = 80 << 40;

/// The memory of a small guest: 1.1 MiB of linear memory, its stack and its tables.
const ATTEMPT_BYTES_MIN: usize = 2 << 20;

/// Used if the machine does not report its memory.
const MEMORY_BYTES_UNKNOWN: usize = 4 << 30;

/// The resources of the machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Machine {
    /// Memory mappings that one process may have.
    pub(super) maps_max: Option<usize>,
    /// Memory of the machine, or of the control group if that is less, in bytes.
    pub(super) memory_bytes: Option<usize>,
}

/// The number of attempts that fit, and their memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PoolSize {
    pub(super) attempts_max: usize,
    pub(super) memory_bytes_total_max: usize,
    /// Why there are fewer attempts than requested.
    pub(super) clamp: Option<&'static str>,
}

impl Machine {
    /// Reads the machine's resources; unknown resources are not limits.
    pub(super) fn read() -> Self {
        let total = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
            let kibibytes: usize = line.split_whitespace().nth(1)?.parse().ok()?;
            Some(kibibytes << 10)
        });
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let group = group_limit(Path::new("/sys/fs/cgroup"), &groups);
        Self {
            maps_max: number(Path::new("/proc/sys/vm/max_map_count")),
            memory_bytes: [total, group].into_iter().flatten().min(),
        }
    }

    /// How many of the `wanted` attempts fit if each may have `memories` memories. `memory_bytes_total`: the operator's
    /// setting for the memory of all attempts together.
    pub(super) fn fit(
        self,
        wanted: usize,
        memories: usize,
        memory_bytes_total: Option<usize>,
    ) -> PoolSize {
        let maps_per_attempt = MAPS_PER_STACK + MAPS_PER_MEMORY * memories;
        let memory_bytes_total_max = memory_bytes_total
            .unwrap_or_else(|| self.memory_bytes.unwrap_or(MEMORY_BYTES_UNKNOWN) / 4 * 3);
        let limits = [
            (
                ATTEMPTS_MAX,
                "one host runs at most 10,000 attempts at once",
            ),
            (
                self.maps_max.map_or(usize::MAX, |maps| {
                    (maps - maps / MAPS_SPARE_SHARE) / maps_per_attempt
                }),
                "vm.max_map_count is too low; raise it with sysctl, or lower module_memories_max in rouse.toml",
            ),
            (
                RESERVED_BYTES_MAX / (memories * MEMORY_RESERVED_BYTES),
                "the address space of a process is too small; lower module_memories_max in rouse.toml",
            ),
            (
                memory_bytes_total_max / ATTEMPT_BYTES_MIN,
                "there is too little memory",
            ),
        ];
        let (max, why) = limits
            .into_iter()
            .min_by_key(|(max, _)| *max)
            .expect("the list of limits is not empty");
        let attempts_max = wanted.min(max).max(1);
        PoolSize {
            attempts_max,
            memory_bytes_total_max,
            clamp: (attempts_max < wanted).then_some(why),
        }
    }
}

fn number(path: &Path) -> Option<usize> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The smallest memory limit of the control groups that a process is in, in bytes: that of its own group, or of those
/// around it. `root`: the path at which they are mounted. `groups`: the contents of `/proc/self/cgroup`, with a line
/// `0::/path` in version 2 and `5:memory:/path` in version 1. In a container, the paths may be those of the host: then
/// only the group at the root is found, which is the container's.
fn group_limit(root: &Path, groups: &str) -> Option<usize> {
    let limits = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let (mount, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        let group = mount.join(path.trim_start_matches('/'));
        let around = group.ancestors().take_while(|dir| dir.starts_with(&mount));
        around.filter_map(|dir| number(&dir.join(file))).min()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_limit_is_the_smallest_of_the_groups_around_the_process() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("it has a folder")).expect("create it");
            fs::write(path, text).expect("write it");
        };
        let limit = |groups| group_limit(root.path(), groups);
        write("system.slice/rouse.service/memory.max", "max\n");
        assert_eq!(limit("0::/system.slice/rouse.service\n"), None);
        write("system.slice/memory.max", "3000000\n");
        assert_eq!(limit("0::/system.slice/rouse.service\n"), Some(3_000_000));
        write("system.slice/rouse.service/memory.max", "2000000\n");
        assert_eq!(limit("0::/system.slice/rouse.service\n"), Some(2_000_000));
        // A container that sees the path of its group on the host.
        assert_eq!(limit("0::/docker/12ab\n"), None);
        write("memory.max", "1000000\n");
        assert_eq!(limit("0::/docker/12ab\n"), Some(1_000_000));
        write("memory/jobs/memory.limit_in_bytes", "500000\n");
        let both = "12:pids:/jobs\n5:cpu,memory:/jobs\n0::/\n";
        assert_eq!(limit(both), Some(500_000));
        assert_eq!(limit(""), None);
    }

    const LARGE: Machine = Machine {
        maps_max: Some(1_000_000),
        memory_bytes: Some(64 << 30),
    };

    #[test]
    fn grant_the_requested_number_if_it_fits() {
        let size = LARGE.fit(64, 4, None);
        assert_eq!(size.attempts_max, 64);
        assert_eq!(size.memory_bytes_total_max, 48 << 30);
        assert_eq!(size.clamp, None);
    }

    #[test]
    fn name_the_tightest_limit() {
        let size = LARGE.fit(20_000, 1, None);
        assert_eq!(size.attempts_max, 10_000);
        assert!(size.clamp.is_some_and(|why| why.contains("10,000")));

        let few_maps = Machine {
            maps_max: Some(6_500),
            ..LARGE
        };
        let size = few_maps.fit(20_000, 1, None);
        assert_eq!(size.attempts_max, 1_000);
        assert!(size.clamp.is_some_and(|why| why.contains("max_map_count")));
        let size = few_maps.fit(20_000, 4, None);
        assert_eq!(size.attempts_max, 333);

        let size = LARGE.fit(20_000, 4, None);
        assert_eq!(size.attempts_max, 5_080);
        assert!(size.clamp.is_some_and(|why| why.contains("address space")));

        let size = LARGE.fit(20_000, 1, Some(100 << 20));
        assert_eq!(size.attempts_max, 50);
        assert!(size.clamp.is_some_and(|why| why.contains("memory")));
    }

    #[test]
    fn the_smallest_machine_runs_one_attempt() {
        let tiny = Machine {
            maps_max: Some(1),
            memory_bytes: Some(1 << 20),
        };
        assert_eq!(tiny.fit(8, 4, None).attempts_max, 1);
    }

    #[test]
    fn read_the_resources_of_this_machine() {
        assert!(Machine::read().memory_bytes.is_some_and(|bytes| bytes > 0));
    }
}
