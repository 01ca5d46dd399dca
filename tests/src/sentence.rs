//! Patterns for sentences that the tests expect.

/// Whether `text` is `pattern`, in which each `…` stands for anything.
pub fn fits(pattern: &str, text: &str) -> bool {
    let parts: Vec<&str> = pattern.split('…').collect();
    let (first, last) = (parts[0], parts[parts.len() - 1]);
    if parts.len() == 1 {
        return text == pattern;
    }
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    for part in &parts[1..parts.len() - 1] {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn a_pattern_fits_what_it_should_and_nothing_else() {
        assert!(fits("a", "a") && !fits("a", "ab") && !fits("a", ""));
        assert!(fits("a…", "abc") && !fits("a…", "ba"));
        assert!(fits("…c", "abc") && !fits("…c", "abcd"));
        assert!(fits("a…b…c", "a-b-c") && !fits("a…b…c", "a-c"));
        assert!(!fits("ab…ba", "aba"), "the two ends must not overlap");
    }
}
