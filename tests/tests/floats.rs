//! Numbers that are hard to keep: results that a program's floating-point state must not touch.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};

use common::ranks::spawn;
use host_runtime::ReduceOp;
use hw_bridge::reduce::{reduce_scaled_slices, reduce_slices};
use tests::floats::{self, Digest};

/// A meeting place that nobody else has: loopback addresses are many, and this process's number is in it.
fn meeting_place() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let pid = std::process::id();
    let port = 20_000 + NEXT.fetch_add(1, Ordering::Relaxed);
    format!("127.{}.{}.{}:{port}", 1 + (pid >> 16) % 254, pid >> 8 & 0xFF, 1 + (pid & 0xFF) % 254)
}

/// A library made of `source` by the compiler that a build needs anyway.
fn library(folder: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (c, so) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.so")));
    std::fs::write(&c, source).unwrap();
    let made = Command::new("gcc").args(["-shared", "-fPIC"]).args(flags).arg("-o").args([&so, &c]).status().unwrap();
    assert!(made.success(), "gcc {flags:?}: {made}");
    so
}

/// What two ranks must get, computed here.
fn expected() -> Digest {
    let mut digest = Digest::default();
    for (dtype, op) in floats::calls() {
        let inputs = [0, 1].map(|rank| floats::input(rank, dtype));
        let sources = [inputs[0].as_slice(), &inputs[1]];
        let mut out = vec![0; inputs[0].len()];
        match op {
            ReduceOp::PreMulSum => {
                reduce_scaled_slices(dtype, &mut out, &sources, &[0, 1].map(floats::scale)).unwrap();
            }
            op => reduce_slices(op, dtype, &mut out, &sources).unwrap(),
        }
        for _ in 0..2 {
            digest.add(&out);
        }
    }
    digest
}

/// One of two ranks loads a library that changes how its process computes; both get the bits of a process that did not.
#[cfg(target_arch = "x86_64")]
#[test]
fn ranks_agree_whatever_one_of_them_did_to_its_floating_point_state() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("floats-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // What -Ofast links into a library by itself, in compilers up to 12: subnormals are zero.
    let fast = library(&folder, "fast", "int nothing;", &["-Ofast"]);
    let state = "#include <stdlib.h>\n#include <xmmintrin.h>\n\
        __attribute__((constructor)) static void set(void) { _mm_setcsr(strtoul(getenv(\"TEST_MXCSR\"), 0, 16)); }";
    let state = library(&folder, "state", state, &["-O1"]);
    let expected = format!("bits {}", expected());
    let mut tried = vec![(None, "0"), (Some(&fast), "0")];
    // Subnormals zero; down, up and toward zero; every exception unmasked, some of them raised already.
    tried.extend(["9fc0", "3f80", "5f80", "7f80", "0000", "6015"].map(|mxcsr| (Some(&state), mxcsr)));
    for (library, mxcsr) in tried {
        let place = meeting_place();
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let mut command = Command::new(env!("CARGO_BIN_EXE_rank"));
                if let Some(library) = library.filter(|_| rank == 1) {
                    command.env("LD_PRELOAD", library);
                }
                command.env("TEST_MXCSR", mxcsr);
                // Small calls go in one hop, the others through the peers' memory.
                spawn(command, &place, "floats", rank, 2, &[])
            })
            .collect();
        for (rank, r) in ranks.iter().enumerate() {
            let said = r.rest();
            assert_eq!(said, ["ready", &expected], "rank {rank}, {library:?} {mxcsr}");
        }
    }
    // What is left in the build's folder is harmless.
    let _ = std::fs::remove_dir_all(&folder);
}
