import { type Agent, KvError, type Memory } from "@kv/interface";
import { createInbox, type Inbox } from "./inbox.js";
import { type Extent, type LoopbackList, prepare } from "./lists.js";
import { pin } from "./memory.js";
import { checkTransfer, startTransfer } from "./transfer.js";

/** The agents of one process. A real transport has a network here. */
export type Fabric = Map<string, { readonly registered: Set<Memory>; readonly inbox: Inbox }>;

export function createLoopbackAgent(name: string, fabric: Fabric): Agent {
  const inbox = createInbox();
  const registered = new Set<Memory>();
  const unpin = new Map<Memory, () => void>();
  const lists = new Set<LoopbackList>();
  const remotes = new Map<string, readonly Extent[]>();
  const count = { posted: 0, done: 0, failed: 0, inFlight: 0, bytes: 0, sent: 0 };
  let closed = false;
  fabric.set(name, { registered, inbox });

  function open(): void {
    if (closed) throw new KvError("KV_AGENT_CLOSED", `agent ${name} is closed`);
  }
  function extentsOf(remote: string): readonly Extent[] {
    const extents = remotes.get(remote);
    if (extents === undefined)
      throw new KvError("KV_AGENT_UNKNOWN_REMOTE", `agent ${name} does not know ${remote}`);
    return extents;
  }
  function deliver(remote: string, payload: Uint8Array): void {
    const peer = fabric.get(remote);
    if (peer === undefined) throw new KvError("KV_NOTIFICATION_FAILED", `${remote} is gone`);
    peer.inbox.deliver({ from: name, payload });
    count.sent++;
  }
  function at(agent: string, address: number, lengthBytes: number): Uint8Array {
    for (const memory of fabric.get(agent)?.registered ?? []) {
      const offset = address - memory.address;
      if (offset >= 0 && offset + lengthBytes <= memory.lengthBytes)
        return memory.bytes.subarray(offset, offset + lengthBytes);
    }
    throw new KvError("KV_TRANSFER_FAILED", `agent ${agent} has no memory at ${address}`);
  }
  function keep(list: LoopbackList): LoopbackList {
    lists.add(list);
    return list;
  }
  const onClosed = (list: LoopbackList) => void lists.delete(list);

  return {
    name,
    backends: ["LOOPBACK"],
    async register(memory) {
      open();
      if (registered.has(memory))
        throw new KvError("KV_MEMORY_INVALID", "the memory is already registered");
      unpin.set(memory, pin(memory));
      registered.add(memory);
      const inUse = () =>
        [...lists].some(
          (list) =>
            list.remote === undefined &&
            list.addresses.some(
              (address) =>
                address >= memory.address && address < memory.address + memory.lengthBytes,
            ),
        );
      return {
        memory,
        async close() {
          if (inUse())
            throw new KvError("KV_MEMORY_IN_USE", "a prepared list refers to the memory");
          registered.delete(memory);
          unpin.get(memory)?.();
        },
      };
    },
    async localMetadata() {
      open();
      const extents = [...registered].map(({ address, lengthBytes }) => ({ address, lengthBytes }));
      return new TextEncoder().encode(JSON.stringify({ loopback: 1, name, extents }));
    },
    async addRemote(metadata) {
      open();
      const peer = readMetadata(metadata);
      remotes.set(peer.name, peer.extents);
      return peer.name;
    },
    async removeRemote(remote) {
      open();
      extentsOf(remote);
      if ([...lists].some((list) => list.remote === remote)) {
        throw new KvError("KV_MEMORY_IN_USE", `a prepared list refers to ${remote}`);
      }
      remotes.delete(remote);
    },
    async prepareLocal(table) {
      open();
      return keep(
        prepare({ owner: name, remote: undefined, table, extents: [...registered], onClosed }),
      );
    },
    async prepareRemote(remote, table) {
      open();
      return keep(prepare({ owner: name, remote, table, extents: extentsOf(remote), onClosed }));
    },
    transfer(request) {
      open();
      const checked = checkTransfer(request, name);
      count.posted++;
      count.inFlight++;
      const transfer = startTransfer({ request, agent: name, copier: { at }, deliver }, checked);
      void transfer.released.then(() => count.inFlight--);
      transfer.done.then(
        ({ lengthBytes }) => {
          count.done++;
          count.bytes += lengthBytes;
        },
        () => count.failed++,
      );
      return transfer;
    },
    async notify(remote, payload) {
      open();
      extentsOf(remote);
      deliver(remote, payload.slice());
    },
    notifications: () => inbox.notifications(),
    telemetry: () => ({
      transfersPosted: count.posted,
      transfersDone: count.done,
      transfersFailed: count.failed,
      transfersInFlight: count.inFlight,
      bytesTransferred: count.bytes,
      notificationsSent: count.sent,
      notificationsReceived: inbox.received,
      registrations: registered.size,
      preparedLists: lists.size,
      remotes: remotes.size,
    }),
    async close() {
      closed = true;
      await Promise.all([...lists].map((list) => list.close()));
      remotes.clear();
      for (const memory of registered) unpin.get(memory)?.();
      registered.clear();
      inbox.close();
      if (fabric.get(name)?.inbox === inbox) fabric.delete(name);
    },
  };
}

function readMetadata(metadata: Uint8Array): { name: string; extents: readonly Extent[] } {
  try {
    const peer = JSON.parse(new TextDecoder().decode(metadata)) as {
      loopback: unknown;
      name: unknown;
      extents: unknown;
    };
    const isExtent = (extent: Partial<Extent>) =>
      Number.isSafeInteger(extent.address) && Number.isSafeInteger(extent.lengthBytes);
    const { name, extents } = peer;
    if (
      peer.loopback === 1 &&
      typeof name === "string" &&
      Array.isArray(extents) &&
      extents.every(isExtent)
    ) {
      return { name, extents };
    }
  } catch {
    // Not JSON: rejected below.
  }
  throw new KvError(
    "KV_AGENT_METADATA_INVALID",
    `these ${metadata.length} bytes are not loopback metadata`,
  );
}
