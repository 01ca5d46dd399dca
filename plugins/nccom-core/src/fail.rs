//! Failures of the library: the status an entry answers and the sentence it logs.

/// NRT_STATUS numbers this library answers with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Code {
    /// 1 NRT_FAILURE
    Failure,
    /// 2 NRT_INVALID
    Invalid,
    /// 3 NRT_INVALID_HANDLE
    InvalidHandle,
    /// 5 NRT_TIMEOUT
    Timeout,
    /// The operation that this call serves has given up, as a host function says by 1200 NRT_EXEC_HW_ERR_COLLECTIVES: no wait
    /// is granted any more. Callers and other ranks are told that it is a time-out.
    Overdue,
    /// 13 NRT_UNINITIALIZED
    Uninitialized,
    /// 14 NRT_CLOSED
    Closed,
    /// What was dialled ended the connection before it had shown that it is of the group, as a host function says by 13
    /// NRT_UNINITIALIZED: nobody of the group may have been there yet. Callers and other ranks are told that it is closed.
    Absent,
    /// Any other number, as a host function gave it.
    Other(u32),
}

impl Code {
    /// The NRT_STATUS number.
    pub fn number(self) -> u32 {
        match self {
            Code::Failure => 1,
            Code::Invalid => 2,
            Code::InvalidHandle => 3,
            Code::Timeout | Code::Overdue => 5,
            Code::Uninitialized => 13,
            Code::Closed | Code::Absent => 14,
            Code::Other(n) => n,
        }
    }

    /// The other end is gone.
    pub fn is_closed(self) -> bool {
        matches!(self, Code::Closed | Code::Absent)
    }

    /// A wait was in vain.
    pub fn is_late(self) -> bool {
        matches!(self, Code::Timeout | Code::Overdue)
    }

    /// The code of a number that a peer sent. Success is no failure, so it counts as the general one.
    pub fn of_number(n: u32) -> Code {
        match n {
            0 | 1 => Code::Failure,
            2 => Code::Invalid,
            3 => Code::InvalidHandle,
            5 => Code::Timeout,
            13 => Code::Uninitialized,
            14 => Code::Closed,
            n => Code::Other(n),
        }
    }
}

/// A failure with its sentence. An empty sentence means the host has already said why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The status.
    pub code: Code,
    /// What failed, where, what was expected, what to do.
    pub text: String,
    /// The sentence of the rank where it began, if that was another: it is handed on as it came.
    pub origin: Option<String>,
    /// The rank that does not come, if that is why; handed on too, so that all ranks know it.
    pub absent: Option<usize>,
}

impl Failure {
    /// A failure.
    pub fn new(code: Code, text: impl Into<String>) -> Failure {
        Failure { code, text: text.into(), origin: None, absent: None }
    }

    /// A failure that began on another rank, whose sentence is `said`.
    pub fn of_peer(code: Code, said: String) -> Failure {
        let text = format!("the bootstrap of the group ended: {said}");
        Failure { code, text, origin: Some(said), absent: None }
    }

    /// Blames rank `rank`, which did not come, unless another is blamed.
    pub fn without(mut self, rank: usize) -> Failure {
        self.absent.get_or_insert(rank);
        self
    }

    /// What other ranks are told.
    pub fn told(&self) -> &str {
        self.origin.as_deref().unwrap_or(&self.text)
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
