//! A folder for one test, removed with it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process;

/// Owns a folder under the system's temporary folder; dropping it removes the folder.
pub struct TestFolder(PathBuf);

impl TestFolder {
    /// Makes the folder; `name` is unique among this crate's tests.
    pub fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("xtask-{name}-{}", process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
