//! Finds, or installs, a compiler that can build guests, and knows how it is called.
//!
//! Two routes lead there. The *rustup* route is the toolchain that builds the host, once it has the standard library
//! for [`TARGET`]. The *debian* route is Debian's `rustc-web`, which has no such library but ships its source: cargo
//! builds it (`-Zbuild-std`), which that compiler accepts under `RUSTC_BOOTSTRAP`.
//!
//! Invariants: what is ready is used before anything is installed, so a machine that is set up needs no network; every
//! "no" is kept with the command that got it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::time::Duration;

use crate::step;

/// What guests are compiled for: WebAssembly without any system interface.
pub const TARGET: &str = "wasm32-unknown-unknown";
/// Forces one route: `rustup` or `debian`.
pub const ROUTE_VARIABLE: &str = "WCCL_GUEST_ROUTE";

/// Debian's packages of the debian route.
const PACKAGES: [&str; 4] = ["rustc-web", "cargo-web", "rust-web-src", "lld-19"];
/// Where those packages put the compiler; named in full, because rustup's proxies usually come first on PATH.
const DEBIAN_CARGO: &str = "/usr/bin/cargo";
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const DEBIAN_LINKER: &str = "/usr/bin/wasm-ld-19";

/// A refusal comes at once; these bound a network that swallows packets.
const RUSTUP_LIMIT: Duration = Duration::from_secs(300);
const APT_LIMIT: Duration = Duration::from_secs(900);

/// A way to a compiler for guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The active toolchain with the target's standard library added.
    Rustup,
    /// Debian's packages, with the standard library built from source.
    Debian,
}

impl Route {
    /// Reads the value of [`ROUTE_VARIABLE`]; unset and empty mean that nothing is forced.
    ///
    /// # Errors
    ///
    /// A sentence that names the value and what it may be.
    pub fn parse(value: Option<&str>) -> Result<Option<Self>, String> {
        match value {
            None | Some("") => Ok(None),
            Some("rustup") => Ok(Some(Self::Rustup)),
            Some("debian") => Ok(Some(Self::Debian)),
            Some(other) => Err(format!(
                "{ROUTE_VARIABLE} is \"{other}\", but only \"rustup\" and \"debian\" exist; unset it to let xtask choose."
            )),
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rustup => "rustup",
            Self::Debian => "debian",
        })
    }
}

/// A compiler that can build guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// How it was found.
    pub route: Route,
    /// Version of its rustc, such as "1.96.0".
    pub version: String,
    cargo: OsString,
}

impl Toolchain {
    /// A cargo invocation that compiles for [`TARGET`] whatever the surrounding build was told.
    pub fn cargo_build(&self) -> Command {
        let mut command = Command::new(&self.cargo);
        command.args(["build", "--target", TARGET]);
        // Flags and targets that a user sets for the host (target-cpu=native, say) do not fit a guest. An empty
        // value, unlike an absent one, also overrides the configuration files.
        command.env("CARGO_ENCODED_RUSTFLAGS", "").env_remove("CARGO_BUILD_TARGET");
        if self.route == Route::Debian {
            command.arg("-Zbuild-std=std,panic_abort");
            command.env("RUSTC", DEBIAN_RUSTC).env("RUSTC_BOOTSTRAP", "1");
            command.env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER", DEBIAN_LINKER);
            // `cargo run` of another toolchain set these for us; that compiler must not see them.
            for name in ["RUSTUP_TOOLCHAIN", "LD_LIBRARY_PATH", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "CARGO"] {
                command.env_remove(name);
            }
        }
        command
    }
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.route {
            Route::Rustup => write!(f, "rustc {} (the active toolchain, which has {TARGET})", self.version),
            Route::Debian => write!(f, "rustc {} (Debian's rustc-web, standard library from its source)", self.version),
        }
    }
}

