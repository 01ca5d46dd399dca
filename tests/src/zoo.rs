//! The plugin zoo: makes components in milliseconds, from WIT text and core WebAssembly text, without a compiler.
//!
//! Three ways in:
//!
//! * [`Plugin`] writes a core module for a world: every export gets the core signature that the canonical ABI asks for, and
//!   a body, `unreachable` unless something else is wanted. The contracts themselves can be changed first ([`Wit`]), which
//!   gives plugins built against releases that never were.
//! * [`componentise`] takes a finished core module (text or binary) and a world.
//! * [`rewrite`] replaces bodies of exported functions in a module that a real compiler made.
//!
//! Words: a *body* is core WebAssembly text with the function's parameters as locals 0, 1, ...; an imported function
//! `f` of an interface `i` is called `$i.f`, and only what some body calls is imported.
//!
//! Memory of a made module: answers that go through a pointer stand at [`ANSWER`], answers of host functions at [`REPLY`],
//! bytes under construction at [`SCRATCH`], texts from 8 KiB, and the heap that `cabi_realloc` hands out from 64 KiB.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::abi::{AbiVariant, FlatTypes, WasmSignature, WasmType};
use wit_parser::{
    Function, Handle, InterfaceId, LiftLowerAbi, ManglingAndAbi, Resolve, SizeAlign, Type, TypeDef, TypeDefKind,
    TypeId, WasmExport, WasmExportKind, WorldId, WorldItem, WorldKey,
};

/// Where a made module puts an answer that goes through a pointer; 256 bytes, written anew by each call.
pub const ANSWER: u32 = 1024;
/// Where bodies let host functions put their answers; 256 bytes.
pub const REPLY: u32 = 2048;
/// Where bodies put together lists; 4 KiB.
pub const SCRATCH: u32 = 4096;
/// Where texts begin.
const TEXTS: u32 = 8192;
/// Where the heap begins: the second page.
const HEAP: u32 = 65_536;

/// The interface a transport exports.
pub const COLLECTIVES: &str = "neuron:nccom/collectives";

/// The core ABI that wit-component calls legacy: `interface#function`, `cabi_realloc`, `memory`.
const ABI: ManglingAndAbi = ManglingAndAbi::Legacy(LiftLowerAbi::Sync);

/// The repository's root.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

/// A plugin that `cargo xtask guests` built, by its file name under target/plugins.
///
/// # Errors
/// When it was not built.
pub fn built(name: &str) -> Result<Vec<u8>> {
    let path = root().join("target").join("plugins").join(name);
    std::fs::read(&path).with_context(|| format!("{} is not there; run `cargo xtask guests` first", path.display()))
}

/// The contracts as text, to be changed before they are parsed.
#[derive(Debug, Clone)]
pub struct Wit {
    /// (name, text), each after the ones it uses.
    sources: Vec<(String, String)>,
}

