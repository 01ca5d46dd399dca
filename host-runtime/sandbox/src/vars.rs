//! Values of environment variables, read the same way by all who read one.
//!
//! A variable whose value is empty or blank counts as unset. One whose bytes cannot be read as what they are meant to be is an
//! error that names it, and never counts as unset: what it would have asked for, such as a policy, must not be left out in
//! silence. A path is any bytes; everything else is text.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::error::Error;

/// A variable of this process that is text; `None` if it is unset.
///
/// # Errors
/// [`Error::Config`] names the variable if it is not UTF-8.
pub fn variable(name: &str) -> Result<Option<String>, Error> {
    text(name, std::env::var_os(name))
}

/// The value of the variable `name` as text; `None` if it is unset.
///
/// # Errors
/// As [`variable`].
pub fn text(name: &str, value: Option<OsString>) -> Result<Option<String>, Error> {
    let text = value.map(OsString::into_string).transpose().map_err(|bytes| {
        let shown = bytes.as_encoded_bytes().escape_ascii();
        Error::Config(format!("{name} is \"{shown}\": text in UTF-8 was expected; correct or unset the variable"))
    })?;
    Ok(text.filter(|t| !t.trim().is_empty()))
}

/// The value of a variable as a path; `None` if it is unset.
pub fn path(value: Option<OsString>) -> Option<PathBuf> {
    value.filter(|v| !v.as_encoded_bytes().trim_ascii().is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn what_is_set_is_read_or_refused_by_name_and_what_is_blank_is_unset() {
        let value = |bytes: &[u8]| Some(OsString::from_vec(bytes.to_vec()));
        assert_eq!(text("A", None).unwrap(), None);
        for blank in [&b""[..], b" ", b" \n"] {
            assert_eq!((text("A", value(blank)).unwrap(), path(value(blank))), (None, None));
        }
        assert_eq!(text("A", value(b" b ")).unwrap().as_deref(), Some(" b "));
        let e = text("WCCL_WAIT", value(b"cpu\xff")).unwrap_err().to_string();
        assert!(e.contains("WCCL_WAIT is \"cpu\\xff\"") && e.contains("UTF-8"), "{e}");
        assert_eq!(path(value(b"/a/\xff")), value(b"/a/\xff").map(PathBuf::from));
    }
}
