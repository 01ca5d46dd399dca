//! Sizes as users write them: `8`, `64K`, `1.5M`, `2GiB`, `1T`. K, M, G and T are powers of 1024, as in nccl-tests.

use std::time::Duration;

/// Reads a size in bytes.
///
/// # Errors
/// A sentence that says what was expected.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("`{text}` is not a size; write bytes like 8, 64K, 1.5M, 2G or 1T (K, M, G, T are powers of 1024)");
    let t = text.trim().to_ascii_lowercase();
    let digits = t.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(t.len());
    let (number, unit) = t.split_at(digits);
    let shift = match unit.trim() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(wrong()),
    };
    let factor = 1u64 << shift;
    if let Ok(n) = number.parse::<u64>() {
        return n.checked_mul(factor).ok_or_else(|| format!("`{text}` is more than 2^64 bytes"));
    }
    let n: f64 = number.parse().map_err(|_| wrong())?;
    let bytes = n * factor as f64;
    if !number.contains('.') || bytes >= u64::MAX as f64 {
        return Err(format!("`{text}` is more than 2^64 bytes"));
    }
    if bytes.fract() != 0.0 {
        return Err(format!("`{text}` is not a whole number of bytes"));
    }
    Ok(bytes as u64)
}

/// The sizes of a sweep: from `min` to `max` by a factor, or by a step in bytes.
///
/// # Errors
/// A sentence for a sweep that would never end or never begin.
pub fn sweep(min: u64, max: u64, factor: Option<u64>, step: Option<u64>) -> Result<Vec<u64>, String> {
    /// Points of one sweep; more is a mistake.
    const MOST: usize = 10_000;
    if max < min {
        return Err(format!("the largest size ({max}) is below the smallest ({min}); set -e to at least {min}"));
    }
    match (factor, step) {
        (_, Some(0)) => return Err("a step of 0 bytes never reaches the end; set -i to 1 or more".into()),
        (Some(0 | 1), None) => return Err("a factor below 2 never reaches the end; set -f to 2 or more".into()),
        (_, None) if min == 0 && max > 0 => {
            return Err("a sweep by a factor cannot begin at 0 bytes; set -b to 1 or more, or use -i".into());
        }
        _ => {}
    }
    let mut sizes = vec![min];
    let mut at = min;
    while sizes.len() <= MOST {
        let next = match step {
            Some(s) => at.checked_add(s),
            None => at.checked_mul(factor.unwrap_or(2)),
        };
        match next {
            Some(n) if n <= max && n > at => sizes.push(n),
            _ => return Ok(sizes),
        }
        at = sizes[sizes.len() - 1];
    }
    Err(format!("the sweep has more than {MOST} sizes; use a larger step"))
}

/// A size in the shortest exact form: `64K` rather than `65536`.
pub fn short(bytes: u64) -> String {
    for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
        if bytes >= 1 << shift && bytes % (1 << shift) == 0 {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// Reads seconds, such as `30` or `0.5`.
///
/// # Errors
/// A sentence that says what was expected.
pub fn seconds(text: &str) -> Result<Duration, String> {
    /// A year.
    const MOST: f64 = 366.0 * 86400.0;
    match text.parse::<f64>() {
        Ok(s) if (0.0..=MOST).contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err(format!("`{text}` is no number of seconds from 0 to a year, such as 30 or 0.5")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_users_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("8", 8),
            (" 17 ", 17),
            ("100b", 100),
            ("64K", 65_536),
            ("64k", 65_536),
            ("1kB", 1024),
            ("1.5M", 1_572_864),
            ("2GiB", 2 << 30),
            ("2 G", 2 << 30),
            ("10T", 10 << 40),
            ("1.5tib", 3 << 39),
            ("0.5K", 512),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "K",
            "-1",
            "8X",
            "1.2.3M",
            "1e3",
            "8 8",
            "18446744073709551616",
            "99999999999G",
            "16777216T",
            "1.5",
            "0.3K",
            ".",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sweeps_by_factor_and_by_step() {
        assert_eq!(sweep(8, 64, Some(2), None), Ok(vec![8, 16, 32, 64]));
        assert_eq!(sweep(8, 63, Some(2), None), Ok(vec![8, 16, 32]));
        assert_eq!(sweep(0, 10, None, Some(4)), Ok(vec![0, 4, 8]));
        assert_eq!(sweep(0, 0, Some(2), None), Ok(vec![0]));
        assert_eq!(sweep(7, 7, Some(2), None), Ok(vec![7]));
        // A step wins over a factor, and the end of the number range is an end.
        assert_eq!(sweep(1, 3, Some(2), Some(1)), Ok(vec![1, 2, 3]));
        assert_eq!(sweep(u64::MAX - 1, u64::MAX, Some(2), None), Ok(vec![u64::MAX - 1]));
        for bad in [
            sweep(8, 4, Some(2), None),
            sweep(8, 64, Some(1), None),
            sweep(8, 64, None, Some(0)),
            sweep(0, 8, Some(2), None),
            sweep(0, 1 << 40, None, Some(1)),
        ] {
            assert!(bad.is_err(), "{bad:?}");
        }
    }

    #[test]
    fn short_sizes_are_exact() {
        for bytes in [0, 1, 1023, 1024, 1025, 65_536, 3 << 20, (3 << 20) + 1, 5 << 30, 7 << 40] {
            assert_eq!(parse(&short(bytes)), Ok(bytes));
        }
        assert_eq!(short(3 << 20), "3M");
    }

    #[test]
    fn seconds_are_numbers_from_zero_to_a_year() {
        assert_eq!(seconds("30"), Ok(Duration::from_secs(30)));
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(seconds("0"), Ok(Duration::ZERO));
        for bad in ["", "-1", "1s", "nan", "inf", "1e300"] {
            assert!(seconds(bad).unwrap_err().contains(bad));
        }
    }
}
