//! The service: one process of a machine that owns its devices and its plugins, and serves the processes of tenants.
//!
//! *Wasm plans, native moves*, across processes: the service runs the control plane of each client's communicators, in a store
//! of its own for each; the client maps the memory it is granted and runs the data plane, as a rank that embeds the runtime
//! does. No byte of an operation passes through the service.
//!
//! ```text
//! policies/red.toml   ->  one tenant runtime  <-  sockets/red.sock   <- clients of tenant red
//! policies/blue.toml  ->  one tenant runtime  <-  sockets/blue.sock  <- clients of tenant blue
//! ```
//!
//! Who may connect is the kernel's word (`SO_PEERCRED`) against the policy's `service.uids`. What a client says is an
//! allegation. A *client* here is a runtime: it leases cores, each for itself as long as one of its connections is open. A
//! process that ends takes its connections, and with them its communicators and leases; its peers learn it from its pidfd,
//! which came with the link.
//!
//! Threads: one a socket, two a connection. Stops: dropping the [`Server`]; clients' data planes go on.

#[doc(hidden)]
pub mod fuzzing;
mod session;

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hw_bridge::exec::share::{Entered, Market, Register};
use hw_bridge::limits::REFUSALS_LOGGED;
use hw_bridge::memory::hbm::Hbm;
use hw_bridge::os::credentials::{self, Credentials, PeerPid};
use hw_bridge::os::log_rate::LogRate;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::FlockOperation;

use crate::api::Runtime;
use crate::client::wire::Greeting;
use crate::config::RuntimeConfig;
use crate::error::Error;
use crate::message;
use hw_bridge::os::lock::lock;
use sandbox::accounts::{Counted, Quota};
use sandbox::limits::TENANT_GATE_PLACES;
use sandbox::policy::Policy;

/// How long a lease is waited for whose holder may just be leaving.
const LEAVING: Duration = Duration::from_secs(2);

/// How to serve.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// Directory of policies, `*.toml`, one a tenant.
    pub policies: PathBuf,
    /// Directory of sockets, `TENANT.sock`; made if absent.
    pub sockets: PathBuf,
    /// Whether programs of tenants may run as the service's own user, and those of several tenants as one. Such a one can read and
    /// change everything that the service, or the other tenant, has: the kernel does not tell the two apart.
    pub allow_own_user: bool,
    /// What is not in a policy: the modelled device, variables granted to plugins.
    pub base: RuntimeConfig,
    /// Where the programs of all tenants take turns; none if each is to keep to its own caps and know of no neighbour. All of
    /// them can write it: docs/sharing.md says what one can do that lies.
    pub market: Option<Arc<Market>>,
    /// Who is behind a connection; another than [`identify`] in tests.
    pub identify: fn(&UnixStream) -> std::io::Result<Credentials>,
}

/// Who is behind a connection, as the kernel says.
///
/// # Errors
/// The kernel's.
pub fn identify(stream: &UnixStream) -> std::io::Result<Credentials> {
    credentials::of_peer(stream)
}

/// A running service. Dropping it ends it at once.
#[derive(Debug)]
pub struct Server {
    tenants: Vec<Arc<Hosted>>,
    doors: Vec<JoinHandle<()>>,
    stop: Arc<OwnedFd>,
    ending: Arc<AtomicBool>,
    /// Held while it serves this directory.
    _claim: Claim,
}

/// One tenant.
#[derive(Debug)]
struct Hosted {
    policy: Arc<Policy>,
    runtime: Runtime,
    socket: PathBuf,
    cores: Arc<Cores>,
    runtimes: Mutex<HashMap<u128, Weak<Lessee>>>,
    market: Option<Arc<Register>>,
    connections: Quota,
    refusals: LogRate,
    ending: Arc<AtomicBool>,
    stop: Arc<OwnedFd>,
    identify: fn(&UnixStream) -> std::io::Result<Credentials>,
}

/// Who has which logical core, of all tenants.
#[derive(Debug, Default)]
struct Cores(Mutex<HashMap<i32, Weak<Lessee>>>);

/// A client's runtime, as long as one of its connections is open.
#[derive(Debug)]
struct Lessee {
    tenant: String,
    pid: PeerPid,
    pidfd: Arc<OwnedFd>,
    memory: Mutex<HashMap<i32, Arc<Hbm>>>,
    /// Holds its tenant's line in the market; a program that is killed cannot give one up.
    entered: Option<Entered>,
}

