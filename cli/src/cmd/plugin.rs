//! `wccl plugin`: what a plugin file is, what it asks for and offers, whether this host would load it; and its signature.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use sandbox::entries::{COLLECTIVES, NAMES, ORIGINALS};
use sandbox::load::signing::SecretKey;
use sandbox::load::{self, PluginKind, cache, read};
use sandbox::served::{CALLBACKS, TRANSPORT, split_version};
use sandbox::store::Library;
use serde::Serialize;
use wccl::{Runtime, RuntimeConfig};

use crate::size;
use crate::term::{self, Paint};

/// The interface that a net plugin exports.
const NET: &str = "nccl:net/nccl-net-plugin-v6";

const INSPECT_EXAMPLES: &str = "\
Examples:
  wccl plugin inspect target/plugins/nccom.wasm
  wccl plugin inspect --json my.wasm | jq .entries

Exit code: 0 if the file is a component, whether or not it would be loaded, else 1.";

const CHECK_EXAMPLES: &str = "\
Examples:
  wccl plugin check target/plugins/nccom.wasm && echo fine

Does what a runtime does when it opens: compiles, compares the imports, instantiates, asks the probe, looks the 37 entries up.
What of the file runs for that reaches no address, no file and no name of this machine, and starts no task.
Exit code: 0 if it loads, else 1.";

const SIGN_EXAMPLES: &str = "\
Examples:
  wccl plugin keygen ~/keys/plugins          Prints the public key, for plugins.signers of a policy
  wccl plugin sign --key ~/keys/plugins nccom.wasm
                                             Writes nccom.wasm.sig beside it";

/// Subcommands of `wccl plugin`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Imports, exports, entries, compatibility, size and hash
    #[command(after_help = INSPECT_EXAMPLES)]
    Inspect {
        /// A component (or a file that should be one)
        file: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Would this host load it, and if not why
    #[command(after_help = CHECK_EXAMPLES)]
    Check {
        /// A component
        file: PathBuf,
    },
    /// Sign a plugin for tenants whose policy names signers
    #[command(after_help = SIGN_EXAMPLES)]
    Sign {
        /// A secret key that `keygen` has made
        #[arg(long)]
        key: PathBuf,
        /// A plugin; its signature is written to FILE.sig
        file: PathBuf,
    },
    /// Make a key to sign plugins with, and print its public half
    #[command(after_help = SIGN_EXAMPLES)]
    Keygen {
        /// Where the secret key goes; it must not exist
        key: PathBuf,
    },
}

/// An interface that is imported or exported.
#[derive(Debug, Serialize)]
struct Interface {
    name: String,
    version: Option<String>,
    /// `None` if the component does not link, so that its types are not known.
    functions: Option<usize>,
    /// Imports: whether this host serves it. Exports: nothing to say.
    #[serde(skip_serializing_if = "Option::is_none")]
    served: Option<bool>,
}

/// One of the 37 entries that is not there.
#[derive(Debug, Serialize)]
struct Missing {
    slot: usize,
    name: &'static str,
    original: &'static str,
}

