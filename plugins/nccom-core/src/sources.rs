//! Which sources a build was made from: the library's half of the tag that the ranks of a global group compare (INV-32).
//!
//! The original takes the commit; a build need not be of one here, so it is a digest of the sources themselves: of this crate
//! and the contracts, found by the build script, and of the release on top. Two builds of the same sources have the same,
//! wherever they were made.

use crate::Release;

/// Of this crate and the contracts.
const CORE: &str = env!("NCCOM_SOURCES");

/// The tag of a release.
pub(crate) const fn tag<R: Release>() -> [u8; 8] {
    of(CORE, R::SOURCE)
}

/// FNV-1a of both, one behind the other.
const fn of(core: &str, release: &str) -> [u8; 8] {
    const fn fold(mut digest: u64, bytes: &[u8]) -> u64 {
        let mut i = 0;
        while i < bytes.len() {
            digest = (digest ^ bytes[i] as u64).wrapping_mul(0x100_0000_01B3);
            i += 1;
        }
        digest
    }
    fold(fold(0xCBF2_9CE4_8422_2325, core.as_bytes()), release.as_bytes()).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    mod digest {
        include!("../digest.rs");
    }

    /// A tree of sources that goes with the test.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Tree {
            let tree = Tree(std::env::temp_dir().join(format!("nccom-sources-{name}-{}", std::process::id())));
            for (path, content) in files {
                let path = tree.0.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
            tree
        }

        fn digest(&self) -> u64 {
            digest::digest(&[&self.0]).unwrap()
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            // A leftover in the temporary folder is harmless.
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// One source has one digest wherever it lies and in whatever order its files were made; any other source has another.
    ///
    /// Proves INV-32.
    #[test]
    fn the_tag_is_that_of_the_sources() {
        let files = [("lib.rs", "mod a;"), ("a/mod.rs", "fn f() {}"), ("a/b.rs", "")];
        let one = Tree::new("one", &files);
        let twice = Tree::new("twice", &[files[2], files[1], files[0]]);
        assert_eq!(one.digest(), twice.digest());
        for (i, other) in [
            [("lib.rs", "mod a;"), ("a/mod.rs", "fn f() { }"), ("a/b.rs", "")],
            [("lib.rs", "mod a;"), ("a/mod.rs", "fn f() {}"), ("a/c.rs", "")],
            [("lib.rs", "mod a;f"), ("a/mod.rs", "n f() {}"), ("a/b.rs", "")],
            [("lib.rs", "mod a;"), ("a/mod.rs", "fn f() {}"), ("b.rs", "")],
        ]
        .iter()
        .enumerate()
        {
            assert_ne!(Tree::new(&format!("other-{i}"), other).digest(), one.digest(), "{other:?}");
        }
        // What the build script said is what these sources are.
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let now = digest::digest(&[&here.join("src"), &here.join("../../wit")]).unwrap();
        assert_eq!(CORE, format!("{now:016x}"));
        assert_eq!(of(CORE, "a"), of(CORE, "a"));
        assert_ne!(of(CORE, "a"), of(CORE, "b"));
        assert_ne!(of(CORE, "a"), of("0123456789abcdef", "a"));
        assert_ne!(of(CORE, "a"), [0; 8]);
    }
}