impl Wit {
    /// The contracts of this release.
    ///
    /// # Errors
    /// When a file under wit/ cannot be read.
    pub fn load() -> Result<Wit> {
        let mut sources = Vec::new();
        for name in ["nrt", "hw", "nccom", "lifecycle", "net", "worlds"] {
            let path = root().join("wit").join(name).join(format!("{name}.wit"));
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("the contract {} cannot be read", path.display()))?;
            sources.push((name.to_string(), text));
        }
        Ok(Wit { sources })
    }

    /// Adds a package that uses none of the others.
    pub fn add(&mut self, name: &str, text: &str) {
        self.sources.insert(0, (name.into(), text.into()));
    }

    fn source(&mut self, name: &str) -> Result<&mut String> {
        let found = self.sources.iter_mut().find(|(n, _)| n == name);
        found.map(|(_, text)| text).with_context(|| format!("there is no contract `{name}`"))
    }

    /// Replaces `from`, which must occur exactly once in the contract `name`: a change that changes nothing would make a
    /// test pass for no reason.
    ///
    /// # Errors
    /// When `from` does not occur exactly once.
    pub fn edit(&mut self, name: &str, from: &str, to: &str) -> Result<()> {
        let text = self.source(name)?;
        let times = text.matches(from).count();
        ensure!(times == 1, "`{from}` occurs {times} times in the contract `{name}`, once was expected");
        *text = text.replacen(from, to, 1);
        Ok(())
    }

    /// Replaces the declaration of `function` in the contract `name`; an empty `to` removes it.
    ///
    /// # Errors
    /// When there is not exactly one such declaration.
    pub fn redeclare(&mut self, name: &str, function: &str, to: &str) -> Result<()> {
        let start = format!("\n  {function}: func(");
        let text = self.source(name)?;
        let times = text.matches(&start).count();
        ensure!(times == 1, "`{function}` is declared {times} times in the contract `{name}`, once was expected");
        let at = text.find(&start).unwrap_or_default();
        let end = at + text[at..].find(';').with_context(|| format!("the declaration of `{function}` has no end"))? + 1;
        // What is removed takes its `@since` with it; two in a row would be an error.
        let mark = text[..at].rfind('\n').filter(|line| to.is_empty() && text[*line..at].trim_start().starts_with('@'));
        text.replace_range(mark.unwrap_or(at)..end, &format!("\n  {to}"));
        Ok(())
    }

    /// Gives `package`, wherever it is named, the version `new` (or none) in place of `old` (or none). Its own `@since`
    /// marks follow.
    ///
    /// # Errors
    /// When nothing changed.
    pub fn reversion(&mut self, package: &str, old: Option<&str>, new: Option<&str>) -> Result<()> {
        let at = |v: Option<&str>| v.map_or_else(String::new, |v| format!("@{v}"));
        let (from, to) = (at(old), at(new));
        let mut changed = 0;
        for (_, text) in &mut self.sources {
            let mut out = String::new();
            let mut rest = text.as_str();
            while let Some(i) = rest.find(package) {
                let named = rest[i..].find(|c: char| !(c.is_ascii_alphanumeric() || "-:/".contains(c)));
                let end = i + named.unwrap_or(rest.len() - i);
                out.push_str(&rest[..end]);
                rest = &rest[end..];
                // Prose ("neuron:nrt carries ...") names packages too; a statement ends in `;`, `.{` or the version.
                let stands =
                    rest.starts_with(&from) && (old.is_some() || rest.starts_with(';') || rest.starts_with(".{"));
                if stands {
                    out.push_str(&to);
                    rest = &rest[from.len()..];
                    changed += 1;
                }
            }
            out.push_str(rest);
            if let Some(old) = old
                && out.contains(&format!("package {package}{to};"))
            {
                let since = |v: &str| format!("@since(version = {v})");
                out = out.replace(&since(old), &new.map_or_else(String::new, since));
            }
            *text = out;
        }
        ensure!(changed > 0, "no contract names {package}{from}");
        Ok(())
    }

    /// Parses them, with `world`, the text of a package that holds the one world to build for.
    ///
    /// # Errors
    /// When a text is not WIT.
    pub fn resolve(&self, world: &str) -> Result<(Resolve, WorldId)> {
        let mut resolve = Resolve { all_features: true, ..Resolve::default() };
        let mut push = |name: &str, text: &str| {
            let pushed = resolve.push_source(&format!("{name}.wit"), text);
            pushed.with_context(|| format!("the contract `{name}` does not parse"))
        };
        for (name, text) in &self.sources {
            push(name, text)?;
        }
        let package = push("world", world)?;
        let world = resolve.select_world(&[package], None).context("the world's package must hold one world")?;
        Ok((resolve, world))
    }
}

/// The world text of a plain transport.
pub const TRANSPORT: &str = "package zoo:plugin; world plugin { include wccl:worlds/transport; }";

/// What a made function does.
#[derive(Debug, Clone)]
pub enum Body {
    /// `unreachable`.
    Trap,
    /// Answers the error `NRT_STATUS`.
    Status(u32),
    /// Core WebAssembly text; locals may come first.
    Wat(String),
}

/// A text in the module's memory; shows itself as the two operands (pointer, length).
#[derive(Debug, Clone, Copy)]
pub struct Text(u32, usize);

impl std::fmt::Display for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "(i32.const {}) (i32.const {})", self.0, self.1)
    }
}

/// An operand of an imported function, or two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operand {
    /// A number of 32 bits.
    I32,
    /// A number of 64 bits.
    I64,
    /// A list or a text: its address and the number of its elements, which have so many bytes each.
    List(u32),
    /// A handle of that resource, 32 bits.
    Handle(String),
}

/// A function that bodies may call.
#[derive(Debug, Clone)]
pub struct Import {
    /// As bodies call it: `$sockets.connect`.
    pub name: String,
    /// Its parameters by name, each with its operands.
    pub params: Vec<(String, Vec<Operand>)>,
    /// Whether the address for its answer follows them.
    pub replies: bool,
    /// Whether it leaves a value.
    pub leaves: bool,
    /// The resource whose handle it answers: as its value, else at 4 of an answer that begins with a 0.
    pub makes: Option<String>,
}

/// A plugin in the making.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// The contracts it is built against.
    pub wit: Wit,
    /// Text of the package with its world.
    pub world: String,
    /// What a function without a body of its own does.
    pub default: Body,
    /// Pages of memory it begins with.
    pub pages: u32,
    /// Body of a start function, run by instantiation.
    pub start: Option<String>,
    bodies: BTreeMap<String, Body>,
    wanted: BTreeSet<String>,
    texts: Vec<u8>,
    extra: String,
}

impl Plugin {
    /// A plugin for `world`; every function traps.
    ///
    /// # Errors
    /// When the contracts cannot be read.
    pub fn new(world: &str) -> Result<Plugin> {
        Ok(Plugin {
            wit: Wit::load()?,
            world: world.into(),
            default: Body::Trap,
            pages: 2,
            start: None,
            bodies: BTreeMap::new(),
            wanted: BTreeSet::new(),
            texts: Vec::new(),
            extra: String::new(),
        })
    }