#[derive(Debug, Serialize)]
struct Entries {
    present: usize,
    of: usize,
    missing: Vec<Missing>,
    /// Exported functions that are none of the 37.
    unknown: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Callbacks {
    imported: usize,
    of: usize,
    /// Imported functions of neuron:nrt that are none of the 20.
    unknown: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Probe {
    version: String,
    git_hash: String,
    compatibility: u64,
}

/// All there is to say about a file.
#[derive(Debug, Serialize)]
struct Report {
    file: String,
    bytes: u64,
    sha256: String,
    /// What the file is, in words.
    format: String,
    component: bool,
    /// `transport`, `net`, or neither.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    imports: Vec<Interface>,
    exports: Vec<Interface>,
    #[serde(skip_serializing_if = "Option::is_none")]
    entries: Option<Entries>,
    #[serde(skip_serializing_if = "Option::is_none")]
    callbacks: Option<Callbacks>,
    #[serde(skip_serializing_if = "Option::is_none")]
    probe: Option<Probe>,
    /// Whether a runtime of this host would load it as its collectives library.
    loads: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// Runs the subcommand.
///
/// # Errors
/// A file cannot be read or written, or the host itself cannot start.
pub fn start(command: &Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Inspect { file, json } => {
            let report = inspect(file)?;
            let text =
                if *json { serde_json::to_string_pretty(&report)? } else { show(&report, Paint::stdout()).join("\n") };
            term::print(&text)?;
            Ok(if report.component { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::Check { file } => {
            let paint = Paint::stdout();
            let (code, text) = match open(file)?.load_error() {
                None => (ExitCode::SUCCESS, paint.good(&format!("{} loads", file.display()))),
                Some(e) => (ExitCode::FAILURE, format!("{}: {}", paint.bad("does not load"), e.sentinel)),
            };
            term::print(&text)?;
            Ok(code)
        }
        Command::Sign { key, file } => {
            let text = std::fs::read_to_string(key).with_context(|| format!("reading the key {}", key.display()))?;
            let secret = SecretKey::parse(&text)
                .map_err(|e| anyhow::anyhow!("{} is no key that `wccl plugin keygen` has made: {e}", key.display()))?;
            let bytes = read(file).map_err(|e| anyhow::anyhow!("plugin {}: {e}", file.display()))?;
            let mut to = file.clone().into_os_string();
            to.push(".sig");
            let to = PathBuf::from(to);
            std::fs::write(&to, secret.sign(&bytes) + "\n").with_context(|| format!("writing {}", to.display()))?;
            term::print(&format!("{} is signed by {}", file.display(), secret.public()))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Keygen { key } => {
            let secret = SecretKey::generate().context("asking the kernel for random numbers")?;
            // One that exists is never lost, and a new one is never readable by others, not even for a moment.
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(key)
                .with_context(|| format!("making the key {}", key.display()))?;
            writeln!(file, "{}", secret.text()).with_context(|| format!("writing the key {}", key.display()))?;
            term::print(&secret.public())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Opens a runtime with the file, which runs a little of it: nobody has said that it may do anything.
fn open(file: &Path) -> anyhow::Result<Runtime> {
    let (plugin, examine) = (Some(file.to_path_buf()), true);
    let config = RuntimeConfig { plugin, net_plugin: None, examine, ..RuntimeConfig::from_env()? };
    Ok(Runtime::open(config)?)
}

/// What a file is, by its first bytes, and whether it is a component.
fn format(bytes: &[u8]) -> (String, bool) {
    let what = match bytes {
        [0, b'a', b's', b'm', 0x0d, 0, 1, 0, ..] => return ("WebAssembly component".into(), true),
        [0, b'a', b's', b'm', 1, 0, 0, 0, ..] => {
            "WebAssembly core module, not a component: make a component of it (wit-component, or `cargo xtask guests`)"
        }
        [0, b'a', b's', b'm', ..] => {
            "WebAssembly binary of a version this host does not know: build it with current tools"
        }
        [0x7f, b'E', b'L', b'F', ..] => {
            "ELF file (a native library, or code compiled ahead of time): this host loads components only, so that a plugin \
             can do no more than it was granted; build the plugin for wasm32-unknown-unknown"
        }
        [] => "empty file",
        _ => {
            let text = std::str::from_utf8(&bytes[..bytes.len().min(4096)]).unwrap_or("").trim_start();
            if text.starts_with("(component") || text.starts_with("(module") {
                "WebAssembly text: assemble it first (wasm-tools parse, or wat2wasm)"
            } else if text.starts_with("package ") || text.contains("\npackage ") {
                "WIT text: an interface, not a program"
            } else {
                "neither WebAssembly nor anything this host knows"
            }
        }
    };
    (what.into(), false)
}

fn interface(name: &str, functions: Option<usize>) -> Interface {
    let (plain, _, version) = split_version(name);
    Interface { name: plain.into(), version: version.map(Into::into), functions, served: None }
}

/// Whether this host serves an import to a transport: the name, the same major, a minor at most the served one.
fn is_served(import: &Interface) -> bool {
    let full = format!("{}@{}", import.name, import.version.as_deref().unwrap_or(""));
    let (name, wanted, _) = split_version(&full);
    TRANSPORT.iter().any(|s| s.name == name && wanted.is_some_and(|(a, b, _)| a == s.version.0 && b <= s.version.1))
}

fn inspect(file: &Path) -> anyhow::Result<Report> {
    let bytes = read(file).map_err(|e| anyhow::anyhow!("plugin {}: {e}", file.display()))?;
    let (format, component) = format(&bytes);
    let mut report = Report {
        file: file.display().to_string(),
        bytes: bytes.len() as u64,
        sha256: cache::content_hash(&bytes),
        format,
        component,
        kind: None,
        imports: Vec::new(),
        exports: Vec::new(),
        entries: None,
        callbacks: None,
        probe: None,
        loads: false,
        reason: None,
    };
    if !component {
        return Ok(report);
    }
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    match Library::link(&name, &bytes, PluginKind::Transport, &[])
        .or_else(|e| Library::link(&name, &bytes, PluginKind::Net, &[]).map_err(|_| e))
    {
        Ok(library) => describe(&mut report, &library),
        Err(reason) => {
            match load::names(&bytes) {
                Ok((imports, exports)) => {
                    report.imports = imports.iter().map(|n| interface(n, None)).collect();
                    report.exports = exports.iter().map(|n| interface(n, None)).collect();
                }
                // What may not be compiled is looked at no further.
                Err(e) if !e.starts_with(load::DAMAGED) => {}
                Err(e) => {
                    report.component = false;
                    report.format = format!("damaged WebAssembly component: {e}");
                    return Ok(report);
                }
            }
            report.reason = Some(reason);
        }
    }
    for import in &mut report.imports {
        import.served = Some(is_served(import));
    }
    let exports = |name: &str| report.exports.iter().any(|e| e.name == name);
    report.kind = if exports(COLLECTIVES) {
        Some("transport")
    } else if exports(NET) {
        Some("net")
    } else {
        None
    };
    // A file that does not link, or exports no collectives, has no probe to ask; the runtime would say so.
    let runtime = open(file)?;
    match runtime.load_error() {
        Some(e) => report.reason = Some(e.sentinel),
        None => {
            let v = runtime.forward().version_info()?;
            let [a, b, c, d] = v.numbers;
            report.loads = true;
            report.probe = Some(Probe {
                version: format!("{a}.{b}.{c}.{d}"),
                git_hash: git_hash(&v.git_hash),
                compatibility: v.compatibility,
            });
        }
    }
    Ok(report)
}

/// The 16 bytes as text if they are text, else in hex.
fn git_hash(bytes: &[u8; 16]) -> String {
    let used = bytes.iter().rposition(|b| *b != 0).map_or(&bytes[..0], |last| &bytes[..=last]);
    match std::str::from_utf8(used) {
        Ok(text) if text.chars().all(|c| c.is_ascii_graphic()) => text.to_string(),
        _ => used.iter().map(|b| format!("{b:02x}")).collect(),
    }
}

/// What is known of a component that links.
fn describe(report: &mut Report, library: &Library) {
    let (imports, exports) = (library.imports(), library.exports());
    report.imports = imports.iter().map(|(n, f)| interface(n, Some(f.len()))).collect();
    report.exports = exports.iter().map(|(n, f)| interface(n, Some(f.len()))).collect();
    let collectives = exports.iter().find(|(n, _)| split_version(n).0 == COLLECTIVES);
    report.entries = collectives.map(|(_, functions)| entries(functions));
    let nrt: Vec<(&str, &str)> = imports
        .iter()
        .filter(|(n, _)| n.starts_with("neuron:nrt/"))
        .flat_map(|(n, f)| f.iter().map(|f| (split_version(n).0, f.as_str())))
        .collect();
    let (known, unknown): (Vec<_>, Vec<_>) = nrt.into_iter().partition(|f| CALLBACKS.contains(f));
    report.callbacks = Some(Callbacks {
        imported: known.len(),
        of: CALLBACKS.len(),
        unknown: unknown.into_iter().map(|(_, f)| f.to_string()).collect(),
    });
}

fn entries(functions: &[String]) -> Entries {
    let has = |name: &str| functions.iter().any(|f| f == name);
    let missing: Vec<Missing> = (0..NAMES.len())
        .filter(|slot| !has(NAMES[*slot]))
        .map(|slot| Missing { slot, name: NAMES[slot], original: ORIGINALS[slot] })
        .collect();
    let unknown = functions.iter().filter(|f| !NAMES.contains(&f.as_str())).cloned().collect();
    Entries { present: NAMES.len() - missing.len(), of: NAMES.len(), missing, unknown }
}

fn show(r: &Report, paint: Paint) -> Vec<String> {
    let row = |k: &str, v: String| format!("{k:<15}{v}");
    let mut lines = vec![
        row("file", r.file.clone()),
        row("format", if r.component { r.format.clone() } else { paint.bad(&r.format) }),
        row("size", format!("{} bytes", r.bytes)),
        row("sha256", r.sha256.clone()),
    ];
    if !r.component {
        return lines;
    }
    lines.push(row(
        "kind",
        match r.kind {
            Some("net") => "net plugin (a libnccom-net)".into(),
            Some(_) => "transport (a libnccom)".into(),
            None => format!("unknown: it exports neither {COLLECTIVES} nor {NET}"),
        },
    ));
    if let Some(p) = &r.probe {
        let hash = if p.git_hash.is_empty() { String::new() } else { format!(", git {}", p.git_hash) };
        lines.push(row("probe", format!("version {}{hash}, compatibility {}", p.version, p.compatibility)));
    }
    if let Some(e) = &r.entries {
        let text = format!("{}/{} in slot order", e.present, e.of);
        lines.push(row("entries", if e.missing.is_empty() { text } else { paint.bad(&text) }));
        lines
            .extend(e.missing.iter().map(|m| row("", format!("missing: slot {} {} ({})", m.slot, m.name, m.original))));
        lines.extend(e.unknown.iter().map(|f| row("", format!("none of the {}: {f}", e.of))));
    }
    if let Some(c) = &r.callbacks {
        lines.push(row("callbacks", format!("imports {} of the {} of neuron:nrt@2.0.0", c.imported, c.of)));
        lines.extend(c.unknown.iter().map(|f| row("", paint.bad(&format!("none of the {}: {f}", c.of)))));
    }
    let loads = match &r.reason {
        None if r.loads => paint.good("yes"),
        reason => format!("{}: {}", paint.bad("no"), reason.as_deref().unwrap_or("unknown")),
    };
    lines.push(row("loads here", loads));
    for (title, list) in [("imports", &r.imports), ("exports", &r.exports)] {
        lines.push(String::new());
        lines.push(paint.bold(&format!("{title} ({})", list.len())));
        if list.is_empty() {
            lines.push("  none".into());
        }
        lines.extend(list.iter().map(|i| {
            let functions = match i.functions {
                None => "? functions".into(),
                Some(0) => "types only".into(),
                Some(1) => "1 function".into(),
                Some(n) => format!("{n} functions"),
            };
            let note = if i.served == Some(false) { paint.bad("  not served here") } else { String::new() };
            let name = match &i.version {
                Some(v) => format!("{}@{v}", i.name),
                None => i.name.clone(),
            };
            format!("  {name:<36}{functions}{note}")
        }));
    }
    let served: Vec<&Interface> = r.imports.iter().filter(|i| i.served == Some(true)).collect();
    if !served.is_empty() && served.len() == r.imports.len() {
        lines.push(String::new());
        lines.push(format!(
            "Every import is one of neuron:nrt@2.0.0 or neuron:hw@1.0.0, which this host serves; the plugin can reach nothing \
             else. Memory it may have: {}.",
            size::short(sandbox::limits::Limits::default().memory as u64)
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_no_component_are_named() {
        let is = |bytes: &[u8], what: &str| {
            let (text, component) = format(bytes);
            assert!(text.contains(what) && !component, "{text}");
        };
        is(b"", "empty");
        is(b"\0asm\x01\0\0\0", "core module");
        is(b"\0asm\x07\0\0\0", "version");
        is(b"\x7fELF\x02", "native library");
        is(b"  (component)", "text");
        is(b"package a:b;\n", "WIT");
        is(b"\xff\xfe", "neither");
        assert!(format(b"\0asm\x0d\0\x01\0").1);
    }

    /// Its start function and its probe run for that; what they cannot reach then is tried in the hostile zoo.
    #[test]
    fn a_file_that_is_asked_about_is_only_looked_at() {
        let runtime = open(Path::new("/none.wasm")).unwrap();
        assert!(runtime.config().examine && runtime.load_error().is_some());
    }

    #[test]
    fn entries_are_counted_in_slot_order() {
        let mut all: Vec<String> = NAMES.iter().map(|n| n.to_string()).collect();
        let full = entries(&all);
        assert_eq!((full.present, full.missing.len(), full.unknown.len()), (37, 0, 0));
        all.remove(7);
        all.push("neuron-new-thing".into());
        let e = entries(&all);
        assert_eq!((e.present, e.unknown.len()), (36, 1));
        assert_eq!((e.missing[0].slot, e.missing[0].original), (7, "neuronExpandConnectivity"));
    }

    #[test]
    fn served_imports_follow_the_version_rule() {
        let served = |name: &str| is_served(&interface(name, None));
        assert!(served("neuron:nrt/nec@2.0.0"));
        assert!(served("neuron:nrt/nec@2.0.7"));
        assert!(!served("neuron:nrt/nec@2.1.0"));
        assert!(!served("neuron:nrt/nec@3.0.0"));
        assert!(!served("neuron:nrt/nec"));
        assert!(!served("wasi:cli/environment@0.2.0"));
    }

    #[test]
    fn a_git_hash_is_text_or_hex() {
        let mut h = [0u8; 16];
        assert_eq!(git_hash(&h), "");
        h[..4].copy_from_slice(b"ab12");
        assert_eq!(git_hash(&h), "ab12");
        h[0] = 0xfe;
        assert_eq!(git_hash(&h), "fe623132");
    }
}
