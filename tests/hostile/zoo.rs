//! What an animal is, its cage, and how one is run and checked.

use std::fmt::Write as _;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use anyhow::Result;
use sandbox::limits::Limits;
use sandbox::policy::Policy;
pub use tests::port::free as port;
use tests::sentence::fits;
use tests::zoo::{ANSWER, Plugin};
use wccl::{Runtime, RuntimeConfig};

use crate::victim::victim;

/// One attack on the host; what it answers is what the tenant's own program gets to see.
pub type Attack = Box<dyn Fn(&Cage) -> Result<String>>;

/// One kind of animal. It may stand for several, which differ in what the sentence names in braces.
pub struct Animal {
    pub what: String,
    pub sentence: String,
    pub cases: Vec<(Vec<(&'static str, String)>, Attack)>,
}

/// One section of the document.
pub struct Group {
    pub title: &'static str,
    pub animals: Vec<Animal>,
}

pub fn animal(
    what: impl Into<String>,
    sentence: impl Into<String>,
    attack: impl Fn(&Cage) -> Result<String> + 'static,
) -> Animal {
    Animal { what: what.into(), sentence: sentence.into(), cases: vec![(Vec::new(), Box::new(attack))] }
}

/// An animal that is a plugin for one rank, which misbehaves in `neuronGetUniqueId` and says with a status when it is refused.
/// `make` gives the body before the answer.
pub fn at_once(what: &str, sentence: &str, make: impl Fn(&mut Plugin) -> String + 'static) -> Animal {
    animal(what, sentence, move |cage| {
        let mut p = Plugin::lone_rank()?;
        let body = make(&mut p);
        p.body("neuron-get-unique-id", format!("{body} {}", gives_up()));
        let runtime = cage.open(&p)?;
        said(runtime.unique_id(1))
    })
}

/// Body that answers the error `NRT_STATUS` 1 of a `result<list<u8>, nrt-status>`.
pub fn gives_up() -> String {
    format!(
        "(i32.store8 (i32.const {ANSWER}) (i32.const 1)) (i32.store8 (i32.const {}) (i32.const 28))
  (i32.store (i32.const {}) (i32.const 1)) (i32.const {ANSWER})",
        ANSWER + 4,
        ANSWER + 8
    )
}

/// The sentence of a call that must not have come through.
pub fn said<T, E: std::fmt::Display>(answer: Result<T, E>) -> Result<String> {
    match answer {
        Ok(_) => anyhow::bail!("it came through"),
        Err(e) => Ok(e.to_string()),
    }
}

/// A folder and a tenant of its own.
pub struct Cage {
    folder: PathBuf,
    number: u32,
}

impl Cage {
    fn new() -> Cage {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hostile-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Cage { folder, number: n }
    }

    /// No other cage of this process has it.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// A path in its folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A folder in its folder.
    pub fn dir(&self, name: &str) -> Result<PathBuf> {
        let path = self.path(name);
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// Writes a file and answers where it is.
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<PathBuf> {
        let path = self.path(name);
        std::fs::write(&path, bytes)?;
        Ok(path)
    }

    /// The configuration of the cage: a tenant of its own, with limits that are soon reached.
    pub fn config(&self, plugin: &Plugin) -> Result<RuntimeConfig> {
        Ok(self.limited(self.put("animal.wasm", &plugin.build()?)?))
    }

    /// The same for a plugin that is there.
    pub fn limited(&self, plugin: PathBuf) -> RuntimeConfig {
        let mut c = config(Some(plugin));
        c.tenant = "hostile".into();
        c.tenant_id = 666;
        c.vars.insert("NEURON_CCOM_SOCK_TIMEOUT".into(), "400".into());
        c.limits = Limits {
            memory: 4 << 20,
            table: 1000,
            call: Duration::from_millis(60),
            // An animal that waits for it has less; the others come to their own limits first, on a busy machine too.
            wall: Duration::from_secs(60),
            hostcall_bytes: 1 << 20,
            communicators: 4,
            tasks: 2,
            sockets: 8,
            names: 4,
            objects: 64,
            log_rate: 10,
            ..Limits::default()
        };
        c
    }

    /// The same under a policy, whose plugin directory is the cage; `more` is TOML after `[plugins]` has begun.
    pub fn under(&self, plugin: &Plugin, more: &str) -> Result<RuntimeConfig> {
        let folder = self.folder.display();
        let text = format!("tenant = \"hostile\"\n[plugins]\ndirectory = \"{folder}\"\n{more}\n");
        let policy = Policy::parse(Path::new("policy.toml"), &text)?;
        Ok(RuntimeConfig { plugin: Some("animal.wasm".into()), policy: Some(Arc::new(policy)), ..self.config(plugin)? })
    }

    /// Opens a runtime with the animal, which must load.
    pub fn open(&self, plugin: &Plugin) -> Result<Runtime> {
        opened(self.config(plugin)?)
    }
}

/// Opens a runtime whose plugin must load.
pub fn opened(config: RuntimeConfig) -> Result<Runtime> {
    let runtime = Runtime::open(config)?;
    match runtime.load_error() {
        None => Ok(runtime),
        Some(e) => anyhow::bail!("it did not load: {}", e.sentinel),
    }
}

impl Drop for Cage {
    fn drop(&mut self) {
        // A folder that stays is litter under target/, nothing more.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A small runtime that stays on this machine, with the plugin that was built, or another.
pub fn config(plugin: Option<PathBuf>) -> RuntimeConfig {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hostile-cache");
        // SAFETY: the environment of this process is read and written through the standard library only, which locks it;
        // no plugin has been opened yet, so that no resolver of the C library reads it beside us.
        unsafe { std::env::set_var("WCCL_CACHE_DIR", cache) };
    });
    let default = RuntimeConfig::default();
    RuntimeConfig {
        plugin: plugin.or(default.plugin.clone()),
        vars: [("CCOM_SOCKET_IFNAME".to_string(), "lo".to_string())].into(),
        hbm_bytes: 64 << 20,
        ..default
    }
}

/// Lets every animal of the group loose, one after the other, and looks after the victim each time.
pub fn run(group: &Group) {
    let mut wrong = String::new();
    for animal in &group.animals {
        for (names, attack) in &animal.cases {
            let mut sentence = animal.sentence.clone();
            for (name, value) in names {
                sentence = sentence.replace(&format!("{{{name}}}"), value);
            }
            let cage = Cage::new();
            let outcome = match attack(&cage) {
                Ok(said) if fits(&sentence, &said) => Ok(()),
                Ok(said) => Err(format!("\n  expected: {sentence}\n  but was:  {said}")),
                Err(e) => Err(format!("{e:#}")),
            };
            if let Err(why) = outcome {
                writeln!(wrong, "* {} {names:?}: {why}", animal.what).unwrap();
            }
            victim().check();
        }
    }
    assert!(wrong.is_empty(), "{}:\n{wrong}", group.title);
}

const HEAD: &str = "\
# The hostile zoo

Plugins and clients that try to hurt, starve, see or impersonate others, and what becomes of each. The table is written from
the data that the test binary `hostile` runs; a test compares the two. To write it anew:

```
WCCL_WRITE_DOCS=1 cargo test --release --workspace --test hostile the_document
```

Each is let loose in a tenant of its own with small limits, beside a victim whose two ranks work all the time: the victim
completes every operation with right results. The sentence is what the hostile tenant's own program gets; a name in braces
stands for what differs between the animals of a row, and `…` for anything.
";

/// Compares docs/hostile-zoo.md with the data, or writes it.
pub fn document(groups: &[Group]) {
    let mut text = HEAD.to_string();
    for group in groups {
        writeln!(text, "\n## {}\n\n| animal | sentence |\n|---|---|", group.title).unwrap();
        for a in &group.animals {
            let many = if a.cases.len() > 1 { format!(" ({} animals)", a.cases.len()) } else { String::new() };
            writeln!(text, "| {}{many} | {} |", a.what, a.sentence.replace('|', "\\|")).unwrap();
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/hostile-zoo.md");
    if std::env::var_os("WCCL_WRITE_DOCS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == text, "docs/hostile-zoo.md is not what the zoo says; its head tells how to write it anew");
}

/// A listener under an abstract name of this machine; none where somebody else has it, such as another run of these tests.
pub fn squatted(name: &str) -> std::io::Result<Option<UnixListener>> {
    match UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?) {
        Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => Ok(None),
        made => made.map(Some),
    }
}