    /// A transport that the gate lets in: its probe answers 2.31.24.0 and 89, every other entry NRT_FAILURE.
    ///
    /// # Errors
    /// As [`Plugin::new`].
    pub fn transport() -> Result<Plugin> {
        let mut p = Plugin::new(TRANSPORT)?;
        p.default = Body::Status(1);
        p.body("neuron-get-version-info", probe(Some(89)));
        Ok(p)
    }

    /// A transport that serves a group of one rank: an id of zeros, a communicator, one ring of that rank.
    ///
    /// # Errors
    /// As [`Plugin::new`].
    pub fn lone_rank() -> Result<Plugin> {
        let mut p = Plugin::transport()?;
        p.body("neuron-get-unique-id", ok_bytes(SCRATCH, 128));
        p.body("neuron-init-comm", init_comm("nop"));
        p.body("neuron-init-global-comm", init_global_comm("nop"));
        for entry in ["neuron-build-graph-comm", "neuron-free-comm"] {
            p.body(entry, format!("(call $objects.communicator.drop (local.get 0)) {}", ok_unit()));
        }
        p.body("neuron-get-comm-info", lone_comm_info());
        Ok(p)
    }

    /// Gives `function` (a name without its interface) a body.
    pub fn body(&mut self, function: &str, wat: impl Into<String>) -> &mut Self {
        self.set(function, Body::Wat(wat.into()))
    }

    /// Gives `function` any kind of body.
    pub fn set(&mut self, function: &str, body: Body) -> &mut Self {
        self.bodies.insert(function.into(), body);
        self
    }

    /// Imports `$interface.function` whether or not a body calls it; an empty interface stands for the world itself.
    pub fn import(&mut self, interface: &str, function: &str) -> &mut Self {
        self.wanted.insert(format!("${interface}.{function}"));
        self
    }

    /// Adds module fields: helper functions, globals, data.
    pub fn extra(&mut self, wat: &str) -> &mut Self {
        self.extra.push_str(wat);
        self.extra.push('\n');
        self
    }

    /// Has its all-gather answer these addresses, whatever is gathered: where the ranks of a communicator meet, as the host asks
    /// for in the init of a group of so many.
    pub fn gathers(&mut self, places: &[SocketAddrV4]) -> &mut Self {
        let at = SCRATCH + 512;
        let bytes: String = places.iter().flat_map(address).map(|b| format!("\\{b:02x}")).collect();
        self.extra(&format!("(data (i32.const {at}) \"{bytes}\")"));
        // As many bytes of each as are asked for: behind the addresses there are zeros.
        let body = format!(
            "(call $objects.communicator.drop (local.get 0)) (i32.store8 (i32.const {ANSWER}) (i32.const 0))
  (i32.store (i32.const {}) (i32.const {at})) (i32.store (i32.const {}) (i32.mul (local.get 2) (i32.const {})))
  (i32.const {ANSWER})",
            ANSWER + 4,
            ANSWER + 8,
            places.len()
        );
        self.body("neuron-bootstrap-all-gather", body)
    }

    /// Puts a text into the module's memory.
    pub fn text(&mut self, text: &str) -> Text {
        let at = TEXTS + self.texts.len() as u32;
        self.texts.extend_from_slice(text.as_bytes());
        Text(at, text.len())
    }

    /// What a plugin of this world may import, in the order of the contracts.
    ///
    /// # Errors
    /// When contracts or world are wrong.
    pub fn importable(&self) -> Result<Vec<Import>> {
        let (resolve, world) = self.wit.resolve(&self.world)?;
        let mut sizes = SizeAlign::default();
        sizes.fill(&resolve)?;
        let interfaces = resolve.worlds[world].imports.values().filter_map(|item| match item {
            WorldItem::Interface { id, .. } => Some(*id),
            _ => None,
        });
        let mut all = Vec::new();
        for id in interfaces {
            for (name, _, signature) in importable(&resolve, id) {
                let function = resolve.interfaces[id].functions.values().find(|f| short(&resolve, id, &f.name) == name);
                let (params, makes) = match function {
                    Some(f) => (
                        f.params.iter().map(|p| (p.name.clone(), operands(&resolve, &sizes, &p.ty))).collect(),
                        f.result.as_ref().and_then(|ty| handle_in(&resolve, ty)),
                    ),
                    // The drop of a resource.
                    None => {
                        let of = name.trim_end_matches(".drop").rsplit('.').next().unwrap_or_default();
                        (vec![("self".into(), vec![Operand::Handle(of.into())])], None)
                    }
                };
                let leaves = !signature.results.is_empty();
                all.push(Import { name, params, replies: signature.retptr, leaves, makes });
            }
        }
        Ok(all)
    }

