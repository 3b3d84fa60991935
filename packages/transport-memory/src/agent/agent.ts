import { type Agent, KvError, type Log, type Notification, type Registration } from "@kv/interface";
import { MemoryMap, type MemoryRecord } from "../memory/memory.js";
import type { MemoryHost } from "../network/host.js";
import type { AgentEndpoint, Fabric, PeerAddress } from "../network/network.js";
import { AgentTransfers } from "../transfer/transfers.js";
import { type DescribedMemory, decodeMetadata, encodeMetadata } from "./metadata.js";
import { PreparedLists } from "./prepared-lists.js";

export interface MemoryAgentOptions {
  readonly fabric: Fabric;
  readonly host: MemoryHost;
  readonly log: Log;
  readonly name: string;
  readonly incarnation: string;
  readonly backends: readonly string[];
  readonly recordOf: (memory: unknown) => MemoryRecord | undefined;
  readonly closed: (agent: MemoryAgent) => void;
}

export interface MemoryAgent extends Agent, AsyncDisposable {
  /** As if the process died: no promise settles and no byte moves. */
  die(): void;
}

interface Peer {
  readonly address: PeerAddress;
  readonly memories: MemoryMap<DescribedMemory>;
}

const CLOSE_TIMEOUT_MS = 10_000;

export function memoryAgent(options: MemoryAgentOptions): MemoryAgent {
  const { fabric, host, log, name } = options;
  let state: "open" | "closing" | "closed" = "open";
  let closing: Promise<void> | undefined;
  const registrations = new Map<MemoryRecord, number>();
  const peers = new Map<string, Peer>();
  const inbox = new NotificationInbox(name);
  const lists = new PreparedLists(name);
  const counters = {
    transfersPosted: 0,
    transfersDone: 0,
    transfersFailed: 0,
    bytesTransferred: 0,
    notificationsSent: 0,
    notificationsReceived: 0,
  };
  const endpoint: AgentEndpoint = {
    name,
    incarnation: options.incarnation,
    host,
    memories: new MemoryMap<MemoryRecord>(),
    deliver(notification) {
      counters.notificationsReceived += 1;
      inbox.push(notification);
    },
  };
  const transfers = new AgentTransfers(fabric, endpoint, counters);
  fabric.agents.set(endpoint.incarnation, endpoint);

  function assertOpen(): void {
    if (state !== "open") throw new KvError("KV_AGENT_CLOSED", `agent ${name} is closed`);
  }

  function peerNamed(remote: string): Peer {
    const peer = peers.get(remote);
    if (peer !== undefined) return peer;
    throw new KvError(
      "KV_AGENT_UNKNOWN_REMOTE",
      `agent ${name} does not know agent ${JSON.stringify(remote)}`,
      { hint: "pass its metadata to addRemote first" },
    );
  }

  function release(memory: MemoryRecord): void {
    const left = (registrations.get(memory) ?? 1) - 1;
    memory.registrations -= 1;
    if (left > 0) {
      registrations.set(memory, left);
      return;
    }
    registrations.delete(memory);
    endpoint.memories.delete(memory);
  }

  function registration(memory: MemoryRecord): Registration & AsyncDisposable {
    let open = true;
    const opened = {
      memory,
      async close() {
        // The agent's own `close` has released the memory.
        if (!open || state === "closed") return;
        if (registrations.get(memory) === 1 && lists.refersTo(memory)) {
          throw new KvError(
            "KV_MEMORY_IN_USE",
            `agent ${name}: memory at 0x${memory.address.toString(16)} is in use by a prepared list`,
            { hint: "close the list first; it waits for its transfers" },
          );
        }
        open = false;
        release(memory);
      },
      [Symbol.asyncDispose]: () => opened.close(),
    };
    return opened;
  }

  function vanish(reason: string): void {
    state = "closed";
    fabric.removeAgent(endpoint, reason);
    options.closed(agent);
  }

  async function close(timeoutMs: number): Promise<void> {
    state = "closing";
    const timer = host.clock.setTimer(
      () => transfers.abortAll(`agent ${name} closes and waited ${timeoutMs} ms`),
      timeoutMs,
      { ref: true },
    );
    await transfers.allReleased();
    timer.cancel();
    lists.clear();
    peers.clear();
    for (const [memory, count] of [...registrations])
      for (let i = 0; i < count; i++) release(memory);
    inbox.close();
    vanish("its agent was closed");
  }

  const agent: MemoryAgent = {
    name,
    backends: options.backends,
    async register(memory) {
      assertOpen();
      const record = options.recordOf(memory);
      if (record === undefined) {
        throw new KvError(
          "KV_MEMORY_INVALID",
          `agent ${name}: that memory was not allocated by this transport`,
        );
      }
      if (record.closed)
        throw new KvError("KV_MEMORY_INVALID", `agent ${name}: that memory is closed`);
      const before = registrations.get(record) ?? 0;
      registrations.set(record, before + 1);
      record.registrations += 1;
      if (before === 0) endpoint.memories.add(record);
      return registration(record);
    },
    async localMetadata() {
      assertOpen();
      const memories = endpoint.memories.values();
      return encodeMetadata({ name, host: host.name, incarnation: endpoint.incarnation, memories });
    },
    async addRemote(metadata) {
      assertOpen();
      const { name: remote, host: remoteHost, incarnation, memories } = decodeMetadata(metadata);
      if (remote === name) {
        throw new KvError("KV_AGENT_METADATA_INVALID", `agent ${name} received its own metadata`);
      }
      peers.set(remote, {
        address: { name: remote, host: remoteHost, incarnation },
        memories: new MemoryMap(memories),
      });
      return remote;
    },
    async removeRemote(remote) {
      assertOpen();
      peerNamed(remote);
      const inUse = lists.countOf(remote);
      if (inUse > 0) {
        throw new KvError(
          "KV_MEMORY_IN_USE",
          `agent ${name}: ${inUse} prepared lists refer to agent ${remote}`,
          { hint: "close the lists first" },
        );
      }
      peers.delete(remote);
    },
    async prepareLocal(table) {
      assertOpen();
      return lists.add(table, endpoint.memories);
    },
    async prepareRemote(remote, table) {
      assertOpen();
      const peer = peerNamed(remote);
      return lists.add(table, peer.memories, peer.address);
    },
    transfer(request) {
      assertOpen();
      const local = lists.requireOpen(request.local, "local");
      const remote = lists.requireOpen(request.remote, "remote");
      return transfers.start(request, local, remote, remote.peer as PeerAddress);
    },
    async notify(remote, payload) {
      assertOpen();
      const peer = peerNamed(remote);
      if (!(payload instanceof Uint8Array)) {
        throw new KvError(
          "KV_NOTIFICATION_INVALID",
          `agent ${name}: a notification must be a Uint8Array`,
        );
      }
      fabric.post({ from: endpoint, to: peer.address, payload: payload.slice() });
      counters.notificationsSent += 1;
    },
    notifications() {
      if (state === "closed") throw new KvError("KV_AGENT_CLOSED", `agent ${name} is closed`);
      return inbox.iterate();
    },
    telemetry: () => ({
      ...counters,
      transfersInFlight: transfers.inFlight,
      registrations: [...registrations.values()].reduce((sum, count) => sum + count, 0),
      preparedLists: lists.size,
      remotes: peers.size,
    }),
    close({ timeoutMs = CLOSE_TIMEOUT_MS } = {}) {
      if (state === "open") closing = close(timeoutMs);
      return closing ?? Promise.resolve();
    },
    [Symbol.asyncDispose]: () => agent.close(),
    die() {
      if (state === "closed") return;
      closing = Promise.resolve();
      transfers.halt();
      // A test may close a dead process's memory; nothing else can reach it.
      for (const [memory, count] of registrations) memory.registrations -= count;
      vanish("its host was killed");
      log.debug("memory-agent-died", { agent: name, host: host.name });
    },
  };
  return agent;
}

