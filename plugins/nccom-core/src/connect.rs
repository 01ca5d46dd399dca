//! Transports: which one serves a pair, the connect record, and the order of connects (transports.md).
//!
//! Exactly two transports, P2P then NET_NEURON (INV-80). Only ring neighbours and the expand list are connected (INV-81).
//! [`run`] is the driver; what an offer and a connect really are is behind [`Links`].

use std::collections::{BTreeMap, BTreeSet};

use crate::bytes::{u32_at, u64_at};
use crate::fail::{Code, Failure};

/// Bytes of one connection in the exchange (INV-83).
pub const CONNECT_BYTES: usize = 128;
/// Bytes of the P2P part of it.
pub const P2P_BYTES: usize = 80;
/// Bytes of the IPC field inside (INV-84).
pub const IPC_BYTES: usize = 64;

/// The transport table, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Index 0: same server.
    P2p,
    /// Index 1: across servers.
    NetNeuron,
}

impl Transport {
    /// The table: two entries, in this order.
    pub const TABLE: [Transport; 2] = [Transport::P2p, Transport::NetNeuron];

    /// The original's name.
    pub fn name(self) -> &'static str {
        match self {
            Transport::P2p => "P2P",
            Transport::NetNeuron => "NET_NEURON",
        }
    }
}

/// Index of the first transport to try (C-06): the network only for a connection to oneself without a graph.
pub fn first_transport(has_graph: bool, my_rank: usize, peer: usize) -> usize {
    usize::from(!has_graph && my_rank == peer)
}

/// P2P connect info, 80 bytes: rank 0, read 4, directPtr 8, devIpc 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct P2pInfo {
    /// The peer, or the rank between.
    pub rank: i32,
    /// Whether the receiver reads; never set (transports 3.1).
    pub read: i32,
    /// Meaningful in one process only; 0 here, memory goes by handle.
    pub direct_ptr: u64,
    /// What the host packed.
    pub ipc: [u8; IPC_BYTES],
}

impl P2pInfo {
    /// To the 128-byte unit of the exchange.
    pub fn encode(&self) -> [u8; CONNECT_BYTES] {
        let mut b = [0; CONNECT_BYTES];
        b[..4].copy_from_slice(&self.rank.to_le_bytes());
        b[4..8].copy_from_slice(&self.read.to_le_bytes());
        b[8..16].copy_from_slice(&self.direct_ptr.to_le_bytes());
        b[16..80].copy_from_slice(&self.ipc);
        b
    }

    /// From a unit.
    pub fn decode(b: &[u8]) -> Result<P2pInfo, Failure> {
        if b.len() != CONNECT_BYTES {
            return Err(Failure::new(
                Code::Failure,
                format!("a connect record has {CONNECT_BYTES} bytes, not {}", b.len()),
            ));
        }
        let mut ipc = [0; IPC_BYTES];
        ipc.copy_from_slice(&b[16..80]);
        Ok(P2pInfo { rank: u32_at(b, 0) as i32, read: u32_at(b, 4) as i32, direct_ptr: u64_at(b, 8), ipc })
    }
}

/// One connection to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectorKey {
    /// The other end.
    pub peer: usize,
    /// The channel.
    pub channel: u32,
    /// Direction.
    pub is_send: bool,
}

/// What the driver asks for. Implemented over the imports, and by a table in tests.
pub trait Links {
    /// What stands for a connection.
    type Connector;
    /// Whether `transport` serves the pair, and if not, why.
    fn can_connect(&mut self, transport: Transport, edge: ConnectorKey) -> Result<Result<(), String>, Failure>;
    /// Fills the IPC field for this edge's peer.
    fn setup(&mut self, edge: ConnectorKey) -> Result<[u8; IPC_BYTES], Failure>;
    /// Sends blobs to a peer over the bootstrap, hint "p2pconnect".
    fn send(&mut self, peer: usize, blobs: &[u8]) -> Result<(), Failure>;
    /// Receives that many bytes of blobs.
    fn recv(&mut self, peer: usize, bytes: usize) -> Result<Vec<u8>, Failure>;
    /// Connects with the peer's blob.
    fn connect(&mut self, edge: ConnectorKey, info: &P2pInfo) -> Result<Self::Connector, Failure>;
    /// One log line.
    fn log(&mut self, line: String);
    /// Logical core of a rank, for messages.
    fn device_of(&self, rank: usize) -> i32;
    /// A rank and its host, for messages.
    fn place_of(&self, rank: usize) -> String;
}