impl Hosted {
    /// Leases a core of the tenant to a client, exclusively; answers its device memory, zeroed when it is leased first.
    fn lease(&self, core: i32, to: &Arc<Lessee>) -> Result<Arc<Hbm>, Error> {
        let devices = &self.policy.devices;
        self.runtime.tenant().may_use_core(core)?;
        if devices.hbm.0 == 0 {
            let tenant = &self.policy.tenant;
            return Err(Error::Limit(format!("tenant {tenant} is granted no device memory (devices.hbm)")));
        }
        let until = Instant::now() + LEAVING;
        loop {
            let mut all = lock(&self.cores.0);
            let holder = all.get(&core).and_then(Weak::upgrade).filter(|h| !Arc::ptr_eq(h, to));
            let Some(holder) = holder else {
                let mut memory = lock(&to.memory);
                if let Some(hbm) = memory.get(&core) {
                    return Ok(hbm.clone());
                }
                let hbm = Hbm::new(devices.hbm.0)?;
                memory.insert(core, hbm.clone());
                all.insert(core, Arc::downgrade(to));
                return Ok(hbm);
            };
            drop(all);
            if Instant::now() >= until {
                return Err(Error::Limit(self.leased(core, to, &holder)));
            }
            drop(holder);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Why a core is not leased to a client. Another tenant's processes are the operator's to know.
    fn leased(&self, core: i32, to: &Lessee, holder: &Lessee) -> String {
        let (tenant, pid) = (&holder.tenant, holder.pid);
        self.log_refusal(&format!(
            "pid {} asked for logical core {core}, which pid {pid} of tenant {tenant} has",
            to.pid
        ));
        let whose = match *tenant == to.tenant {
            true => format!("another runtime (tenant {tenant}, pid {pid})"),
            false => "a runtime of another tenant".into(),
        };
        format!("logical core {core} is leased to {whose}, until it ends; a core serves one at a time")
    }

    /// Whether a process of this user is served.
    fn admits(&self, uid: u32) -> Result<(), String> {
        let uids = &self.policy.service.uids;
        if uids.contains(&uid) || uids.is_empty() && uid == rustix::process::geteuid().as_raw() {
            return Ok(());
        }
        Err(format!("user {uid} is not one of tenant {} (service.uids of its policy)", self.policy.tenant))
    }

    /// Opens the door: takes connections until the service stops.
    fn serve(self: &Arc<Self>, listener: &UnixListener) {
        let mut sessions: Vec<JoinHandle<()>> = Vec::new();
        loop {
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&*self.stop, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => {
                    tracing::error!(tenant = %self.policy.tenant, "no more clients are served: {e}");
                    break;
                }
            }
            if !fds[1].revents().is_empty() {
                break;
            }
            sessions.retain(|s| !s.is_finished());
            match listener.accept() {
                Ok((stream, _)) => sessions.extend(self.admit(stream)),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                // Out of descriptors and the like: whoever asked times out with its own message.
                Err(e) => {
                    self.log_refusal(&format!("accepting it failed: {e}"));
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        for s in sessions {
            // One that panicked has reported by itself.
            let _ = s.join();
        }
    }

    /// Says who was sent away and why, within a rate.
    fn log_refusal(&self, why: &str) {
        let tenant = &self.policy.tenant;
        if self.refusals.admits(REFUSALS_LOGGED, |n| tracing::warn!(%tenant, "{n} more clients were refused")) {
            tracing::warn!(%tenant, "a client was refused: {why}");
        }
    }

    /// Whose a connection is, if the tenant serves it and has room; a stranger costs no thread.
    fn known(&self, stream: &UnixStream) -> Result<(Credentials, Counted), String> {
        let who = (self.identify)(stream).map_err(|e| format!("the kernel does not say who it is: {e}"))?;
        self.admits(who.uid)?;
        let most = self.policy.service.clients;
        let tenant = &self.policy.tenant;
        let full = || format!("tenant {tenant} has {most} connections, as many as its policy allows (service.clients)");
        Ok((who, self.connections.take(most).ok_or_else(full)?))
    }

    fn admit(self: &Arc<Self>, stream: UnixStream) -> Option<JoinHandle<()>> {
        let (who, counted) = match self.known(&stream) {
            Ok(known) => known,
            Err(why) => {
                self.log_refusal(&why);
                // It fits the socket's buffer; a client that left does not matter.
                let _ = message::send(&stream, &Greeting::Refused { why }, &[], Instant::now());
                return None;
            }
        };
        let hosted = self.clone();
        let serve = move || {
            session::serve(&hosted, &stream, &who);
            drop(counted);
        };
        let spawned = std::thread::Builder::new().name("wccl-session".into()).spawn(serve);
        spawned.inspect_err(|e| self.log_refusal(&format!("no thread for it: {e}"))).ok()
    }
}

/// The configuration of a tenant's runtime.
fn config_of(policy: &Arc<Policy>, base: &RuntimeConfig) -> RuntimeConfig {
    RuntimeConfig {
        // The first is served; the others may replace it.
        plugin: policy.plugins.allowed.first().map(|a| PathBuf::from(&a.file.0)),
        cores: policy.devices.cores.iter().copied().collect(),
        policy: Some(policy.clone()),
        service: None,
        ..base.clone()
    }
}

/// Whether a file of that name is a policy: editors leave locks (`.#red.toml`) and copies (`red.toml~`, `#red.toml#`) beside it.
fn is_policy(name: &str) -> bool {
    name.ends_with(".toml") && !name.starts_with(['.', '#'])
}

/// All policies of a directory, by name of file.
fn policies(dir: &Path) -> Result<Vec<Arc<Policy>>, Error> {
    let io = |source| Error::System { what: format!("reading the policies in {}", dir.display()), source };
    let mut files = std::fs::read_dir(dir)
        .and_then(|entries| entries.map(|e| Ok(e?.path())).collect::<std::io::Result<Vec<_>>>())
        .map_err(io)?;
    files.retain(|f| {
        let name = f.file_name().unwrap_or_default().to_string_lossy();
        let kept = is_policy(&name);
        if !kept && name.contains(".toml") {
            tracing::warn!("{} is no policy: it is hidden, or an editor's copy of one", f.display());
        }
        kept
    });
    files.sort();
    let mut all: Vec<Arc<Policy>> = Vec::new();
    for file in &files {
        let policy = Policy::read(file).map_err(|e| Error::Config(e.to_string()))?;
        if all.iter().any(|p| p.tenant == policy.tenant) {
            let what = format!("{} is a second policy of tenant {}; keep one", file.display(), policy.tenant);
            return Err(Error::Config(what));
        }
        all.push(Arc::new(policy));
    }
    if all.is_empty() {
        return Err(Error::Config(format!("there is no policy (*.toml) in {}; a service has tenants", dir.display())));
    }
    Ok(all)
}

/// Refuses tenants that may listen in one another's place: the plugins of both run in this process, and one could be there
/// first.
fn disjoint(policies: &[Arc<Policy>]) -> Result<(), Error> {
    for (i, a) in policies.iter().enumerate() {
        for b in &policies[i + 1..] {
            if let Some((of_a, of_b, both)) = a.network.shared(&b.network) {
                let (a, b) = (&a.tenant, &b.tenant);
                return Err(Error::Config(format!(
                    "tenants {a} and {b} may both listen on {both}: network.listen grants {of_a} to {a} and {of_b} to {b}; one could \
                     wait there in the place of the other, so give each ports or addresses of its own"
                )));
            }
        }
    }
    Ok(())
}

/// Whether no program of the tenant's can run as the service's own user; else the sentence that says what to do.
fn apart(policy: &Policy) -> Result<(), Error> {
    let (me, uids) = (rustix::process::geteuid().as_raw(), &policy.service.uids);
    let how = match (uids.is_empty(), uids.contains(&me)) {
        (true, _) => "names no users",
        (_, true) => "names that one",
        _ => return Ok(()),
    };
    Err(Error::Config(format!(
        "tenant {}: its programs would run as the service's own user ({me}), who can read and change all that the service has, \
         other tenants' memory too: its policy {how} in service.uids. Name others there, or start the service with \
         --allow-own-user (ServeConfig::allow_own_user) if its tenants trust one another",
        policy.tenant
    )))
}

/// Refuses tenants that have a user in common: the kernel tells their programs apart by nothing else.
fn strangers(policies: &[Arc<Policy>]) -> Result<(), Error> {
    for (i, a) in policies.iter().enumerate() {
        for b in &policies[i + 1..] {
            if let Some(uid) = a.service.uids.intersection(&b.service.uids).next() {
                let (a, b) = (&a.tenant, &b.tenant);
                return Err(Error::Config(format!(
                    "tenants {a} and {b} both name user {uid} in service.uids: programs of one user can trace one another and are \
                     served as either tenant. Give each users of its own, or start the service with --allow-own-user \
                     (ServeConfig::allow_own_user) if its tenants trust one another"
                )));
            }
        }
    }
    Ok(())
}

/// Whether this process may open as many descriptors as all tenants together are granted; else the sentence that says so.
/// docs/service.md says how many for what.
fn room(policies: &[Arc<Policy>]) -> Result<(), String> {
    let of = |p: &Arc<Policy>| {
        // A listener may have one more than itself, of a stranger.
        let all = [
            (p.limits.sockets, 2),
            (TENANT_GATE_PLACES, 1),
            (p.limits.names, 3),
            (p.limits.tasks, 4),
            (p.service.clients, 10),
        ];
        all.into_iter().fold(0, |sum: u64, (n, each)| sum.saturating_add((n as u64).saturating_mul(each)))
    };
    let need = policies.iter().map(of).fold(0, u64::saturating_add);
    hw_bridge::os::exhausted::room_for(need).map_err(|why| format!("what all policies grant {why}; or grant less"))
}

/// The lock that says whose a directory of sockets is.
#[derive(Debug)]
struct Claim(File);

impl Drop for Claim {
    fn drop(&mut self) {
        // A child that another thread is about to start has the lock too, until it becomes its program. One that was forked has what
        // its parent holds.
        if !hw_bridge::os::fork::in_child() {
            let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
        }
    }
}

/// Takes the directory of sockets.
fn claim(dir: &Path) -> Result<Claim, Error> {
    hw_bridge::os::fork::mark_process();
    let io = |what: &str, source| Error::System { what: format!("{what} {}", dir.display()), source };
    match std::fs::DirBuilder::new().mode(0o711).create(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(io("making", e)),
        _ => {}
    }
    let meta = std::fs::symlink_metadata(dir).map_err(|e| io("inspecting", e))?;
    let me = rustix::process::geteuid().as_raw();
    if !meta.is_dir() || meta.uid() != me || meta.mode() & 0o022 != 0 {
        let what = format!(
            "{} must be a directory of user {me} that nobody else can write: whoever can, could put another socket in the \
             place of a tenant's",
            dir.display()
        );
        return Err(Error::Config(what));
    }
    // Nobody else may open it: whoever can, could hold the lock.
    let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(dir.join("lock"));
    let file = file.map_err(|e| io("opening the lock of", e))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Claim(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::Config(format!(
            "another service serves {}; end it first, or give this one another directory",
            dir.display()
        ))),
        Err(e) => Err(io("locking", e.into())),
    }
}

/// The socket of a tenant. One that a killed service left is replaced: the lock is ours.
fn bind(socket: &Path, policy: &Policy) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(socket) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    listener.set_nonblocking(true)?;
    // Others than this user are told apart by their credentials.
    let mode = if policy.service.uids.is_empty() { 0o600 } else { 0o666 };
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(mode))?;
    Ok(listener)
}

impl Server {
    /// Reads the policies, loads each tenant's plugin, opens the sockets.
    ///
    /// # Errors
    /// [`Error::Config`] for a policy that cannot be used, for one that admits the service's own user and for two that admit one user
    /// without [`ServeConfig::allow_own_user`], two tenants that may listen at one place, a directory that others can write or that
    /// another service serves;
    /// [`Error::System`] for what the system refuses. A plugin that does not load fails the tenant's collectives only.
    pub fn start(config: &ServeConfig) -> Result<Server, Error> {
        let policies = policies(&config.policies)?;
        disjoint(&policies)?;
        if !config.allow_own_user {
            policies.iter().try_for_each(|p| apart(p))?;
            strangers(&policies)?;
        }
        if let Err(why) = room(&policies) {
            tracing::warn!("{why}");
        }
        let claim = claim(&config.sockets)?;
        let io = |what: String| move |source: std::io::Error| Error::System { what, source };
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| io("making the stop event".into())(e.into()))?;
        let ending = Arc::default();
        let mut server = Server { tenants: Vec::new(), doors: Vec::new(), stop: Arc::new(stop), ending, _claim: claim };
        let cores = Arc::<Cores>::default();
        let market = config.market.clone().map(|m| Arc::new(Register::new(m)));
        for policy in policies {
            let socket = config.sockets.join(format!("{}.sock", policy.tenant));
            let runtime = Runtime::open(config_of(&policy, &config.base))?;
            let hosted = Arc::new(Hosted {
                runtime,
                socket,
                policy,
                cores: cores.clone(),
                runtimes: Mutex::default(),
                market: market.clone(),
                connections: Quota::default(),
                refusals: LogRate::default(),
                ending: server.ending.clone(),
                stop: server.stop.clone(),
                identify: config.identify,
            });
            server.tenants.push(hosted);
        }
        // Opened when all tenants are there.
        for hosted in &server.tenants {
            let what = format!("opening {}", hosted.socket.display());
            let listener = bind(&hosted.socket, &hosted.policy).map_err(io(what.clone()))?;
            let hosted = hosted.clone();
            let door = std::thread::Builder::new().name("wccl-door".into()).spawn(move || hosted.serve(&listener));
            server.doors.push(door.map_err(io(what))?);
        }
        Ok(server)
    }

