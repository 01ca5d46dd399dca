//! What a plugin would cost to compile, from one look at its bytes, before the compiler sees them.
//!
//! A few bytes can stand for much work: a function of six bytes may declare thousands of locals, and nested components that
//! make two instances each of the one before come to 2^n. So what the compiler's time and memory grow with is counted, each
//! with a limit of the policy. The defaults admit what the toolchains of interpreted languages build: an interpreter of 20 MB
//! with some ten thousand functions.

use wasmparser::{ComponentInstance, ComponentType, Encoding, Instance, InstanceTypeDeclaration, Parser, Payload};

use crate::limits::Limits;
use crate::load::DAMAGED;
use crate::store::Denied;

/// What one component definition comes to when it is made once.
#[derive(Default)]
struct Open {
    component: bool,
    /// Instances of core modules that it makes, and of components, each of which may be the largest there is.
    modules: u64,
    components: u64,
}

/// Sums over the plugin, by the key of the policy.
struct Sums<'a> {
    most: &'a Limits,
    /// Counted so far.
    functions: u64,
    locals: u64,
    names: u64,
    /// Instances that the largest component so far comes to when it is made once.
    largest: u64,
    open: Vec<Open>,
}

/// Refuses a plugin that is beyond a limit.
///
/// # Errors
/// What there is too much of, how much, and the limit; or that the bytes cannot be read.
pub(super) fn within(plugin: &[u8], most: &Limits) -> Result<(), Denied> {
    beyond("bytes", plugin.len() as u64, "limits.plugin-bytes", most.plugin_bytes as u64)?;
    let mut sums = Sums { most, functions: 0, locals: 0, names: 0, largest: 0, open: Vec::new() };
    for payload in Parser::new(0).parse_all(plugin) {
        sums.count(payload.map_err(unreadable)?)?;
    }
    Ok(())
}

fn beyond(what: &str, has: u64, limit: &'static str, most: u64) -> Result<(), Denied> {
    if has <= most {
        return Ok(());
    }
    let why = format!("it would cost too much to compile: it has {has} {what} or more; {limit} grants {most}");
    Err(Denied { why, limit: Some(limit) })
}

fn unreadable(e: wasmparser::BinaryReaderError) -> Denied {
    format!("{DAMAGED}: {e}").into()
}

