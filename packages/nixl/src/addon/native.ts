/**
 * The addon's surface. A method takes a ticket, a number that its caller chooses and never uses again: the outcome
 * comes back under it, and what the method makes is named by it afterwards.
 */
export interface NativeAddon {
  readonly Agent: new (
    ticket: number,
    options: NativeAgentOptions,
    onEvents: (events: NativeEvent[]) => void,
  ) => NativeAgent;
  readonly Memory: new (lengthBytes: number) => NativeMemory;
  /** Sets variables in the process's real environment, then NIXL's defaults; answers the defaults that were set. */
  prepareEnvironment(variables: [name: string, value: string][]): [name: string, value: string][];
  /** Whether NIXL has been loaded, so that variables come too late for it. */
  isLoaded(): boolean;
  /** Has all agents of the process let go, and waits for it; for the exit of the process. */
  stopAll(): boolean;
}

export interface NativeAgentOptions {
  readonly libraryPath: string;
  readonly name: string;
  readonly backends: { name: string; parameters: [key: string, value: string][] }[];
  /** Libraries to load before the backends are made, by path. */
  readonly preload: readonly string[];
  /** Look after peers where the backend does not tell of their death. */
  readonly watchPeers: boolean;
  /** Read a byte after each WRITE: the backend calls it done when its bytes have left. */
  readonly probeWrites: boolean;
  /** A backend carries notifications, and is asked for them. */
  readonly notifies: boolean;
}

/** Kinds of event: a command settled, a transfer's outcome, the release of one that did not succeed, a notification. */
export const SETTLED = 0;
export const DONE = 1;
export const RELEASED = 2;
export const NOTIFICATION = 3;

export type NativeEvent = [
  kind: number,
  ticket: number,
  error: Error | undefined,
  value: unknown,
  from: string | undefined,
];

/** The value of `DONE`. */
export type NativeOutcome = [
  lengthBytes: number,
  descriptorCount: number,
  mergedCount: number,
  prepareMs: number,
  makeMs: number,
  postMs: number,
  transferMs: number,
];

export interface NativeAgent {
  register(ticket: number, memory: NativeMemory): void;
  /** A file from its beginning on, an object, or memory of a device. With `check`, CUDA's driver is asked about it; `key` is an object's. */
  registerForeign(
    ticket: number,
    memoryType: string,
    address: number,
    lengthBytes: number,
    deviceId: number,
    check: boolean,
    key: string,
  ): void;
  deregister(ticket: number, registration: number): void;
  localMetadata(ticket: number): void;
  addRemote(ticket: number, metadata: Uint8Array): void;
  removeRemote(ticket: number, name: string): void;
  /** `keeps`: the rows stay as they are, and alive, until the ticket is settled; otherwise they are copied. */
  prepare(
    ticket: number,
    remote: string | undefined,
    memoryType: string,
    rows: Float64Array,
    keeps: boolean,
  ): void;
  closeList(ticket: number, list: number): void;
  notify(ticket: number, remote: string, payload: Uint8Array): void;
  transfer(
    ticket: number,
    isWrite: boolean,
    localList: number,
    remoteList: number,
    localIds: Int32Array | undefined,
    remoteIds: Int32Array | undefined,
    runs: Int32Array | undefined,
    offsets: Int32Array | undefined,
    notification: Uint8Array | undefined,
    revocable: boolean,
    /** When it was asked for, in milliseconds of `process.hrtime`. */
    askedMs: number,
  ): void;
  /** False when the outcome is decided already, and on its way. */
  abort(transfer: number): boolean;
  close(ticket: number, timeoutMs: number): void;
  counters(): NativeCounters;
  /** Whether the process must stay alive for what this agent has under way. */
  keepAlive(alive: boolean): void;
  /** After `close` has settled, or the start has failed: no events follow. */
  detach(): void;
}

export interface NativeCounters {
  transfersPosted: number;
  transfersDone: number;
  transfersFailed: number;
  transfersInFlight: number;
  bytesTransferred: number;
  notificationsSent: number;
  notificationsReceived: number;
  registrations: number;
  preparedLists: number;
  remotes: number;
  /** Turns of the agent's thread. */
  polls: number;
}

export interface NativeMemory {
  readonly address: number;
  readonly buffer: ArrayBuffer;
  gather(runs: Float64Array): Promise<ArrayBuffer>;
  scatter(runs: Float64Array, source: ArrayBuffer): Promise<void>;
  /** `detach` leaves views of the buffer empty; without it they read zeros until the buffer is collected. */
  close(detach: boolean): void;
}
