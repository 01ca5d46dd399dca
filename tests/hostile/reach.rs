//! Files and addresses that a plugin was not given.

use std::path::{Path, PathBuf};

use tests::zoo::{Plugin, REPLY, SCRATCH, TRANSPORT};
use wccl::{Runtime, RuntimeConfig};

use crate::zoo::{Animal, Cage, Group, animal, at_once, gives_up, opened, said};

fn refused(cause: &str) -> String {
    format!("neuronGetUniqueId of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): {cause}")
}

/// Asks for the file that `name` names, though no such was given.
fn file(what: &str, name: &'static str) -> Animal {
    at_once(what, &refused(&format!("no file was granted under {name}")), move |p| {
        let name = p.text(name);
        format!("(call $files.read {name} (i32.const {REPLY}))")
    })
}

/// A pipe in the cage.
fn pipe(cage: &Cage) -> anyhow::Result<PathBuf> {
    let path = cage.path("pipe");
    let (owner, kind) = (rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR, rustix::fs::FileType::Fifo);
    rustix::fs::mknodat(rustix::fs::CWD, &path, kind, owner, 0)?;
    Ok(path)
}

/// Reads the file that it was given.
fn reads(cage: &Cage, given: &Path) -> anyhow::Result<String> {
    let mut p = Plugin::lone_rank()?;
    let name = p.text("NCCL_TOPO_FILE");
    p.body("neuron-get-unique-id", format!("(call $files.read {name} (i32.const {REPLY})) {}", gives_up()));
    let mut c = cage.config(&p)?;
    c.vars.insert("NCCL_TOPO_FILE".into(), given.display().to_string());
    said(opened(c)?.unique_id(1))
}

fn address(what: &str, cause: &str, call: &'static str, store: &'static str) -> Animal {
    at_once(what, &refused(cause), move |_| {
        format!(
            "{store} (call $sockets.{call} (i32.const {SCRATCH}) (i32.const 28) (i32.const 20) (i32.const {REPLY}))"
        )
    })
}

/// One that is only looked at, as by `wccl plugin check`, and uses the probe to reach something.
fn looked_at(what: &str, cause: &str, call: &'static str) -> Animal {
    let sentence = format!(
        "Error opening libnccom.so, cannot use collective operations! plugin animal.wasm stopped in neuronGetVersionInfo on \
         tenant hostile: wasm trap: wasm `unreachable` instruction executed; data in flight goes on: {cause}"
    );
    animal(format!("only looked at: {what}"), sentence, move |cage| {
        let mut p = Plugin::lone_rank()?;
        let dump = p.text("NCCL_TOPO_DUMP_FILE");
        let (topo, name) = (p.text("NCCL_TOPO_FILE"), p.text("localhost"));
        let call = [("{dump}", dump), ("{topo}", topo), ("{name}", name)]
            .iter()
            .fold(call.to_string(), |call, (word, text)| call.replace(word, &text.to_string()));
        p.body("neuron-get-version-info", format!("{call} unreachable"));
        let path = cage.path("dump.xml");
        let mut c = RuntimeConfig { examine: true, ..cage.config(&p)? };
        c.vars.insert("NCCL_TOPO_DUMP_FILE".into(), path.display().to_string());
        c.vars.insert("NCCL_TOPO_FILE".into(), cage.put("topology.xml", b"<system/>")?.display().to_string());
        let runtime = Runtime::open(c)?;
        anyhow::ensure!(!path.exists(), "it has written a file");
        Ok(runtime.load_error().ok_or_else(|| anyhow::anyhow!("it loaded"))?.sentinel)
    })
}

