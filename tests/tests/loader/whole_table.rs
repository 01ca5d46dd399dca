//! Runs every row of the table, and compares docs/loader-zoo.md with it.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use sandbox::entries::ORIGINALS;
use sandbox::status::Status;
use tests::zoo::{self, Plugin};
use wccl::error::{Error, PluginError};
use wccl::{CommOptions, Communicator, Runtime};

use crate::support::{Folder, assert_fits, config, fits, loaded, open};
use crate::table::{Case, Entry, File, Group, Outcome, Row, groups};

fn run(title: &str) {
    let all = groups();
    let group = all.into_iter().find(|g| g.title == title).expect("there is no such group");
    let mut wrong = String::new();
    for row in &group.rows {
        for case in &row.cases {
            let names: Vec<&str> = case.names.iter().map(|n| n.1.as_str()).collect();
            if let Err(why) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(row, case))) {
                let why = why.downcast_ref::<String>().cloned().or(why.downcast_ref::<&str>().map(|s| s.to_string()));
                writeln!(wrong, "* {} {names:?}: {}", row.what, why.unwrap_or_default()).unwrap();
            }
        }
    }
    assert!(wrong.is_empty(), "{title}:\n{wrong}");
}

fn check(row: &Row, case: &Case) {
    let folder = Folder::new();
    let path = folder.path("plugin.wasm");
    match (case.make)().unwrap() {
        File::Bytes(bytes) => std::fs::write(&path, bytes).unwrap(),
        File::Nothing => {}
        File::Folder => std::fs::create_dir(&path).unwrap(),
        File::Long(bytes) => std::fs::File::create(&path).unwrap().set_len(bytes).unwrap(),
    }
    let mut sentence = row.sentence.to_string();
    for (name, value) in &case.names {
        sentence = sentence.replace(&format!("{{{name}}}"), value);
    }
    let mut c = config(&path);
    if row.short {
        c.limits.call = Duration::from_millis(300);
    }
    match row.outcome {
        Outcome::Loads => {
            let rt = loaded(c);
            assert_eq!(rt.forward().sentinel(), None);
            assert_eq!(rt.forward().version_info().unwrap().compatibility, 89);
            assert!(rt.forward().guards().iter().all(|(_, s)| s.is_none()));
        }
        Outcome::Refused => is_refused(&Runtime::open(c).unwrap(), &path, &sentence),
        Outcome::Stops(entry) => stops(&loaded(c), entry, &sentence),
    }
}

/// A runtime without collectives, for its whole life; and the host none the worse for it.
fn is_refused(rt: &Runtime, path: &Path, sentence: &str) {
    let e = rt.load_error().expect("the plugin was not refused");
    assert_eq!(e.status, Status::FAILURE);
    assert_fits(sentence, &e.sentinel.replace(&path.display().to_string(), "PLUGIN"));
    // A good plugin at the same place changes nothing: there is one attempt.
    if path.is_dir() {
        std::fs::remove_dir(path).unwrap();
    }
    std::fs::write(path, Plugin::lone_rank().unwrap().build().unwrap()).unwrap();
    let calls = rt.component_calls();
    for _ in 0..2 {
        assert_eq!(rt.forward().slots(), [false; 37]);
        assert_eq!(rt.forward().sentinel().as_deref(), Some(e.sentinel.as_str()));
        let guards = rt.forward().guards();
        assert_eq!(guards.iter().map(|g| g.0).collect::<Vec<_>>(), ORIGINALS[1..]);
        assert!(guards.iter().all(|g| g.1 == Some(Status(1))), "{guards:?}");
        assert_eq!(rt.forward().version_info().unwrap_err().status(), Status::FAILURE);
        let err = rt.unique_id(1).unwrap_err();
        assert_eq!(err.status(), Status::FAILURE);
        assert!(matches!(err, Error::Plugin(PluginError::NotLoaded { entry: "neuronGetUniqueId", .. })), "{err}");
        let err = rt.init_comm(CommOptions::with_id([1; 128], 0, 1)).unwrap_err();
        assert!(matches!(err, Error::Plugin(PluginError::NotLoaded { .. })), "{err}");
    }
    assert_eq!(rt.component_calls(), calls, "a refused plugin was entered");
    // The same process, the next runtime: the file that is good now loads and works.
    let next = open(path);
    assert_eq!(next.load_error(), None);
    assert_eq!(next.unique_id(1).unwrap()[..28], [0; 28]);
}

fn reach(rt: &Runtime, entry: Entry) -> Result<Option<Communicator>, Error> {
    // An id serves once.
    static IDS: AtomicU8 = AtomicU8::new(0);
    let id = || zoo::unique_id(IDS.fetch_add(1, Ordering::Relaxed) % 250 + 1);
    match entry {
        Entry::UniqueId => rt.unique_id(1).map(|_| None),
        Entry::GlobalComm => rt.init_comm(CommOptions::with_root("127.0.0.1:1", 0, 1)).map(Some),
        Entry::Comm | Entry::Graph => rt.init_comm(CommOptions::with_id(id(), 0, 1)).map(Some),
    }
}

