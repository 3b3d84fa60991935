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
import { TIME_LIMIT_MS } from "../time-limits.js";

/** Options of `transportSuite`. */
export interface TransportSuiteOptions {
  readonly name: string;
  /** A new transport, which the suite closes. */
  readonly create: () => Promise<Transport>;
  /** Lets virtual time pass. Absent: real time. */
  readonly progress?: (() => Promise<void>) | undefined;
  /** No transfer ends within 0.001 ms, so a test can require a timeout. @default false */
  readonly transfersTakeTime?: boolean | undefined;
  /** For every agent of the suite, such as its backends. */
  readonly agentOptions?: Omit<AgentOptions, "name"> | undefined;
  /** Bytes of a big transfer. @default 32 * 1024 * 1024 */
  readonly bigLengthBytes?: number | undefined;
  /**
   * True: `addRemote` must reject any changed byte and any prefix of metadata. False: it only gets
   * bytes that are no metadata, because damaged metadata can crash NIXL's loader. @default false
   */
  readonly detectsDamagedMetadata?: boolean | undefined;
  /**
   * A second transport that the first one reaches, and `kill`, which simulates its process's death.
   * A peer's death is not tested when this is absent or `capabilities.reportsPeerDeath` is false.
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

/** One transport for all tests, new agents and memory for each. */
export class Fixture {
  readonly options: TransportSuiteOptions;
  readonly #agents: Agent[] = [];
  readonly #memories: Memory[] = [];
  #transport: Transport | undefined;
  #progressing: Promise<void> | undefined;