/// Connects `edges`, in the round-robin order of peer distances that keeps both sides from waiting crosswise. The peer
/// must ask for the matching edges (its receives for our sends).
pub fn run<L: Links>(
    l: &mut L,
    rank: usize,
    nranks: usize,
    edges: &BTreeSet<ConnectorKey>,
) -> Result<BTreeMap<ConnectorKey, L::Connector>, Failure> {
    let mut made = BTreeMap::new();
    let to = |peer: usize, is_send: bool| -> Vec<ConnectorKey> {
        edges.iter().copied().filter(|e| e.peer == peer && e.is_send == is_send).collect()
    };
    for distance in 1..nranks {
        let (recv_peer, send_peer) = ((rank + nranks - distance) % nranks, (rank + distance) % nranks);
        let (receives, sends) = (to(recv_peer, false), to(send_peer, true));
        for (peer, list) in [(recv_peer, &receives), (send_peer, &sends)] {
            if list.is_empty() {
                continue;
            }
            let mut blobs = Vec::with_capacity(list.len() * CONNECT_BYTES);
            for edge in list {
                choose(l, rank, *edge)?;
                let info = P2pInfo { rank: rank as i32, read: 0, direct_ptr: 0, ipc: l.setup(*edge)? };
                blobs.extend_from_slice(&info.encode());
            }
            l.send(peer, &blobs)?;
        }
        // The peer sends its receives first, then its sends: our sends meet the former.
        for (peer, list) in [(send_peer, &sends), (recv_peer, &receives)] {
            if list.is_empty() {
                continue;
            }
            let blobs = l.recv(peer, list.len() * CONNECT_BYTES)?;
            for (edge, blob) in list.iter().zip(blobs.chunks(CONNECT_BYTES)) {
                let info = P2pInfo::decode(blob)?;
                if info.rank != peer as i32 {
                    let text =
                        format!("rank {rank} got the connect record of rank {} instead of rank {peer}'s", info.rank);
                    return Err(Failure::new(Code::Failure, text));
                }
                made.insert(*edge, l.connect(*edge, &info)?);
            }
        }
    }
    Ok(made)
}

/// The first transport that serves, from index 0 (the ring path always has a graph), or the terminal message (INV-82), with
/// both ends and what each transport said.
fn choose<L: Links>(l: &mut L, rank: usize, edge: ConnectorKey) -> Result<Transport, Failure> {
    let mut declined = Vec::new();
    for t in &Transport::TABLE[first_transport(true, rank, edge.peer)..] {
        match l.can_connect(*t, edge)? {
            Ok(()) => {
                let (from, to) = if edge.is_send { (rank, edge.peer) } else { (edge.peer, rank) };
                l.log(format!("Channel {:02} : {from} -> {to} via {}", edge.channel, t.name()));
                return Ok(*t);
            }
            Err(why) => declined.push(format!("{}: {why}", t.name())),
        }
    }
    let text = format!(
        "No transport found between devices {} and {}. Possible replica group misconfiguration: {} and {}; {}",
        l.device_of(rank),
        l.device_of(edge.peer),
        l.place_of(rank),
        l.place_of(edge.peer),
        declined.join("; ")
    );
    Err(Failure::new(Code::Failure, text))
}

/// Edges of rings: per channel, receive from prev and send to next; none in a world of one (topology-and-rings 3).
pub fn ring_edges(rank: usize, rings: impl Iterator<Item = (i32, i32)>) -> BTreeSet<ConnectorKey> {
    let mut edges = BTreeSet::new();
    for (channel, (prev, next)) in rings.enumerate() {
        for (peer, is_send) in [(prev, false), (next, true)] {
            if let Ok(peer) = usize::try_from(peer)
                && peer != rank
            {
                edges.insert(ConnectorKey { peer, channel: channel as u32, is_send });
            }
        }
    }
    edges
}

