import type {
  DescriptorPairs,
  DescriptorRuns,
  DescriptorTable,
  MemoryType,
} from "./descriptors.js";

/**
 * Moves bytes between registered memories of agents, one-sided, and carries notifications, with the
 * semantics of NIXL 1.5. `@kv/nixl` is for production, `@kv/transport-memory` for tests. Every
 * implementation runs the suite `@kv/conformance/transport`.
 *
 * All that has `close` here also has `Symbol.asyncDispose` or `Symbol.dispose`; yours may leave it
 * out.
 */

/** Capabilities of a transport. Callers branch on these, never on its name. */
export interface TransportCapabilities {
  readonly read: boolean;
  readonly write: boolean;
  /** `notify`, and the `notification` of a transfer, work. */
  readonly notifications: boolean;
  readonly crossProcess: boolean;
  /** `allocate` and `register` accept these. */
  readonly memoryTypes: readonly MemoryType[];
  /** Transfers with a dead peer fail by themselves. False: only the caller's deadline ends them. */
  readonly reportsPeerDeath: boolean;
}

/** Creates agents and memory. A process usually has one. */
export interface Transport {
  readonly name: string;
  readonly capabilities: TransportCapabilities;
  /**
   * Creates an agent whose backends are ready (NIXL: `nixlAgent`, `createBackend`). The caller
   * closes it.
   *
   * @throws `KV_TRANSPORT_UNAVAILABLE`, `KV_TRANSPORT_CLOSED`, `KV_BACKEND_UNAVAILABLE`,
   * `KV_AGENT_INVALID` for a name that is malformed or taken.
   */
  createAgent(options?: AgentOptions): Promise<Agent>;
  /**
   * Allocates page-aligned, zeroed, touched memory for registration; the caller closes it.
   * `memoryType` defaults to `DRAM` where there is any, `deviceId` to 0.
   *
   * @throws `KV_MEMORY_INVALID` for an impossible length or device, `KV_TRANSPORT_UNSUPPORTED` for
   * a type not in `capabilities.memoryTypes`, `KV_TRANSPORT_CLOSED`.
   */
  allocate(
    lengthBytes: number,
    options?: { memoryType?: MemoryType | undefined; deviceId?: number | undefined },
  ): Memory;
  /** Closes all agents, then its own resources. Idempotent. */
  close(): Promise<void>;
}

/** Options of `Transport.createAgent`. */
export interface AgentOptions {
  /** Unique among peers: 1 to 255 printable ASCII characters. @default a UUID, as vLLM uses */
  name?: string | undefined;
  /** In order of preference. @default the transport's own choice */
  backends?: readonly BackendSpec[] | undefined;
  /** The user's setting that names the backends, for messages. @default "the agent's backends" */
  backendsSetting?: string | undefined;
}

/** A backend (a NIXL plugin, such as UCX) and its parameters. */
export interface BackendSpec {
  readonly name: string;
  /** Keys are the backend's own (NIXL: `nixl_b_params_t`). */
  readonly parameters?: Readonly<Record<string, string>> | undefined;
}

/** Memory that the transport can reach. The caller of `allocate` owns it. */
export interface Memory {
  /** Below 2^53, so that a `number` is exact; 0 for `FILE` and `OBJ`. */
  readonly address: number;
  readonly lengthBytes: number;
  readonly memoryType: MemoryType;
  /** Ordinal of the device; 0 for `DRAM`. */
  readonly deviceId: number;
  /**
   * A view of all bytes, if this process can address them (`DRAM`). After `close` it is empty or
   * reads zeros.
   *
   * @throws `KV_MEMORY_INVALID` when the process cannot address the memory, or one view cannot hold
   * it: on Node 20 above 4 GiB.
   */
  readonly bytes: Uint8Array;
  /**
   * Returns a view of a part, also of memory too long for `bytes`. After `close` it is empty or
   * reads zeros.
   *
   * @throws `KV_MEMORY_INVALID` for a part outside the memory or too long for a view (on Node 20
   * above 2 GiB), and for memory that is closed or not addressable.
   */
  view(offsetBytes: number, lengthBytes: number): Uint8Array;
  /**
   * Copies runs of this memory, rows `[offsetBytes, lengthBytes]`, into one new buffer. Native code
   * copies off the JavaScript thread.
   *
   * @throws `KV_MEMORY_INVALID` for a run outside the memory, runs longer together than the memory,
   * a closed memory, or no memory for the buffer; nothing is copied then.
   */
  gather(runs: Float64Array): Promise<ArrayBuffer>;
  /**
   * Copies `source` into the runs `[offsetBytes, lengthBytes]`, together as long. An implementation
   * may take `source` over with `takeBuffer`, which detaches it unless the call throws; otherwise
   * `source` must not change until the promise resolves. Resolves with the buffer that then has the
   * bytes. Reuse it: new buffers of megabytes make V8 run full collections.
   *
   * @throws as `gather`, and for a source that cannot be detached.
   */
  scatter(runs: Float64Array, source: ArrayBuffer): Promise<ArrayBuffer>;
  /**
   * Frees the memory. Idempotent.
   *
   * @throws `KV_MEMORY_IN_USE` while a registration refers to it.
   */
  close(): void;
}

