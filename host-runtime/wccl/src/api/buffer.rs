//! What a typed collective may be given: device memory or private memory, with its element type.

use zerocopy::IntoBytes;

use crate::api::communicator::Communicator;
use crate::api::element::Element;
use crate::api::memory::{DeviceMemory, Io};
use crate::api::tensor::Tensor;
use crate::error::Error;

/// A side: device memory.
#[derive(Debug, Clone, Copy)]
pub enum OnDevice {}

/// A side: private memory of the process.
#[derive(Debug, Clone, Copy)]
pub enum InProcess {}

/// Elements that a collective reads. [`Tensor`]s lie in device memory, slices, arrays and vectors in the process's own.
pub trait Buffer {
    /// What it holds.
    type Element: Element;
    /// Where it lies: [`OnDevice`] or [`InProcess`]. Both buffers of a call lie on one side.
    type Side;
    /// What a call that allocates its output answers: a [`Tensor`], or a vector.
    type Owned: BufferMut<Element = Self::Element, Side = Self::Side>;

    /// Elements.
    fn elements(&self) -> usize;

    #[doc(hidden)]
    fn view(&self) -> View<'_>;

    #[doc(hidden)]
    fn owned(comm: &Communicator, elements: usize) -> Result<Self::Owned, Error>;
}

/// Elements that a collective writes.
pub trait BufferMut: Buffer {
    #[doc(hidden)]
    fn view_mut(&mut self) -> ViewMut<'_>;
}

#[doc(hidden)]
#[derive(Debug)]
pub enum View<'a> {
    Device(&'a DeviceMemory),
    Private(&'a [u8]),
}

#[doc(hidden)]
#[derive(Debug)]
pub enum ViewMut<'a> {
    Device(&'a DeviceMemory),
    Private(&'a mut [u8]),
}

/// A buffer that is input and output.
#[inline]
pub(super) fn in_place<B: BufferMut + ?Sized>(both: &mut B) -> Io<'_> {
    match both.view_mut() {
        ViewMut::Device(memory) => Io::in_place(memory),
        ViewMut::Private(bytes) => Io::HostInPlace(bytes),
    }
}

/// Two buffers of one side.
#[inline]
pub(super) fn from_to<'a, A, B>(src: &'a A, dst: &'a mut B) -> Result<Io<'a>, Error>
where
    A: Buffer + ?Sized,
    B: BufferMut<Side = A::Side> + ?Sized,
{
    match (src.view(), dst.view_mut()) {
        (View::Device(src), ViewMut::Device(dst)) => Ok(Io::device(src, dst)),
        (View::Private(src), ViewMut::Private(dst)) => Ok(Io::Host { src, dst }),
        // The types say that both are of one side.
        _ => Err(Error::Bug("a buffer lies on another side than its type says".into())),
    }
}

/// An input alone, of a rank that gets nothing; or an output alone, of one that gives nothing.
pub(super) fn from(view: View<'_>) -> Io<'_> {
    match view {
        View::Device(memory) => Io::in_place(memory),
        View::Private(src) => Io::Host { src, dst: &mut [] },
    }
}

pub(super) fn to(view: ViewMut<'_>) -> Io<'_> {
    match view {
        ViewMut::Device(memory) => Io::in_place(memory),
        ViewMut::Private(dst) => Io::Host { src: &[], dst },
    }
}

impl<T: Element> Buffer for Tensor<T> {
    type Element = T;
    type Side = OnDevice;
    type Owned = Tensor<T>;

    fn elements(&self) -> usize {
        self.len()
    }

    fn view(&self) -> View<'_> {
        View::Device(self.memory())
    }

    fn owned(comm: &Communicator, elements: usize) -> Result<Tensor<T>, Error> {
        comm.tensor(elements)
    }
}

impl<T: Element> BufferMut for Tensor<T> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut::Device(self.memory())
    }
}

macro_rules! private {
    ($($of:ty $(, $n:ident)?);* $(;)?) => {
        $(
            impl<T: Element $(, const $n: usize)?> Buffer for $of {
                type Element = T;
                type Side = InProcess;
                type Owned = Vec<T>;

                fn elements(&self) -> usize {
                    self.len()
                }

                fn view(&self) -> View<'_> {
                    View::Private(self[..].as_bytes())
                }

                fn owned(_: &Communicator, elements: usize) -> Result<Vec<T>, Error> {
                    Ok(vec![T::default(); elements])
                }
            }

            impl<T: Element $(, const $n: usize)?> BufferMut for $of {
                fn view_mut(&mut self) -> ViewMut<'_> {
                    ViewMut::Private(self[..].as_mut_bytes())
                }
            }
        )*
    };
}

private! {
    [T];
    Vec<T>;
    [T; N], N;
}

/// What is shared or boxed is what it holds.
impl<B: Buffer + ?Sized> Buffer for Box<B> {
    type Element = B::Element;
    type Side = B::Side;
    type Owned = B::Owned;

    fn elements(&self) -> usize {
        (**self).elements()
    }

    fn view(&self) -> View<'_> {
        (**self).view()
    }

    fn owned(comm: &Communicator, elements: usize) -> Result<Self::Owned, Error> {
        B::owned(comm, elements)
    }
}

impl<B: BufferMut + ?Sized> BufferMut for Box<B> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        (**self).view_mut()
    }
}
