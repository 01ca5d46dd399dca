//! A plugin that calls of its host whatever the bytes say: an interpreter, compiled once, whose script they are.
//!
//! It runs in `neuronBootstrapSend`, whose message the script is, and in the tasks that a script starts, whose state is one.
//! A script is calls: a byte that chooses the function, then its operands.
//!
//! | operand | bytes |
//! |---|---|
//! | number | below 128 itself; 128 a power of two; 192 one below zero; 208 an address at the end of memory; 224 one in [`SCRATCH`]; 240 the next 4 bytes; 248 the next 8 |
//! | deadline | a number; but for -1 only its last three bits |
//! | handle | below 224 one of the last eight of its kind that the host gave; else the next number |
//! | list | below 224 so many elements, which follow; below 239 what one of the last four answers names; 239 an address that it may use; else two numbers |

use std::collections::HashMap;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use anyhow::{Context, Result, anyhow, ensure};
use hw_bridge::model::{HostMem, IncrementRegister};
use sandbox::policy::Policy;
use tests::zoo::{ANSWER, Operand, Plugin, REPLY, SCRATCH, ok_bytes, ok_unit};
use wccl::{CommOptions, Communicator, Runtime, RuntimeConfig};

use crate::guest::Wire;
use crate::leak::Open;

/// Bytes between two answers of the host, of which the last four stay.
const ANSWER_BYTES: u32 = 64;
/// Where the last eight handles of each kind are, the newest first.
const HANDLES: u32 = REPLY + 256;
const HANDLES_BYTES: u32 = 32;
/// Where what follows as an operand is aligned.
const STAGE: u32 = SCRATCH;
const STAGE_END: u32 = SCRATCH + 4096;
/// Where the address stands that a script may listen on and reach.
const OWN: u32 = HANDLES + 32 * HANDLES_BYTES;

/// Functions that every script uses.
const INTERPRETER: &str = r#"
(global $at (mut i32) (i32.const 0)) (global $end (mut i32) (i32.const 0))
(global $stage (mut i32) (i32.const STAGE)) (global $calls (mut i32) (i32.const 0))
(global $elsewhere (mut i32) (i32.const 0)) (global $last (mut i32) (i32.const REPLY))
(type $call (func))
(func $byte (result i32)
  (if (i32.ge_u (global.get $at) (global.get $end)) (then (return (i32.const 0))))
  (i32.load8_u (global.get $at))
  (global.set $at (i32.add (global.get $at) (i32.const 1))))
(func $literal (param $bytes i32) (result i64) (local $n i64) (local $shift i64)
  (loop $next
    (local.set $n (i64.or (local.get $n) (i64.shl (i64.extend_i32_u (call $byte)) (local.get $shift))))
    (local.set $shift (i64.add (local.get $shift) (i64.const 8)))
    (br_if $next (local.tee $bytes (i32.sub (local.get $bytes) (i32.const 1)))))
  (local.get $n))
(func $number (result i64) (local $b i32) (local $low i64)
  (local.set $b (call $byte))
  (local.set $low (i64.extend_i32_u (i32.and (local.get $b) (i32.const 15))))
  (if (i32.lt_u (local.get $b) (i32.const 128)) (then (return (i64.extend_i32_u (local.get $b)))))
  (if (i32.lt_u (local.get $b) (i32.const 192))
    (then (return (i64.shl (i64.const 1) (i64.extend_i32_u (i32.and (local.get $b) (i32.const 63)))))))
  (if (i32.lt_u (local.get $b) (i32.const 208)) (then (return (i64.sub (i64.const -1) (local.get $low)))))
  (if (i32.lt_u (local.get $b) (i32.const 224))
    (then (return (i64.sub (i64.shl (i64.extend_i32_u (memory.size)) (i64.const 16)) (local.get $low)))))
  (if (i32.lt_u (local.get $b) (i32.const 240))
    (then (return (i64.add (i64.const SCRATCH) (i64.shl (local.get $low) (i64.const 8))))))
  (call $literal (if (result i32) (i32.lt_u (local.get $b) (i32.const 248)) (then (i32.const 4)) (else (i32.const 8)))))
