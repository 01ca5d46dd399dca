//! Typed device memory.

use std::marker::PhantomData;

use zerocopy::IntoBytes;

use crate::api::element::Element;
use crate::api::memory::DeviceMemory;
use crate::error::Error;

/// Elements in a core's device memory, which the peers of a communicator reach directly. Freed when dropped.
///
/// Peers read and write it while a collective that was given it runs, as a device would.
#[derive(Debug)]
pub struct Tensor<T> {
    memory: DeviceMemory,
    len: usize,
    of: PhantomData<fn() -> T>,
}

impl<T: Element> Tensor<T> {
    /// `memory` as `len` elements, which fit.
    pub(super) fn new(memory: DeviceMemory, len: usize) -> Tensor<T> {
        Tensor { memory, len, of: PhantomData }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory, for the dynamic form of the collectives.
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    fn at(&self, first: usize) -> u64 {
        (first as u64).saturating_mul(size_of::<T>() as u64)
    }

    fn inside(&self, first: usize, elements: usize) -> Result<(), Error> {
        if first.checked_add(elements).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        let len = self.len;
        Err(Error::Usage(format!("{elements} elements from element {first} on are not inside a tensor of {len}")))
    }

    /// Copies elements in, from element `first` on.
    ///
    /// # Errors
    /// [`Error::Usage`] if they do not fit.
    pub fn write(&self, first: usize, elements: &[T]) -> Result<(), Error> {
        self.inside(first, elements.len())?;
        self.memory.write(self.at(first), elements.as_bytes())
    }

    /// Copies elements out, from element `first` on.
    ///
    /// # Errors
    /// [`Error::Usage`] if the range is not all inside.
    pub fn read(&self, first: usize, elements: &mut [T]) -> Result<(), Error> {
        self.inside(first, elements.len())?;
        self.memory.read(self.at(first), elements.as_mut_bytes())
    }

    /// All of them, copied out.
    pub fn to_vec(&self) -> Vec<T> {
        let mut all = vec![T::default(); self.len];
        // The tensor is not shorter than itself.
        let read = self.read(0, &mut all);
        debug_assert!(read.is_ok());
        all
    }
}
