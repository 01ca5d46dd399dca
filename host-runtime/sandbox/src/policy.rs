//! What one tenant may do, in one TOML file that an operator writes.
//!
//! The file is the *grant*. What it does not grant is refused: an absent table grants nothing, and a limit that is not
//! written is the default of [`Limits`]. A plugin's *request* is its imports and its manifest; both are needed.
//!
//! The schema is in docs/tenants.md. Every error names the file, the line and the key.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use ed25519_dalek::VerifyingKey;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};
use sha2::{Digest, Sha256};
use toml::Spanned;

use crate::limits::{Limits, MAX_POLICY_BYTES, MAX_SESSIONS};

/// Longest name of a tenant.
const MAX_NAME: usize = 32;
/// Plugins, addresses, files and interfaces that one policy lists, of each.
const MAX_LISTED: usize = 256;

/// A policy that was read and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// The tenant's name: 1 to 32 of `a` to `z`, `0` to `9` and `-`.
    pub tenant: String,
    /// Plugins that may be loaded.
    pub plugins: Plugins,
    /// Devices and memory.
    pub devices: Devices,
    /// What its instances may use.
    pub limits: Limits,
    /// Addresses it may listen on and reach.
    pub network: Network,
    /// Variables whose files its plugins may read.
    pub files: BTreeSet<String>,
    /// WASI interfaces granted, such as `wasi:clocks/monotonic-clock`.
    pub wasi: BTreeSet<String>,
    /// The share of what tenants compete for.
    pub share: SharePolicy,
    /// Whom the service serves as this tenant.
    pub service: Access,
}

/// Whom the service serves as this tenant.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Access {
    /// Users whose processes may connect. The service's own, if it is started so that its own user may
    /// (`ServeConfig::allow_own_user`): when it is named, or when none is.
    pub uids: BTreeSet<u32>,
    /// Connections at a time: one for each runtime and one for each communicator.
    pub clients: usize,
}

impl Default for Access {
    fn default() -> Self {
        Access { uids: BTreeSet::new(), clients: MAX_SESSIONS }
    }
}

/// Plugins that may be loaded.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plugins {
    /// Where they lie. Opened once; no file name leaves it.
    pub directory: PathBuf,
    /// Ed25519 public keys. With one or more, each plugin needs a signature by one of them, in `FILE.sig` beside it.
    #[serde(default)]
    pub signers: Vec<Signer>,
    /// The files.
    #[serde(rename = "allow")]
    pub allowed: Vec<Allowed>,
}

/// One plugin.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allowed {
    /// Its name in the directory: no separator, not `.` or `..`.
    pub file: FileName,
    /// SHA-256 of its bytes; any bytes if absent.
    pub sha256: Option<Hex32>,
}

/// Devices and memory.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Devices {
    /// Logical cores.
    pub cores: BTreeSet<i32>,
    /// Device memory on each of them, bytes.
    pub hbm: Bytes,
    /// Memory registered for the network, in all, bytes.
    pub registered: Bytes,
}

/// Addresses a tenant's plugins may use.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// Where they may listen.
    pub listen: Vec<Reach>,
    /// Whom they may connect to.
    pub reach: Vec<Reach>,
    /// Host names that they may look up, beside that of their group's root.
    pub names: Vec<HostName>,
}

impl Network {
    /// Every address and port: without a policy.
    pub fn any() -> Network {
        let nets = [IpNet::from(Ipv4Net::default()), IpNet::from(Ipv6Net::default())];
        let all = nets.map(|net| Reach { net, ports: ALL_PORTS }).to_vec();
        Network { listen: all.clone(), reach: all, names: vec![HostName::any()] }
    }

    /// The name that may be looked up for who asks for `host`, as it goes to a name server; none if none may.
    pub(crate) fn may_look_up(&self, host: &str) -> Option<String> {
        self.names.iter().find_map(|n| n.holds(host))
    }

    /// First and last of the ports that may serve who asks to listen on `ip` and `port`: that port if it is granted; for port
    /// 0 all that are. None if nothing is. All ports are [`ALL_PORTS`].
    pub fn listening(&self, ip: IpAddr, port: u16) -> Vec<(u16, u16)> {
        let on = self.listen.iter().filter(|r| r.net.contains(&ip.to_canonical()));
        match port {
            0 => on.map(|r| r.ports).collect(),
            _ => on.filter(|r| r.holds(ip, port)).map(|_| (port, port)).take(1).collect(),
        }
    }

    /// Whether a plugin may listen on `ip` and `port`, or with port 0 on some port.
    pub fn may_listen(&self, ip: IpAddr, port: u16) -> bool {
        !self.listening(ip, port).is_empty()
    }

    /// Where plugins of both tenants may listen, if anywhere: a grant of each, and what they have in common.
    pub fn shared(&self, other: &Network) -> Option<(Reach, Reach, Reach)> {
        let pairs = self.listen.iter().flat_map(|a| other.listen.iter().map(move |b| (*a, *b)));
        pairs.filter_map(|(a, b)| Some((a, b, a.common(&b)?))).next()
    }

