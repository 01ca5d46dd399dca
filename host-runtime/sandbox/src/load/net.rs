//! The soft step: opening the net component, and loading one beside it for a swap.

use std::path::Path;
use std::sync::Arc;

use crate::imports::net::NetLibrary;
use crate::load::{PluginKind, Source};
use crate::store::Library;
use crate::tenant::{NetState, Tenant};

/// The soft step: opens the net component, or notes why there is none. Never fails.
pub fn open(tenant: &Arc<Tenant>, path: Option<&Path>) {
    let state = match path {
        None => NetState::Absent("no net plugin is configured".into()),
        Some(path) => match load(tenant, path) {
            Ok(library) => {
                tracing::info!(plugin = %library.name, "dlopened libnccom-net.so");
                NetState::Open(Arc::new(NetLibrary::new(path, library)))
            }
            Err(why) => NetState::Absent(format!("{}: {why}", path.display())),
        },
    };
    if let NetState::Absent(why) = &state {
        tracing::info!("no network between servers: {why}; install a net plugin if ranks run on more than one server");
    }
    *tenant.net() = state;
}

/// Loads a net component beside the one that serves, and brings it as far as that one is.
///
/// # Errors
/// Why it cannot take over.
pub fn prepare(tenant: &Arc<Tenant>, path: &Path) -> Result<Arc<NetLibrary>, String> {
    let named = |why: String| format!("net plugin {}: {why}", path.display());
    let library = load(tenant, path).map_err(named)?;
    let new = Arc::new(NetLibrary::new(path, library));
    new.follow(tenant).map_err(named)?;
    Ok(new)
}

fn load(tenant: &Tenant, path: &Path) -> Result<Arc<Library>, String> {
    Source::read(tenant, path)?.load(tenant, PluginKind::Net, &[])
}

/// Puts a prepared net component in the place of the one that served; answers that one.
pub fn exchange(tenant: &Tenant, new: Arc<NetLibrary>) -> NetState {
    std::mem::replace(&mut *tenant.net(), NetState::Open(new))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::imports::net::V6;
    use std::time::Duration;

    use crate::limits::Limits;
    use crate::tenant::limited;

    /// A net plugin whose start function does this.
    fn starting(body: &str) -> NetLibrary {
        let wat = format!(
            "(component
                (core module $m (func $s {body}) (start $s))
                (core instance (instantiate $m))
                (instance $v6)
                (export \"{V6}\" (instance $v6)))"
        );
        let library = Library::link("net.wasm", &wat::parse_str(wat).unwrap(), PluginKind::Net, &[]).unwrap();
        NetLibrary::new(Path::new("net.wasm"), library)
    }

    #[test]
    fn one_that_stops_in_every_binding_is_quarantined() {
        let tenant = limited(Limits { restarts: 2, ..Limits::default() });
        let net = starting("unreachable");
        for _ in 0..3 {
            let e = net.bind(&tenant).unwrap_err();
            assert!(e.contains("it stopped while it was instantiated"), "{e}");
        }
        let e = net.bind(&tenant).unwrap_err();
        assert!(e.contains("it is quarantined: it stopped 3 times"), "{e}");
        assert_eq!(tenant.counters.traps(), 3);
    }

    /// Who calls it, or binds it too, would wait for a start function that does not end.
    #[test]
    fn no_lock_is_held_while_a_guest_starts() {
        let tenant = limited(Limits { call: Duration::from_secs(3), ..Limits::default() });
        let net = starting("(loop br 0)");
        std::thread::scope(|s| {
            let binds = s.spawn(|| net.bind(&tenant));
            while tenant.counters.component_calls() == 0 && !binds.is_finished() {
                std::thread::yield_now();
            }
            // It is in the guest now, or has come back: either way nobody holds it up.
            assert!(net.is_free(), "the lock is held while guest code runs");
            let e = binds.join().unwrap().unwrap_err();
            assert!(e.contains("of guest time"), "{e}");
        });
    }
}
