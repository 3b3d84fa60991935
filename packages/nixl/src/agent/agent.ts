import { types } from "node:util";
import {
  type Agent,
  type AgentTelemetry,
  type BackendSpec,
  type DescriptorPairs,
  type DescriptorRuns,
  type DescriptorTable,
  KvError,
  type Log,
  type Memory,
  type Notification,
  type PreparedList,
  type Registration,
  type TransferOrder,
  type TransferRequest,
} from "@kv/interface";
import { nativeBackendsOf } from "../backends/backend-traits.js";
import { validateAgentBackends } from "../backends/select-backends.js";
import { formatValue, requireOptions, timerMs } from "../validate.js";
import { AgentCore, type AgentCoreOptions } from "./agent-core.js";
import { type PostOptions, PreparedTransfer } from "./prepared-transfer.js";
import type { RegisterOptions } from "./registrations.js";
import type { NixlTransfer } from "./transfers.js";

export interface NixlAgentOptions extends Omit<AgentCoreOptions, "native"> {
  readonly libraryPath: string;
  /** Unique among peers. */
  readonly name: string;
  /** In order of preference. */
  readonly backends: readonly BackendSpec[];
  /** Paths of libraries that the loader does not find. */
  readonly preload: readonly string[];
  readonly captureTelemetry: boolean;
  /** Where it is created, for the warning that it was dropped. */
  readonly place: string;
  /** Returns more paths for `preload`. Rejects with `KV_BACKEND_UNAVAILABLE`. */
  prepareBackends(backends: readonly BackendSpec[]): Promise<readonly string[]>;
  /** Completes the error of backends that NIXL could not create. */
  explainBackendError(error: unknown, backends: readonly BackendSpec[]): Promise<unknown>;
  /** Loads metadata in another process first. Rejects with `KV_AGENT_METADATA_INVALID`. */
  readonly checkMetadata:
    | ((metadata: Uint8Array, backends: readonly BackendSpec[]) => Promise<void>)
    | undefined;
  /** Completes the error of a peer that NIXL refused. */
  explainRefusedPeer(error: unknown, backends: readonly BackendSpec[]): unknown;
}

/** Options of `NixlAgent.localMetadata`. */
export interface LocalMetadataOptions {
  /** Describe only this memory; an empty list describes none. @default all registered memory */
  readonly registrations?: readonly Registration[] | undefined;
  /**
   * With `registrations`: false for a part that adds to what a peer knows already. @default true
   */
  readonly connections?: boolean | undefined;
}

export const CLOSE_TIMEOUT_MS = 10_000;

/** Warns of agents that were collected but not closed. */
const collected = new FinalizationRegistry<{ core: AgentCore; log: Log; place: string }>(
  ({ core, log, place }) => {
    if (core.calls.closing) return;
    log.warn("nixl-agent-dropped", {
      agent: core.name,
      created: place,
      why: "nothing refers to the agent, and it is not closed: its thread and descriptors stay until its transport is closed",
      hint: "keep the agent as long as peers need it, then close() it, or use `await using`",
    });
  },
);

/**
 * Resolves when the backends are ready. Rejects with `KV_BACKEND_UNAVAILABLE` or
 * `KV_LIBRARY_INCOMPATIBLE`.
 */
export async function startNixlAgent(
  options: NixlAgentOptions,
): Promise<{ agent: NixlAgent; core: AgentCore }> {
  const { addon, libraryPath, name, backends, preload, captureTelemetry, ambient } = options;
  const core = new AgentCore({
    addon,
    native: { libraryPath, name, captureTelemetry, ...nativeBackendsOf(backends, preload) },
    ambient,
    onClose: options.onClose,
  });
  await core.started;
  const agent = new NixlAgent(options, core);
  collected.register(agent, { core, log: ambient.log, place: options.place });
  return { agent, core };
}

/**
 * An agent of NIXL. Its methods hand their calls to a native thread, or make short calls themselves
 * while it sleeps. They are bound, so a wrapper may copy them with `{ ...agent }`.
 */
export class NixlAgent implements Agent, AsyncDisposable {
  /** The name by which peers know it. */
  readonly name: string;
  /** In order of preference; `addBackend` appends to them. */
  readonly backends: readonly string[];
  readonly #options: NixlAgentOptions;
  readonly #core: AgentCore;
  readonly #backends: BackendSpec[];
  readonly #backendNames: string[];

