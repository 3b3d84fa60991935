import {
  DESCRIPTOR_ROW,
  type DescriptorTable,
  KvError,
  type PreparedList,
  takeRows,
} from "@kv/interface";

/** Registered memory of this agent or of a peer. Descriptors lie inside it. */
export interface Extent {
  readonly address: number;
  readonly lengthBytes: number;
}

export interface LoopbackList extends PreparedList {
  readonly owner: string;
  readonly addresses: readonly number[];
  readonly lengths: readonly number[];
  readonly transfers: Set<Promise<void>>;
  closed: boolean;
}

export interface PrepareOptions {
  readonly owner: string;
  readonly remote: string | undefined;
  readonly table: DescriptorTable;
  readonly extents: readonly Extent[];
  readonly onClosed: (list: LoopbackList) => void;
}

export function prepare({ owner, remote, table, extents, onClosed }: PrepareOptions): LoopbackList {
  const { memoryType } = table;
  const rows = table.takeRows ? takeRows(table.rows) : table.rows;
  if (memoryType !== "DRAM" || rows.length === 0 || rows.length % DESCRIPTOR_ROW !== 0) {
    throw new KvError(
      "KV_LIST_INVALID",
      `${rows.length} numbers of ${memoryType} are not a table of DRAM rows`,
    );
  }
  const addresses: number[] = [];
  const lengths: number[] = [];
  for (let at = 0; at < rows.length; at += DESCRIPTOR_ROW) {
    const row = [...rows.subarray(at, at + DESCRIPTOR_ROW)];
    const [address = 0, length = 0, device = 0, stride = 0, count = 0] = row;
    if (
      !row.every((value) => Number.isSafeInteger(value) && value >= 0) ||
      length < 1 ||
      count < 1 ||
      device !== 0
    ) {
      throw new KvError("KV_LIST_INVALID", `row ${at / DESCRIPTOR_ROW} is [${row.join(", ")}]`);
    }
    const end = address + (count - 1) * stride + length;
    if (
      !extents.some(
        (extent) => address >= extent.address && end <= extent.address + extent.lengthBytes,
      )
    ) {
      throw new KvError(
        "KV_MEMORY_NOT_REGISTERED",
        `row ${at / DESCRIPTOR_ROW}: ${address} to ${end} is not registered`,
      );
    }
    for (let index = 0; index < count; index++) {
      addresses.push(address + index * stride);
      lengths.push(length);
    }
  }
  const list: LoopbackList = {
    owner,
    remote,
    memoryType,
    count: addresses.length,
    addresses,
    lengths,
    transfers: new Set(),
    closed: false,
    async close() {
      list.closed = true;
      await Promise.all(list.transfers);
      onClosed(list);
    },
  };
  return list;
}
