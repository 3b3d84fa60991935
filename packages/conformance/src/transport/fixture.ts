import type {
  Agent,
  AgentOptions,
  DescriptorTable,
  KvErrorCode,
  Memory,
  Notification,
  PreparedList,
  Registration,
  TransferRequest,
  Transport,
} from "@kv/interface";
import { afterAll, afterEach, beforeAll, expect } from "vitest";
import { expectError } from "../expect-error.js";

/** Options of `transportSuite`. */
export interface TransportSuiteOptions {
  /** Name in the titles of the tests. */
  readonly name: string;
  /** Creates a new transport. The suite closes it. */
  readonly create: () => Promise<Transport>;
  /** Lets some virtual time pass. Absent: the transport runs in real time. */
  readonly progress?: (() => Promise<void>) | undefined;
  /**
   * True: no transfer ends within 0.001 ms, as virtual time can guarantee. Then a test can require
   * a timeout, not only accept one. @default false
   */
  readonly transfersTakeTime?: boolean | undefined;
  /** Options of every agent that the suite creates, such as its backends. */
  readonly agentOptions?: Omit<AgentOptions, "name"> | undefined;
  /** Bytes of a big transfer. @default 32 * 1024 * 1024 */
  readonly bigLengthBytes?: number | undefined;
  /**
   * True: `addRemote` must reject metadata with any byte changed, and any prefix of it. False: the
   * suite only passes bytes that are no metadata at all, because NIXL's own loader can crash the
   * process on damaged metadata. @default false
   */
  readonly detectsDamagedMetadata?: boolean | undefined;
  /**
   * Creates a second transport whose agents the first one reaches, and `kill`, which simulates the
   * death of its process. Absent: the death of a peer is not tested. It is not tested either where
   * `capabilities.reportsPeerDeath` is false.
   */
  readonly createMortal?:
    | (() => Promise<{ transport: Transport; kill(): Promise<void> }>)
    | undefined;
}

/** An agent with one registered memory. */
export interface Side {
  readonly agent: Agent;
  readonly memory: Memory;
  readonly registration: Registration;
}

/** Setup and helpers of the suite's tests. */
export interface Fixture {
  readonly options: TransportSuiteOptions;
  transport(): Transport;
  /** Awaits a promise while virtual time passes. */
  waitFor<T>(promise: PromiseLike<T>): Promise<T>;
  /** `expectError` for a call that needs virtual time. */
  rejects(act: () => Promise<unknown>, ...codes: KvErrorCode[]): Promise<Error>;
  /** Lets one turn of the event loop, or some virtual time, pass. */
  turn(): Promise<void>;
  /** Creates an agent that is closed after the test. */
  agent(name?: string): Promise<Agent>;
  /** Allocates memory that is closed after the test, after all agents. */
  memory(lengthBytes: number): Memory;
  /** Creates an agent with registered memory that `pattern` fills. */
  side(lengthBytes: number, seed: number): Promise<Side>;
  /** Adds `owner` as a peer of `reader`. */
  introduce(reader: Agent, owner: Agent): Promise<void>;
}

