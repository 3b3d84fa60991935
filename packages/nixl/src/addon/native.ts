import type { AgentTelemetry } from "@kv/interface";

/**
 * The addon (`native/src`). A method with a call id returns at once, and an event with that id
 * brings the answer. The id then names what the call created, so the caller never reuses an id. A
 * method that returns a `NativeAnswer` may also answer at once, without an event. Errors are plain,
 * with `code` and `hint`; `fromNative` makes `KvError`s.
 */
export interface NativeAddon {
  /**
   * Starts an agent and its thread; the event `SETTLED` of `callId` says that its backends are
   * ready. When `onEvents` gets `more`, it must call `takeEvents` in a later turn of the event
   * loop.
   */
  readonly Agent: new (
    callId: number,
    options: NativeAgentOptions,
    onEvents: (events: NativeEvent[], more: boolean) => void,
  ) => NativeAgent;
  /**
   * Allocates zeroed memory, on the NVIDIA GPU `deviceId` or page-aligned on the host. With
   * `populate` a thread touches the host's pages. Throws `KV_MEMORY_INVALID`, or
   * `KV_TRANSPORT_UNSUPPORTED` without a CUDA driver or such a GPU.
   */
  readonly Memory: new (
    lengthBytes: number,
    populate: boolean,
    deviceId: number | undefined,
  ) => NativeMemory;
  /**
   * Sets variables with `setenv`, then NIXL's defaults where they are unset; returns those
   * defaults. Returns undefined, and sets nothing, while an agent that is being created may read
   * the environment.
   */
  prepareEnvironment(
    variables: [name: string, value: string][],
  ): [name: string, value: string][] | undefined;
  /** Works also for bytes of a `SharedArrayBuffer`. */
  addressOf(bytes: Uint8Array): number;
  /** Throws `KV_TRANSPORT_UNAVAILABLE` when fewer than `needed` file descriptors are free. */
  requireDescriptors(needed: number, what: string): void;
  /** Once NIXL is loaded, further variables have no effect on it. */
  isLoaded(): boolean;
  /** The state of each repair of NIXL's libraries, and why it failed. */
  repairs(): [name: string, state: RepairState, why: string][];
  /** Stops all agents and waits for their threads, before the process exits. */
  stopAll(): boolean;
}

/** A repair is "waiting" until its library is loaded. */
export type RepairState = "waiting" | "holds" | "off" | "failed";

export interface NativeBackends {
  /** In order of preference. */
  readonly backends: { name: string; parameters: [key: string, value: string][] }[];
  /** Paths of libraries to load first. */
  readonly preload: readonly string[];
  /** The thread watches peers' endpoints, because a backend does not report that a peer died. */
  readonly watchPeers: boolean;
  /**
   * The thread reads a byte after each WRITE, because a backend reports a WRITE before its bytes
   * arrive.
   */
  readonly probeWrites: boolean;
  /** The thread polls for notifications. */
  readonly notifies: boolean;
  /** Small calls for a peer's memory are brief with every backend. */
  readonly briefCalls: boolean;
}

export interface NativeAgentOptions extends NativeBackends {
  readonly libraryPath: string;
  /** 1 to 255 printable ASCII characters. */
  readonly name: string;
  readonly captureTelemetry: boolean;
}

/**
 * The constants here are kinds of `NativeEvent`. This one: a call has its answer, an error or a
 * value.
 */
export const SETTLED = 0;
/**
 * The outcome of a transfer: an error or a `NativeOutcome`. A success also means that NIXL has
 * released it.
 */
export const DONE = 1;
/** NIXL has released a transfer that did not succeed. */
export const RELEASED = 2;
/** Notifications wait for `takeNotifications`. Sent for the first of them. */
export const NOTIFICATION = 3;

/**
 * `value` notifications of `from`, or of several senders without it, were dropped because too many
 * waited.
 */
export const DROPPED = 4;
/** The process refused `value` connections of peers for lack of file descriptors. */
export const REFUSED = 5;
/** The repair `from` failed because of `value`. */
export const UNREPAIRED = 6;
/** The agent ended by itself because of `value` and released everything. No event follows. */
export const BROKEN = 7;

export type NativeEvent = [
  kind: number,
  callId: number,
  error: Error | undefined,
  value: unknown,
  from: string | undefined,
];

/** Undefined where an event will bring the answer. */
export type NativeAnswer<T> = [value: T] | undefined;

export type NativeOutcome = [
  lengthBytes: number,
  descriptorCount: number,
  mergedCount: number,
  prepareMs: number,
  makeMs: number,
  postMs: number,
  transferMs: number,
  /** NIXL's own measurements, where the agent captures them. */
  ...telemetry:
    | []
    | [lengthBytes: number, descriptorCount: number, postUs: number, transferUs: number],
];

export interface NativeRegistrable {
  /** NIXL's name of the type, such as "FILE". */
  readonly memoryType: string;
  /** For a file or an object, an offset in it. */
  readonly address: number;
  readonly lengthBytes: number;
  /** Ordinal of the device, descriptor of the file, or number of the object. */
  readonly deviceId: number;
  /** An object's key; empty for all other memory. */
  readonly key: string;
  /** The CUDA driver is asked whether the device has memory at this address. */
  readonly checkWithCuda: boolean;
  /** Memory of the addon, which stays allocated until it is deregistered. */
  readonly kept: NativeMemory | undefined;
  /** Empty for all backends that support the memory. */
  readonly backends: readonly string[];
}

