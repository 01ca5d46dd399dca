//! Tenants: what a policy grants, and that nothing else is had. A tenant that is refused does not disturb another in the same
//! process.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hw_bridge::os::shown::stands;
use sandbox::load::signing::SecretKey;
use sandbox::policy::Policy;
use tests::zoo::{self, ANSWER, Plugin, REPLY, SCRATCH, ok_bytes};
use wccl::{CommOptions, Communicator, DataType, Error, Io, ReduceOp, Runtime, RuntimeConfig};

use crate::common::{HANG, bytes_of, free_port, plugin_file, values_of};

/// A folder of plugins, gone when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("tenants-{}-{nth}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// One with a plugin in it, as `plugin.wasm`.
    fn with(plugin: &Plugin) -> Folder {
        let folder = Folder::new();
        folder.put("plugin.wasm", plugin.build().unwrap());
        folder
    }

    fn put(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.0.join(name), bytes).unwrap();
    }

    /// A policy for what lies here; `more` is TOML after `[plugins]` has begun.
    fn policy(&self, tenant: &str, more: &str) -> Arc<Policy> {
        let text = format!("tenant = \"{tenant}\"\n[plugins]\ndirectory = \"{}\"\n{more}\n", self.0.display());
        Arc::new(Policy::parse(Path::new("policy.toml"), &text).unwrap_or_else(|e| panic!("{e}\n{text}")))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder that stays is litter under target/, nothing more.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn open(policy: Arc<Policy>, plugin: impl AsRef<Path>) -> Runtime {
    let plugin = Some(plugin.as_ref().to_path_buf());
    Runtime::open(RuntimeConfig { plugin, policy: Some(policy), ..crate::common::config() }).unwrap()
}

fn refusals(rt: &Runtime) -> BTreeMap<&'static str, u64> {
    rt.tenant().counters.refusals()
}

/// A plugin that makes one call of the host, `calls[n]`, when it is asked for an id for n ranks. A call leaves a result at
/// [`REPLY`] or goes on with nothing there; what is an error becomes the entry's.
fn driver(calls: impl FnOnce(&mut Plugin) -> Vec<String>) -> Plugin {
    let mut p = Plugin::lone_rank().unwrap();
    let calls = calls(&mut p);
    let mut body = format!("(local $i i32) (memory.fill (i32.const {REPLY}) (i32.const 0) (i32.const 64))");
    for (n, call) in calls.iter().enumerate() {
        body += &format!("\n(if (i32.eq (local.get 0) (i32.const {n})) (then {call}))");
    }
    body += &format!(
        "\n(if (i32.load8_u (i32.const {REPLY})) (then
  (memory.copy (i32.const {ANSWER}) (i32.const {REPLY}) (i32.const 12)) (return (i32.const {ANSWER}))))\n"
    );
    p.body("neuron-get-unique-id", body + &ok_bytes(SCRATCH, 128));
    p
}

/// Writes 127.0.0.1 and a port where `sockets` wants an address, for the two operands that follow.
fn loopback(port: u16) -> (String, String) {
    let word = u32::from_le_bytes([2, 0, port.to_be_bytes()[0], port.to_be_bytes()[1]]);
    let set = format!(
        "(memory.fill (i32.const {SCRATCH}) (i32.const 0) (i32.const 28)) (i32.store (i32.const {SCRATCH}) (i32.const {word}))
  (i32.store (i32.const {}) (i32.const 0x0100007f))",
        SCRATCH + 4
    );
    (set, format!("(i32.const {SCRATCH}) (i32.const 28)"))
}

const ONE: &str = "allow = [{ file = \"plugin.wasm\" }]";

