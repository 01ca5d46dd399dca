//! Numbers that are hard to keep: results that a program's floating-point state must not touch, and averages whose sums are
//! too large for their type.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};

use super::exact::scalar::{self, Codec, reduced};
use crate::common::ranks::spawn;
use crate::common::{config, world};
use enc::Algorithm;
use hw_bridge::exec::reduce::{reduce_scaled_slices, reduce_slices};
use tests::floats::{self, Digest};
use wccl::{DataType, Io, ReduceOp, RuntimeConfig};

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
#[test]
fn ranks_agree_whatever_one_of_them_did_to_its_floating_point_state() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("floats-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // What -Ofast links into a library by itself, in compilers up to 12: subnormals are zero.
    let fast = library(&folder, "fast", "int nothing;", &["-Ofast"]);
    let mut tried = vec![(None, "0"), (Some(&fast), "0")];
    let state = "#include <stdlib.h>\n#include <xmmintrin.h>\n\
        __attribute__((constructor)) static void set(void) { _mm_setcsr(strtoul(getenv(\"TEST_MXCSR\"), 0, 16)); }";
    let state = cfg!(target_arch = "x86_64").then(|| library(&folder, "state", state, &["-O1"]));
    if let Some(state) = &state {
        // Subnormals zero; down, up and toward zero; every exception unmasked, some of them raised already.
        tried.extend(["9fc0", "3f80", "5f80", "7f80", "0000", "6015"].map(|mxcsr| (Some(state), mxcsr)));
    }
    let expected = format!("bits {}", expected());
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

/// A small generator (splitmix64), so that a failure can be repeated.
fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*seed ^ *seed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// Finite numbers: a third of them so large that few can be summed, a third of any size, a third subnormal or nearly.
fn finite(seed: &mut u64, dtype: DataType, count: usize) -> Vec<u8> {
    let codec = Codec::new(dtype);
    let (e, m) = scalar::layout(dtype);
    let (sign, largest) = (1u64 << (e + m), (((1u64 << e) - 1) << m) - 1);
    let mut out = Vec::with_capacity(count * dtype.size());
    while out.len() < count * dtype.size() {
        let bits = random(seed);
        let magnitude = match bits >> 60 & 3 {
            // Of one sign more often than not, so that sums do grow.
            0 | 1 => largest - bits % (1 << m),
            2 => bits & (sign - 1),
            _ => bits % (2 << m),
        };
        let signed = magnitude | if bits >> 57 & 7 == 0 { sign } else { 0 };
        let bytes = &signed.to_le_bytes()[..dtype.size()];
        if codec.decode(bytes).is_finite() {
            out.extend_from_slice(bytes);
        }
    }
    out
}

/// A mean of finite numbers is finite: for every float type, algorithm, number of ranks and order of the operands. Ranks
/// agree, and where the sum is finite the bits are those of the sum divided.
#[test]
fn a_mean_of_finite_numbers_is_finite() {
    const COUNT: usize = 523;
    for n in [2usize, 3, 4, 5, 7, 8] {
        for algorithm in Algorithm::ALL {
            let config = RuntimeConfig { algorithm: Some(algorithm), ..config() };
            world(n, &config, move |mut comm| {
                let rank = comm.rank();
                for dtype in DataType::ALL.into_iter().filter(|d| d.is_float()) {
                    let size = dtype.size();
                    let mut seed = n as u64 * 1000 + dtype.nrt() as u64;
                    let inputs: Vec<Vec<u8>> = (0..n).map(|_| finite(&mut seed, dtype, COUNT)).collect();
                    let expected = reduced(dtype, ReduceOp::Avg, &inputs, &[]);
                    let codec = Codec::new(dtype);
                    let means = expected.chunks(size).map(|x| codec.decode(x));
                    // The exact mean, and how far one rounding of f32, and one of the type, may be from it.
                    for (i, mean) in means.enumerate() {
                        let terms = || inputs.iter().map(|x| f64::from(codec.decode(&x[i * size..(i + 1) * size])));
                        let (exact, most) =
                            (terms().sum::<f64>() / n as f64, terms().map(f64::abs).fold(0.0, f64::max));
                        let unit = 2f64.powi(-scalar::layout(dtype).1 - 1) + n as f64 * 2f64.powi(-23);
                        let off = (f64::from(mean) - exact).abs();
                        assert!(off <= most * unit + codec.smallest(), "{dtype} on {n} ranks: {mean} for {exact}");
                    }
                    let case = |what: &str| format!("{what}: {dtype} on {n} ranks by {algorithm:?}, rank {rank}");

                    let tensor = comm.allocate(inputs[rank].len() as u64).unwrap();
                    let other = comm.allocate(inputs[rank].len() as u64).unwrap();
                    tensor.write(0, &inputs[rank]).unwrap();
                    let mut got = vec![0; inputs[rank].len()];
                    comm.raw().all_reduce(Io::device(&tensor, &other), COUNT as u64, dtype, ReduceOp::Avg).unwrap();
                    other.read(0, &mut got).unwrap();
                    assert!(got == expected, "{}", case("all-reduce"));
                    comm.raw().reduce(Io::device(&tensor, &other), COUNT as u64, dtype, ReduceOp::Avg, n - 1).unwrap();
                    other.read(0, &mut got).unwrap();
                    assert!(rank < n - 1 || got == expected, "{}", case("reduce"));
                    comm.raw().all_reduce(Io::in_place(&tensor), COUNT as u64, dtype, ReduceOp::Avg).unwrap();
                    tensor.read(0, &mut got).unwrap();
                    assert!(got == expected, "{}", case("all-reduce in place"));
                    let mut private = inputs[rank].clone();
                    comm.raw().all_reduce(Io::HostInPlace(&mut private), COUNT as u64, dtype, ReduceOp::Avg).unwrap();
                    assert!(private == expected, "{}", case("all-reduce in private memory"));
                    // Each rank's part of a reduce-scatter; the input is a whole number of parts.
                    let part = COUNT / n;
                    let mut mine = vec![0; part * size];
                    let io = Io::Host { src: &inputs[rank][..part * n * size], dst: &mut mine };
                    comm.raw().reduce_scatter(io, part as u64, dtype, ReduceOp::Avg).unwrap();
                    assert!(mine == expected[rank * part * size..][..part * size], "{}", case("reduce-scatter"));
                }
            });
        }
    }
}

/// The numbers of the report.
#[test]
fn large_means_by_example() {
    world(3, &config(), |mut comm| {
        let mut fp32 = 3e38f32.to_le_bytes();
        comm.raw().all_reduce(Io::HostInPlace(&mut fp32), 1, DataType::Fp32, ReduceOp::Avg).unwrap();
        assert_eq!(f32::from_le_bytes(fp32), 3e38);
        // 1.6e38 as bf16.
        let mut bf16 = 0x7EF1u16.to_le_bytes();
        comm.raw().all_reduce(Io::HostInPlace(&mut bf16), 1, DataType::Bf16, ReduceOp::Avg).unwrap();
        assert_eq!(u16::from_le_bytes(bf16), 0x7EF1);
        // An infinity that somebody brings stays one, and a NaN a NaN.
        let mut mixed = [f32::MAX, f32::MAX, 1.0];
        if comm.rank() == 1 {
            mixed = [f32::NEG_INFINITY, f32::NAN, f32::INFINITY];
        }
        let mut bytes: Vec<u8> = mixed.iter().flat_map(|x| x.to_le_bytes()).collect();
        comm.raw().all_reduce(Io::HostInPlace(&mut bytes), 3, DataType::Fp32, ReduceOp::Avg).unwrap();
        let got: Vec<u32> = bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(got, [0xFF80_0000, 0x7FC0_0000, 0x7F80_0000]);
    });
}
