//! Facts of the machine and the process: identity, PCI and NUMA, affinity, granted variables and files, time, random
//! numbers, the log.

use std::io::Write;
use std::net::IpAddr;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};
use hw_bridge::os::patience::stopped_in_all;
use rustix::thread::CpuSet;

use crate::bindings::neuron::hw::{affinity, clock, config, files, identity, log, pci, random};
use crate::file::{NONBLOCK, contents};
use crate::imports::{Answer, Trap};
use crate::limits::{MASK_WORDS, byte_list};
use crate::policy::listed;
use crate::served::{FILES, GRANTED};
use crate::status::Status;
use crate::store::HostState;
use crate::tenant::own_cpus;

/// An address of this machine.
#[derive(Debug, Clone)]
pub(super) struct Address {
    /// Of the interface that carries it.
    pub name: String,
    pub ip: IpAddr,
    /// Number of the interface, if the address means nothing without.
    pub scope: u32,
    /// Whether the interface runs.
    pub runs: bool,
}

/// Addresses of the machine's interfaces.
///
/// # Errors
/// The kernel's; who asks says it, within the rate of the tenant for whom.
pub(super) fn addresses() -> std::io::Result<Vec<Address>> {
    let found = if_addrs::get_if_addrs()?;
    let all = found
        .into_iter()
        .map(|i| {
            let (ip, runs) = (i.ip(), i.is_oper_up());
            let scoped = matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
            let scope = if scoped { i.index.unwrap_or(0) } else { 0 };
            Address { name: i.name, ip, scope, runs }
        })
        .collect();
    Ok(all)
}

/// That loopback is down, with what to do, if it is by these addresses: in a network namespace that nobody has set up it has
/// none, and one that was taken down keeps its own but does not run.
pub(super) fn loopback_down(all: &[Address]) -> Option<&'static str> {
    let up = all.iter().any(|a| a.runs && (a.ip.is_loopback() || a.name == "lo"));
    (!up).then_some(
        "the loopback interface `lo` is down, so processes of this machine cannot reach one another over 127.0.0.1; bring it up in \
         this network namespace: `ip link set lo up`",
    )
}

fn words(set: &CpuSet) -> Vec<u64> {
    let mut words = vec![0u64; MASK_WORDS];
    for cpu in 0..CpuSet::MAX_CPU.min(MASK_WORDS * 64) {
        if set.is_set(cpu) {
            words[cpu / 64] |= 1 << (cpu % 64);
        }
    }
    words
}

/// Where a process runs, as far as it matters to who can be linked with whom.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    /// Boot id of the machine.
    boot: String,
    /// Inode of the network namespace. Links are made over abstract sockets, which are names of such a namespace: two
    /// processes of one user can be linked if and only if they share it, whatever else their containers have of their own.
    network: u64,
    /// Inode of the PID namespace, in which process numbers mean something.
    pids: u64,
}

impl Place {
    const BOOT: &str = "/proc/sys/kernel/random/boot_id";

    /// This process's.
    fn here() -> Result<Place, String> {
        let unknown = |path: &str, e: std::io::Error| {
            format!(
                "{path} cannot be read ({e}), and without it this server cannot be told from others; mount /proc here"
            )
        };
        let namespace = |path: &str| rustix::fs::stat(path).map(|s| s.st_ino).map_err(|e| unknown(path, e.into()));
        let boot = std::fs::read_to_string(Place::BOOT).map_err(|e| unknown(Place::BOOT, e))?;
        Ok(Place {
            boot: boot.trim().into(),
            network: namespace("/proc/self/ns/net")?,
            pids: namespace("/proc/self/ns/pid")?,
        })
    }

    /// The server: what differs in few digits comes first, where a hash of the text spreads it over all bits.
    fn server(&self) -> String {
        format!("{}/{}", self.network, self.boot)
    }

    fn process(&self, pid: u32, tenant: u64) -> String {
        format!("{}/{pid}/{tenant:x}", self.pids)
    }
}

impl HostState {
    fn placed(&mut self, tell: impl FnOnce(Place) -> String) -> Trap<Answer<String>> {
        Ok(Place::here().map(tell).map_err(|why| self.fail(Status::FAILURE, why)))
    }
}

impl identity::Host for HostState {
    fn host(&mut self) -> Trap<Answer<String>> {
        self.placed(|p| p.server())
    }