#[test]
fn a_plugin_comes_from_its_tenants_directory_under_a_listed_name() {
    let plugin = Plugin::lone_rank().unwrap();
    let (inside, outside) = (Folder::with(&plugin), Folder::with(&plugin));
    inside.put("other.wasm", plugin.build().unwrap());
    symlink(outside.0.join("plugin.wasm"), inside.0.join("escape.wasm")).unwrap();
    symlink("plugin.wasm", inside.0.join("alias.wasm")).unwrap();
    std::fs::create_dir(inside.0.join("folder.wasm")).unwrap();
    let names = ["plugin.wasm", "escape.wasm", "alias.wasm", "folder.wasm", "gone.wasm"];
    let allow: Vec<String> = names.iter().map(|n| format!("{{ file = \"{n}\" }}")).collect();
    let policy = || inside.policy("red", &format!("allow = [{}]", allow.join(", ")));
    let beside = format!("../{}/plugin.wasm", inside.0.file_name().unwrap().to_str().unwrap());
    for (path, why) in [
        ("plugin.wasm", ""),
        ("alias.wasm", ""),
        (inside.0.join("plugin.wasm").to_str().unwrap(), ""),
        (outside.0.join("plugin.wasm").to_str().unwrap(), "which is not a name in its directory"),
        (&beside, "which is not a name in its directory"),
        ("./../plugin.wasm", "which is not a name in its directory"),
        ("..", "which is not a name in its directory"),
        ("other.wasm", "which is not listed"),
        ("escape.wasm", "but it cannot be opened"),
        ("folder.wasm", "but it is not a regular file"),
        ("gone.wasm", "but it cannot be opened"),
    ] {
        let rt = open(policy(), path);
        let found = rt.load_error().map_or(String::new(), |e| e.sentinel);
        if why.is_empty() {
            assert_eq!(found, "", "{path}");
        } else {
            let says = format!("tenant red asked for plugin {path}, {why}");
            assert!(
                found.contains(&says) && found.contains("plugins.allow grants plugin.wasm, escape.wasm"),
                "{found}"
            );
        }
        assert_eq!(refusals(&rt).contains_key("plugins.allow"), !why.is_empty(), "{path}");
    }
    // The net plugin goes the same way; that it is refused is a soft failure, and counted.
    let net_plugin = Some(outside.0.join("plugin.wasm"));
    let config = RuntimeConfig { plugin: Some("plugin.wasm".into()), net_plugin, ..crate::common::config() };
    let rt = Runtime::open(RuntimeConfig { policy: Some(policy()), ..config }).unwrap();
    assert!(rt.load_error().is_none() && refusals(&rt)["plugins.allow"] == 1);
}

#[test]
fn a_pinned_or_signed_plugin_is_the_one_that_was_meant() {
    let folder = Folder::with(&Plugin::lone_rank().unwrap());
    let bytes = std::fs::read(folder.0.join("plugin.wasm")).unwrap();
    let fails =
        |more: &str| open(folder.policy("red", more), "plugin.wasm").load_error().map_or(String::new(), |e| e.sentinel);
    let pin = |digest: &str| format!("allow = [{{ file = \"plugin.wasm\", sha256 = \"{digest}\" }}]");
    let digest = sandbox::load::cache::content_hash(&bytes);
    assert_eq!(fails(&pin(&digest)), "");
    let wrong = format!("{}{}", &digest[..63], if digest.ends_with('0') { '1' } else { '0' });
    let e = fails(&pin(&wrong));
    assert!(e.contains(&format!("whose SHA-256 is {digest}; plugins.allow grants {wrong} only")), "{e}");

    let (ours, theirs) = (SecretKey::generate().unwrap(), SecretKey::generate().unwrap());
    let signed = format!("signers = [\"{}\"]\n{ONE}", ours.public());
    let e = fails(&signed);
    assert!(e.contains("but of plugin.wasm.sig: it cannot be opened") && e.contains("signers has signed"), "{e}");
    folder.put("plugin.wasm.sig", ours.sign(&bytes) + "\n");
    assert_eq!(fails(&signed), "");
    let raw: Vec<u8> = ours
        .sign(&bytes)
        .as_bytes()
        .chunks(2)
        .map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap())
        .collect();
    folder.put("plugin.wasm.sig", raw);
    assert_eq!(fails(&signed), "");
    for (signature, why) in [
        (theirs.sign(&bytes), "of other bytes or by another key"),
        (ours.sign(&bytes[1..]), "of other bytes or by another key"),
        (ours.sign(&bytes)[1..].to_string(), "neither 64 bytes nor 128 hexadecimal digits"),
        ("0".repeat(131), "it has 131 bytes, more than the 130 a signature may have"),
    ] {
        folder.put("plugin.wasm.sig", signature);
        let e = fails(&signed);
        assert!(e.contains(why), "{e}");
    }
    // The file changes under a good signature.
    folder.put("plugin.wasm.sig", ours.sign(&bytes));
    folder.put("plugin.wasm", Plugin::transport().unwrap().build().unwrap());
    assert!(fails(&signed).contains("of other bytes or by another key"));
}

