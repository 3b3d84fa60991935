import {
  type Agent,
  type DescriptorPairs,
  KvError,
  type KvErrorCode,
  type Memory,
  type PreparedList,
  type TransferOrder,
  type Transport,
} from "@kv/interface";
import { leavesNothing } from "@kv/testing/nothing-left";
import {
  type MemoryLatency,
  type MemoryNetworkOptions,
  memoryNetwork,
  memoryTransport,
  seededRandom,
  virtualClock,
} from "@kv/transport-memory";
import { expect } from "vitest";

export const BLOCK_BYTES = 256;
export const NUM_BLOCKS = 16;
export const TOTAL = BLOCK_BYTES * NUM_BLOCKS;

export interface End {
  readonly transport: Transport;
  readonly agent: Agent;
  readonly memory: Memory;
}

export type Pair = Awaited<ReturnType<typeof pair>>;

export const SLOW: MemoryLatency = {
  latencyMs: 10,
  minPieces: 4,
  bytesPerMs: BLOCK_BYTES,
  lingerMs: 5,
};

/** A reader on host "d" with a list of all memory of an owner on host "p", in virtual time. */
export async function pair(options: MemoryNetworkOptions & { seed?: number } = {}) {
  const clock = virtualClock();
  const network = memoryNetwork({ clock, random: seededRandom(options.seed ?? 1), ...options });
  const ends: End[] = [];
  const begin = async (host: string, fill: number): Promise<End> => {
    const transport = memoryTransport({ network, host });
    const agent = await transport.createAgent({ name: `agent of ${host}` });
    const memory = transport.allocate(TOTAL);
    ends.push({ transport, agent, memory });
    memory.bytes.fill(fill);
    await agent.register(memory);
    return { transport, agent, memory };
  };
  leavesNothing(
    () => ({ ...network.outstanding(), timers: clock.pendingTimers }),
    async () => {
      for (const { transport, memory } of ends) {
        await clock.settle(transport.close());
        memory.close();
      }
      await clock.runUntilIdle();
    },
  );
  const reader = await begin("d", 1);
  const owner = await begin("p", 2);
  /** Tells the owner something. */
  const notify = (word: string) => reader.agent.notify(owner.agent.name, bytes(word));
  return { clock, network, begin, reader, owner, notify, ...(await lists(reader, owner)) };
}

export async function lists(
  reader: End,
  owner: End,
): Promise<{ local: PreparedList; remote: PreparedList }> {
  const table = (memory: Memory) =>
    ({
      memoryType: "DRAM",
      rows: Float64Array.of(memory.address, BLOCK_BYTES, 0, BLOCK_BYTES, NUM_BLOCKS),
    }) as const;
  await reader.agent.addRemote(await owner.agent.localMetadata());
  return {
    local: await reader.agent.prepareLocal(table(reader.memory)),
    remote: await reader.agent.prepareRemote(owner.agent.name, table(owner.memory)),
  };
}

/** A READ of all blocks. */
export const readAll = (
  { local, remote }: Pick<Pair, "local" | "remote">,
  more: Partial<TransferOrder & DescriptorPairs> = {},
) => ({ operation: "READ", local, localIds: ALL, remote, remoteIds: ALL, ...more }) as const;

export const ALL = Int32Array.from({ length: NUM_BLOCKS }, (_, index) => index);
export const bytes = (text: string): Uint8Array => new TextEncoder().encode(text);
export const text = (payload: Uint8Array): string => new TextDecoder().decode(payload);
/** Counts the bytes of the memory with the value. */
export const count = (memory: Memory, value: number): number =>
  memory.bytes.filter((byte) => byte === value).length;

/** Collects the notifications that arrive from now on, as text. */
export function collect(agent: Agent): string[] {
  const received: string[] = [];
  void (async () => {
    for await (const { payload } of agent.notifications()) received.push(text(payload));
  })();
  return received;
}

/** The code of the error that it ends with, or KV_OK. */
export const codeOf = (work: Promise<unknown>): Promise<string> =>
  work.then(
    () => "KV_OK",
    (error: unknown) => (KvError.is(error) ? error.code : String(error)),
  );

export const expectFailure = (work: Promise<unknown>, code: KvErrorCode) =>
  expect(work).rejects.toSatisfy((error) => KvError.is(error, code));
