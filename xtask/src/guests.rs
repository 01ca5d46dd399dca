//! Builds the guests and makes them into components, under `target/plugins/`.
//!
//! Invariants: a file there is either the old one or the new one, never a part of one; a file whose content did not
//! change is not touched; the core module is written after its component, so that it never stands for a component that
//! was not made from it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use wit_component::{ComponentEncoder, metadata};

use crate::route::{TARGET, Toolchain};
use crate::step::{self, Failure};

/// A guest crate and the plugin that is made from it.
struct Guest {
    /// Its package in this workspace; a cdylib.
    package: &'static str,
    /// File name under `target/plugins/`, without `.wasm`.
    plugin: &'static str,
}

/// All guests of this workspace.
const GUESTS: &[Guest] = &[
    Guest { package: "nccom", plugin: "nccom" },
    Guest { package: "nccom-next", plugin: "nccom-next" },
    Guest { package: "nccom-stuck", plugin: "nccom-stuck" },
];

/// The cargo profile of guests, in the workspace's Cargo.toml.
const PROFILE: &str = "guest";
/// Far beyond any build seen; it bounds a registry that never answers.
const BUILD_LIMIT: Duration = Duration::from_secs(1800);

/// A component under `target/plugins/`.
#[derive(Debug, PartialEq, Eq)]
pub struct Plugin {
    /// Where it is.
    pub path: PathBuf,
    /// Its size.
    pub bytes: usize,
    /// Whether this run wrote it anew.
    pub changed: bool,
}

/// Compiles all guests with `toolchain` and puts their components, and beside them the core modules
/// (`NAME.core.wasm`), into `target/plugins/` of the workspace at `root`.
///
/// # Errors
///
/// When a guest does not compile, is no WIT guest, or its component does not validate.
pub fn build(root: &Path, toolchain: &Toolchain, logs: &Path) -> Result<Vec<Plugin>> {
    let target = root.join("target").join("guests");
    compile(root, toolchain, &target, logs)?;
    let plugins = root.join("target").join("plugins");
    fs::create_dir_all(&plugins).with_context(|| format!("The folder {} could not be made", plugins.display()))?;
    GUESTS.iter().map(|guest| componentise(guest, &target, &plugins)).collect()
}

fn compile(root: &Path, toolchain: &Toolchain, target: &Path, logs: &Path) -> Result<()> {
    let mut command = toolchain.cargo_build();
    // Guests live in a folder of their own: another compiler or other features would otherwise undo the host's builds.
    command.args(["--profile", PROFILE, "--lib", "--target-dir"]).arg(target).current_dir(root);
    for guest in GUESTS {
        command.args(["--package", guest.package]);
    }
    let names: Vec<&str> = GUESTS.iter().map(|guest| guest.package).collect();
    let names = names.join(", ");
    let notice = format!("building the guests ({names}) with {toolchain}; the first time takes some minutes");
    let log = logs.join(format!("guests.{}.log", process::id()));
    match step::run(&mut command, &notice, &log, BUILD_LIMIT) {
        Ok(()) => Ok(()),
        Err(Failure::Refused(_, tail)) => bail!(
            "The guests ({names}) did not build with {toolchain}. The end of what cargo said (all of it: {}):\n{tail}",
            log.display()
        ),
        Err(failure) => bail!("The guests ({names}) did not build with {toolchain}: cargo {}", failure.reason()),
    }
}

fn componentise(guest: &Guest, target: &Path, plugins: &Path) -> Result<Plugin> {
    let artefact = format!("{}.wasm", guest.package.replace('-', "_"));
    let built = target.join(TARGET).join(PROFILE).join(artefact);
    let core = fs::read(&built).with_context(|| {
        format!("Cargo built package {}, but {} cannot be read; is the crate a cdylib?", guest.package, built.display())
    })?;
    let component = encode(&core).with_context(|| format!("No component can be made of {}", built.display()))?;
    let path = plugins.join(format!("{}.wasm", guest.plugin));
    // Encoding takes milliseconds, so it is always done: a component that was damaged, or made by an older
    // wit-component, is then replaced.
    let changed = write_if_changed(&path, &component)?;
    write_if_changed(&plugins.join(format!("{}.core.wasm", guest.plugin)), &core)?;
    Ok(Plugin { path, bytes: component.len(), changed })
}