/// What each limit refuses to one tenant it grants to another, which has a runtime in the same process, before and after.
#[test]
fn each_limit_refuses_one_tenant_and_not_its_neighbour() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let reached = port.local_addr().unwrap().port();
    let (listened, topo) = (free_port(), plugin_file("topology", b"<system/>"));
    let plugin = driver(|p| {
        let (set, at) = loopback(reached);
        let connect = format!("{set} (call $sockets.connect {at} (i32.const 5000) (i32.const {REPLY}))");
        let (set, at) = loopback(listened);
        let listen = format!("{set} (call $sockets.listen {at} (i32.const 5000) (i32.const {REPLY}))");
        let (name, variable) = (p.text("localhost"), p.text("NCCL_TOPO_FILE"));
        let (line, kind) = (p.text("a line"), p.text("idle"));
        let none = "(i32.const 0) (i32.const 0)";
        vec![
            "nop".to_string(),
            connect,
            listen,
            format!("(call $sockets.resolve {name} (i32.const {reached}) (i32.const 5000) (i32.const {REPLY}))"),
            format!("(call $files.read {variable} (i32.const {REPLY}))"),
            format!("(call $tasks.spawn {kind} {none} {none} (i32.const {REPLY}))"),
            "(if (i32.eq (memory.grow (i32.const 2)) (i32.const -1)) (then unreachable))".to_string(),
            format!(
                "(loop $l (call $log.write (i32.const 4) {line}) (local.set $i (i32.add (local.get $i) (i32.const 1)))
  (br_if $l (i32.lt_u (local.get $i) (i32.const 50))))"
            ),
        ]
    });
    let folder = Folder::with(&plugin);
    let all = "[devices]\ncores = [0, 1]\nhbm = \"64 MiB\"\n[network]\nlisten = [\"127.0.0.1:*\"]\nreach = [\"127.0.0.0/8:*\"]\nnames = [\"localhost\"]\n[files]\nread = [\"NCCL_TOPO_FILE\"]";
    let opened = |tenant: &str, more: &str| {
        let policy = Some(folder.policy(tenant, &format!("{ONE}\n{more}")));
        let mut config = RuntimeConfig { plugin: Some("plugin.wasm".into()), policy, ..crate::common::config() };
        config.vars.insert("NCCL_TOPO_FILE".into(), topo.path().to_str().unwrap().into());
        let rt = Runtime::open(config).unwrap();
        assert!(rt.load_error().is_none(), "{}", rt.load_error().unwrap().sentinel);
        rt
    };
    let works = |call: usize| {
        let rt = opened("blue", all);
        rt.unique_id(call).unwrap_or_else(|e| panic!("call {call} of the neighbour: {e}"));
        assert!(refusals(&rt).is_empty(), "{:?}", refusals(&rt));
    };
    let (near, far) = (listened - 1, listened + 1);
    for (call, limit, more, says) in [
        (
            1,
            "network.reach",
            "[network]\nreach = [\"10.0.0.0/8:*\"]".into(),
            format!("asked to connect to 127.0.0.1:{reached}; network.reach grants 10.0.0.0/8:*"),
        ),
        (
            1,
            "network.reach",
            format!("[network]\nreach = [\"127.0.0.1:{}\"]", reached - 1),
            format!("network.reach grants 127.0.0.1:{}", reached - 1),
        ),
        (
            1,
            "limits.connections",
            format!("[limits]\nconnections = 0\n{all}"),
            "asked for one more socket; limits.connections grants 0".into(),
        ),
        (
            1,
            "limits.objects",
            format!("[limits]\nobjects = 0\n{all}"),
            "asked for one more host object; limits.objects grants 0".into(),
        ),
        (
            2,
            "network.listen",
            format!("[network]\nlisten = [\"127.0.0.1:1-{near}\", \"127.0.0.1:{far}-65535\"]"),
            format!(
                "asked to listen on 127.0.0.1:{listened}; network.listen grants 127.0.0.1:1-{near}, 127.0.0.1:{far}-65535"
            ),
        ),
        (
            3,
            "network.reach",
            String::new(),
            "asked to look up host name localhost; network.reach grants nothing".into(),
        ),
        (
            3,
            "network.names",
            "[network]\nreach = [\"127.0.0.1:*\"]\nnames = [\"*.localhost\", \"host\"]".into(),
            "asked to look up host name localhost; network.names grants *.localhost, host".into(),
        ),
        (
            3,
            "network.reach",
            "[network]\nreach = [\"10.0.0.0/8:*\"]\nnames = [\"localhost\"]".into(),
            "asked for host name localhost, which is ".into(),
        ),
        (
            4,
            "files.read",
            String::new(),
            "asked to read the file named by NCCL_TOPO_FILE; files.read grants nothing".into(),
        ),
        (
            5,
            "limits.tasks",
            "[limits]\ntasks = 0".into(),
            "asked for one more background task; limits.tasks grants 0".into(),
        ),
        (
            6,
            "limits.memory",
            "[limits]\nmemory = \"192 KiB\"".into(),
            "asked for 262144 bytes of memory, its limit is 196608".into(),
        ),
    ] {
        works(call);
        let red = opened("red", &more);
        red.unique_id(0).unwrap();
        let e = red.unique_id(call).unwrap_err().to_string();
        assert!(e.contains(&says) && e.contains("tenant red"), "{limit}: {e}");
        assert_eq!(refusals(&red), [(limit, 1)].into());
        works(call);
    }
    // Lines are dropped, and the call goes on.
    let red = opened("red", "[limits]\nlog-lines = 10");
    red.unique_id(7).unwrap();
    assert_eq!(refusals(&red), [("limits.log-lines", 40)].into());

    // An id serves once.
    let ids = std::cell::Cell::new(1);
    let alone = |rt: &Runtime| rt.init_comm(CommOptions::with_id([ids.replace(ids.get() + 1); 128], 0, 1));
    let e = alone(&opened("red", "[devices]\ncores = [1]")).unwrap_err().to_string();
    assert_eq!(e, "tenant red asked for logical core 0; devices.cores grants 1");
    let red = opened("red", &format!("[limits]\ncommunicators = 1\n{all}"));
    let comm = alone(&red).unwrap();
    let e = alone(&red).unwrap_err().to_string();
    assert!(e.contains("tenant red asked for one more communicator; limits.communicators grants 1"), "{e}");
    drop(comm);
    let comm = alone(&red).unwrap();
    let (_kept, e) = (comm.allocate(48 << 20).unwrap(), comm.allocate(48 << 20).unwrap_err());
    assert!(matches!(e, Error::Limit(_)), "{e:?}");
    let says = "tenant red asked for 50331648 bytes of device memory; devices.hbm grants 64 MiB: device memory is full";
    assert!(e.to_string().contains(says), "{e}");
    assert_eq!(refusals(&red), [("limits.communicators", 1), ("devices.hbm", 1)].into());
    let red = opened("red", "[devices]\ncores = [0]");
    assert!(alone(&red).unwrap().allocate(1).unwrap_err().to_string().contains("devices.hbm grants 0 B"));
}

