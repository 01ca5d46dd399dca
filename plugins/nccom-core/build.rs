//! Tells the crate what its sources are: the ranks of a group compare it, so that two builds that may disagree do not meet.

use std::path::Path;

mod digest {
    include!("digest.rs");
}

fn main() -> std::io::Result<()> {
    // What is built from, and the contracts that it is generated from; paths are those of the package.
    let folders = ["src", "../../wit"];
    let digest = digest::digest(&folders.map(Path::new))?;
    println!("cargo::rustc-env=NCCOM_SOURCES={digest:016x}");
    for folder in folders {
        println!("cargo::rerun-if-changed={folder}");
    }
    println!("cargo::rerun-if-changed=digest.rs");
    Ok(())
}
