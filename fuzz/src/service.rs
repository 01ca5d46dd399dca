//! What a client of the service may say, and what a service may answer.

use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::Result;
use tests::zoo::{Body, Plugin};
use wccl::RuntimeConfig;
use wccl::serve::{ServeConfig, Server, fuzzing, identify};

use crate::leak::Open;

/// A service of one tenant, whose plugin serves groups of one rank and stops when it is asked for a device.
struct Service {
    server: Server,
    socket: PathBuf,
}

fn start() -> Result<Service> {
    let dir = std::env::temp_dir().join(format!("wccl-fuzz-service-{}", std::process::id()));
    // Of another process that had this number.
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(dir.join("policies"))?;
    let mut plugin = Plugin::lone_rank()?;
    plugin.set("neuron-get-peer-device-id", Body::Trap);
    std::fs::write(dir.join("lone.wasm"), plugin.build()?)?;
    let policy = format!(
        "tenant = \"a\"\nplugins = {{ directory = \"{}\", allow = [{{ file = \"lone.wasm\" }}] }}\n\
         [devices]\ncores = [0, 1]\nhbm = \"1 MiB\"\n\
         [limits]\ncall = \"1 s\"\nrestarts = 4294967295\nrestart-window = \"1 ms\"\nrestart-pause = \"1 ms\"\n",
        dir.display()
    );
    std::fs::write(dir.join("policies/a.toml"), policy)?;
    let sockets = dir.join("sockets");
    let base = RuntimeConfig { control: false, ..RuntimeConfig::default() };
    let config = ServeConfig {
        policies: dir.join("policies"),
        sockets: sockets.clone(),
        base,
        market: None,
        allow_own_user: true,
        identify,
    };
    Ok(Service { server: Server::start(&config)?, socket: sockets.join("a.sock") })
}

/// The first byte chooses. With 0 or 2 a message's body, of any kind. With 1 what a client says after its hello, all at
/// once; with 3 in turns, where each of its requests waits for the answer to the one before.
pub fn service(data: &[u8]) {
    static SERVICE: OnceLock<Service> = OnceLock::new();
    let Some((kind, bytes)) = data.split_first() else { return };
    if kind & 1 == 0 {
        return fuzzing::messages(bytes);
    }
    let service = SERVICE.get_or_init(|| start().unwrap_or_else(|e| panic!("the service does not start: {e:#}")));
    let session = || -> Result<()> {
        let open = Open::now()?;
        fuzzing::session(&service.socket, bytes, kind & 2 != 0)?;
        open.again(|| service.server.working().len())
    };
    if let Err(e) = session() {
        panic!("the service does not end the connection: {e:#}");
    }
}
