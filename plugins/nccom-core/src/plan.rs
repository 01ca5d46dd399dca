//! What this library keeps of each communicator, keyed by the communicator's id: its *plan*. No byte of tensor data is ever
//! here, and whatever must survive this instance is the host's.

use std::collections::{BTreeMap, BTreeSet};

use crate::Release;
use crate::bindings::exports::neuron::nccom::collectives::NeuronDeviceInfo;
use crate::bindings::neuron::hw::objects::{Communicator, Connector};
use crate::bindings::neuron::hw::{clock, identity, links, random, rendezvous, sockets, tasks};
use crate::bindings::neuron::nrt::{nec, nrt};
use crate::bootstrap::group::{Bootstrap, JoinParams};
use crate::bootstrap::head::{Head, MAX_RANKS};
use crate::bootstrap::parked::Slots;
use crate::bootstrap::root::{Duty, claim, serve, serve_local, withdraw};
use crate::bootstrap::wire::{Address, Info, RootId, parse_root_id};
use crate::bytes::u32_at;
use crate::connect::{self, ConnectorKey};
use crate::fail::{Code, Failure, invalid};
use crate::host::{HostLinks, HostMachine, HostSockets, granted_file, info, interface, socket_timeout, var, warn};
use crate::peers::{PeerRecord, RECORD_BYTES, host_hash, machine_hash, pid_hash, short_name};
use crate::rings::{self, Channels, Layout, Pods, TopoRanks};
use crate::search;
use crate::state::{self, FoundGraph, PlanState};
use crate::topo::{self, Machine, RankInfo, System};

/// One communicator's plan.
pub(crate) struct CommPlan {
    pub head: Head,
    wires: Wires,
    pub records: Vec<PeerRecord>,
    ranks: Vec<RankInfo>,
    machine: HostMachine,
    /// Made when it is needed first: a plan that was taken over hardly ever needs it.
    system: Option<System>,
    layout: Layout,
    pods: Pods,
    graph: Option<FoundGraph>,
    /// What the release arranged from the graph.
    pub channels: Option<Channels>,
    pub connectors: BTreeMap<ConnectorKey, Connector>,
}

/// The bootstrap's sockets.
enum Wires {
    /// In this instance.
    Held(Bootstrap<HostSockets>),
    /// With the host: since `quiesce`, until they are needed.
    Parked(Bootstrap<Slots>),
    /// They ended with the instance that held them, or could not be moved.
    Gone,
}

fn failed(e: impl std::fmt::Display) -> Failure {
    Failure::new(Code::Failure, e.to_string())
}

/// Starts a flat root for `nranks` ranks on this machine's interface; answers the id (slot 1).
pub(crate) fn unique_id(nranks: i32) -> Result<[u8; 128], Failure> {
    let n = u32::try_from(nranks)
        .ok()
        .filter(|n| *n > 0)
        .ok_or_else(|| invalid(format!("a group of {nranks} ranks cannot be")))?;
    let ms = socket_timeout()?;
    start_root(&interface(None)?, n, ms, ms).map(|a| a.to_id())
}

/// Listens at `at`, which may stay in use for `listen_ms`, and moves the listener to a root task whose waits last `ms`.
fn start_root(at: &Address, nranks: u32, ms: u32, listen_ms: u32) -> Result<Address, Failure> {
    // The count is a value beside the status, never the status itself (C-02).
    nrt::nrt_get_total_vnc_count().map_err(|s| Failure::from(s).during("asking for the number of logical cores"))?;
    let listener = sockets::listen(&at.0, listen_ms)
        .map_err(|s| Failure::from(s).during(&format!("starting the bootstrap root at {at}")))?;
    let real = Address::from_slice(&sockets::local_address(&listener))?;
    let state = [nranks.to_le_bytes(), ms.to_le_bytes()].concat();
    tasks::spawn("root", &state, Some(listener))?;
    Ok(real)
}

/// Body of a background task.
pub(crate) fn run_task(
    kind: &str,
    state: &[u8],
    listener: Option<crate::bindings::neuron::hw::objects::Listener>,
) -> Result<(), Failure> {
    let listener = listener.ok_or_else(|| invalid(format!("task {kind} needs a listener")))?;
    match (kind, state.len()) {
        ("root", 8) => {
            let duty = Duty { nranks: u32_at(state, 0), timeout_ms: u32_at(state, 4) };
            serve(&HostSockets, &listener, duty, random::get_u64(), clock::wall_seconds())
        }
        ("local-root", 44) => {
            let duty = Duty { nranks: u32_at(state, 0), timeout_ms: u32_at(state, 4) };
            let root = Address::from_slice(&state[16..44])?;
            serve_local(&HostSockets, &listener, &root, u32_at(state, 8), u32_at(state, 12), duty)
        }
        _ => Err(invalid(format!("there is no task `{kind}` with a state of {} bytes", state.len()))),
    }
}