    /// Whether a plugin may connect to `ip` and `port`.
    pub fn may_reach(&self, ip: IpAddr, port: u16) -> bool {
        self.reach.iter().any(|r| r.holds(ip, port))
    }
}

/// `127.0.0.1:20000-32000`, `10.0.0.0/8:*`, `[fd00::]/8:4791`: addresses and their ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reach {
    /// Addresses.
    pub net: IpNet,
    /// First and last port.
    pub ports: (u16, u16),
}

/// What `*` means. The first of them asks the system for any.
pub const ALL_PORTS: (u16, u16) = (0, u16::MAX);

impl Reach {
    fn holds(&self, ip: IpAddr, port: u16) -> bool {
        // An IPv4 address that came in an IPv6 one is that IPv4 address, for whoever checks and for the system alike.
        self.net.contains(&ip.to_canonical()) && (self.ports.0..=self.ports.1).contains(&port)
    }

    /// Where listeners of the two would be in one another's way, if anywhere. One on `0.0.0.0` is at every IPv4 address, one on
    /// `[::]` at every address.
    fn common(&self, other: &Reach) -> Option<Reach> {
        let everywhere = |a: &IpNet, b: &IpNet| match a {
            IpNet::V4(v4) => v4.contains(&Ipv4Addr::UNSPECIFIED) && matches!(b, IpNet::V4(_)),
            IpNet::V6(v6) => v6.contains(&Ipv6Addr::UNSPECIFIED),
        };
        let holds = |a: &IpNet, b: &IpNet| a.contains(b) || everywhere(a, b);
        let net = match (self.net, other.net) {
            (a, b) if holds(&a, &b) => b,
            (a, b) if holds(&b, &a) => a,
            _ => return None,
        };
        let ports = (self.ports.0.max(other.ports.0), self.ports.1.min(other.ports.1));
        (ports.0 <= ports.1).then_some(Reach { net, ports })
    }

    /// Whether all of `other` is in it.
    pub(crate) fn holds_all(&self, other: &Reach) -> bool {
        self.net.contains(&other.net) && self.ports.0 <= other.ports.0 && other.ports.1 <= self.ports.1
    }
}

/// A host name that may be looked up: `host.example`, or `*.example` for all that end so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostName {
    /// In small letters; what stands behind the `*` if there is one.
    name: String,
    /// Whether it is an end.
    end: bool,
}

impl HostName {
    /// Every name: without a policy. No text is it.
    fn any() -> HostName {
        HostName { name: String::new(), end: true }
    }

    /// What goes to a name server for who asks for `host`. One name is asked for as the operator wrote it: upper and lower case
    /// would tell something, too.
    fn holds(&self, host: &str) -> Option<String> {
        match self.end {
            true => {
                let at = host.len().checked_sub(self.name.len())?;
                let ends = at > 0 && host.is_char_boundary(at) && host[at..].eq_ignore_ascii_case(&self.name);
                ends.then(|| host.into())
            }
            false => host.eq_ignore_ascii_case(&self.name).then(|| self.name.clone()),
        }
    }

    /// Whether all of `other` is in it.
    pub(crate) fn holds_all(&self, other: &HostName) -> bool {
        self == other || self.end && other.name.len() > self.name.len() && other.name.ends_with(&self.name)
    }
}

impl FromStr for HostName {
    type Err = String;
    fn from_str(s: &str) -> Result<HostName, String> {
        let (end, name) = s.strip_prefix('*').map_or((false, s), |end| (true, end));
        let labels = if end { name.strip_prefix('.') } else { Some(name) };
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let label = |l: &str| !l.is_empty() && l.len() <= 63 && l.chars().all(plain);
        let fits = labels.is_some_and(|l| l.split('.').all(label)) && name.len() <= 253;
        if !fits || s.parse::<IpAddr>().is_ok() {
            return Err(format!(
                "`{s}` is no host name; expected one such as \"host.example\", or \"*.example\" for all that end so"
            ));
        }
        Ok(HostName { name: name.to_ascii_lowercase(), end })
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.end { "*" } else { "" }, self.name)
    }
}

/// Addresses as an operator writes them.
pub fn listed<T: fmt::Display>(all: impl IntoIterator<Item = T>) -> String {
    let all: Vec<String> = all.into_iter().map(|a| a.to_string()).collect();
    if all.is_empty() { "nothing".into() } else { all.join(", ") }
}

