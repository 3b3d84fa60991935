import {
  type Agent,
  type BackendSpec,
  type Clock,
  type DescriptorTable,
  KvError,
  type MemoryType,
  type PreparedList,
  type Registration,
  takeRows,
} from "@kv/interface";
import {
  DONE,
  type NativeAddon,
  type NativeAgent,
  type NativeEvent,
  NOTIFICATION,
  RELEASED,
  SETTLED,
} from "../addon/native.js";
import { fromNative } from "../addon/native-errors.js";
import { backendFacts, notifies } from "../backends/backend-traits.js";
import { foreignOf } from "../memory/external-memory.js";
import { nativeOf } from "../memory/host-memory.js";
import { requireObject, shown } from "../validate.js";
import { inbox } from "./notification-queue.js";
import { tickets } from "./pending-calls.js";
import { transfers } from "./transfers.js";

export interface NixlAgentOptions {
  addon: NativeAddon;
  libraryPath: string;
  name: string;
  backends: readonly BackendSpec[];
  /** Libraries that the backends need and the loader does not find. */
  preload: readonly string[];
  clock: Clock;
  /** Tries a peer's metadata elsewhere before this process's NIXL gets it. */
  checkMetadata?: ((metadata: Uint8Array) => Promise<void>) | undefined;
  /** Called once the agent has let go of everything. */
  onClose(): void;
}

const CLOSE_TIMEOUT_MS = 10_000;
const MEMORY_TYPES: readonly MemoryType[] = ["DRAM", "VRAM", "FILE", "OBJ"];

