//! Every limit of the host in one place. What a guest may have is [`Limits`], per tenant; what the contracts say is a
//! constant.

use std::time::Duration;

/// The compatibility id that the loader demands (INV-04).
pub const COMPATIBILITY: u64 = 89;
/// Bytes of `nec_version_info_t`, passed to the probe.
pub const VERSION_INFO_BYTES: u32 = 56;
/// Bytes of a unique id and of a net handle.
pub const ID_BYTES: usize = 128;
/// Bytes of a socket address.
pub const ADDRESS_BYTES: usize = 28;

/// Longest byte lists by function, as the contracts document them; a test compares this table with wit/. The first match
/// decides; a function that is not named here has no byte list.
pub const BYTE_LISTS: &[(&str, &str, u64)] = &[
    ("neuron:hw/sockets", "send", 65_536),
    ("neuron:hw/sockets", "recv", 65_536),
    ("neuron:hw/sockets", "*", ADDRESS_BYTES as u64),
    ("neuron:hw/links", "*", 64),
    ("neuron:hw/rendezvous", "*", ID_BYTES as u64),
    ("neuron:hw/tasks", "spawn", 4096),
    ("neuron:hw/task-entry", "run", 4096),
    ("neuron:hw/proxy", "start", 1 << 20),
    ("neuron:hw/files", "*", 4 << 20),
    ("neuron:nccom/collectives", "neuron-get-version-info", 16),
    ("neuron:nccom/collectives", "neuron-bootstrap-send", 65_520),
    ("neuron:nccom/collectives", "neuron-bootstrap-recv", 65_520),
    ("neuron:nccom/collectives", "neuron-bootstrap-all-gather", 4 << 20),
    ("neuron:nccom/collectives", "*", ID_BYTES as u64),
    ("neuron:lifecycle/lifecycle", "*", 1 << 20),
    ("nccl:net/nccl-net-plugin-v4", "*", 64),
    ("nccl:net", "*", ID_BYTES as u64),
];

/// The limit for a byte list of `function` in `interface`.
pub fn byte_list(interface: &str, function: &str) -> Option<u64> {
    let within = |row: &str| interface == row || interface.strip_prefix(row).is_some_and(|rest| rest.starts_with('/'));
    BYTE_LISTS.iter().find(|(i, f, _)| within(i) && (*f == "*" || *f == function)).map(|row| row.2)
}

