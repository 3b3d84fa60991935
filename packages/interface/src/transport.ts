/**
 * A Transport moves bytes between registered memories of agents, one-sided, and carries notifications. The terms
 * and the semantics are NIXL's; `@kv/nixl` is the real one, `@kv/transport-memory` the embedded one. Every
 * implementation runs the suite `@kv/conformance/transport`.
 */

/**
 * Kinds of memory, by NIXL's names without the suffix `_SEG`. `VRAM` is a device's, which its ordinal in the owner's process names. A `FILE`,
 * or an `OBJ` of an object store, is reached by the agent that has registered it alone: its lists are remote ones of that agent's own name, their
 * rows places in it, their device its `deviceId`. A WRITE replaces an object: its row is all of it.
 */
export type MemoryType = "DRAM" | "VRAM" | "FILE" | "OBJ";

/** What a transport can do. Callers branch on these, never on the transport's name. */
export interface TransportCapabilities {
  readonly read: boolean;
  readonly write: boolean;
  readonly notifications: boolean;
  /** Agents may live in different processes. */
  readonly crossProcess: boolean;
  /** Memory that can be registered. */
  readonly memoryTypes: readonly MemoryType[];
  /** The death of a peer fails its transfers. Without it only the caller's deadlines tell. */
  readonly reportsPeerDeath: boolean;
}

export interface Transport {
  /** For logs and reports, such as "nixl" or "memory". */
  readonly name: string;
  readonly capabilities: TransportCapabilities;
  /** Makes an agent with its backends ready. Errors: `KV_TRANSPORT_UNAVAILABLE`, `KV_BACKEND_UNAVAILABLE`, `KV_AGENT_INVALID`. */
  createAgent(options?: AgentOptions): Promise<Agent>;
  /**
   * Allocates page-aligned, zeroed, touched memory that this transport can register. It belongs to the caller until
   * `close`; closing while a registration names it is `KV_MEMORY_IN_USE`.
   */
  allocate(
    lengthBytes: number,
    options?: { memoryType?: MemoryType | undefined; deviceId?: number | undefined },
  ): Memory;
  /** Closes all agents, then what the transport itself holds. Safe to call twice. */
  close(): Promise<void>;
}

export interface AgentOptions {
  /** Unique among peers; a UUID by default, as vLLM does. 1 to 255 printable ASCII characters. */
  name?: string | undefined;
  /** Backends in order of preference; the transport's default when absent. */
  backends?: readonly BackendSpec[] | undefined;
}

export interface BackendSpec {
  readonly name: string;
  readonly parameters?: Readonly<Record<string, string>> | undefined;
}

/** Memory that the transport can reach. Addresses are below 2^53, so a `number` holds them exactly. */
export interface Memory {
  readonly address: number;
  readonly lengthBytes: number;
  readonly memoryType: MemoryType;
  readonly deviceId: number;
  /** A view of the bytes, for memory that this process can address (`DRAM`). It dies with `close`: it is empty then, or reads zeros. */
  readonly bytes: Uint8Array;
  /**
   * Copies runs of this memory out into one buffer, in order, off the JavaScript thread where the implementation is
   * native. `runs` is a table of rows `[offsetBytes, lengthBytes]`.
   */
  gather(runs: Float64Array): Promise<ArrayBuffer>;
  /** Copies `source` in, its bytes taken in order, into the runs `[offsetBytes, lengthBytes]`; lengths must add up. */
  scatter(runs: Float64Array, source: ArrayBuffer): Promise<void>;
  close(): void;
}

/**
 * Descriptors as rows of five numbers `[address, lengthBytes, deviceId, strideBytes, count]`: a row stands for `count`
 * descriptors of `lengthBytes`, each `strideBytes` after the one before. A descriptor's index is its position in
 * the expanded order; row r begins at the sum of the counts before it.
 */
export interface DescriptorTable {
  readonly memoryType: MemoryType;
  readonly rows: Float64Array;
  /**
   * The list takes the buffer of `rows` over, which is detached when the call returns, whatever comes of the list. Otherwise the rows
   * are copied before it returns: 40 MB on the caller's thread for a million of them. Errors: `KV_LIST_INVALID` where the buffer
   * cannot be detached.
   */
  readonly takeRows?: boolean | undefined;
}

/** Numbers in a row of a `DescriptorTable`. */
export const DESCRIPTOR_ROW = 5;

export interface Registration {
  readonly memory: Memory;
  /** Lets go of the memory. `KV_MEMORY_IN_USE` while a prepared list or transfer of this agent can touch it. */
  close(): Promise<void>;
}

/** A list of descriptors made ready once, and named by index in transfers. */
export interface PreparedList {
  /** Name of the remote agent whose memory it describes; undefined for a list of local memory. */
  readonly remote: string | undefined;
  /** Descriptors in it, strided rows expanded. */
  readonly count: number;
  readonly memoryType: MemoryType;
  /** Waits for the transfers that use the list, then releases it. */
  close(): Promise<void>;
}

/**
 * What moves, in one of two spellings that mean the same; both are copied before `transfer` returns. A transport may hand descriptors that lie
 * side by side in memory, on both sides, to its library as one.
 */
export type TransferRequest = TransferOrder & (DescriptorPairs | DescriptorRuns);