(func $small (result i32) (i32.wrap_i64 (call $number)))
(func $deadline (result i32) (local $n i32)
  (local.set $n (call $small))
  (select (local.get $n) (i32.and (local.get $n) (i32.const 7)) (i32.eq (local.get $n) (i32.const -1))))
(func $handle (param $kind i32) (result i32) (local $b i32) (local $found i32)
  (local.set $b (call $byte))
  (if (i32.ge_u (local.get $b) (i32.const 224)) (then (return (call $small))))
  (local.set $found (i32.load (i32.add (local.get $kind) (i32.shl (i32.and (local.get $b) (i32.const 7)) (i32.const 2)))))
  (select (local.get $found) (i32.load (local.get $kind)) (local.get $found)))
(func $made (param $kind i32) (param $handle i32)
  (memory.copy (i32.add (local.get $kind) (i32.const 4)) (local.get $kind) (i32.const 28))
  (i32.store (local.get $kind) (local.get $handle)))
(func $answer_of (param $back i32) (result i32)
  (i32.add (i32.const REPLY) (i32.mul (i32.const ANSWER_BYTES)
    (i32.and (i32.sub (global.get $calls) (local.get $back)) (i32.const 3)))))
(func $list (param $size i32) (result i32 i32) (local $b i32) (local $bytes i32) (local $there i32)
  (local.set $b (call $byte))
  (if (i32.lt_u (local.get $b) (i32.const 224)) (then
    (local.set $bytes (i32.mul (local.get $b) (local.get $size)))
    (if (i32.gt_u (i32.add (global.get $stage) (local.get $bytes)) (i32.const STAGE_END))
      (then (global.set $stage (i32.const STAGE))))
    (local.set $there (i32.sub (global.get $end) (global.get $at)))
    (local.set $there (select (local.get $bytes) (local.get $there) (i32.lt_u (local.get $bytes) (local.get $there))))
    (memory.copy (global.get $stage) (global.get $at) (local.get $there))
    (global.set $at (i32.add (global.get $at) (local.get $there)))
    (return (global.get $stage) (local.get $b)
      (global.set $stage (i32.and (i32.add (i32.add (global.get $stage) (local.get $bytes)) (i32.const 7)) (i32.const -8))))))
  (if (i32.eq (local.get $b) (i32.const 239)) (then (return (i32.const OWN) (i32.const 28))))
  (if (i32.lt_u (local.get $b) (i32.const 240)) (then
    (local.set $there (i32.add
      (call $answer_of (i32.add (i32.const 1) (i32.and (i32.shr_u (local.get $b) (i32.const 2)) (i32.const 3))))
      (i32.shl (i32.and (local.get $b) (i32.const 3)) (i32.const 2))))
    (return (i32.load (local.get $there)) (i32.load offset=4 (local.get $there)))))
  (call $small) (call $small))
(func $reply (result i32)
  (global.set $last (select (global.get $elsewhere) (call $answer_of (i32.const 0)) (global.get $elsewhere)))
  (global.set $elsewhere (i32.const 0))
  (global.get $last))
(func $answered (param $kind i32)
  (if (local.get $kind) (then (if (i32.eqz (i32.load8_u (global.get $last)))
    (then (call $made (local.get $kind) (i32.load offset=4 (global.get $last)))))))
  (global.set $calls (i32.add (global.get $calls) (i32.const 1))))
(func $script (param $script i32) (param $bytes i32)
  (global.set $at (local.get $script))
  (global.set $end (i32.add (local.get $script) (local.get $bytes)))
  (block $done (loop $next
    (br_if $done (i32.ge_u (global.get $at) (global.get $end)))
    (call_indirect (type $call) (i32.rem_u (call $byte) (i32.const FUNCTIONS)))
    (br $next))))
"#;