/// What an init entry was given.
pub(crate) struct Init<'a> {
    pub rank: i32,
    pub nranks: i32,
    pub dev: &'a NeuronDeviceInfo,
    /// The tag of the library's sources.
    pub sources: [u8; 8],
    /// Global: the root's address as text. Else the shared id.
    pub root: Result<Option<&'a str>, &'a [u8]>,
}

/// `ncclCommInitRank`: bootstrap, peer records, topology. The graph is not built here (INV-55).
pub(crate) fn init(i: &Init<'_>) -> Result<(Communicator, CommPlan), Failure> {
    let ms = socket_timeout()?;
    let nranks = usize::try_from(i.nranks).unwrap_or(0);
    if nranks > MAX_RANKS as usize {
        return Err(invalid(format!("a group has at most {MAX_RANKS} ranks, {nranks} were asked for")));
    }
    let Some(rank) = usize::try_from(i.rank).ok().filter(|r| *r < nranks) else {
        return Err(invalid(format!("Invalid rank requested : {}/{}", i.rank, i.nranks)));
    };
    info("NCCL version 2.31.24+nrt2.0");
    let vnc = nrt::nrt_get_total_vnc_count()
        .map_err(|s| Failure::from(s).during("asking for the number of logical cores"))?;
    let global = i.root.is_ok();
    // Root and ranks choose by the same rule (INV-23, C-02).
    let hierarchical = global && nranks > vnc as usize;
    let (id, root) = match i.root {
        Err(id) => (id.to_vec(), Address::of_id(id)?),
        Ok(root) => {
            let root = global_root(root, i, rank, nranks, ms)?;
            (root.to_id().to_vec(), root)
        }
    };
    let prepared = (|| {
        let here = interface(Some(&root))?;
        if hierarchical && here.is_loopback() {
            warn(
                "the group is over more than one server and this rank's bootstrap address is loopback; servers on other machines cannot reach it (CCOM_SOCKET_IFNAME)",
            );
        }
        let at = if hierarchical { local_root(&id, &root, &here, rank, nranks, vnc, ms)? } else { root };
        let hash = if global { Some(hash_tag(i.sources)?) } else { None };
        Ok(JoinParams { root: at, interface: here, rank, nranks, hash, timeout_ms: ms })
    })();
    // The others wait at the root for this rank: they learn at once that it will not come.
    let join = prepared.inspect_err(|e| withdraw(&HostSockets, &root, rank, nranks, e, ms))?;
    let mut group = Bootstrap::join(&HostSockets, &join)?;
    // From here on the ring tells them.
    let made = make(i, &mut group, rank, nranks, &id, ms).inspect_err(|e| group.give_up(&HostSockets, e));
    let (comm, mut plan) = made?;
    plan.wires = Wires::Held(group);
    Ok((comm, plan))
}

/// What follows the bootstrap: peer records, the host's object, topology.
fn make(
    i: &Init<'_>,
    group: &mut Bootstrap<HostSockets>,
    rank: usize,
    nranks: usize,
    id: &[u8],
    ms: u32,
) -> Result<(Communicator, CommPlan), Failure> {
    let mine = record(i.dev, rank, id)?;
    let all = group.all_gather(&HostSockets, &mine.encode(), "initTransportRank AllGather1")?;
    let records: Vec<PeerRecord> =
        all.chunks(RECORD_BYTES).enumerate().map(|(r, b)| PeerRecord::decode(b, r)).collect::<Result<_, _>>()?;
    let comm = Communicator::create(i.rank, i.nranks)
        .map_err(|s| Failure::from(s).during("making the communicator's memory and control block on the host"))?;
    let (cluster_id, epoch) = (group.cluster_id, group.epoch);
    let head = Head { rank, nranks, dev: i.dev.nec_dev_id, timeout_ms: ms, cluster_id, epoch };
    let mut plan = CommPlan::of_records(head, records)?;
    plan.system()?;
    Ok((comm, plan))
}