impl FromStr for Reach {
    type Err = String;
    fn from_str(s: &str) -> Result<Reach, String> {
        let how = "expected ADDRESS[/BITS]:PORTS, such as 127.0.0.1:20000-32000, 10.0.0.0/8:* or [fd00::]/8:4791";
        let (net, ports) = s.rsplit_once(':').ok_or(how)?;
        let (ip, bits) = net.split_once('/').map_or((net, None), |(ip, bits)| (ip, Some(bits)));
        let bare = ip.strip_prefix('[').and_then(|ip| ip.strip_suffix(']'));
        let ip: IpAddr = bare.unwrap_or(ip).parse().map_err(|_| how)?;
        if ip.is_ipv6() != bare.is_some() {
            return Err(how.into());
        }
        if ip.to_canonical() != ip {
            return Err(format!("{ip} is the IPv4 address {}; write that", ip.to_canonical()));
        }
        let whole = if ip.is_ipv6() { 128 } else { 32 };
        let bits = bits.map_or(Ok(whole), |b| b.parse::<u8>()).map_err(|_| how)?;
        let net = IpNet::new(ip, bits).map_err(|_| format!("/{bits} is more than the {whole} bits of {ip}"))?;
        if net.addr() != net.network() {
            return Err(format!("{net} has bits set behind the first {bits}; write {}", net.trunc()));
        }
        let port = |p: &str| p.parse::<u16>().ok().filter(|p| *p > 0).ok_or(how);
        let ports = match ports.split_once('-') {
            _ if ports == "*" => ALL_PORTS,
            Some((first, last)) => (port(first)?, port(last)?),
            None => (port(ports)?, port(ports)?),
        };
        if ports.0 > ports.1 {
            return Err(format!("the ports {}-{} are in the wrong order", ports.0, ports.1));
        }
        Ok(Reach { net, ports })
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ip = self.net.addr();
        match ip {
            IpAddr::V4(ip) => write!(f, "{ip}")?,
            IpAddr::V6(ip) => write!(f, "[{ip}]")?,
        }
        if self.net.prefix_len() < self.net.max_prefix_len() {
            write!(f, "/{}", self.net.prefix_len())?;
        }
        match self.ports {
            ALL_PORTS => write!(f, ":*"),
            (a, b) if a == b => write!(f, ":{a}"),
            (a, b) => write!(f, ":{a}-{b}"),
        }
    }
}

/// The share of what tenants compete for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct SharePolicy {
    /// Weight among tenants whose operations compete, 1 to 1000.
    pub weight: u32,
    /// Bytes a second that its operations may move; none for no cap.
    pub bandwidth: Option<Rate>,
    /// Operations in progress at a time in one process: one for each communicator and one for each stream.
    pub proxy_slots: u32,
    /// Share of one core that its plugins' calls may take, in per cent; 100 is a whole core.
    pub control_cpu: u32,
}

impl Default for SharePolicy {
    fn default() -> Self {
        SharePolicy { weight: 100, bandwidth: None, proxy_slots: 1280, control_cpu: 100 }
    }
}

/// `64 MiB`, `1 GiB`, or a number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes(pub u64);

/// `4 GiB/s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate(pub u64);

/// `20 s`, `500 ms`, `2 min`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

/// 32 bytes in hexadecimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hex32(pub [u8; 32]);

/// An Ed25519 public key, 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signer(pub VerifyingKey);

/// A name in a directory, nothing more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileName(pub String);

/// A number and its unit: `64 MiB` and `64MiB` alike.
fn number(s: &str) -> Option<(u64, &str)> {
    let end = s.find(|c: char| !c.is_ascii_digit()).unwrap_or(s.len());
    Some((s[..end].parse().ok()?, s[end..].trim_start()))
}

impl FromStr for Bytes {
    type Err = String;
    fn from_str(s: &str) -> Result<Bytes, String> {
        let how = || format!("`{s}` is no size; expected a number and B, KiB, MiB, GiB or TiB, such as \"64 MiB\"");
        let (n, unit) = number(s).ok_or_else(how)?;
        let shift = ["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|u| *u == unit).ok_or_else(how)?;
        n.checked_mul(1 << (10 * shift)).map(Bytes).ok_or_else(|| format!("`{s}` is more than 2^64 bytes"))
    }
}

impl FromStr for Rate {
    type Err = String;
    fn from_str(s: &str) -> Result<Rate, String> {
        let how = || format!("`{s}` is no rate; expected a size a second, such as \"4 GiB/s\"");
        let bytes: Bytes = s.strip_suffix("/s").ok_or_else(how)?.trim_end().parse().map_err(|_| how())?;
        if bytes.0 == 0 {
            Err("a rate of 0 lets nothing move; leave the key out for no cap".into())
        } else {
            Ok(Rate(bytes.0))
        }
    }
}

impl FromStr for Span {
    type Err = String;
    fn from_str(s: &str) -> Result<Span, String> {
        let how = || format!("`{s}` is no time; expected a number and ms, s, min or h, such as \"20 s\"");
        let (n, unit) = number(s).ok_or_else(how)?;
        let ms = match unit {
            "ms" => 1,
            "s" => 1000,
            "min" => 60_000,
            "h" => 3_600_000,
            _ => return Err(how()),
        };
        let ms = n.checked_mul(ms).filter(|ms| (1..=MAX_SPAN_MS).contains(ms));
        ms.map(|ms| Span(Duration::from_millis(ms))).ok_or_else(|| format!("`{s}` is not between 1 ms and 30 days"))
    }
}

const MAX_SPAN_MS: u64 = 30 * 24 * 3_600_000;

impl FromStr for Hex32 {
    type Err = String;
    fn from_str(s: &str) -> Result<Hex32, String> {
        let mut out = [0; 32];
        if s.len() != 64 || !s.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(format!("expected 64 hexadecimal digits, found {} characters", s.chars().count()));
        }
        for (i, byte) in out.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&s[2 * i..2 * i + 2], 16).map_err(|e| e.to_string())?;
        }
        Ok(Hex32(out))
    }
}

