import type {
  Agent,
  AgentOptions,
  Memory,
  Notification,
  PreparedList,
  Registration,
  TransferRequest,
  Transport,
} from "@kv/interface";
import { afterAll, afterEach, beforeAll } from "vitest";

export interface TransportSuiteOptions {
  /** Heads the suite's tests. */
  readonly name: string;
  /** A transport of its own for each call; the suite closes it. */
  readonly create: () => Promise<Transport>;
  /** Lets a little time pass, where the transport lives in virtual time. */
  readonly progress?: () => Promise<void>;
  /** No transfer ends within 0.001 ms, as virtual time can promise: deadlines are then known to be kept, not only tolerated. */
  readonly transfersTakeTime?: boolean;
  /** Handed to every agent that names no backends itself. */
  readonly agentOptions?: Omit<AgentOptions, "name">;
  /** Of the big transfers; 32 MiB by default. */
  readonly bigLengthBytes?: number;
  /**
   * Metadata with any one byte changed, or cut short anywhere, is refused. Without it only bytes that are no metadata at
   * all are tried: NIXL's own loader can take the process down with it.
   */
  readonly detectsDamagedMetadata?: boolean;
  /**
   * Another transport, whose agents meet those of the first and die by `kill`. Without it the death of a peer is not
   * tried, nor where the transport does not report it.
   */
  readonly createMortal?: () => Promise<{ transport: Transport; kill(): Promise<void> }>;
}

/** Agent, memory, registration: what most tests begin with. */
export interface Side {
  readonly agent: Agent;
  readonly memory: Memory;
  readonly registration: Registration;
}

/** What the parts of the suite fixture on. */
export interface Fixture {
  readonly options: TransportSuiteOptions;
  transport(): Transport;
  /** Awaits, letting virtual time pass. */
  waitFor<T>(promise: PromiseLike<T>): Promise<T>;
  /** A turn of the event loop, or a little virtual time. */
  turn(): Promise<void>;
  /** An agent that is closed after the test. */
  agent(name?: string): Promise<Agent>;
  /** Memory that is closed after the test, after all agents. */
  memory(lengthBytes: number): Memory;
  /** An agent of this test with registered memory, filled by `pattern`. */
  side(lengthBytes: number, seed: number): Promise<Side>;
  /** `reader` learns to know `owner`. */
  introduce(reader: Agent, owner: Agent): Promise<void>;
}

/** One transport for all tests of a part, agents and memory anew for each. */
export function createFixture(options: TransportSuiteOptions): Fixture {
  let shared: Transport | undefined;
  let progressing: Promise<void> | undefined;
  const agents: Agent[] = [];
  const memories: Memory[] = [];

  const waitFor: Fixture["waitFor"] = async (promise) => {
    if (options.progress === undefined) return await promise;
    let settled = false;
    const outcome = Promise.resolve(promise).finally(() => {
      settled = true;
    });
    outcome.catch(() => {});
    // What needs no time takes none: a memory that is released is looked at in that moment, not a little later.
    for (let turn = 0; turn < 20 && !settled; turn++) await Promise.resolve();
    while (!settled) {
      // One at a time, also when two promises are settled at once: virtual time has one hand that moves it.
      progressing ??= options.progress().finally(() => {
        progressing = undefined;
      });
      await progressing;
    }
    return await outcome;
  };

  beforeAll(async () => {
    shared = await options.create();
  });
  afterEach(async () => {
    for (const agent of agents.splice(0)) await waitFor(agent.close());
    for (const memory of memories.splice(0)) memory.close();
  });
  afterAll(async () => {
    if (shared !== undefined) await waitFor(shared.close());
  });

  const self: Fixture = {
    options,
    transport() {
      if (shared === undefined) throw new Error("the transport of the suite was not created");
      return shared;
    },
    waitFor,
    turn: () => options.progress?.() ?? new Promise((resolve) => void setTimeout(resolve, 0)),
    async agent(name) {
      const agent = await waitFor(
        self.transport().createAgent({ ...options.agentOptions, ...(name === undefined ? {} : { name }) }),
      );
      agents.push(agent);
      return agent;
    },
    memory(lengthBytes) {
      const memory = self.transport().allocate(lengthBytes);
      memories.push(memory);
      return memory;
    },
    async side(lengthBytes, seed) {
      const memory = self.memory(lengthBytes);
      memory.bytes.set(pattern(lengthBytes, seed));
      const agent = await self.agent();
      return { agent, memory, registration: await waitFor(agent.register(memory)) };
    },
    async introduce(reader, owner) {
      await waitFor(reader.addRemote(await waitFor(owner.localMetadata())));
    },
  };
  return self;
}

