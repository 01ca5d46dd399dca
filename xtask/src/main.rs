//! Set-up, guest builds, demo, tests, bench, soak, isolation, fuzz: `cargo xtask help`.
//!
//! Guests are compiled for WebAssembly, which cargo alone does not arrange; everything that needs them is started
//! here. Exit codes: 0 done, 1 failed, 2 not possible on this machine or wrongly called; programs that are started pass
//! theirs on.

#![forbid(unsafe_code)]

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::{Context, Result, bail};

mod alike;
mod fuzz;
mod glossary;
mod guests;
mod programs;
mod rooms;
mod route;
mod spec;
mod step;
#[cfg(test)]
mod test_folder;

use guests::Plugin;
use route::{ROUTE_VARIABLE, Route, Toolchain, Unavailable};
use step::{Failure, note};

const HELP: &str = "\
Usage: cargo xtask COMMAND [ARGUMENTS]

Commands:
  setup          Find a compiler for the guests, or install one, and say which.
  guests         Build the plugins: target/plugins/NAME.wasm (does setup).
  demo [ARGS]    Build everything and run `wccl demo ARGS`.
  bench [ARGS]   Build everything and run `wccl bench ARGS`.
  test [ARGS]    Build the guests and run `cargo test --release --workspace --no-fail-fast ARGS`.
  soak [ARGS]    Run random collectives over 8 processes that die and come late, for 10 minutes; fail at the first fault.
                   --minutes M, --seconds S   how long
                   --seed N                   repeat the rounds of an earlier run
                   --ranks N                  how many processes
  isolation      Print the latency of a tenant's operations, alone and beside tenants that flood.
                   --beside NAME, --list      only beside that one; which there are
                   --seconds S                how long each measurement (3)
                   --gap US                   how long the tenant computes between two calls (0)
  fuzz [TARGET]  Try the fuzz targets, or one, under libFuzzer; fail at the first finding. Needs a C++ compiler (g++).
                   --seconds N       how long each (180)
  rooms          Print which folders of each crate name which; fail if they form a circle, a crate names one it may not, two
                 public types have one name (docs/glossary.md), or a crate alone is built of other dependencies than the whole.
  spec-coverage  List each invariant of the specification with the tests that prove it.
                   --missing         only those without a test
                   --require LIST    fail unless each has a test; LIST is like 1-27,32,40-45
  help           Print this.

Environment:
  WCCL_GUEST_ROUTE  Where the compiler for guests comes from. Unset: what is ready, else what can be installed.
                      rustup   the active toolchain with its target wasm32-unknown-unknown
                      debian   Debian's packages rustc-web, cargo-web, rust-web-src, lld-19

Exit code: 0 done, 1 failed, 2 not possible on this machine or wrongly called; else that of the program that was run.
";

/// Far beyond any build seen; it bounds a registry that never answers.
const BUILD_LIMIT: Duration = Duration::from_secs(3600);

/// The command line, or a variable, is not as the help says.
#[derive(Debug)]
struct Usage(String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `cargo xtask help` explains.", self.0)
    }
}

impl std::error::Error for Usage {}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    match run(&arguments) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            note(&format!("error: {error:#}"));
            ExitCode::from(if error.is::<Usage>() || error.is::<Unavailable>() { 2 } else { 1 })
        }
    }
}

/// Carries out a command line; returns the exit code.
fn run(arguments: &[OsString]) -> Result<u8> {
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.to_str().unwrap_or_default(), rest),
        None => ("help", arguments),
    };
    let asks_for_help = |word: &OsString| word == "--help" || word == "-h";
    match command {
        "help" | "--help" | "-h" => help(),
        "setup" | "guests" | "fuzz" | "rooms" | "spec-coverage" if rest.iter().any(asks_for_help) => help(),
        "setup" => {
            no_arguments(command, rest)?;
            setup(&Workspace::find()?)
        }
        "guests" => {
            no_arguments(command, rest)?;
            let plugins = Workspace::find()?.build_guests()?;
            for Plugin { path, bytes, changed } in plugins {
                let state = if changed { "new" } else { "unchanged" };
                println!("{} ({} kB, {state})", path.display(), bytes.div_ceil(1000));
            }
            Ok(0)
        }
        "demo" | "bench" => {
            let workspace = Workspace::find()?;
            workspace.build_guests()?;
            let program = workspace.build_wccl()?;
            pass_on(Command::new(program).arg(command).args(rest))
        }
        "test" => {
            let workspace = Workspace::find()?;
            workspace.build_guests()?;
            pass_on(workspace.cargo().args(test_arguments(rest)))
        }
        "soak" | "isolation" => pass_on(programs::command(&Workspace::find()?, command)?.args(rest)),
        "fuzz" => fuzz::run(&Workspace::find()?, rest),
        "rooms" => {
            no_arguments(command, rest)?;
            let workspace = Workspace::find()?;
            let (map, mut faults) = rooms::check(&workspace.root)?;
            print!("{map}");
            faults.extend(glossary::check(&workspace.root)?);
            faults.extend(alike::check(|| workspace.cargo())?);
            faults.iter().for_each(|fault| note(&format!("error: {fault}")));
            Ok(u8::from(!faults.is_empty()))
        }
        "spec-coverage" => spec_coverage(&Workspace::find()?.root, rest),
        other => Err(Usage(format!("There is no command \"{other}\".")).into()),
    }
}

