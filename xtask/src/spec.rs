//! Which invariants of the specification have a test that claims to prove them.
//!
//! A claim is a doc line of exactly the form `/// Proves INV-40, INV-41.`, directly above a `#[test]` (further
//! attributes may stand between the line and the function). What looks like a claim and is none is reported: a claim
//! that does not count is worse than none.
//!
//! The scan is by line. It does not know which files are compiled, nor whether a test really proves what it says.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The table of invariants.
const TABLE: &str = include_str!("../invariants.txt");
const MARK: &str = "/// Proves ";

/// One invariant of the specification.
#[derive(Debug, PartialEq, Eq)]
pub struct Invariant {
    /// Its number.
    pub number: u16,
    /// What it asks, in a few words.
    pub text: String,
}

/// A test that claims to prove some invariants.
#[derive(Debug, PartialEq, Eq)]
pub struct Claim {
    /// The invariants' numbers.
    pub numbers: Vec<u16>,
    /// The test function.
    pub function: String,
}

/// What the scan of the workspace found.
#[derive(Debug, Default)]
pub struct Coverage {
    /// For each invariant that is claimed, its tests as `file:function`.
    tests: BTreeMap<u16, Vec<String>>,
    /// How many tests carry a claim that counts.
    tests_with_claims: usize,
    /// Claims that do not count, as `file:line: why`.
    pub complaints: Vec<String>,
}

/// The invariants of the specification, in its order.
///
/// # Errors
///
/// When the table has a line that is none.
pub fn invariants() -> Result<Vec<Invariant>> {
    parse_table(TABLE)
}

fn parse_table(table: &str) -> Result<Vec<Invariant>> {
    let mut list: Vec<Invariant> = Vec::new();
    for line in table.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (name, text) = line.split_once(' ').unwrap_or((line, ""));
        let number = parse_name(name);
        match number {
            Some(number) if !text.is_empty() && list.last().is_none_or(|last| last.number < number) => {
                list.push(Invariant { number, text: text.to_owned() });
            }
            _ => bail!("xtask/invariants.txt: \"{line}\" is not \"INV-nn text\" with a number above the one before."),
        }
    }
    Ok(list)
}

/// Reads `INV-07` or `INV-107`, as the specification writes them.
fn parse_name(name: &str) -> Option<u16> {
    let number = name.strip_prefix("INV-")?.parse().ok()?;
    (name_of(number) == name).then_some(number)
}

fn name_of(number: u16) -> String {
    format!("INV-{number:02}")
}

/// Reads the numbers of a claim line, without its indentation.
fn parse_claim(line: &str) -> Option<Vec<u16>> {
    line.strip_prefix(MARK)?.strip_suffix('.')?.split(", ").map(parse_name).collect()
}

/// Whether a comment line seems to mean a claim.
fn seems_a_claim(line: &str) -> bool {
    let text = line.trim_start_matches(['/', '!', '*']).trim_start();
    text.len() < line.len() && text.to_ascii_lowercase().starts_with("proves") && text.contains("INV-")
}

/// What the lines between a claim and its function have shown so far.
#[derive(Default)]
struct Open {
    line: usize,
    numbers: Vec<u16>,
    is_test: bool,
    is_ignored: bool,
    /// Brackets of an attribute that goes on over the line's end.
    depth: usize,
}

