//! No byte outside the buffers is touched: every buffer ends at a page that may not be accessed, or begins behind one, so
//! that a touch ends the test with SIGSEGV.

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use super::tests::{Random, every_type_and_op, levels, reference, scaled_reference, slices};
use super::*;
use crate::memory::copy::copy_nt;

const PAGE: usize = 4096;
/// Whole pages between the two guards; more than any buffer here.
const BODY: usize = 2 * PAGE;

/// Memory between two inaccessible pages.
struct Fenced(*mut u8);

impl Fenced {
    fn new() -> Fenced {
        let (all, flags) = (BODY + 2 * PAGE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice, of which nobody else knows.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), all, ProtFlags::READ | ProtFlags::WRITE, flags) };
        let base = base.expect("four pages").cast::<u8>();
        for guard in [0, PAGE + BODY] {
            // SAFETY: a page of the mapping just made, to which there is no reference.
            unsafe { mprotect(base.add(guard).cast(), PAGE, MprotectFlags::empty()) }.expect("a guard");
        }
        Fenced(base)
    }

    /// Where `len` bytes begin that end at the upper guard, or begin at the lower one.
    fn place(&self, len: usize, at_end: bool) -> *mut u8 {
        self.0.wrapping_add(if at_end { PAGE + BODY - len } else { PAGE })
    }

    fn put(&self, content: &[u8], at_end: bool) -> *mut u8 {
        assert!(content.len() <= BODY);
        let to = self.place(content.len(), at_end);
        // SAFETY: the body holds BODY bytes, and `content` lies elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), to, content.len()) };
        to
    }

    fn read(&self, at: *mut u8, len: usize) -> Vec<u8> {
        assert!(at >= self.place(BODY, true) && at.wrapping_add(len) <= self.place(0, true));
        // SAFETY: inside the body, as just asserted; nobody writes meanwhile.
        unsafe { std::slice::from_raw_parts(at, len) }.to_vec()
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; no reference into it is left.
        unsafe { munmap(self.0.cast(), BODY + 2 * PAGE) }.expect("the mapping");
    }
}

#[test]
fn reductions_touch_nothing_outside_their_buffers() {
    let mut random = Random(11);
    let (memory, target) = ([(); 3].map(|()| Fenced::new()), Fenced::new());
    for (dtype, op) in every_type_and_op().chain(DataType::ALL.map(|dtype| (dtype, ReduceOp::PreMulSum))) {
        if op == ReduceOp::PreMulSum && !dtype.is_float() {
            continue;
        }
        let size = dtype.size();
        let sources: Vec<_> = (0..3).map(|_| random.elements(dtype, 257)).collect();
        let scales = [0.5, -3.0, 0.1];
        for n in [2, 3] {
            let all = slices(&sources[..n]);
            let expected = match op {
                ReduceOp::PreMulSum => scaled_reference(dtype, &all, &scales[..n]),
                _ => reference(op, dtype, &all, n),
            };
            for (count, at_end) in (0..=257).flat_map(|count| [(count, false), (count, true)]) {
                let len = count * size;
                let pointers: Vec<*const u8> =
                    (0..n).map(|i| memory[i].put(&sources[i][..len], at_end).cast_const()).collect();
                let to = target.place(len, at_end);
                for level in levels() {
                    // SAFETY: buffers of `count` elements, all apart; the level is supported.
                    unsafe {
                        std::ptr::write_bytes(to, 0xA5, len);
                        match op {
                            ReduceOp::PreMulSum => reduce_scaled_at(level, dtype, to, &pointers, &scales[..n], count),
                            _ => reduce_at(level, op, dtype, to, &pointers, count),
                        }
                    }
                    assert!(target.read(to, len) == expected[..len], "{level:?} {op} {dtype} n={n} count={count}");
                }
            }
        }
    }
}

#[test]
fn copies_and_averages_touch_nothing_outside_their_buffers() {
    let mut random = Random(12);
    let (memory, target) = (Fenced::new(), Fenced::new());
    for (len, at_end) in (0..=257).chain([4095, 4096, 4097]).flat_map(|len| [(len, false), (len, true)]) {
        let content = random.elements(DataType::Uint8, len);
        for (from_end, streaming) in [(false, false), (false, true), (true, false), (true, true)] {
            let (from, to) = (memory.put(&content, from_end), target.place(len, at_end));
            // SAFETY: buffers of `len` bytes, apart.
            unsafe {
                std::ptr::write_bytes(to, 0xA5, len);
                if streaming { copy_nt(to, from, len) } else { copy(to, from, len) }
            }
            assert!(target.read(to, len) == content, "{len} bytes, streaming {streaming}");
        }
    }
    for dtype in DataType::ALL {
        for (count, at_end) in (0..=257).flat_map(|count| [(count, false), (count, true)]) {
            let content = random.elements(dtype, count);
            let expected = reference(ReduceOp::Avg, dtype, &[&content], 3);
            for level in levels() {
                let to = target.put(&content, at_end);
                // SAFETY: a buffer of `count` elements; the level is supported.
                unsafe { scale_avg_at(level, dtype, to, count, 3) };
                assert!(target.read(to, content.len()) == expected, "{level:?} {dtype} count={count}");
            }
        }
    }
}
