//! What a policy does not grant: addresses, devices, files, and plugins that are not the ones that were meant.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::time::Duration;

use anyhow::{Context, Result};
use sandbox::load::signing::SecretKey;
use tests::zoo::{Plugin, REPLY, SCRATCH, unique_id};
use wccl::metrics::MetricsServer;
use wccl::{CommOptions, Runtime};

use crate::zoo::{Animal, Cage, Group, animal, gives_up, opened, said};

const ONE: &str = "allow = [{ file = \"animal.wasm\" }]";

/// Makes one call under a policy, and is refused.
fn refused(what: &str, cause: &str, more: &'static str, call: impl Fn(&mut Plugin) -> String + 'static) -> Animal {
    let sentence =
        format!("neuronGetUniqueId of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): {cause}");
    animal(what, sentence, move |cage| {
        let mut p = Plugin::lone_rank()?;
        let call = call(&mut p);
        p.body("neuron-get-unique-id", format!("{call} {}", gives_up()));
        said(opened(cage.under(&p, &format!("{ONE}\n{more}"))?)?.unique_id(1))
    })
}

/// An IPv4 address at [`SCRATCH`], then a call with it.
fn at(call: &str, ip: [u8; 4], port: u16) -> String {
    let head = u32::from_le_bytes([2, 0, port.to_be_bytes()[0], port.to_be_bytes()[1]]);
    format!(
        "(i32.store (i32.const {SCRATCH}) (i32.const {head})) (i32.store (i32.const {}) (i32.const {}))
         (call $sockets.{call} (i32.const {SCRATCH}) (i32.const 28) (i32.const 50) (i32.const {REPLY}))",
        SCRATCH + 4,
        u32::from_le_bytes(ip)
    )
}

/// The same address inside an IPv6 one.
fn mapped(call: &str, ip: [u8; 4], port: u16) -> String {
    let head = u32::from_le_bytes([10, 0, port.to_be_bytes()[0], port.to_be_bytes()[1]]);
    format!(
        "(i32.store (i32.const {SCRATCH}) (i32.const {head})) (i32.store (i32.const {}) (i32.const 0xffff0000))
         (i32.store (i32.const {}) (i32.const {}))
         (call $sockets.{call} (i32.const {SCRATCH}) (i32.const 28) (i32.const 50) (i32.const {REPLY}))",
        SCRATCH + 16,
        SCRATCH + 20,
        u32::from_le_bytes(ip)
    )
}

/// One that does not load; `make` prepares the cage and answers the policy and the plugin's path.
fn no_entry(what: &str, cause: &str, make: impl Fn(&Cage, &[u8]) -> Result<(String, String)> + 'static) -> Animal {
    let sentence = format!("Error opening libnccom.so, cannot use collective operations! plugin {cause}");
    animal(what, sentence, move |cage| {
        let p = Plugin::lone_rank()?;
        let (policy, path) = make(cage, &p.build()?)?;
        let mut c = cage.under(&p, &policy)?;
        c.plugin = Some(path.into());
        let runtime = Runtime::open(c)?;
        Ok(runtime.load_error().ok_or_else(|| anyhow::anyhow!("it loaded"))?.sentinel)
    })
}

/// One whose ranks are to meet where it says: at a listener that must hear nothing, or at the `host`'s.
fn meets(what: &str, sentence: &str, network: &'static str, host: Option<fn() -> Result<MetricsServer>>) -> Animal {
    animal(what, sentence, move |cage| {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let metrics = host.map(|make| make()).transpose()?;
        let port = match &metrics {
            Some(m) => m.address().context("it listens by TCP")?.port(),
            None => listener.local_addr()?.port(),
        };
        let mut p = Plugin::lone_rank()?;
        p.gathers(&[SocketAddrV4::new(Ipv4Addr::LOCALHOST, port); 2]);
        let devices = "[devices]\ncores = [0, 1]\nhbm = \"1 MiB\"";
        let runtime = opened(cage.under(&p, &format!("{ONE}\n{devices}\n[network]\n{network}"))?)?;
        let by_id = CommOptions::with_id(unique_id(1), 0, 2);
        let joined = runtime.init_comm(CommOptions { graph: false, timeout: Some(SOON), ..by_id });
        let answer = said(joined.and_then(|comm| comm.shrink(&[]).map(drop)));
        anyhow::ensure!(listener.accept().is_err_and(|e| e.kind() == ErrorKind::WouldBlock), "the host came to it");
        answer
    })
}

/// How long a rank may wait for one that is not there.
const SOON: Duration = Duration::from_millis(300);