    /// The core module, as text.
    ///
    /// # Errors
    /// When a body names a function that the world does not have.
    pub fn wat(&self) -> Result<String> {
        let (resolve, world) = self.wit.resolve(&self.world)?;
        self.module(&resolve, world)
    }

    /// The component.
    ///
    /// # Errors
    /// When contracts, world or a body are wrong; the module's text is part of the error.
    pub fn build(&self) -> Result<Vec<u8>> {
        let (resolve, world) = self.wit.resolve(&self.world)?;
        let text = self.module(&resolve, world)?;
        encode(&resolve, world, text.as_bytes()).with_context(|| format!("this module was made:\n{text}"))
    }

    fn module(&self, resolve: &Resolve, world: WorldId) -> Result<String> {
        ensure!(TEXTS as usize + self.texts.len() <= HEAP as usize, "the texts do not fit below the heap");
        let mut sizes = SizeAlign::default();
        sizes.fill(resolve)?;
        let mut functions = String::new();
        let mut unused: BTreeSet<&str> = self.bodies.keys().map(String::as_str).collect();
        for (key, item) in &resolve.worlds[world].exports {
            let WorldItem::Interface { id, .. } = item else { bail!("only interfaces are exported here") };
            for (name, function) in &resolve.interfaces[*id].functions {
                unused.remove(name.as_str());
                let body = self.bodies.get(name).unwrap_or(&self.default);
                self.export(&mut functions, resolve, &sizes, key, function, body)?;
            }
        }
        ensure!(unused.is_empty(), "the world exports no {unused:?}");
        if let Some(start) = &self.start {
            writeln!(functions, "(func $start {start})\n(start $start)")?;
        }
        functions.push_str(&self.extra);
        let imports = self.imports(resolve, world, &functions)?;
        let pages = self.pages;
        let texts: String = self.texts.iter().map(|b| format!("\\{b:02x}")).collect();
        Ok(format!(
            "(module\n{imports}(memory (export \"memory\") {pages})\n(global $heap (mut i32) (i32.const {HEAP}))\n\
             {REALLOC}\n{functions}(data (i32.const {TEXTS}) \"{texts}\"))\n"
        ))
    }

    fn export(
        &self,
        out: &mut String,
        resolve: &Resolve,
        sizes: &SizeAlign,
        key: &WorldKey,
        func: &Function,
        body: &Body,
    ) -> Result<()> {
        let name = resolve
            .wasm_export_name(ABI, WasmExport::Func { interface: Some(key), func, kind: WasmExportKind::Normal });
        let signature = resolve.wasm_signature(AbiVariant::GuestExport, func);
        let body = match body {
            Body::Trap => "unreachable".into(),
            Body::Wat(wat) => wat.clone(),
            Body::Status(status) => {
                let result = func.result.as_ref().with_context(|| format!("{} answers nothing", func.name))?;
                let answer = error_answer(resolve, sizes, result, *status);
                drop_borrows(resolve, func)? + &answer.with_context(|| format!("{} has no status", func.name))?
            }
        };
        writeln!(out, "(func (export {name:?}){} {body})", types(&signature))?;
        Ok(())
    }

    fn imports(&self, resolve: &Resolve, world: WorldId, functions: &str) -> Result<String> {
        let ends = |c: char| c.is_whitespace() || "()\"".contains(c);
        let mut wanted: BTreeSet<String> = self.wanted.clone();
        wanted.extend(functions.split(ends).filter(|t| t.starts_with('$') && t.contains('.')).map(String::from));
        let mut out = String::new();
        for (key, item) in &resolve.worlds[world].imports {
            let module = resolve.name_world_key(key);
            if let WorldItem::Function(func) = item
                && wanted.remove(&format!("$.{}", func.name))
            {
                let signature = resolve.wasm_signature(AbiVariant::GuestImport, func);
                writeln!(out, "(import \"$root\" {module:?} (func $.{}{}))", func.name, types(&signature))?;
            }
            let WorldItem::Interface { id, .. } = item else { continue };
            for (short, name, signature) in importable(resolve, *id) {
                if wanted.remove(&short) {
                    writeln!(out, "(import {module:?} {name:?} (func {short}{}))", types(&signature))?;
                }
            }
        }
        ensure!(wanted.is_empty(), "no import of the world is called {wanted:?}");
        Ok(out)
    }
}

/// As bodies call a function of an interface.
fn short(resolve: &Resolve, id: InterfaceId, name: &str) -> String {
    let of = resolve.interfaces[id].name.as_deref().unwrap_or_default();
    format!("${of}.{}", name.split_once(']').map_or(name, |(_, plain)| plain))
}