/// The address of a global group's root; rank 0 starts it (INV-22).
fn global_root(text: Option<&str>, i: &Init<'_>, rank: usize, nranks: usize, ms: u32) -> Result<Address, Failure> {
    let text = match text.filter(|t| !t.is_empty()) {
        Some(t) => t,
        None if nranks == 1 => return start_root(&interface(None)?, 1, ms, ms),
        None => {
            return Err(invalid(
                "COMM_ID must be specified: set NEURON_RT_ROOT_COMM_ID to <host>:<port> of rank 0, the same on all ranks",
            ));
        }
    };
    info(&format!("Root comm ID set by environment to {text}"));
    let root = match parse_root_id(text)? {
        RootId::Address(a) => a,
        RootId::Name(host, port) => {
            let found = sockets::resolve(&host, port, ms)?;
            let first = found.first().ok_or_else(|| invalid(format!("host name {host} has no address")))?;
            let root = Address::from_slice(first)?;
            if root.is_loopback() && host != "localhost" {
                warn(&format!(
                    "the root's host name {host} means {} here, a loopback address: ranks on other machines cannot connect to \
                     it; correct the name's entry (/etc/hosts), or give the root's address instead",
                    root.ip()
                ));
            }
            root
        }
    };
    if root.port() == 0 {
        return Err(invalid(format!("Invalid Comm Id [{text}]: the port must not be 0, every rank has to know it")));
    }
    if root.is_v6() && root.is_link_local() && root.scope() == 0 {
        return Err(invalid(format!(
            "Invalid Comm Id [{text}]: a link-local address needs the number of its interface (`ip link` shows it), as in \
             [fe80::1%2]:{}; better give an address that is not link-local",
            root.port()
        )));
    }
    if rank == 0 {
        start_known_root(&root, i.sources, nranks, ms)?;
    }
    Ok(root)
}

/// The root at a place that all ranks know. If the place stays taken, its owner is asked whether it is the root of this
/// group: then two processes say that they are rank 0, and both learn it. The root of a group that is over says so, and is
/// waited for.
fn start_known_root(root: &Address, sources: [u8; 8], nranks: usize, ms: u32) -> Result<Address, Failure> {
    const ASK_AFTER_MS: u32 = 2_000;
    let until = clock::monotonic_ns() / 1_000_000 + u64::from(ms);
    loop {
        let left = until.saturating_sub(clock::monotonic_ns() / 1_000_000) as u32;
        // The last attempt leaves the host's sentence.
        if left <= ASK_AFTER_MS {
            return start_root(root, nranks as u32, ms, left.max(1));
        }
        match start_root(root, nranks as u32, ms, ASK_AFTER_MS) {
            Err(e) if e.code == Code::Timeout => {}
            answer => return answer,
        }
        let listener = sockets::listen(&interface(Some(root))?.with_port(0).0, ms)?;
        let listen = Address::from_slice(&sockets::local_address(&listener))?;
        let info = Info { rank: 0, nranks: nranks as i32, listen, hash: Some(hash_tag(sources)?) };
        claim(&HostSockets, root, &info, ASK_AFTER_MS)?;
    }
}

/// The server's local root: started by its first rank, found by the others under the id. Servers hold blocks of `vnc` ranks.
fn local_root(
    id: &[u8],
    root: &Address,
    here: &Address,
    rank: usize,
    nranks: usize,
    vnc: u32,
    ms: u32,
) -> Result<Address, Failure> {
    let per = vnc as usize;
    let (node, first) = (rank / per, rank / per * per);
    let name = format!("local-root-{node}");
    if rank == first {
        let listener = sockets::listen(&here.with_port(0).0, ms)?;
        let real = sockets::local_address(&listener);
        let count = per.min(nranks - first) as u32;
        let mut state = Vec::with_capacity(44);
        for word in [nranks as u32, ms, first as u32, count] {
            state.extend_from_slice(&word.to_le_bytes());
        }
        state.extend_from_slice(&root.0);
        tasks::spawn("local-root", &state, Some(listener))?;
        rendezvous::publish(id, &name, &real)?;
    }
    Address::from_slice(&rendezvous::lookup(id, &name, ms)?)
}

/// 8 bytes of the library's sources, 8 of the runtime's git hash (bootstrap 6). The library's are not in the answer of its probe,
/// which clears them (C-12).
fn hash_tag(sources: [u8; 8]) -> Result<[u8; 16], Failure> {
    let version = nrt::nrt_get_version()?;
    let mut tag = [0; 16];
    tag[..8].copy_from_slice(&sources);
    for (to, b) in tag[8..].iter_mut().zip(version.git_hash.bytes()) {
        *to = b;
    }
    Ok(tag)
}

