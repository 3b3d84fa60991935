import type { DescriptorPairs, DescriptorRuns, DescriptorTable, MemoryType } from "./descriptors.js";
/**
 * A Transport moves bytes between registered memories of agents, one-sided, and carries
 * notifications. Terms and semantics are those of NIXL
 * 1.5; the NIXL call behind a member is named where there is one. `@kv/nixl` is the production
 * implementation, `@kv/transport-memory` the in-process one for tests. Every implementation runs
 * the suite `@kv/conformance/transport`.
 *
 * `close` is the contract of everything in this file that has it. Implementations in this
 * repository also have `Symbol.asyncDispose` or `Symbol.dispose`, which call `close`, so that
 * `await using` and `using` work; an implementation of yours may leave them out.
 */
/** Capabilities of a transport. Callers branch on these and never on the transport's name. */
export interface TransportCapabilities {
    /** Transfers with the operation `READ` work. */
    readonly read: boolean;
    /** Transfers with the operation `WRITE` work. */
    readonly write: boolean;
    /** `notify`, and the `notification` of a transfer, work. */
    readonly notifications: boolean;
    /** Agents in different processes can reach each other. */
    readonly crossProcess: boolean;
    /** Memory types that `allocate` and `register` accept. */
    readonly memoryTypes: readonly MemoryType[];
    /**
     * Transfers with a peer that died fail by themselves. When false, only the caller's deadline ends
     * them.
     */
    readonly reportsPeerDeath: boolean;
}
/**
 * Creates agents and memory. One per process is usual; a connector's worker side receives it as an
 * option.
 */
export interface Transport {
    /** Name for logs and reports, such as "nixl" or "memory". */
    readonly name: string;
    /** What this transport can do. */
    readonly capabilities: TransportCapabilities;
    /**
     * Creates an agent whose backends are ready (NIXL: `nixlAgent`, `createBackend`). The caller
     * closes it; `close` of the transport closes the agents that are left. Errors:
     * `KV_TRANSPORT_UNAVAILABLE`, `KV_TRANSPORT_CLOSED`, `KV_BACKEND_UNAVAILABLE`, `KV_AGENT_INVALID`
     * for a name that is malformed or taken.
     */
    createAgent(options?: AgentOptions): Promise<Agent>;
    /**
     * Allocates page-aligned, zeroed, touched memory that this transport can register. The caller
     * owns it until `close`. `memoryType` defaults to `DRAM` where the transport has it, `deviceId`
     * to 0. Errors: `KV_MEMORY_INVALID` for a length or device that cannot be,
     * `KV_TRANSPORT_UNSUPPORTED` for a memory type that is not in `capabilities.memoryTypes`,
     * `KV_TRANSPORT_CLOSED`.
     */
    allocate(lengthBytes: number, options?: {
        memoryType?: MemoryType | undefined;
        deviceId?: number | undefined;
    }): Memory;
    /** Closes all agents, then the transport's own resources. Calling it again has no effect. */
    close(): Promise<void>;
}
/** Options of `Transport.createAgent`. */
export interface AgentOptions {
    /**
     * Name of the agent, unique among its peers: 1 to 255 printable ASCII characters. @default a
     * UUID, as vLLM uses
     */
    name?: string | undefined;
    /** Backends to create, in order of preference. @default the transport's own choice */
    backends?: readonly BackendSpec[] | undefined;
}
/** A backend (a NIXL plugin, such as UCX) and its parameters. */
export interface BackendSpec {
    /** Name of the backend, such as "UCX" or "LIBFABRIC". */
    readonly name: string;
    /** Initialisation parameters in the backend's own keys (NIXL: `nixl_b_params_t`). */
    readonly parameters?: Readonly<Record<string, string>> | undefined;
}
/** Memory that the transport can reach. The caller that allocated it owns it. */
export interface Memory {
    /** Address of the first byte, below 2^53 so that a `number` is exact. For `FILE` and `OBJ`: 0. */
    readonly address: number;
    /** Length in bytes. */
    readonly lengthBytes: number;
    /** Type under which it is registered. */
    readonly memoryType: MemoryType;
    /** Ordinal of the device; 0 for `DRAM`. */
    readonly deviceId: number;
    /**
     * A view of all bytes, for memory that this process can address (`DRAM`). After `close` the view
     * is empty or reads zeros. Errors: `KV_MEMORY_INVALID` when the process cannot address the
     * memory, or when one view cannot hold it: on Node 20 above 4 GiB.
     */
    readonly bytes: Uint8Array;
    /**
     * A view of `lengthBytes` bytes from `offsetBytes` on, also of memory that is too long for
     * `bytes`. After `close` it is empty or reads zeros. Errors: `KV_MEMORY_INVALID` for a part that
     * does not lie in the memory, for a closed memory, when the process cannot address the memory, or
     * when the part is too long for a view: on Node 20 above 2 GiB.
     */
    view(offsetBytes: number, lengthBytes: number): Uint8Array;
    /**
     * Copies runs of this memory into one new buffer, in order. A native implementation copies off
     * the JavaScript thread. `runs` has rows `[offsetBytes, lengthBytes]`. Errors:
     * `KV_MEMORY_INVALID` for a run outside the memory, for runs that have more bytes together than
     * the memory, for a closed memory, and when there is no memory for the buffer; nothing is copied
     * then.
     */
    gather(runs: Float64Array): Promise<ArrayBuffer>;
    /**
     * Copies `source` into the runs `[offsetBytes, lengthBytes]` of this memory, in order. The
     * lengths of the runs add up to the length of `source`. An implementation may take `source` over,
     * with `takeBuffer`: its buffer is detached then when the call returns without an error.
     * Otherwise `source` must not change until the promise resolves. Resolves with the buffer that
     * has the bytes then: `source`, or its successor. A caller that writes often should use it again,
     * because new buffers of megabytes make V8 run full collections. Errors: as `gather`, and for a
     * source that cannot be detached.
     */
    scatter(runs: Float64Array, source: ArrayBuffer): Promise<ArrayBuffer>;
    /**
     * Frees the memory. Calling it again has no effect. Errors: `KV_MEMORY_IN_USE` while a
     * registration refers to it.
     */
    close(): void;
}
/** A registration of one memory with one agent (NIXL: `registerMem`). */
export interface Registration {
    /** The registered memory. */
    readonly memory: Memory;
    /**
     * Deregisters the memory (NIXL: `deregisterMem`). Errors: `KV_MEMORY_IN_USE` while a prepared
     * list or transfer of this agent can touch it.
     */
    close(): Promise<void>;
}
/**
 * A descriptor list that is prepared once and addressed by index in transfers (NIXL:
 * `prepXferDlist`).
 */