/// Functions of an interface, and the drops of its resources: short name, core name, core type.
fn importable(resolve: &Resolve, id: InterfaceId) -> Vec<(String, String, WasmSignature)> {
    let interface = &resolve.interfaces[id];
    let of = interface.name.as_deref().unwrap_or_default();
    let mut all = Vec::new();
    for (name, func) in &interface.functions {
        let signature = resolve.wasm_signature(AbiVariant::GuestImport, func);
        all.push((short(resolve, id, name), name.clone(), signature));
    }
    for (name, ty) in &interface.types {
        if matches!(resolve.types[*ty].kind, TypeDefKind::Resource) {
            let takes =
                WasmSignature { params: vec![WasmType::I32], results: vec![], indirect_params: false, retptr: false };
            all.push((format!("${of}.{name}.drop"), format!("[resource-drop]{name}"), takes));
        }
    }
    all
}

/// The operands of a parameter.
fn operands(resolve: &Resolve, sizes: &SizeAlign, ty: &Type) -> Vec<Operand> {
    if *ty == Type::String {
        return vec![Operand::List(1)];
    }
    if let Type::Id(id) = ty {
        match &resolve.types[*id].kind {
            TypeDefKind::List(of) => return vec![Operand::List(sizes.size(of).size_wasm32() as u32)],
            TypeDefKind::Type(of) => return operands(resolve, sizes, of),
            TypeDefKind::Option(of) => return [vec![Operand::I32], operands(resolve, sizes, of)].concat(),
            TypeDefKind::Handle(_) => return handle_in(resolve, ty).map(Operand::Handle).into_iter().collect(),
            _ => {}
        }
    }
    let mut buffer = [WasmType::I32; 32];
    let mut flat = FlatTypes::new(&mut buffer);
    resolve.push_flat(ty, &mut flat);
    let wide = |t: &WasmType| if *t == WasmType::I64 { Operand::I64 } else { Operand::I32 };
    flat.to_vec().iter().map(wide).collect()
}

/// A resource, wherever it is used.
fn resource(resolve: &Resolve, mut of: TypeId) -> &TypeDef {
    while let TypeDefKind::Type(Type::Id(used)) = resolve.types[of].kind {
        of = used;
    }
    &resolve.types[of]
}

/// The resource of a type that is a handle, or whose first part is one.
fn handle_in(resolve: &Resolve, ty: &Type) -> Option<String> {
    let Type::Id(id) = ty else { return None };
    match &resolve.types[*id].kind {
        TypeDefKind::Handle(Handle::Own(of) | Handle::Borrow(of)) => resource(resolve, *of).name.clone(),
        TypeDefKind::Type(of) => handle_in(resolve, of),
        TypeDefKind::Result(r) => handle_in(resolve, r.ok.as_ref()?),
        TypeDefKind::Tuple(t) => handle_in(resolve, t.types.first()?),
        _ => None,
    }
}

/// A bump allocator that grows memory and never frees: a made module lives for a test.
const REALLOC: &str = "(func $alloc (export \"cabi_realloc\") (param $old i32) (param $was i32) (param $align i32) (param $size i32) (result i32)
  (local $at i32)
  (local.set $at (i32.and
    (i32.add (global.get $heap) (i32.sub (local.get $align) (i32.const 1)))
    (i32.sub (i32.const 0) (local.get $align))))
  (global.set $heap (i32.add (local.get $at) (local.get $size)))
  (block $fits
    (br_if $fits (i32.le_u (global.get $heap) (i32.mul (memory.size) (i32.const 65536))))
    (br_if $fits (i32.ne (i32.const -1) (memory.grow (i32.add (i32.const 1) (i32.shr_u (local.get $size) (i32.const 16))))))
    unreachable)
  (memory.copy (local.get $at) (local.get $old) (local.get $was))
  (local.get $at))";

fn types(signature: &WasmSignature) -> String {
    let name = |t: &WasmType| match t {
        WasmType::I32 | WasmType::Pointer | WasmType::Length => "i32",
        WasmType::I64 | WasmType::PointerOrI64 => "i64",
        WasmType::F32 => "f32",
        WasmType::F64 => "f64",
    };
    let list = |word: &str, all: &[WasmType]| -> String {
        if all.is_empty() {
            String::new()
        } else {
            format!(" ({word} {})", all.iter().map(name).collect::<Vec<_>>().join(" "))
        }
    };
    list("param", &signature.params) + &list("result", &signature.results)
}

/// Drops the handles that `func` borrows: a guest that keeps one is stopped when it returns.
fn drop_borrows(resolve: &Resolve, func: &Function) -> Result<String> {
    let (mut out, mut local) = (String::new(), 0);
    for param in &func.params {
        if let Type::Id(id) = param.ty
            && let TypeDefKind::Handle(Handle::Borrow(of)) = resolve.types[id].kind
        {
            let resource = resource(resolve, of);
            let interface = match resource.owner {
                wit_parser::TypeOwner::Interface(i) => resolve.interfaces[i].name.as_deref(),
                _ => None,
            };
            let (Some(interface), Some(name)) = (interface, &resource.name) else { bail!("a resource without a name") };
            write!(out, "(call ${interface}.{name}.drop (local.get {local})) ")?;
        }
        let mut buffer = [WasmType::I32; 32];
        let mut flat = FlatTypes::new(&mut buffer);
        ensure!(resolve.push_flat(&param.ty, &mut flat), "{} has too many parameters", func.name);
        local += flat.to_vec().len();
    }
    Ok(out)
}

