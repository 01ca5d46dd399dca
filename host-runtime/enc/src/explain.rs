//! Schedules in words: one line a step, for people.

use std::fmt::{Display, Formatter, Result};

use hw_bridge::exec::sequencer::{At, Place, Schedule, Step};

/// `schedule` in words: a line for the call, a line for the payload if there is one, and a line a step.
pub fn explain(schedule: &Schedule) -> impl Display + '_ {
    Lines(schedule)
}

/// One step in words, without its sources.
pub(super) fn step(step: &Step) -> impl Display + '_ {
    Line(step, &[])
}

struct Lines<'a>(&'a Schedule);
struct Line<'a>(&'a Step, &'a [At]);
struct Name(At);

impl Display for Name {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let At(place, at) = self.0;
        match place {
            Place::In => write!(f, "in+{at}"),
            Place::Out => write!(f, "out+{at}"),
            Place::PeerIn(p) => write!(f, "in of rank {p}+{at}"),
            Place::PeerOut(p) => write!(f, "out of rank {p}+{at}"),
            Place::Slot(p) => write!(f, "slot of rank {p}+{at}"),
            Place::Stage(p, half) => write!(f, "stage {half} of rank {p}+{at}"),
            Place::Result(p, half) => write!(f, "result {half} of rank {p}+{at}"),
        }
    }
}

impl Display for Line<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match *self.0 {
            Step::Arrival(p) => write!(f, "wait for rank {p} to arrive"),
            Step::SendsToMe(p) => write!(f, "check that rank {p} sends here"),
            Step::ReceivesFromMe(p) => write!(f, "check that rank {p} receives from here"),
            Step::Wait { peer, step } => write!(f, "wait for signal {step} of rank {peer}"),
            Step::Signal(step) => write!(f, "signal {step}"),
            Step::Copy { dst, src, len } => write!(f, "copy {len} bytes: {} to {}", Name(src), Name(dst)),
            Step::Swap { a, b, len } => write!(f, "swap {len} bytes: {} with {}", Name(a), Name(b)),
            Step::Average { dst, count, n } => write!(f, "divide {count} elements by {n}: {}", Name(dst)),
            Step::Reduce { dst, n, count, op, .. } => {
                write!(f, "{} of {n}, {count} elements, to {}", op.name(), Name(dst))?;
                for (i, at) in self.1.iter().enumerate() {
                    write!(f, "{} {}", if i == 0 { ":" } else { "," }, Name(*at))?;
                }
                Ok(())
            }
        }
    }
}

impl Display for Lines<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let s = self.0;
        write!(f, "{}: {} bytes in, {} bytes out", s.header, s.in_bytes, s.out_bytes)?;
        if s.payload > 0 {
            write!(f, "\n     put {} bytes of in beside the record", s.payload)?;
        }
        for (i, step) in s.steps.iter().enumerate() {
            let sources = match step {
                Step::Reduce { first, n, .. } => {
                    let (first, n) = (*first as usize, *n as usize);
                    s.sources.get(first..first + n).unwrap_or(&[])
                }
                _ => &[],
            };
            write!(f, "\n{i:>4} {}", Line(step, sources))?;
        }
        Ok(())
    }
}
