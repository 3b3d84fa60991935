import { DESCRIPTOR_ROW, type DescriptorTable } from "@kv/interface";

/** A row of a descriptor table, with the id of its first descriptor. */
export interface DescriptorRow {
  readonly firstId: number;
  readonly count: number;
  readonly address: number;
  readonly lengthBytes: number;
  /** Bytes from one descriptor of the row to the next. */
  readonly stride: number;
}

export function descriptorRows({ rows }: DescriptorTable): readonly DescriptorRow[] {
  const found: DescriptorRow[] = [];
  let firstId = 0;
  for (let at = 0; at < rows.length; at += DESCRIPTOR_ROW) {
    const [address = 0, lengthBytes = 0, , stride = 0, count = 0] = rows.subarray(at, at + DESCRIPTOR_ROW);
    found.push({ firstId, count, address, lengthBytes, stride });
    firstId += count;
  }
  return found;
}

/** Number of the row that holds `id`; of one outside of the table, the nearest. */
export function rowIndexOf(rows: readonly DescriptorRow[], id: number): number {
  let [low, high] = [0, rows.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((rows[middle] as DescriptorRow).firstId <= id) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Address of the descriptor `id` of its row. */
export function addressOf(row: DescriptorRow, id: number): number {
  return row.address + (id - row.firstId) * row.stride;
}