/// Writes the error `status` of a `result<_, nrt-status>` to [`ANSWER`] and answers its address.
fn error_answer(resolve: &Resolve, sizes: &SizeAlign, result: &Type, status: u32) -> Option<String> {
    let Type::Id(id) = result else { return None };
    let TypeDefKind::Result(result) = &resolve.types[*id].kind else { return None };
    let at = ANSWER
        + sizes.payload_offset(wit_parser::Int::U8, [result.ok.as_ref(), result.err.as_ref()]).size_wasm32() as u32;
    Some(store_status(ANSWER, at, status))
}

/// Writes discriminant 1 to `result` and the status at `at`; answers `result`.
fn store_status(result: u32, at: u32, status: u32) -> String {
    // The first eight cases of nrt-status have their own numbers; any number can be told as the last case, `other`.
    let case = if status < 8 { status } else { 28 };
    format!(
        "(i32.store8 (i32.const {result}) (i32.const 1)) (i32.store8 (i32.const {at}) (i32.const {case}))
  (i32.store (i32.const {}) (i32.const {status})) (i32.const {result})",
        at + 4
    )
}

/// Body of a probe that answers 2.31.24.0, no hash, and the compatibility id, if there is one.
pub fn probe(compatibility: Option<u64>) -> String {
    let id = compatibility.map_or_else(String::new, |id| {
        format!(
            "(i32.store8 (i32.const {}) (i32.const 1)) (i64.store (i32.const {}) (i64.const {id}))",
            ANSWER + 48,
            ANSWER + 56
        )
    });
    format!("{} {id} (i32.const {ANSWER})", version())
}

/// Writes a version-info without hash and id to [`ANSWER`]: four numbers at 0, 8, 16, 24, option of the hash at 32, option
/// of the id at 48; 64 bytes.
pub fn version() -> String {
    let mut out = format!("(memory.fill (i32.const {ANSWER}) (i32.const 0) (i32.const 64))");
    for (i, number) in [2, 31, 24].into_iter().enumerate() {
        let _ = write!(out, " (i64.store (i32.const {}) (i64.const {number}))", ANSWER + 8 * i as u32);
    }
    out
}

/// Body that answers a list of the `len` bytes at `at` as the success of a `result<list<u8>, nrt-status>`.
pub fn ok_bytes(at: u32, len: u32) -> String {
    format!(
        "(i32.store8 (i32.const {ANSWER}) (i32.const 0)) (i32.store (i32.const {}) (i32.const {at}))
  (i32.store (i32.const {}) (i32.const {len})) (i32.const {ANSWER})",
        ANSWER + 4,
        ANSWER + 8
    )
}

/// Body that answers the success of a `result<_, E>`.
pub fn ok_unit() -> String {
    format!("(i32.store8 (i32.const {ANSWER}) (i32.const 0)) (i32.const {ANSWER})")
}

/// A socket address as it crosses the boundary.
pub fn address(of: &SocketAddrV4) -> [u8; 28] {
    let mut b = [0; 28];
    b[0] = 2;
    b[2..4].copy_from_slice(&of.port().to_be_bytes());
    b[4..8].copy_from_slice(&of.ip().octets());
    b
}

/// An id as a program hands it out: of a root on this machine, with a secret of that byte.
pub fn unique_id(secret: u8) -> [u8; 128] {
    let mut id = [0; 128];
    id[..28].copy_from_slice(&address(&SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9)));
    id[28..60].fill(secret);
    id
}

/// Body of `neuron-init-comm`: makes the communicator it is asked for, runs `then` (which finds its handle at
/// [`REPLY`] + 4), answers. Its parameters come as one record: rank-n at 0, id at 4, rank at 12.
pub fn init_comm(then: &str) -> String {
    init("(i32.load offset=12 (local.get 0)) (i32.load (local.get 0))", then)
}

/// The same for `neuron-init-global-comm`: g-dev-id at 0, g-dev-count at 4.
pub fn init_global_comm(then: &str) -> String {
    init("(i32.load (local.get 0)) (i32.load offset=4 (local.get 0))", then)
}

fn init(rank_and_ranks: &str, then: &str) -> String {
    // `create` and the entry have the same result type, so that its failure too is passed on by copying.
    format!(
        "(call $objects.communicator.create {rank_and_ranks} (i32.const {REPLY}))
  (if (i32.eqz (i32.load8_u (i32.const {REPLY}))) (then {then}))
  (memory.copy (i32.const {ANSWER}) (i32.const {REPLY}) (i32.const 12)) (i32.const {ANSWER})"
    )
}