fn record(dev: &NeuronDeviceInfo, rank: usize, id: &[u8]) -> Result<PeerRecord, Failure> {
    if dev.nec_dev_id < 0 {
        return Err(Failure::new(Code::Uninitialized, "Neuron core ID of calling thread is uninitialized"));
    }
    let family = HostMachine { dev: dev.nec_dev_id }.family().map_err(failed)?;
    let bdf = nec::nec_get_device_pci_bdf(dev.mla_idx).map_err(|e| {
        Failure::new(Code::Failure, format!("the PCI address of accelerator {} is not known ({e})", dev.mla_idx))
    })?;
    let bus_id =
        u64::from(bdf.domain) << 20 | u64::from(bdf.bus) << 12 | u64::from(bdf.slot) << 4 | u64::from(bdf.func);
    let pod_type = dev.pod_type as u32;
    Ok(PeerRecord {
        rank: rank as i32,
        dev: dev.nec_dev_id,
        machine: machine_hash(&identity::machine()?, id),
        host_hash: host_hash(&identity::host()?, id, dev.virtual_server_id),
        pid_hash: pid_hash(&identity::process()?, id),
        shm_dev: identity::shm_device(),
        bus_id,
        rid: dev.routing_id,
        tpb_idx: dev.tpb_idx,
        pod_id: dev.pod_id,
        pod_type,
        name: short_name(&identity::name()),
        comm: 0,
        comp_cap: family.generation() as i32,
        host_device_id: dev.host_device_id,
        mla_idx: dev.mla_idx,
        pod_node_id: if pod_type == 0 { -1 } else { dev.pod_node_id as i32 },
    })
}

impl CommPlan {
    /// What follows from the records: who is where.
    fn of_records(head: Head, records: Vec<PeerRecord>) -> Result<CommPlan, Failure> {
        let ranks: Vec<RankInfo> = records.iter().map(PeerRecord::rank_info).collect();
        let machine = HostMachine { dev: head.dev };
        let layout = Layout::of_ranks(&ranks).map_err(failed)?;
        let peer = |node: i32| nec::nec_get_p2p_pod_peer_node(head.dev as u32, node, 1).ok();
        let family = machine.family().map_err(failed)?;
        let pods = rings::pods(&layout, &ranks, family, records[head.rank].pod_type, &peer).map_err(failed)?;
        pods.log.iter().for_each(|l| info(l));
        Ok(CommPlan {
            head,
            wires: Wires::Gone,
            records,
            ranks,
            machine,
            system: None,
            layout,
            pods,
            graph: None,
            channels: None,
            connectors: BTreeMap::new(),
        })
    }

    /// The topology: device maps, then the system's graph.
    pub fn system(&mut self) -> Result<&System, Failure> {
        if self.system.is_none() {
            self.system = Some(self.discover()?);
        }
        self.system.as_ref().ok_or_else(|| Failure::new(Code::Failure, "the topology that was just made is gone"))
    }

    fn discover(&self) -> Result<System, Failure> {
        let Head { rank, dev, .. } = self.head;
        let me = self.records[rank];
        let mut accelerators: BTreeMap<i32, i32> = BTreeMap::new();
        for r in self.records.iter().filter(|r| r.same_node(&me)) {
            accelerators.insert(r.mla_idx, r.host_device_id);
        }
        let (mla, hosts): (Vec<i32>, Vec<i32>) = accelerators.into_iter().unzip();
        nec::nec_build_port_and_rid_map(dev, &mla, &hosts)
            .map_err(|s| Failure::from(s).during("building the port and routing-id maps"))?;
        let topo_file = granted_file("NCCL_TOPO_FILE")?;
        let found = topo::discover(&self.machine, &self.ranks, rank as i32, &var, topo_file.as_deref());
        let (system, xml) = found.map_err(|e| {
            let from = topo_file
                .as_ref()
                .map_or(String::new(), |_| format!(" (NCCL_TOPO_FILE={})", var("NCCL_TOPO_FILE").unwrap_or_default()));
            Failure::new(Code::Invalid, format!("topology discovery failed{from}: {e}"))
        })?;
        if rank == 0 && var("NCCL_TOPO_DUMP_FILE").is_some() {
            crate::bindings::neuron::hw::files::write("NCCL_TOPO_DUMP_FILE", xml.as_bytes())?;
        }
        Ok(system)
    }