/// Edges of a full mesh: every other rank, both directions, channel 0.
pub fn mesh_edges(rank: usize, nranks: usize) -> BTreeSet<ConnectorKey> {
    let others = (0..nranks).filter(|p| *p != rank);
    others.flat_map(|peer| [false, true].map(|is_send| ConnectorKey { peer, channel: 0, is_send })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    struct Table {
        rank: usize,
        asked: Vec<Transport>,
        p2p: bool,
        net: bool,
        out: BTreeMap<usize, Sender<Vec<u8>>>,
        inn: BTreeMap<usize, Receiver<Vec<u8>>>,
        sent: Vec<usize>,
        touched: BTreeSet<usize>,
        lines: Vec<String>,
    }

    /// What a rank offers for an edge: every byte of the field is its own.
    fn ipc_of(rank: usize, peer: usize, channel: u32, is_send: bool) -> [u8; IPC_BYTES] {
        let of = [rank as u8, peer as u8, channel as u8, u8::from(is_send)];
        std::array::from_fn(|i| of[i % 4].wrapping_mul(31).wrapping_add(i as u8 + 1))
    }

    impl Links for Table {
        type Connector = [u8; IPC_BYTES];
        fn can_connect(&mut self, t: Transport, _: ConnectorKey) -> Result<Result<(), String>, Failure> {
            self.asked.push(t);
            let (serves, why) = if t == Transport::P2p { (self.p2p, "too far") } else { (self.net, "no card") };
            Ok(if serves { Ok(()) } else { Err(why.into()) })
        }
        fn setup(&mut self, e: ConnectorKey) -> Result<[u8; IPC_BYTES], Failure> {
            self.touched.insert(e.peer);
            Ok(ipc_of(self.rank, e.peer, e.channel, e.is_send))
        }
        fn send(&mut self, peer: usize, blobs: &[u8]) -> Result<(), Failure> {
            self.sent.push(blobs.len());
            self.out[&peer].send(blobs.to_vec()).map_err(|e| Failure::new(Code::Closed, e.to_string()))
        }
        fn recv(&mut self, peer: usize, bytes: usize) -> Result<Vec<u8>, Failure> {
            let b = self.inn[&peer].recv_timeout(std::time::Duration::from_secs(120));
            let b = b.map_err(|e| Failure::new(Code::Timeout, e.to_string()))?;
            assert_eq!(b.len(), bytes);
            Ok(b)
        }
        fn connect(&mut self, _: ConnectorKey, info: &P2pInfo) -> Result<[u8; IPC_BYTES], Failure> {
            Ok(info.ipc)
        }
        fn log(&mut self, line: String) {
            self.lines.push(line);
        }
        fn device_of(&self, rank: usize) -> i32 {
            100 + rank as i32
        }
        fn place_of(&self, rank: usize) -> String {
            format!("rank {rank} on host h{rank}")
        }
    }

    fn tables(n: usize, p2p: bool, net: bool) -> Vec<Table> {
        let mut all: Vec<Table> = (0..n)
            .map(|rank| Table {
                rank,
                asked: vec![],
                p2p,
                net,
                out: BTreeMap::new(),
                inn: BTreeMap::new(),
                sent: vec![],
                touched: BTreeSet::new(),
                lines: vec![],
            })
            .collect();
        for a in 0..n {
            for b in 0..n {
                let (tx, rx) = channel();
                all[a].out.insert(b, tx);
                all[b].inn.insert(a, rx);
            }
        }
        all
    }

    /// Proves INV-80.
    #[test]
    fn there_are_two_transports_p2p_first() {
        let names: Vec<&str> = Transport::TABLE.iter().map(|t| t.name()).collect();
        assert_eq!(names, ["P2P", "NET_NEURON"]);
        assert_eq!(first_transport(true, 3, 3), 0);
        assert_eq!(first_transport(false, 3, 4), 0);
        assert_eq!(first_transport(false, 3, 3), 1);
    }

    /// Proves INV-81, INV-83, INV-84.
    #[test]
    fn only_ring_neighbours_are_connected_with_128_bytes_each() {
        for n in [2usize, 3, 5] {
            let threads: Vec<_> = tables(n, true, false)
                .into_iter()
                .map(|mut t| {
                    std::thread::spawn(move || {
                        let r = t.rank;
                        let (prev, next) = (((r + n - 1) % n) as i32, ((r + 1) % n) as i32);
                        // Two channels that run in opposite directions.
                        let edges = ring_edges(r, [(prev, next), (next, prev)].into_iter());
                        let made = run(&mut t, r, n, &edges).unwrap();
                        assert_eq!(made.len(), 4);
                        for (e, ipc) in &made {
                            // The blob is the peer's for the matching edge: other direction, same channel.
                            assert_eq!(*ipc, ipc_of(e.peer, r, e.channel, !e.is_send));
                        }
                        let neighbours: BTreeSet<usize> = [prev as usize, next as usize].into();
                        assert_eq!(t.touched, neighbours);
                        assert!(t.sent.iter().all(|b| b % CONNECT_BYTES == 0));
                        assert_eq!(t.sent.iter().sum::<usize>(), 4 * CONNECT_BYTES);
                    })
                })
                .collect();
            threads.into_iter().for_each(|t| t.join().unwrap());
        }
        let info = P2pInfo { rank: 5, read: 0, direct_ptr: 0, ipc: [9; 64] };
        let unit = info.encode();
        assert_eq!((unit.len(), &unit[16..80], &unit[80..]), (128, &[9u8; 64][..], &[0u8; 48][..]));
        assert_eq!(P2pInfo::decode(&unit).unwrap(), info);
    }

    /// Proves INV-82.
    #[test]
    fn the_second_transport_is_asked_after_the_first_and_then_it_ends() {
        let mut t = tables(2, false, false).remove(0);
        let edges = ring_edges(0, [(1, 1)].into_iter());
        let e = run(&mut t, 0, 2, &edges).map(|_| ()).unwrap_err();
        assert_eq!(
            e.text,
            "No transport found between devices 100 and 101. Possible replica group misconfiguration: rank 0 on host h0 and \
             rank 1 on host h1; P2P: too far; NET_NEURON: no card"
        );
        assert_eq!(t.asked, Transport::TABLE);
        let mut t = tables(2, false, true).remove(0);
        assert_eq!(
            choose(&mut t, 0, ConnectorKey { peer: 1, channel: 0, is_send: true }).unwrap(),
            Transport::NetNeuron
        );
        assert_eq!(t.asked, Transport::TABLE);
    }

    #[test]
    fn a_world_of_one_has_no_edges_and_a_mesh_has_all() {
        assert!(ring_edges(0, [(0, 0)].into_iter()).is_empty());
        assert_eq!(mesh_edges(1, 4).len(), 6);
    }
}