/** One memory, registered with one agent (NIXL: `registerMem`). */
export interface Registration {
  readonly memory: Memory;
  /**
   * Deregisters the memory (NIXL: `deregisterMem`).
   *
   * @throws `KV_MEMORY_IN_USE` while a prepared list or transfer of this agent can touch it.
   */
  close(): Promise<void>;
}

/** A descriptor list, prepared once and addressed by index in transfers (NIXL: `prepXferDlist`). */
export interface PreparedList {
  /** The remote agent of the memory; undefined for local memory. */
  readonly remote: string | undefined;
  /** Descriptors, with strided rows expanded. */
  readonly count: number;
  readonly memoryType: MemoryType;
  /**
   * Waits for the transfers that use the list, then releases it. New ones throw `KV_LIST_CLOSED` at
   * once.
   */
  close(): Promise<void>;
}

/**
 * A transfer with its descriptors as pairs or runs. `transfer` copies descriptors and notification
 * before it returns. A transport may merge descriptors that are adjacent on both sides.
 */
export type TransferRequest = TransferOrder & (DescriptorPairs | DescriptorRuns);

/** A transfer without its descriptors. */
export interface TransferOrder {
  /**
   * `READ` copies from `remote` into `local`, `WRITE` from `local` into `remote` (NIXL:
   * `NIXL_READ`, `NIXL_WRITE`).
   */
  readonly operation: "READ" | "WRITE";
  readonly local: PreparedList;
  readonly remote: PreparedList;
  /**
   * The remote agent receives it exactly once, after every byte has landed; never when the transfer
   * fails. It travels with the transfer (NIXL: `notifMsg`) or after it.
   */
  readonly notification?: Uint8Array | undefined;
  /**
   * Aborting rejects `done` with `KV_TRANSFER_ABORTED`. The memory stays in use until `released`
   * resolves.
   */
  readonly signal?: AbortSignal | undefined;
  /** When it has passed, `done` rejects with `KV_TRANSFER_TIMEOUT`. @default no deadline */
  readonly timeoutMs?: number | undefined;
}

/** Measurements of a successful transfer, in milliseconds. Absent members are not measured. */
export interface TransferResult {
  readonly lengthBytes: number;
  readonly descriptorCount: number;
  /** Descriptors after merging adjacent ones. */
  readonly mergedCount?: number | undefined;
  /** Time from the call to the first post, and for building the later requests. */
  readonly prepareMs?: number | undefined;
  /** Part of `prepareMs` on the transport's own thread, up to the first post. */
  readonly makeMs?: number | undefined;
  /** Time inside the post calls (NIXL: `postXferReq`), over all slices. */
  readonly postMs: number;
  /** Time from the first post to the last byte. */
  readonly transferMs: number;
}

/** A transfer in progress. */
export interface Transfer {
  /**
   * Resolves when every byte has landed.
   *
   * @throws `KV_TRANSFER_FAILED`, `KV_TRANSFER_ABORTED`, `KV_TRANSFER_TIMEOUT`,
   * `KV_PEER_DISCONNECTED`, `KV_NOTIFICATION_FAILED` when only the notification failed,
   * `KV_AGENT_CLOSED`.
   */
  readonly done: Promise<TransferResult>;
  /**
   * Resolves when the transport no longer touches the memory, whatever the outcome; never rejects.
   * Do not reuse source or destination before. After a success it has resolved when `done`
   * resolves.
   */
  readonly released: Promise<void>;
}

