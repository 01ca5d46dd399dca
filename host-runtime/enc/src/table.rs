//! The choice of an algorithm: the user's word, a measured table, the built-in rule.
//!
//! A [`Table`] is what `wccl bench --tune` measures and writes, and what `WCCL_TUNE_FILE` names. It is text, one row a line,
//! and the first row that fits decides:
//!
//! ```text
//! wccl-tune 1
//! # collective  memory  ranks  up to  algorithm
//! all_reduce    hbm     2      8K     one-hop
//! all_reduce    hbm     2-4    *      mesh
//! *             host    *      *      staged
//! ```
//!
//! The first line that is neither empty nor a comment (`#`) is the format and its version. *collective* is a name of
//! [`Op`], *memory* is `hbm` (device memory) or `host` (private memory of the process), *ranks* is `N`, `N-M` or `N-*`, *up
//! to* is the largest contribution of a rank ([`Call::contribution`]) in bytes, with K, M, G as powers of 1024; `*` is any.
//! A row that an earlier one covers would never be used, so it is an error. A row whose algorithm does not serve a call
//! is passed over for that call: the built-in rule decides, not a later row.
//!
//! What decides, in this order ([`Criteria::decide`]): an algorithm that is forced (`WCCL_ALGO`), where it serves; an
//! explicit `WCCL_ONE_HOP_MAX`, below which all goes in one hop and above which no row can say so; the table; the
//! built-in rule [`choose`], whose words as a table are [`Table::builtin`].
//!
//! All ranks must decide alike. The digest of the table is part of what ranks compare when they meet, and the op header
//! carries the algorithm. A table is built once and then only read; [`Criteria::decide`] allocates nothing.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use hw_bridge::call::Op;
use hw_bridge::limits::LARGE_SLOT_BYTES;
use hw_bridge::os::shown::one_line;

use super::{Algorithm, Call, Lists, choose, direct_above, one_hop_limit, serves};

/// The word that begins a table.
const FORMAT: &str = "wccl-tune";
/// The version of the format.
const VERSION: &str = "1";
/// Bytes of the text of a table.
pub const MAX_TABLE_BYTES: usize = 1 << 20;
/// Rows of a table: each is compared with all before it when it is read.
pub const MAX_TABLE_ROWS: usize = 2048;

/// Where buffers lie, as far as the choice depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Memory {
    /// Device memory, which all ranks of the server reach.
    Hbm,
    /// Private memory of each process.
    Host,
}

impl Memory {
    /// Both.
    pub const ALL: [Memory; 2] = [Memory::Hbm, Memory::Host];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Memory::Hbm => "hbm",
            Memory::Host => "host",
        }
    }
}

/// One row; `None` and the largest number stand for "any".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The collective.
    pub op: Option<Op>,
    /// Where the buffers lie.
    pub memory: Option<Memory>,
    /// Fewest and most ranks, 1 or more; `u32::MAX` for no end.
    pub ranks: (u32, u32),
    /// Largest contribution of a rank, bytes; `u64::MAX` for any.
    pub up_to: u64,
    /// What to use.
    pub algorithm: Algorithm,
}

impl Row {
    /// Whether every call that `other` fits fits this row too.
    fn covers(&self, other: &Row) -> bool {
        (self.op.is_none() || self.op == other.op)
            && (self.memory.is_none() || self.memory == other.memory)
            && self.ranks.0 <= other.ranks.0
            && self.ranks.1 >= other.ranks.1
            && self.up_to >= other.up_to
    }

    fn words(&self) -> [String; 5] {
        let ranks = match self.ranks {
            (1, u32::MAX) => "*".into(),
            (from, u32::MAX) => format!("{from}-*"),
            (from, to) if from == to => from.to_string(),
            (from, to) => format!("{from}-{to}"),
        };
        [
            self.op.map_or("*", Op::name).into(),
            self.memory.map_or("*", Memory::name).into(),
            ranks,
            if self.up_to == u64::MAX { "*".into() } else { short(self.up_to) },
            self.algorithm.name().into(),
        ]
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [op, memory, ranks, up_to, algorithm] = self.words();
        write!(f, "{op:<16} {memory:<7} {ranks:<7} {up_to:<8} {algorithm}")
    }
}

