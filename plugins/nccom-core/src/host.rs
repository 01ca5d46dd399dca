//! The imports behind the rooms' traits: sockets, the machine, links, variables.

use std::collections::BTreeMap;

use crate::bindings::neuron::hw::objects::{Communicator, Connection, Connector, Listener};
use crate::bindings::neuron::hw::{clock, config, files, links, log, pci, sockets};
use crate::bindings::neuron::nrt::types::NrtStatus;
use crate::bindings::neuron::nrt::{nec, nrt};
use crate::bootstrap::group::Bootstrap;
use crate::bootstrap::wire::Address;
use crate::bootstrap::{Ends, Sockets};
use crate::connect::{ConnectorKey, IPC_BYTES, Links, P2pInfo, Transport};
use crate::fail::{Code, Failure, invalid};
use crate::peers::PeerRecord;
use crate::topo::{self, Bdf, Family, Machine, MachineError, NumaNode, System};

impl Code {
    /// The status of the contracts.
    pub(crate) fn status(self) -> NrtStatus {
        match self {
            Code::Failure => NrtStatus::Failure,
            Code::Invalid => NrtStatus::Invalid,
            Code::InvalidHandle => NrtStatus::InvalidHandle,
            Code::Timeout | Code::Overdue => NrtStatus::Timeout,
            Code::Uninitialized => NrtStatus::Uninitialized,
            Code::Closed | Code::Absent => NrtStatus::Closed,
            Code::Other(n) => NrtStatus::Other(n),
        }
    }
}

/// A host function's status; its sentence is already with the host.
impl From<NrtStatus> for Failure {
    fn from(s: NrtStatus) -> Failure {
        let code = match s {
            NrtStatus::Failure => Code::Failure,
            NrtStatus::Invalid => Code::Invalid,
            NrtStatus::InvalidHandle => Code::InvalidHandle,
            NrtStatus::Timeout => Code::Timeout,
            NrtStatus::Uninitialized => Code::Uninitialized,
            NrtStatus::Closed => Code::Closed,
            NrtStatus::Resource => Code::Other(4),
            NrtStatus::ExecHwErrCollectives => Code::Overdue,
            NrtStatus::NetworkProxyFailure => Code::Other(1206),
            NrtStatus::Other(n) => Code::Other(n),
            _ => Code::Failure,
        };
        Failure::new(code, "")
    }
}

/// What a send or a receive on a connection answers.
fn of_connection(s: NrtStatus) -> Failure {
    match s {
        NrtStatus::Uninitialized => Failure::new(Code::Absent, ""),
        s => s.into(),
    }
}

/// A variable that the host granted.
pub(crate) fn var(name: &str) -> Option<String> {
    config::get(name).filter(|v| !v.is_empty())
}

/// The file that a granted variable names, if the variable is set.
pub(crate) fn granted_file(name: &str) -> Result<Option<String>, Failure> {
    let Some(path) = var(name) else { return Ok(None) };
    let bytes =
        files::read(name).map_err(|s| Failure::from(s).during(&format!("reading the file {path}, named by {name}")))?;
    let text =
        String::from_utf8(bytes).map_err(|_| invalid(format!("the file {path}, named by {name}, is not text")))?;
    Ok(Some(text))
}

pub(crate) fn info(line: &str) {
    log::write(log::Level::Info, line);
}

pub(crate) fn warn(line: &str) {
    log::write(log::Level::Warn, line);
}

/// `NEURON_CCOM_SOCK_TIMEOUT`, milliseconds.
pub(crate) fn socket_timeout() -> Result<u32, Failure> {
    let ms = timeout_of(var(TIMEOUT).as_deref())?;
    info(&format!("Use socket timeout: {ms}"));
    Ok(ms)
}

const TIMEOUT: &str = "NEURON_CCOM_SOCK_TIMEOUT";

/// The time-out for a value of its variable, milliseconds.
fn timeout_of(value: Option<&str>) -> Result<u32, Failure> {
    match value.map(|v| (v, v.trim().parse::<u32>())) {
        None => Ok(120_000),
        Some((_, Ok(ms))) if ms > 0 => Ok(ms),
        Some((v, _)) => Err(invalid(format!("{TIMEOUT}={v}: a number of milliseconds above 0 was expected"))),
    }
}

/// Sockets of the host.
#[derive(Debug)]
pub(crate) struct HostSockets;

impl Ends for HostSockets {
    type Listener = Listener;
    type Conn = Connection;
}

impl Sockets for HostSockets {
    fn listen(&self, at: &Address, ms: u32) -> Result<Listener, Failure> {
        Ok(sockets::listen(&at.0, ms)?)
    }