/// Body that answers a comm-info (96 bytes at offset 8 of the result): rank 0 of 1, and the ring that leads from it to it.
fn lone_comm_info() -> String {
    let info = ANSWER + 8;
    let ring = SCRATCH + 256;
    let store = |at: u32, value: u32| format!("(i32.store (i32.const {at}) (i32.const {value})) ");
    [
        "(call $objects.communicator.drop (local.get 0)) ".to_string(),
        format!("(memory.fill (i32.const {ANSWER}) (i32.const 0) (i32.const 104)) "),
        format!("(memory.fill (i32.const {ring}) (i32.const 0) (i32.const 32)) "),
        // rank-n, local-rank-n, node-n
        store(info + 24, 1) + &store(info + 28, 1) + &store(info + 36, 1),
        // rings: one, with user-ranks [0]
        store(info + 68, ring) + &store(info + 72, 1),
        store(ring + 8, ring + 24) + &store(ring + 12, 1),
        format!("(i32.const {ANSWER})"),
    ]
    .concat()
}

/// Makes a component of a core module (text or binary) for a world, against the contracts of this release.
///
/// # Errors
/// When the module does not fit the world.
pub fn componentise(core: &[u8], world: &str) -> Result<Vec<u8>> {
    let (resolve, world) = Wit::load()?.resolve(world)?;
    encode(&resolve, world, core)
}

fn encode(resolve: &Resolve, world: WorldId, core: &[u8]) -> Result<Vec<u8>> {
    let mut module = wat::parse_bytes(core).context("the core module is not WebAssembly text")?.into_owned();
    embed_component_metadata(&mut module, resolve, world, StringEncoding::UTF8, false)?;
    described(&module)
}

/// Makes a component of a core module that carries its world, as compilers' bindings leave it.
///
/// # Errors
/// When the module is not one.
pub fn described(core: &[u8]) -> Result<Vec<u8>> {
    ComponentEncoder::default().validate(true).module(core).context("the module does not fit its world")?.encode()
}

/// Replaces bodies of functions that a core module exports. In a new body `$original` stands for the function as it was,
/// which stays in the module under a new index; the type does not change.
///
/// # Errors
/// When an export is not there or is not a function of the module's own, or a body is not WebAssembly text.
pub fn rewrite(core: &[u8], edits: &[(&str, &str)]) -> Result<Vec<u8>> {
    use wasmparser::{ExternalKind, Parser, Payload, TypeRef};
    let (mut imported, mut declared, mut bodies, mut exports) = (0u32, Vec::new(), Vec::new(), BTreeMap::new());
    let mut types = Vec::new();
    for payload in Parser::new(0).parse_all(core) {
        match payload? {
            Payload::TypeSection(all) => {
                for ty in all.into_iter_err_on_gc_types() {
                    types.push(ty?);
                }
            }
            Payload::ImportSection(all) => {
                for import in all.into_imports() {
                    imported += u32::from(matches!(import?.ty, TypeRef::Func(_)));
                }
            }
            Payload::FunctionSection(all) => {
                for ty in all {
                    declared.push(ty?);
                }
            }
            Payload::ExportSection(all) => {
                for export in all {
                    let export = export?;
                    if export.kind == ExternalKind::Func {
                        exports.insert(export.name.to_string(), export.index);
                    }
                }
            }
            Payload::CodeSectionEntry(body) => bodies.push(body.as_bytes().to_vec()),
            _ => {}
        }
    }
    for (name, wat) in edits {
        let index = exports.get(*name).with_context(|| format!("the module exports no function `{name}`"))?;
        let own = index.checked_sub(imported).map(|i| i as usize).filter(|i| *i < bodies.len());
        let own = own.with_context(|| format!("`{name}` is an import, it has no body"))?;
        let moved = imported + bodies.len() as u32;
        let ty = declared[own];
        let new = body(&types[ty as usize], &wat.replace("$original", &moved.to_string()))
            .with_context(|| format!("the new body of `{name}`"))?;
        let old = std::mem::replace(&mut bodies[own], new);
        bodies.push(old);
        declared.push(ty);
    }
    let mut functions = wasm_encoder::FunctionSection::new();
    for ty in declared {
        functions.function(ty);
    }
    let mut code = wasm_encoder::CodeSection::new();
    for body in &bodies {
        code.raw(body);
    }
    let mut module = wasm_encoder::Module::new();
    for payload in Parser::new(0).parse_all(core) {
        let payload = payload?;
        match &payload {
            Payload::FunctionSection(_) => drop(module.section(&functions)),
            Payload::CodeSectionStart { .. } => drop(module.section(&code)),
            _ => {
                // Indices did not change, so that every other section is right as it stands.
                if let Some((id, range)) = payload.as_section() {
                    module.section(&wasm_encoder::RawSection {
                        id,
                        data: &core[range.start as usize..range.end as usize],
                    });
                }
            }
        }
    }
    Ok(module.finish())
}