/// Length of one epoch tick: the grain of guest deadlines.
pub const TICK: Duration = Duration::from_millis(10);
/// Bytes a plugin file may have, whatever a policy says.
pub const MAX_PLUGIN_BYTES: u64 = 64 << 20;
/// Bytes that an element of a table is counted with.
pub const TABLE_ELEMENT: usize = 16;
/// Bytes of all compiled plugins that are kept on disk.
pub const CACHE_BYTES: u64 = 1 << 30;
/// Stack of guest code.
pub const GUEST_STACK: usize = 512 * 1024;
/// Linear memories of an instance; together they have at most [`Limits::memory`].
pub const MAX_MEMORIES: usize = 4;
/// Tables of an instance.
pub const MAX_TABLES: usize = 16;
/// Core instances that an instance of a component is made of.
pub const MAX_CORE_INSTANCES: usize = 16;
/// Words of 64 bits of a CPU mask.
pub const MASK_WORDS: usize = 16;
/// Sentences kept for the failure an entry reports.
pub const MAX_CAUSES: usize = 8;
/// Bytes of one log line of a guest.
pub const MAX_LOG_LINE: usize = 4096;
/// How long a plugin may take to free a communicator.
pub const FREE_PATIENCE: Duration = Duration::from_secs(5);
/// Longest pause before a plugin that stopped is started again.
pub const MAX_RESTART_PAUSE: Duration = Duration::from_secs(30);
/// Bytes of a policy file.
pub const MAX_POLICY_BYTES: usize = 64 << 10;
/// Bytes of one message between processes of this machine.
pub const MAX_MESSAGE_BYTES: usize = 5 << 20;
/// Plugins of a tenant whose counts are told apart; those of further ones are told together.
pub const MAX_ERAS: usize = 64;
/// Bytes of what a client of the service says first.
pub const MAX_HELLO_BYTES: usize = 4 << 10;
/// Bytes of a client's request: the longest bootstrap message, and what is around it.
pub const MAX_REQUEST_BYTES: usize = 128 << 10;
/// How long one side of a connection to the service waits for the other to take or to finish a message.
pub const SERVICE_MESSAGE: Duration = Duration::from_secs(5);
/// Connections to the sockets of one tenant: one for each runtime and one for each communicator of its processes.
pub const MAX_SESSIONS: usize = 512;
/// Bytes of the head of a request for metrics.
pub const MAX_HTTP_HEAD: usize = 8 << 10;
/// Who may ask for metrics at a time; the oldest makes room.
pub const MAX_HTTP_VISITORS: usize = 16;
/// How long one who asks for metrics may take for all of it.
pub const HTTP_WAIT: Duration = Duration::from_secs(2);
/// Descriptors that go with one message.
pub const MAX_MESSAGE_FDS: usize = 64;
/// How long a question on a control socket, and its answer, may take.
pub const MESSAGE_PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of a question on a control socket: it fits the socket's buffer as a whole.
pub const MAX_QUESTION_BYTES: usize = 64 << 10;
/// Visitors of a control socket at a time.
pub const MAX_VISITORS: usize = 16;
/// Bytes of a tenant's name that stand in the name of its sockets as they are.
pub const MAX_TENANT_TAG: usize = 40;
/// Streams of a communicator's groups (NEC_MAX_STREAM_N).
pub const GROUP_STREAMS: u32 = 4;
/// Connections of a listener that have not shown yet that they are of the group.
pub const GATE_PLACES: usize = 64;
/// The same of all listeners of a tenant together, beside one of each.
pub const TENANT_GATE_PLACES: usize = 256;
/// Bytes that a bootstrap socket may hold in the kernel in each direction: a message of the longest kind. The kernel takes twice
/// as much memory for it.
pub const SOCKET_BUFFER: usize = 64 << 10;
/// Ranks of a list that a message shows.
pub const LISTED_RANKS: usize = 32;
/// Schedules a communicator keeps compiled.
pub const MAX_SCHEDULES: usize = 512;
/// Schedules of calls with lists (counts, pairs, groups) a communicator keeps compiled.
pub const MAX_LISTED: usize = 64;
/// Bytes of the lists it keeps beside them, to know them again.
pub const MAX_LISTED_BYTES: usize = 4 << 20;
/// Sends and receives of one rank in one group: their descriptions must fit beside an arrival record.
pub const MAX_GROUP: usize = 340;
/// Descriptions that travel in the first exchange of a group; a second one follows if a rank has more.
pub const GROUP_AT_ONCE: usize = 8;
/// Bytes of reductions that all_reduce_many packs into one; larger ones go by themselves.
pub const PACK_BYTES: usize = 64 * 1024;

