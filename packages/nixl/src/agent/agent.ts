import {
  type Agent,
  type AgentTelemetry,
  type Ambient,
  type BackendSpec,
  type DescriptorTable,
  KvError,
  type Memory,
  type MemoryType,
  type Notification,
  type PreparedList,
  type Registration,
  type Transfer,
  type TransferRequest,
  takeRows,
} from "@kv/interface";
import {
  DONE,
  DROPPED,
  type NativeAddon,
  type NativeAgent,
  type NativeEvent,
  NOTIFICATION,
  RELEASED,
  SETTLED,
} from "../addon/native.js";
import { callNative, fromNative } from "../addon/native-errors.js";
import { backendTraits, notifies } from "../backends/backend-traits.js";
import { type ExternalMemory, externalMemoryOf } from "../memory/external-memory.js";
import { nativeMemoryOf } from "../memory/host-memory.js";
import { RefCount } from "../ref-count.js";
import { formatValue, requireObject } from "../validate.js";
import { DroppedNotifications } from "./dropped-notifications.js";
import { NotificationQueue } from "./notification-queue.js";
import { PendingCalls } from "./pending-calls.js";
import { Transfers } from "./transfers.js";

/** How an agent is started. */
export interface NixlAgentOptions {
  /** The loaded addon. */
  readonly addon: NativeAddon;
  /** Path of `libnixl_capi.so`. */
  readonly libraryPath: string;
  /** Unique among peers. */
  readonly name: string;
  /** Backends to create, in order of preference. */
  readonly backends: readonly BackendSpec[];
  /** Paths of libraries that the backends need and the loader does not find. */
  readonly preload: readonly string[];
  /** Clock for the timeouts of transfers; log and metrics for notifications that are dropped. */
  readonly ambient: Pick<Ambient, "clock" | "log" | "metrics">;
  /** Loads a peer's metadata in another process first. Rejects with `KV_AGENT_METADATA_INVALID`. */
  readonly checkMetadata: ((metadata: Uint8Array) => Promise<void>) | undefined;
  /** Completes the error of a peer that NIXL refused with the reasons that this host and its variables give. */
  readonly explainRefusedPeer?: ((error: unknown) => Promise<unknown>) | undefined;
  /** Called once, when the agent has released everything. */
  onClose(): void;
}

const CLOSE_TIMEOUT_MS = 10_000;
const MEMORY_TYPES: readonly MemoryType[] = ["DRAM", "VRAM", "FILE", "OBJ"];

/** Starts an agent and its native thread. Resolves when its backends are ready. Rejects with `KV_BACKEND_UNAVAILABLE` or `KV_LIBRARY_INCOMPATIBLE`. */
export async function startNixlAgent(options: NixlAgentOptions): Promise<NixlAgent> {
  const { addon, libraryPath, name, backends, preload } = options;
  const traits = backends.map((spec) => backendTraits(spec.name));
  const keepAlive = new RefCount((alive) => native.keepAlive(alive));
  const calls = new PendingCalls(keepAlive);
  const startId = calls.nextId();
  const nativeOptions = {
    libraryPath,
    name,
    backends: backends.map((spec) => ({
      name: spec.name,
      parameters: Object.entries(spec.parameters ?? {}),
    })),
    preload,
    watchPeers: traits.some(({ watchPeers }) => watchPeers),
    probeWrites: traits.some(({ probeWrites }) => probeWrites),
    notifies: notifies(backends),
  };
  const onEvents = (events: NativeEvent[], more: boolean) => {
    // Peers decide how many notifications come, so the event loop has a turn between two parts of them.
    if (more) setImmediate(() => onEvents(...native.takeEvents()));
    agent.handleEvents(events);
  };
  const native: NativeAgent = callNative(() => new addon.Agent(startId, nativeOptions, onEvents));
  const agent = new NixlAgent(options, { native, calls, keepAlive });
  try {
    await calls.answer<void>(startId);
  } catch (error) {
    native.detach();
    throw error;
  }
  return agent;
}

