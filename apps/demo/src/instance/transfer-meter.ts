import { delegateTo } from "@kv/connector/building-blocks";
import {
  type Agent,
  type Clock,
  DESCRIPTOR_ROW,
  type DescriptorTable,
  type PreparedList,
  type Transport,
} from "@kv/interface";

export interface Measured {
  readonly lengthBytes: number;
  readonly transfers: number;
  readonly descriptors: number;
  readonly transferMs: number;
}

export type TransferMeter = ReturnType<typeof meterTransfers>;

export interface TransferMeterOptions {
  readonly clock: Clock;
  /** The block at a local address; undefined outside of the pool. */
  readonly blockAt: (address: number) => number | undefined;
}

interface Entry {
  readonly block: number;
  readonly startMs: number;
  readonly endMs: number;
  readonly lengthBytes: number;
  readonly descriptors: number;
}

/** Limit of remembered transfers; those of failed requests are never taken. */
const MAX_ENTRIES = 4096;

/**
 * Measures transfers at the transport, by the local blocks that they use. Every connector is
 * measured in the same way.
 */
export function meterTransfers(transport: Transport, { clock, blockAt }: TransferMeterOptions) {
  let entries: Entry[] = [];
  let first: Agent | undefined;
  const tables = new WeakMap<PreparedList, DescriptorTable>();

  function metered(agent: Agent): Agent {
    return delegateTo(agent, {
      async prepareLocal(table) {
        // Copied before the call, because the call may take the rows over.
        const copy = { memoryType: table.memoryType, rows: table.rows.slice() };
        const list = await agent.prepareLocal(table);
        tables.set(list, copy);
        return list;
      },
      transfer(request) {
        const startMs = clock.now();
        const table = tables.get(request.local);
        const address =
          table === undefined
            ? undefined
            : addressOf(
                table,
                ((request.runs ?? request.localIds)[0] ?? 0) + (request.offsets?.[0] ?? 0),
              );
        const block = address === undefined ? undefined : blockAt(address);
        const transfer = agent.transfer(request);
        if (block === undefined) return transfer;
        // A failed transfer is not measured; the connector handles its error.
        transfer.done.then(
          ({ lengthBytes, descriptorCount, transferMs }) => {
            // The transport's own measurement: this thread may have been busy when the transfer
            // ended.
            const endMs = startMs + transferMs;
            entries.push({ block, startMs, endMs, lengthBytes, descriptors: descriptorCount });
            if (entries.length > MAX_ENTRIES) entries = entries.slice(MAX_ENTRIES / 2);
          },
          () => {},
        );
        return transfer;
      },
    });
  }

  return {
    transport: delegateTo(transport, {
      async createAgent(options) {
        const agent = await transport.createAgent(options);
        first ??= agent;
        return metered(agent);
      },
    }),
    backends: () => first?.backends ?? [],
    /**
     * Returns the sum of the transfers since `sinceMs` that used these blocks, and forgets them.
     */
    take(blockIds: readonly number[], sinceMs: number): Measured {
      const wanted = new Set(blockIds);
      const mine = entries.filter(({ block, startMs }) => wanted.has(block) && startMs >= sinceMs);
      entries = entries.filter(({ block }) => !wanted.has(block));
      const start = mine.reduce(
        (least, { startMs }) => Math.min(least, startMs),
        Number.POSITIVE_INFINITY,
      );
      const end = mine.reduce((most, { endMs }) => Math.max(most, endMs), Number.NEGATIVE_INFINITY);
      return {
        lengthBytes: mine.reduce((sum, entry) => sum + entry.lengthBytes, 0),
        transfers: mine.length,
        descriptors: mine.reduce((sum, entry) => sum + entry.descriptors, 0),
        transferMs: mine.length === 0 ? 0 : end - start,
      };
    },
  };
}

/** The address of a descriptor, by its index in the expanded order of the table's rows. */
function addressOf({ rows }: DescriptorTable, index: number): number | undefined {
  let first = 0;
  for (let at = 0; at < rows.length; at += DESCRIPTOR_ROW) {
    const count = rows[at + 4] ?? 0;
    if (index < first + count) return (rows[at] ?? 0) + (index - first) * (rows[at + 3] ?? 0);
    first += count;
  }
  return undefined;
}