/// No compiler for guests could be found or installed.
#[derive(Debug, PartialEq, Eq)]
pub struct Unavailable {
    forced: Option<Route>,
    /// What was tried, and why it did not do.
    tried: Vec<String>,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guests cannot be built: this machine has no compiler for {TARGET}")?;
        if let Some(route) = self.forced {
            write!(f, " by the route \"{route}\" that {ROUTE_VARIABLE} forces")?;
        }
        f.write_str(", and none could be installed; ")?;
        match self.forced {
            None => write!(f, "run `{RUSTUP_ADD}`, or as root `{}`, then `cargo xtask setup`.", apt_commands())?,
            Some(Route::Rustup) => write!(f, "run `{RUSTUP_ADD}`, or unset {ROUTE_VARIABLE}.")?,
            Some(Route::Debian) => write!(f, "run as root `{}`, or unset {ROUTE_VARIABLE}.", apt_commands())?,
        }
        f.write_str(" Tried:")?;
        for attempt in &self.tried {
            write!(f, "\n  - {attempt}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Unavailable {}

const RUSTUP_ADD: &str = "rustup target add wasm32-unknown-unknown";

fn apt_commands() -> String {
    format!("apt-get update && apt-get install -y --no-install-recommends {}", PACKAGES.join(" "))
}

/// One thing to try on the way to a compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// Use what is there.
    Use(Route),
    /// Install what is missing, then use it.
    Install(Route),
}

/// Finds a compiler for guests, installing one if there is none. `root` is the workspace, `logs` where output goes.
///
/// # Errors
///
/// [`Unavailable`] when every attempt got a "no".
pub fn find_or_install(forced: Option<Route>, root: &Path, logs: &Path) -> Result<Toolchain, Unavailable> {
    resolve(forced, |attempt| match attempt {
        Attempt::Use(route) => find(route, root),
        Attempt::Install(route) => {
            match route {
                Route::Rustup => install_by_rustup(root, logs),
                Route::Debian => install_by_apt(logs),
            }?;
            find(route, root).map_err(|reason| format!("{reason} (after it was installed)"))
        }
    })
}

/// Makes the attempts in order until one succeeds.
fn resolve(
    forced: Option<Route>,
    mut attempt: impl FnMut(Attempt) -> Result<Toolchain, String>,
) -> Result<Toolchain, Unavailable> {
    use Attempt::{Install, Use};
    let order = match forced {
        None => vec![Use(Route::Rustup), Use(Route::Debian), Install(Route::Rustup), Install(Route::Debian)],
        Some(route) => vec![Use(route), Install(route)],
    };
    let mut tried = Vec::new();
    for each in order {
        match attempt(each) {
            Ok(toolchain) => return Ok(toolchain),
            Err(reason) => tried.push(reason),
        }
    }
    Err(Unavailable { forced, tried })
}

fn find(route: Route, root: &Path) -> Result<Toolchain, String> {
    match route {
        Route::Rustup => find_active(root),
        Route::Debian => find_debian(),
    }
}

/// The program that the variable names, else the usual one.
pub fn program(variable: &str, usual: &str) -> OsString {
    env::var_os(variable).filter(|named| !named.is_empty()).unwrap_or_else(|| usual.into())
}

/// The toolchain that runs us, if it has the target's standard library. Its own folder is asked, not rustup, so that a
/// toolchain which came another way does as well.
fn find_active(root: &Path) -> Result<Toolchain, String> {
    let rustc = program("RUSTC", "rustc");
    let version = rustc_version(&rustc, root)?;
    let libraries = PathBuf::from(query(&rustc, &["--print", "target-libdir", "--target", TARGET], root)?);
    if !holds_std(&libraries) {
        return Err(format!("the active toolchain has no standard library for {TARGET} in {}", libraries.display()));
    }
    Ok(Toolchain { route: Route::Rustup, version, cargo: program("CARGO", "cargo") })
}

/// Whether a compiled standard library lies in `folder`.
fn holds_std(folder: &Path) -> bool {
    fs::read_dir(folder).is_ok_and(|entries| {
        entries.flatten().any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with("libstd-") && name.ends_with(".rlib")
        })
    })
}