/// Why a table cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The file cannot be read.
    #[error("the choice table {} cannot be read: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file's line makes no sense.
    #[error("the choice table {} cannot be used: {reason}", path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// What is wrong with its text.
        reason: Box<TableError>,
    },
    /// A line makes no sense.
    #[error("line {line}: {what}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong and what is expected.
        what: String,
    },
    /// A row given by a program makes no sense.
    #[error("row {row}: {what}")]
    Row {
        /// Counted from 1.
        row: usize,
        /// What is wrong and what is expected.
        what: String,
    },
    /// More than a table may be.
    #[error("it is larger than a table may be ({most} {unit})")]
    TooLarge {
        /// The limit.
        most: u64,
        /// Of what.
        unit: &'static str,
    },
}

/// A row's place, ranks, size and algorithm: what a look-up reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    row: u32,
    ranks: (u32, u32),
    up_to: u64,
    algorithm: Algorithm,
}

/// Rows, the first that fits decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    rows: Vec<Row>,
    /// Rows of each (collective, memory), at `op * 2 + memory`: a look-up in the hot path reads few.
    index: Vec<Vec<Entry>>,
    digest: u32,
}

/// A wrong row, and an earlier one that is in its way.
type Culprit = (usize, Option<usize>);

impl Table {
    /// A table of these rows.
    ///
    /// # Errors
    /// [`TableError::Row`] for a row that makes no sense or is never reached, [`TableError::TooLarge`].
    pub fn new(rows: Vec<Row>) -> Result<Table, TableError> {
        Table::checked(rows).map_err(|(e, _)| e)
    }

    /// As [`Table::new`]; an error comes with the row it is about, and an earlier one that is in its way.
    fn checked(rows: Vec<Row>) -> Result<Table, (TableError, Option<Culprit>)> {
        if rows.len() > MAX_TABLE_ROWS {
            return Err((TableError::TooLarge { most: MAX_TABLE_ROWS as u64, unit: "rows" }, None));
        }
        for (i, row) in rows.iter().enumerate() {
            let wrong = |what: String, earlier| Err((TableError::Row { row: i + 1, what }, Some((i, earlier))));
            let (from, to) = row.ranks;
            if from == 0 || from > to {
                return wrong(
                    format!("ranks {from}-{to} are none; `N`, `N-M` or `N-*` with 1 <= N <= M is expected"),
                    None,
                );
            }
            if row.op == Some(Op::Barrier) {
                return wrong("a barrier moves nothing, so there is nothing to choose; remove the row".into(), None);
            }
            if let Some(earlier) = rows[..i].iter().position(|e| e.covers(row)) {
                let what = format!("never used, row {} fits all it fits; move it up or remove it", earlier + 1);
                return wrong(what, Some(earlier));
            }
        }
        Ok(Table::indexed(rows))
    }

    /// The table of rows that were checked.
    fn indexed(rows: Vec<Row>) -> Table {
        let places = Op::ALL.iter().map(|op| *op as usize + 1).max().unwrap_or(0) * 2;
        let mut index = vec![Vec::new(); places];
        for (i, row) in rows.iter().enumerate() {
            let entry = Entry { row: i as u32, ranks: row.ranks, up_to: row.up_to, algorithm: row.algorithm };
            for op in Op::ALL.into_iter().filter(|op| row.op.is_none_or(|o| o == *op)) {
                for memory in Memory::ALL.into_iter().filter(|m| row.memory.is_none_or(|o| o == *m)) {
                    index[op as usize * 2 + memory as usize].push(entry);
                }
            }
        }
        let mut table = Table { rows, index, digest: 0 };
        // FNV-1a over the text; 0 stands for "no table".
        let text = table.to_string();
        let digest = text.bytes().fold(0x811c_9dc5u32, |d, b| (d ^ u32::from(b)).wrapping_mul(16_777_619));
        table.digest = digest.max(1);
        table
    }

