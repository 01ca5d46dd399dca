//! A small XML tree: enough for the topology and graph documents, and no more.
//!
//! Owns: reading text into [`XmlElement`]s and writing them back. Knows elements, attributes, comments, declarations,
//! the five named entities and numeric ones. Refuses character data between elements, because neither schema has
//! any, and whatever exceeds [`super::limits`].
//!
//! Invariants: no input makes the reader panic or recurse; `write(read(x))` is a fixed point of `write ∘ read`;
//! attributes keep their order and unknown ones are kept.

use super::limits::{MAX_XML_ATTRIBUTES, MAX_XML_BYTES, MAX_XML_DEPTH, MAX_XML_NODES, MAX_XML_TEXT};
use std::fmt;

/// One element with its attributes and children, in document order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct XmlElement {
    /// Tag.
    pub name: String,
    /// Attributes, in document order.
    pub attributes: Vec<(String, String)>,
    /// Children, in document order.
    pub children: Vec<XmlElement>,
}

impl XmlElement {
    /// An empty element.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_string(), ..Self::default() }
    }

    /// The same element with one more attribute.
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.set(name, value);
        self
    }

    /// The value of an attribute.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// Sets an attribute; one that exists keeps its place.
    pub fn set(&mut self, name: &str, value: impl fmt::Display) {
        let value = value.to_string();
        match self.attributes.iter_mut().find(|(n, _)| n == name) {
            Some((_, v)) => *v = value,
            None => self.attributes.push((name.to_string(), value)),
        }
    }

    /// Children with a tag.
    pub fn children_named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a XmlElement> {
        self.children.iter().filter(move |c| c.name == name)
    }
}

/// Why a text is no document.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum XmlError {
    /// The text breaks the grammar.
    Syntax {
        /// Line, from 1.
        line: usize,
        /// What stands there.
        what: &'static str,
        /// What was expected.
        expected: &'static str,
    },
    /// A limit of [`super::limits`] is exceeded.
    Limit {
        /// Line, from 1; 0 for the document as a whole.
        line: usize,
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
}

impl fmt::Display for XmlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Syntax { line, what, expected } => {
                write!(f, "the XML document has {what} in line {line} where {expected} was expected: correct the file")
            }
            Self::Limit { line, what, limit } => {
                write!(f, "the XML document exceeds the limit of {limit} {what} in line {line}: shorten the file")
            }
        }
    }
}

impl std::error::Error for XmlError {}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or("")
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn line(&self) -> usize {
        let upto = self.at.min(self.text.len());
        1 + self.text.as_bytes()[..upto].iter().filter(|b| **b == b'\n').count()
    }

    fn syntax(&self, what: &'static str, expected: &'static str) -> XmlError {
        XmlError::Syntax { line: self.line(), what, expected }
    }

    fn limit(&self, what: &'static str, limit: usize) -> XmlError {
        XmlError::Limit { line: self.line(), what, limit }
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    /// Skips what `open` began, up to and with `close`.
    fn skip_past(&mut self, open: &str, close: &str, expected: &'static str) -> Result<(), XmlError> {
        let inside = self.rest().get(open.len()..).unwrap_or("");
        match inside.find(close) {
            Some(n) => {
                self.at += open.len() + n + close.len();
                Ok(())
            }
            None => Err(self.syntax("an unfinished comment or declaration", expected)),
        }
    }

    fn name(&mut self, expected: &'static str) -> Result<&'a str, XmlError> {
        let rest = self.rest();
        let end = rest
            .bytes()
            .position(|b| !(b.is_ascii_alphanumeric() || matches!(b, b'_' | b':' | b'-' | b'.')))
            .unwrap_or(rest.len());
        let name = rest.get(..end).unwrap_or("");
        if !name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_' || c == ':') {
            return Err(self.syntax("no name", expected));
        }
        if name.len() > MAX_XML_TEXT {
            return Err(self.limit("bytes in a name", MAX_XML_TEXT));
        }
        self.at += end;
        Ok(name)
    }

    fn value(&mut self) -> Result<String, XmlError> {
        let quote = match self.peek() {
            Some(b'"') => '"',
            Some(b'\'') => '\'',
            _ => return Err(self.syntax("no quote", "a quoted attribute value")),
        };
        self.at += 1;
        let rest = self.rest();
        let end = match rest.find(quote) {
            Some(n) => n,
            None => return Err(self.syntax("an unfinished attribute value", "a closing quote")),
        };
        if end > MAX_XML_TEXT {
            return Err(self.limit("bytes in an attribute value", MAX_XML_TEXT));
        }
        let raw = rest.get(..end).unwrap_or("");
        let value = self.unescape(raw)?;
        self.at += end + 1;
        Ok(value)
    }

    fn unescape(&self, raw: &str) -> Result<String, XmlError> {
        let mut out = String::with_capacity(raw.len());
        let mut rest = raw;
        while let Some(c) = rest.chars().next() {
            if c == '&' {
                let Some(end) = rest.find(';') else {
                    return Err(self.syntax("an unfinished entity", "';' after '&…'"));
                };
                let entity = rest.get(1..end).unwrap_or("");
                out.push(match entity {
                    "lt" => '<',
                    "gt" => '>',
                    "amp" => '&',
                    "quot" => '"',
                    "apos" => '\'',
                    _ => self.numeric(entity)?,
                });
                rest = rest.get(end + 1..).unwrap_or("");
            } else if c == '<' || (c < ' ' && !matches!(c, '\t' | '\n' | '\r')) {
                return Err(self.syntax("a forbidden character", "an attribute value"));
            } else {
                out.push(c);
                rest = rest.get(c.len_utf8()..).unwrap_or("");
            }
        }
        Ok(out)
    }

    fn numeric(&self, entity: &str) -> Result<char, XmlError> {
        let code = match entity.strip_prefix("#x") {
            Some(hex) => u32::from_str_radix(hex, 16).ok(),
            None => entity.strip_prefix('#').and_then(|d| d.parse().ok()),
        };
        code.filter(|c| *c >= 0x20 || matches!(*c, 9 | 10 | 13))
            .and_then(char::from_u32)
            .ok_or_else(|| self.syntax("an unknown entity", "lt, gt, amp, quot, apos or a number"))
    }
}

