//! Whether the layout is what it says: the folders of each crate form no circle, crates name only those that they may, and one
//! crate alone names the WebAssembly runtime.
//!
//! A *room* is a folder of a crate, or a file beside its `lib.rs` or `main.rs`. A room names another one by a path from the crate's
//! root, or by `super`; tests inside a file may name what they like. What a macro's arguments name counts too.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use syn::visit::Visit;

/// A crate: where it is, which crates of this workspace it may name.
pub(crate) struct Crate {
    pub(crate) name: &'static str,
    pub(crate) source: &'static str,
    may: &'static [&'static str],
}

const fn of(name: &'static str, source: &'static str, may: &'static [&'static str]) -> Crate {
    Crate { name, source, may }
}

/// From the ground up. Tests, fuzzing and this crate are no part of the product, and may name all of it.
pub(crate) const CRATES: &[Crate] = &[
    of("hw_bridge", "hw-bridge/src", &[]),
    of("enc", "host-runtime/enc/src", &["hw_bridge"]),
    of("sandbox", "host-runtime/sandbox/src", &["hw_bridge"]),
    of("wccl", "host-runtime/wccl/src", &["enc", "sandbox", "hw_bridge"]),
    of("wccl_cli", "cli/src", &["wccl", "enc", "sandbox", "hw_bridge"]),
    of("nccom_core", "plugins/nccom-core/src", &[]),
];

/// The WebAssembly runtime, and the one crate that names it.
const ENGINE: (&[&str], &str) = (&["wasmtime", "wasmtime_wasi"], "sandbox");

/// What a crate's files name.
#[derive(Debug, Default)]
struct Named {
    /// Room to room: a file that does, and what it names.
    rooms: BTreeMap<(String, String), (String, String)>,
    /// Other crates, each with a file.
    crates: BTreeMap<String, String>,
    lines: BTreeMap<String, usize>,
}

/// Prints the map of all crates; the faults are sentences.
///
/// # Errors
///
/// When a file cannot be read, or is no Rust.
pub fn check(root: &Path) -> Result<(String, Vec<String>)> {
    let (mut map, mut faults) = (String::new(), Vec::new());
    for c in CRATES {
        let named = names(&root.join(c.source), c.name)?;
        write!(map, "{} ({})", c.name, c.source)?;
        let own = CRATES.iter().filter(|o| named.crates.contains_key(o.name) && o.name != c.name);
        let below: Vec<&str> = own.map(|o| o.name).collect();
        writeln!(map, "{}{}", if below.is_empty() { "" } else { " over " }, below.join(", "))?;
        for other in &below {
            if !c.may.contains(other) {
                faults.push(format!("{} names {other}, in {}", c.name, named.crates[*other]));
            }
        }
        for engine in ENGINE.0 {
            if let Some(file) = named.crates.get(*engine).filter(|_| c.name != ENGINE.1) {
                faults.push(format!("{} names {engine}, in {file}; only {} does", c.name, ENGINE.1));
            }
        }
        let circles = circles(&named);
        for (room, lines) in &named.lines {
            let below: Vec<&str> =
                named.rooms.keys().filter(|(from, _)| from == room).map(|(_, to)| to.as_str()).collect();
            writeln!(map, "  {room:<14} {lines:>6} lines  {}", below.join(" "))?;
        }
        for circle in circles {
            let mut text = format!("a circle in {}: {}", c.name, circle.iter().cloned().collect::<Vec<_>>().join(", "));
            for ((from, to), (file, what)) in &named.rooms {
                if circle.contains(from) && circle.contains(to) {
                    write!(text, "\n    {from} -> {to}: {file} names {what}")?;
                }
            }
            faults.push(text);
        }
    }
    Ok((map, faults))
}

