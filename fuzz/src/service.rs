//! What a client of the service may say, and what a service may answer.

use std::path::PathBuf;
use std::sync::OnceLock;

use host_runtime::nrt::RuntimeConfig;
use host_runtime::serve::{ServeConfig, Server, fuzzing, identify};

/// A service of one tenant, whose plugin is not there: what is tried is the conversation.
struct Service {
    _server: Server,
    socket: PathBuf,
}

fn start() -> Result<Service, Box<dyn std::error::Error>> {
    let dir = std::env::temp_dir().join(format!("wccl-fuzz-service-{}", std::process::id()));
    // Of another process that had this number.
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(dir.join("policies"))?;
    let policy = "tenant = \"a\"\n[plugins]\ndirectory = \"/nowhere\"\nallow = [{ file = \"none.wasm\" }]\n[devices]\ncores = [0]\nhbm = \"1 MiB\"\n";
    std::fs::write(dir.join("policies/a.toml"), policy)?;
    let sockets = dir.join("sockets");
    let config = ServeConfig {
        policies: dir.join("policies"),
        sockets: sockets.clone(),
        base: RuntimeConfig::default(),
        identify,
    };
    let server = Server::start(&config)?;
    Ok(Service { _server: server, socket: sockets.join("a.sock") })
}

/// An even first byte: a message's body, of any kind. An odd one: what a client says after its hello.
pub fn service(data: &[u8]) {
    static SERVICE: OnceLock<Service> = OnceLock::new();
    let Some((kind, bytes)) = data.split_first() else { return };
    if kind & 1 == 0 {
        return fuzzing::messages(bytes);
    }
    let service = SERVICE.get_or_init(|| start().unwrap_or_else(|e| panic!("the service does not start: {e}")));
    if let Err(e) = fuzzing::session(&service.socket, bytes) {
        panic!("the service does not end the connection: {e}");
    }
}