/// What is logged of background tasks says whose they are, and is within the tenant's rate: what they write, that their
/// instance stopped, and that they ended.
#[test]
fn lines_about_tasks_are_tagged_and_within_the_rate() {
    crate::keep_log();
    let plugin = driver(|p| {
        // What follows would be a line of somebody else's.
        let forged = "\r\nERROR forged\u{2028}\u{85}\u{202e}\x1b[2J";
        let (line, printed) =
            (p.text(&format!("a line of its own{forged}")), p.text(&format!("a line for the kernel{forged}")));
        let prints = format!("(call $nec.nec-ndl-printk {printed} (i32.const 0))");
        p.body("run", format!("(call $log.write (i32.const 1) {line}) {prints} unreachable"));
        let kind = p.text("idle");
        let none = "(i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)";
        vec![format!("(call $tasks.spawn {kind} {none} (i32.const {REPLY}))")]
    });
    let folder = Folder::with(&plugin);
    let tasks = 4;
    for (tenant, rate) in [("loud", 1000), ("mute", 0)] {
        let more = format!("{ONE}\n[limits]\nlog-lines = {rate}\nrestarts = 100");
        let rt = open(folder.policy(tenant, &more), "plugin.wasm");
        for _ in 0..tasks {
            rt.unique_id(0).unwrap();
            while rt.tenant().tasks_alive() > 0 {
                std::thread::yield_now();
            }
        }
        assert_eq!(rt.tenant().counters.tasks(), tasks);
        let refused = refusals(&rt).get("limits.log-lines").copied().unwrap_or(0);
        // What was dropped last is told with the tenant's end.
        drop(rt);
        let lines = crate::logged(&[&format!(" tenant={tenant}")]);
        assert!(lines.iter().flat_map(|l| l.chars()).all(stands), "{lines:?}");
        let with = |words: &[&str]| lines.iter().filter(|l| words.iter().all(|w| l.contains(w))).count() as u64;
        let seen = [
            with(&["a line of its own"]),
            with(&["a line for the kernel"]),
            with(&["plugin stopped", " plugin=plugin.wasm"]),
            with(&["a background task ended", " task=idle"]),
        ];
        let told = with(&["log lines of plugins were dropped; limits.log-lines grants 0 a second"]);
        if rate > 0 {
            assert_eq!((seen, told, refused), ([tasks; 4], 0, 0), "{lines:#?}");
        } else {
            assert_eq!((seen, refused), ([0; 4], 4 * tasks), "{lines:#?}");
            // Of the plugins' lines and of the host's.
            assert!(told >= 2, "{lines:#?}");
        }
    }
}