    fn local(&self, listener: &Listener) -> Result<Address, Failure> {
        Address::from_slice(&sockets::local_address(listener))
    }

    fn accept(&self, listener: &Listener, ms: u32) -> Result<Connection, Failure> {
        Ok(sockets::accept(listener, ms)?.0)
    }

    fn connect(&self, to: &Address, ms: u32) -> Result<Connection, Failure> {
        Ok(sockets::connect(&to.0, ms)?)
    }

    fn send(&self, conn: &Connection, data: &[u8], ms: u32) -> Result<(), Failure> {
        sockets::send(conn, data, ms).map_err(of_connection)
    }

    fn recv(&self, conn: &Connection, bytes: usize, ms: u32) -> Result<Vec<u8>, Failure> {
        if bytes == 0 {
            return Ok(Vec::new());
        }
        sockets::recv(conn, bytes as u32, ms).map_err(of_connection)
    }

    fn now_ms(&self) -> u64 {
        clock::monotonic_ns() / 1_000_000
    }
}

/// An address to listen on, port 0. `towards` is the root: a loopback root needs a loopback listener. Rules of the upstream
/// library: `CCOM_SOCKET_IFNAME` is a list of name prefixes, `=name` exact, `^name` excluded; `CCOM_SOCKET_FAMILY`;
/// link-local addresses only if asked for by name, or if the root's is one of that link, and after others; loopback last.
pub(crate) fn interface(towards: Option<&Address>) -> Result<Address, Failure> {
    let all = sockets::interfaces();
    let loopback_root = towards.is_some_and(Address::is_loopback);
    // The link of a link-local root.
    let link = towards.filter(|r| r.is_link_local()).map(Address::scope);
    let names = var("CCOM_SOCKET_IFNAME");
    if let Some(n) = &names {
        info(&format!("NCCL_SOCKET_IFNAME set by environment to {n}"));
    }
    let family = match var("CCOM_SOCKET_FAMILY").as_deref() {
        None => towards.map(Address::is_v6),
        Some("AF_INET") => Some(false),
        Some("AF_INET6") => Some(true),
        Some(v) => return Err(invalid(format!("CCOM_SOCKET_FAMILY={v}: AF_INET or AF_INET6 was expected"))),
    };
    let named = |name: &str| -> Option<bool> {
        let list = names.as_ref()?;
        let exclude = list.starts_with('^');
        let exact = list.trim_start_matches('^').starts_with('=');
        let list = list.trim_start_matches('^').trim_start_matches('=');
        let hit = list.split(',').map(str::trim).any(|p| if exact { name == p } else { name.starts_with(p) });
        Some(hit != exclude)
    };
    // What is left over by a list of exclusions is not asked for.
    let asked = |name: &str| named(name) == Some(true) && !names.as_ref().is_some_and(|n| n.starts_with('^'));
    let mut fit: Vec<_> = all
        .iter()
        .filter(|i| named(&i.name) != Some(false))
        .filter(|i| {
            let scope = || Address::from_slice(&i.address).map_or(0, |a| a.scope());
            !i.link_local || link.map_or_else(|| asked(&i.name), |l| scope() == l)
        })
        .filter(|i| family.is_none_or(|v6| (i.address[0] == 10) == v6))
        .filter(|i| !loopback_root || i.loopback)
        .collect();
    // IPv4 before IPv6 where both serve, loopback last: as the upstream library orders them.
    fit.sort_by_key(|i| (i.loopback && !loopback_root, i.link_local != link.is_some(), i.address[0] == 10));
    let Some(found) = fit.first() else {
        let there: Vec<String> = all
            .iter()
            .filter_map(|i| Address::from_slice(&i.address).ok().map(|a| format!("{} ({})", i.name, a.ip())))
            .collect();
        let of = |v6: bool| if v6 { "IPv6" } else { "IPv4" };
        let why = match (&names, towards, var("CCOM_SOCKET_FAMILY")) {
            (Some(n), ..) if !all.iter().any(|i| named(&i.name) == Some(true)) => {
                format!("CCOM_SOCKET_IFNAME={n} matches none of them")
            }
            (_, Some(root), Some(asked)) => {
                format!("CCOM_SOCKET_FAMILY={asked} is asked for, and the root {root} is {}", of(root.is_v6()))
            }
            (_, Some(root), None) => {
                let local = if loopback_root { " and loopback" } else { "" };
                format!("the root {root} is {}{local}, and none of them that may be used is", of(root.is_v6()))
            }
            (_, None, Some(asked)) => format!("CCOM_SOCKET_FAMILY={asked} is asked for"),
            (_, None, None) => "all of them are link-local; name one in CCOM_SOCKET_IFNAME to use it".into(),
        };
        return Err(invalid(format!(
            "NET/Socket : No usable listening interface found: this machine has {}; {why}",
            if there.is_empty() { "none that is up and carries an address".into() } else { there.join(", ") }
        )));
    };
    let address = Address::from_slice(&found.address)?;
    if let Some(root) = towards
        && address.is_loopback()
        && !loopback_root
    {
        warn(&format!(
            "the bootstrap address of this rank is loopback ({}) while the root is at {root}: ranks on other machines cannot \
             connect to it; name another interface in CCOM_SOCKET_IFNAME",
            address.ip()
        ));
    }
    info(&format!("Bootstrap : Using {}:{address}", found.name));
    Ok(address)
}

