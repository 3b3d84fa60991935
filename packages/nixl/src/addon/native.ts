/**
 * The JavaScript interface of the addon (`native/src`). A method that takes a call id returns at
 * once; the answer comes later as an event with that id. What the call creates (a registration, a
 * list) is named by the id of the call afterwards. The caller chooses the ids and never uses one
 * twice. Methods throw plain errors with `code` and `hint`; `fromNative` makes `KvError`s of them.
 * Some short calls are made at once where that is possible: then the method returns the answer, or
 * throws its error, and no event follows.
 */
export interface NativeAddon {
  /**
   * Starts an agent and its native thread; the event `SETTLED` of `callId` says that its backends
   * are ready. When `onEvents` gets `more`, it must call `takeEvents` in a later turn of the event
   * loop.
   */
  readonly Agent: new (
    callId: number,
    options: NativeAgentOptions,
    onEvents: (events: NativeEvent[], more: boolean) => void,
  ) => NativeAgent;
  /**
   * Allocates page-aligned, zeroed host memory. With `populate` a thread touches its pages. Throws
   * `KV_MEMORY_INVALID`.
   */
  readonly Memory: new (
    lengthBytes: number,
    populate: boolean,
  ) => NativeMemory;
  /**
   * Allocates zeroed memory of an NVIDIA GPU with the CUDA driver. Throws
   * `KV_TRANSPORT_UNSUPPORTED` without a driver or such a GPU, and `KV_MEMORY_INVALID` where the
   * driver refuses.
   */
  readonly DeviceMemory: new (
    lengthBytes: number,
    deviceId: number,
  ) => NativeDeviceMemory;
  /**
   * Sets variables in the environment of the process (`setenv`), then NIXL's defaults where they
   * are not set; returns the defaults it set. Returns undefined, and sets nothing, while an agent
   * of the process is being created and may read the environment: call it again later.
   */
  prepareEnvironment(
    variables: [name: string, value: string][],
  ): [name: string, value: string][] | undefined;
  /** Where the bytes are in this process, also those of a `SharedArrayBuffer`. */
  addressOf(bytes: Uint8Array): number;
  /**
   * Throws `KV_TRANSPORT_UNAVAILABLE` when the process has fewer than `needed` free file
   * descriptors for `what`.
   */
  requireDescriptors(needed: number, what: string): void;
  /** Whether NIXL is loaded, so that further variables have no effect on it. */
  isLoaded(): boolean;
  /** Stops all agents of the process and waits for their threads; for the exit of the process. */
  stopAll(): boolean;
}

/** Backends to create, and what has to be done for them. */
export interface NativeBackends {
  /** Backends to create, in order of preference. */
  readonly backends: { name: string; parameters: [key: string, value: string][] }[];
  /** Paths of libraries to load before the backends are created. */
  readonly preload: readonly string[];
  /** Watch each peer's endpoint: the backend does not report that a peer died. */
  readonly watchPeers: boolean;
  /** Read a byte after each WRITE: the backend reports a WRITE as done when its bytes have left. */
  readonly probeWrites: boolean;
  /** A backend carries notifications, and is polled for them. */
  readonly notifies: boolean;
  /** Small calls for the memory of peers are brief with every one of the backends. */
  readonly briefCalls: boolean;
}

/** How the addon starts an agent. */
export interface NativeAgentOptions extends NativeBackends {
  /** Path of `libnixl_capi.so`. */
  readonly libraryPath: string;
  /** The agent's name: 1 to 255 printable ASCII characters. */
  readonly name: string;
  /** NIXL measures each request. */
  readonly captureTelemetry: boolean;
}

/** Event: a call has its answer, an error or a value. */
export const SETTLED = 0;
/**
 * Event: the outcome of a transfer: an error, or a `NativeOutcome`. A success also means that the
 * transfer is released.
 */
export const DONE = 1;
/** Event: NIXL has released a transfer that did not succeed. */
export const RELEASED = 2;
/**
 * Event: a notification has arrived. `value` is its payload, `from` the name that the sender
 * states.
 */
export const NOTIFICATION = 3;

/**
 * Event: `value` notifications that state `from` as their sender were dropped, because too many
 * waited. Without `from`: of several senders.
 */
export const DROPPED = 4;
/**
 * Event: `value` connections of peers were refused, in all of the process, because no file
 * descriptor was free for them.
 */