/// The claims of one source text, and its complaints as (line, why).
fn scan(source: &str) -> (Vec<Claim>, Vec<(usize, String)>) {
    let mut claims = Vec::new();
    let mut complaints = Vec::new();
    let mut open: Option<Open> = None;
    for (line, text) in (1..).zip(source.lines().map(str::trim)) {
        if seems_a_claim(text) {
            let Some(numbers) = parse_claim(text) else {
                complaints.push((line, format!("it is not of the form `{MARK}INV-40, INV-41.`")));
                continue;
            };
            let open = open.get_or_insert_with(|| Open { line, ..Open::default() });
            open.numbers.extend(numbers);
            continue;
        }
        let Some(mut current) = open.take() else {
            continue;
        };
        let rest = skip_attributes(text, &mut current);
        if rest.is_empty() && !text.is_empty() {
            open = Some(current);
            continue;
        }
        let line = current.line;
        match function_name(rest) {
            None => complaints.push((line, "it stands above something that is neither an attribute nor a test".into())),
            Some(name) if !current.is_test => complaints.push((line, format!("{name} has no #[test] below the claim"))),
            Some(name) if current.is_ignored => {
                complaints.push((line, format!("{name} is ignored, so it proves nothing")))
            }
            Some(name) => claims.push(Claim { numbers: current.numbers, function: name.to_owned() }),
        }
    }
    if let Some(Open { line, .. }) = open {
        complaints.push((line, "nothing follows it".into()));
    }
    (claims, complaints)
}

/// Notes the attributes at the start of `text` in `open` and returns what follows them.
fn skip_attributes<'a>(text: &'a str, open: &mut Open) -> &'a str {
    let mut rest = text;
    loop {
        if open.depth == 0 {
            if !rest.starts_with("#[") {
                return rest;
            }
            open.is_test |= rest.starts_with("#[test]");
            open.is_ignored |= rest.starts_with("#[ignore");
        }
        let mut end = rest.len();
        for (at, c) in rest.char_indices() {
            match c {
                '[' => open.depth += 1,
                ']' => open.depth = open.depth.saturating_sub(1),
                _ => continue,
            }
            if open.depth == 0 {
                end = at + 1;
                break;
            }
        }
        rest = rest[end..].trim_start();
        if open.depth > 0 {
            return rest;
        }
    }
}

/// The name in a line that begins a function.
fn function_name(text: &str) -> Option<&str> {
    let mut words = text.split_whitespace();
    words.find(|word| !matches!(*word, "pub" | "pub(crate)" | "async" | "unsafe")).filter(|word| *word == "fn")?;
    let name = words.next()?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    (end > 0).then(|| &name[..end])
}

/// Scans all Rust sources of the workspace at `root`.
///
/// # Errors
///
/// When a folder or file cannot be read.
pub fn coverage(root: &Path, invariants: &[Invariant]) -> Result<Coverage> {
    let mut files = Vec::new();
    find_sources(root, root, &mut files).with_context(|| format!("{} could not be searched", root.display()))?;
    files.sort();
    let mut coverage = Coverage::default();
    for file in files {
        let source = fs::read(root.join(&file)).with_context(|| format!("{} could not be read", file.display()))?;
        coverage.add(&file.display().to_string(), &String::from_utf8_lossy(&source), invariants);
    }
    Ok(coverage)
}

/// Collects the paths, relative to `root`, of all Rust sources below `folder`. Build output and hidden folders hold
/// none of ours; the examples in this crate's own tests are no claims.
fn find_sources(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            let ours = folder == root && (name == "target" || name == "xtask");
            if !ours && !name.to_string_lossy().starts_with('.') {
                find_sources(root, &path, files)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path.strip_prefix(root).unwrap_or(&path).to_owned());
        }
    }
    Ok(())
}

impl Coverage {
    fn add(&mut self, file: &str, source: &str, invariants: &[Invariant]) {
        let (claims, complaints) = scan(source);
        self.complaints.extend(complaints.into_iter().map(|(line, why)| format!("{file}:{line}: {why}")));
        for claim in claims {
            let test = format!("{file}:{}", claim.function);
            self.tests_with_claims += 1;
            for number in claim.numbers {
                if !invariants.iter().any(|invariant| invariant.number == number) {
                    self.complaints.push(format!("{test}: {} is not in the specification", name_of(number)));
                    continue;
                }
                let tests = self.tests.entry(number).or_default();
                if !tests.contains(&test) {
                    tests.push(test.clone());
                }
            }
        }
    }

    /// Whether some test claims to prove this invariant.
    pub fn has(&self, number: u16) -> bool {
        self.tests.contains_key(&number)
    }

