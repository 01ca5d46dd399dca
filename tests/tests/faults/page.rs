//! docs/faults.md names a test for each row, and docs/threat-model.md for each of its claims; each must exist.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for e in std::fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())).flatten() {
        let path = e.path();
        if path.is_dir() {
            if path.file_name().is_some_and(|n| n != "target") {
                sources(&path, found);
            }
        } else if path.extension().is_some_and(|x| x == "rs") {
            found.push(path);
        }
    }
}

/// Functions with `#[test]` under the workspace.
fn tests() -> HashSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    for part in ["tests", "cli", "host-runtime", "hw-bridge", "plugins"] {
        sources(&root.join(part), &mut files);
    }
    let mut names = HashSet::new();
    for f in files {
        let text = std::fs::read_to_string(&f).unwrap();
        let mut marked = false;
        for line in text.lines().map(str::trim) {
            if line == "#[test]" {
                marked = true;
            } else if marked && let Some(rest) = line.strip_prefix("fn ") {
                names.insert(rest.split('(').next().unwrap().to_string());
                marked = false;
            }
        }
    }
    names
}

/// Looks at the rows of a page, or of what follows `after` in it: how many there are, each of which names tests that exist.
fn rows(page: &str, after: &str, headings: &[&str]) -> usize {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("docs").join(page);
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split_once(after).unwrap_or_else(|| panic!("`{after}` is not in {page}")).1;
    let known = tests();
    let mut rows = 0;
    let is_row = |l: &&str| l.starts_with("| ") && !headings.iter().any(|h| l.starts_with(&format!("| {h}")));
    for row in text.lines().filter(is_row) {
        let last = row.trim_end_matches('|').rsplit('|').next().unwrap();
        let named: Vec<&str> = last.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "no test is named in: {row}");
        for name in named {
            assert!(known.contains(name), "there is no test `{name}`, named in: {row}");
        }
        rows += 1;
    }
    rows
}

#[test]
fn every_test_named_in_the_page_exists() {
    let rows = rows("faults.md", "", &["symptom", "text"]);
    assert!(rows > 30, "only {rows} rows were found");
}

#[test]
fn every_test_named_in_the_threat_model_exists() {
    let rows = rows("threat-model.md", "\n## What shows it\n", &["claim |"]);
    assert!(rows > 25, "only {rows} rows were found");
}