export const REFUSED = 5;
/**
 * Event: UCX is not one that the addon knows, so nothing keeps its errors from ending the process.
 */
export const UNKNOWN_UCX = 6;

/** An event of the native thread; `kind` is one of the constants above. */
export type NativeEvent = [
  kind: number,
  callId: number,
  error: Error | undefined,
  value: unknown,
  from: string | undefined,
];

/**
 * What a method returns that has made its call at once: the value; undefined where an event will
 * bring the answer.
 */
export type NativeAnswer<T> = [value: T] | undefined;

/** The value of `DONE`. */
export type NativeOutcome = [
  lengthBytes: number,
  descriptorCount: number,
  mergedCount: number,
  prepareMs: number,
  makeMs: number,
  postMs: number,
  transferMs: number,
  /**
   * NIXL's own measurements, where the agent captures them: bytes, descriptors, microseconds of
   * posting, and until the last byte.
   */
  ...telemetry:
    | []
    | [lengthBytes: number, descriptorCount: number, postUs: number, transferUs: number],
];

/** The answer to `describeBackend`. */
export type NativeParameterSet = [
  memoryTypes: string[],
  parameters: [key: string, value: string][],
];

/**
 * The answer to `queryMemory`: for each key its parameters; undefined where there is nothing under
 * it.
 */
export type NativeQueryAnswers = ([key: string, value: string][] | undefined)[];

/** Memory that the addon does not own. */
export interface NativeExternalMemory {
  /** NIXL's name of the memory type, such as "FILE". */
  readonly memoryType: string;
  /** Address of the first byte; for a file or an object an offset in it. */
  readonly address: number;
  /** Length in bytes. */
  readonly lengthBytes: number;
  /** Ordinal of the device, descriptor of the file, or number of the object. */
  readonly deviceId: number;
  /** An object's key; empty for all else. */
  readonly key: string;
  /** Ask the CUDA driver whether the address is memory of the device. */
  readonly checkWithCuda: boolean;
  /** The memory where the addon allocated it: it stays allocated until it is deregistered. */
  readonly kept: NativeDeviceMemory | undefined;
  /** The chosen backends; none for all that support the memory. */
  readonly backends: readonly string[];
}

/**
 * What a transfer moves: WRITE or READ, the calls that made its lists, and its descriptors as
 * `localIds` and `remoteIds`, or as `runs` (`[localId, remoteId, count]`) and perhaps `offsets`
 * (`[localOffset, remoteOffset]`). An array, since the addon reads its elements faster than
 * properties.
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

/** An agent of NIXL with its native thread. */
export interface NativeAgent {
  /**
   * Registers all of `memory`, which stays allocated until it is deregistered. `backends`: the
   * chosen ones; none for all that support it.
   */
  register(callId: number, memory: NativeMemory, backends: readonly string[]): void;
  /** Registers a file, an object, or memory of a device or of the caller. */
  registerExternal(callId: number, options: NativeExternalMemory): void;
  /** Undoes the registration that the call `registration` made. */
  deregister(callId: number, registration: number): void;
  /** Creates more backends. */
  addBackends(callId: number, backends: NativeBackends): void;
  /**
   * Answers with a `NativeParameterSet`: what a plugin states, or what a backend of the agent was
   * created with.
   */
  describeBackend(callId: number, name: string, ofPlugin: boolean): void;
  /** Asks a storage backend about keys; answers with `NativeQueryAnswers`. */
  queryMemory(
    callId: number,
    query: { backend: string; memoryType: string; keys: readonly string[] },
  ): void;
  /**
   * Answers with the agent's metadata, as a `Uint8Array`: of all its memory, or of these
   * registrations.
   */
  localMetadata(callId: number, registrations: readonly number[] | undefined): void;
  /** Checks and loads a peer's metadata, which is copied; answers with the peer's name. */
  addRemote(callId: number, metadata: Uint8Array): NativeAnswer<string>;
  /** Forgets a peer. */
  removeRemote(callId: number, name: string): void;
  /**
   * Prepares a list of rows of five numbers; `remote` is undefined for local memory. Answers with
   * the number of descriptors. With `keeps` the thread reads `rows` in place, so they must stay
   * unchanged and alive until the answer; otherwise they are copied.
   */
  prepare(
    callId: number,
    remote: string | undefined,
    memoryType: string,
    rows: Float64Array,
    keeps: boolean,
  ): NativeAnswer<number>;
  /** Releases the list that the call `list` made, once no transfer uses it. */
  closeList(callId: number, list: number): void;
  /** Sends a notification; answers when NIXL has taken it. */
  notify(callId: number, remote: string, payload: Uint8Array): NativeAnswer<undefined>;
  /**
   * Starts a transfer, which is named by `callId`: `what` it moves, or the call that has made its
   * requests before. Everything is checked and copied before it returns. `askedMs`: when the caller
   * asked, in milliseconds of `process.hrtime`. One that is `abortable` has no `notification` in
   * its NIXL request. Returns the outcome of one that has succeeded already, of which no event
   * follows.
   */
  transfer(
    callId: number,
    what: NativeMoves | number,
    askedMs: number,
    abortable: boolean,
    notification: Uint8Array | undefined,
  ): NativeOutcome | undefined;
  /** Makes the NIXL requests of a transfer, which are then named by `callId`. */
  prepareTransfer(callId: number, moves: NativeMoves): void;
  /** Releases the requests that the call `transfer` made, once they are not under way. */
  closePreparedTransfer(callId: number, transfer: number): void;
  /**
   * Answers with `[durationUs, marginUs, known]`: NIXL's estimate for the requests that the call
   * `transfer` made.
   */
  estimateCost(callId: number, transfer: number): void;
  /** Gives up a transfer. False when its outcome is already decided and its event is queued. */
  abort(transfer: number): boolean;
  /** Closes the agent; waits for its transfers, `timeoutMs` at most. */
  close(callId: number, timeoutMs: number): void;
  /** The next events, and whether there are more. */
  takeEvents(): [events: NativeEvent[], more: boolean];
  /** Counters at this moment. */
  counters(): NativeCounters;
  /** Whether the agent keeps the process alive. */
  keepAlive(alive: boolean): void;
  /** Ends the stream of events; for an agent that has closed, or has failed to start. */
  detach(): void;
}

