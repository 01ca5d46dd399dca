//! Shared by the tests of the program: a directory of their own, and the program itself.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A directory that is removed with the test.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new(name: &str) -> Dir {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    pub fn names(&self) -> Vec<String> {
        let mut all: Vec<String> =
            std::fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        all.sort();
        all
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The program without what the environment might set for it.
pub fn wccl() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wccl"));
    for name in ["WCCL_ALGO", "WCCL_ONE_HOP_MAX", "WCCL_TUNE_FILE", "WCCL_LOG", "WCCL_PLUGIN"] {
        command.env_remove(name);
    }
    command
}

/// What both streams of a run say.
pub fn said(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

pub fn has(text: &str, words: &[&str]) {
    for w in words {
        assert!(text.contains(w), "`{w}` is not in: {text}");
    }
}
