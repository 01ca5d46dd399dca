// A digest of sources, for the build script and for the tests of what it finds. Included by both.

use std::fs;
use std::io;
use std::path::Path;

/// FNV-1a of names and contents of all files below `folders`: the same wherever and whenever a tree is built, another if any
/// file is other, or has another name.
pub fn digest(folders: &[&Path]) -> io::Result<u64> {
    let fold = |d: u64, bytes: &[u8]| bytes.iter().fold(d, |d, b| (d ^ u64::from(*b)).wrapping_mul(0x100_0000_01B3));
    let mut digest = 0xCBF2_9CE4_8422_2325;
    for folder in folders {
        let mut files = Vec::new();
        below(folder, "", &mut files)?;
        // A folder has no order of its own.
        files.sort();
        for name in files {
            let content = fs::read(folder.join(&name))?;
            for part in [name.as_bytes(), &content] {
                digest = fold(fold(digest, &(part.len() as u64).to_le_bytes()), part);
            }
        }
    }
    Ok(digest)
}

/// Paths of the files below `folder`, from there.
fn below(folder: &Path, prefix: &str, files: &mut Vec<String>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            below(&entry.path(), &format!("{name}/"), files)?;
        } else {
            files.push(name);
        }
    }
    Ok(())
}