/**
 * `local` and `remote` are the calls that made the lists. The descriptors are `localIds` and
 * `remoteIds`, or `runs` (`[localId, remoteId, count]`) with optional `offsets`
 * (`[localOffset, remoteOffset]`). The addon reads an array faster than properties.
 */
export type NativeMoves = readonly [
  isWrite: boolean,
  local: number,
  remote: number,
  localIds: Int32Array | undefined,
  remoteIds: Int32Array | undefined,
  runs: Int32Array | undefined,
  offsets: Int32Array | undefined,
];

export interface NativeAgent {
  register(callId: number, memory: NativeRegistrable): void;
  deregister(callId: number, registration: number): void;
  addBackends(callId: number, backends: NativeBackends): void;
  /**
   * Answers with the agent's metadata as a `Uint8Array`, of all its memory, or of `registrations`
   * with or without `connections`.
   */
  localMetadata(
    callId: number,
    registrations: readonly number[] | undefined,
    connections: boolean,
  ): void;
  /** Copies, checks and loads a peer's metadata; answers with the peer's name. */
  addRemote(callId: number, metadata: Uint8Array): NativeAnswer<string>;
  removeRemote(callId: number, name: string): void;
  /**
   * Prepares a list of rows of five numbers, of local memory without `remote`; answers with the
   * number of descriptors. With `keeps` the thread reads `rows` in place: they must stay alive and
   * unchanged until the answer. Otherwise it copies them.
   */
  prepare(
    callId: number,
    remote: string | undefined,
    memoryType: string,
    rows: Float64Array,
    keeps: boolean,
  ): NativeAnswer<number>;
  /** Releases a list once no transfer uses it. */
  closeList(callId: number, list: number): void;
  /** Answers when NIXL has taken the notification. */
  notify(callId: number, remote: string, payload: Uint8Array): NativeAnswer<undefined>;
  /**
   * Starts the transfer `callId` of `what`: moves, or the call that prepared its requests. It has
   * checked and copied its arguments when it returns. `askedMs` is when the caller asked, in
   * milliseconds of `process.hrtime`. An `abortable` transfer keeps `notification` out of its NIXL
   * request. Returns the outcome of a transfer that has succeeded at once; no event follows then.
   */
  transfer(
    callId: number,
    what: NativeMoves | number,
    askedMs: number,
    abortable: boolean,
    notification: Uint8Array | undefined,
  ): NativeOutcome | undefined;
  /** Makes the NIXL requests that `callId` then names. */
  prepareTransfer(callId: number, moves: NativeMoves): void;
  /** Releases prepared requests once they are not under way. */
  closePreparedTransfer(callId: number, transfer: number): void;
  /** Answers with the name of the backend that carries prepared requests. */
  transferBackend(callId: number, transfer: number): void;
  /** Returns false when the outcome is decided and its event queued. */
  abort(transfer: number): boolean;
  /** Waits for transfers at most `timeoutMs`. */
  close(callId: number, timeoutMs: number): void;
  takeEvents(): [events: NativeEvent[], more: boolean];
  /**
   * The next notifications: the sender calls itself `from`, and the payload is `value`. With `more`,
   * others wait, of which no event tells.
   */
  takeNotifications(): [notifications: NativeEvent[], more: boolean];
  counters(): NativeCounters;
  /** Whether the agent keeps the process alive. */
  keepAlive(alive: boolean): void;
  /** Ends the events of an agent that has closed or failed to start. */
  detach(): void;
}

/**
 * Totals since the agent's start, except for what exists now: `transfersInFlight`, `registrations`,
 * `preparedLists` and `remotes`. A transfer is in flight until NIXL has released it.
 */
export interface NativeCounters extends AgentTelemetry {
  /** Turns of the agent's thread. */
  readonly polls: number;
}

export interface NativeMemory {
  /** An address on the GPU for its memory, in this process otherwise. */
  readonly address: number;
  /** Copies runs `[offsetBytes, lengthBytes]` into one buffer on another thread. */
  gather(runs: Float64Array): Promise<ArrayBuffer>;
  /**
   * Copies `source` into runs `[offsetBytes, lengthBytes]` on another thread. Once all arguments
   * are valid, it copies from the buffer that `take(source)` returns, which nobody else may have,
   * and resolves with that buffer.
   */
  scatter(
    runs: Float64Array,
    source: ArrayBuffer,
    take: (source: ArrayBuffer) => ArrayBuffer,
  ): Promise<ArrayBuffer>;
  /**
   * Keeps the buffer until `close`. Throws `KV_MEMORY_INVALID`, also when the part is too long for
   * Node.
   */
  buffer(offsetBytes: number, lengthBytes: number): ArrayBuffer;
  /**
   * `detach` empties the memory's views; otherwise they read zeros until their buffers are
   * collected. Throws `KV_MEMORY_IN_USE` while a registration or a copy uses it.
   */
  close(detach: boolean): void;
}