/// The machine behind the topology's questions.
#[derive(Debug)]
pub(crate) struct HostMachine {
    /// The rank's logical core: key of the device maps.
    pub dev: i32,
}

fn refused(call: &'static str, s: NrtStatus) -> MachineError {
    MachineError { call, detail: format!("{s:?}") }
}

impl Machine for HostMachine {
    fn family(&self) -> Result<Family, MachineError> {
        nrt::nrt_get_instance_info().map(|i| Family(i.family)).map_err(|s| refused("nrt_get_instance_info", s))
    }

    fn virtual_core_size(&self) -> Result<u32, MachineError> {
        nec::nec_get_virtual_core_size().map_err(|s| refused("nec_get_virtual_core_size", s))
    }

    fn devices(&self) -> Result<Vec<i32>, MachineError> {
        let (n, devices) = nec::nec_get_device_count(32);
        if n < 0 {
            return Err(MachineError { call: "nec_get_device_count", detail: format!("it answered {n}") });
        }
        Ok(devices)
    }

    fn bdf(&self, mla: i32) -> Result<Bdf, MachineError> {
        nec::nec_get_device_pci_bdf(mla)
            .map(|b| Bdf { domain: b.domain, bus: b.bus, slot: b.slot, func: b.func })
            .map_err(|e| MachineError { call: "nec_get_device_pci_bdf", detail: format!("it answered {e}") })
    }

    fn mla_available(&self, mla: i32) -> bool {
        nec::nec_is_mla_available(self.dev, mla)
    }

    fn mla_to_rid(&self, mla: i32) -> Result<i32, MachineError> {
        Ok(nec::nec_mla_idx_to_rid(self.dev, mla))
    }

    fn peer_mla(&self, mla: i32, port: u32) -> Option<i32> {
        let peer = nec::nec_get_peer_mla_idx(self.dev, mla, port as i32);
        (peer >= 0).then_some(peer)
    }

    fn numa_nodes(&self) -> Result<Vec<NumaNode>, MachineError> {
        Ok(pci::numa_nodes().into_iter().map(|n| NumaNode { id: n.id, cpus: n.cpus }).collect())
    }

    fn device_numa(&self, mla: i32) -> u32 {
        pci::device_numa(mla)
    }

    fn nics(&self) -> Vec<topo::NetDevice> {
        let nics = pci::nics();
        nics.into_iter()
            .enumerate()
            .filter_map(|(i, n)| {
                Some(topo::NetDevice {
                    dev: i as i32,
                    bdf: Bdf::parse(&n.bdf)?,
                    name: n.name,
                    numa: n.numa,
                    speed: n.speed,
                    port: 1,
                    guid: n.guid,
                    max_comms: 1 << 18,
                    gdr: true,
                })
            })
            .collect()
    }
}

/// Links of a communicator under way: the transport table over the imports.
pub(crate) struct HostLinks<'a> {
    pub comm: &'a Communicator,
    pub group: &'a mut Bootstrap<HostSockets>,
    pub records: &'a [PeerRecord],
    pub system: &'a System,
    pub machine: &'a HostMachine,
    pub offers: BTreeMap<usize, [u8; IPC_BYTES]>,
    pub timeout_ms: u32,
}