/// Reads a document.
///
/// # Errors
/// [`XmlError::Syntax`] with the line, [`XmlError::Limit`] with the limit.
pub fn read(text: &str) -> Result<XmlElement, XmlError> {
    if text.len() > MAX_XML_BYTES {
        return Err(XmlError::Limit { line: 0, what: "bytes", limit: MAX_XML_BYTES });
    }
    let mut r = Reader { text, at: 0 };
    // Elements that are still open, outermost first; a finished one moves into the one before it.
    let mut open: Vec<XmlElement> = Vec::new();
    let mut root: Option<XmlElement> = None;
    let mut nodes = 0usize;
    if r.rest().starts_with('\u{feff}') {
        r.at += '\u{feff}'.len_utf8();
    }
    loop {
        r.skip_space();
        let rest = r.rest();
        if rest.is_empty() {
            break;
        } else if rest.starts_with("<!--") {
            r.skip_past("<!--", "-->", "'-->'")?;
        } else if rest.starts_with("<?") {
            r.skip_past("<?", "?>", "'?>'")?;
        } else if rest.starts_with("<!") {
            r.skip_past("<!", ">", "'>'")?;
        } else if rest.starts_with("</") {
            r.at += 2;
            let name = r.name("the name of the element to close")?;
            r.skip_space();
            if r.peek() != Some(b'>') {
                return Err(r.syntax("something else", "'>'"));
            }
            let Some(done) = open.pop() else {
                return Err(r.syntax("a closing tag", "no closing tag, since nothing is open"));
            };
            if done.name != name {
                return Err(r.syntax("a closing tag of another name", "the tag opened last"));
            }
            r.at += 1;
            close(done, &mut open, &mut root);
        } else if rest.starts_with('<') {
            r.at += 1;
            nodes += 1;
            if root.is_some() {
                return Err(r.syntax("a second outermost element", "the end of the document"));
            }
            if nodes > MAX_XML_NODES {
                return Err(r.limit("elements", MAX_XML_NODES));
            }
            if open.len() >= MAX_XML_DEPTH {
                return Err(r.limit("nested elements", MAX_XML_DEPTH));
            }
            let mut element = XmlElement::new(r.name("the name of an element")?);
            let closed = attributes(&mut r, &mut element)?;
            if closed {
                close(element, &mut open, &mut root);
            } else {
                open.push(element);
            }
        } else {
            return Err(r.syntax("text", "an element"));
        }
    }
    if !open.is_empty() {
        return Err(r.syntax("the end of the document", "a closing tag"));
    }
    root.ok_or_else(|| r.syntax("the end of the document", "an element"))
}

/// Reads attributes up to the end of the tag; true if the tag closed itself.
fn attributes(r: &mut Reader<'_>, element: &mut XmlElement) -> Result<bool, XmlError> {
    loop {
        r.skip_space();
        match r.peek() {
            Some(b'>') => {
                r.at += 1;
                return Ok(false);
            }
            Some(b'/') => {
                if !r.rest().starts_with("/>") {
                    return Err(r.syntax("'/'", "'/>'"));
                }
                r.at += 2;
                return Ok(true);
            }
            None => return Err(r.syntax("the end of the document", "'>'")),
            Some(_) => {
                let name = r.name("an attribute name or the end of the tag")?;
                r.skip_space();
                if r.peek() != Some(b'=') {
                    return Err(r.syntax("an attribute without a value", "'='"));
                }
                r.at += 1;
                r.skip_space();
                let value = r.value()?;
                if element.get(name).is_some() {
                    return Err(r.syntax("an attribute twice", "each attribute once"));
                }
                if element.attributes.len() >= MAX_XML_ATTRIBUTES {
                    return Err(r.limit("attributes of an element", MAX_XML_ATTRIBUTES));
                }
                element.attributes.push((name.to_string(), value));
            }
        }
    }
}