    /// Name, socket and runtime of each tenant.
    pub fn tenants(&self) -> impl Iterator<Item = (&str, &Path, &Runtime)> {
        self.tenants.iter().map(|h| (h.policy.tenant.as_str(), &*h.socket, &h.runtime))
    }

    /// Takes no new communicators from now on.
    pub fn end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// Tenants that have communicators, and how many.
    pub fn working(&self) -> Vec<(String, usize)> {
        let all = self.tenants().map(|(name, _, runtime)| (name.to_string(), runtime.tenant().communicators()));
        all.filter(|(_, n)| *n > 0).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if hw_bridge::os::fork::in_child() {
            // The event, the sockets and the threads are the parent's.
            self.doors.drain(..).for_each(std::mem::forget);
            return;
        }
        // Our own event: the write cannot fail in a way that matters.
        let _ = rustix::io::write(self.stop.as_fd(), &1u64.to_ne_bytes());
        for hosted in &self.tenants {
            // Before the lock goes: the next service may already have put its own there after.
            let _ = std::fs::remove_file(&hosted.socket);
        }
        for door in self.doors.drain(..) {
            // One that panicked has reported by itself.
            let _ = door.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What another thread has forked has the descriptor until it becomes its program.
    #[test]
    fn a_directory_is_free_when_its_service_is_gone_whoever_has_the_descriptor() {
        let dir = std::env::temp_dir().join(format!("wccl-claim-{}", std::process::id()));
        let first = claim(&dir).unwrap();
        let forked = first.0.try_clone().unwrap();
        assert!(claim(&dir).unwrap_err().to_string().contains("another service serves"));
        drop(first);
        drop(claim(&dir).unwrap());
        drop(forked);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn tenants_that_may_listen_at_one_place_are_refused_by_name() {
        let policy = |tenant: &str, listen: &str| {
            let text = format!(
                "tenant = \"{tenant}\"\n[plugins]\ndirectory = \"/\"\nallow = [{{ file = \"a\" }}]\n[network]\nlisten = [{listen}]"
            );
            Arc::new(Policy::parse(Path::new("x.toml"), &text).unwrap())
        };
        let red = policy("red", "\"127.0.0.1:20000-20999\"");
        let green = policy("green", "\"127.0.0.1:21000-21999\", \"10.0.0.0/8:*\"");
        disjoint(&[red.clone(), green.clone()]).unwrap();
        let e = disjoint(&[red, green, policy("blue", "\"10.1.0.0/16:80\"")]).unwrap_err().to_string();
        let both = "tenants green and blue may both listen on 10.1.0.0/16:80: network.listen grants 10.0.0.0/8:* to green and 10.1.0.0/16:80 to blue";
        assert!(e.contains(both), "{e}");
    }

    #[test]
    fn what_editors_leave_beside_a_policy_is_none() {
        for name in ["red.toml", "a.b.toml"] {
            assert!(is_policy(name), "{name}");
        }
        for name in
            [".#red.toml", ".red.toml", "#red.toml#", "#red.toml", "red.toml~", ".red.toml.swp", "red.txt", "toml"]
        {
            assert!(!is_policy(name), "{name}");
        }
    }

    #[test]
    fn grants_that_no_limit_of_descriptors_holds_are_told() {
        let policy = |connections: u64| {
            let text = format!(
                "tenant = \"red\"\n[plugins]\ndirectory = \"/\"\nallow = [{{ file = \"a\" }}]\n[service]\nclients = 1\n[limits]\n\
                 connections = {connections}\nnames = 0\ntasks = 0"
            );
            Arc::new(Policy::parse(Path::new("red.toml"), &text).unwrap())
        };
        assert_eq!(room(&[policy(10), policy(10)]), Ok(()));
        // More than fs.nr_open allows anywhere.
        let e = room(&[policy(10), policy(1 << 40)]).unwrap_err();
        assert!(e.contains("what all policies grant needs 2199023256104 file descriptors"), "{e}");
    }
}