    fn machine(&mut self) -> Trap<Answer<String>> {
        self.placed(|p| p.boot)
    }

    fn name(&mut self) -> Trap<String> {
        Ok(rustix::system::uname().nodename().to_string_lossy().into_owned())
    }

    fn process(&mut self) -> Trap<Answer<String>> {
        // The tenant runtime is the process in the original's sense; its number tells two in one process apart.
        let tenant = self.tenant.number;
        let pid = self.client.as_ref().map_or_else(std::process::id, |c| c.owner.pid);
        self.placed(|p| p.process(pid, tenant))
    }

    fn shm_device(&mut self) -> Trap<u64> {
        Ok(rustix::fs::stat("/dev/shm").map_or(0, |s| s.st_dev))
    }
}

impl pci::Host for HostState {
    fn numa_nodes(&mut self) -> Trap<Vec<pci::NumaNode>> {
        // The modelled server's nodes share the CPUs this process may use.
        let cpus = rustix::thread::sched_getaffinity(None).map(|s| words(&s)).unwrap_or_default();
        let list: Vec<String> =
            (0..cpus.len() * 64).filter(|c| cpus[c / 64] >> (c % 64) & 1 == 1).map(|c| c.to_string()).collect();
        let cpus = list.join(",");
        let n = self.tenant.device.numa_node_count();
        Ok((0..n).map(|id| pci::NumaNode { id, cpus: cpus.clone() }).collect())
    }

    fn nics(&mut self) -> Trap<Vec<pci::Nic>> {
        let nics = self.tenant.device.nics();
        Ok(nics
            .iter()
            .map(|n| pci::Nic {
                name: n.name.clone(),
                bdf: n.bdf.to_string(),
                numa: n.numa,
                speed: n.speed_mbps,
                guid: n.guid,
            })
            .collect())
    }

    fn device_numa(&mut self, dev: i32) -> Trap<u32> {
        Ok(self.tenant.device.device_numa(dev).unwrap_or(0))
    }
}

/// The entry that binds its caller's thread, as in the original.
const BINDS: &str = "neuronSetAffinity";

/// What of a mask is within `own`.
fn within(own: &CpuSet, mask: &[u64]) -> CpuSet {
    let mut set = CpuSet::new();
    for cpu in 0..(mask.len() * 64).min(CpuSet::MAX_CPU) {
        if mask[cpu / 64] >> (cpu % 64) & 1 == 1 && own.is_set(cpu) {
            set.set(cpu);
        }
    }
    set
}

impl affinity::Host for HostState {
    fn get(&mut self) -> Trap<Vec<u64>> {
        Ok(words(&rustix::thread::sched_getaffinity(None)?))
    }

    fn set(&mut self, mask: Vec<u64>) -> Trap<Answer<()>> {
        if mask.len() > MASK_WORDS || mask.iter().all(|w| *w == 0) {
            return Ok(Err(
                self.fail(Status::INVALID, format!("a CPU mask has 1 to {MASK_WORDS} words and at least one CPU"))
            ));
        }
        // The thread is the program's: it asks for this by that entry, which no client of a service can call.
        if self.entry != BINDS {
            return Ok(Err(self.fail(Status::INVALID, format!("only {BINDS} binds a thread to CPUs"))));
        }
        let set = within(own_cpus(), &mask);
        if set.count() == 0 {
            return Ok(
                Err(self.fail(Status::INVALID, "the CPU mask has none of the CPUs that this process was given")),
            );
        }
        Ok(rustix::thread::sched_setaffinity(None, &set).map_err(|e| {
            self.fail(Status::INVALID, format!("the CPU mask cannot be set: {e}; none of its CPUs may be used here"))
        }))
    }

    fn local(&mut self, _dev: i32) -> Trap<Vec<u64>> {
        // The modelled accelerators are near every CPU of the process.
        Ok(words(&rustix::thread::sched_getaffinity(None)?))
    }
}

impl config::Host for HostState {
    fn get(&mut self, name: String) -> Trap<Option<String>> {
        Ok(GRANTED.contains(&name.as_str()).then(|| self.tenant.vars.get(&name).cloned()).flatten())
    }
}