  constructor(options: TransportSuiteOptions) {
    this.options = options;
    beforeAll(async () => {
      this.#transport = await options.create();
    }, TIME_LIMIT_MS);
    afterEach(async () => {
      for (const agent of this.#agents.splice(0)) await this.waitFor(agent.close());
      for (const memory of this.#memories.splice(0)) memory.close();
    }, TIME_LIMIT_MS);
    afterAll(async () => {
      await this.waitFor(this.#transport?.close() ?? Promise.resolve());
    }, TIME_LIMIT_MS);
  }

  get transport(): Transport {
    if (this.#transport === undefined)
      throw new Error("the transport of the suite was not created");
    return this.#transport;
  }

  get operations(): readonly TransferRequest["operation"][] {
    const { read, write } = this.transport.capabilities;
    return [...(read ? (["READ"] as const) : []), ...(write ? (["WRITE"] as const) : [])];
  }

  /** Virtual time passes meanwhile. */
  readonly waitFor = async <T>(promise: PromiseLike<T>): Promise<T> => {
    const { progress } = this.options;
    if (progress === undefined) return await promise;
    let settled = false;
    const outcome = Promise.resolve(promise).finally(() => {
      settled = true;
    });
    outcome.catch(() => {});
    // No time passes for a promise that needs none, so that a test sees memory at its release.
    for (let turn = 0; turn < 20 && !settled; turn++) await Promise.resolve();
    while (!settled) {
      // Two concurrent waits share one advance of virtual time.
      this.#progressing ??= progress().finally(() => {
        this.#progressing = undefined;
      });
      await this.#progressing;
    }
    return await outcome;
  };

  /** `expectError` for a call that needs virtual time. */
  readonly rejects = (act: () => Promise<unknown>, ...codes: KvErrorCode[]): Promise<Error> =>
    expectError(() => this.waitFor(act()), ...codes);

  /** A turn of the event loop, or some virtual time. */
  turn(): Promise<void> {
    return this.options.progress?.() ?? new Promise((resolve) => void setTimeout(resolve, 0));
  }

  /** Closed after the test. */
  async agent(name?: string): Promise<Agent> {
    const { agentOptions } = this.options;
    const agent = await this.waitFor(this.transport.createAgent({ ...agentOptions, name }));
    this.#agents.push(agent);
    return agent;
  }

  /** Closed after the test and all agents. */
  memory(lengthBytes: number): Memory {
    const memory = this.transport.allocate(lengthBytes);
    this.#memories.push(memory);
    return memory;
  }

  /** `pattern` fills its memory. */
  async side(lengthBytes: number, seed: number): Promise<Side> {
    const memory = this.memory(lengthBytes);
    memory.bytes.set(pattern(lengthBytes, seed));
    const agent = await this.agent();
    return { agent, memory, registration: await this.waitFor(agent.register(memory)) };
  }

  async introduce(reader: Agent, owner: Agent): Promise<void> {
    await this.waitFor(reader.addRemote(await this.waitFor(owner.localMetadata())));
  }

  /** The first knows the second. */
  async agents(): Promise<[Agent, Agent]> {
    const [one, two] = [await this.agent(), await this.agent()];
    await this.introduce(one, two);
    return [one, two];
  }

  /** `reader` knows `owner`. Their patterns have `seed` and the number after it. */
  async introduced(lengthBytes: number, seed = 0): Promise<{ reader: Side; owner: Side }> {
    const reader = await this.side(lengthBytes, seed);
    const owner = await this.side(lengthBytes, seed + 1);
    await this.introduce(reader.agent, owner.agent);
    return { reader, owner };
  }

  async blockPair(
    lengthBytes: number,
    blockLengthBytes: number,
    seed = 0,
  ): Promise<{ reader: Side; owner: Side } & Lists> {
    const { reader, owner } = await this.introduced(lengthBytes, seed);
    return { reader, owner, ...(await this.blockLists(reader, owner, blockLengthBytes)) };
  }

  /** Lists over both memories in blocks, on `reader`'s agent. */
  async blockLists(reader: Side, owner: Side, blockLengthBytes: number): Promise<Lists> {
    const { agent } = reader;
    await this.introduce(agent, owner.agent);
    const [mine, theirs] = [
      blockTable(reader.memory, blockLengthBytes),
      blockTable(owner.memory, blockLengthBytes),
    ];
    return {
      local: await this.waitFor(agent.prepareLocal(mine)),
      remote: await this.waitFor(agent.prepareRemote(owner.agent.name, theirs)),
    };
  }

  /**
   * Rows `[offsetBytes, lengthBytes, strideBytes, count]` in `owner`'s memory, prepared on `agent`
   * for itself or for its peer.
   */
  prepare(
    agent: Agent,
    { agent: peer, memory }: Pick<Side, "agent" | "memory">,
    ...rows: Parameters<typeof rowsIn>[1][]
  ): Promise<PreparedList> {
    const table = { memoryType: memory.memoryType, rows: rowsIn(memory, ...rows) };
    return this.waitFor(
      peer === agent ? agent.prepareLocal(table) : agent.prepareRemote(peer.name, table),
    );
  }

  /** Throws when the iterator ends. */
  async nextOf(iterator: AsyncIterator<Notification>): Promise<Notification> {
    const result = await this.waitFor(iterator.next());
    if (result.done) throw new Error("the notifications ended");
    return result.value;
  }

  async nextText(iterator: AsyncIterator<Notification>): Promise<string> {
    return new TextDecoder().decode((await this.nextOf(iterator)).payload);
  }
}

interface Lists {
  readonly local: PreparedList;
  readonly remote: PreparedList;
}

const TILE_BYTES = 65_536;
const PAGE_BYTES = 4096;

/** From seed and position. Each page contains its number, so no two are equal. */
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

/** Equal blocks that cover the memory. */
export function blockTable(memory: Memory, blockLengthBytes: number): DescriptorTable {
  const count = memory.lengthBytes / blockLengthBytes;
  const rows = rowsIn(memory, [0, blockLengthBytes, blockLengthBytes, count]);
  return { memoryType: memory.memoryType, rows };
}

/** The same ids in both lists. */
export function readOf({ local, remote }: Lists, ids: Int32Array) {
  return { operation: "READ", local, localIds: ids, remote, remoteIds: ids } as const;
}

export const idsBelow = (count: number) => Int32Array.from({ length: count }, (_, id) => id);

export function expectBytes(got: Uint8Array, expected: Uint8Array): void {
  expect(Buffer.compare(got, expected)).toBe(0);
}

export function fulfilled(promise: Promise<unknown>): () => boolean {
  let isFulfilled = false;
  void promise.then(() => {
    isFulfilled = true;
  });
  return () => isFulfilled;
}

export const bytes = (payload: string): Uint8Array => new TextEncoder().encode(payload);

/** Each number below `count` once, in a scattered order. */
export function scattered(count: number, step: number): Int32Array {
  for (let stride = step; ; stride++) {
    const ids = Int32Array.from({ length: count }, (_, index) => (index * stride) % count);
    if (new Set(ids).size === count) return ids;
  }
}