/** Descriptors one by one. */
export interface DescriptorPairs {
  /** Indices into `local`; pairwise with `remoteIds`, equal byte lengths. */
  readonly localIds: Int32Array;
  readonly remoteIds: Int32Array;
  readonly runs?: undefined;
  readonly offsets?: undefined;
}

/** Descriptors whose indices follow one another on both sides, without writing each of them out. */
export interface DescriptorRuns {
  /**
   * Rows `[localId, remoteId, count]`: descriptors `localId` to `localId + count - 1` of `local`, pairwise with as many of `remote` from
   * `remoteId` on.
   */
  readonly runs: Int32Array;
  /**
   * Rows `[localOffset, remoteOffset]`: all runs move once for each, offset by offset, from ids that are so much higher. The blocks of a
   * request are the same in every region of a KV cache, so this is as long as there are regions, and `runs` as there are runs of blocks.
   * One row of zeros when absent.
   */
  readonly offsets?: Int32Array | undefined;
  readonly localIds?: undefined;
  readonly remoteIds?: undefined;
}

/** Numbers in a row of `DescriptorRuns.runs`. */
export const DESCRIPTOR_RUN = 3;

/** Numbers in a row of `DescriptorRuns.offsets`. */
export const DESCRIPTOR_OFFSET = 2;

/** A transfer but for its descriptors. */
export interface TransferOrder {
  readonly operation: "READ" | "WRITE";
  readonly local: PreparedList;
  readonly remote: PreparedList;
  /**
   * Delivered to the remote agent exactly once, after every byte of this transfer has landed, and not at all when the
   * transfer fails. How (a rider on the NIXL request, or sent after the last slice) is the transport's affair.
   */
  readonly notification?: Uint8Array | undefined;
  /** Gives up: `done` rejects with `KV_TRANSFER_ABORTED`; the memory stays in use until `released`. */
  readonly signal?: AbortSignal | undefined;
  /** Gives up after this long, with `KV_TRANSFER_TIMEOUT`. */
  readonly timeoutMs?: number | undefined;
}

export interface TransferResult {
  readonly lengthBytes: number;
  /** Descriptors moved, as given. */
  readonly descriptorCount: number;
  /** Descriptors that the transport's library was handed, neighbours merged. Where it is measured. */
  readonly mergedCount?: number | undefined;
  /** From the call to the first post, and the making of the requests that follow it. Where it is measured. */
  readonly prepareMs?: number | undefined;
  /** The part of it on the transport's own thread: from taking the transfer up to its first post. Where it is measured. */
  readonly makeMs?: number | undefined;
  /** Time inside the post calls, all slices together. */
  readonly postMs: number;
  /** From the first post to the last byte. */
  readonly transferMs: number;
}

export interface Transfer {
  /** Settles with the outcome. */
  readonly done: Promise<TransferResult>;
  /**
   * Resolves when the transport will touch the memory no more; never rejects. Until then neither source nor destination
   * may be given to anyone else. After a success it has resolved by the time `done` has.
   */
  readonly released: Promise<void>;
}

export interface Notification {
  /** Name of the agent that sent it. */
  readonly from: string;
  readonly payload: Uint8Array;
}

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

export interface Agent {
  readonly name: string;
  /** Backends that were created, in order. */
  readonly backends: readonly string[];
  /** Registers all of `memory`. Errors: `KV_MEMORY_INVALID`. */
  register(memory: Memory): Promise<Registration>;
  /** What a peer needs to reach this agent and its registered memory, in the transport's own encoding. */
  localMetadata(): Promise<Uint8Array>;
  /** Makes a peer reachable and answers its name. The same peer twice is an update. Errors: `KV_AGENT_METADATA_INVALID`. */
  addRemote(metadata: Uint8Array): Promise<string>;
  /** Forgets a peer. Its prepared lists must have been closed (`KV_MEMORY_IN_USE`). */
  removeRemote(name: string): Promise<void>;
  /** Makes a list of this agent's registered memory ready. Errors: `KV_LIST_INVALID`, `KV_MEMORY_NOT_REGISTERED`. */
  prepareLocal(table: DescriptorTable): Promise<PreparedList>;
  /** Makes a list of a peer's memory ready. Errors: `KV_LIST_INVALID`, `KV_AGENT_UNKNOWN_REMOTE`. */
  prepareRemote(remote: string, table: DescriptorTable): Promise<PreparedList>;
  /** Starts a transfer. Errors in the arguments are thrown (`KV_TRANSFER_INVALID`, `KV_LIST_CLOSED`); all others reject `done`. */
  transfer(request: TransferRequest): Transfer;
  /** Sends a notification on its own. Resolves when the transport has taken it. Errors: `KV_NOTIFICATION_FAILED`, `KV_AGENT_UNKNOWN_REMOTE`. */
  notify(remote: string, payload: Uint8Array): Promise<void>;
  /**
   * Notifications in the order in which the transport delivers them. One iterator at a time; those that arrive while there is none
   * are kept. It ends when the agent closes.
   */
  notifications(): AsyncIterableIterator<Notification>;
  telemetry(): AgentTelemetry;
  /**
   * Lets go of everything in the right order: transfers (waiting for each until it is released, `timeoutMs` at most), lists, peers,
   * registrations, backends, the agent. Notifications that were sent before arrive, where the peer can be reached. Safe to call twice.
   */
  close(options?: { timeoutMs?: number | undefined }): Promise<void>;
}
