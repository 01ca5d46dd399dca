//! The forward leg: the 37-slot table, the loader, the sentinel and the wrappers (forward-abi).
//!
//! The table is in one of two states at rest: all 37 valid and no sentinel, or all 37 none and the sentinel armed
//! (INV-03). The load is attempted once (INV-05). After a failure every guarded wrapper answers NRT_FAILURE without
//! touching a slot, for the life of the runtime (INV-06); the text is logged once (C-01).

mod slots;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};

pub use slots::{EXEMPT, NAMES, ORIGINALS};
/// A handle of a host object, as the wrappers take and answer it.
pub use wasmtime::component::Resource;

use crate::abort::AbortToken;
use crate::bindings::exports::neuron::nccom::collectives::VersionInfo;
use crate::error::Error;
use crate::key::GroupKey;
use crate::limits::{COMPATIBILITY, VERSION_INFO_BYTES};
use crate::load::{PluginKind, Source};
use crate::objects::ClientProcess;
use crate::status::Status;
use crate::store::{HostState, Instance, Library, Patience};
use crate::tenant::Tenant;
use crate::text::line;

/// The interface that a library exports.
pub const COLLECTIVES: &str = "neuron:nccom/collectives";

/// A library that passed the gate, with its 37 entries.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The compiled plugin.
    pub library: Arc<Library>,
    /// Gate 89, ids, InitNet/FiniPlugin, raw net entries: what has no communicator.
    pub instance: Arc<Instance>,
    /// What the probe answered.
    pub version: Version,
    /// 0 for the first load, one more after each swap.
    pub generation: u64,
}

/// Whose an instance is. It is that before any of the guest's code runs: a start function is that, too.
#[derive(Debug)]
pub struct Holder {
    /// The logical core of its rank.
    pub core: i32,
    /// The key of its group.
    pub key: GroupKey,
    /// It joins as this rank of so many, if it does not take over from another instance.
    pub seat: Option<(usize, usize)>,
    /// The client of a service that it is another process's for.
    pub client: Option<ClientProcess>,
}

/// `nec_version_info_t` as the probe filled it; absent fields read as zero, as in the zero-filled original.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Version {
    /// major, minor, patch, maintenance
    pub numbers: [u64; 4],
    /// 16 bytes
    pub git_hash: [u8; 16],
    /// must be 89
    pub compatibility: u64,
}

impl From<&VersionInfo> for Version {
    fn from(v: &VersionInfo) -> Version {
        let mut git_hash = [0; 16];
        if let Some(h) = &v.git_hash {
            let n = h.len().min(16);
            git_hash[..n].copy_from_slice(&h[..n]);
        }
        Version {
            numbers: [v.major, v.minor, v.patch, v.maintenance],
            git_hash,
            compatibility: v.compatibility_version.unwrap_or(0),
        }
    }
}

#[derive(Debug)]
enum State {
    /// Nobody has tried.
    Untried,
    /// All 37.
    Loaded(Arc<Loaded>),
    /// None of the 37; the text is the sentinel.
    Failed(String),
}

/// The slot table of one tenant runtime.
#[derive(Debug)]
pub struct Forward {
    state: RwLock<State>,
    attempt: Mutex<()>,
    reported: AtomicBool,
}

impl Default for Forward {
    fn default() -> Self {
        Forward { state: RwLock::new(State::Untried), attempt: Mutex::default(), reported: AtomicBool::new(false) }
    }
}

/// Why a load failed: the status of `ncclInit` and the sentinel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError {
    /// NRT_FAILURE, in the original for every failure.
    pub status: Status,
    /// The sentinel text.
    pub sentinel: String,
}

fn failed(sentinel: String) -> LoadError {
    // Names of files and words of their makers may be in it.
    LoadError { status: Status::FAILURE, sentinel: line(&sentinel) }
}

fn opening(reason: &str) -> LoadError {
    failed(format!("Error opening libnccom.so, cannot use collective operations! {reason}"))
}

fn about(path: &Path) -> impl Fn(String) -> LoadError {
    move |reason| opening(&format!("plugin {}: {reason}", path.display()))
}

/// Reads the library that a tenant asks for.
pub fn read(tenant: &Tenant, path: &Path) -> Result<Source, LoadError> {
    Source::read(tenant, path).map_err(about(path))
}

