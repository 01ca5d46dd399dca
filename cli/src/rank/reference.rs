//! Known inputs, and the results that must come out of them, computed without any code of the runtime.
//!
//! Every rank's input is a pure function of (seed, rank, position), so each rank knows the inputs of all and computes
//! what it must receive by itself: integers in `i128`, floats in `f64`, one element after the other, narrowed by searching
//! the table of all numbers of the format. Inputs of float reductions are small whole numbers, whose sums and products are
//! exact in every order; so any correct algorithm gives the same bits, and one wrong bit is a wrong element.
//!
//! Inputs repeat with a period that is prime, so that a block that lands in the wrong place, a multiple of any usual
//! size away, is seen.

use std::sync::OnceLock;

use wccl::{DataType, ReduceOp};

/// Elements after which an input repeats.
pub const PERIOD: u64 = 1021;

/// Bytes of one repetition or several.
#[derive(Debug, Clone)]
pub struct Tile {
    bytes: Vec<u8>,
    size: usize,
}

/// What the elements of an input are.
#[derive(Debug, Clone, Copy)]
pub struct Pattern {
    /// Their type.
    pub dtype: DataType,
    /// What they are reduced with; `None` if they are only moved, and any bits will do.
    pub redop: Option<ReduceOp>,
    /// Ranks that take part.
    pub nranks: usize,
    /// Makes one input differ from another.
    pub seed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Number {
    Int(i128),
    Float(f64),
}

/// One round of splitmix64: enough to make neighbours look unlike.
fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn is_unsigned(d: DataType) -> bool {
    matches!(d, DataType::Uint8 | DataType::Uint16 | DataType::Uint32 | DataType::Uint64)
}

/// Exponent and mantissa bits of a float type.
fn float_bits(d: DataType) -> (u32, u32) {
    match d {
        DataType::Fp8E3 => (3, 4),
        DataType::Fp8E4 => (4, 3),
        DataType::Fp8E5 => (5, 2),
        DataType::Fp16 => (5, 10),
        DataType::Bf16 => (8, 7),
        _ => (8, 23),
    }
}

/// The largest n such that all whole numbers up to n are exact and finite.
fn largest_exact(d: DataType) -> u64 {
    match d {
        // 16 has the mantissa for it but is beyond the largest finite value, 15.5.
        DataType::Fp8E3 => 15,
        _ => 2 << float_bits(d).1,
    }
}

/// Wraps a whole number to the type, as two's complement does.
fn wrap(d: DataType, v: i128) -> i128 {
    let modulus = 1i128 << (8 * d.size());
    let r = v.rem_euclid(modulus);
    if !is_unsigned(d) && r >= modulus / 2 { r - modulus } else { r }
}

/// The values of all finite non-negative codes of a narrow float type, by code: they rise.
fn values(d: DataType) -> &'static [f64] {
    static TABLES: [OnceLock<Vec<f64>>; 16] = [const { OnceLock::new() }; 16];
    TABLES[d.nrt() as usize & 15].get_or_init(|| {
        let (e, m) = float_bits(d);
        let bias = (1i32 << (e - 1)) - 1;
        let infinity = ((1u32 << e) - 1) << m;
        let value = |code: u32| {
            let (exponent, mantissa) = ((code >> m) as i32, f64::from(code & ((1 << m) - 1)) / f64::from(1u32 << m));
            if exponent == 0 { mantissa * 2f64.powi(1 - bias) } else { (1.0 + mantissa) * 2f64.powi(exponent - bias) }
        };
        (0..infinity).map(value).collect()
    })
}

/// The code nearest to a finite number, ties to the even code; beyond the last finite one, infinity.
fn narrow(d: DataType, x: f64) -> u32 {
    let (e, m) = float_bits(d);
    let table = values(d);
    let magnitude = x.abs();
    let above = table.partition_point(|v| *v < magnitude);
    let code = match (above.checked_sub(1), table.get(above)) {
        (None, _) => 0,
        (Some(below), Some(up)) => {
            let (down, up) = (magnitude - table[below], up - magnitude);
            if down < up || down == up && below % 2 == 0 { below } else { above }
        }
        (Some(last), None) => {
            // Infinity begins half a unit above the largest finite value.
            let unit = table[last] - table[last - 1];
            if magnitude < table[last] + unit / 2.0 { last } else { above }
        }
    };
    u32::from(x.is_sign_negative()) << (e + m) | code as u32
}

fn encode(d: DataType, n: Number, out: &mut Vec<u8>) {
    match n {
        Number::Int(v) => out.extend_from_slice(&v.to_le_bytes()[..d.size()]),
        // One rounding, to nearest even, is what `as` does.
        Number::Float(x) if d.size() == 4 => out.extend_from_slice(&(x as f32).to_le_bytes()),
        Number::Float(x) => out.extend_from_slice(&narrow(d, x).to_le_bytes()[..d.size()]),
    }
}