/// What an entry that fails logs is tagged, and within the rate, however often it is called.
#[test]
fn lines_about_entries_that_fail_are_tagged_and_within_the_rate() {
    crate::keep_log();
    let (set, at) = loopback(1);
    let connect = format!("{set} (call $sockets.connect {at} (i32.const 0) (i32.const {REPLY}))");
    let bytes = driver(|_| vec!["nop".into(), connect]).build().unwrap();
    let times = 50;
    for (tenant, rate) in [("fails-aloud", 1000), ("fails-mutely", 0)] {
        let folder = Folder::new();
        // Of this test alone, so that a line without the tenant is found.
        let file = format!("{tenant}.wasm");
        folder.put(&file, &bytes);
        let more = format!("allow = [{{ file = \"{file}\" }}]\n[limits]\nlog-lines = {rate}");
        let rt = open(folder.policy(tenant, &more), &file);
        for _ in 0..times {
            rt.unique_id(1).unwrap_err();
        }
        let dropped = refusals(&rt).get("limits.log-lines").copied().unwrap_or(0);
        drop(rt);
        let about = crate::logged(&[&format!("plugin={file}")]);
        let tagged = crate::logged(&[&format!("tenant={tenant}"), "failed neuronGetUniqueId request"]);
        match rate {
            0 => assert_eq!((about.len(), dropped), (0, times), "{about:#?}"),
            _ => assert_eq!((tagged.len() as u64, about.len() as u64, dropped), (times, times, 0), "{about:#?}"),
        }
    }
}

/// What strangers at an id's address have logged is within the rate of the tenant whose id it is.
#[test]
fn lines_about_strangers_are_tagged_and_within_the_rate() {
    crate::keep_log();
    let folder = Folder::new();
    folder.put("nccom.wasm", zoo::built("nccom.wasm").unwrap());
    let strangers = 20;
    for (tenant, rate) in [("visited-aloud", 1000), ("visited-mutely", 0)] {
        let network = "[network]\nlisten = [\"127.0.0.1:*\"]\nreach = [\"127.0.0.1:*\"]";
        let more = format!("allow = [{{ file = \"nccom.wasm\" }}]\n[limits]\nlog-lines = {rate}\n{network}");
        let rt = open(folder.policy(tenant, &more), "nccom.wasm");
        let id = rt.unique_id(2).unwrap();
        let root = SocketAddr::from(([127, 0, 0, 1], u16::from_be_bytes([id[2], id[3]])));
        let dropped = || refusals(&rt).get("limits.log-lines").copied().unwrap_or(0);
        let refused = || crate::logged(&[&format!("tenant={tenant}"), &format!("to {root} was refused")]);
        // The plugin has lines of its own.
        let before = dropped();
        let mut visitors: Vec<TcpStream> = (0..strangers).map(|_| TcpStream::connect(root).unwrap()).collect();
        for visitor in &mut visitors {
            visitor.write_all(&[b'?'; 256]).unwrap();
        }
        for visitor in &mut visitors {
            visitor.set_read_timeout(Some(HANG)).unwrap();
            match visitor.read(&mut [0]) {
                Ok(0) => {}
                Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
                other => panic!("not sent away: {other:?}"),
            }
        }
        let begun = Instant::now();
        // Each was heard, and its line is logged or dropped now.
        while dropped() - before + (refused().len() as u64) < strangers {
            assert!(begun.elapsed() < HANG, "{} dropped: {:#?}", dropped() - before, refused());
            std::thread::sleep(Duration::from_millis(5));
        }
        let lines = crate::logged(&["was refused", &root.to_string()]);
        let expected = if rate == 0 { (0, 0) } else { (strangers, strangers) };
        assert_eq!((refused().len() as u64, lines.len() as u64), expected, "{lines:#?}");
    }
}