impl HostLinks<'_> {
    /// Accelerators that links lead to from `from`, over any number of hops: memory on one server is reachable if the
    /// fabric is connected.
    fn reachable(&self, from: i32, to: i32) -> bool {
        let mut seen = vec![from];
        let mut next = 0;
        while let Some(mla) = seen.get(next).copied() {
            next += 1;
            if mla == to {
                return true;
            }
            for port in 0..topo::limits::PORTS {
                match self.machine.peer_mla(mla, port) {
                    Some(p) if !seen.contains(&p) && self.machine.mla_available(p) => seen.push(p),
                    _ => {}
                }
            }
        }
        false
    }

    /// P2P's canConnect: the topology's level and a direct link between the accelerators; or, unless the user set a
    /// level, any number of links inside the server ("indirect": the model's DMA crosses the fabric).
    fn p2p(&self, peer: usize) -> Result<Result<(), String>, Failure> {
        let (me, it) = (&self.records[self.group.rank], &self.records[peer]);
        let policy = topo::P2pPolicy::from_vars(&var).map_err(|e| invalid(e.to_string()))?;
        if let Some(why) = me.apart(it) {
            return Ok(Err(why.into()));
        }
        if policy.disabled {
            return Ok(Err("NCCL_P2P_DISABLE forbids it".into()));
        }
        let reachable = || {
            let no = || format!("no wires lead from accelerator {} to accelerator {}", me.mla_idx, it.mla_idx);
            self.reachable(me.mla_idx, it.mla_idx).then_some(()).ok_or_else(no)
        };
        if !self.system.check_p2p(me.rank, it.rank).p2p {
            let forbidden = "NCCL_P2P_LEVEL forbids a path as long as theirs";
            return Ok(if policy.level.is_none() { reachable() } else { Err(forbidden.into()) });
        }
        let pod = |a: &topo::RankInfo, b: &topo::RankInfo| {
            let asked = nec::nec_pod_node_can_access_peer_node(
                nec::NecPodType::Switch,
                a.rid as u32,
                a.pod_node as u32,
                b.rid as u32,
                b.pod_node as u32,
            );
            matches!(asked, Ok(n) if n != 0)
        };
        let direct = topo::device_can_access_peer(self.machine, &me.rank_info(), &it.rank_info(), &pod)
            .map_err(|e| Failure::new(Code::Failure, e.to_string()))?;
        Ok(if direct { Ok(()) } else { reachable() })
    }
}

impl Links for HostLinks<'_> {
    type Connector = Connector;

    fn can_connect(&mut self, transport: Transport, edge: ConnectorKey) -> Result<Result<(), String>, Failure> {
        match transport {
            Transport::P2p => self.p2p(edge.peer),
            // A bound net plug-in with a device would serve; its data path comes with the work across servers.
            Transport::NetNeuron => Ok(Err("this release has no network between servers".into())),
        }
    }

    fn setup(&mut self, edge: ConnectorKey) -> Result<[u8; IPC_BYTES], Failure> {
        if let Some(ipc) = self.offers.get(&edge.peer) {
            return Ok(*ipc);
        }
        let bytes = links::offer(self.comm, edge.peer as i32)?;
        let ipc = <[u8; IPC_BYTES]>::try_from(bytes.as_slice()).map_err(|_| {
            Failure::new(Code::Failure, format!("the host offered an IPC field of {} bytes", bytes.len()))
        })?;
        self.offers.insert(edge.peer, ipc);
        Ok(ipc)
    }

    fn send(&mut self, peer: usize, blobs: &[u8]) -> Result<(), Failure> {
        self.group.send_linking(&HostSockets, peer as i32, blobs, "p2pconnect")
    }

    fn recv(&mut self, peer: usize, bytes: usize) -> Result<Vec<u8>, Failure> {
        self.group.recv_linking(&HostSockets, peer as i32, bytes, "p2pconnect")
    }

    fn connect(&mut self, edge: ConnectorKey, info: &P2pInfo) -> Result<Connector, Failure> {
        Ok(links::connect(self.comm, edge.peer as i32, edge.channel, edge.is_send, &info.ipc, self.timeout_ms)?)
    }

    fn log(&mut self, line: String) {
        log::write(log::Level::Debug, &line);
    }

    fn device_of(&self, rank: usize) -> i32 {
        self.records.get(rank).map_or(-1, |r| r.dev)
    }

    fn place_of(&self, rank: usize) -> String {
        self.records.get(rank).map_or_else(|| format!("rank {rank}"), PeerRecord::place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a word of the user socket operations end after two minutes; no value makes them wait for ever.
    ///
    /// Proves INV-26.
    #[test]
    fn the_time_out_is_120_seconds_and_never_none() {
        assert_eq!(timeout_of(None).unwrap(), 120_000);
        assert_eq!([" 1 ", "4294967295"].map(|v| timeout_of(Some(v)).unwrap()), [1, u32::MAX]);
        for v in ["0", "-1", "", "4294967296", "2s"] {
            let e = timeout_of(Some(v)).unwrap_err();
            assert_eq!(e.code, Code::Invalid);
            assert!(e.text.contains(&format!("NEURON_CCOM_SOCK_TIMEOUT={v}: ")), "{e}");
        }
    }
}
