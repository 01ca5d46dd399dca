//! What a user types, sets or keeps in files.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use hw_bridge::model::DeviceModel;
use sandbox::policy::Policy;
use wccl::RuntimeConfig;

use wccl_cli::page::plot;
use wccl_cli::rank::collective;
use wccl_cli::size;

/// Lines `NAME=value`. Names of files are left out: what is in them has targets of its own.
pub fn environment(data: &[u8]) {
    let line = |line: &[u8]| {
        let equals = line.iter().position(|b| *b == b'=')?;
        Some((line[..equals].to_vec(), OsString::from_vec(line[equals + 1..].to_vec())))
    };
    let vars: BTreeMap<Vec<u8>, OsString> = data.split(|b| *b == b'\n').filter_map(line).collect();
    let look_up =
        |name: &str| vars.get(name.as_bytes()).filter(|_| !["WCCL_TUNE_FILE", "WCCL_POLICY"].contains(&name)).cloned();
    match RuntimeConfig::from_vars(look_up) {
        Ok(config) => {
            if let Err(e) = DeviceModel::new(config.device) {
                assert!(!e.to_string().is_empty());
            }
        }
        Err(e) => assert!(!e.to_string().is_empty()),
    }
}

/// A policy: what is read is said, and its addresses are read back as they are printed.
pub fn policy(data: &[u8]) {
    match Policy::parse(Path::new("policy.toml"), &String::from_utf8_lossy(data)) {
        Ok(p) => {
            assert!(p.to_string().starts_with(&format!("tenant {}\n", p.tenant)) && p.tenant_id() > 0);
            for reach in p.network.listen.iter().chain(&p.network.reach) {
                assert_eq!(reach.to_string().parse(), Ok(*reach));
            }
            for reach in &p.network.listen {
                assert!(p.network.may_listen(reach.net.addr(), reach.ports.1));
            }
        }
        Err(e) => assert!(e.to_string().starts_with("the policy policy.toml, line "), "{e}"),
    }
}

/// Words of the command line: sizes, a sweep over them, a collective.
pub fn sizes(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let words: Vec<&str> = text.lines().collect();
    let read: Vec<u64> = words.iter().filter_map(|w| size::parse(w).ok()).collect();
    for n in &read {
        assert_eq!(size::parse(&size::short(*n)), Ok(*n));
    }
    for word in &words {
        if let Ok(op) = collective::parse(word) {
            assert_eq!(collective::parse(op.name()), Ok(op));
        }
    }
    if let [min, max, by, ..] = read[..] {
        for (factor, step) in [(Some(by), None), (None, Some(by)), (None, None)] {
            if let Ok(all) = size::sweep(min, max, factor, step) {
                assert!(all[0] == min && all.iter().all(|s| (min..=max).contains(s)) && all.is_sorted());
            }
        }
    }
}

/// A file of other libraries' results, up to the page.
pub fn results(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut others = plot::Others::default();
    for ranks in [2, 4] {
        if let Err(e) = others.add(&text, "<file>", ranks) {
            assert!(!e.to_string().is_empty());
        }
    }
    let ops = hw_bridge::call::Op::ALL;
    let measured = ops.into_iter().map(|op| (op, vec![(8, 0.5), (1 << 20, 4.0)])).collect();
    let page = plot::page("title", "about", &plot::panels("wccl", measured, &others));
    // What comes from the file is text on the page: it opens no element of its own.
    assert_eq!(page.matches("<script").count(), plot::page("t", "a", &[]).matches("<script").count());
    assert!(!page.contains("NaN") && !page.contains("inf\""), "a coordinate is no number");
}