/// What a manifest asks for within the policy is all that is given; beyond it the plugin does not run at all.
#[test]
fn a_manifest_cuts_the_grant_down_or_refuses_the_plugin() {
    let (set, at) = loopback(0);
    let listen = format!("{set} (call $sockets.listen {at} (i32.const 5000) (i32.const {REPLY}))");
    let mut plugin = driver(|_| vec!["nop".into(), listen]);
    // It would not even come to its start function.
    plugin.start = Some("nop".into());
    let bytes = plugin.build().unwrap();
    let opened = |manifest: &str| {
        let folder = Folder::new();
        let mut bytes = bytes.clone();
        let name = "wccl:manifest";
        bytes.extend([0, (1 + name.len() + manifest.len()) as u8, name.len() as u8]);
        bytes.extend(name.bytes().chain(manifest.bytes()));
        folder.put("plugin.wasm", bytes);
        open(folder.policy("red", &format!("{ONE}\n[network]\nlisten = [\"127.0.0.1:18000-19999\"]")), "plugin.wasm")
    };
    opened("listen = [\"127.0.0.1:18000-18999\"]").unique_id(1).unwrap();
    let rt = opened("tasks = 1");
    let e = rt.unique_id(1).unwrap_err().to_string();
    assert!(e.contains("tenant red asked to listen on 127.0.0.1:0; network.listen grants nothing"), "{e}");
    for (manifest, limit, says) in [
        (
            "listen = [\"127.0.0.1:80\"]",
            "network.listen",
            "asks for 127.0.0.1:80; network.listen grants 127.0.0.1:18000-19999",
        ),
        ("files = [\"NCCL_TOPO_FILE\"]", "files.read", "asks for NCCL_TOPO_FILE; files.read grants nothing"),
        ("memory = \"65 MiB\"", "limits.memory", "asks for 65 MiB; limits.memory grants 64 MiB"),
    ] {
        let rt = opened(manifest);
        let e = rt.load_error().unwrap().sentinel;
        assert!(e.contains("its manifest") && e.contains(says) && e.contains("(tenant red)"), "{e}");
        assert_eq!((refusals(&rt), rt.component_calls()), ([(limit, 1)].into(), 0));
    }
    let e = opened("nonsense = 1").load_error().unwrap().sentinel;
    assert!(e.contains("its manifest (custom section wccl:manifest) cannot be read: unknown field `nonsense`"), "{e}");
}

/// A plugin that looks at the clock of WASI, draws a number, and sleeps: for an instant or a year.
fn wasi_plugin() -> Plugin {
    // Behind what is answered as an id.
    let (reply, pollable) = (REPLY, SCRATCH + 256);
    let sleep = |ns: u64| {
        format!(
            "(i32.store (i32.const {pollable}) (call $monotonic-clock.subscribe-duration (i64.const {ns})))
  (call $poll.poll (i32.const {pollable}) (i32.const 1) (i32.const {reply}))
  (if (i32.ne (i32.load (i32.const {})) (i32.const 1)) (then unreachable))
  (memory.fill (i32.const {reply}) (i32.const 0) (i32.const 8))",
            reply + 4
        )
    };
    let calls = [
        "(if (i64.eqz (call $monotonic-clock.now)) (then unreachable))".to_string(),
        "(if (i64.eq (call $random.get-random-u64) (call $random.get-random-u64)) (then unreachable))".into(),
        sleep(1_000_000),
        sleep(365 * 86_400 * 1_000_000_000),
        format!("(call $random.get-random-bytes (i64.const 1099511627776) (i32.const {reply}))"),
        "(loop $l (drop (call $monotonic-clock.subscribe-duration (i64.const 1))) (br $l))".into(),
    ];
    let mut p = driver(|_| calls.into());
    p.wit.add("wasi-random", "package wasi:random@0.2.0; interface random { get-random-bytes: func(len: u64) -> list<u8>; get-random-u64: func() -> u64; }");
    p.wit.add("wasi-clocks", "package wasi:clocks@0.2.0; interface monotonic-clock { use wasi:io/poll@0.2.0.{pollable}; now: func() -> u64; subscribe-duration: func(when: u64) -> pollable; }");
    p.wit.add("wasi-io", "package wasi:io@0.2.0; interface poll { resource pollable { ready: func() -> bool; block: func(); } poll: func(in: list<borrow<pollable>>) -> list<u32>; }");
    p.world = "package zoo:plugin; world plugin { include wccl:worlds/transport; import wasi:io/poll@0.2.0;
  import wasi:clocks/monotonic-clock@0.2.0; import wasi:random/random@0.2.0; }"
        .into();
    p
}

