import {
  type DescriptorTable,
  KvError,
  type MemoryType,
  type PreparedList,
  takeRows,
} from "@kv/interface";
import type { NativeAgent } from "../addon/native.js";
import { RefCount } from "../ref-count.js";
import { formatValue, requireObject } from "../validate.js";
import type { AgentCalls } from "./agent-calls.js";

const MEMORY_TYPES: readonly MemoryType[] = ["DRAM", "VRAM", "FILE", "OBJ"];

interface Entry {
  /** The id under which the addon knows the list. */
  readonly id: number;
  /** Prepared transfers that use it. */
  readonly users: RefCount;
}

/** The prepared lists of one agent. */
export class PreparedLists {
  readonly #native: NativeAgent;
  readonly #calls: AgentCalls;
  readonly #entries = new WeakMap<PreparedList, Entry>();
  /**
   * Tables whose buffer was taken over. The native thread reads them in place, so they must not be
   * collected.
   */
  readonly #takenRows = new Set<Float64Array>();

  /** For one agent. */
  constructor(native: NativeAgent, calls: AgentCalls) {
    this.#native = native;
    this.#calls = calls;
  }

  /**
   * Prepares a list of local memory, or of the memory of `remote`. Rejects with `KV_LIST_INVALID`
   * and the errors of the addon.
   */
  async prepare(
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
    const { id, value } = await this.#calls
      .call((callId) => {
        if (takesRows) {
          read = takeRows(rows);
          this.#takenRows.add(read);
        }
        return this.#native.prepare(callId, remote, memoryType, read, takesRows);
      })
      .finally(() => this.#takenRows.delete(read));
    const users = new RefCount();
    const closeList = this.#calls.closeOnce((callId) => this.#native.closeList(callId, id));
    const close = async () => {
      if (users.count > 0 && !this.#calls.closing) {
        throw new KvError("KV_MEMORY_IN_USE", `${users.count} prepared transfers use the list`, {
          hint: "close them before the list",
        });
      }
      await closeList();
    };
    const list: PreparedList & AsyncDisposable = Object.freeze({
      remote,
      count: value as number,
      memoryType,
      close,
      [Symbol.asyncDispose]: close,
    });
    this.#entries.set(list, { id, users });
    return list;
  }

  /**
   * The id under which the addon knows a list. Throws `KV_TRANSFER_INVALID` for a list of another
   * agent.
   */
  idOf(list: PreparedList): number {
    return this.#entryOf(list).id;
  }

  /** Adds a prepared transfer that uses the list; the returned function removes it. */
  hold(list: PreparedList): () => void {
    return this.#entryOf(list).users.hold();
  }

  #entryOf(list: PreparedList): Entry {
    const entry = this.#entries.get(list);
    if (entry !== undefined) return entry;
    throw new KvError("KV_TRANSFER_INVALID", "the list was not prepared by this agent");
  }
}