fn find_debian() -> Result<Toolchain, String> {
    for program in [DEBIAN_RUSTC, DEBIAN_CARGO, DEBIAN_LINKER] {
        if !Path::new(program).exists() {
            return Err(format!("{program} does not exist (Debian's {})", PACKAGES.join(", ")));
        }
    }
    let anywhere = Path::new("/");
    let version = rustc_version(DEBIAN_RUSTC.as_ref(), anywhere)?;
    let wanted = env!("CARGO_PKG_RUST_VERSION");
    if !at_least(&version, wanted) {
        return Err(format!("{DEBIAN_RUSTC} is version {version}, but this workspace needs {wanted} or later"));
    }
    let sysroot = PathBuf::from(query(DEBIAN_RUSTC.as_ref(), &["--print", "sysroot"], anywhere)?);
    let source = sysroot.join("lib/rustlib/src/rust/library/std/Cargo.toml");
    if !source.exists() {
        return Err(format!("{} does not exist (Debian's rust-web-src)", source.display()));
    }
    Ok(Toolchain { route: Route::Debian, version, cargo: DEBIAN_CARGO.into() })
}

fn rustc_version(rustc: &OsStr, folder: &Path) -> Result<String, String> {
    let text = query(rustc, &["-vV"], folder)?;
    let release = text.lines().find_map(|line| line.strip_prefix("release: "));
    release.map(str::to_owned).ok_or_else(|| format!("`{} -vV` names no release", rustc.to_string_lossy()))
}

/// What a program prints, trimmed; its refusal as a sentence.
fn query(program: &OsStr, arguments: &[&str], folder: &Path) -> Result<String, String> {
    let said = || format!("`{} {}`", program.to_string_lossy(), arguments.join(" "));
    let output = Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .output()
        .map_err(|error| format!("{} could not be run: {error}", said()))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{} said no ({}): {}", said(), output.status, step::tail(&errors, 1)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Compares dotted versions by their first three numbers; what follows a number ("-nightly") is ignored.
fn at_least(version: &str, wanted: &str) -> bool {
    fn numbers(text: &str) -> [u32; 3] {
        let mut parts = text.split('.').map(|part| {
            let digits = part.find(|c: char| !c.is_ascii_digit()).map_or(part, |end| &part[..end]);
            digits.parse().unwrap_or(0)
        });
        [(); 3].map(|()| parts.next().unwrap_or(0))
    }
    numbers(version) >= numbers(wanted)
}

fn install_by_rustup(root: &Path, logs: &Path) -> Result<(), String> {
    let mut words = RUSTUP_ADD.split(' ');
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words).current_dir(root);
    let notice = format!("running `{RUSTUP_ADD}`: guests need that target's standard library");
    install(&mut command, RUSTUP_ADD, &notice, &logs.join("rustup"), RUSTUP_LIMIT)
}

fn install_by_apt(logs: &Path) -> Result<(), String> {
    if query("id".as_ref(), &["-u"], Path::new("/"))? != "0" {
        return Err(format!("`{}` needs root, which this user is not", apt_commands()));
    }
    let mut update = Command::new("apt-get");
    update.arg("update");
    let notice = "running `apt-get update`: guests need Debian's rustc-web";
    // Lists that are a little old often do; whether these did is seen when the packages are installed.
    let updated = install(&mut update, "apt-get update", notice, &logs.join("apt-update"), APT_LIMIT);

    let mut command = Command::new("apt-get");
    command.args(["install", "-y", "--no-install-recommends"]).args(PACKAGES);
    command.env("DEBIAN_FRONTEND", "noninteractive");
    let said = format!("apt-get install -y --no-install-recommends {}", PACKAGES.join(" "));
    let notice = format!("running `{said}`: guests need that compiler (about half a minute)");
    let installed = install(&mut command, &said, &notice, &logs.join("apt-install"), APT_LIMIT);
    match (installed, updated) {
        (Err(no), Err(earlier)) => Err(format!("{no}; before it, {earlier}")),
        (result, _) => result,
    }
}