/// What cargo is given to run all tests. A binary that fails does not keep the later ones, and the examples in the docs, from
/// being run.
fn test_arguments(rest: &[OsString]) -> Vec<OsString> {
    // Cargo takes the flag once.
    let flag = OsStr::new("--no-fail-fast");
    let own = rest.iter().take_while(|word| *word != "--").all(|word| word != flag).then_some(flag);
    let words = ["test", "--release", "--workspace"].map(OsStr::new);
    words.into_iter().chain(own).chain(rest.iter().map(OsString::as_os_str)).map(OsStr::to_owned).collect()
}

fn help() -> Result<u8> {
    print!("{HELP}");
    Ok(0)
}

fn no_arguments(command: &str, rest: &[OsString]) -> Result<()> {
    match rest.first() {
        None => Ok(()),
        Some(word) => {
            Err(Usage(format!("{command} takes no argument, but got \"{}\".", word.to_string_lossy())).into())
        }
    }
}

fn setup(workspace: &Workspace) -> Result<u8> {
    let toolchain = workspace.toolchain()?;
    println!("Guests are built by {toolchain}: route \"{}\".", toolchain.route);
    println!("Nothing else is needed. Next: `cargo xtask demo`.");
    Ok(0)
}

fn spec_coverage(root: &Path, arguments: &[OsString]) -> Result<u8> {
    let (mut missing_only, mut list) = (false, None);
    let mut words = arguments.iter().map(|word| word.to_string_lossy());
    while let Some(word) = words.next() {
        match word.as_ref() {
            "--missing" => missing_only = true,
            "--require" => match words.next() {
                Some(value) => list = Some(value.into_owned()),
                None => return Err(Usage("--require wants a list such as 1-27,32.".into()).into()),
            },
            other => match other.strip_prefix("--require=") {
                Some(value) => list = Some(value.to_owned()),
                None => {
                    return Err(Usage(format!("spec-coverage does not know \"{other}\".")).into());
                }
            },
        }
    }
    let invariants = spec::invariants()?;
    let required = match list {
        Some(list) => spec::parse_required(&list, &invariants).map_err(|error| Usage(error.to_string()))?,
        None => Vec::new(),
    };
    let coverage = spec::coverage(root, &invariants)?;
    print!("{}", coverage.table(&invariants, missing_only));
    for complaint in &coverage.complaints {
        note(&format!("this claim does not count: {complaint}"));
    }
    let lacking: Vec<u16> = required.into_iter().filter(|number| !coverage.has(*number)).collect();
    if !lacking.is_empty() {
        bail!("These required invariants have no test: {}", spec::names(&lacking));
    }
    Ok(0)
}