/// The entry stops the plugin's instance and nothing else.
fn stops(rt: &Runtime, entry: Entry, sentence: &str) {
    let err = reach(rt, entry).expect_err("the entry was survived");
    assert_fits(sentence, &err.to_string());
    assert_eq!(err.status(), Status::FAILURE);
    let Error::Plugin(PluginError::Stopped { entry: named, plugin, tenant, .. }) = &err else {
        panic!("not stopped: {err:?}")
    };
    assert_eq!((*named, plugin.as_str(), tenant.as_str()), (entry.original(), "plugin.wasm", "default"));
    assert_eq!(rt.tenant().counters.traps(), 1);
    assert_eq!(rt.tenant().communicators(), 0, "a host object outlived its instance");
    // The table stays: it is the instance that is gone, not the library.
    assert_eq!(rt.forward().slots(), [true; 37]);
    assert_eq!(rt.load_error(), None);
    if entry == Entry::UniqueId {
        let again = rt.unique_id(1).unwrap_err().to_string();
        assert!(fits("…it stopped a moment ago (…(in neuronGetUniqueId)) and runs again in …", &again), "{again}");
    } else {
        assert_eq!(rt.unique_id(1).unwrap()[..28], [0; 28]);
        assert_eq!(rt.forward().version_info().unwrap().compatibility, 89);
    }
    let other = if entry == Entry::UniqueId { Entry::Comm } else { entry };
    let mut comm = reach(rt, other).unwrap().unwrap();
    comm.barrier().unwrap();
    assert_eq!(comm.control_stopped(), None);
    assert_eq!(rt.tenant().counters.traps(), 1);
}

#[test]
fn files_that_are_no_plugins() {
    run("Files");
}

/// Proves INV-02.
#[test]
fn imports_come_from_what_this_host_serves_or_the_plugin_does_not_load() {
    run("What a plugin imports (NRT_2.0.0)");
}

#[test]
fn the_probe_and_its_number() {
    run("The probe and the number 89");
}

/// Proves INV-03, INV-06.
#[test]
fn one_entry_wrong_and_none_is_there() {
    run("The other 36 entries");
}

#[test]
fn what_runs_before_the_probe_is_limited_too() {
    run("What runs before the probe");
}

#[test]
fn a_plugin_that_misbehaves_after_the_load_stops_alone() {
    run("After the load");
}

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/loader-zoo.md");

fn document(groups: &[Group]) -> String {
    let mut out = String::from(
        "# The loader zoo\n\n\
         What becomes of a plugin, by what is wrong with it. The table is written from the data that the test binary `loader`\n\
         runs; a test compares the two. To write it anew:\n\n\
         ```\n\
         WCCL_WRITE_DOCS=1 cargo test --release --workspace --test loader the_document\n\
         ```\n\n\
         *refused*: the runtime opens without collectives. All 37 slots are empty, every wrapper answers NRT_FAILURE (1), and the\n\
         load is never tried again in this runtime; the next runtime in the process is not affected.\n\n\
         *stops*: the plugin loads; its instance ends in the named call. Other communicators, other tenants and data in flight\n\
         go on.\n\n\
         In a sentence PLUGIN stands for the file's path, a name in braces for what differs between the plugins of a row, and `…`\n\
         for anything. Tests run with the default limits, but for endless loops (300 ms of guest time).\n",
    );
    for group in groups {
        write!(out, "\n## {}\n\n| plugin | outcome | status | sentence |\n|---|---|---|---|\n", group.title).unwrap();
        for row in &group.rows {
            let many = if row.cases.len() > 1 { format!(" ({} plugins)", row.cases.len()) } else { String::new() };
            let (outcome, status) = match row.outcome {
                Outcome::Loads => ("loads", ""),
                Outcome::Refused => ("refused", "1"),
                Outcome::Stops(_) => ("stops", "1"),
            };
            let sentence = row.sentence.replace('|', "\\|");
            writeln!(out, "| {}{many} | {outcome} | {status} | {sentence} |", row.what).unwrap();
        }
    }
    out
}

#[test]
fn the_document_is_what_the_table_says() {
    let text = document(&groups());
    if std::env::var_os("WCCL_WRITE_DOCS").is_some() {
        std::fs::write(DOCUMENT, &text).unwrap();
    }
    let stands = std::fs::read_to_string(DOCUMENT).unwrap_or_default();
    assert!(
        stands == text,
        "docs/loader-zoo.md is not what the table says; see its first lines for how to write it anew"
    );
}
