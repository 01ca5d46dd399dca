//! Log events as they come, for tests that look at them.

use std::fmt::{Debug, Write as _};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

/// A subscriber that gives every event up to a level to a function. Spans are not kept.
#[derive(Debug)]
pub struct Events<F>(pub Level, pub F);

impl<F: Fn(&Event<'_>) + 'static> Subscriber for Events<F> {
    fn enabled(&self, of: &Metadata<'_>) -> bool {
        *of.level() <= self.0
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        (self.1)(event);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// An event's message.
pub fn message(event: &Event<'_>) -> String {
    struct Message(String);
    impl Visit for Message {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            if field.name() == "message" {
                self.0 = format!("{value:?}");
            }
        }
    }
    let mut message = Message(String::new());
    event.record(&mut message);
    message.0
}

/// All of an event's fields, each as ` name=value`.
pub fn fields(event: &Event<'_>) -> String {
    struct Fields(String);
    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            // Writing to a string cannot fail.
            let _ = write!(self.0, " {}={value:?}", field.name());
        }
    }
    let mut fields = Fields(String::new());
    event.record(&mut fields);
    fields.0
}