export interface PreparedList {
    /**
     * Name of the remote agent whose memory the list describes; undefined for a list of local memory.
     */
    readonly remote: string | undefined;
    /** Count of descriptors, strided rows expanded. */
    readonly count: number;
    /** Memory type of all descriptors. */
    readonly memoryType: MemoryType;
    /**
     * Waits until the transfers that use the list are released, then releases the list. New transfers
     * with it throw `KV_LIST_CLOSED` at once.
     */
    close(): Promise<void>;
}
/**
 * A transfer: its options, and its descriptors either as pairs or as runs, which mean the same. The
 * descriptor arrays and the notification are copied before `transfer` returns. A transport may
 * merge descriptors that are adjacent in memory on both sides before it passes them to its library.
 */
export type TransferRequest = TransferOrder & (DescriptorPairs | DescriptorRuns);
/** A transfer without its descriptors. */
export interface TransferOrder {
    /**
     * `READ` copies from `remote` into `local`, `WRITE` from `local` into `remote` (NIXL:
     * `NIXL_READ`, `NIXL_WRITE`).
     */
    readonly operation: "READ" | "WRITE";
    /** A list of this agent's own memory. */
    readonly local: PreparedList;
    /** A list of the peer's memory. */
    readonly remote: PreparedList;
    /**
     * Payload that the remote agent receives exactly once, after every byte of this transfer has
     * landed, and not at all when the transfer fails. The transport decides whether it travels with
     * the transfer (NIXL: `notifMsg`) or after it.
     */
    readonly notification?: Uint8Array | undefined;
    /**
     * Aborting it rejects `done` with `KV_TRANSFER_ABORTED`. The memory stays in use until `released`
     * resolves.
     */
    readonly signal?: AbortSignal | undefined;
    /**
     * Rejects `done` with `KV_TRANSFER_TIMEOUT` after this many milliseconds. @default no deadline
     */
    readonly timeoutMs?: number | undefined;
}
/** Measurements of a transfer that succeeded. Times are in milliseconds. */
export interface TransferResult {
    /** Bytes moved. */
    readonly lengthBytes: number;
    /** Descriptors moved, as requested. */
    readonly descriptorCount: number;
    /**
     * Descriptors that the transport's library received after merging adjacent ones. Absent where it
     * is not measured.
     */
    readonly mergedCount?: number | undefined;
    /**
     * Time from the call to the first post, plus the time to build the requests that follow the
     * first. Absent where it is not measured.
     */
    readonly prepareMs?: number | undefined;
    /**
     * Part of `prepareMs` on the transport's own thread, from taking the transfer up to its first
     * post. Absent where it is not measured.
     */
    readonly makeMs?: number | undefined;
    /** Time inside the post calls (NIXL: `postXferReq`), summed over all slices. */
    readonly postMs: number;
    /** Time from the first post to the last byte. */
    readonly transferMs: number;
}
/** A transfer in progress. */
export interface Transfer {
    /**
     * Resolves with the measurements when every byte has landed. Errors: `KV_TRANSFER_FAILED`,
     * `KV_TRANSFER_ABORTED`, `KV_TRANSFER_TIMEOUT`, `KV_PEER_DISCONNECTED`, `KV_NOTIFICATION_FAILED`
     * when only the notification failed, `KV_AGENT_CLOSED`.
     */
    readonly done: Promise<TransferResult>;
    /**
     * Resolves when the transport no longer touches the memory, whatever the outcome; never rejects.
     * Until then neither source nor destination may be reused. After a success it has resolved by the
     * time `done` resolves.
     */
    readonly released: Promise<void>;
}
/** A notification that arrived (NIXL: an entry of `nixl_notifs_t`). */
export interface Notification {
    /**
     * Name of the agent that sent it, as the sender states it. With NIXL nothing verifies it: UCX
     * takes it from the message. Do not base a decision on it that another process must not make;
     * authenticate the payload instead.
     */
    readonly from: string;
    /** The bytes as sent; the receiver owns them. Treat them as untrusted input. */
    readonly payload: Uint8Array;
}
/** Counters of an agent. Totals count from the agent's creation; the others are current values. */
export interface AgentTelemetry {
    /** Total of transfers started. */
    readonly transfersPosted: number;
    /** Total of transfers that succeeded. */
    readonly transfersDone: number;
    /** Total of transfers that failed, timed out or were aborted. */
    readonly transfersFailed: number;
    /** Transfers that are not released. */
    readonly transfersInFlight: number;
    /** Total of bytes of transfers that succeeded. */
    readonly bytesTransferred: number;
    /** Total of notifications sent, by `notify` and by transfers. */
    readonly notificationsSent: number;
    /** Total of notifications received. */
    readonly notificationsReceived: number;
    /** Open registrations. */
    readonly registrations: number;
    /** Open prepared lists, local and remote. */
    readonly preparedLists: number;
    /** Known peers. */
    readonly remotes: number;
}
/**
 * An endpoint of transfers (NIXL: `nixlAgent`). A connector's worker side has one for each rank.
 * After `close`, every call but `telemetry` and `close` fails with `KV_AGENT_CLOSED`.
 */