/// Rooms that reach one another, as far as they do.
fn circles(named: &Named) -> Vec<BTreeSet<String>> {
    let reach = |from: &str| {
        let mut seen: BTreeSet<String> = BTreeSet::new();
        let mut todo = vec![from.to_string()];
        while let Some(at) = todo.pop() {
            for (_, to) in named.rooms.keys().filter(|(f, _)| *f == at) {
                if seen.insert(to.clone()) {
                    todo.push(to.clone());
                }
            }
        }
        seen
    };
    let all: BTreeMap<&String, BTreeSet<String>> = named.lines.keys().map(|r| (r, reach(r))).collect();
    let with = |r: &String| {
        let back = |o: &&String| all.get(o).is_some_and(|reached| reached.contains(r));
        all[r].iter().filter(back).cloned().collect::<BTreeSet<String>>()
    };
    let found: BTreeSet<BTreeSet<String>> = all.keys().map(|r| with(r)).filter(|c| c.len() > 1).collect();
    found.into_iter().collect()
}

/// The Rust files below a folder.
pub(crate) fn files(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("{} could not be read", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files(&path, found)?;
        } else if path.extension().is_some_and(|x| x == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

/// The module that a file of a crate is.
pub(crate) fn module(source: &Path, path: &Path) -> Vec<String> {
    let relative = path.strip_prefix(source).unwrap_or(path).with_extension("");
    let mut parts: Vec<String> = relative.iter().map(|p| p.to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        parts.pop();
    }
    parts
}

/// Whether the module is a file of tests.
pub(crate) fn is_of_tests(module: &[String]) -> bool {
    module.last().is_some_and(|last| last.ends_with("tests") || last == "proofs" || last == "fuzzing")
}

fn names(source: &Path, krate: &str) -> Result<Named> {
    let mut all = Vec::new();
    files(source, &mut all)?;
    all.sort();
    if all.is_empty() {
        bail!("{} has no Rust files", source.display());
    }
    let mut named = Named::default();
    let rooms: BTreeSet<String> = all.iter().filter_map(|p| module(source, p).first().cloned()).collect();
    for path in &all {
        let text = fs::read_to_string(path).with_context(|| format!("{} could not be read", path.display()))?;
        let parsed = syn::parse_file(&text).with_context(|| format!("{} could not be parsed", path.display()))?;
        let module = module(source, path);
        // A file of tests of its own names what it likes, as those inside others do.
        if is_of_tests(&module) {
            continue;
        }
        let room = module.first().cloned();
        if let Some(room) = &room {
            *named.lines.entry(room.clone()).or_default() += text.lines().count();
        }
        let mut finder = Finder { module, paths: BTreeSet::new() };
        finder.visit_file(&parsed);
        let file = path.strip_prefix(source).unwrap_or(path).display().to_string();
        for found in finder.paths {
            let Some(first) = found.first() else { continue };
            if first != "crate" {
                if first != krate {
                    named.crates.entry(first.clone()).or_insert_with(|| file.clone());
                }
                continue;
            }
            let (Some(room), Some(to)) = (&room, found.get(1)) else { continue };
            if rooms.contains(to) && to != room {
                let key = (room.clone(), to.clone());
                named.rooms.entry(key).or_insert_with(|| (file.clone(), found[1..].join("::")));
            }
        }
    }
    Ok(named)
}

/// Finds the paths that a file names, each from the crate's root or from another crate's name.
struct Finder {
    module: Vec<String>,
    paths: BTreeSet<Vec<String>>,
}

impl Finder {
    fn note(&mut self, path: &[String]) {
        let mut at = self.module.clone();
        let mut rest = path;
        match path.first().map(String::as_str) {
            Some("crate") => (at, rest) = (Vec::new(), &path[1..]),
            Some("self" | "super") => {
                while let Some(word @ ("self" | "super")) = rest.first().map(String::as_str) {
                    if word == "super" {
                        at.pop();
                    }
                    rest = &rest[1..];
                }
            }
            // Another crate's, a child's, or something that was imported: of those only crates are looked for.
            _ => {
                self.paths.insert(path.to_vec());
                return;
            }
        }
        let whole = ["crate".to_string()].into_iter().chain(at).chain(rest.iter().cloned()).collect();
        self.paths.insert(whole);
    }

    /// Not every macro's arguments are Rust, nor an attribute's: words that are joined by `::` are paths all the same.
    fn tokens(&mut self, text: &str) {
        let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let text = text.replace(" :: ", "::");
        for word in text.split(|c| !is_word(c)).filter(|w| w.contains("::") && !w.starts_with(':')) {
            let words: Vec<String> = word.split("::").filter(|w| !w.is_empty()).map(str::to_string).collect();
            self.note(&words);
        }
    }

    fn tree(&mut self, tree: &syn::UseTree, before: &[String]) {
        let with = |name: String| before.iter().cloned().chain([name]).collect::<Vec<_>>();
        match tree {
            syn::UseTree::Path(p) => self.tree(&p.tree, &with(p.ident.to_string())),
            syn::UseTree::Name(n) => self.note(&with(n.ident.to_string())),
            syn::UseTree::Rename(r) => self.note(&with(r.ident.to_string())),
            syn::UseTree::Glob(_) => self.note(before),
            syn::UseTree::Group(g) => g.items.iter().for_each(|t| self.tree(t, before)),
        }
    }
}

/// Whether an item is compiled for tests only.
pub(crate) fn for_tests(attributes: &[syn::Attribute]) -> bool {
    let is_test = |a: &syn::Attribute| match &a.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let text = list.tokens.to_string();
            text == "test" || text.starts_with("all (test") || text.starts_with("all(test")
        }
        _ => false,
    };
    attributes.iter().any(is_test)
}

