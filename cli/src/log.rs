//! How to log.

use std::sync::OnceLock;

/// How to log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For those who collect.
    Json,
}

/// What was asked for; ranks that this program starts are told.
pub static LOG_FORMAT: OnceLock<LogFormat> = OnceLock::new();