/// What a script can do beside calling the host. What takes long has to be meant.
const OTHERS: &str = r#"
(func $elsewhere (global.set $elsewhere (call $small)))
(func $grow (drop (memory.grow (call $small))))
(func $trap unreachable)
(func $spin (if (i32.eq (call $small) (i32.const -1)) (then (loop br 0))))
(func $deep (if (i32.eq (call $small) (i32.const -1)) (then (call $deeper))))
(func $deeper (call $deeper))
"#;
const OTHER_NAMES: [&str; 5] = ["$elsewhere", "$grow", "$trap", "$spin", "$deep"];

/// What a policy can grant of WASI and a script can call: a few of each.
const WASI: [(&str, &str); 3] = [
    (
        "random",
        "package wasi:random@0.2.0; interface random { get-random-bytes: func(len: u64) -> list<u8>; get-random-u64: func() -> u64; }",
    ),
    (
        "clocks",
        "package wasi:clocks@0.2.0; interface monotonic-clock { use wasi:io/poll@0.2.0.{pollable}; now: func() -> u64; subscribe-duration: func(when: u64) -> pollable; }",
    ),
    (
        "io",
        "package wasi:io@0.2.0; interface poll { resource pollable { ready: func() -> bool; block: func(); } poll: func(in: list<borrow<pollable>>) -> list<u32>; }",
    ),
];

/// The plugin. A script's byte chooses a function by its place: as they stand in the contracts, then the others.
fn interpreter(own: SocketAddrV4) -> Result<Plugin> {
    let mut p = Plugin::lone_rank()?;
    for (name, text) in WASI {
        p.wit.add(name, text);
    }
    p.world = "package zoo:plugin; world plugin { include wccl:worlds/transport; import wasi:io/poll@0.2.0;
  import wasi:clocks/monotonic-clock@0.2.0; import wasi:random/random@0.2.0; }"
        .into();
    let all = p.importable()?;
    let mut kinds: Vec<String> = Vec::new();
    let mut kind = |name: &str| {
        let nth = kinds.iter().position(|k| k == name).unwrap_or_else(|| {
            kinds.push(name.into());
            kinds.len() - 1
        });
        HANDLES + HANDLES_BYTES * nth as u32
    };
    // A look-up goes out to whatever the resolver of this machine asks: of this name it knows the answer itself.
    let localhost = p.text("localhost");
    let mut functions = String::new();
    let mut table: Vec<String> = Vec::new();
    for (n, import) in all.iter().enumerate() {
        table.push(format!("$call{n}"));
        write!(functions, "(func $call{n} ")?;
        let mut call = format!("(call {}", import.name);
        for (name, operands) in &import.params {
            for operand in operands {
                match operand {
                    Operand::I32 if name == "deadline-ms" => write!(call, " (call $deadline)")?,
                    Operand::I32 => write!(call, " (call $small)")?,
                    Operand::I64 => write!(call, " (call $number)")?,
                    Operand::List(_) if import.name == "$sockets.resolve" => write!(call, " {localhost}")?,
                    Operand::List(size) => write!(call, " (call $list (i32.const {size}))")?,
                    Operand::Handle(of) => write!(call, " (call $handle (i32.const {}))", kind(of))?,
                }
            }
        }
        call += if import.replies { " (call $reply))" } else { ")" };
        let made = import.makes.as_deref().map_or(0, &mut kind);
        match (import.leaves, made) {
            (true, 0) => writeln!(functions, "(drop {call}))")?,
            (true, kind) => writeln!(functions, "(call $made (i32.const {kind}) {call}))")?,
            (false, kind) => writeln!(functions, "{call} (call $answered (i32.const {kind})))")?,
        }
    }
    table.extend(OTHER_NAMES.map(String::from));
    let numbers = [
        ("ANSWER_BYTES", ANSWER_BYTES),
        ("STAGE_END", STAGE_END),
        ("STAGE", STAGE),
        ("SCRATCH", SCRATCH),
        ("REPLY", REPLY),
        ("OWN", OWN),
        ("FUNCTIONS", table.len() as u32),
    ];
    let text = numbers.iter().fold(INTERPRETER.to_string(), |text, (name, n)| text.replace(name, &n.to_string()));
    p.extra(&text).extra(OTHERS).extra(&functions);
    p.extra(&format!("(table funcref (elem {}))", table.join(" ")));
    let address: String = [&[2, 0][..], &own.port().to_be_bytes(), &own.ip().octets()]
        .concat()
        .iter()
        .map(|b| format!("\\{b:02x}"))
        .collect();
    p.extra(&format!("(data (i32.const {OWN}) \"{address}\")"));
    // The communicator is lent and has to be given back. A failure takes what the host has noted to the caller.
    let (communicator, listener) = (kind("communicator"), kind("listener"));
    p.body(
        "neuron-bootstrap-send",
        format!(
            "(call $made (i32.const {communicator}) (local.get 0)) (call $script (local.get 2) (local.get 3))
  (call $objects.communicator.drop (local.get 0))
  (i32.store8 (i32.const {ANSWER}) (i32.const 1)) (i32.store8 (i32.const {at}) (i32.const 1)) (i32.const {ANSWER})",
            at = ANSWER + 4
        ),
    );
    // Between two scripts: unbinds the net plugin. Before the first: what waits for WASI's pollables stays with the process.
    p.body(
        "neuron-get-unique-id",
        format!(
            "(local $p i32) (call $net.fini (i32.const {REPLY}))
  (call $poll.pollable.block (local.tee $p (call $monotonic-clock.subscribe-duration (i64.const 1))))
  (call $poll.pollable.drop (local.get $p)) {}",
            ok_bytes(SCRATCH, 128)
        ),
    );
    p.body(
        "run",
        format!(
            "(if (local.get 4) (then (call $made (i32.const {listener}) (local.get 5))))
  (call $script (local.get 2) (local.get 3)) {}",
            ok_unit()
        ),
    );
    Ok(p)
}

