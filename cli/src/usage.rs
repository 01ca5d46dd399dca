//! What is wrong with a command line.

/// The command line makes no sense in a way that only the subcommand can tell: exit code 2.
#[derive(Debug)]
pub struct UsageError(
    /// What is wrong and what to write instead.
    pub String,
);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (--help explains)", self.0)
    }
}

impl std::error::Error for UsageError {}