/// Loads a library: import check, probe, 89, the other 36 by name, all or nothing. Touches no table.
pub fn load(tenant: &Arc<Tenant>, source: &Source, without: &[String]) -> Result<Loaded, LoadError> {
    let named = about(source.path());
    let library = source.load(tenant, PluginKind::Transport, without).map_err(&named)?;
    let abort = AbortToken::new().map_err(|e| named(format!("its abort event could not be made: {e}")))?;
    let state = HostState::new(tenant.clone(), Some(library.clone()), abort, None);
    let instance = Instance::renewable(&library, state).map_err(named)?;
    resolve(library, instance)
}

fn resolve(library: Arc<Library>, instance: Arc<Instance>) -> Result<Loaded, LoadError> {
    // Gate 0: the probe, before anything else is looked up (INV-04).
    let interface = library.exported(COLLECTIVES);
    let probe = interface
        .as_ref()
        .and_then(|i| library.function(i, NAMES[0]))
        .filter(|index| slots::check(&instance, 0, index).is_ok());
    let (Some(interface), Some(probe)) = (interface, probe) else {
        return Err(failed("Get Version Info API is not implemented by aws-neuronx-collectives.".into()));
    };
    let params = (VERSION_INFO_BYTES,);
    let answer = instance.call::<(u32,), VersionInfo>("neuronGetVersionInfo", Patience::Usual, None, &probe, params);
    let (version, _) = answer.map_err(|e| opening(&e.to_string()))?;
    let version = Version::from(&version);
    library.set_version(version.numbers);
    if version.compatibility != COMPATIBILITY {
        let id = version.compatibility;
        return Err(failed(format!(
            "Incompatible version of aws-neuronx-collectives.  Compatibility id: {id}, expected: {COMPATIBILITY}"
        )));
    }
    let [major, minor, patch, maint] = version.numbers;
    let hash: String = version.git_hash[..4].iter().map(|b| format!("{b:02x}")).collect();
    tracing::info!(target: "ENC", function = "check_version", "Using CCOM {major}.{minor}.{patch}.{maint}-{hash}");
    let mut slots = Vec::with_capacity(37);
    slots.push(probe);
    for (i, name) in NAMES.iter().enumerate().skip(1) {
        let found = library.function(&interface, name).ok_or_else(|| "it is not exported".to_string());
        match found.and_then(|index| slots::check(&instance, i, &index).map(|()| index)) {
            Ok(index) => slots.push(index),
            Err(reason) => {
                let text = format!("cannot find symbol \"{}\" in NCCL. Reason: {reason}", ORIGINALS[i]);
                let error = failed(text);
                tracing::error!(plugin = %library.name, "{}", error.sentinel);
                return Err(error);
            }
        }
    }
    library.set_slots(slots.try_into().map_err(|_| failed("the slot table is not 37 entries".into()))?);
    Ok(Loaded { library, instance, version, generation: 0 })
}

impl Loaded {
    /// An instance of the library for one communicator of one rank.
    pub fn instantiate(
        &self,
        tenant: &Arc<Tenant>,
        abort: &AbortToken,
        holder: Holder,
        patience: Patience,
    ) -> Result<Arc<Instance>, Error> {
        let refused = |refusal| self.instance.supervised("instantiate", refusal);
        tenant.supervisor.admit(&self.library.digest, &tenant.limits).map_err(refused)?;
        let mut state = HostState::new(tenant.clone(), Some(self.library.clone()), abort.clone(), Some(holder.core));
        (state.key, state.seat, state.client) = (Some(holder.key), holder.seat, holder.client);
        Instance::new(&self.library, state, patience).map_err(|cause| Error::Stopped {
            entry: "instantiate",
            plugin: self.library.name.clone(),
            tenant: tenant.name.clone(),
            cause,
            causes: Vec::new(),
        })
    }
}

impl Forward {
    /// The one attempt (INV-05): a second call answers what the first found.
    pub fn load_once(&self, tenant: &Arc<Tenant>, path: &Path, without: &[String]) -> Result<(), LoadError> {
        let _one = hw_bridge::os::lock::lock(&self.attempt);
        match &*self.read() {
            State::Untried => {}
            State::Loaded(_) => return Ok(()),
            State::Failed(text) => return Err(failed(text.clone())),
        }
        match read(tenant, path).and_then(|source| load(tenant, &source, without)) {
            Ok(loaded) => {
                *self.write() = State::Loaded(Arc::new(loaded));
                Ok(())
            }
            Err(e) => {
                *self.write() = State::Failed(e.sentinel.clone());
                Err(e)
            }
        }
    }

    /// Arms the sentinel without an attempt: no plugin was named.
    pub fn none_configured(&self) {
        let _one = hw_bridge::os::lock::lock(&self.attempt);
        let mut state = self.write();
        if matches!(*state, State::Untried) {
            *state = State::Failed(opening("no collectives plugin is configured").sentinel);
        }
    }