    /// `neuronBuildGraphComm`: search, preset, the 960-byte exchange, postset, connect the rings (INV-55).
    pub fn build_graph<R: Release>(&mut self, comm: &Communicator) -> Result<(), Failure> {
        if self.channels.is_some() {
            return Ok(());
        }
        // The others are in the exchange, or on their way to it.
        self.search_and_connect::<R>(comm).inspect_err(|e| {
            if let Wires::Held(g) = &mut self.wires {
                g.give_up(&HostSockets, e);
            }
        })
    }

    fn search_and_connect<R: Release>(&mut self, comm: &Communicator) -> Result<(), Failure> {
        let graph_file = granted_file(search::GRAPH_FILE)?;
        let system = self.system()?;
        let outcome = search::compute(system, &var, graph_file.as_deref(), search::RUNTIME_NAME).map_err(|e| {
            let from = graph_file.as_ref().map_or(String::new(), |_| {
                format!(" ({}={})", search::GRAPH_FILE, var(search::GRAPH_FILE).unwrap_or_default())
            });
            Failure::new(Code::Failure, format!("the ring search failed{from}: {e}"))
        })?;
        outcome.log.iter().for_each(|l| info(l));
        let mut log = Vec::new();
        let cycles = search::fork::mla_cycles(system, &mut log);
        let rank = self.head.rank as i32;
        let family = self.machine.family().map_err(failed)?;
        let (mine, _) = rings::preset(&outcome.graph, rank, family).map_err(failed)?;
        let all = self.group(comm)?.all_gather(&HostSockets, &mine.encode(), "ncclTopoPostset")?;
        let fragments: Vec<TopoRanks> =
            all.chunks(rings::TOPO_RANKS_BYTES).map(TopoRanks::decode).collect::<Result<_, _>>().map_err(failed)?;
        let Channels { rings: searched, kangaring } =
            rings::postset(&fragments, &self.layout, &self.pods.order, family, rank).map_err(failed)?;
        log.iter().for_each(|l| info(l));
        let graph = FoundGraph { searched, kangaring, cycles };
        let channels = self.arrange::<R>(&graph)?;
        if self.head.nranks > 1 {
            self.connect(comm, &ring_edges(self.head.rank, &channels))?;
        }
        let p2p = search::p2p_channels(self.system()?, channels.rings.len());
        info(&format!("Numbers of channels set to {}", p2p.channels));
        (self.graph, self.channels) = (Some(graph), Some(channels));
        Ok(())
    }

    /// The release's channels. Any two ranks of one server can be connected, unless the user bounds what links may do.
    fn arrange<R: Release>(&self, graph: &FoundGraph) -> Result<Channels, Failure> {
        let policy = topo::P2pPolicy::from_vars(&var).map_err(|e| invalid(e.to_string()))?;
        let any_pair = self.layout.nodes.len() == 1 && !policy.disabled && policy.level.is_none();
        Ok(Channels { rings: R::arrange(&graph.searched, any_pair), kangaring: graph.kangaring.clone() })
    }

    /// `neuronExpandConnectivity`: every pair of ranks (our reading of both kinds), once.
    pub fn expand(&mut self, comm: &Communicator) -> Result<(), Failure> {
        let wanted = connect::mesh_edges(self.head.rank, self.head.nranks);
        self.group(comm)?.assemble(&HostSockets)?;
        // Both sides must ask for the same edges, so none is left out because it is connected already.
        self.connect(comm, &wanted)
    }

    fn connect(&mut self, comm: &Communicator, edges: &BTreeSet<ConnectorKey>) -> Result<(), Failure> {
        self.system()?;
        self.group(comm)?;
        let Head { rank, nranks, timeout_ms, .. } = self.head;
        let CommPlan { wires: Wires::Held(group), records, system: Some(system), machine, .. } = self else {
            return Err(gone());
        };
        let mut links = HostLinks { comm, group, records, system, machine, offers: BTreeMap::new(), timeout_ms };
        let made = connect::run(&mut links, rank, nranks, edges);
        // Nobody goes on before all have mapped what they need: a rank that is quickly done, and gone, would take its memory
        // with it while a slower peer still asks for it. A rank that failed breaks the ring, and the others learn it at once.
        let made = match made {
            Ok(m) => m,
            Err(e) => {
                let e = group.first_cause(&HostSockets, e);
                group.give_up(&HostSockets, &e);
                return Err(e);
            }
        };
        group.all_gather(&HostSockets, &[0], "p2pconnect done")?;
        self.connectors.extend(made);
        Ok(())
    }

