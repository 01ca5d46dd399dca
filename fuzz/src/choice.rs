//! What decides and what is executed: tables of choices, schedules.

use arbitrary::{Result, Unstructured};
use enc::check::{CallRank, check};
use enc::table::{Criteria, Memory, Table};
use enc::{Algorithm, Call, Lists, Move, compile_with, explain, serves};
use hw_bridge::call::Op;
use hw_bridge::exec::sequencer::{At, Place, Schedule, Step};
use wccl::{DataType, ReduceOp};

/// The text of a table.
pub fn table(data: &[u8]) {
    let Ok(table) = Table::parse(data) else { return };
    assert_eq!(Table::parse(table.to_string().as_bytes()).ok().as_ref(), Some(&table));
    let criteria = Criteria { table: Some(&table), ..Criteria::default() };
    for op in Op::ALL {
        for (n, count) in [(1, 0), (2, 1), (5, 8 << 10), (64, 1 << 40), (64, u64::MAX)] {
            for memory in Memory::ALL {
                let private = memory == Memory::Host;
                let call = Call { op, count, private, ..plain() };
                let choice = criteria.decide(&call, n);
                assert!(count == u64::MAX || serves(choice.algorithm, &call, n), "{call:?} {choice:?}");
            }
        }
    }
}

fn plain() -> Call {
    let (dtype, redop) = (DataType::Fp32, ReduceOp::Sum);
    Call {
        op: Op::Barrier,
        dtype,
        redop,
        count: 0,
        root: 0,
        dst: Some(0),
        src: Some(0),
        private: false,
        in_place: false,
    }
}

/// Ranks of a tried call.
const MOST_RANKS: usize = 4;
/// Bytes up to which real schedules are compiled.
const MOST_BYTES: u64 = 4 << 20;

/// Schedules of all ranks of a call, compiled and then changed, or made up: each is sealed or refused, and what is sealed is
/// proved or refused.
pub fn schedule(data: &[u8]) {
    // The end of the bytes is the end of what is tried.
    let _ = schedules(&mut Unstructured::new(data));
}

/// A list that is owned.
enum List {
    None,
    Numbers(Vec<u64>),
    Pairs(Vec<(usize, usize)>),
    Moves(Vec<Move>),
}

impl List {
    /// Lists as a communicator lets them pass: of the right lengths, with ranks that exist.
    fn of(
        u: &mut Unstructured<'_>,
        op: Op,
        n: usize,
        number: fn(&mut Unstructured<'_>) -> Result<u64>,
    ) -> Result<List> {
        Ok(match op {
            Op::AllGatherV | Op::ReduceScatterV => List::Numbers((0..n).map(|_| number(u)).collect::<Result<_>>()?),
            Op::AllToAllV => List::Numbers((0..n * n).map(|_| number(u)).collect::<Result<_>>()?),
            Op::Permute => {
                let shift = u.int_in_range(0..=n)?;
                let some: u8 = u.arbitrary()?;
                List::Pairs((0..n).filter(|r| some >> r & 1 == 1).map(|r| (r, (r + shift) % n)).collect())
            }
            Op::Group => {
                let mut moves = Vec::new();
                for _ in 0..u.int_in_range(0..=6)? {
                    let (src, dst) = (u.choose_index(n)?, u.choose_index(n)?);
                    moves.push(Move { src, src_at: number(u)?, dst, dst_at: number(u)?, bytes: number(u)? });
                }
                List::Moves(moves)
            }
            _ => List::None,
        })
    }

    fn view(&self, op: Op) -> Lists<'_> {
        match self {
            List::None => Lists::None,
            List::Numbers(x) if op == Op::AllToAllV => Lists::Matrix(x),
            List::Numbers(x) => Lists::Counts(x),
            List::Pairs(x) => Lists::Pairs(x),
            List::Moves(x) => Lists::Moves(x),
        }
    }

    /// Elements of the call in all, where the list has them.
    fn total(&self) -> Option<u64> {
        let sum = |mut of: Box<dyn Iterator<Item = u64> + '_>| of.try_fold(0u64, u64::checked_add);
        match self {
            List::Numbers(x) => sum(Box::new(x.iter().copied())),
            List::Moves(x) => sum(Box::new(x.iter().map(|m| m.bytes))),
            List::None | List::Pairs(_) => None,
        }
    }
}

fn moderate(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=3)? {
        0 => u64::from(u.arbitrary::<u8>()? % 9),
        1 => u64::from(u.arbitrary::<u16>()? % 5000),
        _ => u64::from(u.arbitrary::<u32>()? % 300_000),
    })
}