impl FromStr for Signer {
    type Err = String;
    fn from_str(s: &str) -> Result<Signer, String> {
        let key = VerifyingKey::from_bytes(&s.parse::<Hex32>()?.0).ok().filter(|key| !key.is_weak());
        key.map(Signer).ok_or_else(|| format!("`{s}` is no Ed25519 public key; `wccl plugin keygen` makes one"))
    }
}

impl FromStr for FileName {
    type Err = String;
    fn from_str(s: &str) -> Result<FileName, String> {
        let plain = !s.is_empty() && s != "." && s != ".." && !s.contains(['/', '\\', '\0']) && s.len() <= 255;
        if plain {
            Ok(FileName(s.into()))
        } else {
            Err(format!("`{s}` is no file name; a name in plugins.directory, without `/`"))
        }
    }
}

macro_rules! from_text {
    ($($t:ty),*) => {$(
        impl<'de> Deserialize<'de> for $t {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                String::deserialize(d)?.parse().map_err(D::Error::custom)
            }
        }
    )*};
}
/// As an operator writes it, for a service's clients.
impl Serialize for Reach {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

/// As an operator writes it, for a service's clients.
impl Serialize for HostName {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

from_text!(Reach, HostName, Bytes, Rate, Span, Hex32, Signer, FileName);

/// The file as it is written; what needs more than one value to check keeps its place.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    tenant: Spanned<String>,
    plugins: Spanned<Plugins>,
    #[serde(default)]
    devices: Devices,
    #[serde(default)]
    limits: WrittenLimits,
    #[serde(default)]
    network: Network,
    #[serde(default)]
    files: WrittenFiles,
    #[serde(default)]
    wasi: WrittenWasi,
    share: Option<Spanned<SharePolicy>>,
    #[serde(default)]
    service: Access,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct WrittenFiles {
    read: BTreeSet<Spanned<String>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct WrittenWasi {
    grant: BTreeSet<Spanned<String>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct WrittenLimits {
    memory: Option<Bytes>,
    memory_in_all: Option<Bytes>,
    table: Option<usize>,
    call: Option<Span>,
    call_in_all: Option<Span>,
    communicators: Option<usize>,
    connections: Option<usize>,
    names: Option<usize>,
    objects: Option<usize>,
    tasks: Option<usize>,
    log_lines: Option<u32>,
    restarts: Option<u32>,
    restart_window: Option<Span>,
    restart_pause: Option<Span>,
    state: Option<Bytes>,
    plugin_bytes: Option<Bytes>,
    plugin_functions: Option<usize>,
    plugin_locals: Option<usize>,
    function_locals: Option<usize>,
    function_bytes: Option<Bytes>,
    plugin_names: Option<usize>,
    plugin_instances: Option<usize>,
}

/// Why a policy cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The file.
    #[error("the policy {path} cannot be read: {why}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why; not as a source, which would be told twice.
        why: std::io::Error,
    },
    /// Its text.
    #[error("the policy {path}, line {line}{}: {why}", key.as_ref().map_or(String::new(), |k| format!(", key `{k}`")))]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// The key, with its table.
        key: Option<String>,
        /// What is wrong.
        why: String,
    },
}

impl Policy {
    /// The tenant's number, made of its name, so that its ranks agree in whatever process they run. Never 0, which is the
    /// tenant of a runtime without a policy.
    pub fn tenant_id(&self) -> u64 {
        let hash = Sha256::digest(self.tenant.as_bytes());
        hash[..8].iter().fold(0, |n, b| n << 8 | u64::from(*b)).max(1)
    }

    /// Reads a policy file.
    ///
    /// # Errors
    /// [`PolicyError`], which names the line and the key.
    pub fn read(path: &Path) -> Result<Policy, PolicyError> {
        use std::io::Read;
        let file = |why| PolicyError::File { path: path.into(), why };
        let mut text = String::new();
        // One byte more than allowed, so that too much is noticed and never all read.
        let from = std::fs::File::open(path).map_err(file)?;
        from.take(MAX_POLICY_BYTES as u64 + 1).read_to_string(&mut text).map_err(file)?;
        if text.len() > MAX_POLICY_BYTES {
            let why = format!("it has more than {MAX_POLICY_BYTES} bytes");
            return Err(file(std::io::Error::other(why)));
        }
        Policy::parse(path, &text)
    }