/// The component of a core module that carries its world in a `component-type` section.
fn encode(core: &[u8]) -> Result<Vec<u8>> {
    let (described, _) = metadata::decode(core).context("the module cannot be read")?;
    if described.is_none() {
        bail!(
            "it has no component-type section; the crate must call wit_bindgen::generate! for its world, and export!"
        );
    }
    ComponentEncoder::default().validate(true).module(core)?.encode()
}

/// Writes through a temporary name, so that a reader sees the old file or the new one. Returns whether it wrote.
fn write_if_changed(path: &Path, content: &[u8]) -> Result<bool> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(false);
    }
    let temporary = path.with_extension(format!("{}.tmp", process::id()));
    let written = fs::write(&temporary, content).and_then(|()| fs::rename(&temporary, path));
    written
        .or_else(|error| discard(&temporary, error))
        .with_context(|| format!("{} was not written", path.display()))?;
    Ok(true)
}

fn discard(temporary: &Path, error: io::Error) -> io::Result<()> {
    // The error that brought us here says more than a failed removal would.
    let _ = fs::remove_file(temporary);
    Err(error)
}

#[cfg(test)]
mod tests {
    use wit_component::metadata::Bindgen;
    use wit_component::{StringEncoding, embed_component_metadata};

    use super::*;
    use crate::test_folder::TestFolder;

    /// An empty core module: magic and version.
    const EMPTY_MODULE: &[u8] = b"\0asm\x01\0\0\0";
    const GUEST: Guest = Guest { package: "a-guest", plugin: "plug" };

    /// An empty core module whose world, which is empty too, is told in a component-type section.
    fn guest_module() -> Vec<u8> {
        let mut module = EMPTY_MODULE.to_vec();
        let Bindgen { resolve, world, .. } = Bindgen::default();
        embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8, false).unwrap();
        module
    }

    fn built(folder: &TestFolder, core: &[u8]) -> Result<Plugin> {
        let artefacts = folder.path().join(TARGET).join(PROFILE);
        fs::create_dir_all(&artefacts).unwrap();
        fs::write(artefacts.join("a_guest.wasm"), core).unwrap();
        componentise(&GUEST, folder.path(), folder.path())
    }

    #[test]
    fn a_guest_becomes_a_component_once() {
        let folder = TestFolder::new("guests-once");
        let first = built(&folder, &guest_module()).unwrap();
        assert!(first.changed);
        // Layer 1 in the header's second half: a component, no core module.
        let component = fs::read(folder.path().join("plug.wasm")).unwrap();
        assert_eq!(&component[..8], b"\0asm\x0d\0\x01\0");
        assert_eq!(first.bytes, component.len());
        assert_eq!(fs::read(folder.path().join("plug.core.wasm")).unwrap(), guest_module());

        assert!(!built(&folder, &guest_module()).unwrap().changed);
    }

    #[test]
    fn a_damaged_component_is_replaced() {
        let folder = TestFolder::new("guests-damaged");
        built(&folder, &guest_module()).unwrap();
        let path = folder.path().join("plug.wasm");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(built(&folder, &guest_module()).unwrap().changed);
        assert_eq!(fs::read(&path).unwrap(), whole);
    }

    #[test]
    fn a_module_without_a_world_is_refused() {
        let folder = TestFolder::new("guests-no-world");
        let text = format!("{:#}", built(&folder, EMPTY_MODULE).unwrap_err());
        assert!(text.contains("a_guest.wasm") && text.contains("no component-type section"), "{text}");
        assert!(!folder.path().join("plug.wasm").exists());
    }

    #[test]
    fn a_broken_module_is_refused() {
        let folder = TestFolder::new("guests-broken");
        assert!(built(&folder, b"no wasm").is_err());
        assert!(!folder.path().join("plug.core.wasm").exists());
    }

    #[test]
    fn a_write_leaves_no_temporary_file() {
        let folder = TestFolder::new("guests-write");
        let path = folder.path().join("a.wasm");
        assert!(write_if_changed(&path, b"one").unwrap());
        assert!(!write_if_changed(&path, b"one").unwrap());
        assert!(write_if_changed(&path, b"two").unwrap());
        let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["a.wasm"]);
        // A folder stands where the file should: nothing can be renamed onto it.
        fs::create_dir_all(folder.path().join("b.wasm/inside")).unwrap();
        assert!(write_if_changed(&folder.path().join("b.wasm"), b"one").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
