import { types } from "node:util";
import {
  type Agent,
  type AgentTelemetry,
  type Ambient,
  type BackendSpec,
  type DescriptorPairs,
  type DescriptorRuns,
  type DescriptorTable,
  KvError,
  type Memory,
  type Notification,
  type PreparedList,
  type Registration,
  type Timer,
  type TransferOrder,
  type TransferRequest,
} from "@kv/interface";
import {
  DONE,
  DROPPED,
  type NativeAddon,
  type NativeAgent,
  type NativeEvent,
  type NativeQueryAnswers,
  NOTIFICATION,
  RELEASED,
  SETTLED,
} from "../addon/native.js";
import { callNative, fromNative } from "../addon/native-errors.js";
import {
  type BackendParameters,
  backendParametersOf,
  nativeBackendsOf,
} from "../backends/backend-parameters.js";
import { validateAgentBackends } from "../backends/select-backends.js";
import { RefCount } from "../ref-count.js";
import { formatValue, requireObject } from "../validate.js";
import { AgentCalls } from "./agent-calls.js";
import { DroppedNotifications, reportOfProcess, reportStuck } from "./agent-reports.js";
import { type MemoryQuery, requireQuery } from "./memory-query.js";
import { NotificationQueue } from "./notification-queue.js";
import { PreparedLists } from "./prepared-lists.js";
import { type PostOptions, PreparedTransfer } from "./prepared-transfer.js";
import { type RegisterOptions, Registrations } from "./registrations.js";
import { type NixlTransfer, Transfers } from "./transfers.js";

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
  /** NIXL measures each request. */
  readonly captureTelemetry: boolean;
  /**
   * Prepares the process for more backends; returns paths as `preload` has them. Rejects with
   * `KV_BACKEND_UNAVAILABLE`.
   */
  prepareBackends(backends: readonly BackendSpec[]): Promise<readonly string[]>;
  /** Completes the error of backends that NIXL could not create. */
  explainBackendError(error: unknown, backends: readonly BackendSpec[]): Promise<unknown>;
  /** Clock for the timeouts of transfers; log and metrics for notifications that are dropped. */
  readonly ambient: Pick<Ambient, "clock" | "log" | "metrics">;
  /**
   * Loads a peer's metadata first in another process, which has the same backends. Rejects with
   * `KV_AGENT_METADATA_INVALID`.
   */
  readonly checkMetadata:
    | ((metadata: Uint8Array, backends: readonly BackendSpec[]) => Promise<void>)
    | undefined;
  /**
   * Completes the error of a peer that NIXL refused with the reasons that this host and its
   * variables give.
   */
  explainRefusedPeer(error: unknown, backends: readonly BackendSpec[]): Promise<unknown>;
  /** Called once, when the agent has released everything. */
  onClose(): void;
}

/** Options of `NixlAgent.localMetadata`. */
export interface LocalMetadataOptions {
  /**
   * Describe the memory of these registrations only; of none for an empty list. @default all
   * registered memory
   */
  readonly registrations?: readonly Registration[] | undefined;
}

const CLOSE_TIMEOUT_MS = 10_000;
/**
 * The longest that an agent's thread may take to release everything once the time of `close` is
 * over. It takes up to 0.2 s.
 */
const STUCK_MS = 5000;

/**
 * Starts an agent and its native thread. Resolves when its backends are ready. Rejects with
 * `KV_BACKEND_UNAVAILABLE` or `KV_LIBRARY_INCOMPATIBLE`.
 */
export async function startNixlAgent(options: NixlAgentOptions): Promise<NixlAgent> {
  const { addon, libraryPath, name, backends, preload, captureTelemetry } = options;
  const keepAlive = new RefCount((alive) => native.keepAlive(alive));
  const calls = new AgentCalls(name, keepAlive);
  const startId = calls.nextId();
  const nativeOptions = {
    libraryPath,
    name,
    captureTelemetry,
    ...nativeBackendsOf(backends, preload),
  };
  const onEvents = (events: NativeEvent[], more: boolean) => {
    // Peers decide how many notifications come, so the event loop has a turn between two parts of
    // them.
    if (more) setImmediate(() => onEvents(...native.takeEvents()));
    agent.handleEvents(events);
  };
  const native: NativeAgent = callNative(() => new addon.Agent(startId, nativeOptions, onEvents));
  const agent = new NixlAgent(options, { native, calls, keepAlive });
  try {
    await calls.answerTo<void>(startId);
  } catch (error) {
    native.detach();
    throw error;
  }
  return agent;
}