    /// Reads the text of a policy; `path` is for messages.
    ///
    /// # Errors
    /// As [`Policy::read`].
    pub fn parse(path: &Path, text: &str) -> Result<Policy, PolicyError> {
        let line = |span: Option<std::ops::Range<usize>>, why: String| {
            let at = span.map_or(0, |s| s.start);
            PolicyError::Line { path: path.into(), line: line_of(text, at), key: key_at(text, at), why }
        };
        let w: Written = toml::from_str(text).map_err(|e| line(e.span(), e.message().into()))?;
        let at = |span, why: String| Err(line(Some(span), why));
        let name = w.tenant.get_ref();
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(plain) {
            return at(w.tenant.span(), format!("a tenant's name is 1 to {MAX_NAME} of a-z, 0-9 and -"));
        }
        let plugins = w.plugins.get_ref();
        if plugins.allowed.is_empty() || plugins.allowed.len() > MAX_LISTED {
            return at(w.plugins.span(), format!("1 to {MAX_LISTED} plugins are allowed in [[plugins.allow]]"));
        }
        if !plugins.directory.is_absolute() {
            return at(
                w.plugins.span(),
                "the directory must be an absolute path: it must not depend on where a program starts".into(),
            );
        }
        for (i, a) in plugins.allowed.iter().enumerate() {
            if plugins.allowed[..i].iter().any(|b| b.file == a.file) {
                return at(w.plugins.span(), format!("{} is allowed twice", a.file.0));
            }
        }
        for v in &w.files.read {
            if !crate::served::READABLE.contains(&v.get_ref().as_str()) {
                let known = crate::served::READABLE.join(", ");
                return at(v.span(), format!("no plugin reads a file named by {}; known are {known}", v.get_ref()));
            }
        }
        for v in &w.wasi.grant {
            if !crate::served::WASI.contains(&v.get_ref().as_str()) {
                let known = crate::served::WASI.join(", ");
                return at(
                    v.span(),
                    format!("{} is not an interface this host can grant; those are {known}", v.get_ref()),
                );
            }
        }
        if let Some(share) = &w.share {
            let s = share.get_ref();
            if !(1..=1000).contains(&s.weight)
                || !(1..=65_536).contains(&s.proxy_slots)
                || !(1..=100).contains(&s.control_cpu)
            {
                let why = "weight is 1 to 1000, proxy-slots 1 to 65536, control-cpu 1 to 100";
                return at(share.span(), why.into());
            }
        }
        let d = Limits::default();
        let l = w.limits;
        let size = |b: Option<Bytes>, d: usize| b.map_or(d, |b| usize::try_from(b.0).unwrap_or(usize::MAX));
        let limits = Limits {
            memory: size(l.memory, d.memory),
            memory_in_all: size(l.memory_in_all, d.memory_in_all),
            table: l.table.unwrap_or(d.table),
            call: l.call.map_or(d.call, |s| s.0),
            wall: l.call_in_all.map_or(d.wall, |s| s.0),
            communicators: l.communicators.unwrap_or(d.communicators),
            sockets: l.connections.unwrap_or(d.sockets),
            names: l.names.unwrap_or(d.names),
            objects: l.objects.unwrap_or(d.objects),
            tasks: l.tasks.unwrap_or(d.tasks),
            log_rate: l.log_lines.unwrap_or(d.log_rate),
            restarts: l.restarts.unwrap_or(d.restarts),
            restart_window: l.restart_window.map_or(d.restart_window, |s| s.0),
            restart_pause: l.restart_pause.map_or(d.restart_pause, |s| s.0),
            state: size(l.state, d.state),
            plugin_bytes: size(l.plugin_bytes, d.plugin_bytes),
            plugin_functions: l.plugin_functions.unwrap_or(d.plugin_functions),
            plugin_locals: l.plugin_locals.unwrap_or(d.plugin_locals),
            function_locals: l.function_locals.unwrap_or(d.function_locals),
            function_bytes: size(l.function_bytes, d.function_bytes),
            plugin_names: l.plugin_names.unwrap_or(d.plugin_names),
            plugin_instances: l.plugin_instances.unwrap_or(d.plugin_instances),
            ..d
        };
        Ok(Policy {
            tenant: w.tenant.into_inner(),
            plugins: w.plugins.into_inner(),
            devices: w.devices,
            limits,
            network: w.network,
            files: w.files.read.into_iter().map(Spanned::into_inner).collect(),
            wasi: w.wasi.grant.into_iter().map(Spanned::into_inner).collect(),
            share: w.share.map(Spanned::into_inner).unwrap_or_default(),
            service: w.service,
        })
    }
}

/// The line of a byte, counted from 1.
fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|b| **b == b'\n').count()
}