/** Counters of an agent since its start, and sizes of its tables. */
export interface NativeCounters {
  /** Transfers that were handed to the thread. */
  transfersPosted: number;
  /** Transfers that succeeded. */
  transfersDone: number;
  /** Transfers that failed, were aborted or timed out. */
  transfersFailed: number;
  /** Transfers that NIXL has not released. */
  transfersInFlight: number;
  /** Bytes of the transfers that succeeded. */
  bytesTransferred: number;
  /** Notifications that NIXL took. */
  notificationsSent: number;
  /** Notifications that arrived. */
  notificationsReceived: number;
  /** Registrations at this moment. */
  registrations: number;
  /** Prepared lists at this moment. */
  preparedLists: number;
  /** Known peers at this moment. */
  remotes: number;
  /** Turns of the agent's thread. */
  polls: number;
}

/** Memory that the addon allocated. */
export interface NativeDeviceMemory {
  /** Where it begins: on the device for memory of a GPU, in this process otherwise. */
  readonly address: number;
  /** Copies runs `[offsetBytes, lengthBytes]` into one buffer, on another thread. */
  gather(runs: Float64Array): Promise<ArrayBuffer>;
  /**
   * Copies `source` into runs `[offsetBytes, lengthBytes]`, on another thread. Once all arguments
   * are valid it calls `take(source)`, and copies from the buffer that this returns, which nobody
   * else may have. Resolves with that buffer.
   */
  scatter(
    runs: Float64Array,
    source: ArrayBuffer,
    take: (source: ArrayBuffer) => ArrayBuffer,
  ): Promise<ArrayBuffer>;
  /** Frees the memory. Throws `KV_MEMORY_IN_USE` while a registration or a copy uses it. */
  close(): void;
}

/** Host memory that the addon owns. */
export interface NativeMemory extends Omit<NativeDeviceMemory, "close"> {
  /**
   * A part of the memory as a new buffer, which is kept until `close`. Throws `KV_MEMORY_INVALID`,
   * also for a part that is too long for Node.
   */
  buffer(offsetBytes: number, lengthBytes: number): ArrayBuffer;
  /**
   * Frees the memory. With `detach` its views become empty; without it they read zeros until the
   * buffers are collected.
   */
  close(detach: boolean): void;
}