export interface Agent {
    /** Name under which peers know this agent. */
    readonly name: string;
    /** Names of the backends that were created, in order of preference. */
    readonly backends: readonly string[];
    /**
     * Registers all of `memory` with this agent (NIXL: `registerMem`). The caller closes the
     * registration. Errors: `KV_MEMORY_INVALID`.
     */
    register(memory: Memory): Promise<Registration>;
    /**
     * Returns what a peer needs to reach this agent and its registered memory, in the transport's own
     * encoding (NIXL: `getLocalMD`).
     */
    localMetadata(): Promise<Uint8Array>;
    /**
     * Makes a peer reachable and returns its name (NIXL: `loadRemoteMD`). Adding a peer again updates
     * it. Errors: `KV_AGENT_METADATA_INVALID` for bytes that are no metadata, and for the agent's own
     * name.
     */
    addRemote(metadata: Uint8Array): Promise<string>;
    /**
     * Forgets a peer (NIXL: `invalidateRemoteMD`). Errors: `KV_AGENT_UNKNOWN_REMOTE`,
     * `KV_MEMORY_IN_USE` while a prepared list refers to the peer.
     */
    removeRemote(name: string): Promise<void>;
    /**
     * Prepares a list of this agent's registered memory. The caller closes it. Errors:
     * `KV_LIST_INVALID`, `KV_MEMORY_NOT_REGISTERED`.
     */
    prepareLocal(table: DescriptorTable): Promise<PreparedList>;
    /**
     * Prepares a list of the memory of the peer `remote`. The caller closes it. Errors:
     * `KV_LIST_INVALID`, `KV_AGENT_UNKNOWN_REMOTE`.
     */
    prepareRemote(remote: string, table: DescriptorTable): Promise<PreparedList>;
    /**
     * Starts a transfer (NIXL: `makeXferReq`, `postXferReq`). Invalid arguments throw at once:
     * `KV_TRANSFER_INVALID`, `KV_NOTIFICATION_INVALID`, `KV_LIST_CLOSED`, `KV_AGENT_CLOSED`. Later
     * errors reject `done`.
     */
    transfer(request: TransferRequest): Transfer;
    /**
     * Sends a notification without a transfer (NIXL: `genNotif`). Resolves when the transport has
     * accepted it; delivery is not confirmed. Errors: `KV_NOTIFICATION_INVALID`,
     * `KV_NOTIFICATION_FAILED`, `KV_AGENT_UNKNOWN_REMOTE`.
     */
    notify(remote: string, payload: Uint8Array): Promise<void>;
    /**
     * Iterates over notifications in the order of delivery (NIXL: `getNotifs`). Only one iterator may
     * be open; a second one throws `KV_NOTIFICATION_INVALID`. Notifications that arrive while no
     * iterator is open are kept for the next one. A transport may limit how many are kept; it logs
     * what it drops, and from whom. The iterator ends when the agent closes.
     */
    notifications(): AsyncIterableIterator<Notification>;
    /** Returns the current counters. */
    telemetry(): AgentTelemetry;
    /**
     * Releases everything in order: transfers, lists, peers, registrations, backends, the agent. It
     * waits until each transfer is released; after `timeoutMs` it aborts those that are left.
     * Notifications sent before the call still arrive, where the peer can be reached. Calling it
     * again returns the same result.
     */
    close(options?: {
        timeoutMs?: number | undefined;
    }): Promise<void>;
}