fn any_number(u: &mut Unstructured<'_>) -> Result<u64> {
    if u.ratio(1, 4)? { Ok(u64::MAX >> u.int_in_range(0..=63)?) } else { moderate(u) }
}

fn schedules(u: &mut Unstructured<'_>) -> Result<()> {
    let n = u.int_in_range(1..=MOST_RANKS)?;
    let op = *u.choose(&Op::ALL)?;
    // Real schedules have one step for each piece, so that a length without bound would make too many.
    let real = u.ratio(3, 4)?;
    let number = if real { moderate } else { any_number };
    let list = List::of(u, op, n, number)?;
    let dtype = if op == Op::Group { DataType::Uint8 } else { *u.choose(&DataType::ALL)? };
    let reductions: Vec<ReduceOp> = ReduceOp::ALL.into_iter().chain([ReduceOp::PreMulSum]).collect();
    let count = match list.total() {
        Some(total) => total,
        None if matches!(list, List::Numbers(_) | List::Moves(_)) => return Ok(()),
        None => number(u)?,
    };
    let call = Call {
        op,
        dtype,
        redop: *u.choose(&reductions)?,
        count,
        root: u.choose_index(n)?,
        dst: None,
        src: None,
        private: u.arbitrary()?,
        in_place: u.arbitrary()?,
    };
    let calls: Vec<Call> = (0..n)
        .map(|rank| {
            let next = |by| Some((rank + by) % n).filter(|_| op == Op::SendRecv);
            Call { dst: next(1), src: next(n - 1), ..call }
        })
        .collect();
    let lists = list.view(op);
    let algorithm = *u.choose(&Algorithm::ALL)?;
    let ring: Vec<usize> = (0..n).collect();
    let fits = call.bytes().is_some_and(|b| b <= MOST_BYTES)
        && serves(algorithm, &call, n)
        && !(matches!(op, Op::AllGatherV | Op::ReduceScatterV | Op::AllToAllV | Op::Group)
            && algorithm == Algorithm::OneHop)
        && (call.redop != ReduceOp::PreMulSum || dtype.is_float());
    let mut all = Vec::new();
    for (rank, call) in calls.iter().enumerate() {
        let mut s = match real && fits {
            true => match compile_with(call, lists, rank, n, algorithm, std::slice::from_ref(&ring)) {
                Ok(s) => Schedule::clone(&s),
                Err(e) => panic!("{call:?} on rank {rank} of {n} by {}: {e}", algorithm.name()),
            },
            false => made_up(u, call, lists, rank, n, algorithm)?,
        };
        for _ in 0..u.int_in_range(0..=3)? {
            change(u, &mut s, n)?;
        }
        all.push(s);
    }
    let mut sealed = Vec::new();
    for (rank, s) in all.into_iter().enumerate() {
        match s.seal(rank, n) {
            Ok(s) => sealed.push(s),
            Err(why) => {
                assert!(!why.to_string().is_empty());
                return Ok(());
            }
        }
    }
    for s in &sealed {
        inside(s);
        assert!(!explain(s).to_string().is_empty());
    }
    let members: Vec<CallRank<'_>> =
        calls.iter().zip(&sealed).map(|(c, s)| CallRank { call: *c, schedule: s }).collect();
    if let Err(flaw) = check(&members, lists) {
        assert!(!flaw.to_string().is_empty());
    }
    Ok(())
}

/// Nothing that is sealed writes where only others may, or beyond what is its own.
fn inside(s: &Schedule) {
    let writes = |at: At, len: u64| match at.0 {
        Place::Out => assert!(at.1.checked_add(len).is_some_and(|end| end <= s.out_bytes), "{at:?} {len}"),
        Place::PeerOut(_) => assert!(at.1.checked_add(len).is_some_and(|end| end <= s.peer_out_bytes), "{at:?} {len}"),
        Place::In | Place::PeerIn(_) => panic!("an input is written: {at:?}"),
        Place::Slot(_) | Place::Stage(..) | Place::Result(..) => {}
    };
    for step in &s.steps {
        match *step {
            Step::Copy { dst, len, .. } => writes(dst, len),
            Step::Swap { a, b, len } => {
                writes(a, len);
                writes(b, len);
            }
            Step::Reduce { dst, count, .. } | Step::Average { dst, count, .. } => {
                writes(dst, count * s.header.dtype.size() as u64);
            }
            _ => {}
        }
    }
}