#[test]
fn wasi_is_had_by_the_interface_and_its_waits_end() {
    let folder = Folder::with(&wasi_plugin());
    let granted = "[wasi]\ngrant = [\"wasi:clocks/monotonic-clock\", \"wasi:io/poll\", \"wasi:random/random\"]";
    let opened = |more: &str| open(folder.policy("red", &format!("{ONE}\n{more}")), "plugin.wasm");
    for (missing, policy) in [
        ("io/poll", String::new()),
        ("random/random", granted.replace(", \"wasi:random/random\"", "")),
        ("io/poll", granted.replace(" \"wasi:io/poll\",", "")),
    ] {
        let rt = opened(&policy);
        let e = rt.load_error().unwrap().sentinel;
        let says =
            format!("it imports `wasi:{missing}@0.2.0`; WASI is off for transports unless the tenant's policy grants");
        assert!(e.contains(&says), "{e}");
        assert_eq!(refusals(&rt), [("wasi.grant", 1)].into());
    }
    let rt = opened(granted);
    for call in 0..3 {
        rt.unique_id(call).unwrap();
    }
    let short = || opened(&format!("[limits]\ncall-in-all = \"300 ms\"\n{granted}"));
    let e = short().unique_id(3).unwrap_err().to_string();
    assert!(e.contains("the call took more than 300ms in all, waits included"), "{e}");
    let e = opened(granted).unique_id(4).unwrap_err().to_string();
    assert!(e.contains("requested len 1099511627776 exceeds limit 65536"), "{e}");
    let e = opened(&format!("[limits]\nobjects = 100\n{granted}")).unique_id(5).unwrap_err().to_string();
    assert!(e.contains("tenant red") && e.contains("resource table has no free keys"), "{e}");
}

/// A plugin that computes without end takes no more than its tenant's share of a core, and is ended like any other.
#[test]
fn a_share_of_a_core_is_all_that_a_plugin_gets() {
    let folder = Folder::with(&driver(|_| vec!["nop".into(), "(loop br 0)".into()]));
    let opened = |share: u32, call: &str, all: &str| {
        let more =
            format!("{ONE}\n[share]\ncontrol-cpu = {share}\n[limits]\ncall = \"{call}\"\ncall-in-all = \"{all}\"");
        open(folder.policy("red", &more), "plugin.wasm")
    };
    // Of two seconds it has two hundredths and the burst, which are fewer than it may use.
    let rt = opened(1, "1 s", "2 s");
    let e = rt.unique_id(1).unwrap_err().to_string();
    assert!(e.contains("the call took more than 2s in all") && rt.tenant().counters.throttles() > 0, "{e}");
    // With a whole core it comes to its own limit first, on a busy machine too.
    let e = opened(100, "500 ms", "2 min").unique_id(1).unwrap_err().to_string();
    assert!(e.contains("the call used more than its 500ms of guest time"), "{e}");
}

/// A bootstrap that has nowhere to listen says that it is the policy's doing.
#[test]
fn a_bootstrap_without_an_interface_names_the_key() {
    let folder = Folder::new();
    folder.put("nccom.wasm", zoo::built("nccom.wasm").unwrap());
    let more = "allow = [{ file = \"nccom.wasm\" }]\n[network]\nlisten = [\"192.0.2.1:*\"]";
    let rt = open(folder.policy("red", more), "nccom.wasm");
    let e = rt.unique_id(2).unwrap_err().to_string();
    assert!(e.contains("tenant red asked for an interface to listen on; network.listen grants 192.0.2.1:*"), "{e}");
    assert_eq!(refusals(&rt), [("network.listen", 1)].into());
}

/// The program names the root's host; no policy has to.
#[test]
fn a_root_by_its_host_name_needs_no_grant_of_names() {
    let folder = Folder::new();
    folder.put("nccom.wasm", zoo::built("nccom.wasm").unwrap());
    let network = "[network]\nlisten = [\"127.0.0.1:*\"]\nreach = [\"127.0.0.1:*\"]";
    let more = format!("allow = [{{ file = \"nccom.wasm\" }}]\n[devices]\ncores = [0]\nhbm = \"1 MiB\"\n{network}");
    let rt = open(folder.policy("red", &more), "nccom.wasm");
    rt.init_comm(CommOptions::with_root(format!("localhost:{}", free_port()), 0, 1)).unwrap();
    assert!(refusals(&rt).is_empty(), "{:?}", refusals(&rt));
}