    /// The table: each invariant, or each that no test proves, with its tests; then the totals.
    pub fn table(&self, invariants: &[Invariant], missing_only: bool) -> String {
        let width = invariants.iter().map(|invariant| invariant.text.chars().count()).max().unwrap_or(0);
        let mut out = String::new();
        for Invariant { number, text } in invariants {
            let tests = self.tests.get(number).map_or(&[][..], Vec::as_slice);
            if missing_only && !tests.is_empty() {
                continue;
            }
            let first = tests.first().map_or("none", String::as_str);
            // Writing to a String cannot fail.
            let _ = writeln!(out, "{:<7}  {text:width$}  {first}", name_of(*number));
            for test in tests.iter().skip(1) {
                let _ = writeln!(out, "{:<7}  {:width$}  {test}", "", "");
            }
        }
        let proven = invariants.iter().filter(|invariant| self.has(invariant.number)).count();
        let _ = writeln!(
            out,
            "{proven} of {} invariants are claimed by a test, {} by none. Tests with a claim: {}.",
            invariants.len(),
            invariants.len() - proven,
            self.tests_with_claims
        );
        out
    }
}

/// Reads `1-27,32,40-45`: the invariants of the specification that it names. A range may span numbers that do not
/// exist.
///
/// # Errors
///
/// A sentence when it is not such a list, or names a single number or a whole range that does not exist.
pub fn parse_required(list: &str, invariants: &[Invariant]) -> Result<Vec<u16>> {
    let mut required = Vec::new();
    for part in list.split(',') {
        let part = part.trim();
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else {
            bail!("--require: \"{part}\" is neither a number nor a range; write a list such as 1-27,32,40-45.");
        };
        let before = required.len();
        required.extend(invariants.iter().map(|invariant| invariant.number).filter(|n| (first..=last).contains(n)));
        if required.len() == before {
            bail!("--require: the specification has no invariant {part}; `cargo xtask spec-coverage` lists them all.");
        }
    }
    required.sort_unstable();
    required.dedup();
    Ok(required)
}

