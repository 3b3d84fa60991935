import { type DescriptorTable, KvError, type PreparedList } from "@kv/interface";
import type { MemoryRecord } from "../memory/memory.js";
import type { MemoryMap } from "../memory/memory-map.js";
import type { PeerAddress } from "../network/fabric.js";
import { checkRows, type DescriptorRows } from "./descriptor-rows.js";
import type { DescribedMemory } from "./metadata.js";

/** A prepared list, as its agent holds it. */
export interface ListRecord extends PreparedList {
  readonly rows: DescriptorRows<DescribedMemory>;
  /** Of a list of a peer's memory: the life of the peer that was known when it was made. */
  readonly peer: PeerAddress | undefined;
  /** One promise per transfer that has not been released. */
  readonly users: Set<Promise<void>>;
  /** From the first call of `close` on. */
  closing: boolean;
}

/** The prepared lists of one agent. */
export interface Lists {
  readonly size: number;
  addLocal(table: DescriptorTable, memories: MemoryMap<MemoryRecord>): PreparedList;
  addRemote(table: DescriptorTable, peer: PeerAddress, memories: MemoryMap<DescribedMemory>): PreparedList;
  /** The record of a list of this agent that can be used. Errors: `KV_TRANSFER_INVALID`, `KV_LIST_CLOSED`. */
  usable(list: PreparedList, side: "local" | "remote"): ListRecord;
  /** Whether a list names the memory. */
  name(memory: MemoryRecord): boolean;
  /** Lists of a peer's memory, by the peer's name. */
  countOf(remote: string): number;
  clear(): void;
}

export function lists(agentName: string): Lists {
  const open = new Map<PreparedList, ListRecord>();
  const known = new WeakSet<PreparedList>();

  function add(
    table: DescriptorTable,
    rows: DescriptorRows<DescribedMemory>,
    peer?: PeerAddress,
  ): PreparedList {
    let closed: Promise<void> | undefined;
    const record: ListRecord = {
      remote: peer?.name,
      count: rows.count,
      memoryType: table.memoryType,
      rows,
      peer,
      users: new Set(),
      closing: false,
      close() {
        record.closing = true;
        closed ??= Promise.all([...record.users]).then(() => void open.delete(record));
        return closed;
      },
    };
    open.set(record, record);
    known.add(record);
    return record;
  }

  return {
    get size() {
      return open.size;
    },
    addLocal: (table, memories) =>
      add(
        table,
        checkRows({
          table,
          owner: `agent ${agentName}`,
          unknownCode: "KV_MEMORY_NOT_REGISTERED",
          find: memories.find,
        }),
      ),
    addRemote: (table, peer, memories) =>
      add(
        table,
        checkRows({
          table,
          owner: `agent ${peer.name}`,
          unknownCode: "KV_LIST_INVALID",
          find: memories.find,
        }),
        peer,
      ),
    usable(list, side) {
      const text = `the ${side} list`;
      if (typeof list !== "object" || list === null || !known.has(list)) {
        throw new KvError("KV_TRANSFER_INVALID", `${text} was not prepared by agent ${agentName}`);
      }
      const record = open.get(list);
      if (record === undefined || record.closing) {
        throw new KvError("KV_LIST_CLOSED", `${text} of agent ${agentName} is closed`);
      }
      if ((record.peer === undefined) !== (side === "local")) {
        throw new KvError(
          "KV_TRANSFER_INVALID",
          `${text} describes ${record.peer === undefined ? "local memory" : `memory of ${record.peer.name}`}`,
        );
      }
      return record;
    },
    name: (memory) => [...open.values()].some((list) => list.rows.memories.has(memory)),
    countOf: (remote) => [...open.values()].filter((list) => list.remote === remote).length,
    clear: () => open.clear(),
  };
}