/** Creates one transport for all tests of a suite; agents and memory are new for each test. */
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
    // Do not advance time for a promise that needs none: a test then sees the memory at the moment
    // of its release.
    for (let turn = 0; turn < 20 && !settled; turn++) await Promise.resolve();
    while (!settled) {
      // Advance virtual time once at a time, also when two promises are awaited concurrently.
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
    rejects: (act, ...codes) => expectError(() => waitFor(act()), ...codes),
    turn: () => options.progress?.() ?? new Promise((resolve) => void setTimeout(resolve, 0)),
    async agent(name) {
      const agent = await waitFor(self.transport().createAgent({ ...options.agentOptions, name }));
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

/**
 * Bytes that depend on seed and position. Each page contains its number, so that no two pages are
 * equal.
 */
export function pattern(lengthBytes: number, seed: number): Uint8Array {
  const tile = new Uint8Array(Math.min(TILE_BYTES, lengthBytes));
  for (let at = 0; at < tile.length; at++)
    tile[at] = (at * 31 + (at >>> 8) * 17 + seed * 101) & 0xff;
  const all = new Uint8Array(lengthBytes);
  for (let at = 0; at < lengthBytes; at += TILE_BYTES) {
    all.set(lengthBytes - at < TILE_BYTES ? tile.subarray(0, lengthBytes - at) : tile, at);
  }
  const view = new DataView(all.buffer);
  for (let at = PAGE_BYTES; at + 4 <= lengthBytes; at += PAGE_BYTES) view.setUint32(at, at + seed);
  return all;
}

/**
 * Makes rows of a table from `[offsetBytes, lengthBytes, strideBytes, count]` within one memory.
 */
export function rowsIn(
  memory: Memory,
  ...rows: (readonly [number, number, number, number])[]
): Float64Array {
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

/** A table of blocks of equal length that cover the whole memory. */
export function blockTable(memory: Memory, blockLengthBytes: number): DescriptorTable {
  const count = memory.lengthBytes / blockLengthBytes;
  const rows = rowsIn(memory, [0, blockLengthBytes, blockLengthBytes, count]);
  return { memoryType: memory.memoryType, rows };
}

/**
 * Two sides, of which `reader` knows `owner`. The patterns of their memories have `seed` and the
 * number after it.
 */
export async function introduced(
  fixture: Fixture,
  lengthBytes: number,
  seed = 0,
): Promise<{ reader: Side; owner: Side }> {
  const reader = await fixture.side(lengthBytes, seed);
  const owner = await fixture.side(lengthBytes, seed + 1);
  await fixture.introduce(reader.agent, owner.agent);
  return { reader, owner };
}

/** The same, with lists over both memories in blocks. */
export async function blockPair(
  fixture: Fixture,
  lengthBytes: number,
  blockLengthBytes: number,
  seed = 0,
): Promise<{ reader: Side; owner: Side; local: PreparedList; remote: PreparedList }> {
  const { reader, owner } = await introduced(fixture, lengthBytes, seed);
  return { reader, owner, ...(await blockLists(fixture, reader, owner, blockLengthBytes)) };
}

/** Prepares lists over both memories in blocks, on the agent of `reader`. */
export async function blockLists(
  fixture: Fixture,
  reader: Side,
  owner: Side,
  blockLengthBytes: number,
): Promise<{ local: PreparedList; remote: PreparedList }> {
  const { agent } = reader;
  await fixture.introduce(agent, owner.agent);
  const [mine, theirs] = [reader, owner].map(({ memory }) => blockTable(memory, blockLengthBytes));
  return {
    local: await fixture.waitFor(agent.prepareLocal(mine as DescriptorTable)),
    remote: await fixture.waitFor(agent.prepareRemote(owner.agent.name, theirs as DescriptorTable)),
  };
}

/**
 * A list of rows `[offsetBytes, lengthBytes, strideBytes, count]` in the memory of `owner`,
 * prepared on `agent` for itself or for its peer.
 */
export function prepare(
  fixture: Fixture,
  agent: Agent,
  { agent: peer, memory }: Pick<Side, "agent" | "memory">,
  ...rows: Parameters<typeof rowsIn>[1][]
): Promise<PreparedList> {
  const table = { memoryType: memory.memoryType, rows: rowsIn(memory, ...rows) };
  return fixture.waitFor(
    peer === agent ? agent.prepareLocal(table) : agent.prepareRemote(peer.name, table),
  );
}

/** A READ of the descriptors with these ids in both lists. */
export function readOf(
  { local, remote }: { readonly local: PreparedList; readonly remote: PreparedList },
  ids: Int32Array,
) {
  return { operation: "READ", local, localIds: ids, remote, remoteIds: ids } as const;
}

/** The ids from 0 to `count` - 1. */
export const idsBelow = (count: number) => Int32Array.from({ length: count }, (_, id) => id);

/** Requires equal bytes, without a report of each. */
export function expectBytes(got: Uint8Array, expected: Uint8Array): void {
  expect(Buffer.compare(got, expected)).toBe(0);
}

/** Whether a promise has been fulfilled. */
export function fulfilled(promise: Promise<unknown>): () => boolean {
  let isFulfilled = false;
  void promise.then(() => {
    isFulfilled = true;
  });
  return () => isFulfilled;
}

/** Returns the operations that the transport supports. */
export function operations(fixture: Fixture): readonly TransferRequest["operation"][] {
  const { read, write } = fixture.transport().capabilities;
  return [...(read ? (["READ"] as const) : []), ...(write ? (["WRITE"] as const) : [])];
}

/** Returns the next notification; throws when the iterator ends. */
export async function nextOf(
  fixture: Fixture,
  iterator: AsyncIterator<Notification>,
): Promise<Notification> {
  const result = await fixture.waitFor(iterator.next());
  if (result.done) throw new Error("the notifications ended");
  return result.value;
}

/** The text of the next notification. */
export async function nextText(
  fixture: Fixture,
  iterator: AsyncIterator<Notification>,
): Promise<string> {
  return new TextDecoder().decode((await nextOf(fixture, iterator)).payload);
}

export const bytes = (payload: string): Uint8Array => new TextEncoder().encode(payload);

/** Returns the numbers below `count` in a scattered order, each once. */
export function scattered(count: number, step: number): Int32Array {
  for (let stride = step; ; stride++) {
    const ids = Int32Array.from({ length: count }, (_, index) => (index * stride) % count);
    if (new Set(ids).size === count) return ids;
  }
}
