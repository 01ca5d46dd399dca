//! The control groups this process is in, of either version: what they limit, and whether the kernel killed for it.
//!
//! A limit may be set on the process's own group or on any above it, as far as they are visible here: a container sees its
//! own part of the tree. The two versions have other file names and other habits: the second counts what happened below a
//! group in the group too, the first does not.

use std::path::{Path, PathBuf};

/// What a group limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limited {
    /// Bytes of memory.
    Memory,
    /// Processes and threads.
    Pids,
}

impl Limited {
    fn controller(self) -> &'static str {
        match self {
            Limited::Memory => "memory",
            Limited::Pids => "pids",
        }
    }

    fn file(self, unified: bool) -> &'static str {
        match (self, unified) {
            (Limited::Memory, true) => "memory.max",
            (Limited::Memory, false) => "memory.limit_in_bytes",
            (Limited::Pids, _) => "pids.max",
        }
    }
}

/// A limit, and the file that says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// How much.
    pub value: u64,
    /// Where it is set.
    pub file: PathBuf,
}

/// A group of this process and those above it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Chain {
    /// Version 2, the one hierarchy of all controllers.
    unified: bool,
    /// Controllers of a hierarchy of version 1.
    controllers: Vec<String>,
    /// The process's own first.
    directories: Vec<PathBuf>,
}

/// All groups of this process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Groups(Vec<Chain>);

/// Reads the number of a limit; `None` if it is none.
fn parse_limit(text: &str) -> Option<u64> {
    // Version 1 has no word for "unlimited": it is the largest number of whole pages.
    text.trim().parse().ok().filter(|v| *v < 1 << 62)
}