/// What one tenant's plugins may use. The default suits a plugin that plans for a few hundred ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Linear memory of one instance, bytes.
    pub memory: usize,
    /// Linear memory and tables of all instances together, bytes; a swap has its two plugins in it for a moment.
    pub memory_in_all: usize,
    /// Elements of one table.
    pub table: usize,
    /// Guest time of one call, host functions not counted.
    pub call: Duration,
    /// Time of one call in all, waits in host functions included: many bounded waits must not add up to for ever.
    pub wall: Duration,
    /// How long a call waits for another call of the same instance to end.
    pub entry: Duration,
    /// Bytes that one host call may hand over in lists and strings.
    pub hostcall_bytes: usize,
    /// Communicators alive.
    pub communicators: usize,
    /// Background tasks alive.
    pub tasks: usize,
    /// Bootstrap sockets, of all instances together.
    pub sockets: usize,
    /// Names published on this machine, of all instances together.
    pub names: usize,
    /// Other host objects of one instance.
    pub objects: usize,
    /// Log lines of all instances together in a second.
    pub log_rate: u32,
    /// Stops of a plugin within the window after which it is not started again.
    pub restarts: u32,
    /// The window.
    pub restart_window: Duration,
    /// Pause before the first restart; doubles with each stop in the window.
    pub restart_pause: Duration,
    /// Bytes of a plugin's file.
    pub plugin_bytes: usize,
    /// Functions of a plugin, in all its modules.
    pub plugin_functions: usize,
    /// Locals of a plugin's functions, in all.
    pub plugin_locals: usize,
    /// Locals of one function.
    pub function_locals: usize,
    /// Bytes of the body of one function.
    pub function_bytes: usize,
    /// Imports and exports in a plugin: its own, of its modules, and what is passed between them.
    pub plugin_names: usize,
    /// Instances that a plugin may be made of.
    pub plugin_instances: usize,
    /// Bytes of the plan of one communicator that a plugin hands to its successor.
    pub state: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            memory: 64 << 20,
            memory_in_all: 4 << 30,
            table: 10_000,
            call: Duration::from_secs(20),
            wall: Duration::from_secs(600),
            entry: Duration::from_secs(120),
            hostcall_bytes: 16 << 20,
            communicators: 256,
            tasks: 64,
            sockets: 4096,
            names: 256,
            objects: 65_536,
            log_rate: 2000,
            restarts: 5,
            restart_window: Duration::from_secs(600),
            restart_pause: Duration::from_millis(100),
            plugin_bytes: MAX_PLUGIN_BYTES as usize,
            plugin_functions: 200_000,
            plugin_locals: 4_000_000,
            function_locals: 10_000,
            function_bytes: 1 << 20,
            plugin_names: 100_000,
            plugin_instances: 10_000,
            state: 1 << 20,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    const BOOK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/plugin-authors.md");
    const BEGIN: &str = "the_limits_that_plugin_authors_read -->\n";
    const END: &str = "<!-- End of what is written. -->";

    /// `10,000`; small ones have no comma.
    fn count(n: usize) -> String {
        let digits = n.to_string();
        if n < 10_000 {
            return digits;
        }
        let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(|g| std::str::from_utf8(g).unwrap()).collect();
        groups.join(",")
    }

    fn bytes(n: usize) -> String {
        match n {
            n if n >= 1 << 20 && n % (1 << 20) == 0 => format!("{} MiB", n >> 20),
            n if n >= 512 << 10 && n % 1024 == 0 => format!("{} KiB", n >> 10),
            n => count(n),
        }
    }

    fn time(t: Duration) -> String {
        if t.subsec_nanos() == 0 { format!("{} s", t.as_secs()) } else { format!("{} ms", t.as_millis()) }
    }

    /// The two tables. What a tenant has is taken apart whole: a new limit does not compile before it has its row.
    fn tables() -> String {
        let Limits {
            memory,
            memory_in_all,
            table,
            call,
            wall,
            entry,
            hostcall_bytes,
            communicators,
            tasks,
            sockets,
            names,
            objects,
            log_rate,
            restarts,
            restart_window,
            restart_pause,
            plugin_bytes,
            plugin_functions,
            plugin_locals,
            function_locals,
            function_bytes,
            plugin_names,
            plugin_instances,
            state,
        } = Limits::default();
        let rows = [
            (
                "plugin file *",
                format!("{}, and {} whatever a policy says", bytes(plugin_bytes), bytes(MAX_PLUGIN_BYTES as usize)),
            ),
            ("functions of a plugin *", count(plugin_functions)),
            (
                "locals of a plugin's functions, and of one *",
                format!("{}, {}", count(plugin_locals), count(function_locals)),
            ),
            ("body of one function *", bytes(function_bytes)),
            ("imports and exports in a plugin *", count(plugin_names)),
            ("instances a plugin is made of *", count(plugin_instances)),
            ("linear memory of an instance *", format!("{}, at most {MAX_MEMORIES} memories", bytes(memory))),
            ("linear memory and tables of all instances of a tenant *", bytes(memory_in_all)),
            ("elements of a table *", format!("{}, at most {MAX_TABLES} tables", count(table))),
            ("core instances that an instance is made of", count(MAX_CORE_INSTANCES)),
            ("stack", bytes(GUEST_STACK)),
            (
                "guest time of one call *",
                format!(
                    "{} on a core; time inside host functions does not count, they have deadlines of their own",
                    time(call)
                ),
            ),
            ("time of one call in all, waits in host functions included *", time(wall)),
            ("wait for another call of the same instance *", time(entry)),
            ("time to free a communicator", time(FREE_PATIENCE)),
            ("bytes one host call hands over in lists and strings *", bytes(hostcall_bytes)),
            ("communicators of a tenant *", count(communicators)),
            ("background tasks of a tenant *", count(tasks)),
            ("sockets of a tenant, parked ones included *", count(sockets)),
            ("names that a tenant publishes (`rendezvous`) *", count(names)),
            ("other host objects of an instance *", count(objects)),
            ("plan of a communicator (`export-state`) *", bytes(state)),
            (
                "log",
                format!(
                    "{} bytes a line; {} lines of a tenant in a second *",
                    count(MAX_LOG_LINE),
                    count(log_rate as usize)
                ),
            ),
            ("sentences of one failure", count(MAX_CAUSES)),
            ("stops before a plugin is not started again *", format!("{restarts} in {}", time(restart_window))),
            (
                "pause before it is *",
                format!("{}, doubled with each stop, at most {}", time(restart_pause), time(MAX_RESTART_PAUSE)),
            ),
            ("ranks of a communicator on one server", count(hw_bridge::limits::MAX_LOCAL_RANKS)),
            ("words of a CPU mask", count(MASK_WORDS)),
        ];
        let mut text = "Those marked * are one tenant's: its policy ([tenants.md](tenants.md)) or the embedding program (`Limits`) can set \
                        them.\n\n| what | most |\n|---|---|\n"
            .to_string();
        for (what, most) in rows {
            writeln!(text, "| {what} | {most} |").unwrap();
        }
        text += "\nA quota that is used up is NRT_RESOURCE with a sentence. Stack and time are traps. A memory or a table that may not \
                 grow\nfails to grow, which most languages turn into a trap.\n\nWhile the process is stopped \
                 (SIGSTOP, a debugger, a frozen control group) none of these times runs, nor does\n`clock.monotonic-ns`.\n\n### Byte lists\n\n\
                 Bytes cross the boundary only here. The first row that fits counts.\n\n\
                 | interface | function | bytes |\n|---|---|---|\n";
        for (i, (interface, function, most)) in BYTE_LISTS.iter().enumerate() {
            let function = match *function {
                "*" if BYTE_LISTS[..i].iter().any(|row| row.0 == *interface) => "all others".to_string(),
                "*" => "all".to_string(),
                f => format!("`{f}`"),
            };
            writeln!(text, "| `{interface}` | {function} | {} |", bytes(*most as usize)).unwrap();
        }
        text
    }

    #[test]
    fn the_limits_that_plugin_authors_read_are_those_of_the_code() {
        let book = std::fs::read_to_string(BOOK).unwrap();
        let (head, rest) = book.split_once(BEGIN).expect("the mark where the tables begin");
        let (stands, tail) = rest.split_once(END).expect("the mark where they end");
        let tables = tables();
        if std::env::var_os("WCCL_WRITE_DOCS").is_some() {
            std::fs::write(BOOK, format!("{head}{BEGIN}\n{tables}\n{END}{tail}")).unwrap();
        } else {
            assert!(
                stands.trim() == tables.trim(),
                "docs/plugin-authors.md does not say what limits.rs does; the comment before its tables tells how to write them anew"
            );
        }
    }
}