/// Assembles one function body of the given type.
fn body(ty: &wasmparser::FuncType, wat: &str) -> Result<Vec<u8>> {
    use wasmparser::{Parser, Payload};
    let list =
        |word: &str, all: &[wasmparser::ValType]| -> String { all.iter().map(|t| format!(" ({word} {t})")).collect() };
    let text = format!("(module (func{}{} {wat}))", list("param", ty.params()), list("result", ty.results()));
    let module = wat::parse_str(&text).with_context(|| text.clone())?;
    for payload in Parser::new(0).parse_all(&module) {
        if let Payload::CodeSectionEntry(body) = payload? {
            return Ok(body.as_bytes().to_vec());
        }
    }
    bail!("no body came out of {text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edit_that_changes_nothing_is_an_error() {
        let mut wit = Wit::load().unwrap();
        assert!(wit.edit("nrt", "no such text", "").is_err());
        assert!(wit.redeclare("nrt", "no-such-function", "").is_err());
        assert!(wit.reversion("neuron:nrt", Some("9.9.9"), None).is_err());
        assert!(wit.resolve(TRANSPORT).is_ok());
    }

    #[test]
    fn a_version_changes_everywhere_and_the_contracts_still_parse() {
        for (package, old, new) in [
            ("neuron:nrt", Some("2.0.0"), Some("3.0.0")),
            ("neuron:nrt", Some("2.0.0"), Some("1.9.0")),
            ("neuron:nrt", Some("2.0.0"), None),
            ("neuron:hw", Some("1.0.0"), Some("1.1.0")),
            ("neuron:nccom", None, Some("9.9.9")),
        ] {
            let mut wit = Wit::load().unwrap();
            wit.reversion(package, old, new).unwrap();
            let (resolve, world) = wit.resolve(TRANSPORT).unwrap();
            let world = &resolve.worlds[world];
            let names = world.imports.keys().chain(world.exports.keys()).map(|k| resolve.name_world_key(k));
            let ours: Vec<String> = names.filter(|n| n.starts_with(package)).collect();
            assert!(!ours.is_empty());
            for name in ours {
                assert_eq!(name.split_once('@').map(|n| n.1), new, "{name}");
            }
        }
    }

    #[test]
    fn what_may_be_imported_comes_with_its_operands() {
        use Operand::{Handle, I32, I64, List};
        let p = Plugin::new(TRANSPORT).unwrap();
        let all = p.importable().unwrap();
        let of = |name: &str| all.iter().find(|i| i.name == name).unwrap();
        let spawn = of("$tasks.spawn");
        let operands: Vec<_> = spawn.params.iter().flat_map(|p| p.1.clone()).collect();
        assert_eq!(operands, [List(1), List(1), I32, Handle("listener".into())]);
        let create = of("$objects.communicator.create");
        assert!(create.replies && !create.leaves && create.makes.as_deref() == Some("communicator"));
        let duplicate = of("$objects.connector.duplicate");
        assert!(!duplicate.replies && duplicate.leaves && duplicate.makes.as_deref() == Some("connector"));
        assert_eq!(of("$affinity.set").params[0].1, [List(8)]);
        assert_eq!(of("$proxy.register").params[1].1, [I64]);
        assert_eq!(of("$objects.region.drop").params[0].1, [Handle("region".into())]);
        assert_eq!(of("$sockets.accept").makes.as_deref(), Some("connection"));
        // A module that imports them all by these names is one.
        let mut all_of_them = Plugin::transport().unwrap();
        for import in &all {
            let (interface, function) = import.name[1..].split_once('.').unwrap();
            all_of_them.import(interface, function);
        }
        all_of_them.build().unwrap();
    }

    #[test]
    fn a_body_that_names_no_function_of_the_world_is_an_error() {
        let mut p = Plugin::transport().unwrap();
        p.body("neuron-no-such-entry", "unreachable");
        assert!(p.build().is_err());
        let mut p = Plugin::transport().unwrap();
        p.body("neuron-fini-plugin", "(call $log.shout) unreachable");
        assert!(p.build().is_err());
    }

    #[test]
    fn rewriting_keeps_the_function_as_it_was_under_another_index() {
        let core = wat::parse_str(
            "(module (import \"m\" \"i\" (func)) (func (export \"seven\") (result i32) i32.const 7) (func (export \"twice\") (result i32) call 1 call 1 i32.add))",
        )
        .unwrap();
        let new = rewrite(&core, &[("seven", "(i32.add (call $original) (i32.const 1))")]).unwrap();
        wasmparser::Validator::new().validate_all(&new).unwrap();
        assert!(new.len() > core.len());
        // `call 3; i32.const 1; i32.add`: function 3 is the one that came last.
        assert!(new.windows(5).any(|w| w == [0x10, 3, 0x41, 1, 0x6a]));
        assert!(rewrite(&core, &[("eight", "unreachable")]).is_err());
        assert!(rewrite(&core, &[("seven", "not a word")]).is_err());
    }
}