/// Reads one counter of a file that has a name and a number a line.
fn parse_counter(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

impl Groups {
    /// Those of this process; none where the kernel or the container shows none.
    pub fn own() -> Groups {
        let read = |file| std::fs::read_to_string(file).unwrap_or_default();
        Groups::parse(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
    }

    /// From the texts of /proc/self/cgroup and /proc/self/mountinfo.
    fn parse(own: &str, mounts: &str) -> Groups {
        let chain = |mount: &str| -> Option<Chain> {
            // ID PARENT DEVICE ROOT MOUNTPOINT OPTIONS [TAGS] - TYPE SOURCE SUPEROPTIONS
            let (place, kind) = mount.split_once(" - ")?;
            let place: Vec<&str> = place.split(' ').collect();
            let (root, at) = (*place.get(3)?, Path::new(place.get(4)?));
            let kind: Vec<&str> = kind.split(' ').collect();
            let unified = match *kind.first()? {
                "cgroup2" => true,
                "cgroup" => false,
                _ => return None,
            };
            let controllers: Vec<String> = kind.get(2)?.split(',').map(str::to_string).collect();
            // HIERARCHY:CONTROLLERS:PATH
            let path = own.lines().find_map(|l| {
                let mut parts = l.splitn(3, ':');
                let (number, names, path) = (parts.next()?, parts.next()?, parts.next()?);
                let names = || names.split(',').all(|n| controllers.iter().any(|c| c == n));
                let fits = if unified { number == "0" } else { number != "0" && names() };
                fits.then_some(path)
            })?;
            // A container's mount begins somewhere below; a group that is not below it is not visible.
            let below = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
            let mine = at.join(below);
            let directories = mine.ancestors().take_while(|d| d.starts_with(at)).map(Path::to_path_buf).collect();
            Some(Chain { unified, controllers, directories })
        };
        Groups(mounts.lines().filter_map(chain).collect())
    }

    fn of(&self, what: Limited) -> impl Iterator<Item = &Chain> {
        self.0.iter().filter(move |c| c.unified || c.controllers.iter().any(|n| n == what.controller()))
    }

    /// Whether there is a group that could limit it, and whose limits can be read.
    pub fn know(&self, what: Limited) -> bool {
        self.of(what).any(|c| c.directories.iter().any(|d| d.join(what.file(c.unified)).exists()))
    }

    /// The least limit that counts for this process.
    pub fn least(&self, what: Limited) -> Option<Limit> {
        let all = self.of(what).flat_map(|c| c.directories.iter().map(|d| d.join(what.file(c.unified))));
        let read = |file: PathBuf| {
            let value = parse_limit(&std::fs::read_to_string(&file).ok()?)?;
            Some(Limit { value, file })
        };
        all.filter_map(read).min_by_key(|l| l.value)
    }

    /// What was killed for want of memory until now.
    pub fn kills(&self) -> Kills {
        let counts = self.of(Limited::Memory).flat_map(|c| c.directories.iter().map(|d| Count::read(c.unified, d)));
        Kills { counts: counts.flatten().collect(), machine: machine_kills(), groups: self.clone() }
    }
}

fn machine_kills() -> u64 {
    std::fs::read_to_string("/proc/vmstat").ok().and_then(|t| parse_counter(&t, "oom_kill")).unwrap_or(0)
}

/// What one group has counted.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Count {
    unified: bool,
    directory: PathBuf,
    /// Processes killed for want of memory.
    killed: u64,
    /// How often the group's own limit, or one below it, was reached and nothing could be freed; version 2 only.
    reached: u64,
}

impl Count {
    fn read(unified: bool, directory: &Path) -> Option<Count> {
        let file = if unified { "memory.events" } else { "memory.oom_control" };
        let text = std::fs::read_to_string(directory.join(file)).ok()?;
        let killed = parse_counter(&text, "oom_kill")?;
        let reached = parse_counter(&text, "oom").unwrap_or(0);
        Some(Count { unified, directory: directory.into(), killed, reached })
    }
}

/// What was killed for want of memory until some moment.
#[derive(Debug, Clone)]
pub struct Kills {
    /// A process's own group first.
    counts: Vec<Count>,
    machine: u64,
    groups: Groups,
}

impl Kills {
    /// What the kernel has killed for since then, in words; `None` if it has killed nothing.
    pub fn since(&self) -> Option<String> {
        let now: Vec<(&Count, Count)> =
            self.counts.iter().filter_map(|c| Some((c, Count::read(c.unified, &c.directory)?))).collect();
        // The own group is the first of each chain: those above count their other groups too.
        let own = |c: &Count| self.groups.0.iter().any(|chain| chain.directories.first() == Some(&c.directory));
        if !now.iter().any(|(then, now)| own(now) && now.killed > then.killed) {
            // Groups that do not count, as the root of a machine: it may have been another's process, which is said.
            let other = self.counts.is_empty() && machine_kills() > self.machine;
            return other
                .then(|| "meanwhile the kernel has killed processes of this machine for want of memory".into());
        }
        // Counted by the group whose limit it is and by those above it; by the first version nowhere.
        let reached = now.iter().find(|(then, now)| now.reached > then.reached);
        let limit = match reached {
            Some((_, group)) => {
                let file = group.directory.join(Limited::Memory.file(true));
                std::fs::read_to_string(&file).ok().and_then(|t| parse_limit(&t)).map(|value| Limit { value, file })
            }
            None if now.iter().any(|(_, c)| !c.unified) => self.groups.least(Limited::Memory),
            None => None,
        };
        let why = match limit {
            Some(Limit { value, file }) => {
                let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                format!("the control group's {name} of {value} bytes is reached ({}): raise it", file.display())
            }
            None => {
                "the memory of the machine, or a limit that is not visible here, is used up: leave more free".into()
            }
        };
        Some(format!("the kernel kills for want of memory; {why}, or ask for less (WCCL_HBM_BYTES, fewer ranks)"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of groups as files.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Tree {
            let at = std::env::temp_dir().join(format!("wccl-groups-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&at).unwrap();
            Tree(at)
        }

        fn write(&self, file: &str, text: &str) {
            let file = self.0.join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }

        fn groups(&self, own: &str, mounts: &str) -> Groups {
            Groups::parse(own, &mounts.replace("AT", &self.0.display().to_string()))
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const V2: &str = "24 1 0:21 / /proc rw - proc proc rw
30 24 0:26 / AT rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
    const V1: &str = "31 24 0:27 / AT/systemd rw - cgroup cgroup rw,name=systemd
32 24 0:28 /docker/abc AT/memory rw - cgroup cgroup rw,memory
33 24 0:29 /docker/abc AT/pids rw - cgroup cgroup rw,pids
34 24 0:30 / AT/unified rw - cgroup2 cgroup2 rw";

    #[test]
    fn limits_and_counters_are_read() {
        assert_eq!(parse_limit("104857600\n"), Some(104_857_600));
        for none in ["max\n", "9223372036854771712\n", "", "x"] {
            assert_eq!(parse_limit(none), None, "{none}");
        }
        let v2 = "low 0\nhigh 0\nmax 12\noom 2\noom_kill 3\noom_group_kill 0\n";
        assert_eq!((parse_counter(v2, "oom"), parse_counter(v2, "oom_kill")), (Some(2), Some(3)));
        let v1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n";
        assert_eq!((parse_counter(v1, "oom"), parse_counter(v1, "oom_kill")), (None, Some(7)));
    }

    #[test]
    fn the_least_limit_of_the_group_and_those_above_it_counts() {
        let tree = Tree::new("least");
        tree.write("a/memory.max", "2000\n");
        tree.write("a/b/memory.max", "max\n");
        tree.write("a/b/pids.max", "77\n");
        let groups = tree.groups("0::/a/b\n", V2);
        let limit = |value, file: &str| Some(Limit { value, file: tree.0.join(file) });
        assert_eq!(groups.least(Limited::Memory), limit(2000, "a/memory.max"));
        assert_eq!(groups.least(Limited::Pids), limit(77, "a/b/pids.max"));
        assert!(groups.know(Limited::Memory) && groups.know(Limited::Pids));
    }

    /// The first version has a hierarchy for each controller, and a container's mount begins at its own group.
    #[test]
    fn limits_of_the_first_version_are_found_in_a_container() {
        let tree = Tree::new("first");
        tree.write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        tree.write("memory/job/memory.limit_in_bytes", "4096000\n");
        tree.write("pids/pids.max", "55\n");
        let own = "4:memory:/docker/abc/job\n3:pids:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n";
        let groups = tree.groups(own, V1);
        let limit = |value, file: &str| Some(Limit { value, file: tree.0.join(file) });
        assert_eq!(groups.least(Limited::Memory), limit(4_096_000, "memory/job/memory.limit_in_bytes"));
        assert_eq!(groups.least(Limited::Pids), limit(55, "pids/pids.max"));
        assert_eq!(Groups::parse("", ""), Groups::default());
        assert!(!Groups::default().know(Limited::Pids));
    }

    #[test]
    fn a_kill_for_memory_names_the_limit_of_the_second_version() {
        let tree = Tree::new("kill2");
        let events = |oom, kills| format!("low 0\nhigh 0\nmax 9\noom {oom}\noom_kill {kills}\n");
        // Set on the group above, which is where the limit was reached.
        tree.write("a/memory.max", "104857600\n");
        tree.write("a/b/memory.max", "max\n");
        tree.write("a/memory.events", &events(0, 0));
        tree.write("a/b/memory.events", &events(0, 0));
        let kills = tree.groups("0::/a/b\n", V2).kills();
        assert_eq!(kills.since(), None);
        // A process of a neighbour, which the group above counts too, says nothing of ours.
        tree.write("a/memory.events", &events(1, 1));
        assert_eq!(kills.since(), None);
        tree.write("a/b/memory.events", &events(0, 1));
        let said = kills.since().unwrap();
        let file = tree.0.join("a/memory.max");
        assert!(said.contains(&format!("memory.max of 104857600 bytes is reached ({})", file.display())), "{said}");
        // Killed, and no limit of a group was reached: the machine's own memory.
        let kills = tree.groups("0::/a/b\n", V2).kills();
        tree.write("a/b/memory.events", &events(0, 2));
        assert!(kills.since().unwrap().contains("the memory of the machine"), "{:?}", kills.since());
    }

    #[test]
    fn a_kill_for_memory_names_the_limit_of_the_first_version() {
        let tree = Tree::new("kill1");
        let control = |kills| format!("oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n");
        tree.write("memory/memory.limit_in_bytes", "33554432\n");
        tree.write("memory/memory.oom_control", &control(4));
        let groups = tree.groups("4:memory:/docker/abc\n", V1);
        let kills = groups.kills();
        assert_eq!(kills.since(), None);
        tree.write("memory/memory.oom_control", &control(5));
        let said = kills.since().unwrap();
        assert!(said.contains("memory.limit_in_bytes of 33554432 bytes is reached"), "{said}");
    }
}