/// A net plugin for the scripts' tenant: three of its entries answer, the others stop it.
fn net() -> Result<Plugin> {
    let mut p = Plugin::new("package zoo:plugin; world plugin { export nccl:net/nccl-net-plugin-v6; }")?;
    p.body("init", ok_unit()).body("fini", ok_unit());
    p.body("devices", format!("(i64.store (i32.const {ANSWER}) (i64.const {})) (i32.const {ANSWER})", 2u64 << 32));
    Ok(p)
}

/// Two tenants: the one whose plugin is driven, and one that must not notice.
struct Tenants {
    driven: Runtime,
    /// A rank of the other one.
    honest: Communicator,
}

/// Opens a runtime for `plugin`, in a folder of its own, under a policy that lets it reach addresses of this process alone.
fn open(folder: &Path, plugin: &Plugin, tenant: &str, more: &str) -> Result<Runtime> {
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("plugin.wasm"), plugin.build()?)?;
    std::fs::write(folder.join("net.wasm"), net()?.build()?)?;
    std::fs::write(folder.join("topology"), "<system/>")?;
    let text = format!(
        "tenant = \"{tenant}-{}\"\nplugins = {{ directory = \"{}\", allow = [{{ file = \"plugin.wasm\" }}, {{ file = \"net.wasm\" }}] }}\n{more}\n\
         [devices]\ncores = [0]\nhbm = \"1 MiB\"\n",
        std::process::id(),
        folder.display()
    );
    let runtime = Runtime::open(RuntimeConfig {
        plugin: Some("plugin.wasm".into()),
        net_plugin: Some("net.wasm".into()),
        policy: Some(Arc::new(Policy::parse(Path::new("policy.toml"), &text)?)),
        vars: [("NCCL_TOPO_FILE".into(), folder.join("topology").display().to_string())].into(),
        control: false,
        ..RuntimeConfig::default()
    })?;
    match runtime.load_error() {
        None => Ok(runtime),
        Some(e) => Err(anyhow!(e.sentinel)),
    }
}

