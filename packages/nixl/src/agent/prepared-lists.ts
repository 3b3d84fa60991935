import {
  type DescriptorTable,
  KvError,
  type MemoryType,
  type PreparedList,
  takeRows,
} from "@kv/interface";
import type { NativeAgent } from "../addon/native.js";
import { RefCount } from "../ref-count.js";
import { formatValue, requireOptions } from "../validate.js";
import type { AgentCalls } from "./agent-calls.js";

const MEMORY_TYPES: readonly MemoryType[] = ["DRAM", "VRAM", "FILE", "OBJ"];

interface Entry {
  readonly id: number;
  /** Prepared transfers that use it. */
  readonly users: RefCount;
}

export class PreparedLists {
  readonly #native: NativeAgent;
  readonly #calls: AgentCalls;
  readonly #entries = new WeakMap<PreparedList, Entry>();
  /** Tables that the native thread reads in place, so they must not be collected. */
  readonly #takenRows = new Set<Float64Array>();

  constructor(native: NativeAgent, calls: AgentCalls) {
    this.#native = native;
    this.#calls = calls;
  }

  /**
   * Without `remote` the list is of local memory. Rejects with `KV_LIST_INVALID` and the errors of
   * the addon.
   */
  async prepare(
    remote: string | undefined,
    table: DescriptorTable,
  ): Promise<PreparedList & AsyncDisposable> {
    requireOptions(table, "KV_LIST_INVALID", "the table of a list", [
      "memoryType",
      "rows",
      "takeRows",
    ]);
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

  /** Throws `KV_TRANSFER_INVALID` for a list of another agent. */
  idOf(list: PreparedList): number {
    return this.#entryOf(list).id;
  }

  /** The returned function removes the user. */
  hold(list: PreparedList): () => void {
    return this.#entryOf(list).users.hold();
  }

  #entryOf(list: PreparedList): Entry {
    const entry = this.#entries.get(list);
    if (entry !== undefined) return entry;
    throw new KvError("KV_TRANSFER_INVALID", "the list was not prepared by this agent");
  }
}