pub fn group() -> Group {
    assert_eq!(SCRATCH, 4096);
    let animals = vec![
        file("a file by its absolute path", "/etc/passwd"),
        file("a file by a path that climbs", "../../../../etc/passwd"),
        file("a file that a variable names which is not its own", "HOME"),
        file("a file with a name of nothing", ""),
        file("a file that was not given", "NCCL_TOPO_FILE"),
        at_once(
            "writing a file that was given for reading",
            &refused("no file was granted under NCCL_TOPO_FILE"),
            |p| {
                let name = p.text("NCCL_TOPO_FILE");
                format!("(call $files.write {name} (i32.const {SCRATCH}) (i32.const 1) (i32.const {REPLY}))")
            },
        ),
        animal(
            "a file that was given, and is a link to one that was not",
            "neuronGetUniqueId of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): the file …/topology.xml, named by NCCL_TOPO_FILE, cannot be read: it cannot be opened: a path led outside of the filesystem",
            |cage| {
                let link = cage.put("x", b"")?.with_file_name("topology.xml");
                std::os::unix::fs::symlink("/etc/passwd", &link)?;
                reads(cage, &link)
            },
        ),
        animal(
            "a file that was given, and is a device without an end",
            "neuronGetUniqueId of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): the file /dev/zero, named by NCCL_TOPO_FILE, cannot be read: it is not a regular file",
            |cage| reads(cage, Path::new("/dev/zero")),
        ),
        animal(
            "a file that was given, and is a pipe that nobody writes to",
            "neuronGetUniqueId of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): the file …/pipe, named by NCCL_TOPO_FILE, cannot be read: it is not a regular file",
            |cage| reads(cage, &pipe(cage)?),
        ),
        animal(
            "a file that was given for writing, and is a pipe",
            "neuronGetUniqueId of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): the file …/pipe, named by NCCL_TOPO_DUMP_FILE, cannot be written: it is not a regular file",
            |cage| {
                let path = pipe(cage)?;
                // Somebody reads it, or it could not be opened at all.
                let _reader = std::fs::File::options().read(true).write(true).open(&path)?;
                let mut p = Plugin::lone_rank()?;
                let name = p.text("NCCL_TOPO_DUMP_FILE");
                let write =
                    format!("(call $files.write {name} (i32.const {SCRATCH}) (i32.const 1) (i32.const {REPLY}))");
                p.body("neuron-get-unique-id", format!("{write} {}", gives_up()));
                let mut c = cage.config(&p)?;
                c.vars.insert("NCCL_TOPO_DUMP_FILE".into(), path.display().to_string());
                said(opened(c)?.unique_id(1))
            },
        ),
        at_once(
            "binding the program's thread to a CPU, which the program did not ask for",
            &refused("only neuronSetAffinity binds a thread to CPUs"),
            |_| {
                format!(
                    "(i64.store (i32.const {SCRATCH}) (i64.const 1))
                     (call $affinity.set (i32.const {SCRATCH}) (i32.const 1) (i32.const {REPLY}))"
                )
            },
        ),
        address(
            "an address of another family",
            "a socket address has family 1; AF_INET (2) and AF_INET6 (10) are supported",
            "connect",
            "(i32.store (i32.const 4096) (i32.const 1))",
        ),
        at_once("an address that is too short", &refused("a socket address has 28 bytes, the plugin gave 3"), |_| {
            format!("(call $sockets.connect (i32.const {SCRATCH}) (i32.const 3) (i32.const 20) (i32.const {REPLY}))")
        }),
        address(
            "an address of another machine to listen on",
            "listening on 203.0.113.1:0 failed: …",
            "listen",
            "(i32.store (i32.const 4096) (i32.const 2)) (i32.store (i32.const 4100) (i32.const 0x017100cb))",
        ),
        animal(
            "an interface that was not granted",
            "Error opening libnccom.so, cannot use collective operations! plugin …/animal.wasm: it imports `wasi:cli/environment@0.2.0`; WASI is off for transports unless the tenant's policy grants the interface: build the plugin for wasm32-unknown-unknown",
            |cage| {
                let mut p = Plugin::transport()?;
                p.wit.add("wasi", "package wasi:cli@0.2.0; interface environment { get-environment: func() -> list<tuple<string, string>>; }");
                p.world = TRANSPORT.replace("include", "import wasi:cli/environment@0.2.0; include");
                p.import("environment", "get-environment");
                let runtime = Runtime::open(cage.config(&p)?)?;
                Ok(runtime.load_error().ok_or_else(|| anyhow::anyhow!("it loaded"))?.sentinel)
            },
        ),
        looked_at(
            "it listens",
            "tenant hostile asked to listen on 127.0.0.1:0; network.listen grants nothing",
            "(i32.store (i32.const 4096) (i32.const 2)) (i32.store (i32.const 4100) (i32.const 0x0100007f))
             (call $sockets.listen (i32.const 4096) (i32.const 28) (i32.const 50) (i32.const 2176))",
        ),
        looked_at(
            "it connects",
            "tenant hostile asked to connect to 127.0.0.1:80; network.reach grants nothing",
            "(i32.store (i32.const 4096) (i32.const 2)) (i32.store16 offset=2 (i32.const 4096) (i32.const 0x5000)) (i32.store (i32.const 4100) (i32.const 0x0100007f))
             (call $sockets.connect (i32.const 4096) (i32.const 28) (i32.const 50) (i32.const 2176))",
        ),
        looked_at(
            "it writes the file that a variable names",
            "tenant hostile asked to write the file named by NCCL_TOPO_DUMP_FILE; files.read grants nothing",
            "(call $files.write {dump} (i32.const 4096) (i32.const 1) (i32.const 2176))",
        ),
        looked_at(
            "it reads the file that a variable names",
            "tenant hostile asked to read the file named by NCCL_TOPO_FILE; files.read grants nothing",
            "(call $files.read {topo} (i32.const 2176))",
        ),
        looked_at(
            "it has a name resolved",
            "tenant hostile asked to look up host name localhost; network.reach grants nothing",
            "(call $sockets.resolve {name} (i32.const 80) (i32.const 5000) (i32.const 2176))",
        ),
        looked_at(
            "it publishes a name",
            "a plugin that is only looked at publishes and looks up no names",
            "(call $rendezvous.publish (i32.const 4200) (i32.const 128) (i32.const 4196) (i32.const 3) (i32.const 4096) (i32.const 28) (i32.const 2176))",
        ),
        looked_at(
            "it looks up a name",
            "a plugin that is only looked at publishes and looks up no names",
            "(call $rendezvous.lookup (i32.const 4200) (i32.const 128) (i32.const 4196) (i32.const 3) (i32.const 1000) (i32.const 2176))",
        ),
        looked_at(
            "it starts a task",
            "tenant hostile asked for one more background task; limits.tasks grants 0",
            "(i32.store8 (i32.const 4096) (i32.const 97))
             (call $tasks.spawn (i32.const 4096) (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 2176))",
        ),
    ];
    Group { title: "What they must not reach", animals }
}