  constructor(options: NixlAgentOptions, core: AgentCore) {
    this.name = options.name;
    this.#options = options;
    this.#core = core;
    this.#backends = [...options.backends];
    this.#backendNames = this.#backends.map((spec) => spec.name);
    this.backends = this.#backendNames;
  }

  /**
   * Creates one more backend (NIXL: `createBackend`). It does not know memory registered before,
   * and peers must load this agent's metadata anew. The agent serves nobody meanwhile, for up to a
   * second. Rejects with `KV_BACKEND_UNAVAILABLE`, also for a second backend of one plugin, and
   * with `KV_AGENT_INVALID` for wrong parameters.
   */
  readonly addBackend = async (backend: BackendSpec | string): Promise<void> => {
    const added = validateAgentBackends([backend]);
    const preload = await this.#options.prepareBackends(added);
    await this.#core.calls
      .call((callId) => this.#core.native.addBackends(callId, nativeBackendsOf(added, preload)))
      .catch(async (error: unknown) => {
        throw await this.#options.explainBackendError(error, added);
      });
    this.#backends.push(...added);
    this.#backendNames.push(...added.map(({ name }) => name));
  };

  /**
   * Registers memory of `allocate`, `hostMemory`, `sharedMemory`, `deviceMemory`, `openFileMemory`
   * or `objectMemory`. Rejects with `KV_MEMORY_INVALID`, `KV_BACKEND_UNAVAILABLE` or
   * `KV_AGENT_CLOSED`.
   */
  readonly register = async (
    memory: Memory,
    options: RegisterOptions = {},
  ): Promise<Registration & AsyncDisposable> => {
    return await this.#core.registrations.register(memory, options);
  };

  /**
   * NIXL's metadata of this agent and its registered memory (NIXL: `getLocalMD`). With
   * `registrations` (`getLocalPartialMD`) a peer refuses lists of other memory, until it adds parts
   * without `connections`. Rejects with `KV_AGENT_CLOSED`, `KV_MEMORY_NOT_REGISTERED`, and
   * `KV_AGENT_INVALID` for storage or when all backends are storage.
   */
  readonly localMetadata = async (options: LocalMetadataOptions = {}): Promise<Uint8Array> => {
    requireOptions(options, "KV_AGENT_INVALID", "the options of localMetadata", [
      "registrations",
      "connections",
    ]);
    const { connections = true } = options;
    const ids = options.registrations?.map((registration) =>
      this.#core.registrations.idOf(registration),
    );
    return await this.#core.calls.answer((callId) =>
      this.#core.native.localMetadata(callId, ids, connections),
    );
  };