/** A notification that arrived (NIXL: an entry of `nixl_notifs_t`). */
export interface Notification {
  /**
   * The sender states it, and with NIXL nothing verifies it (UCX takes it from the message). For a
   * decision that no other process may make, authenticate the payload.
   */
  readonly from: string;
  /** The bytes as sent, untrusted; the receiver owns them. */
  readonly payload: Uint8Array;
}

/** Counters of an agent: totals since its creation, and current values. */
export interface AgentTelemetry {
  readonly transfersPosted: number;
  readonly transfersDone: number;
  readonly transfersFailed: number;
  readonly transfersInFlight: number;
  readonly bytesTransferred: number;
  readonly notificationsSent: number;
  readonly notificationsReceived: number;
  readonly registrations: number;
  readonly preparedLists: number;
  readonly remotes: number;
}

/**
 * An endpoint of transfers (NIXL: `nixlAgent`). After `close`, every call but `telemetry` and
 * `close` fails with `KV_AGENT_CLOSED`.
 */
export interface Agent {
  readonly name: string;
  /** The first is preferred. */
  readonly backends: readonly string[];
  /**
   * Registers all of `memory` (NIXL: `registerMem`). The caller closes the registration.
   *
   * @throws `KV_MEMORY_INVALID`.
   */
  register(memory: Memory): Promise<Registration>;
  /** Returns what a peer needs to reach this agent and its memory (NIXL: `getLocalMD`). */
  localMetadata(): Promise<Uint8Array>;
  /**
   * Makes a peer reachable and returns its name (NIXL: `loadRemoteMD`). Adding it again updates it.
   *
   * @throws `KV_AGENT_METADATA_INVALID` for bytes that are no metadata, and for the agent's own
   * name.
   */
  addRemote(metadata: Uint8Array): Promise<string>;
  /**
   * Forgets a peer (NIXL: `invalidateRemoteMD`).
   *
   * @throws `KV_AGENT_UNKNOWN_REMOTE`, `KV_MEMORY_IN_USE` while a prepared list refers to the peer.
   */
  removeRemote(name: string): Promise<void>;
  /**
   * Prepares a list of this agent's registered memory. The caller closes it.
   *
   * @throws `KV_LIST_INVALID`, `KV_MEMORY_NOT_REGISTERED`.
   */
  prepareLocal(table: DescriptorTable): Promise<PreparedList>;
  /**
   * Prepares a list of a peer's memory. The caller closes it.
   *
   * @throws `KV_LIST_INVALID`, `KV_AGENT_UNKNOWN_REMOTE`.
   */
  prepareRemote(remote: string, table: DescriptorTable): Promise<PreparedList>;
  /**
   * Starts a transfer (NIXL: `makeXferReq`, `postXferReq`). Invalid arguments throw at once:
   * `KV_TRANSFER_INVALID`, `KV_NOTIFICATION_INVALID`, `KV_LIST_CLOSED`, `KV_AGENT_CLOSED`. Later
   * errors reject `done`.
   */
  transfer(request: TransferRequest): Transfer;
  /**
   * Sends a notification without a transfer (NIXL: `genNotif`). Resolves when the transport accepts
   * it; delivery is not confirmed.
   *
   * @throws `KV_NOTIFICATION_INVALID`, `KV_NOTIFICATION_FAILED`, `KV_AGENT_UNKNOWN_REMOTE`.
   */
  notify(remote: string, payload: Uint8Array): Promise<void>;
  /**
   * Iterates over notifications in order of delivery until the agent closes (NIXL: `getNotifs`).
   * They wait while no iterator is open; a second one throws `KV_NOTIFICATION_INVALID`. A transport
   * may limit how many wait; it logs what it drops, and from whom.
   */
  notifications(): AsyncIterableIterator<Notification>;
  telemetry(): AgentTelemetry;
  /**
   * Releases transfers, lists, peers, registrations, backends, then the agent. After `timeoutMs` it
   * aborts transfers that are left. Notifications sent before still reach reachable peers.
   * Idempotent.
   */
  close(options?: { timeoutMs?: number | undefined }): Promise<void>;
}
