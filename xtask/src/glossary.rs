//! Whether one noun names one thing: no two public types of the crates have one name, but for those that `docs/glossary.md` lists
//! with a reason.
//!
//! A type is public here if it is `pub` or `pub(crate)`. What is compiled for tests does not count, nor what a macro makes: the
//! bindings are generated from the contracts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use syn::visit::Visit;

use crate::rooms::{CRATES, files, for_tests, is_of_tests, module};

const PAGE: &str = "docs/glossary.md";
/// The page's section of names that more than one type has.
const TWICE: &str = "## One name, several types";

/// Names that are still to be given up, with how many types have each. The list only gets shorter.
const KNOWN: &[(&str, usize)] =
    &[("Answer", 2), ("Control", 2), ("Group", 2), ("Place", 2), ("Request", 3), ("Status", 2), ("Step", 2)];

/// Where each public type is declared, by its name.
type Declared = BTreeMap<String, Vec<String>>;

/// What the page says.
#[derive(Debug, Default)]
struct Page {
    /// The nouns that it explains.
    nouns: BTreeSet<String>,
    /// Names that several types may have.
    twice: BTreeSet<String>,
}

/// The faults are sentences.
///
/// # Errors
///
/// When a file cannot be read, or is no Rust; when the page is not as it should be.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let mut declared = Declared::new();
    for c in CRATES {
        declare(&root.join(c.source), c.name, &mut declared)?;
    }
    let page = root.join(PAGE);
    let text = fs::read_to_string(&page).with_context(|| format!("{} could not be read", page.display()))?;
    Ok(faults(&declared, &parse(&text)?, KNOWN))
}

fn faults(declared: &Declared, page: &Page, known: &[(&str, usize)]) -> Vec<String> {
    let mut faults = Vec::new();
    for (name, places) in declared.iter().filter(|(name, places)| places.len() > 1 && !page.twice.contains(*name)) {
        let expected = known.iter().find(|(known, _)| known == name).map(|(_, n)| *n);
        if expected != Some(places.len()) {
            faults.push(format!("{} public types are called {name}: {}", places.len(), places.join(", ")));
        }
    }
    let times = |name: &str| declared.get(name).map_or(0, Vec::len);
    for (name, _) in known.iter().filter(|(name, _)| times(name) < 2) {
        faults.push(format!("{name} is one type's name now: take it out of KNOWN in xtask/src/glossary.rs"));
    }
    for name in page.twice.iter().filter(|name| times(name) < 2) {
        faults.push(format!("{PAGE} allows {name} for several types, and there are {}", times(name)));
    }
    faults
}

/// Reads the rows of the page's tables: name or noun, and what is said of it.
fn parse(text: &str) -> Result<Page> {
    let mut page = Page::default();
    let mut in_twice = false;
    for line in text.lines() {
        if line.starts_with("## ") {
            in_twice = line == TWICE;
        }
        let Some(row) = line.strip_prefix("| ").and_then(|l| l.strip_suffix(" |")) else { continue };
        let Some((name, said)) = row.split_once(" | ") else { bail!("{PAGE}: not a row of two cells: {line}") };
        if ["noun", "name"].contains(&name) {
            continue;
        }
        if said.trim().is_empty() {
            bail!("{PAGE} says nothing of {name}");
        }
        let name = name.trim_matches('`').to_string();
        let list = if in_twice { &mut page.twice } else { &mut page.nouns };
        if !list.insert(name.clone()) {
            bail!("{PAGE} has {name} twice");
        }
    }
    Ok(page)
}

fn declare(source: &Path, krate: &str, declared: &mut Declared) -> Result<()> {
    let mut all = Vec::new();
    files(source, &mut all)?;
    all.sort();
    for path in all {
        if is_of_tests(&module(source, &path)) {
            continue;
        }
        let text = fs::read_to_string(&path).with_context(|| format!("{} could not be read", path.display()))?;
        let parsed = syn::parse_file(&text).with_context(|| format!("{} could not be parsed", path.display()))?;
        let mut types = Types::default();
        types.visit_file(&parsed);
        let file = path.strip_prefix(source).unwrap_or(&path).display().to_string();
        for name in types.names {
            declared.entry(name).or_default().push(format!("{krate}/{file}"));
        }
    }
    Ok(())
}

/// Finds the public types of a file.
#[derive(Default)]
struct Types {
    names: Vec<String>,
}