impl<'a> Visit<'a> for Finder {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if for_tests(&item.attrs) {
            return;
        }
        self.module.push(item.ident.to_string());
        syn::visit::visit_item_mod(self, item);
        self.module.pop();
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        if !for_tests(&item.attrs) {
            syn::visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        if !for_tests(&item.attrs) {
            syn::visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        if !for_tests(&item.attrs) {
            syn::visit::visit_item_impl(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        if !for_tests(&item.attrs) {
            self.tree(&item.tree, &[]);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let words: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        if words.len() > 1 {
            self.note(&words);
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, m: &'a syn::Macro) {
        self.tokens(&m.tokens.to_string());
        syn::visit::visit_macro(self, m);
    }

    fn visit_attribute(&mut self, a: &'a syn::Attribute) {
        if let syn::Meta::List(list) = &a.meta {
            self.tokens(&list.tokens.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::TestFolder;

    /// A crate of these files.
    fn of_files(name: &str, all: &[(&str, &str)]) -> Named {
        let folder = TestFolder::new(name);
        for (file, text) in all {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        names(folder.path(), "house").unwrap()
    }

    #[test]
    fn a_circle_of_rooms_is_found_however_it_is_named() {
        let ground = ("lib.rs", "mod a; mod b; mod c;");
        let b = ("b/mod.rs", "mod deep;");
        let back = [
            "use crate::{a::{self, x}, c};",
            "use super::super::a::x;",
            "fn f() { crate::a::x(); }",
            "fn f() { println!(\"{}\", crate::a::x()); }",
            "mod inner { use super::super::super::a; }",
            "struct S { #[arg(value_parser = crate::a::x)] s: u8 }",
        ];
        for (i, text) in back.into_iter().enumerate() {
            let files = [ground, b, ("a.rs", "use crate::b::deep;"), ("b/deep.rs", text), ("c.rs", "")];
            let named = of_files(&format!("rooms-{i}"), &files);
            let circle = BTreeSet::from(["a".to_string(), "b".to_string()]);
            assert_eq!(circles(&named), [circle], "{text}: {named:?}");
        }
    }

    #[test]
    fn tests_name_what_they_like_and_arrows_one_way_are_no_circle() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b::x; use wasmtime::Engine;"),
            ("b.rs", "#[cfg(test)] mod tests { use crate::a::x; } #[cfg(test)] fn f() { crate::a::x() }"),
        ];
        let named = of_files("rooms-tests", &files);
        assert!(circles(&named).is_empty(), "{named:?}");
        assert_eq!(named.rooms.len(), 1);
        assert_eq!(named.crates["wasmtime"], "a.rs");
    }
}