type Waiting = ((result: IteratorResult<Notification>) => void)[];

class NotificationInbox {
  readonly #owner: string;
  readonly #unread: Notification[] = [];
  #waiting: Waiting | undefined;
  #closed = false;

  constructor(owner: string) {
    this.#owner = owner;
  }

  push(notification: Notification): void {
    if (this.#closed) return;
    const resolve = this.#waiting?.shift();
    if (resolve === undefined) this.#unread.push(notification);
    else resolve({ done: false, value: notification });
  }

  /** @throws `KV_NOTIFICATION_INVALID` while another iterator is open. */
  iterate(): AsyncIterableIterator<Notification> {
    if (this.#waiting !== undefined) {
      throw new KvError(
        "KV_NOTIFICATION_INVALID",
        `another iterator reads the notifications of agent ${this.#owner}`,
        { hint: "end the other iterator first: break out of its loop, or call its return()" },
      );
    }
    const own: Waiting = [];
    this.#waiting = own;
    const next = (): Promise<IteratorResult<Notification>> => {
      if (this.#closed || this.#waiting !== own)
        return Promise.resolve({ done: true, value: undefined });
      const value = this.#unread.shift();
      if (value !== undefined) return Promise.resolve({ done: false, value });
      return new Promise((resolve) => void own.push(resolve));
    };
    return {
      next,
      return: () => {
        if (this.#waiting === own) this.#endIterator();
        return Promise.resolve({ done: true, value: undefined });
      },
      [Symbol.asyncIterator]() {
        return this;
      },
    };
  }

  close(): void {
    this.#closed = true;
    this.#unread.length = 0;
    this.#endIterator();
  }

  #endIterator(): void {
    const waiting = this.#waiting ?? [];
    this.#waiting = undefined;
    for (const resolve of waiting) resolve({ done: true, value: undefined });
  }
}