    /// The built-in rule as a table: one hop as far as it pays, then the mesh, or for private memory staging and direct reads. Of
    /// each memory and number of ranks, first the collectives that differ from the others.
    pub fn builtin() -> Table {
        let mut rows = Vec::new();
        for (memory, then) in [(Memory::Host, Algorithm::Staged), (Memory::Hbm, Algorithm::Mesh)] {
            for ranks in [(1, 2), (3, u32::MAX)] {
                let few = ranks.1 == 2;
                // Up to which size, and by what.
                let sizes = |op| {
                    let one_hop = one_hop_limit(op, memory == Memory::Host, few);
                    match direct_above(op, few).filter(|_| memory == Memory::Host) {
                        None => vec![(one_hop, Algorithm::OneHop), (u64::MAX, then)],
                        Some(above) => {
                            let mut all = vec![(one_hop.min(above), Algorithm::OneHop)];
                            all.extend((one_hop < above).then_some((above, then)));
                            all.push((u64::MAX, Algorithm::Direct));
                            all
                        }
                    }
                };
                let row = |op, (up_to, algorithm)| Row { op, memory: Some(memory), ranks, up_to, algorithm };
                let others = sizes(Op::AllReduce);
                for op in Op::ALL.into_iter().filter(|op| sizes(*op) != others) {
                    rows.extend(sizes(op).into_iter().map(|size| row(Some(op), size)));
                }
                rows.extend(others.into_iter().map(|size| row(None, size)));
            }
        }
        Table::indexed(rows)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`TableError::File`], [`TableError::In`].
    pub fn read(path: &Path) -> Result<Table, TableError> {
        let file = |source| TableError::File { path: path.into(), source };
        let inside = |reason| TableError::In { path: path.into(), reason: Box::new(reason) };
        let mut bytes = Vec::new();
        // One byte more than allowed, so that too much is noticed and never all read.
        let from = std::fs::File::open(path).map_err(file)?;
        from.take(MAX_TABLE_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(file)?;
        Table::parse(&bytes).map_err(inside)
    }

    /// Reads the text of a table.
    ///
    /// # Errors
    /// [`TableError::Line`] says what was expected, [`TableError::TooLarge`].
    pub fn parse(bytes: &[u8]) -> Result<Table, TableError> {
        if bytes.len() > MAX_TABLE_BYTES {
            return Err(TableError::TooLarge { most: MAX_TABLE_BYTES as u64, unit: "bytes" });
        }
        let text = std::str::from_utf8(bytes).map_err(|e| {
            let line = bytes[..e.valid_up_to()].iter().filter(|b| **b == b'\n').count() + 1;
            TableError::Line { line, what: "not text in UTF-8; a table is plain text".into() }
        })?;
        let lines = text.lines().enumerate().map(|(i, l)| (i + 1, l.split('#').next().unwrap_or_default().trim()));
        let mut lines = lines.filter(|(_, l)| !l.is_empty());
        let (line, first) = lines
            .next()
            .ok_or(TableError::Line { line: 1, what: format!("`{FORMAT} {VERSION}` is expected first") })?;
        match first.split_whitespace().collect::<Vec<_>>()[..] {
            [FORMAT, VERSION] => {}
            [FORMAT, other] => {
                let what = format!(
                    "version {} of the format, this program reads {VERSION}; measure again with `wccl bench --tune`",
                    shown(other)
                );
                return Err(TableError::Line { line, what });
            }
            _ => {
                let what = format!("`{}` where `{FORMAT} {VERSION}` is expected first", shown(first));
                return Err(TableError::Line { line, what });
            }
        }
        let (mut rows, mut at) = (Vec::new(), Vec::new());
        for (line, text) in lines {
            if rows.len() >= MAX_TABLE_ROWS {
                return Err(TableError::TooLarge { most: MAX_TABLE_ROWS as u64, unit: "rows" });
            }
            rows.push(row(text).map_err(|what| TableError::Line { line, what })?);
            at.push(line);
        }
        Table::checked(rows).map_err(|(e, about)| match (e, about) {
            (TableError::Row { .. }, Some((i, Some(earlier)))) => {
                let what = format!("never used, line {} fits all it fits; move it up or remove it", at[earlier]);
                TableError::Line { line: at[i], what }
            }
            (TableError::Row { what, .. }, Some((i, None))) => TableError::Line { line: at[i], what },
            (e, _) => e,
        })
    }

    /// The rows, in order.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// A number that tables with the same rows share; never 0.
    pub fn digest(&self) -> u32 {
        self.digest
    }

    /// The first row that fits, and its place.
    #[inline]
    fn find(&self, call: &Call, n: usize, bytes: u64) -> Option<(u32, Algorithm)> {
        let memory = if call.private { Memory::Host } else { Memory::Hbm };
        let n = n as u32;
        let entries = self.index.get(call.op as usize * 2 + memory as usize)?;
        let found = entries.iter().find(|e| e.ranks.0 <= n && n <= e.ranks.1 && bytes <= e.up_to)?;
        Some((found.row, found.algorithm))
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{FORMAT} {VERSION}")?;
        writeln!(f, "# {:<14} {:<7} {:<7} {:<8} algorithm", "collective", "memory", "ranks", "up to")?;
        self.rows.iter().try_for_each(|row| writeln!(f, "{row}"))
    }
}

impl FromStr for Table {
    type Err = TableError;
    fn from_str(text: &str) -> Result<Table, TableError> {
        Table::parse(text.as_bytes())
    }
}

/// A word of a file as it may be shown: short, and without control characters.
fn shown(word: &str) -> String {
    one_line(&word.chars().take(40).collect::<String>())
}

/// Reads a row, or says what is expected.
fn row(text: &str) -> Result<Row, String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [op, memory, ranks, up_to, algorithm] = words[..] else {
        return Err(format!("{} words where 5 are expected: collective, memory, ranks, up to, algorithm", words.len()));
    };
    let names = || Op::ALL.iter().map(|o| o.name()).filter(|n| *n != Op::Barrier.name()).collect::<Vec<_>>().join(", ");
    let op =
        match op {
            "*" => None,
            word => Some(Op::ALL.into_iter().find(|o| o.name() == word).ok_or_else(|| {
                format!("`{}` is not a collective; one of {} or * is expected", shown(word), names())
            })?),
        };
    let memory = match memory {
        "*" => None,
        word => Some(
            Memory::ALL
                .into_iter()
                .find(|m| m.name() == word)
                .ok_or_else(|| format!("`{}` is not a memory; hbm, host or * is expected", shown(word)))?,
        ),
    };
    let bad_ranks =
        || format!("`{}` are no ranks; `N`, `N-M` or `N-*` with 1 <= N <= M, or * is expected", shown(ranks));
    let one = |word: &str| digits(word).and_then(|n| u32::try_from(n).ok()).ok_or_else(bad_ranks);
    let ranks = match ranks.split_once('-') {
        None if ranks == "*" => (1, u32::MAX),
        None => (one(ranks)?, one(ranks)?),
        Some((from, "*")) => (one(from)?, u32::MAX),
        Some((from, to)) => (one(from)?, one(to)?),
    };
    let up_to = match up_to {
        "*" => u64::MAX,
        word => size(word)
            .ok_or_else(|| format!("`{}` is not a size; bytes like 8, 64K or 2M, or * is expected", shown(word)))?,
    };
    let algorithm = algorithm.parse::<Algorithm>().map_err(|_| {
        let names = Algorithm::ALL.map(Algorithm::name).join(", ");
        format!("`{}` is not an algorithm; one of {names} is expected", shown(algorithm))
    })?;
    Ok(Row { op, memory, ranks, up_to, algorithm })
}