fn close(done: XmlElement, open: &mut [XmlElement], root: &mut Option<XmlElement>) {
    match open.last_mut() {
        Some(parent) => parent.children.push(done),
        None => *root = Some(done),
    }
}

/// Writes a document: two spaces a level, one element a line.
pub fn write(root: &XmlElement) -> String {
    let mut out = String::new();
    write_into(root, 0, &mut out);
    out
}

fn write_into(e: &XmlElement, depth: usize, out: &mut String) {
    out.extend(std::iter::repeat_n("  ", depth));
    out.push('<');
    out.push_str(&e.name);
    for (name, value) in &e.attributes {
        out.push(' ');
        out.push_str(name);
        out.push_str("=\"");
        for c in value.chars() {
            match c {
                '<' => out.push_str("&lt;"),
                '>' => out.push_str("&gt;"),
                '&' => out.push_str("&amp;"),
                '"' => out.push_str("&quot;"),
                c if c < ' ' => out.push_str(&format!("&#{};", u32::from(c))),
                c => out.push(c),
            }
        }
        out.push('"');
    }
    if e.children.is_empty() {
        out.push_str("/>\n");
        return;
    }
    out.push_str(">\n");
    for child in &e.children {
        write_into(child, depth + 1, out);
    }
    out.extend(std::iter::repeat_n("  ", depth));
    out.push_str("</");
    out.push_str(&e.name);
    out.push_str(">\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SMALL: &str = include_str!("testdata/topo_4p1h.xml");

    #[test]
    fn unknown_attributes_and_escapes_survive() {
        let text = "<?xml version='1.0'?><!DOCTYPE s><a odd='&lt;&amp;&quot;&#x41;&#10;'><!-- c --><b/></a>";
        let first = read(text).unwrap();
        assert_eq!(first.get("odd"), Some("<&\"A\n"));
        assert_eq!(first.children, vec![XmlElement::new("b")]);
        let once = write(&first);
        assert_eq!(read(&once).unwrap(), first);
        assert_eq!(write(&read(&once).unwrap()), once);
    }

    #[test]
    fn broken_documents_name_their_line() {
        for (text, line) in [
            ("", 1),
            ("<a>\n<b>\n</a>", 3),
            ("<a/>\n<b/>", 2),
            ("<a\n\nx=1/>", 3),
            ("<a x='1' x='2'/>", 1),
            ("<a>\ntext</a>", 2),
            ("<a x='&nope;'/>", 1),
            ("<a x='&#0;'/>", 1),
            ("<!-- open", 1),
            ("</a>", 1),
            ("<a", 1),
            ("<a b", 1),
            ("<a b=\"", 1),
            ("<1/>", 1),
        ] {
            match read(text) {
                Err(XmlError::Syntax { line: l, .. }) => assert_eq!(l, line, "{text:?}"),
                other => panic!("{text:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn limits_hold() {
        let deep = "<a>".repeat(MAX_XML_DEPTH + 1);
        assert!(matches!(read(&deep), Err(XmlError::Limit { what: "nested elements", .. })));
        let wide = format!("<a>{}</a>", "<b/>".repeat(MAX_XML_NODES));
        assert!(matches!(read(&wide), Err(XmlError::Limit { what: "elements", .. })));
        let long = format!("<a x='{}'/>", "y".repeat(MAX_XML_TEXT + 1));
        assert!(matches!(read(&long), Err(XmlError::Limit { .. })));
        let many: String = (0..=MAX_XML_ATTRIBUTES).map(|i| format!(" a{i}=''")).collect();
        assert!(matches!(read(&format!("<a{many}/>")), Err(XmlError::Limit { .. })));
        let big = " ".repeat(MAX_XML_BYTES + 1);
        assert!(matches!(read(&big), Err(XmlError::Limit { what: "bytes", .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn mutated_documents_never_panic(
            edits in prop::collection::vec((0usize..SMALL.len(), any::<u8>(), 0u8..3), 1..12)
        ) {
            let mut bytes = SMALL.as_bytes().to_vec();
            for (at, byte, kind) in edits {
                let at = at % bytes.len().max(1);
                match kind {
                    0 => bytes[at] = byte,
                    1 => { bytes.remove(at); }
                    _ => bytes.insert(at, byte),
                }
            }
            let text = String::from_utf8_lossy(&bytes);
            if let Ok(root) = read(&text) {
                let once = write(&root);
                prop_assert_eq!(&read(&once).unwrap(), &root);
                // A document that still parses must be judged without a panic too.
                let _ = crate::topo::System::from_document(&text, crate::topo::MachineFacts::default(), true);
            }
        }

        #[test]
        fn arbitrary_text_never_panics(text in "\\PC{0,80}|[<>/!?&;='\" a-z\\-]{0,120}") {
            let _ = read(&text);
        }
    }
}