/// The key whose value is at a byte, with its table: what an operator searches for.
fn key_at(text: &str, at: usize) -> Option<String> {
    let line = line_of(text, at);
    let mut table = String::new();
    let mut key = None;
    for l in text.lines().take(line) {
        let l = l.trim();
        if let Some(header) = l.strip_prefix('[').and_then(|h| h.split(']').next()) {
            table = header.trim_start_matches('[').trim().to_string();
            key = None;
        } else if let Some((k, _)) = l.split_once('=').filter(|_| !l.starts_with('#')) {
            key = Some(k.trim().to_string());
        }
    }
    match (table.is_empty(), key) {
        (true, key) => key,
        (false, Some(key)) => Some(format!("{table}.{key}")),
        (false, None) => Some(table),
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB"];
        let unit = (0..units.len()).rev().find(|u| self.0 > 0 && self.0 % (1 << (10 * u)) == 0).unwrap_or(0);
        write!(f, "{} {}", self.0 >> (10 * unit), units[unit])
    }
}

/// What the tenant may do, in plain words, a line each.
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tenant {}", self.tenant)?;
        for a in &self.plugins.allowed {
            let pin = if a.sha256.is_some() { "if its SHA-256 is the one in the policy" } else { "whatever is in it" };
            let signed = if self.plugins.signers.is_empty() { "" } else { ", and signed by one of the signers" };
            writeln!(f, "  may load {} from {}, {pin}{signed}", a.file.0, self.plugins.directory.display())?;
        }
        writeln!(f, "  may use logical cores: {}", listed(&self.devices.cores))?;
        writeln!(
            f,
            "  may have {} of device memory on each, {} registered in all",
            self.devices.hbm, self.devices.registered
        )?;
        let l = &self.limits;
        let (state, in_all) = (Bytes(l.state as u64), Bytes(l.memory_in_all as u64));
        writeln!(
            f,
            "  may have {} communicators, each with up to {state} of plan at a swap; {} background tasks, {} connections, {} \
             published names, {in_all} of plugin memory and {} log lines a second in all",
            l.communicators, l.tasks, l.sockets, l.names, l.log_rate
        )?;
        let memory = Bytes(l.memory as u64);
        writeln!(f, "  each instance: {memory} of memory, tables of {} elements, {} host objects", l.table, l.objects)?;
        let (bytes, body) = (Bytes(l.plugin_bytes as u64), Bytes(l.function_bytes as u64));
        writeln!(
            f,
            "  a plugin has at most {bytes}, {} functions of {body} and {} locals each, {} locals in all, {} imports and exports, \
             {} instances",
            l.plugin_functions, l.function_locals, l.plugin_locals, l.plugin_names, l.plugin_instances
        )?;
        writeln!(f, "  each call: {:?} of its own time, {:?} in all", l.call, l.wall)?;
        writeln!(
            f,
            "  a plugin that stops is started again {} times in {:?}, the first time after {:?}; then it is quarantined",
            l.restarts, l.restart_window, l.restart_pause
        )?;
        writeln!(f, "  may listen on: {}", listed(&self.network.listen))?;
        writeln!(f, "  may connect to: {}", listed(&self.network.reach))?;
        let names = listed(&self.network.names);
        writeln!(f, "  may look up host names: that of its group's root, and {names}")?;
        writeln!(f, "  may read files named by: {}", listed(&self.files))?;
        writeln!(f, "  may import of WASI: {}", listed(&self.wasi))?;
        let s = &self.share;
        let cap = s.bandwidth.map_or("no cap".into(), |r| format!("at most {}/s", Bytes(r.0)));
        writeln!(
            f,
            "  has weight {} among tenants, {cap}, {} operations at a time, {} % of a core for its plugins",
            s.weight, s.proxy_slots, s.control_cpu
        )?;
        let uids: Vec<String> = self.service.uids.iter().map(u32::to_string).collect();
        let uids = if uids.is_empty() {
            "the service's own user, if it is started with --allow-own-user".into()
        } else {
            format!("users {}", uids.join(", "))
        };
        writeln!(f, "  is served to processes of {uids}, over {} connections at a time", self.service.clients)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WHOLE: &str = r#"
tenant = "red"

[plugins]
directory = "/srv/red"
signers = ["d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"]
[[plugins.allow]]
file = "nccom.wasm"
sha256 = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
[[plugins.allow]]
file = "other.wasm"

[devices]
cores = [0, 1]
hbm = "1 GiB"
registered = "256MiB"

[limits]
memory = "32 MiB"
call = "500 ms"
call-in-all = "2 min"
communicators = 4

[network]
listen = ["127.0.0.1:20000-32000"]
reach = ["127.0.0.0/8:*", "[fd00::]/8:4791"]
names = ["Host.example", "*.Cluster.example"]