  /**
   * Loads a peer's metadata and returns its name. New metadata replaces the old: lists of memory
   * that it no longer states fail. Rejects with `KV_AGENT_METADATA_INVALID` or `KV_AGENT_CLOSED`.
   */
  readonly addRemote = async (metadata: Uint8Array): Promise<string> => {
    if (!types.isUint8Array(metadata)) {
      throw new KvError(
        "KV_AGENT_METADATA_INVALID",
        `metadata is ${formatValue(metadata)}, not a Uint8Array`,
      );
    }
    const { checkMetadata, explainRefusedPeer } = this.#options;
    // A copy: the caller may change its buffer between the check and the load.
    const bytes = checkMetadata === undefined ? metadata : new Uint8Array(metadata);
    if (checkMetadata !== undefined) await checkMetadata(bytes, this.#backends);
    return await this.#core.calls
      .answer<string>((callId) => this.#core.native.addRemote(callId, bytes))
      .catch((error: unknown) => {
        throw explainRefusedPeer(error, this.#backends);
      });
  };

  /**
   * Forgets a peer. Rejects with `KV_AGENT_UNKNOWN_REMOTE`, or `KV_MEMORY_IN_USE` while lists of
   * its memory are open.
   */
  readonly removeRemote = async (name: string): Promise<void> => {
    await this.#core.calls.call((callId) => this.#core.native.removeRemote(callId, name));
  };

  /**
   * Prepares a list of this agent's registered memory. Rejects with `KV_LIST_INVALID` or
   * `KV_MEMORY_NOT_REGISTERED`.
   */
  readonly prepareLocal = (table: DescriptorTable): Promise<PreparedList & AsyncDisposable> =>
    this.#core.lists.prepare(undefined, table);

  /**
   * Prepares a list of a peer's registered memory. This agent's own name selects its own memory,
   * for copies within the agent, files and objects. Rejects with `KV_LIST_INVALID`,
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
    return await this.#core.lists.prepare(remote, table);
  };

  /**
   * Starts a transfer. Throws `KV_TRANSFER_INVALID`, `KV_LIST_CLOSED` or `KV_AGENT_CLOSED`; every
   * other error rejects `done`.
   */
  readonly transfer = (request: TransferRequest): NixlTransfer => {
    this.#core.calls.requireOpen();
    return this.#core.transfers.start(request);
  };

  /**
   * Makes a transfer's NIXL requests once, to post them many times. Close it before its lists.
   * `notification`, `signal` and `timeoutMs` belong to each post. Rejects with
   * `KV_TRANSFER_INVALID`, `KV_TRANSFER_FAILED` when NIXL refuses, `KV_LIST_CLOSED` or
   * `KV_AGENT_CLOSED`.
   */
  readonly prepareTransfer = async (
    request: Omit<TransferOrder, keyof PostOptions> & (DescriptorPairs | DescriptorRuns),
  ): Promise<PreparedTransfer> => {
    const moves = this.#core.transfers.moves(request);
    const { notification, signal, timeoutMs } = request as TransferRequest;
    if (notification !== undefined || signal !== undefined || timeoutMs !== undefined) {
      throw new KvError(
        "KV_TRANSFER_INVALID",
        "a transfer is prepared without notification, signal and timeoutMs",
        { hint: "pass them to post()" },
      );
    }
    const uses = [this.#core.lists.hold(request.local), this.#core.lists.hold(request.remote)];
    const endUses = () => {
      for (const end of uses) end();
    };
    const { id } = await this.#core.calls
      .call((callId) => this.#core.native.prepareTransfer(callId, moves))
      .catch((error: unknown) => {
        endUses();
        throw error;
      });
    const close = this.#core.calls.closeOnce((callId) =>
      this.#core.native.closePreparedTransfer(callId, id),
    );
    return new PreparedTransfer(request, {
      post: (order) => {
        this.#core.calls.requireOpen();
        return this.#core.transfers.post(id, order);
      },
      backend: () =>
        this.#core.calls.answer((callId) => this.#core.native.transferBackend(callId, id)),
      close: () => close().then(endUses),
    });
  };

  /**
   * Sends a notification of up to 64 MiB. Rejects with `KV_NOTIFICATION_FAILED`,
   * `KV_NOTIFICATION_INVALID` or `KV_AGENT_UNKNOWN_REMOTE`.
   */
  readonly notify = async (remote: string, payload: Uint8Array): Promise<void> => {
    await this.#core.calls.call((callId) => this.#core.native.notify(callId, remote, payload));
  };

  /**
   * Iterates over arriving notifications. At most 65,536 notifications with 64 MiB of payloads
   * wait, a quarter of both from one sender. The rest is dropped, logged
   * (`nixl-notifications-dropped`) and counted. Throws `KV_NOTIFICATION_INVALID` while another
   * iterator is open.
   */
  readonly notifications = (): AsyncIterableIterator<Notification> =>
    this.#core.notifications.read();

  /** Counters of the agent, also after `close`. */
  readonly telemetry = (): AgentTelemetry => {
    const { polls: _, ...counters } = this.#core.native.counters();
    const { abortedBeforePost } = this.#core.transfers;
    return {
      ...counters,
      transfersPosted: counters.transfersPosted + abortedBeforePost,
      transfersFailed: counters.transfersFailed + abortedBeforePost,
    };
  };

  /**
   * Waits for transfers (`timeoutMs`, 10 s by default, at most 24 days, or Infinity), then releases
   * everything. After 5 s more it gives up a thread that is stuck in NIXL and logs
   * `nixl-agent-stuck`. Rejects with `KV_AGENT_INVALID` for wrong options.
   */
  readonly close = async (options: { timeoutMs?: number | undefined } = {}): Promise<void> => {
    requireOptions(options, "KV_AGENT_INVALID", "the options of close", ["timeoutMs"]);
    const { timeoutMs = CLOSE_TIMEOUT_MS } = options;
    timerMs(timeoutMs, "KV_AGENT_INVALID");
    await this.#core.close(timeoutMs);
  };

  readonly [Symbol.asyncDispose] = (): Promise<void> => this.close();
}