impl HostState {
    /// The granted file that `variable` names, opened beneath its own directory, never by a path of the guest's.
    fn granted(&mut self, variable: &str, writing: bool) -> Answer<(Dir, std::ffi::OsString, String)> {
        let ok = FILES.iter().any(|(name, w)| *name == variable && *w == writing);
        if ok && !self.grant.files.contains(variable) {
            let asked = format!("asked to {} the file named by {variable}", if writing { "write" } else { "read" });
            let grants = listed(&self.grant.files);
            return Err(self.refuse(Status::INVALID, "files.read", &asked, grants));
        }
        let value = ok.then(|| self.tenant.vars.get(variable).cloned()).flatten();
        let Some(value) = value else {
            return Err(self.fail(Status::INVALID, format!("no file was granted under {variable}")));
        };
        let path = Path::new(&value);
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let opened = path
            .file_name()
            .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidInput))
            .and_then(|f| Ok((Dir::open_ambient_dir(parent, ambient_authority())?, f.to_os_string())));
        match opened {
            Ok((dir, file)) => Ok((dir, file, value)),
            Err(e) => {
                Err(self
                    .fail(Status::INVALID, format!("the file {value}, named by {variable}, cannot be reached: {e}")))
            }
        }
    }
}

impl files::Host for HostState {
    fn read(&mut self, variable: String) -> Trap<Answer<Vec<u8>>> {
        let most = byte_list("neuron:hw/files", "read").unwrap_or(0);
        let (dir, file, path) = match self.granted(&variable, false) {
            Ok(g) => g,
            Err(s) => return Ok(Err(s)),
        };
        let opened = dir.open_with(&file, OpenOptions::new().read(true).custom_flags(NONBLOCK));
        let read = contents(opened.map(cap_std::fs::File::into_std), "file", most);
        Ok(read.map_err(|why| {
            self.fail(Status::INVALID, format!("the file {path}, named by {variable}, cannot be read: {why}"))
        }))
    }

    fn write(&mut self, variable: String, data: Vec<u8>) -> Trap<Answer<()>> {
        let most = byte_list("neuron:hw/files", "write").unwrap_or(0);
        if data.len() as u64 > most {
            return Ok(Err(
                self.fail(Status::INVALID, format!("a file has at most {most} bytes, the plugin gave {}", data.len()))
            ));
        }
        let (dir, file, path) = match self.granted(&variable, true) {
            Ok(g) => g,
            Err(s) => return Ok(Err(s)),
        };
        let mut how = OpenOptions::new();
        how.write(true).create(true).custom_flags(NONBLOCK);
        let written = dir.open_with(&file, &how).and_then(|mut f| {
            if !f.metadata()?.is_file() {
                return Err(std::io::Error::other("it is not a regular file"));
            }
            f.set_len(0)?;
            f.write_all(&data)
        });
        Ok(written.map_err(|e| {
            self.fail(Status::FAILURE, format!("the file {path}, named by {variable}, cannot be written: {e}"))
        }))
    }
}

impl clock::Host for HostState {
    fn monotonic_ns(&mut self) -> Trap<u64> {
        // Without the time in which the process was stopped: a plugin's own deadlines do not run then either.
        static START: OnceLock<(Instant, Duration)> = OnceLock::new();
        static LAST: AtomicU64 = AtomicU64::new(0);
        let (start, before) = START.get_or_init(|| (Instant::now(), stopped_in_all()));
        let stopped = stopped_in_all().saturating_sub(*before);
        let now = start.elapsed().saturating_sub(stopped).as_nanos() as u64;
        // One stop may be seen later than the clock was read.
        Ok(LAST.fetch_max(now, Ordering::Relaxed).max(now))
    }

    fn wall_seconds(&mut self) -> Trap<i64> {
        Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64))
    }
}

impl random::Host for HostState {
    fn get_u64(&mut self) -> Trap<u64> {
        Ok(u64::from_le_bytes(hw_bridge::os::random::bytes()?))
    }
}