fn install(command: &mut Command, said: &str, notice: &str, log: &Path, limit: Duration) -> Result<(), String> {
    let log = log.with_extension(format!("{}.log", process::id()));
    step::run(command, notice, &log, limit).map_err(|failure| format!("`{said}` {}", failure.reason()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::TestFolder;

    fn toolchain(route: Route) -> Toolchain {
        Toolchain { route, version: "1.96.0".into(), cargo: "cargo".into() }
    }

    /// What `resolve` attempts when only `works` succeeds.
    fn attempts(forced: Option<Route>, works: Option<Attempt>) -> (Vec<Attempt>, Result<Toolchain, Unavailable>) {
        let mut seen = Vec::new();
        let result = resolve(forced, |attempt| {
            seen.push(attempt);
            let (Attempt::Use(route) | Attempt::Install(route)) = attempt;
            if Some(attempt) == works { Ok(toolchain(route)) } else { Err(format!("{attempt:?} says no")) }
        });
        (seen, result)
    }

    #[test]
    fn route_variable_is_read_strictly() {
        assert_eq!(Route::parse(None), Ok(None));
        assert_eq!(Route::parse(Some("")), Ok(None));
        assert_eq!(Route::parse(Some("rustup")), Ok(Some(Route::Rustup)));
        assert_eq!(Route::parse(Some("debian")), Ok(Some(Route::Debian)));
        assert!(Route::parse(Some("Rustup")).unwrap_err().contains("\"Rustup\""));
    }

    #[test]
    fn what_is_ready_comes_before_what_must_be_installed() {
        use Attempt::{Install, Use};
        let (seen, result) = attempts(None, Some(Use(Route::Debian)));
        assert_eq!(seen, [Use(Route::Rustup), Use(Route::Debian)]);
        assert_eq!(result, Ok(toolchain(Route::Debian)));

        let (seen, result) = attempts(None, Some(Install(Route::Debian)));
        assert_eq!(seen, [Use(Route::Rustup), Use(Route::Debian), Install(Route::Rustup), Install(Route::Debian)]);
        assert_eq!(result, Ok(toolchain(Route::Debian)));
    }

    #[test]
    fn a_forced_route_never_tries_the_other() {
        use Attempt::{Install, Use};
        for route in [Route::Rustup, Route::Debian] {
            let (seen, result) = attempts(Some(route), None);
            assert_eq!(seen, [Use(route), Install(route)]);
            let text = result.unwrap_err().to_string();
            assert!(text.contains(&format!("\"{route}\"")) && text.contains("unset WCCL_GUEST_ROUTE"), "{text}");
        }
    }

    #[test]
    fn every_no_is_reported() {
        let (seen, result) = attempts(None, None);
        let text = result.unwrap_err().to_string();
        for attempt in seen {
            assert!(text.contains(&format!("{attempt:?} says no")), "{text}");
        }
        assert!(text.contains(RUSTUP_ADD) && text.contains("rust-web-src"), "{text}");
    }

    #[test]
    fn versions_compare_as_numbers() {
        assert!(at_least("1.96.0", "1.95"));
        assert!(at_least("1.95.0", "1.95"));
        assert!(at_least("1.100.0-nightly", "1.95"));
        assert!(at_least("2.0", "1.95.3"));
        assert!(!at_least("1.63.0", "1.95"));
        assert!(!at_least("1.95.0", "1.95.1"));
    }

    #[test]
    fn a_standard_library_is_seen_only_if_compiled() {
        let folder = TestFolder::new("route-std");
        assert!(!holds_std(&folder.path().join("absent")));
        fs::write(folder.path().join("libcore-1.rlib"), "").unwrap();
        fs::write(folder.path().join("libstd-1.rmeta"), "").unwrap();
        assert!(!holds_std(folder.path()));
        fs::write(folder.path().join("libstd-1.rlib"), "").unwrap();
        assert!(holds_std(folder.path()));
    }

    #[test]
    fn guests_never_see_the_hosts_flags() {
        for route in [Route::Rustup, Route::Debian] {
            let command = toolchain(route).cargo_build();
            let flags: Vec<_> = command.get_envs().filter(|(name, _)| *name == "CARGO_ENCODED_RUSTFLAGS").collect();
            assert_eq!(flags, [("CARGO_ENCODED_RUSTFLAGS".as_ref(), Some("".as_ref()))]);
            let builds_std = command.get_args().any(|word| word == "-Zbuild-std=std,panic_abort");
            assert_eq!(builds_std, route == Route::Debian);
        }
    }
}