impl Types {
    fn note(&mut self, visibility: &syn::Visibility, attributes: &[syn::Attribute], name: &syn::Ident) {
        let public = match visibility {
            syn::Visibility::Public(_) => true,
            syn::Visibility::Restricted(r) => r.path.is_ident("crate"),
            syn::Visibility::Inherited => false,
        };
        if public && !for_tests(attributes) {
            self.names.push(name.to_string());
        }
    }
}

impl<'a> Visit<'a> for Types {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if !for_tests(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.note(&item.vis, &item.attrs, &item.ident);
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.note(&item.vis, &item.attrs, &item.ident);
    }

    fn visit_item_union(&mut self, item: &'a syn::ItemUnion) {
        self.note(&item.vis, &item.attrs, &item.ident);
    }

    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        self.note(&item.vis, &item.attrs, &item.ident);
    }

    fn visit_item_type(&mut self, item: &'a syn::ItemType) {
        self.note(&item.vis, &item.attrs, &item.ident);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::TestFolder;

    fn of_files(name: &str, all: &[(&str, &str)]) -> Declared {
        let folder = TestFolder::new(name);
        let mut declared = Declared::new();
        for (file, text) in all {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        for krate in ["one", "two"] {
            let source = folder.path().join(krate);
            if source.is_dir() {
                declare(&source, krate, &mut declared).unwrap();
            }
        }
        declared
    }

    #[test]
    fn a_name_that_two_public_types_have_is_found_wherever_they_are() {
        let kinds = [
            "pub struct Gate;",
            "pub(crate) enum Gate {}",
            "pub trait Gate {}",
            "pub type Gate = u8;",
            "pub mod m { pub struct Gate; }",
        ];
        for (i, other) in kinds.into_iter().enumerate() {
            for file in ["one/b.rs", "two/lib.rs"] {
                let all = [("one/a.rs", "pub struct Gate;"), (file, other)];
                let declared = of_files(&format!("glossary-{i}"), &all);
                let found = faults(&declared, &Page::default(), &[]);
                assert_eq!(found, [format!("2 public types are called Gate: one/a.rs, {file}")], "{other}");
                let page = parse(&format!("{TWICE}\n| `Gate` | both are one |\n")).unwrap();
                assert!(faults(&declared, &page, &[]).is_empty());
            }
        }
    }

    #[test]
    fn what_only_its_room_or_its_tests_see_is_nobody_elses_noun() {
        let rest = "struct Gate; pub(super) enum Gate {} #[cfg(test)] pub struct Gate; #[cfg(test)] mod tests { pub struct Gate; }";
        let all = [("one/a.rs", "pub struct Gate;"), ("one/b.rs", rest), ("one/b/tests.rs", "pub struct Gate;")];
        assert!(faults(&of_files("glossary-inner", &all), &Page::default(), &[]).is_empty());
    }

    #[test]
    fn the_lists_get_shorter_and_never_longer() {
        let twice = of_files("glossary-twice", &[("one/a.rs", "pub struct Gate;"), ("two/a.rs", "pub struct Gate;")]);
        let once = of_files("glossary-once", &[("one/a.rs", "pub struct Gate;")]);
        let none = Page::default();
        assert!(faults(&twice, &none, &[("Gate", 2)]).is_empty());
        assert_eq!(faults(&twice, &none, &[("Gate", 3)]).len(), 1);
        assert!(faults(&once, &none, &[("Gate", 2)])[0].contains("take it out of KNOWN"));
        let page = parse(&format!("{TWICE}\n| `Gate` | both are one |\n")).unwrap();
        assert!(faults(&once, &page, &[])[0].contains("allows Gate for several types, and there are 1"));
    }

    #[test]
    fn a_page_explains_each_noun_once() {
        let page = parse("| noun | meaning |\n|---|---|\n| rank | one of n |\n").unwrap();
        assert_eq!(page.nouns.into_iter().collect::<Vec<_>>(), ["rank"]);
        for (page, why) in [
            ("| rank | one |\n| rank | another |\n", "has rank twice"),
            ("| rank |\n", "not a row of two cells"),
            ("| rank |  |\n", "says nothing of rank"),
        ] {
            let e = parse(page).unwrap_err().to_string();
            assert!(e.contains(why), "{e}");
        }
    }
}