impl log::Host for HostState {
    fn write(&mut self, level: log::Level, text: String) -> Trap<()> {
        let text = crate::text::line(&text);
        if matches!(level, log::Level::Error) {
            self.note(text.clone());
        }
        if !self.may_log() {
            return Ok(());
        }
        let tenant = &self.tenant.name;
        match level {
            // The failure itself is reported once, by whoever called the entry.
            log::Level::Error => tracing::debug!(target: "CCOM", %tenant, "{text}"),
            log::Level::Warn => tracing::warn!(target: "CCOM", %tenant, "{text}"),
            log::Level::Info => tracing::info!(target: "CCOM", %tenant, "{text}"),
            log::Level::Debug => tracing::debug!(target: "CCOM", %tenant, "{text}"),
            log::Level::Trace => tracing::trace!(target: "CCOM", %tenant, "{text}"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::abort::AbortToken;
    use crate::limits::Limits;
    use crate::tenant::limited;

    /// What containers have of their own and links do not mind is no part of it.
    #[test]
    fn a_server_is_a_boot_and_a_network_namespace() {
        let here = Place::here().unwrap();
        assert_eq!(here, Place::here().unwrap());
        assert_eq!((here.boot.len(), here.network > 0 && here.pids > 0), (36, true));
        let place = |boot: &str, network, pids| Place { boot: boot.into(), network, pids };
        let one = place("b00t", 4026531840, 7);
        assert_eq!(one.server(), place("b00t", 4026531840, 8).server());
        assert_ne!(one.server(), place("b00t", 4026531841, 7).server());
        assert_ne!(one.server(), place("b11t", 4026531840, 7).server());
        // The first process of each container has number 1, and its first tenant too.
        assert_ne!(one.process(1, 1), place("b00t", 4026531840, 8).process(1, 1));
        assert_ne!(one.process(1, 1), one.process(1, 2));
        assert_ne!(one.process(1, 1), one.process(2, 1));
        // A host name is for messages.
        let mut s = HostState::new(limited(Limits::default()), None, AbortToken::new().unwrap(), None);
        let (host, name) = (identity::Host::host(&mut s).unwrap().unwrap(), identity::Host::name(&mut s).unwrap());
        assert_eq!((host, name.is_empty()), (here.server(), false));
    }

    #[test]
    fn loopback_is_down_without_an_address_that_runs() {
        let of = |text: &str, runs| Address { name: "x".into(), ip: text.parse().unwrap(), scope: 0, runs };
        for down in [
            vec![],
            vec![of("10.0.0.1", true)],
            vec![of("127.0.0.1", false), of("::1", false)],
            vec![of("10.0.0.1", true), of("127.0.0.1", false)],
        ] {
            assert!(loopback_down(&down).is_some_and(|why| why.contains("`ip link set lo up`")), "{down:?}");
        }
        // It runs, though somebody has taken its addresses and given it another.
        let other = Address { name: "lo".into(), ..of("fe80::77", true) };
        assert_eq!(loopback_down(&[other]), None);
        for up in
            [vec![of("127.0.0.1", true)], vec![of("::1", true)], vec![of("10.0.0.1", false), of("127.0.1.1", true)]]
        {
            assert_eq!(loopback_down(&up), None, "{up:?}");
        }
    }

    #[test]
    fn a_mask_is_cut_to_the_cpus_of_the_process() {
        let mut own = CpuSet::new();
        [1, 2, 70].into_iter().for_each(|c| own.set(c));
        assert_eq!(words(&within(&own, &[0b1110, 1 << 6]))[..2], [0b110, 1 << 6]);
        assert_eq!(within(&own, &[0b1001, 0, u64::MAX]).count(), 0);
        assert_eq!(words(&within(&own, &[u64::MAX; MASK_WORDS])), words(&own));
    }

    #[test]
    fn a_mask_that_cannot_be_is_refused_and_so_is_one_without_a_cpu_of_the_process() {
        let mut s = HostState::new(limited(Limits::default()), None, AbortToken::new().unwrap(), Some(0));
        s.entry = BINDS;
        let all = own_cpus();
        let beyond = (0..CpuSet::MAX_CPU).rev().find(|cpu| !all.is_set(*cpu)).unwrap();
        let mut others = vec![0; MASK_WORDS];
        others[beyond / 64] |= 1 << (beyond % 64);
        let size = "a CPU mask has 1 to 16 words and at least one CPU";
        let none = "the CPU mask has none of the CPUs that this process was given";
        let before = affinity::Host::get(&mut s).unwrap();
        for (mask, why) in [(vec![], size), (vec![0], size), (vec![1; MASK_WORDS + 1], size), (others, none)] {
            assert!(affinity::Host::set(&mut s, mask).unwrap().is_err());
            assert_eq!(s.take_causes().0, [why]);
        }
        assert_eq!(affinity::Host::get(&mut s).unwrap(), before);
    }
}
