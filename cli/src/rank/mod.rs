//! One rank of a demo or a bench.
//!
//! | room | owns |
//! |---|---|
//! | [`member`] | its seat in the group, and what ranks agree on |
//! | [`cores`] | which cores are free for ranks to bind to |
//! | [`collective`] | names, shapes, buffers and calls of the collectives |
//! | [`reference`](mod@reference) | known inputs and the results that must come out, computed without the runtime |
//! | [`load`] | reductions that go on while something else happens, every one verified |
//! | [`measure`] | timing of back-to-back calls, bandwidths |

pub mod collective;
pub mod cores;
pub mod load;
pub mod measure;
pub mod member;
pub mod reference;
