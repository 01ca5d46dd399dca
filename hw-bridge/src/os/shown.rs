//! Texts that come from others (guests, peers, files), made fit to stand in a line: of a log, of an error, on a terminal.
//!
//! Such a text must not end the line that it stands in and begin one of its own, move the cursor, or turn around what is shown
//! beside it.

/// `text` with a space in the place of each character that does more than stand in its line.
pub fn one_line(text: &str) -> String {
    text.chars().map(|c| if stands(c) { c } else { ' ' }).collect()
}

/// Whether a character only stands in its line: it is no control character, none of Unicode's separators of lines and
/// paragraphs, and changes no direction of writing.
pub fn stands(c: char) -> bool {
    !(c.is_control()
        || matches!(
            c,
            '\u{2028}' | '\u{2029}' | '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}'
                | '\u{2066}'..='\u{2069}'
        ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_stays_in_its_line() {
        assert_eq!(one_line("rank 1: größer, 接続 ok"), "rank 1: größer, 接続 ok");
        for odd in ["\r\n", "\x1b[2J", "\u{85}", "\u{2028}", "\u{2029}", "\u{202e}", "\u{2066}", "\t", "\0", "\x7f"] {
            let clean = one_line(&format!("a{odd}b"));
            assert!(clean.starts_with("a ") && clean.ends_with('b') && clean.chars().all(stands), "{odd:?}: {clean:?}");
        }
    }
}