const LOCAL: &str = "[network]\nlisten = [\"127.0.0.1:18000-18010\"]\nreach = [\"127.0.0.1:18000-18010\"]";

pub fn group() -> Group {
    let meta = [169, 254, 169, 254];
    let named = |cage: &Cage, name: &str| cage.put(name, b"").map(|p| p.with_file_name(name).display().to_string());
    let animals = vec![
        refused(
            "an address outside its policy",
            "tenant hostile asked to connect to 169.254.169.254:80; network.reach grants 127.0.0.1:18000-18010",
            LOCAL,
            move |_| at("connect", meta, 80),
        ),
        refused(
            "the same inside an IPv6 address",
            "tenant hostile asked to connect to …169.254.169.254…:80; network.reach grants 127.0.0.1:18000-18010",
            LOCAL,
            move |_| mapped("connect", meta, 80),
        ),
        refused(
            "a port outside its policy",
            "tenant hostile asked to connect to 127.0.0.1:22; network.reach grants 127.0.0.1:18000-18010",
            LOCAL,
            |_| at("connect", [127, 0, 0, 1], 22),
        ),
        animal(
            "the host's own metrics, at an address that its policy grants",
            "neuronGetUniqueId of plugin animal.wasm failed on tenant hostile: NRT_FAILURE (1): tenant hostile asked to connect to 127.0.0.1:…, where the host itself listens; network.reach grants 127.0.0.1:*, without the host's own",
            |cage| {
                let metrics = MetricsServer::tcp("127.0.0.1:0".parse()?, Vec::new)?;
                let port = metrics.address().context("it listens by TCP")?.port();
                let mut p = Plugin::lone_rank()?;
                p.body("neuron-get-unique-id", format!("{} {}", at("connect", [127, 0, 0, 1], port), gives_up()));
                let granted = format!("{ONE}\n[network]\nreach = [\"127.0.0.1:*\"]");
                said(opened(cage.under(&p, &granted)?)?.unique_id(1))
            },
        ),
        meets(
            "a meeting place of a rank, for the host to dial, outside its policy",
            "tenant hostile asked to meet rank 0 at 127.0.0.1:…, which its plugin gathered; network.reach grants 127.0.0.1:18000-18010",
            "listen = [\"127.0.0.1:*\"]\nreach = [\"127.0.0.1:18000-18010\"]",
            None,
        ),
        meets(
            "the same at the host's own metrics, at an address that its policy grants",
            "tenant hostile asked to meet rank 0 at 127.0.0.1:…, which its plugin gathered, where the host itself listens; network.reach grants 127.0.0.1:*",
            "listen = [\"127.0.0.1:*\"]\nreach = [\"127.0.0.1:*\"]",
            Some(|| Ok(MetricsServer::tcp("127.0.0.1:0".parse()?, Vec::new)?)),
        ),
        meets(
            "a meeting place for the host to listen on, outside its policy",
            "tenant hostile asked for a meeting place of rank 0 on 127.0.0.1; network.listen grants 127.0.0.2:*",
            "listen = [\"127.0.0.2:*\"]\nreach = [\"127.0.0.1:*\"]",
            None,
        ),
        refused(
            "listening on all interfaces",
            "tenant hostile asked to listen on 0.0.0.0:18001; network.listen grants 127.0.0.1:18000-18010",
            LOCAL,
            |_| at("listen", [0, 0, 0, 0], 18001),
        ),
        refused(
            "listening on a port of another service",
            "tenant hostile asked to listen on 127.0.0.1:80; network.listen grants 127.0.0.1:18000-18010",
            LOCAL,
            |_| at("listen", [127, 0, 0, 1], 80),
        ),
        refused(
            "a host name, to learn about the network",
            "tenant hostile asked to look up host name metadata; network.reach grants nothing",
            "",
            |p| {
                let name = p.text("metadata");
                format!("(call $sockets.resolve {name} (i32.const 80) (i32.const 50) (i32.const {REPLY}))")
            },
        ),
        refused(
            "a host name, to tell a name server something",
            "tenant hostile asked to look up host name secret-bits.metadata; network.names grants nothing",
            LOCAL,
            |p| {
                let name = p.text("secret-bits.metadata");
                format!("(call $sockets.resolve {name} (i32.const 80) (i32.const 50) (i32.const {REPLY}))")
            },
        ),
        refused(
            "a file its policy does not name",
            "tenant hostile asked to read the file named by NCCL_TOPO_FILE; files.read grants nothing",
            "",
            |p| {
                let name = p.text("NCCL_TOPO_FILE");
                format!("(call $files.read {name} (i32.const {REPLY}))")
            },
        ),
        refused("writing where it may read", "…", "[files]\nread = [\"NCCL_TOPO_FILE\"]", |p| {
            let name = p.text("NCCL_TOPO_FILE");
            format!("(call $files.write {name} (i32.const {SCRATCH}) (i32.const 1) (i32.const {REPLY}))")
        }),
        animal(
            "a core that is another tenant's",
            "tenant hostile asked for logical core 0; devices.cores grants 1",
            |cage| {
                let c =
                    cage.under(&Plugin::lone_rank()?, &format!("{ONE}\n[devices]\ncores = [1]\nhbm = \"1 MiB\""))?;
                said(opened(c)?.init_comm(CommOptions::with_id([1; 128], 0, 1)))
            },
        ),
        animal(
            "more device memory than it has",
            "tenant hostile asked for 2097152 bytes of device memory; devices.hbm grants 1 MiB: …",
            |cage| {
                let c =
                    cage.under(&Plugin::lone_rank()?, &format!("{ONE}\n[devices]\ncores = [0]\nhbm = \"1 MiB\""))?;
                let comm = opened(c)?.init_comm(CommOptions::with_id([1; 128], 0, 1))?;
                said(comm.allocate(2 << 20))
            },
        ),
        no_entry(
            "a plugin that is not listed",
            "other.wasm: tenant hostile asked for plugin other.wasm, which is not listed; plugins.allow grants animal.wasm in …",
            |cage, bytes| {
                cage.put("other.wasm", bytes)?;
                Ok((ONE.into(), "other.wasm".into()))
            },
        ),
        no_entry(
            "a plugin by a path that climbs",
            "../animal.wasm: tenant hostile asked for plugin ../animal.wasm, which is not a name in its directory; plugins.allow grants animal.wasm in …",
            |_, _| Ok((ONE.into(), "../animal.wasm".into())),
        ),
        no_entry(
            "a plugin by an absolute path elsewhere",
            "/etc/animal.wasm: tenant hostile asked for plugin /etc/animal.wasm, which is not a name in its directory; plugins.allow grants animal.wasm in …",
            |_, _| Ok((ONE.into(), "/etc/animal.wasm".into())),
        ),
        no_entry(
            "a plugin that is a link out of its directory",
            "link.wasm: tenant hostile asked for plugin link.wasm, but it cannot be opened: …",
            move |cage, _| {
                std::os::unix::fs::symlink("/etc/passwd", named(cage, "x")?.replace("/x", "/link.wasm"))?;
                Ok(("allow = [{ file = \"link.wasm\" }]".into(), "link.wasm".into()))
            },
        ),
        no_entry(
            "a plugin with other bytes than were pinned",
            "animal.wasm: tenant hostile asked for plugin animal.wasm, whose SHA-256 is …; plugins.allow grants 0000000000000000000000000000000000000000000000000000000000000000 only",
            |_, _| {
                Ok((
                    format!("allow = [{{ file = \"animal.wasm\", sha256 = \"{}\" }}]", "0".repeat(64)),
                    "animal.wasm".into(),
                ))
            },
        ),
        no_entry(
            "a plugin without the signature it needs",
            "animal.wasm: tenant hostile asked for plugin animal.wasm, but of animal.wasm.sig: it cannot be opened…",
            |_, _| Ok((format!("signers = [\"{}\"]\n{ONE}", SecretKey::generate()?.public()), "animal.wasm".into())),
        ),
        no_entry(
            "a plugin that was changed after it was signed",
            "animal.wasm: tenant hostile asked for plugin animal.wasm, whose signature is of other bytes or by another key; plugins.allow grants what one of its signers has signed",
            |cage, bytes| {
                let key = SecretKey::generate()?;
                let mut tampered = bytes.to_vec();
                tampered.push(0);
                cage.put("animal.wasm.sig", key.sign(&tampered).as_bytes())?;
                Ok((format!("signers = [\"{}\"]\n{ONE}", key.public()), "animal.wasm".into()))
            },
        ),
        no_entry(
            "a plugin signed by somebody else",
            "animal.wasm: tenant hostile asked for plugin animal.wasm, whose signature is of other bytes or by another key; plugins.allow grants what one of its signers has signed",
            |cage, bytes| {
                cage.put("animal.wasm.sig", SecretKey::generate()?.sign(bytes).as_bytes())?;
                Ok((format!("signers = [\"{}\"]\n{ONE}", SecretKey::generate()?.public()), "animal.wasm".into()))
            },
        ),
    ];
    Group { title: "What no policy grants", animals }
}