const TILE_BYTES = 65_536;
const PAGE_BYTES = 4096;

/** Bytes that differ by seed and by place; each page bears its number, so that no two are alike. */
export function pattern(lengthBytes: number, seed: number): Uint8Array {
  const tile = new Uint8Array(Math.min(TILE_BYTES, lengthBytes));
  for (let at = 0; at < tile.length; at++) tile[at] = (at * 31 + (at >>> 8) * 17 + seed * 101) & 0xff;
  const all = new Uint8Array(lengthBytes);
  for (let at = 0; at < lengthBytes; at += TILE_BYTES) {
    all.set(lengthBytes - at < TILE_BYTES ? tile.subarray(0, lengthBytes - at) : tile, at);
  }
  const view = new DataView(all.buffer);
  for (let at = PAGE_BYTES; at + 4 <= lengthBytes; at += PAGE_BYTES) view.setUint32(at, at + seed);
  return all;
}

/** Rows of a table: `[offsetBytes, lengthBytes, strideBytes, count]` within one memory. */
export function rowsIn(memory: Memory, ...rows: (readonly [number, number, number, number])[]): Float64Array {
  return Float64Array.from(
    rows.flatMap(([offset, length, stride, count]) => [
      memory.address + offset,
      length,
      memory.deviceId,
      stride,
      count,
    ]),
  );
}

/** Blocks of equal length, one after another, over the whole memory. */
export function blocksOf(memory: Memory, blockLengthBytes: number): Float64Array {
  return rowsIn(memory, [0, blockLengthBytes, blockLengthBytes, memory.lengthBytes / blockLengthBytes]);
}

/** Lists over all of both memories, in blocks, as seen from `reader`. */
export async function blockLists(
  fixture: Fixture,
  reader: Side,
  owner: Side,
  blockLengthBytes: number,
): Promise<{ local: PreparedList; remote: PreparedList }> {
  const { waitFor } = fixture;
  await fixture.introduce(reader.agent, owner.agent);
  const local = await waitFor(
    reader.agent.prepareLocal({
      memoryType: reader.memory.memoryType,
      rows: blocksOf(reader.memory, blockLengthBytes),
    }),
  );
  const remote = await waitFor(
    reader.agent.prepareRemote(owner.agent.name, {
      memoryType: owner.memory.memoryType,
      rows: blocksOf(owner.memory, blockLengthBytes),
    }),
  );
  return { local, remote };
}

/** What the transport can do of READ and WRITE. */
export function operations(fixture: Fixture): readonly TransferRequest["operation"][] {
  const { read, write } = fixture.transport().capabilities;
  return [...(read ? (["READ"] as const) : []), ...(write ? (["WRITE"] as const) : [])];
}

/** The next notification; fails where the iterator ends. */
export async function nextOf(fixture: Fixture, iterator: AsyncIterator<Notification>): Promise<Notification> {
  const result = await fixture.waitFor(iterator.next());
  if (result.done) throw new Error("the notifications ended");
  return result.value;
}

export const text = (payload: Uint8Array): string => new TextDecoder().decode(payload);
export const bytes = (payload: string): Uint8Array => new TextEncoder().encode(payload);
/** Numbers below `count` in an order of their own, each once. */
export function scattered(count: number, step: number): Int32Array {
  let stride = step;
  while (greatestCommonDivisor(stride, count) !== 1) stride += 1;
  return Int32Array.from({ length: count }, (_, index) => (index * stride) % count);
}

function greatestCommonDivisor(a: number, b: number): number {
  return b === 0 ? a : greatestCommonDivisor(b, a % b);
}
