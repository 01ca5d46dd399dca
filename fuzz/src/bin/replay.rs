//! Gives one target every kept input and small changes of them: `replay TARGET FILE`, where FILE gets the input that is being
//! tried and stays behind if that is the last one. The test `fuzz/tests/replay.rs` runs it for
//! each target, in a process of its own, so that a crash, a hang and a huge allocation are told apart from the rest.
//!
//! Changes are drawn from a fixed seed: a run that failed fails again.

use std::path::Path;
use std::process::ExitCode;

use rustix::process::{Resource, Rlimit, setrlimit};

/// Private memory a target may use; descriptors of memory that is shared are not counted.
const MOST_MEMORY: u64 = 1 << 30;
/// Bytes to which an input may grow.
const MOST_BYTES: usize = 64 << 10;

/// Numbers that only look random (xorshift).
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n.max(1) as u64) as usize
    }
}

/// Up to four changes, of the kinds that a fuzzer makes; `other` is an input to take a piece of.
fn change(input: &mut Vec<u8>, other: &[u8], draw: &mut Draw) {
    for _ in 0..=draw.below(4) {
        let at = draw.below(input.len() + 1);
        let len = draw.below(16) + 1;
        let end = (at + len).min(input.len());
        match draw.below(7) {
            0 if at < input.len() => input[at] ^= 1 << draw.below(8),
            1 if at < input.len() => input[at] = [0, 1, 0x7F, 0x80, 0xFF, b'0', b'\n', b'*'][draw.below(8)],
            2 => drop(input.drain(at..end)),
            3 => drop(input.splice(at..at, (0..len).map(|_| draw.below(256) as u8).collect::<Vec<_>>())),
            4 => drop(input.splice(at..at, input[at..end].to_vec())),
            5 => {
                let from = draw.below(other.len() + 1);
                let until = (from + 8 * len).min(other.len());
                input.splice(at..end, other[from..until].iter().copied());
            }
            _ => input.truncate(at.max(1)),
        }
    }
    input.truncate(MOST_BYTES);
}

fn replay(name: &str, last: &Path) -> Result<usize, String> {
    let target = fuzz::find(name)?;
    let most = Rlimit { current: Some(MOST_MEMORY), maximum: Some(MOST_MEMORY) };
    setrlimit(Resource::Data, most).map_err(|e| format!("setting the limit of memory: {e}"))?;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let unread = |e: std::io::Error| format!("{}: {e}", folder.display());
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(unread)? {
        paths.push(entry.map_err(unread)?.path());
    }
    // The order of a folder is nobody's.
    paths.sort();
    let kept = paths.iter().map(std::fs::read).collect::<Result<Vec<_>, _>>().map_err(unread)?;
    if kept.is_empty() {
        return Err(format!("{} is empty: a target without inputs tests nothing", folder.display()));
    }
    // Of any thread, also one whose end nobody asks for; the fuzzer does the same.
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::abort();
    }));
    let try_one = |input: &[u8]| {
        // Written before it is tried: whatever happens then, it is there.
        std::fs::write(last, input).map_err(|e| format!("{}: {e}", last.display()))?;
        (target.run)(input);
        Ok::<(), String>(())
    };
    kept.iter().try_for_each(|input| try_one(input))?;
    let mut draw = Draw(0x9e37_79b9_7f4a_7c15);
    for _ in 0..target.changes {
        let mut input = kept[draw.below(kept.len())].clone();
        change(&mut input, &kept[draw.below(kept.len())], &mut draw);
        try_one(&input)?;
    }
    // Nothing failed: there is nothing to look at.
    let _ = std::fs::remove_file(last);
    Ok(kept.len() + target.changes)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [name, last] = &words[..] else {
        eprintln!("usage: replay TARGET FILE");
        return ExitCode::from(2);
    };
    match replay(name, Path::new(last)) {
        Ok(tried) => {
            println!("{name}: {tried} inputs");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{name}: {e}");
            ExitCode::FAILURE
        }
    }
}