/// A schedule that no compiler has made: a barrier's head with other numbers, and steps.
fn made_up(
    u: &mut Unstructured<'_>,
    call: &Call,
    lists: Lists<'_>,
    rank: usize,
    n: usize,
    algorithm: Algorithm,
) -> Result<Schedule> {
    let head = Call { op: Op::Barrier, count: 0, ..*call };
    let Ok(empty) = compile_with(&head, Lists::None, rank, n, Algorithm::OneHop, &[]) else {
        panic!("a barrier of {n} ranks does not compile");
    };
    let mut s = Schedule::clone(&empty);
    let sizes = enc::sizes(call, lists, rank, n);
    s.header.op = call.op;
    s.header.redop = call.op.facts().reduces.then_some(call.redop);
    s.header.algorithm = algorithm as u8;
    s.header.count = call.count;
    (s.in_bytes, s.out_bytes) = (sizes.input, sizes.output);
    (s.peer_in_bytes, s.peer_out_bytes) = (sizes.input, sizes.output);
    s.in_place = call.in_place.then_some(sizes.at as i64);
    s.staged = call.private;
    s.table = lists.digest();
    for _ in 0..u.int_in_range(0..=12)? {
        let step = step(u, &mut s, n)?;
        s.steps.push(step);
    }
    Ok(s)
}

/// Changes one thing.
fn change(u: &mut Unstructured<'_>, s: &mut Schedule, n: usize) -> Result<()> {
    let some = |u: &mut Unstructured<'_>, len: usize| if len == 0 { Ok(0) } else { u.choose_index(len) };
    match u.int_in_range(0..=9)? {
        0 if !s.steps.is_empty() => drop(s.steps.remove(some(u, s.steps.len())?)),
        1 if !s.steps.is_empty() => {
            let (a, b) = (some(u, s.steps.len())?, some(u, s.steps.len())?);
            s.steps.swap(a, b);
        }
        2 if !s.steps.is_empty() => {
            let at = some(u, s.steps.len())?;
            s.steps[at] = step(u, s, n)?;
        }
        3 if !s.sources.is_empty() => {
            let i = some(u, s.sources.len())?;
            s.sources[i] = at(u, n)?;
        }
        4 => s.payload = any_number(u)?,
        5 => s.slot_len = any_number(u)?,
        6 => s.in_place = u.arbitrary()?,
        7 => s.in_bytes = any_number(u)?,
        8 => s.header.dtype = *u.choose(&DataType::ALL)?,
        _ => {
            let step = step(u, s, n)?;
            let at = some(u, s.steps.len() + 1)?;
            s.steps.insert(at, step);
        }
    }
    Ok(())
}

fn at(u: &mut Unstructured<'_>, n: usize) -> Result<At> {
    let rank = u.int_in_range(0..=n)? as u16;
    let half = u.int_in_range(0..=2)?;
    let place = match u.int_in_range(0..=6)? {
        0 => Place::In,
        1 => Place::Out,
        2 => Place::PeerIn(rank),
        3 => Place::PeerOut(rank),
        4 => Place::Slot(rank),
        5 => Place::Stage(rank, half),
        _ => Place::Result(rank, half),
    };
    Ok(At(place, any_number(u)?))
}

fn step(u: &mut Unstructured<'_>, s: &mut Schedule, n: usize) -> Result<Step> {
    let peer = u.int_in_range(0..=n)? as u16;
    Ok(match u.int_in_range(0..=8)? {
        0 => Step::Arrival(peer),
        1 => Step::SendsToMe(peer),
        2 => Step::ReceivesFromMe(peer),
        3 => Step::Wait { peer, step: u.arbitrary()? },
        4 => Step::Signal(u.arbitrary()?),
        5 => Step::Copy { dst: at(u, n)?, src: at(u, n)?, len: any_number(u)? },
        6 => {
            let first = s.sources.len() as u32;
            let many = u.int_in_range(0..=3)?;
            for _ in 0..many {
                let source = at(u, n)?;
                s.sources.push(source);
            }
            let (first, many) = if u.ratio(1, 8)? { (u.arbitrary()?, u.arbitrary()?) } else { (first, many) };
            let op = s.header.redop.unwrap_or(ReduceOp::Sum);
            Step::Reduce { dst: at(u, n)?, first, n: many, count: any_number(u)?, op }
        }
        7 => Step::Average { dst: at(u, n)?, count: any_number(u)?, n: u.arbitrary()? },
        _ => Step::Swap { a: at(u, n)?, b: at(u, n)?, len: any_number(u)? },
    })
}