/// Two tenants at work side by side with the real library, each with what a bootstrap needs and no more.
#[test]
fn tenants_with_a_range_of_ports_work_side_by_side() {
    let folder = Folder::new();
    folder.put("nccom.wasm", zoo::built("nccom.wasm").unwrap());
    let join = |tenant: &'static str| {
        let root_port = free_port();
        let policy = folder.policy(
            tenant,
            &format!(
                "allow = [{{ file = \"nccom.wasm\" }}]\n[devices]\ncores = [0, 1, 2]\nhbm = \"64 MiB\"
[network]\nlisten = [\"127.0.0.1:18000-19999\", \"127.0.0.1:{root_port}\"]\nreach = [\"127.0.0.1:*\"]"
            ),
        );
        let ranks = (0..3).map(move |rank| {
            let policy = policy.clone();
            std::thread::spawn(move || {
                let rt = open(policy, "nccom.wasm");
                assert!(rt.load_error().is_none(), "{}", rt.load_error().unwrap().sentinel);
                let root = format!("127.0.0.1:{root_port}");
                let mut comm: Communicator = rt.init_comm(CommOptions::with_root(root, rank, 3)).unwrap();
                for round in 0..20 {
                    let src = bytes_of(&[(rank + round) as f32; 1000]);
                    let mut dst = vec![0; 4000];
                    comm.raw()
                        .all_reduce(Io::Host { src: &src, dst: &mut dst }, 1000, DataType::Fp32, ReduceOp::Sum)
                        .unwrap();
                    assert!(values_of(&dst).iter().all(|v| *v == (3 + 3 * round) as f32));
                }
                assert!(refusals(&rt).is_empty(), "{:?}", refusals(&rt));
                rt.tenant().id
            })
        });
        ranks.collect::<Vec<_>>()
    };
    let (red, blue) = (join("red"), join("blue"));
    let ids = |ranks: Vec<std::thread::JoinHandle<u64>>| -> Vec<u64> {
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    };
    let (red, blue) = (ids(red), ids(blue));
    assert!(red.iter().all(|id| *id == red[0]) && blue.iter().all(|id| *id == blue[0]) && red[0] != blue[0]);
}

/// One that the instance of an id has started counts where another instance asks for one, that of a communicator.
#[test]
fn tasks_are_counted_in_all_instances_of_a_tenant() {
    let plugin = driver(|p| {
        let (set, at) = loopback(0);
        let kind = p.text("idle");
        let spawn = |listener: &str| format!("(call $tasks.spawn {kind} (i32.const 0) (i32.const 0) {listener} ");
        // With a listener it stays for as long as the tenant does: nobody connects.
        let (ok, accept) =
            (zoo::ok_unit(), format!("(call $sockets.accept (local.get 5) (i32.const 60000) (i32.const {REPLY}))"));
        p.body(
            "run",
            format!("(if (i32.eqz (local.get 4)) (then {ok} return)) (loop $l {accept} (br $l)) unreachable"),
        );
        let one_more = format!(
            "{} (i32.const {SCRATCH}))
  (if (i32.load8_u (i32.const {SCRATCH})) (then
    (memory.copy (i32.const {ANSWER}) (i32.const {SCRATCH}) (i32.const 12)) (return (i32.const {ANSWER}))))",
            spawn("(i32.const 0) (i32.const 0)")
        );
        p.body("neuron-init-comm", zoo::init_comm(&one_more));
        let held = format!("(i32.const 1) (i32.load (i32.const {}))", REPLY + 4);
        vec![
            "nop".into(),
            format!(
                "{set} (call $sockets.listen {at} (i32.const 5000) (i32.const {REPLY}))
  (if (i32.eqz (i32.load8_u (i32.const {REPLY}))) (then {} (i32.const {REPLY}))))",
                spawn(&held)
            ),
        ]
    });
    let folder = Folder::with(&plugin);
    let network = "[devices]\ncores = [0]\nhbm = \"64 MiB\"\n[network]\nlisten = [\"127.0.0.1:*\"]";
    let opened = |tenant: &str, tasks: usize| {
        open(folder.policy(tenant, &format!("{ONE}\n[limits]\ntasks = {tasks}\n{network}")), "plugin.wasm")
    };
    let alone = |rt: &Runtime, id: u8| rt.init_comm(CommOptions::with_id([id; 128], 0, 1));
    let red = opened("red", 1);
    red.unique_id(1).unwrap();
    assert_eq!(red.tenant().tasks_alive(), 1);
    let e = alone(&red, 1).map(|_| ()).unwrap_err().to_string();
    assert!(e.contains("tenant red asked for one more background task; limits.tasks grants 1"), "{e}");
    assert_eq!(refusals(&red), [("limits.tasks", 1)].into());
    // Where two are granted there is another one, and what one tenant has started is not another's.
    let blue = opened("blue", 2);
    blue.unique_id(1).unwrap();
    alone(&blue, 2).unwrap();
    assert!(refusals(&blue).is_empty(), "{:?}", refusals(&blue));
    assert_eq!((red.tenant().counters.tasks(), blue.tenant().counters.tasks()), (1, 2));
}
