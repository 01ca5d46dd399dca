//! Failures of the library: the status an entry answers and the sentence it logs.

/// NRT_STATUS numbers this library answers with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// 1 NRT_FAILURE
    Failure,
    /// 2 NRT_INVALID
    Invalid,
    /// 3 NRT_INVALID_HANDLE
    InvalidHandle,
    /// 5 NRT_TIMEOUT
    Timeout,
    /// 13 NRT_UNINITIALIZED
    Uninitialized,
    /// 14 NRT_CLOSED
    Closed,
    /// Any other number, as a host function gave it.
    Other(u32),
}

/// A failure with its sentence. An empty sentence means the host has already said why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The status.
    pub code: Code,
    /// What failed, where, what was expected, what to do.
    pub text: String,
}

impl Failure {
    /// A failure.
    pub fn new(code: Code, text: impl Into<String>) -> Failure {
        Failure { code, text: text.into() }
    }

    /// Puts what was being done before the sentence.
    pub fn during(mut self, what: &str) -> Failure {
        self.text = if self.text.is_empty() { what.to_string() } else { format!("{what}: {}", self.text) };
        self
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Shorthand for an invalid argument.
pub fn invalid(text: impl Into<String>) -> Failure {
    Failure::new(Code::Invalid, text)
}