impl Pattern {
    fn draw(&self, rank: usize, i: u64) -> u64 {
        mix(mix(self.seed ^ mix(rank as u64)) ^ i)
    }

    /// Element `i` of the input of `rank`, for a reduction.
    fn number(&self, op: ReduceOp, rank: usize, i: u64) -> Number {
        let h = self.draw(rank, i);
        if !self.dtype.is_float() {
            return Number::Int(wrap(self.dtype, i128::from(h)));
        }
        let n = self.nranks as u64;
        let most = largest_exact(self.dtype);
        let whole = |most: u64| (h % (2 * most + 1)) as i128 - i128::from(most);
        let v = match op {
            ReduceOp::Max | ReduceOp::Min => whole(most),
            // No zero among the factors, whose sign would depend on the others; two ranks at most bring a 2.
            ReduceOp::Prod => {
                let place = mix(self.seed ^ i);
                let two = [place % n, (place >> 20) % n].contains(&(rank as u64));
                (if h & 1 == 0 { 1 } else { -1 }) * (if two { 2 } else { 1 })
            }
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum if n <= most => whole(most / n),
            // More ranks than the type can count: only some bring a number.
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum => {
                let every = n.div_ceil(most);
                if (rank as u64 + i) % every == 0 { whole(1) } else { 0 }
            }
        };
        Number::Float(v as f64)
    }

    fn reduced(&self, op: ReduceOp, i: u64) -> Number {
        let all = (0..self.nranks).map(|r| self.number(op, r, i));
        let n = self.nranks as i128;
        let d = self.dtype;
        let (mut ints, mut floats) = (Vec::new(), Vec::new());
        for x in all {
            match x {
                Number::Int(v) => ints.push(v),
                Number::Float(v) => floats.push(v),
            }
        }
        if d.is_float() {
            let by = |f: fn(f64, f64) -> f64| floats.iter().copied().reduce(f).unwrap_or(0.0);
            return Number::Float(match op {
                // The program passes no scales: all of them are one.
                ReduceOp::Sum | ReduceOp::PreMulSum => by(|a, b| a + b),
                ReduceOp::Prod => by(|a, b| a * b),
                ReduceOp::Max => by(|a, b| if a < b { b } else { a }),
                ReduceOp::Min => by(|a, b| if b < a { b } else { a }),
                ReduceOp::Avg => by(|a, b| a + b) / n as f64,
            });
        }
        Number::Int(match op {
            ReduceOp::Sum | ReduceOp::PreMulSum => wrap(d, ints.iter().sum()),
            ReduceOp::Prod => ints.iter().fold(1, |a, b| wrap(d, a.wrapping_mul(*b))),
            ReduceOp::Max => ints.iter().copied().max().unwrap_or(0),
            ReduceOp::Min => ints.iter().copied().min().unwrap_or(0),
            ReduceOp::Avg => wrap(d, ints.iter().sum()) / n,
        })
    }

    fn tile(&self, most: u64, element: impl Fn(u64, &mut Vec<u8>)) -> Tile {
        let mut bytes = Vec::new();
        // A library that was loaded into the program may have changed how its threads round.
        hw_bridge::exec::reduce::in_default_float_state(|| (0..most.min(PERIOD)).for_each(|i| element(i, &mut bytes)));
        if most > PERIOD {
            // Several repetitions, so that a large buffer is compared in large pieces.
            let one = bytes.len();
            let times = (64 * 1024 / one).max(1).min(most.div_ceil(PERIOD) as usize);
            bytes = bytes.repeat(times);
        }
        Tile { bytes, size: self.dtype.size() }
    }

    /// The input of `rank`, which is read up to element `end`.
    pub fn input(&self, rank: usize, end: u64) -> Tile {
        self.tile(end, |i, out| match self.redop {
            Some(op) => encode(self.dtype, self.number(op, rank, i), out),
            None => out.extend_from_slice(&self.draw(rank, i).to_le_bytes()[..self.dtype.size()]),
        })
    }

    /// The reduction of all inputs, which is read up to element `end`; for a movement, the input of rank 0.
    pub fn reduction(&self, end: u64) -> Tile {
        match self.redop {
            Some(op) => self.tile(end, |i, out| encode(self.dtype, self.reduced(op, i), out)),
            None => self.input(0, end),
        }
    }
}

impl Tile {
    /// The longest piece from element `start` on that lies in the tile, at most `most` bytes.
    pub fn piece(&self, start: u64, most: u64) -> &[u8] {
        if self.bytes.is_empty() {
            return &[];
        }
        // A tile shorter than the period is a whole input that is never read beyond its end.
        let from = (start % PERIOD) as usize * self.size;
        let rest = self.bytes.get(from..).unwrap_or(&[]);
        &rest[..rest.len().min(usize::try_from(most).unwrap_or(usize::MAX))]
    }
}

