//! Questions to the finished system graph: nearest NIC, preferred NIC, CPUs near a rank, direct access.

use super::error::TopoError;
use super::machine::CpuMask;
use super::paths::P2pCheck;
use super::system::{Detail, NodeType, PathType, System};

/// Order of network devices as seen from a node: path type, hops, wider first, lowest index.
fn distance(system: &System, from: usize, net: usize) -> Option<(PathType, usize, i64, i32)> {
    let path = system.path_info(from, net)?;
    // Widths are compared in MB/s, so that the order is total.
    Some((path.kind, path.hops, -((path.width * 1000.0) as i64), system.net(net)?.dev))
}

impl System {
    fn nearest_net_node(&self, from: usize) -> Option<usize> {
        let nets = self.bucket(NodeType::Net).iter().copied();
        nets.filter_map(|n| Some((distance(self, from, n)?, n))).min().map(|(_, n)| n)
    }

    /// Plug-in index of the network device nearest to a local rank; ties go to the lowest index.
    ///
    /// # Errors
    /// [`TopoError::UnknownRank`], [`TopoError::NoNet`].
    pub fn nearest_net(&self, rank: i32) -> Result<i32, TopoError> {
        let node = self.node_of_rank(rank).ok_or(TopoError::UnknownRank { rank })?;
        self.nearest_net_node(node).and_then(|n| self.net(n)).map(|n| n.dev).ok_or(TopoError::NoNet)
    }

    /// `neuronPreferredNcRidNic` and its BDF twin: plug-in index and PCI address of the network device nearest to a
    /// core of the accelerator with a routing id. An accelerator without a rank has no gpu in the graph; for it the
    /// lowest device of its NUMA node answers, else the lowest of all.
    ///
    /// # Errors
    /// [`TopoError::NoNet`].
    pub fn preferred_net(&self, core: u32, rid: u32) -> Result<(i32, String), TopoError> {
        let of_rid = |n: &&usize| self.gpu(**n).is_some_and(|g| u32::try_from(g.rid) == Ok(rid));
        let of_core = |n: &&usize| self.gpu(**n).is_some_and(|g| u32::try_from(g.core) == Ok(core));
        let gpus = self.bucket(NodeType::Gpu);
        let gpu = gpus.iter().filter(of_rid).find(of_core).or_else(|| gpus.iter().find(of_rid));
        let net = match gpu {
            Some(gpu) => self.nearest_net_node(*gpu),
            None => self.net_of_numa(rid).or_else(|| self.lowest_net(self.bucket(NodeType::Net).iter().copied())),
        };
        net.and_then(|n| self.net(n)).map(|n| (n.dev, n.busid.clone())).ok_or(TopoError::NoNet)
    }

    fn lowest_net(&self, nets: impl Iterator<Item = usize>) -> Option<usize> {
        nets.filter_map(|n| Some((self.net(n)?.dev, n))).min().map(|(_, n)| n)
    }

    fn net_of_numa(&self, rid: u32) -> Option<usize> {
        let numa = self.facts.accelerators.iter().find(|a| u32::try_from(a.rid) == Ok(rid))?.numa;
        let under = |n: &usize| {
            self.nearest_cpu(*n).and_then(|c| self.nodes.get(c)).is_some_and(|c| c.id.0 == u64::from(numa) << 1)
        };
        self.lowest_net(self.bucket(NodeType::Net).iter().copied().filter(under))
    }

    /// CPUs local to a rank's device. Its text (`to_string`) is the schema's affinity string.
    ///
    /// # Errors
    /// [`TopoError::UnknownRank`].
    pub fn affinity(&self, rank: i32) -> Result<CpuMask, TopoError> {
        let node = self.node_of_rank(rank).ok_or(TopoError::UnknownRank { rank })?;
        Ok(match self.nearest_cpu(node).and_then(|c| self.nodes.get(c)).map(|n| &n.detail) {
            Some(Detail::Cpu { affinity, .. }) => *affinity,
            _ => CpuMask::default(),
        })
    }

    /// `ncclTopoCheckP2p` for two ranks (transports 3.1): a rank that is not in this graph is on another host: no.
    pub fn check_p2p(&self, rank_a: i32, rank_b: i32) -> P2pCheck {
        match (self.node_of_rank(rank_a), self.node_of_rank(rank_b)) {
            (Some(a), Some(b)) => self.p2p_by_path(a, b),
            _ => P2pCheck { p2p: false, use_read: false, intermediate: None },
        }
    }
}