    /// Arms the sentinel of a service's load.
    pub fn failed_elsewhere(&self, sentinel: String) {
        *self.write() = State::Failed(sentinel);
    }

    /// Puts a library that was loaded beside the table into it, with the next generation; answers the generation and the
    /// library that was there.
    pub fn replace(&self, mut loaded: Loaded) -> Result<(u64, Arc<Loaded>), Error> {
        let mut state = self.write();
        let State::Loaded(old) = &*state else {
            return Err(Error::Usage("there is no loaded library to replace".into()));
        };
        loaded.generation = old.generation + 1;
        let generation = loaded.generation;
        let old = old.clone();
        *state = State::Loaded(Arc::new(loaded));
        Ok((generation, old))
    }

    /// The library in the table, or why there is none.
    pub fn loaded(&self) -> Result<Arc<Loaded>, String> {
        match &*self.read() {
            State::Loaded(l) => Ok(l.clone()),
            State::Failed(sentinel) => Err(sentinel.clone()),
            State::Untried => Err("none was loaded yet".into()),
        }
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(|p| p.into_inner())
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(|p| p.into_inner())
    }

    /// Which slots are valid: all or none (INV-03).
    pub fn slots(&self) -> [bool; 37] {
        [matches!(*self.read(), State::Loaded(_)); 37]
    }

    /// The sentinel, if armed.
    pub fn sentinel(&self) -> Option<String> {
        match &*self.read() {
            State::Failed(text) => Some(text.clone()),
            _ => None,
        }
    }

    /// The guard of a wrapper: the loaded library, or NRT_FAILURE with the sentinel.
    pub fn guarded(&self, entry: &'static str) -> Result<Arc<Loaded>, Error> {
        match &*self.read() {
            State::Loaded(l) => Ok(l.clone()),
            State::Failed(sentinel) => {
                if !self.reported.swap(true, Ordering::Relaxed) {
                    tracing::error!("NCCL init error: {sentinel}");
                }
                Err(Error::NotLoaded { entry, sentinel: sentinel.clone() })
            }
            State::Untried => {
                Err(Error::NotLoaded { entry, sentinel: "the runtime has not loaded a collectives library yet".into() })
            }
        }
    }

    /// The exempt hot path: straight to the slot. Unreachable after a failed load, because no proxy task can exist then;
    /// should it be reached all the same, it is an error and not a call of nothing.
    pub(crate) fn exempt(&self, entry: &'static str) -> Result<Arc<Loaded>, Error> {
        match &*self.read() {
            State::Loaded(l) => Ok(l.clone()),
            _ => Err(Error::NotLoaded { entry, sentinel: "the slot is empty".into() }),
        }
    }

    /// `ncclGetVersionInfo`: exempt from the guard. Zero-filled, then the slot if it is set; without one NRT_FAILURE.
    pub fn version_info(&self) -> Result<Version, Error> {
        let loaded = match &*self.read() {
            State::Loaded(l) => l.clone(),
            _ => {
                let sentinel = "the version slot is empty".into();
                return Err(Error::NotLoaded { entry: "ncclGetVersionInfo", sentinel });
            }
        };
        let probe = slots::index(&loaded.instance, 0, "neuronGetVersionInfo")?;
        let (instance, params) = (&loaded.instance, (VERSION_INFO_BYTES,));
        let call = instance.call::<(u32,), VersionInfo>("neuronGetVersionInfo", Patience::Usual, None, probe, params);
        Ok(Version::from(&call?.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One attempt, whatever there is to find later, and however many ask for it at once.
    ///
    /// Proves INV-05.
    #[test]
    fn a_load_is_attempted_once() {
        let tenant = crate::tenant::limited(crate::limits::Limits::default());
        let path = std::env::temp_dir().join(format!("wccl-once-{}.wasm", std::process::id()));
        let forward = Forward::default();
        let first = forward.load_once(&tenant, &path, &[]).unwrap_err().sentinel;
        // An attempt would find something else from here on, and say so.
        std::fs::write(&path, "no component").unwrap();
        let other = read(&tenant, &path).and_then(|s| load(&tenant, &s, &[])).map(|_| ()).unwrap_err().sentinel;
        assert_ne!(first, other);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| assert_eq!(forward.load_once(&tenant, &path, &[]).unwrap_err().sentinel, first));
            }
        });
        forward.none_configured();
        assert_eq!(forward.sentinel(), Some(first));
        std::fs::remove_file(&path).unwrap();
    }
}