/// Digits alone: no sign, no space.
fn digits(word: &str) -> Option<u64> {
    if word.bytes().all(|b| b.is_ascii_digit()) { word.parse().ok() } else { None }
}

fn size(word: &str) -> Option<u64> {
    let (number, shift) = match word.as_bytes().last()? {
        b'K' => (&word[..word.len() - 1], 10),
        b'M' => (&word[..word.len() - 1], 20),
        b'G' => (&word[..word.len() - 1], 30),
        _ => (word, 0),
    };
    digits(number)?.checked_mul(1 << shift)
}

/// A size in the shortest exact form.
fn short(bytes: u64) -> String {
    for (shift, unit) in [(30, 'G'), (20, 'M'), (10, 'K')] {
        if bytes >= 1 << shift && bytes % (1 << shift) == 0 {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

impl Call {
    /// Bytes of a rank's contribution, which the choice by size goes by: its whole input, or the vector where only some
    /// ranks have one. `None` beyond 2^64.
    pub fn contribution(&self, n: usize) -> Option<u64> {
        self.slot_bytes_with(Lists::None, n)
    }
}

/// What decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Nothing moves: only arrivals are told.
    NothingMoves,
    /// The user forces it.
    Forced,
    /// It is within the threshold that the user set.
    OneHopMax,
    /// A row of the table, counted from 0.
    Row(u32),
    /// The built-in rule.
    Builtin,
}

/// A choice and its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// What is used.
    pub algorithm: Algorithm,
    /// What decided.
    pub why: Why,
    /// What would have decided, but named an algorithm that does not serve this call.
    pub passed_over: Option<Why>,
}

/// All that the choice depends on beside the call. The same on all ranks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Criteria<'a> {
    /// Used wherever it serves.
    pub forced: Option<Algorithm>,
    /// Threshold of one hop, bytes of a rank's contribution, if the user set one.
    pub one_hop_max: Option<u64>,
    /// The table, if there is one.
    pub table: Option<&'a Table>,
    /// Whether all ranks can read one another's private memory.
    pub direct: bool,
}