impl Sums<'_> {
    fn count(&mut self, payload: Payload<'_>) -> Result<(), Denied> {
        match payload {
            Payload::Version { encoding, .. } => {
                self.open.push(Open { component: encoding == Encoding::Component, ..Open::default() });
            }
            Payload::End(_) => self.close()?,
            Payload::FunctionSection(functions) => {
                self.functions += u64::from(functions.count());
                let most = self.most.plugin_functions as u64;
                beyond("functions", self.functions, "limits.plugin-functions", most)?;
            }
            Payload::CodeSectionEntry(body) => {
                let body_range = body.range();
                let bytes = body_range.end.saturating_sub(body_range.start);
                let most = self.most.function_bytes as u64;
                beyond("bytes in one function", bytes, "limits.function-bytes", most)?;
                let mut locals = 0u64;
                for group in body.get_locals_reader().map_err(unreadable)? {
                    locals += u64::from(group.map_err(unreadable)?.0);
                }
                let most = self.most.function_locals as u64;
                beyond("locals in one function", locals, "limits.function-locals", most)?;
                self.locals += locals;
                beyond("locals in all", self.locals, "limits.plugin-locals", self.most.plugin_locals as u64)?;
            }
            Payload::ImportSection(s) => self.name(s.count())?,
            Payload::ExportSection(s) => self.name(s.count())?,
            Payload::ComponentImportSection(s) => self.name(s.count())?,
            Payload::ComponentExportSection(s) => self.name(s.count())?,
            Payload::ComponentAliasSection(s) => self.name(s.count())?,
            Payload::ComponentTypeSection(types) => {
                for ty in types {
                    if takes_components(&ty.map_err(unreadable)?) {
                        let why = "it is not compiled: a component in it is handed over to another one, and what that comes to \
                                   cannot be told before";
                        return Err(why.to_string().into());
                    }
                }
            }
            Payload::InstanceSection(instances) => {
                for instance in instances {
                    match instance.map_err(unreadable)? {
                        Instance::Instantiate { args, .. } => {
                            self.top().modules += 1;
                            self.name(args.len() as u32)?;
                        }
                        Instance::FromExports(exports) => self.name(exports.len() as u32)?,
                    }
                }
            }
            Payload::ComponentInstanceSection(instances) => {
                for instance in instances {
                    match instance.map_err(unreadable)? {
                        ComponentInstance::Instantiate { args, .. } => {
                            self.top().components += 1;
                            self.name(args.len() as u32)?;
                        }
                        ComponentInstance::FromExports(exports) => self.name(exports.len() as u32)?,
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The definition whose sections are being read; the reader says its version before all else.
    fn top(&mut self) -> &mut Open {
        if self.open.is_empty() {
            self.open.push(Open::default());
        }
        let last = self.open.len() - 1;
        &mut self.open[last]
    }

    fn name(&mut self, more: u32) -> Result<(), Denied> {
        self.names += u64::from(more);
        beyond("imports and exports", self.names, "limits.plugin-names", self.most.plugin_names as u64)
    }

    /// A definition ends. Which component an instance is of is not looked up: a component can only make instances of those that
    /// end before it does (none is handed over, which [`takes_components`] sees to), so the largest of them bounds each.
    fn close(&mut self) -> Result<(), Denied> {
        let Some(ended) = self.open.pop() else { return Ok(()) };
        if ended.component {
            let inner = ended.components.saturating_mul(self.largest);
            let comes_to = inner.saturating_add(ended.modules).saturating_add(1);
            beyond("instances", comes_to, "limits.plugin-instances", self.most.plugin_instances as u64)?;
            self.largest = self.largest.max(comes_to);
        }
        Ok(())
    }
}

/// Whether a type is, or has in it, that of a component.
fn takes_components(ty: &ComponentType<'_>) -> bool {
    match ty {
        ComponentType::Component(_) => true,
        ComponentType::Instance(declared) => {
            declared.iter().any(|d| matches!(d, InstanceTypeDeclaration::Type(ty) if takes_components(ty)))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denied(wat: &str, most: &Limits) -> Option<(Option<&'static str>, String)> {
        within(&wat::parse_str(wat).unwrap(), most).err().map(|d| (d.limit, d.why))
    }

    fn refused(wat: &str, most: &Limits, limit: &'static str, says: &str) {
        let (key, why) = denied(wat, most).expect(says);
        assert_eq!(key, Some(limit), "{why}");
        assert!(why.contains(says) && why.contains(limit), "{why}");
    }

    #[test]
    fn what_is_beyond_a_limit_is_refused_by_its_key_and_what_is_within_is_not() {
        let d = Limits::default();
        let functions = |n: usize| format!("(component (core module {}))", "(func)".repeat(n));
        let three = Limits { plugin_functions: 3, ..d };
        refused(&functions(4), &three, "limits.plugin-functions", "it has 4 functions");
        assert!(denied(&functions(3), &three).is_none());
        // In all modules together.
        let two = format!("(component (core module {0}) (core module {0}))", "(func)".repeat(2));
        refused(&two, &three, "limits.plugin-functions", "it has 4 functions");

        let locals =
            |n: usize| format!("(component (core module (func (local {0})) (func (local {0}))))", "i64 ".repeat(n));
        refused(&locals(5), &Limits { function_locals: 4, ..d }, "limits.function-locals", "5 locals in one function");
        let in_all = Limits { function_locals: 5, plugin_locals: 9, ..d };
        refused(&locals(5), &in_all, "limits.plugin-locals", "it has 10 locals in all");
        assert!(denied(&locals(4), &in_all).is_none());

        let long = format!("(component (core module (func {})))", "nop ".repeat(100));
        refused(&long, &Limits { function_bytes: 100, ..d }, "limits.function-bytes", "102 bytes in one function");
        assert!(denied(&long, &Limits { function_bytes: 102, ..d }).is_none());

        let names = r#"(component (core module (import "a" "b" (func)) (export "c" (func 0)) (export "d" (func 0))))"#;
        refused(names, &Limits { plugin_names: 2, ..d }, "limits.plugin-names", "3 imports and exports");
        assert!(denied(names, &Limits { plugin_names: 3, ..d }).is_none());
        refused(names, &Limits { plugin_bytes: 20, ..d }, "limits.plugin-bytes", " bytes or more");
    }

    /// Which took a compiler time and memory without end: 2^n of it for some twenty bytes each.
    #[test]
    fn components_that_double_one_another_are_refused() {
        let chain = |n: usize| {
            let twice = "(instance (instantiate $x)) (instance (instantiate $x))";
            let link = |i: usize| format!("(component $c{i} (alias outer $p $c{} (component $x)) {twice})", i - 1);
            let links: String = (1..n).map(link).collect();
            format!("(component $p (component $c0) {links} (instance (instantiate $c{})))", n - 1)
        };
        refused(&chain(30), &Limits::default(), "limits.plugin-instances", "instances or more");
        assert!(denied(&chain(5), &Limits::default()).is_none());
        let handed = "(component (component (import \"c\" (component $c)) (instance (instantiate $c)) (instance (instantiate $c))))";
        let (key, why) = denied(handed, &Limits::default()).unwrap();
        assert!(key.is_none() && why.contains("handed over to another one"), "{why}");
    }

    #[test]
    fn what_is_cut_off_anywhere_is_refused_and_no_panic() {
        let whole =
            wat::parse_str("(component (core module (func (local i64)) (export \"f\" (func 0))) (component))").unwrap();
        assert!(within(&whole, &Limits::default()).is_ok());
        for end in 0..whole.len() {
            let _ = within(&whole[..end], &Limits::default());
        }
    }
}