fn tenants() -> Result<Tenants> {
    let folder: PathBuf = std::env::temp_dir().join(format!("wccl-fuzz-guest-{}", std::process::id()));
    // Of another process that had this number.
    let _ = std::fs::remove_dir_all(&folder);
    // Addresses of the loopback that nobody else uses.
    let [a, b, ..] = std::process::id().to_le_bytes();
    let own = SocketAddrV4::new(Ipv4Addr::new(127, 64 | b, a, 1), 20_000);
    let ports = format!("{own}-{}", own.port() + 3);
    let limits = format!(
        "[limits]\nmemory = \"2 MiB\"\ntable = 200\ncall = \"50 ms\"\ncall-in-all = \"200 ms\"\ncommunicators = 4\nconnections = 6\n\
         objects = 16\ntasks = 2\nlog-lines = 8\nrestarts = 4294967295\nrestart-window = \"1 ms\"\nrestart-pause = \"1 ms\"\n\
         [network]\nlisten = [\"{ports}\"]\nreach = [\"{ports}\"]\n[files]\nread = [\"NCCL_TOPO_FILE\"]\n\
         [wasi]\ngrant = [\"wasi:clocks/monotonic-clock\", \"wasi:io/poll\", \"wasi:random/random\"]"
    );
    let driven = open(&folder.join("driven"), &interpreter(own)?, "driven", &limits)?;
    driven.unique_id(1)?;
    let honest = open(&folder.join("honest"), &Plugin::lone_rank()?, "honest", "")?;
    let honest = honest.init_comm(CommOptions::with_id([1; 128], 0, 1))?;
    Ok(Tenants { driven, honest })
}

/// A script, run by a plugin.
pub fn guest(script: &[u8]) {
    static TENANTS: OnceLock<Tenants> = OnceLock::new();
    let tenants = TENANTS.get_or_init(|| tenants().unwrap_or_else(|e| panic!("the tenants do not start: {e:#}")));
    // A thread of its own: a plugin may bind the one that it runs on.
    let ran = std::thread::scope(|s| s.spawn(|| run(tenants, script)).join());
    match ran {
        Ok(Ok(())) => {}
        Ok(Err(e)) => panic!("the script: {e:#}"),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn run(tenants: &Tenants, script: &[u8]) -> Result<()> {
    let tenant = tenants.driven.tenant();
    let open = Open::now()?;
    let refused = tenant.counters.refusals();
    // An id serves once.
    static IDS: AtomicU64 = AtomicU64::new(1);
    let mut id = [1; 128];
    id[28..36].copy_from_slice(&IDS.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    let comm = tenants.driven.init_comm(CommOptions::with_id(id, 0, 1))?;
    let registers = HashMap::from([(1, Arc::new(IncrementRegister::recording(4)))]);
    let sizes = Arc::new(Mutex::new(HostMem::new(1)?));
    let lock = "nothing has panicked with it";
    comm.core().proxy.lock().expect(lock).attach(Box::new(Wire::default()), registers);
    comm.core().dynamic.lock().expect(lock).insert(1, sizes);
    let most = script.len().min(65_520);
    let said = comm.bootstrap_send(0, &script[..most]).err().map_or_else(String::new, |e| e.to_string());
    ensure!(!said.is_empty(), "the entry answers a failure, and none arrived");
    drop(comm);
    // What says that a limit of the policy has refused something has counted it.
    let now = tenant.counters.refusals();
    for (before, _) in said.match_indices(" grants ") {
        let key = said[..before].rsplit("; ").next().unwrap_or_default();
        assert!(now.get(key) > refused.get(key), "a refusal by {key} was not counted: {said}");
    }
    // Whatever it held is gone, with its tasks. The last of them may have bound the net plugin.
    let working = || {
        let alive = tenant.communicators() + tenant.tasks_alive();
        alive + usize::from(alive == 0 && tenants.driven.unique_id(1).is_err())
    };
    open.again(working).with_context(|| format!("after {said}"))?;
    assert_eq!(tenants.honest.runtime().unique_id(1)?[..28], [0; 28]);
    assert_eq!(tenants.honest.query_info()?.rank_n, 1);
    Ok(())
}