/**
 * An agent of NIXL. Its native thread makes every call into NIXL; each method here hands one command to that thread. The public methods are
 * bound to the agent, so that a wrapper may take them over with `{ ...agent }`.
 */
export class NixlAgent implements Agent, AsyncDisposable {
  /** The name by which peers know it. */
  readonly name: string;
  /** The names of its backends, in order of preference. */
  readonly backends: readonly string[];
  readonly #options: NixlAgentOptions;
  readonly #native: NativeAgent;
  readonly #calls: PendingCalls;
  readonly #transfers: Transfers;
  readonly #notifications: NotificationQueue;
  readonly #dropped: DroppedNotifications;
  /** The id under which the addon knows each list. */
  readonly #listIds = new WeakMap<PreparedList, number>();
  /** Releases the external memory that is registered. */
  readonly #externalHolds = new Set<() => void>();
  /** Tables whose buffer was taken over. The native thread reads them in place, so they must not be collected. */
  readonly #takenRows = new Set<Float64Array>();
  #closing: Promise<void> | undefined;

  /** For `startNixlAgent`. */
  constructor(
    options: NixlAgentOptions,
    parts: { native: NativeAgent; calls: PendingCalls; keepAlive: RefCount },
  ) {
    const { native, calls, keepAlive } = parts;
    this.name = options.name;
    this.backends = options.backends.map((spec) => spec.name);
    this.#options = options;
    this.#native = native;
    this.#calls = calls;
    this.#dropped = new DroppedNotifications(options.name, options.ambient);
    this.#notifications = new NotificationQueue({ keepAlive, onDrop: (from) => this.#dropped.add(from) });
    this.#transfers = new Transfers({
      native,
      calls,
      keepAlive,
      clock: options.ambient.clock,
      listId: (list) => this.#listId(list),
    });
  }

  /** Registers memory of `allocate`, `deviceMemory`, `openFileMemory` or `objectMemory`. Rejects with `KV_MEMORY_INVALID` or `KV_AGENT_CLOSED`. */
  readonly register = async (memory: Memory): Promise<Registration & AsyncDisposable> => {
    const external = externalMemoryOf(memory);
    if (external !== undefined) return await this.#registerExternal(memory, external);
    const buffer = nativeMemoryOf(memory);
    const { id } = await this.#call((callId) => this.#native.register(callId, buffer));
    const close = this.#closeOnce((callId) => this.#native.deregister(callId, id));
    return Object.freeze({ memory, close, [Symbol.asyncDispose]: close });
  };

  /** NIXL's metadata of this agent and of its registered memory, as a peer loads it. Rejects with `KV_AGENT_CLOSED`, and when all backends are storage. */
  readonly localMetadata = async (): Promise<Uint8Array> =>
    (await this.#call((callId) => this.#native.localMetadata(callId))).value as Uint8Array;

  /** Loads a peer's metadata and returns the peer's name. Rejects with `KV_AGENT_METADATA_INVALID` or `KV_AGENT_CLOSED`. */
  readonly addRemote = async (metadata: Uint8Array): Promise<string> => {
    if (!(metadata instanceof Uint8Array)) {
      throw new KvError(
        "KV_AGENT_METADATA_INVALID",
        `metadata is ${formatValue(metadata)}, not a Uint8Array`,
      );
    }
    const { checkMetadata } = this.#options;
    // The bytes that were checked are the bytes that are loaded, even if the caller changes the buffer meanwhile.
    const bytes = checkMetadata === undefined ? metadata : new Uint8Array(metadata);
    await checkMetadata?.(bytes);
    const { explainRefusedPeer } = this.#options;
    const added = this.#call((callId) => this.#native.addRemote(callId, bytes));
    return (
      await added.catch(async (error: unknown) => {
        throw (await explainRefusedPeer?.(error)) ?? error;
      })
    ).value as string;
  };

  /** Forgets a peer. Rejects with `KV_AGENT_UNKNOWN_REMOTE`, or `KV_MEMORY_IN_USE` while lists of its memory are open. */
  readonly removeRemote = async (name: string): Promise<void> => {
    await this.#call((callId) => this.#native.removeRemote(callId, name));
  };

  /** Prepares a list of this agent's registered memory. Rejects with `KV_LIST_INVALID` or `KV_MEMORY_NOT_REGISTERED`. */
  readonly prepareLocal = (table: DescriptorTable): Promise<PreparedList & AsyncDisposable> =>
    this.#prepare(undefined, table);

  /** Prepares a list of a peer's registered memory. Rejects with `KV_LIST_INVALID` or `KV_AGENT_UNKNOWN_REMOTE`. */
  readonly prepareRemote = async (
    remote: string,
    table: DescriptorTable,
  ): Promise<PreparedList & AsyncDisposable> => {
    if (typeof remote !== "string") {
      throw new KvError(
        "KV_AGENT_UNKNOWN_REMOTE",
        `the peer's name is ${formatValue(remote)}, not a string`,
        { hint: "use prepareLocal for a list of this agent's own memory" },
      );
    }
    return await this.#prepare(remote, table);
  };

  /** Starts a transfer. Throws `KV_TRANSFER_INVALID`, `KV_LIST_CLOSED` or `KV_AGENT_CLOSED`; every other error rejects `done`. */
  readonly transfer = (request: TransferRequest): Transfer => {
    this.#requireOpen();
    return this.#transfers.start(request);
  };

  /** Sends a notification. Rejects with `KV_NOTIFICATION_FAILED`, `KV_NOTIFICATION_INVALID` or `KV_AGENT_UNKNOWN_REMOTE`. */
  readonly notify = async (remote: string, payload: Uint8Array): Promise<void> => {
    await this.#call((callId) => this.#native.notify(callId, remote, payload));
  };

  /**
   * An iterator over the notifications that arrive. 65,536 of them and 64 MiB of payloads wait for a reader, a quarter of both from one sender;
   * what exceeds that is dropped, logged (`nixl-notifications-dropped`) and counted. Throws `KV_NOTIFICATION_INVALID` while another iterator is
   * open.
   */
  readonly notifications = (): AsyncIterableIterator<Notification> => this.#notifications.read();

  /** Counters of the agent. Also after `close`. */
  readonly telemetry = (): AgentTelemetry => {
    const { polls: _, ...counters } = this.#native.counters();
    const { abortedBeforePost } = this.#transfers;
    return {
      ...counters,
      transfersPosted: counters.transfersPosted + abortedBeforePost,
      transfersFailed: counters.transfersFailed + abortedBeforePost,
    };
  };

  /** Waits for transfers (`timeoutMs`, 10 s by default), then releases everything. Rejects with `KV_AGENT_INVALID` for wrong options. */
  readonly close = async (options: { timeoutMs?: number | undefined } = {}): Promise<void> => {
    requireObject(options, "KV_AGENT_INVALID", "the options of close");
    const { timeoutMs = CLOSE_TIMEOUT_MS } = options;
    if (!(typeof timeoutMs === "number" && timeoutMs >= 0 && timeoutMs < 2 ** 31)) {
      throw new KvError(
        "KV_AGENT_INVALID",
        `timeoutMs is ${formatValue(timeoutMs)}, not a number from 0 to 2^31`,
      );
    }
    this.#closing ??= this.#close(timeoutMs);
    await this.#closing;
  };

  /** The same as `close()`. */
  readonly [Symbol.asyncDispose] = (): Promise<void> => this.close();

  /** Called with what the native thread reports. */
  handleEvents(events: readonly NativeEvent[]): void {
    for (const [kind, callId, error, value, from] of events) {
      const failure = error === undefined ? undefined : fromNative(error);
      if (kind === DONE) this.#transfers.onDone(callId, failure, value);
      else if (kind === SETTLED) this.#calls.settle(callId, failure, value);
      else if (kind === RELEASED) this.#transfers.onReleased(callId);
      else if (kind === NOTIFICATION) {
        this.#notifications.push({ from: from ?? "", payload: value as Uint8Array });
      } else if (kind === DROPPED) this.#dropped.add(from, value as number);
    }
  }

  async #registerExternal(memory: Memory, external: ExternalMemory): Promise<Registration & AsyncDisposable> {
    const release = external.hold();
    this.#externalHolds.add(release);
    const letGo = () => {
      this.#externalHolds.delete(release);
      release();
    };
    const { memoryType, address, lengthBytes, deviceId } = memory;
    const { checkWithCuda, key } = external;
    const options = { memoryType, address, lengthBytes, deviceId, key, checkWithCuda };
    const { id } = await this.#call((callId) => this.#native.registerExternal(callId, options)).catch(
      (error: unknown) => {
        letGo();
        throw error;
      },
    );
    const deregister = this.#closeOnce((callId) => this.#native.deregister(callId, id));
    const close = () => deregister().then(letGo);
    return Object.freeze({ memory, close, [Symbol.asyncDispose]: close });
  }

  async #prepare(
    remote: string | undefined,
    table: DescriptorTable,
  ): Promise<PreparedList & AsyncDisposable> {
    requireObject(table, "KV_LIST_INVALID", "the table of a list");
    const { memoryType, rows, takeRows: takesRows = false } = table;
    if (!MEMORY_TYPES.includes(memoryType)) {
      throw new KvError(
        "KV_LIST_INVALID",
        `memoryType is ${formatValue(memoryType)}, not one of ${MEMORY_TYPES.join(", ")}`,
      );
    }
    let read = rows;
    const { id, value } = await this.#call((callId) => {
      if (takesRows) {
        read = takeRows(rows);
        this.#takenRows.add(read);
      }
      this.#native.prepare(callId, remote, memoryType, read, takesRows);
    }).finally(() => this.#takenRows.delete(read));
    const close = this.#closeOnce((callId) => this.#native.closeList(callId, id));
    const list: PreparedList & AsyncDisposable = Object.freeze({
      remote,
      count: value as number,
      memoryType,
      close,
      [Symbol.asyncDispose]: close,
    });
    this.#listIds.set(list, id);
    return list;
  }

  #listId(list: PreparedList): number {
    const id = this.#listIds.get(list);
    if (id !== undefined) return id;
    throw new KvError("KV_TRANSFER_INVALID", `the list was not prepared by agent ${this.name}`);
  }

  /** Makes a call; `id` names what it created in the addon. Rejects with `KV_AGENT_CLOSED` once the agent is closing. */
  async #call(command: (callId: number) => void): Promise<{ id: number; value: unknown }> {
    this.#requireOpen();
    let id = 0;
    const value = await this.#calls.call<unknown>((callId) => {
      id = callId;
      command(callId);
    });
    return { id, value };
  }

  /**
   * A `close` of something this agent made: closing twice is one call, a close that failed may be tried again, and once the agent closes it
   * waits for that, which releases everything.
   */
  #closeOnce(command: (callId: number) => void): () => Promise<void> {
    let closed: Promise<void> | undefined;
    return () => {
      if (this.#closing !== undefined) return closed ?? this.#closing;
      closed ??= this.#calls.call<void>(command).catch((error: unknown) => {
        closed = undefined;
        throw error;
      });
      return closed;
    };
  }

  async #close(timeoutMs: number): Promise<void> {
    try {
      await this.#calls.call<void>((callId) => this.#native.close(callId, timeoutMs));
    } finally {
      this.#calls.rejectAll(new KvError("KV_AGENT_CLOSED", `the agent ${this.name} is closed`));
      this.#notifications.close();
      this.#dropped.close();
      for (const release of this.#externalHolds) release();
      this.#native.detach();
      this.#options.onClose();
    }
  }

  #requireOpen(): void {
    if (this.#closing === undefined) return;
    throw new KvError("KV_AGENT_CLOSED", `the agent ${this.name} is closed`);
  }
}