    /// The bootstrap connections; fetched from the host if they are parked there.
    pub fn group(&mut self, comm: &Communicator) -> Result<&mut Bootstrap<HostSockets>, Failure> {
        if let Wires::Parked(_) = self.wires {
            let Wires::Parked(group) = std::mem::replace(&mut self.wires, Wires::Gone) else { return Err(gone()) };
            let fetched = group
                .exchange(|slot| Ok(sockets::unpark_listener(comm, slot)?), |slot| Ok(sockets::unpark(comm, slot)?));
            self.wires = Wires::Held(fetched.map_err(|e: Failure| e.during("fetching the bootstrap connections"))?);
        }
        match &mut self.wires {
            Wires::Held(group) => Ok(group),
            _ => Err(gone()),
        }
    }

    /// Leaves the sockets with the host, for whoever goes on: a successor, or this instance again.
    pub fn park(&mut self, comm: &Communicator) -> Result<(), Failure> {
        let group = match std::mem::replace(&mut self.wires, Wires::Gone) {
            Wires::Held(group) => group,
            // Nobody has needed them since the last time.
            other => {
                self.wires = other;
                return Ok(());
            }
        };
        // The listener has slot 0.
        let mut conns = 1..;
        let listener = |l| sockets::park_listener(comm, 0, l).map(|()| 0).map_err(Failure::from);
        let conn = |c| {
            let slot = conns.next().unwrap_or(u32::MAX);
            sockets::park(comm, slot, c).map(|()| slot).map_err(Failure::from)
        };
        let parked = group.exchange(listener, conn);
        self.wires = Wires::Parked(parked.map_err(|e| e.during("parking the bootstrap connections"))?);
        Ok(())
    }

    /// `neuronGetCommInfo`.
    pub fn comm_info(&self, want_peers: bool) -> Result<rings::CommInfo, Failure> {
        let (rank, channels) = (self.head.rank as i32, self.channels.as_ref());
        let cycles = self.graph.as_ref().map_or(&[][..], |g| &g.cycles);
        rings::comm_info(rank, &self.ranks, &self.layout, &self.pods, channels, cycles, want_peers).map_err(failed)
    }

    /// The CPUs near this rank's device, from the topology.
    pub fn near_cpus(&mut self) -> Result<Vec<u64>, Failure> {
        let rank = self.head.rank as i32;
        self.system()?.affinity(rank).map(|m| m.0.to_vec()).map_err(failed)
    }

    /// The plan as bytes of the release's schema. Sockets go along if they are parked; else it is a checkpoint.
    pub fn export<R: Release>(&self) -> Vec<u8> {
        let wires = match &self.wires {
            Wires::Parked(group) => Some(group),
            _ => None,
        };
        state::encode(R::STATE_SCHEMA, &self.head, &self.records, self.graph.as_ref(), wires)
    }

    /// A plan from another instance's bytes, of any release. Its sockets, if it parked them, stay with the host until they
    /// are needed, so that a swap that is given up can still go back; links are the host's and are taken up at once.
    pub fn import<R: Release>(comm: &Communicator, schema: u32, b: &[u8]) -> Result<CommPlan, Failure> {
        let state = PlanState::decode(schema, b)?;
        let mut plan = CommPlan::of_records(state.head, state.records)?;
        plan.wires = state.wires.map_or(Wires::Gone, Wires::Parked);
        if let Some(graph) = state.graph {
            let channels = plan.arrange::<R>(&graph)?;
            for e in ring_edges(plan.head.rank, &channels) {
                let c = links::connect(comm, e.peer as i32, e.channel, e.is_send, &[], plan.head.timeout_ms)?;
                plan.connectors.insert(e, c);
            }
            (plan.graph, plan.channels) = (Some(graph), Some(channels));
        }
        Ok(plan)
    }
}

fn ring_edges(rank: usize, channels: &Channels) -> BTreeSet<ConnectorKey> {
    connect::ring_edges(rank, channels.rings.iter().map(|r| (r.prev, r.next)))
}

fn gone() -> Failure {
    let text =
        "the bootstrap connections of this plan ended with the instance that held them; the links that exist go on";
    warn(text);
    Failure::new(Code::Uninitialized, text)
}