/// Names of invariants as one line.
pub fn names(numbers: &[u16]) -> String {
    numbers.iter().map(|number| name_of(*number)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::TestFolder;

    fn claim(numbers: &[u16], function: &str) -> Claim {
        Claim { numbers: numbers.to_vec(), function: function.to_owned() }
    }

    #[test]
    fn the_table_is_the_specifications() {
        let numbers: Vec<u16> = invariants().unwrap().iter().map(|invariant| invariant.number).collect();
        let ranges = [1..=32, 40..=55, 60..=74, 80..=87, 90..=134];
        assert_eq!(numbers, ranges.into_iter().flatten().collect::<Vec<u16>>());
    }

    #[test]
    fn a_table_with_a_bad_line_is_refused() {
        assert_eq!(parse_table("# a\nINV-01 one\n\nINV-103 two\n").unwrap().len(), 2);
        for bad in ["INV-01", "INV-1 one", "INV-01 ", "one", "INV-02 b\nINV-01 a", "INV-02 b\nINV-02 b"] {
            assert!(parse_table(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn claims_are_found() {
        let source = r#"
            /// What the test is about.
            /// Proves INV-40, INV-107.
            #[test]
            fn one() {}

            /// Proves INV-01.
            /// Proves INV-02.
            #[cfg(any(
                unix, // a list [of sorts]
                windows,
            ))]
            #[test]
            #[should_panic(expected = "x")]
            pub async fn two<T>() {}

            /// Proves INV-03.
            #[test] fn three() {}
        "#;
        let (claims, complaints) = scan(source);
        assert_eq!(claims, [claim(&[40, 107], "one"), claim(&[1, 2], "two"), claim(&[3], "three")]);
        assert_eq!(complaints, []);
    }

    #[test]
    fn what_only_looks_like_a_claim_is_reported() {
        let cases = [
            ("/// Proves INV-40\n#[test]\nfn f() {}", "form"),
            ("/// Proves INV-40 and INV-41.\n#[test]\nfn f() {}", "form"),
            ("/// Proves INV-1.\n#[test]\nfn f() {}", "form"),
            ("// Proves INV-40.\n#[test]\nfn f() {}", "form"),
            ("//! proves: INV-40.\n#[test]\nfn f() {}", "form"),
            ("/// Proves INV-40.\nfn f() {}", "no #[test]"),
            ("#[test]\n/// Proves INV-40.\nfn f() {}", "no #[test]"),
            ("/// Proves INV-40.\n#[test]\n#[ignore = \"slow\"]\nfn f() {}", "ignored"),
            ("/// Proves INV-40.\n\n#[test]\nfn f() {}", "neither"),
            ("/// Proves INV-40.\n/// More.\n#[test]\nfn f() {}", "neither"),
            ("/// Proves INV-40.\n#[test]\nconst X: u8 = 1;", "neither"),
            ("/// Proves INV-40.\n#[test]", "nothing"),
        ];
        for (source, why) in cases {
            let (claims, complaints) = scan(source);
            assert_eq!(claims, [], "{source}");
            assert!(complaints.len() == 1 && complaints[0].1.contains(why), "{source}: {complaints:?}");
        }
    }

    #[test]
    fn prose_about_invariants_is_no_claim() {
        let source = "/// INV-40 proves nothing here.\nlet s = \"Proves INV-40.\"; // This proves INV-41.\n";
        let (claims, complaints) = scan(source);
        assert_eq!((claims.len(), complaints.len()), (0, 0));
    }

    #[test]
    fn the_workspace_is_scanned_but_for_output_and_this_crate() {
        let folder = TestFolder::new("spec-scan");
        let claim = "/// Proves INV-05, INV-33.\n#[test]\nfn loads_once() {}\n";
        for place in ["a/src", "b/tests/deep/xtask", "target/x", "xtask/src", ".hidden"] {
            fs::create_dir_all(folder.path().join(place)).unwrap();
            fs::write(folder.path().join(place).join("t.rs"), claim).unwrap();
        }
        fs::write(folder.path().join("a/src/notes.txt"), claim).unwrap();
        let invariants = invariants().unwrap();
        let coverage = coverage(folder.path(), &invariants).unwrap();
        assert_eq!(coverage.tests[&5], ["a/src/t.rs:loads_once", "b/tests/deep/xtask/t.rs:loads_once"]);
        assert_eq!(coverage.tests.len(), 1);
        assert_eq!(coverage.complaints.len(), 2, "INV-33 does not exist: {:?}", coverage.complaints);
    }

    #[test]
    fn the_table_shows_tests_gaps_and_totals() {
        let invariants = parse_table("INV-01 first\nINV-02 second one\n").unwrap();
        let mut coverage = Coverage::default();
        let source = "/// Proves INV-01.\n#[test]\nfn f() {}\n/// Proves INV-01.\n#[test]\nfn g() {}\n";
        coverage.add("a.rs", source, &invariants);
        assert_eq!(
            coverage.table(&invariants, false),
            "INV-01   first       a.rs:f\n                     a.rs:g\nINV-02   second one  none\n\
             1 of 2 invariants are claimed by a test, 1 by none. Tests with a claim: 2.\n"
        );
        let missing = coverage.table(&invariants, true);
        assert!(missing.starts_with("INV-02 ") && !missing.contains("a.rs"), "{missing}");
    }

    #[test]
    fn required_lists_are_read() {
        let invariants = invariants().unwrap();
        assert_eq!(parse_required("31-41, 107,40", &invariants).unwrap(), [31, 32, 40, 41, 107]);
        for bad in ["", "33", "33-39", "a", "1-", "5-4", "-3", "1,,2", "INV-01"] {
            assert!(parse_required(bad, &invariants).is_err(), "{bad:?}");
        }
    }
}