/** Starts an agent and its native thread; resolves when its backends are ready. */
export async function createNixlAgent(options: NixlAgentOptions): Promise<Agent> {
  const { addon, libraryPath, name, backends, preload, clock, onClose } = options;
  let native: NativeAgent | undefined;
  const calls = tickets((alive) => native?.keepAlive(alive));
  const notifications = inbox(() => calls.hold());
  const listTickets = new WeakMap<PreparedList, number>();
  /** To let go of registered memory that is not the addon's. */
  const holds = new Set<() => void>();
  /** Taken over and not copied: the thread reads them where they are, and the collector must not have them. */
  const rowsUnderRead = new Set<Float64Array>();
  let closing: Promise<void> | undefined;

  const onEvents = (events: NativeEvent[]) => {
    for (const [kind, ticket, error, value, from] of events) {
      const failure = error === undefined ? undefined : fromNative(error);
      if (kind === SETTLED) calls.settle(ticket, failure, value);
      else if (kind === DONE) moves.done(ticket, failure, value);
      else if (kind === RELEASED) moves.released(ticket);
      else if (kind === NOTIFICATION) notifications.push({ from: from ?? "", payload: value as Uint8Array });
    }
  };

  const started = calls.call<void>((ticket) => {
    native = new addon.Agent(
      ticket,
      {
        libraryPath,
        name,
        backends: backends.map((spec) => ({
          name: spec.name,
          parameters: Object.entries(spec.parameters ?? {}),
        })),
        preload,
        watchPeers: backends.some((spec) => backendFacts(spec.name).watchPeers),
        probeWrites: backends.some((spec) => backendFacts(spec.name).probeWrites),
        notifies: notifies(backends),
      },
      onEvents,
    );
  });
  const thread = native as NativeAgent | undefined;
  if (thread === undefined) return started as Promise<never>;
  const moves = transfers({
    native: thread,
    tickets: calls,
    clock,
    listTicket(list) {
      const ticket = listTickets.get(list);
      if (ticket === undefined)
        throw new KvError("KV_TRANSFER_INVALID", `the list was not prepared by agent ${name}`);
      return ticket;
    },
  });
  try {
    await started;
  } catch (error) {
    thread.detach();
    throw error;
  }

  function open(): NativeAgent {
    if (closing !== undefined) throw new KvError("KV_AGENT_CLOSED", `the agent ${name} is closed`);
    return thread as NativeAgent;
  }

  /** A command whose ticket names what it made. */
  async function make(
    command: (agent: NativeAgent, ticket: number) => void,
  ): Promise<{ ticket: number; value: unknown }> {
    const agent = open();
    let made = 0;
    const value = await calls.call<unknown>((ticket) => {
      made = ticket;
      command(agent, ticket);
    });
    return { ticket: made, value };
  }

  /** Closing twice is one closing; after the agent's own close there is nothing left to do. */
  function closer(command: (agent: NativeAgent, ticket: number) => void): () => Promise<void> {
    let closed: Promise<void> | undefined;
    return () => {
      if (closing !== undefined) return closed ?? closing;
      closed ??= calls
        .call<void>((ticket) => command(open(), ticket))
        .catch((error: unknown) => {
          closed = undefined;
          throw error;
        });
      return closed;
    };
  }

  async function prepare(remote: string | undefined, table: DescriptorTable): Promise<PreparedList> {
    requireObject(table, "KV_LIST_INVALID", "the table of a list");
    const { memoryType, rows, takeRows: taking = false } = table;
    if (!MEMORY_TYPES.includes(memoryType)) {
      throw new KvError(
        "KV_LIST_INVALID",
        `memoryType is ${shown(memoryType)}, not one of ${MEMORY_TYPES.join(", ")}`,
      );
    }
    let read = rows;
    const { ticket, value } = await make((agent, id) => {
      if (taking) {
        read = takeRows(rows);
        rowsUnderRead.add(read);
      }
      agent.prepare(id, remote, memoryType, read, taking);
    }).finally(() => rowsUnderRead.delete(read));
    const list: PreparedList = Object.freeze({
      remote,
      count: value as number,
      memoryType,
      close: closer((agent, id) => agent.closeList(id, ticket)),
    });
    listTickets.set(list, ticket);
    return list;
  }

  return {
    name,
    backends: backends.map((spec) => spec.name),
    async register(memory): Promise<Registration> {
      const foreign = foreignOf(memory);
      if (foreign !== undefined) {
        const hold = foreign.hold();
        holds.add(hold);
        const letGo = () => {
          holds.delete(hold);
          hold();
        };
        const { memoryType, address, lengthBytes, deviceId } = memory;
        const made = make((agent, id) =>
          agent.registerForeign(id, memoryType, address, lengthBytes, deviceId, foreign.check, foreign.key),
        );
        const { ticket } = await made.catch((error: unknown) => {
          letGo();
          throw error;
        });
        const close = closer((agent, id) => agent.deregister(id, ticket));
        return Object.freeze({ memory, close: () => close().then(letGo) });
      }
      const buffer = nativeOf(memory);
      const { ticket } = await make((agent, id) => agent.register(id, buffer));
      return Object.freeze({ memory, close: closer((agent, id) => agent.deregister(id, ticket)) });
    },
    async localMetadata() {
      return (await make((agent, id) => agent.localMetadata(id))).value as Uint8Array;
    },
    async addRemote(given) {
      if (!(given instanceof Uint8Array)) {
        throw new KvError("KV_AGENT_METADATA_INVALID", `metadata is ${shown(given)}, not a Uint8Array`);
      }
      // What was checked is what is loaded, whatever becomes of the caller's buffer meanwhile.
      const metadata = options.checkMetadata === undefined ? given : new Uint8Array(given);
      await options.checkMetadata?.(metadata);
      return (await make((agent, id) => agent.addRemote(id, metadata))).value as string;
    },
    async removeRemote(remote) {
      await make((agent, id) => agent.removeRemote(id, remote));
    },
    prepareLocal: (table) => prepare(undefined, table),
    async prepareRemote(remote, table) {
      if (typeof remote !== "string") {
        throw new KvError("KV_AGENT_UNKNOWN_REMOTE", `the peer's name is ${shown(remote)}, not a string`, {
          hint: "a list of this agent's own memory is prepareLocal's",
        });
      }
      return await prepare(remote, table);
    },
    transfer(request) {
      open();
      return moves.start(request);
    },
    async notify(remote, payload) {
      await make((agent, id) => agent.notify(id, remote, payload));
    },
    notifications: () => notifications.read(),
    telemetry() {
      const { polls: _, ...counters } = thread.counters();
      const { stillborn } = moves;
      return {
        ...counters,
        transfersPosted: counters.transfersPosted + stillborn,
        transfersFailed: counters.transfersFailed + stillborn,
      };
    },
    async close(given = {}) {
      requireObject(given, "KV_AGENT_INVALID", "the options of close");
      const { timeoutMs = CLOSE_TIMEOUT_MS } = given;
      if (!(typeof timeoutMs === "number" && timeoutMs >= 0 && timeoutMs < 2 ** 31)) {
        throw new KvError(
          "KV_AGENT_INVALID",
          `timeoutMs is ${shown(timeoutMs)}, not a number from 0 to 2^31`,
        );
      }
      closing ??= calls
        .call<void>((ticket) => thread.close(ticket, timeoutMs))
        .finally(() => {
          calls.abandon(new KvError("KV_AGENT_CLOSED", `the agent ${name} is closed`));
          notifications.close();
          for (const hold of holds) hold();
          thread.detach();
          onClose();
        });
      await closing;
    },
  };
}