/// Runs a program in the foreground and returns its exit code; one that died of signal n counts as 128 + n, as in a
/// shell.
fn pass_on(command: &mut Command) -> Result<u8> {
    let status =
        command.status().with_context(|| format!("{} could not be run", command.get_program().to_string_lossy()))?;
    Ok(exit_code(status))
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// The workspace this program belongs to.
struct Workspace {
    root: PathBuf,
    /// Where the output of quiet commands goes.
    logs: PathBuf,
}

impl Workspace {
    fn find() -> Result<Self> {
        // Cargo sets the variable for what it runs; the constant is for a program that is started by hand.
        let own = env::var_os("CARGO_MANIFEST_DIR")
            .filter(|own| !own.is_empty())
            .unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&own).parent().map(Path::to_owned).unwrap_or_default();
        if !root.join("xtask").join("Cargo.toml").exists() {
            return Err(
                Usage(format!("{} is not wccl's workspace; start this by `cargo xtask`.", root.display())).into()
            );
        }
        let logs = root.join("target").join("xtask");
        Ok(Self { root, logs })
    }

    /// The cargo that runs us, for this workspace.
    fn cargo(&self) -> Command {
        let mut command = Command::new(route::program("CARGO", "cargo"));
        command.current_dir(&self.root);
        command
    }

    fn toolchain(&self) -> Result<Toolchain> {
        // What is no text is the name of no route, and refused as that.
        let value = env::var_os(ROUTE_VARIABLE).map(|value| value.to_string_lossy().into_owned());
        let forced = Route::parse(value.as_deref()).map_err(Usage)?;
        Ok(route::find_or_install(forced, &self.root, &self.logs)?)
    }

    fn build_guests(&self) -> Result<Vec<Plugin>> {
        guests::build(&self.root, &self.toolchain()?, &self.logs)
    }

    /// Builds the program `wccl` and returns where it is.
    fn build_wccl(&self) -> Result<PathBuf> {
        let mut cargo = self.cargo();
        // The whole workspace is selected, although one program is wanted: dependencies then get the features that the
        // tests give them, and the runtime, by far the longest part, is not compiled twice.
        cargo.args(["build", "--release", "--workspace", "--bin", "wccl"]);
        let notice = "building wccl; the first time takes minutes, most of them for the WebAssembly runtime";
        let log = self.logs.join(format!("wccl.{}.log", process::id()));
        match step::run(&mut cargo, notice, &log, BUILD_LIMIT) {
            Ok(()) => {}
            Err(Failure::Refused(_, tail)) => {
                bail!("wccl did not build. The end of what cargo said (all of it: {}):\n{tail}", log.display())
            }
            Err(failure) => bail!("wccl did not build: cargo {}", failure.reason()),
        }
        self.program("wccl")
    }

    /// Where a program is that cargo has built.
    fn program(&self, name: &str) -> Result<PathBuf> {
        // Our own place tells the target folder, whatever variable or file moved it: TARGET/PROFILE/xtask.
        let own = env::current_exe().context("The place of xtask itself is not known")?;
        let target = own.ancestors().nth(2).unwrap_or(&self.root);
        let program = target.join("release").join(name);
        if !program.exists() {
            bail!("Cargo built {name}, but {} does not exist; start this by `cargo xtask`.", program.display());
        }
        Ok(program)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_words(words: &[&str]) -> Result<u8> {
        run(&words.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn wrong_calls_are_usage_errors() {
        let calls: [&[&str]; 8] = [
            &["fuzz", "no-such-target"],
            &["fuzz", "--seconds", "0"],
            &["nonsense"],
            &["guests", "all"],
            &["setup", "--fast"],
            &["spec-coverage", "--all"],
            &["spec-coverage", "--require"],
            &["spec-coverage", "--require", "33"],
        ];
        for words in calls {
            let error = run_words(words).unwrap_err();
            assert!(error.is::<Usage>(), "{words:?}: {error:?}");
            assert!(error.to_string().ends_with("`cargo xtask help` explains."), "{error}");
        }
    }

    #[test]
    fn the_help_names_every_command() {
        for command in
            ["setup", "guests", "demo", "bench", "test", "soak", "isolation", "fuzz", "spec-coverage", "help"]
        {
            assert!(HELP.lines().any(|line| line.trim_start().starts_with(command)), "{command}");
        }
        assert!(HELP.contains(ROUTE_VARIABLE));
    }

    /// One failing binary must not hide the others.
    #[test]
    fn all_tests_run_even_if_some_fail() {
        let words = |rest: &[&str]| test_arguments(&rest.iter().map(OsString::from).collect::<Vec<_>>());
        let usual = ["test", "--release", "--workspace", "--no-fail-fast"];
        assert_eq!(words(&[]), usual);
        assert_eq!(words(&["--no-fail-fast"]), usual);
        let own = ["--lib", "--", "--no-fail-fast"];
        assert_eq!(words(&own), [&usual[..], &own].concat());
    }

    #[test]
    fn exit_codes_are_passed_on() {
        // Wait statuses as the kernel gives them: the code in the second byte, a signal in the first.
        assert_eq!(exit_code(ExitStatus::from_raw(0)), 0);
        assert_eq!(exit_code(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(exit_code(ExitStatus::from_raw(9)), 137);
    }
}