[share]
weight = 300
bandwidth = "4 GiB/s"
"#;

    fn parse(text: &str) -> Result<Policy, String> {
        Policy::parse(Path::new("red.toml"), text).map_err(|e| e.to_string())
    }

    #[test]
    fn a_whole_policy_is_read() {
        let p = parse(WHOLE).unwrap();
        assert_eq!((p.tenant.as_str(), p.plugins.allowed.len()), ("red", 2));
        assert_eq!((p.devices.hbm.0, p.devices.registered.0), (1 << 30, 256 << 20));
        assert_eq!((p.limits.memory, p.limits.call), (32 << 20, Duration::from_millis(500)));
        assert_eq!((p.limits.wall, p.limits.communicators), (Duration::from_secs(120), 4));
        assert_eq!(p.limits.tasks, Limits::default().tasks);
        assert_eq!((p.share.weight, p.share.bandwidth), (300, Some(Rate(4 << 30))));
        let words = p.to_string();
        assert!(words.contains("may connect to: 127.0.0.0/8:*, [fd00::]/8:4791\n"), "{words}");
        assert!(words.contains("that of its group's root, and host.example, *.cluster.example\n"), "{words}");
        assert!(words.contains("may load other.wasm from /srv/red, whatever is in it, and signed"), "{words}");
    }

    #[test]
    fn the_documented_example_is_a_policy() {
        let page = include_str!("../../../docs/tenants.md");
        let (_, rest) = page.split_once("```toml\n").unwrap();
        let p = parse(rest.split_once("```").unwrap().0).unwrap();
        assert_eq!((p.plugins.allowed.len(), p.share.control_cpu, p.wasi.len()), (2, 50, 1));
    }

    #[test]
    fn a_file_that_is_too_long_or_absent_is_refused_once() {
        let path = std::env::temp_dir().join(format!("wccl-policy-test-{}.toml", std::process::id()));
        let e = Policy::read(&path).unwrap_err();
        assert!(
            std::error::Error::source(&e).is_none() && e.to_string().contains("cannot be read: No such file"),
            "{e}"
        );
        std::fs::write(&path, "#".repeat(MAX_POLICY_BYTES + 1)).unwrap();
        let e = Policy::read(&path).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(e.contains("it has more than 65536 bytes"), "{e}");
    }

    #[test]
    fn a_key_with_which_anybody_can_sign_is_none() {
        let e = "0".repeat(64).parse::<Signer>().unwrap_err();
        assert!(e.contains("is no Ed25519 public key"), "{e}");
    }

    #[test]
    fn a_tenants_number_is_its_names() {
        let of = |name: &str| parse(&WHOLE.replacen("red", name, 1)).unwrap().tenant_id();
        assert!(of("red") == of("red") && of("red") != of("blue") && of("red") != 0);
    }

    #[test]
    fn what_is_not_granted_is_refused() {
        let p = parse("tenant = \"a\"\n[plugins]\ndirectory = \"/p\"\nallow = [{ file = \"x\" }]\n").unwrap();
        assert!(p.devices.cores.is_empty() && p.wasi.is_empty() && p.files.is_empty());
        assert!(!p.network.may_listen("127.0.0.1".parse().unwrap(), 1000));
        assert!(!p.network.may_reach("127.0.0.1".parse().unwrap(), 1000));
    }

    #[test]
    fn addresses_are_held_by_net_and_port() {
        let p = parse(WHOLE).unwrap();
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        assert!(p.network.may_listen(ip("127.0.0.1"), 20_000) && p.network.may_listen(ip("127.0.0.1"), 32_000));
        assert!(!p.network.may_listen(ip("127.0.0.1"), 19_999) && !p.network.may_listen(ip("127.0.0.2"), 20_000));
        // Any port is asked for, some are granted.
        assert_eq!(p.network.listening(ip("127.0.0.1"), 0), [(20_000, 32_000)]);
        assert!(!p.network.may_listen(ip("127.0.0.2"), 0));
        assert!(p.network.may_reach(ip("::ffff:127.0.0.9"), 1) && !p.network.may_reach(ip("10.0.0.1"), 1));
        assert!(p.network.may_reach(ip("fd00::1"), 4791) && !p.network.may_reach(ip("fd00::1"), 4792));
    }

    #[test]
    fn names_are_held_whole_or_by_their_end() {
        let p = parse(WHOLE).unwrap();
        let asked = |host: &str| p.network.may_look_up(host);
        // What goes out says nothing that the operator did not write.
        assert_eq!(asked("HOST.eXample").as_deref(), Some("host.example"));
        assert_eq!(asked("a.b.CLUSTER.example").as_deref(), Some("a.b.CLUSTER.example"));
        for host in [
            "a.host.example",
            "host.example.",
            "ost.example",
            "cluster.example",
            ".cluster.example",
            "xcluster.example",
            "",
            "ä",
        ] {
            assert_eq!(asked(host), None, "{host}");
        }
        assert_eq!(Network::any().may_look_up("a").as_deref(), Some("a"));
        let name = |s: &str| s.parse::<HostName>().unwrap();
        assert!(name("*.example").holds_all(&name("*.a.example")) && name("*.example").holds_all(&name("a.example")));
        assert!(name("*.example").holds_all(&name("*.EXAMPLE")) && HostName::any().holds_all(&name("*.example")));
        assert!(
            !name("a.example").holds_all(&name("*.a.example")) && !name("*.a.example").holds_all(&name("*.example"))
        );
        assert!(!name("*.example").holds_all(&name("xexample")) && !name("a.example").holds_all(&name("b.example")));
    }

    #[test]
    fn grants_overlap_where_listeners_would_meet() {
        let common = |a: &str, b: &str| {
            let [a, b]: [Reach; 2] = [a, b].map(|text| text.parse().unwrap());
            let found = a.common(&b).map(|r| r.to_string());
            assert_eq!(found.is_some(), b.common(&a).is_some());
            found
        };
        for (a, b, both) in [
            ("127.0.0.1:20000-21000", "127.0.0.1:20500-22000", "127.0.0.1:20500-21000"),
            ("127.0.0.0/8:*", "127.0.0.9:80", "127.0.0.9:80"),
            ("10.0.0.0/8:*", "10.1.0.0/16:*", "10.1.0.0/16:*"),
            // One that listens everywhere.
            ("0.0.0.0:5000", "10.0.0.1:*", "10.0.0.1:5000"),
            ("[::]:5000", "10.0.0.1:4000-6000", "10.0.0.1:5000"),
            ("[::]:*", "[fd00::1]:1", "[fd00::1]:1"),
        ] {
            assert_eq!(common(a, b).as_deref(), Some(both), "{a} and {b}");
        }
        for (a, b) in [
            ("127.0.0.1:20000-20999", "127.0.0.1:21000-21999"),
            ("127.0.0.1:*", "127.0.0.2:*"),
            ("0.0.0.0:*", "[fd00::1]:*"),
            ("10.0.0.1:*", "[fd00::1]:*"),
        ] {
            assert_eq!(common(a, b), None, "{a} and {b}");
        }
    }

    #[test]
    fn errors_name_the_line_and_the_key() {
        let swap = |from: &str, to: &str| parse(&WHOLE.replacen(from, to, 1)).unwrap_err();
        for (from, to, says) in [
            ("\"1 GiB\"", "\"1 GB\"", "line 15, key `devices.hbm`: `1 GB` is no size"),
            ("memory = ", "memroy = ", "line 19, key `limits.memroy`: unknown field `memroy`"),
            ("\"500 ms\"", "\"0 ms\"", "line 20, key `limits.call`: `0 ms` is not between"),
            (
                "20000-32000",
                "32000-20000",
                "line 25, key `network.listen`: the ports 32000-20000 are in the wrong order",
            ),
            ("127.0.0.0/8:*", "127.0.0.1/8:*", "line 26, key `network.reach`: 127.0.0.1/8 has bits set"),
            ("127.0.0.0/8:*", "[::ffff:127.0.0.1]:*", "::ffff:127.0.0.1 is the IPv4 address 127.0.0.1; write that"),
            ("Host.example", "host..example", "line 27, key `network.names`: `host..example` is no host name"),
            ("*.Cluster.example", "*", "`*` is no host name; expected one such as"),
            ("*.Cluster.example", "a.*.example", "`a.*.example` is no host name"),
            ("Host.example", "10.0.0.1", "`10.0.0.1` is no host name"),
            ("\"d75a9801", "\"d75a9802", "line 6, key `plugins.signers`: `d75a9802"),
            (
                "\"other.wasm\"",
                "\"../other.wasm\"",
                "line 11, key `plugins.allow.file`: `../other.wasm` is no file name",
            ),
            ("\"other.wasm\"", "\"nccom.wasm\"", "nccom.wasm is allowed twice"),
            ("\"/srv/red\"", "\"srv/red\"", "must be an absolute path"),
            ("tenant = \"red\"", "tenant = \"Red\"", "line 2, key `tenant`: a tenant's name is"),
            ("weight = 300", "weight = 0", "weight is 1 to 1000"),
            ("4 GiB/s", "0 GiB/s", "leave the key out for no cap"),
            (
                "communicators = 4",
                "communicators = 4\ncommunicators = 5",
                "line 23, key `limits.communicators`: duplicate key",
            ),
        ] {
            let e = swap(from, to);
            assert!(e.contains("red.toml") && e.contains(says), "{to}: {e}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_policy_or_an_error(text in "\\PC{0,200}") {
            let _ = parse(&text);
        }

        #[test]
        fn any_change_of_a_policy_is_a_policy_or_an_error(at in 0usize..700, b in any::<u8>()) {
            let mut bytes = WHOLE.as_bytes().to_vec();
            let at = at % bytes.len();
            bytes[at] = b;
            if let Ok(text) = String::from_utf8(bytes) {
                let _ = parse(&text);
            }
        }
    }
}