impl Criteria<'_> {
    /// Whether `algorithm` can be used for `call` on `n` ranks.
    pub fn serves(&self, algorithm: Algorithm, call: &Call, n: usize) -> bool {
        serves(algorithm, call, n) && (algorithm != Algorithm::Direct || self.direct)
    }

    /// Algorithms that can, in the order of their numbers.
    pub fn candidates(&self, call: &Call, n: usize) -> impl Iterator<Item = Algorithm> {
        Algorithm::ALL.into_iter().filter(move |a| self.serves(*a, call, n))
    }

    /// Chooses for `call` on `n` ranks.
    pub fn decide(&self, call: &Call, n: usize) -> Choice {
        if call.op == Op::Barrier || call.count == 0 {
            let algorithm = choose(call, n, None, None, self.direct);
            return Choice { algorithm, why: Why::NothingMoves, passed_over: None };
        }
        let mut passed_over = None;
        if let Some(algorithm) = self.forced {
            if self.serves(algorithm, call, n) {
                return Choice { algorithm, why: Why::Forced, passed_over };
            }
            passed_over = Some(Why::Forced);
        }
        // A size beyond 2^64 fits the largest rows; the run is refused by its buffers.
        let bytes = call.contribution(n).unwrap_or(u64::MAX);
        if self.one_hop_max.is_some_and(|most| bytes <= most.min(LARGE_SLOT_BYTES as u64)) {
            return Choice { algorithm: Algorithm::OneHop, why: Why::OneHopMax, passed_over };
        }
        if let Some((row, algorithm)) = self.table.and_then(|t| t.find(call, n, bytes)) {
            let beyond = algorithm == Algorithm::OneHop && self.one_hop_max.is_some();
            if !beyond && self.serves(algorithm, call, n) {
                return Choice { algorithm, why: Why::Row(row), passed_over };
            }
            passed_over.get_or_insert(Why::Row(row));
        }
        let algorithm = choose(call, n, None, self.one_hop_max, self.direct);
        Choice { algorithm, why: Why::Builtin, passed_over }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hw_bridge::call::{DataType, ReduceOp};
    use proptest::prelude::*;

    fn call(op: Op, count: u64, private: bool) -> Call {
        let (dtype, redop) = (DataType::Uint8, ReduceOp::Sum);
        Call { op, dtype, redop, count, root: 0, dst: Some(0), src: Some(0), private, in_place: false }
    }

    fn table(text: &str) -> Table {
        text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    fn refused(text: &str) -> String {
        text.parse::<Table>().expect_err(text).to_string()
    }

    #[test]
    fn the_built_in_table_says_what_the_built_in_rule_does() {
        let builtin = Table::builtin();
        assert_eq!(Table::new(builtin.rows().to_vec()).unwrap(), builtin);
        let with = Criteria { table: Some(&builtin), ..Criteria::default() };
        for op in Op::ALL {
            for n in [1, 2, 3, 4, 16, 64] {
                for count in [
                    0,
                    1,
                    127,
                    128,
                    129,
                    255,
                    256,
                    257,
                    2047,
                    2048,
                    2049,
                    4096,
                    8191,
                    8192,
                    8193,
                    16_384,
                    16_385,
                    65_536,
                    65_537,
                    131_073,
                    262_144,
                    262_145,
                    1 << 20,
                    u64::MAX / 2,
                ] {
                    for private in [false, true] {
                        let c = call(op, count, private);
                        for direct in [false, true] {
                            let plain = Criteria { direct, ..Criteria::default() }.decide(&c, n);
                            let by_table = Criteria { direct, ..with }.decide(&c, n);
                            assert_eq!(plain.algorithm, choose(&c, n, None, None, direct), "{c:?} on {n}");
                            assert_eq!(by_table.algorithm, plain.algorithm, "{c:?} on {n}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_first_row_that_fits_decides() {
        let t = table(
            "wccl-tune 1\n\n# a comment\nall_reduce hbm 2 4K one-hop # small\nall_reduce hbm 2-4 1M ring\n\
             all_reduce * 8-* * mesh\n* hbm * 100 mesh\n",
        );
        let criteria = Criteria { table: Some(&t), ..Criteria::default() };
        let of = |count, private, n| {
            let d = criteria.decide(&call(Op::AllReduce, count, private), n);
            (d.algorithm, d.why, d.passed_over)
        };
        assert_eq!(of(4096, false, 2), (Algorithm::OneHop, Why::Row(0), None));
        assert_eq!(of(4097, false, 2), (Algorithm::Ring, Why::Row(1), None));
        assert_eq!(of(8, false, 4), (Algorithm::Ring, Why::Row(1), None));
        assert_eq!(of((1 << 20) + 1, false, 4), (Algorithm::Mesh, Why::Builtin, None));
        assert_eq!(of(8, false, 5), (Algorithm::Mesh, Why::Row(3), None));
        assert_eq!(of(8, false, 64), (Algorithm::Mesh, Why::Row(2), None));
        // A row whose algorithm does not serve is passed over, not replaced by a later row.
        assert_eq!(of(1 << 20, true, 8), (Algorithm::Staged, Why::Builtin, Some(Why::Row(2))));
        assert_eq!(of(8, true, 8), (Algorithm::OneHop, Why::Builtin, Some(Why::Row(2))));
        let d = criteria.decide(&call(Op::Barrier, 0, false), 2);
        assert_eq!((d.algorithm, d.why), (Algorithm::OneHop, Why::NothingMoves));
    }

    #[test]
    fn the_users_word_goes_before_the_table() {
        let t = table("wccl-tune 1\n* hbm * 8K one-hop\n* hbm * * ring\n");
        let c = |count| call(Op::AllReduce, count, false);
        let p = Criteria { table: Some(&t), forced: Some(Algorithm::Mesh), ..Criteria::default() };
        assert_eq!(p.decide(&c(8), 4).why, Why::Forced);
        let staged = Criteria { forced: Some(Algorithm::Staged), ..p }.decide(&c(8), 4);
        assert_eq!(staged, Choice { algorithm: Algorithm::OneHop, why: Why::Row(0), passed_over: Some(Why::Forced) });
        // An explicit threshold holds both ways: below it all goes in one hop, above it nothing does.
        let p = Criteria { table: Some(&t), one_hop_max: Some(100), ..Criteria::default() };
        assert_eq!(p.decide(&c(100), 4).why, Why::OneHopMax);
        let above = p.decide(&c(101), 4);
        assert_eq!(above, Choice { algorithm: Algorithm::Mesh, why: Why::Builtin, passed_over: Some(Why::Row(0)) });
        assert_eq!(p.decide(&c(8 * 1024 + 1), 4).why, Why::Row(1));
        let none = Criteria { one_hop_max: Some(0), ..Criteria::default() };
        assert_eq!(none.decide(&c(1), 4).algorithm, Algorithm::Mesh);
    }

    #[test]
    fn errors_name_the_line_and_what_is_expected() {
        for (text, words) in [
            ("", "line 1: `wccl-tune 1` is expected first"),
            ("\n# only a comment\n", "`wccl-tune 1` is expected first"),
            ("# x\nall_reduce hbm 2 * mesh", "line 2: `all_reduce hbm 2 * mesh` where `wccl-tune 1`"),
            ("wccl-tune 2\n", "line 1: version 2 of the format, this program reads 1"),
            ("wccl-tune 1\nall_reduce hbm 2 mesh\n", "line 2: 4 words where 5 are expected: collective, memory"),
            ("wccl-tune 1\n\nallreduce hbm 2 * mesh\n", "line 3: `allreduce` is not a collective; one of all_reduce, "),
            ("wccl-tune 1\n* dram 2 * mesh\n", "`dram` is not a memory; hbm, host or * is expected"),
            ("wccl-tune 1\n* hbm two * mesh\n", "`two` are no ranks"),
            ("wccl-tune 1\n* hbm +2 * mesh\n", "`+2` are no ranks"),
            ("wccl-tune 1\n* hbm 0 * mesh\n", "line 2: ranks 0-0 are none"),
            ("wccl-tune 1\n* hbm 4-2 * mesh\n", "line 2: ranks 4-2 are none"),
            ("wccl-tune 1\n* hbm 2 8k mesh\n", "`8k` is not a size; bytes like 8, 64K or 2M"),
            ("wccl-tune 1\n* hbm 2 99999999999G mesh\n", "is not a size"),
            ("wccl-tune 1\n* hbm 2 * fast\n", "`fast` is not an algorithm; one of one-hop, mesh, "),
            ("wccl-tune 1\nbarrier hbm 2 * mesh\n", "line 2: a barrier moves nothing"),
            ("wccl-tune 1\n* hbm * 1M mesh\n#\nall_gather hbm 2-4 64K ring\n", "line 4: never used, line 2 fits all"),
        ] {
            let said = refused(text);
            assert!(said.contains(words), "{text:?}: {said}");
        }
        let long = format!("wccl-tune 1\n* hbm 2 * {}\u{7}\n", "x".repeat(1000));
        assert!(refused(&long).len() < 200);
        assert!(Table::parse(b"wccl-tune 1\n\xff").unwrap_err().to_string().contains("line 2: not text in UTF-8"));
        assert!(Table::parse(&vec![b'#'; MAX_TABLE_BYTES + 1]).unwrap_err().to_string().contains("larger"));
        let many = (0..=MAX_TABLE_ROWS as u64).map(|b| format!("* * * {b} mesh\n")).collect::<String>();
        assert!(refused(&format!("wccl-tune 1\n{many}")).contains("rows"));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let e = Table::read(Path::new("/no/such/table")).unwrap_err().to_string();
        assert!(e.contains("/no/such/table") && e.contains("cannot be read"), "{e}");
        let path = std::env::temp_dir().join(format!("wccl-table-{}", std::process::id()));
        std::fs::write(&path, "wccl-tune 1\n* hbm 2 * quick\n").unwrap();
        let e = Table::read(&path).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(e.contains("wccl-table-") && e.contains("line 2: `quick`"), "{e}");
    }

    #[test]
    fn digests_differ_where_rows_do() {
        let a = table("wccl-tune 1\n* hbm 2 8K mesh\n");
        let same = table("# other words\nwccl-tune   1\n*  hbm 2-2 8192 mesh");
        let other = table("wccl-tune 1\n* hbm 2 8K ring\n");
        assert_eq!(a, same);
        assert_eq!(a.digest(), same.digest());
        assert!(a.digest() != other.digest() && a.digest() != 0);
    }

    #[test]
    fn candidates_are_those_that_serve() {
        let criteria = |direct| Criteria { direct, ..Criteria::default() };
        let names = |c: Call, n| criteria(true).candidates(&c, n).map(Algorithm::name).collect::<Vec<_>>();
        let hbm = names(call(Op::AllReduce, 64, false), 4);
        assert!(hbm.starts_with(&["one-hop", "mesh", "ring"]) && !hbm.contains(&"staged"), "{hbm:?}");
        assert_eq!(names(call(Op::AllReduce, 64, true), 4), ["one-hop", "staged"]);
        assert_eq!(names(call(Op::Broadcast, 64, true), 4), ["one-hop", "staged", "direct"]);
        assert!(!criteria(false).candidates(&call(Op::Broadcast, 64, true), 4).any(|a| a == Algorithm::Direct));
        assert!(!names(call(Op::AllReduce, 1 << 20, false), 4).contains(&"one-hop"));
    }

    fn any_row() -> impl Strategy<Value = Row> {
        let op = prop::option::of(prop::sample::select(Op::ALL.to_vec()));
        let op = op.prop_map(|op| op.filter(|o| *o != Op::Barrier));
        let memory = prop::option::of(prop::sample::select(Memory::ALL.to_vec()));
        let to = prop_oneof![Just(u32::MAX), 0..100u32];
        let up_to = prop_oneof![Just(u64::MAX), any::<u64>(), (0..64u32).prop_map(|s| 1 << s)];
        let algorithm = prop::sample::select(Algorithm::ALL.to_vec());
        (op, memory, 1..70u32, to, up_to, algorithm).prop_map(|(op, memory, from, to, up_to, algorithm)| {
            let to = if to == u32::MAX { to } else { from + to };
            Row { op, memory, ranks: (from, to), up_to, algorithm }
        })
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(rows in prop::collection::vec(any_row(), 0..40)) {
            // Rows that are never reached are left out: no table holds them.
            let mut kept: Vec<Row> = Vec::new();
            for row in rows {
                if !kept.iter().any(|k| k.covers(&row)) {
                    kept.push(row);
                }
            }
            let t = Table::new(kept).unwrap();
            prop_assert_eq!(Table::parse(t.to_string().as_bytes()).unwrap(), t);
        }

        #[test]
        fn any_bytes_are_a_table_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Table::parse(&bytes);
        }

        #[test]
        fn any_words_are_a_table_or_an_error(
            words in prop::collection::vec("(\\*|[0-9]{1,25}[KMG]?|-|[0-9]+-[0-9*]+|all_reduce|hbm|mesh|\n|#|\u{e9})", 0..60)
        ) {
            let text = format!("wccl-tune 1\n{}", words.join(" "));
            if let Ok(t) = Table::parse(text.as_bytes()) {
                prop_assert_eq!(Table::parse(t.to_string().as_bytes()).unwrap(), t);
            }
        }
    }
}