/**
 * An agent of NIXL. Its native thread calls NIXL; each method here hands one command to that
 * thread, or makes a short call itself while the thread sleeps. The public methods are bound to the
 * agent, so that a wrapper may take them over with `{ ...agent }`.
 */
export class NixlAgent implements Agent, AsyncDisposable {
  /** The name by which peers know it. */
  readonly name: string;
  /** The names of its backends, in order of preference. */
  readonly backends: readonly string[];
  readonly #options: NixlAgentOptions;
  /**
   * The backends with their parameters, also those that were added later; `backends` has their
   * names.
   */
  readonly #backends: BackendSpec[];
  readonly #backendNames: string[];
  readonly #native: NativeAgent;
  readonly #calls: AgentCalls;
  readonly #registrations: Registrations;
  readonly #lists: PreparedLists;
  readonly #transfers: Transfers;
  readonly #notifications: NotificationQueue;
  readonly #dropped: DroppedNotifications;

  /** For `startNixlAgent`. */
  constructor(
    options: NixlAgentOptions,
    parts: { native: NativeAgent; calls: AgentCalls; keepAlive: RefCount },
  ) {
    const { native, calls, keepAlive } = parts;
    this.name = options.name;
    this.#backends = [...options.backends];
    this.#backendNames = this.#backends.map((spec) => spec.name);
    this.backends = this.#backendNames;
    this.#options = options;
    this.#native = native;
    this.#calls = calls;
    this.#registrations = new Registrations(native, calls);
    this.#lists = new PreparedLists(native, calls);
    this.#dropped = new DroppedNotifications(options.name, options.ambient);
    this.#notifications = new NotificationQueue({
      keepAlive,
      onDrop: (from) => this.#dropped.add(from),
    });
    this.#transfers = new Transfers({
      native,
      calls,
      keepAlive,
      clock: options.ambient.clock,
      listId: (list) => this.#lists.idOf(list),
    });
  }

  /**
   * Creates one more backend (NIXL: `createBackend`). Memory that is registered already stays
   * unknown to it, and peers know of it once they load this agent's metadata anew. While NIXL
   * creates it, up to a second, the agent serves nobody. Rejects with `KV_BACKEND_UNAVAILABLE`,
   * also for a second backend of one plugin, and with `KV_AGENT_INVALID` for wrong parameters.
   */
  readonly addBackend = async (backend: BackendSpec | string): Promise<void> => {
    const added = validateAgentBackends([backend]);
    const preload = await this.#options.prepareBackends(added);
    await this.#calls
      .call((callId) => this.#native.addBackends(callId, nativeBackendsOf(added, preload)))
      .catch(async (error: unknown) => {
        throw await this.#options.explainBackendError(error, added);
      });
    this.#backends.push(...added);
    this.#backendNames.push(...added.map(({ name }) => name));
  };

  /**
   * What a plugin states before a backend of it exists (NIXL: `getPluginParams`). Rejects with
   * `KV_BACKEND_UNAVAILABLE`.
   */
  readonly pluginParameters = async (plugin: string): Promise<BackendParameters> =>
    backendParametersOf(
      await this.#calls.answer((callId) => this.#native.describeBackend(callId, plugin, true)),
    );

  /**
   * What a backend of this agent was created with (NIXL: `getBackendParams`). Rejects with
   * `KV_BACKEND_UNAVAILABLE`.
   */
  readonly backendParameters = async (backend: string): Promise<BackendParameters> =>
    backendParametersOf(
      await this.#calls.answer((callId) => this.#native.describeBackend(callId, backend, false)),
    );

  /**
   * Asks a storage backend about files (by path) or objects (by key), registered or not (NIXL:
   * `queryMem`). Resolves with an entry per key, in order: what the backend knows of it, such as
   * `size`, or undefined where there is nothing. The agent waits for the store meanwhile. Rejects
   * with `KV_MEMORY_INVALID` for wrong keys, or when the backend refuses, and with
   * `KV_BACKEND_UNAVAILABLE`.
   */
  readonly queryMemory = async (
    query: MemoryQuery,
  ): Promise<(Readonly<Record<string, string>> | undefined)[]> => {
    requireQuery(query);
    const { backend, memoryType, keys } = query;
    const answers = await this.#calls.answer<NativeQueryAnswers>((callId) =>
      this.#native.queryMemory(callId, { backend, memoryType, keys }),
    );
    return answers.map((answer) => answer && Object.fromEntries(answer));
  };

  /**
   * Registers memory of `allocate`, `hostMemory`, `sharedMemory`, `deviceMemory`, `openFileMemory`
   * or `objectMemory`. With `backends` only with these backends of the agent, otherwise with all
   * that support the memory. Rejects with `KV_MEMORY_INVALID`, `KV_BACKEND_UNAVAILABLE` or
   * `KV_AGENT_CLOSED`.
   */
  readonly register = async (
    memory: Memory,
    options: RegisterOptions = {},
  ): Promise<Registration & AsyncDisposable> => {
    return await this.#registrations.register(memory, options);
  };

  /**
   * NIXL's metadata of this agent and of its registered memory, as a peer loads it (NIXL:
   * `getLocalMD`). With `registrations` of that memory only (`getLocalPartialMD`): the peer's NIXL
   * refuses lists of any other, until it loads further parts with `addRemote`. Rejects with
   * `KV_AGENT_CLOSED`, `KV_MEMORY_NOT_REGISTERED`, and `KV_AGENT_INVALID` for storage, and when all
   * backends are storage.
   */
  readonly localMetadata = async (options: LocalMetadataOptions = {}): Promise<Uint8Array> => {
    requireObject(options, "KV_AGENT_INVALID", "the options of localMetadata");
    const ids = options.registrations?.map((registration) =>
      this.#registrations.idOf(registration),
    );
    return await this.#calls.answer((callId) => this.#native.localMetadata(callId, ids));
  };

  /**
   * Loads a peer's metadata and returns the peer's name. Rejects with `KV_AGENT_METADATA_INVALID`
   * or `KV_AGENT_CLOSED`.
   */
  readonly addRemote = async (metadata: Uint8Array): Promise<string> => {
    if (!types.isUint8Array(metadata)) {
      throw new KvError(
        "KV_AGENT_METADATA_INVALID",
        `metadata is ${formatValue(metadata)}, not a Uint8Array`,
      );
    }
    const { checkMetadata, explainRefusedPeer } = this.#options;
    // The bytes that were checked are the bytes that are loaded, even if the caller changes the
    // buffer meanwhile.
    const bytes = checkMetadata === undefined ? metadata : new Uint8Array(metadata);
    if (checkMetadata !== undefined) await checkMetadata(bytes, this.#backends);
    const added = this.#calls.call((callId) => this.#native.addRemote(callId, bytes));
    return (
      await added.catch(async (error: unknown) => {
        throw await explainRefusedPeer(error, this.#backends);
      })
    ).value as string;
  };

  /**
   * Forgets a peer. Rejects with `KV_AGENT_UNKNOWN_REMOTE`, or `KV_MEMORY_IN_USE` while lists of
   * its memory are open.
   */
  readonly removeRemote = async (name: string): Promise<void> => {
    await this.#calls.call((callId) => this.#native.removeRemote(callId, name));
  };

  /**
   * Prepares a list of this agent's registered memory. Rejects with `KV_LIST_INVALID` or
   * `KV_MEMORY_NOT_REGISTERED`.
   */
  readonly prepareLocal = (table: DescriptorTable): Promise<PreparedList & AsyncDisposable> =>
    this.#lists.prepare(undefined, table);

  /**
   * Prepares a list of a peer's registered memory. Under this agent's own name it describes its own
   * memory, for copies within the agent, or files and objects. Rejects with `KV_LIST_INVALID`,
   * `KV_AGENT_UNKNOWN_REMOTE` or `KV_MEMORY_NOT_REGISTERED`.
   */
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
    return await this.#lists.prepare(remote, table);
  };

  /**
   * Starts a transfer. Throws `KV_TRANSFER_INVALID`, `KV_LIST_CLOSED` or `KV_AGENT_CLOSED`; every
   * other error rejects `done`.
   */
  readonly transfer = (request: TransferRequest): NixlTransfer => {
    this.#calls.requireOpen();
    return this.#transfers.start(request);
  };

  /**
   * Makes a transfer's NIXL requests once, to be posted many times. Its lists cannot be closed
   * before it is. `notification`, `signal` and `timeoutMs` belong to each post. Rejects with
   * `KV_TRANSFER_INVALID`, `KV_TRANSFER_FAILED` when NIXL refuses, `KV_LIST_CLOSED` or
   * `KV_AGENT_CLOSED`.
   */
  readonly prepareTransfer = async (
    request: Omit<TransferOrder, keyof PostOptions> & (DescriptorPairs | DescriptorRuns),
  ): Promise<PreparedTransfer> => {
    const moves = this.#transfers.moves(request);
    const { notification, signal, timeoutMs } = request as TransferRequest;
    if (notification !== undefined || signal !== undefined || timeoutMs !== undefined) {
      throw new KvError(
        "KV_TRANSFER_INVALID",
        "a transfer is prepared without notification, signal and timeoutMs",
        { hint: "pass them to post()" },
      );
    }
    const uses = [this.#lists.hold(request.local), this.#lists.hold(request.remote)];
    const endUses = () => {
      for (const end of uses) end();
    };
    const { id } = await this.#calls
      .call((callId) => this.#native.prepareTransfer(callId, moves))
      .catch((error: unknown) => {
        endUses();
        throw error;
      });
    const close = this.#calls.closeOnce((callId) => this.#native.closePreparedTransfer(callId, id));
    return new PreparedTransfer(request, {
      post: (order) => {
        this.#calls.requireOpen();
        return this.#transfers.post(id, order);
      },
      estimate: () => this.#calls.answer((callId) => this.#native.estimateCost(callId, id)),
      close: () => close().then(endUses),
    });
  };

  /**
   * Sends a notification. Rejects with `KV_NOTIFICATION_FAILED`, `KV_NOTIFICATION_INVALID` or
   * `KV_AGENT_UNKNOWN_REMOTE`.
   */
  readonly notify = async (remote: string, payload: Uint8Array): Promise<void> => {
    await this.#calls.call((callId) => this.#native.notify(callId, remote, payload));
  };

  /**
   * An iterator over the notifications that arrive. 65,536 of them and 64 MiB of payloads wait for
   * a reader, a quarter of both from one sender; what exceeds that is dropped, logged
   * (`nixl-notifications-dropped`) and counted. Throws `KV_NOTIFICATION_INVALID` while another
   * iterator is open.
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

  /**
   * Waits for transfers (`timeoutMs`, 10 s by default), then releases everything. Resolves 5 s
   * after that at the latest: an agent whose thread is in a call of NIXL that does not return is
   * given up then, and logged (`nixl-agent-stuck`). Rejects with `KV_AGENT_INVALID` for wrong
   * options.
   */
  readonly close = async (options: { timeoutMs?: number | undefined } = {}): Promise<void> => {
    requireObject(options, "KV_AGENT_INVALID", "the options of close");
    const { timeoutMs = CLOSE_TIMEOUT_MS } = options;
    if (!(typeof timeoutMs === "number" && timeoutMs >= 0 && timeoutMs < 2 ** 31)) {
      throw new KvError(
        "KV_AGENT_INVALID",
        `timeoutMs is ${formatValue(timeoutMs)}, not a number from 0 to 2^31`,
      );
    }
    await this.#calls.close(() => this.#close(timeoutMs));
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
      else if (kind === NOTIFICATION)
        this.#notifications.push({ from: from ?? "", payload: value as Uint8Array });
      else if (kind === DROPPED) this.#dropped.add(from, value as number);
      else reportOfProcess(this.#options.ambient, kind, value);
    }
  }

  /**
   * NIXL has not returned from a call, and only NIXL could end it: the call is given up with its
   * thread.
   */
  #giveUp(afterMs: number): void {
    const message = `the agent ${this.name} was closed while a call of NIXL did not return`;
    this.#transfers.rejectAll(new KvError("KV_AGENT_CLOSED", message));
    reportStuck(this.#options.ambient, this.name, afterMs);
  }

  async #close(timeoutMs: number): Promise<void> {
    const closed = this.#calls.make<void>((callId) => this.#native.close(callId, timeoutMs));
    let timer: Timer | undefined;
    const stuck = new Promise<void>((resolve) => {
      timer = this.#options.ambient.clock.setTimer(resolve, timeoutMs + STUCK_MS);
    }).then(() => this.#giveUp(timeoutMs + STUCK_MS));
    try {
      await Promise.race([closed, stuck]);
    } finally {
      timer?.cancel();
      this.#calls.rejectAll();
      this.#notifications.close();
      this.#dropped.close();
      this.#registrations.onClose();
      this.#native.detach();
      this.#options.onClose();
    }
  }
}
