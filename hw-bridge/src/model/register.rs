//! The software stand-in for a memory-mapped increment register (reverse-abi.md §3.2, INV-12).
//!
//! On hardware, storing `v` in the register makes the device add `v` to a semaphore. The callback `nec_inc_semaphore`
//! is therefore a plain store, despite its name; what a store *means* is a property of the word it goes to. That is
//! [`StoreTarget`]: ordinary memory keeps the last value, an [`IncrementRegister`] adds.
//!
//! Threads: all methods may be called from any thread; nothing locks or allocates after construction.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A 32-bit word that can be stored to.
pub trait StoreTarget {
    /// One 32-bit store. Everything written before it is visible to whoever sees its effect.
    fn store(&self, value: u32);
}

/// Ordinary memory: a store replaces.
impl StoreTarget for AtomicU32 {
    fn store(&self, value: u32) {
        AtomicU32::store(self, value, Ordering::Release);
    }
}

/// `nec_inc_semaphore`: `*sem_inc_addr = val` and nothing else (INV-12).
pub fn nec_inc_semaphore<T: StoreTarget + ?Sized>(sem_inc_addr: &T, val: u32) {
    sem_inc_addr.store(val);
}

/// Marks a slot of the record as written, above the 32 bits of the value.
const WRITTEN: u64 = 1 << 32;

/// An increment register together with the semaphore behind it.
#[derive(Debug, Default)]
pub struct IncrementRegister {
    semaphore: AtomicU32,
    last: AtomicU32,
    stores: AtomicU64,
    record: Box<[AtomicU64]>,
}

impl IncrementRegister {
    /// A register over a semaphore of value 0.
    pub fn new() -> IncrementRegister {
        IncrementRegister::default()
    }

    /// The same, which also keeps the first `capacity` stored values for [`IncrementRegister::recorded`].
    pub fn recording(capacity: usize) -> IncrementRegister {
        IncrementRegister { record: (0..capacity).map(|_| AtomicU64::new(0)).collect(), ..IncrementRegister::default() }
    }

    /// Stores to the register: records the store and adds `value` to the semaphore, modulo 2^32.
    pub fn store(&self, value: u32) {
        // The record comes first, so that whoever sees the new semaphore value also sees the store that made it.
        let position = self.stores.fetch_add(1, Ordering::AcqRel);
        if let Some(slot) = usize::try_from(position).ok().and_then(|p| self.record.get(p)) {
            slot.store(WRITTEN | u64::from(value), Ordering::Release);
        }
        self.last.store(value, Ordering::Release);
        self.semaphore.fetch_add(value, Ordering::AcqRel);
    }

    /// The semaphore's value.
    pub fn value(&self) -> u32 {
        self.semaphore.load(Ordering::Acquire)
    }

    /// How many stores the register has seen.
    pub fn stores(&self) -> u64 {
        self.stores.load(Ordering::Acquire)
    }

    /// The value last stored, 0 before the first store.
    pub fn last_store(&self) -> u32 {
        self.last.load(Ordering::Acquire)
    }

    /// The first stored values in order, as many as the capacity given to [`IncrementRegister::recording`].
    pub fn recorded(&self) -> Vec<u32> {
        let slots = self.record.iter().map(|slot| slot.load(Ordering::Acquire));
        slots.take_while(|slot| slot & WRITTEN != 0).map(|slot| (slot & u64::from(u32::MAX)) as u32).collect()
    }
}

impl StoreTarget for IncrementRegister {
    fn store(&self, value: u32) {
        IncrementRegister::store(self, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves INV-12.
    #[test]
    fn the_callback_stores_and_only_the_register_adds() {
        // On ordinary memory a read-modify-write would leave 107.
        let memory = AtomicU32::new(100);
        nec_inc_semaphore(&memory, 3);
        nec_inc_semaphore(&memory, 4);
        assert_eq!(memory.load(Ordering::Acquire), 4);

        let register = IncrementRegister::recording(8);
        nec_inc_semaphore(&register, 3);
        nec_inc_semaphore(&register, 4);
        assert_eq!((register.value(), register.stores(), register.last_store()), (7, 2, 4));
        // One call is one store of exactly the value: nothing was added before it reached the register.
        assert_eq!(register.recorded(), [3, 4]);
    }

    #[test]
    fn the_semaphore_wraps_and_the_record_is_bounded() {
        let register = IncrementRegister::recording(1);
        register.store(u32::MAX);
        register.store(2);
        assert_eq!((register.value(), register.stores()), (1, 2));
        assert_eq!(register.recorded(), [u32::MAX]);
        assert!(IncrementRegister::new().recorded().is_empty());
    }

    #[test]
    fn concurrent_stores_lose_nothing() {
        let register = IncrementRegister::new();
        std::thread::scope(|scope| {
            for add in 1..=4 {
                let register = &register;
                scope.spawn(move || (0..1000).for_each(|_| nec_inc_semaphore(register, add)));
            }
        });
        assert_eq!((register.value(), register.stores()), (10_000, 4000));
    }
}
