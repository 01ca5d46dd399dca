//! Texts in which a guest's words may be.

use hw_bridge::os::shown::one_line;

use crate::limits::MAX_LOG_LINE;

/// A text in which a guest's words may be, as a line of a log, an error or a terminal has it: cut to the limit at a
/// character, and without what would end the line.
pub fn line(text: &str) -> String {
    let mut end = text.len().min(MAX_LOG_LINE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    one_line(&text[..end])
}
