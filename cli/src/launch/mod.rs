//! Processes of a group: start, watch, end.
//!
//! | room | owns |
//! |---|---|
//! | `launcher`, `guard` | the group; the ranks' parent, which ends them when the launcher is gone |
//! | `output`, `tree` | what ranks write, tagged; the processes below this one |

pub mod guard;
pub mod launcher;
mod output;
mod tree;