/// Elements of `size` bytes that differ.
pub fn wrong_elements(got: &[u8], expected: &[u8], size: usize) -> u64 {
    if got == expected {
        return 0;
    }
    got.chunks(size).zip(expected.chunks(size)).filter(|(a, b)| a != b).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(dtype: DataType, redop: ReduceOp, nranks: usize) -> Pattern {
        Pattern { dtype, redop: Some(redop), nranks, seed: 7 }
    }

    /// Float sums and products must be exact in every order, or the reference would judge rounding.
    #[test]
    fn float_reductions_are_exact_in_any_order() {
        for d in DataType::ALL.into_iter().filter(|d| d.is_float()) {
            for n in [1, 2, 3, 8, 16, 64] {
                for op in [ReduceOp::Sum, ReduceOp::Prod] {
                    let p = pattern(d, op, n);
                    let top = largest_exact(d) as f64;
                    for i in 0..PERIOD {
                        let (mut up, mut down) = (0f64, 0f64);
                        for r in 0..n {
                            let Number::Float(x) = p.number(op, r, i) else { panic!() };
                            assert_eq!(x.fract(), 0.0);
                            (up, down) = (up + x.max(0.0), down + x.min(0.0));
                            assert!(op != ReduceOp::Prod || x != 0.0);
                        }
                        // Any partial sum lies between these two.
                        assert!(op != ReduceOp::Sum || (up <= top && down >= -top), "{d} {n} {i}");
                        let Number::Float(all) = p.reduced(op, i) else { panic!() };
                        assert!(op != ReduceOp::Prod || [1.0, 2.0, 4.0].contains(&all.abs()));
                    }
                }
            }
        }
    }

    #[test]
    fn inputs_differ_between_ranks_positions_and_seeds() {
        for d in [DataType::Fp32, DataType::Int8, DataType::Uint64] {
            let p = pattern(d, ReduceOp::Sum, 4);
            let all = |p: &Pattern, r| p.input(r, PERIOD).bytes;
            assert_ne!(all(&p, 0), all(&p, 1));
            assert_ne!(all(&p, 0), all(&Pattern { seed: 8, ..p }, 0));
            let one = all(&p, 0);
            // No shift of a part of the input looks like the input; beyond 1000 too little is left to tell.
            for shift in 1..=1000 {
                assert_ne!(one[shift * d.size()..], one[..one.len() - shift * d.size()], "{d} {shift}");
            }
        }
    }

    #[test]
    fn narrowing_is_nearest_even_with_infinities() {
        let e4 = |x| narrow(DataType::Fp8E4, x);
        assert_eq!(e4(0.0), 0);
        assert_eq!(e4(1.0), 0x38);
        assert_eq!(e4(-1.0), 0xB8);
        assert_eq!(e4(240.0), 0x77);
        assert_eq!(e4(247.9), 0x77);
        assert_eq!(e4(248.0), 0x78);
        assert_eq!(e4(1e9), 0x78);
        // 17 lies between 16 (even) and 18; 19 between 18 and 20 (even).
        assert_eq!((e4(17.0), e4(19.0)), (e4(16.0), e4(20.0)));
        assert_eq!(narrow(DataType::Bf16, 1.0), 0x3F80);
        assert_eq!(narrow(DataType::Fp16, 65504.0), 0x7BFF);
        assert_eq!(narrow(DataType::Fp16, -0.5), 0xB800);
        assert_eq!(narrow(DataType::Fp8E3, 15.5), 0x6F);
        assert_eq!(narrow(DataType::Fp8E5, 57344.0), 0x7B);
    }

    #[test]
    fn integers_wrap_and_averages_truncate() {
        assert_eq!(wrap(DataType::Int8, 200), -56);
        assert_eq!(wrap(DataType::Uint8, -1), 255);
        assert_eq!(wrap(DataType::Uint64, 1 << 64), 0);
        assert_eq!(wrap(DataType::Int64, 1 << 63), -(1 << 63));
        let p = pattern(DataType::Int8, ReduceOp::Avg, 3);
        for i in 0..100 {
            let sum: i128 = (0..3)
                .map(|r| match p.number(ReduceOp::Avg, r, i) {
                    Number::Int(v) => v,
                    Number::Float(_) => panic!(),
                })
                .sum();
            assert_eq!(p.reduced(ReduceOp::Avg, i), Number::Int(i128::from(sum as i8) / 3));
        }
    }

    #[test]
    fn tiles_repeat_with_the_period() {
        let p = pattern(DataType::Int16, ReduceOp::Sum, 2);
        let long = p.input(1, 10 * PERIOD);
        let short = p.input(1, 5);
        assert_eq!(short.piece(2, 100), long.piece(2, 6));
        assert_eq!(long.piece(PERIOD + 3, 8), long.piece(3, 8));
        assert_eq!(long.piece(9 * PERIOD + 1020, 2), long.piece(1020, 2));
        assert!(p.input(0, 0).piece(0, 8).is_empty());
        assert_eq!(wrong_elements(&[1, 2, 3, 4], &[1, 9, 3, 4], 2), 1);
        assert_eq!(wrong_elements(&[1, 2], &[1, 2], 2), 0);
    }
}
