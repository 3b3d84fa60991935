import { encodeMsgpack } from "@kv/protocol";
import { blockHashes, offloadKey } from "@kv/tier";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { afterEach, expect, it, vi } from "vitest";
import { startEventPublisher } from "../../fleet/test/support/event-publisher.js";
import { BLOCK_BYTES, NAMESPACE, openMember } from "../../tier/test/members.js";
import { openPool, type Pool, type PoolOptions } from "../src/index.js";
import { poolOperations } from "../src/program/pool-operations.js";

const BLOCK_TOKENS = 4;
const network = memoryNetwork();
const open: { close(): unknown }[] = [];
let hosts = 0;

afterEach(async () => {
  for (const { close } of open.splice(0).reverse()) await close();
  expect(Object.values(network.outstanding()).reduce((sum, held) => sum + held, 0)).toBe(0);
});

/** As vLLM by default: of a hash, the last 64 bits as an integer. */
function withIntegerHashes(value: unknown): Uint8Array {
  const bytes = Buffer.from(encodeMsgpack(value)).toString("latin1");
  return Buffer.from(bytes.replace(/\xc4\x20.{24}(.{8})/gs, "\xcf$1"), "latin1");
}

/** A stand-in for a vLLM server: a member of the tier that publishes KV events. */
async function engine(encode = encodeMsgpack) {
  hosts += 1;
  const member = await openMember(network, `engine-${hosts}`, 10);
  const publisher = await startEventPublisher({ encode });
  open.push(member, publisher);
  const { endpoint, replayEndpoint } = publisher;
  return {
    ...member,
    ...publisher,
    of: { peerId: member.tier.localId, events: { endpoint, replayEndpoint } },
  };
}

async function poolOf(options: Partial<PoolOptions>): Promise<Pool> {
  hosts += 1;
  const transport = memoryTransport({ network, host: `pool-${hosts}` });
  const pool = await openPool({
    transport,
    host: "127.0.0.1",
    port: 0,
    memoryBytes: 8 * BLOCK_BYTES,
    ...NAMESPACE,
    ...options,
  });
  open.push({
    async close() {
      await pool.close();
      await transport.close();
    },
  });
  return pool;
}

/** A prompt of whole blocks: its events as vLLM publishes them, and its keys. */
function prompt(first: number, blocks: number) {
  const tokens = Array.from({ length: blocks * BLOCK_TOKENS }, (_, at) => first + at);
  const hashes = blockHashes(tokens, { blockSize: BLOCK_TOKENS, seed: NAMESPACE.hashSeed });
  return {
    keys: hashes.map((hash) => offloadKey(hash)),
    stored: (from = 0, given: object = {}) => {
      return {
        type: "BlockStored",
        block_hashes: hashes.slice(from),
        parent_block_hash: hashes[from - 1] ?? null,
        token_ids: tokens.slice(from * BLOCK_TOKENS),
        block_size: BLOCK_TOKENS,
        lora_id: null,
        medium: "GPU",
        lora_name: null,
        ...given,
      };
    },
    removed: (...blocks: readonly number[]) => {
      return { type: "BlockRemoved", block_hashes: blocks.map((at) => hashes[at]), medium: "GPU" };
    },
  };
}

type Engine = Awaited<ReturnType<typeof engine>>;
const holds = (one: Engine, keys: readonly Uint8Array[]) => {
  for (const [at, key] of keys.entries())
    one.store.slots.set(Buffer.from(key.subarray(0, -4)).toString("latin1"), at);
};

it.each([
  ["all bytes", encodeMsgpack],
  ["64 bits", withIntegerHashes],
])(
  "copies a prefix that an engine stores again, and serves it after the engine has ended: hashes of %s",
  async (_, encode) => {
    const a = await engine(encode);
    const { keys, stored } = prompt(100, 3);
    holds(a, keys);
    const pool = await poolOf({ engines: [a.of] });
    await a.publish([stored()]);
    await expect.poll(() => pool.status().engines).toMatchObject([{ state: "following" }]);
    await new Promise((resolve) => setTimeout(resolve, 50));
    expect(pool.status().blocks).toBe(0);

    await a.publish([stored()]);
    await expect.poll(() => pool.status().copied).toBe(3);
    await a.tier.close();
    expect(pool.content("", 0)).toMatchObject({
      peer_id: pool.localId,
      block_size: BLOCK_TOKENS,
      changes: keys.map((key) => `+${Buffer.from(key).toString("base64")}`),
    });

    const b = await engine();
    const fills: number[] = [];
    const read = await b.tier.read(pool.localId, keys, (_, bytes) => fills.push(bytes[0] ?? 0));
    expect({ read, fills }).toEqual({ read: 3, fills: [10, 11, 12] });
    expect(pool.status()).toMatchObject({ found: 3, missing: 0 });
    await vi.waitFor(() => expect(pool.status().pinned).toBe(0));
  },
);

it("copies a prefix once an engine drops one of its blocks, up to that block", async () => {
  const a = await engine();
  const { keys, stored, removed } = prompt(7, 3);
  holds(a, keys);
  const pool = await poolOf({ engines: [a.of] });
  await a.publish([stored(), removed(1)]);
  await expect.poll(() => pool.status().copied).toBe(2);
  expect(keys.map((key) => pool.blocks.has(key))).toEqual([true, true, false]);
});

it("copies a prefix at its first store, where it writes through", async () => {
  const a = await engine();
  const { keys, stored } = prompt(20, 3);
  holds(a, keys);
  const pool = await poolOf({ engines: [a.of], writeThrough: true });
  await a.publish([stored()]);
  await expect.poll(() => pool.status().copied).toBe(3);
});

it("counts a prefix that two engines store as seen twice", async () => {
  const [a, b] = [await engine(), await engine()];
  const { keys, stored } = prompt(50, 2);
  holds(a, keys);
  holds(b, keys);
  const pool = await poolOf({ engines: [a.of, b.of] });
  await a.publish([stored()]);
  await b.publish([stored()]);
  await expect.poll(() => pool.status().copied).toBe(2);
});

it("knows only the chunks of an engine with more blocks in one", async () => {
  const a = await engine();
  const { keys, stored, removed } = prompt(9, 5);
  const chunks = keys.filter((_, at) => at % 2 === 1);
  holds(a, chunks);
  const pool = await poolOf({ engines: [a.of], blocksPerChunk: 2 });
  await a.publish([stored(), removed(4)]);
  await expect.poll(() => pool.status().copied).toBe(2);
  expect(chunks.every((key) => pool.blocks.has(key))).toBe(true);
});

it("copies nothing of blocks whose hashes it cannot compute, and says how many", async () => {
  const a = await engine();
  const { keys, stored, removed } = prompt(1, 3);
  holds(a, keys);
  const pool = await poolOf({ engines: [a.of] });
  const other = prompt(2, 2);
  await a.publish([
    stored(1),
    stored(0, { token_ids: Array.from({ length: 12 }, () => 0) }),
    other.stored(0, { extra_keys: [["lora"], ["lora"]] }),
    other.stored(1),
    removed(0, 1, 2),
  ]);
  await expect.poll(() => pool.status().unknown).toBe(3);
  expect(pool.status()).toMatchObject({ copied: 0, waiting: 0, blocks: 0 });
});

it("a copy that fails is counted, and the next one begins", async () => {
  const [gone, a] = [await engine(), await engine()];
  const [first, second] = [prompt(1, 2), prompt(500, 2)];
  holds(a, second.keys);
  await gone.tier.close();
  const pool = await poolOf({ engines: [gone.of, a.of], maxCopies: 1 });
  await gone.publish([first.stored(), first.removed(1)]);
  await expect.poll(() => pool.status().failed).toBe(1);
  await a.publish([second.stored(), second.removed(1)]);
  await expect.poll(() => pool.status().copied).toBe(2);
});

it("copies all that an engine has announced before the engine ends, also what was stored once", async () => {
  const a = await engine();
  const { keys, stored } = prompt(100, 3);
  holds(a, keys);
  const pool = await poolOf({ engines: [a.of] });
  await a.publish([stored()]);
  await expect.poll(() => pool.content("", 0).block_size).toBe(BLOCK_TOKENS);
  expect(await pool.copyFrom(a.of.peerId, 10_000)).toBe(3);
  expect(keys.map((key) => pool.blocks.has(key))).toEqual([true, true, true]);
  expect(await pool.copyFrom(a.of.peerId, 10_000)).toBe(0);
  await expect(pool.copyFrom("10.0.0.1:1", 10_000)).rejects.toMatchObject({
    code: "KV_REQUEST_INVALID",
    hint: expect.stringContaining(a.of.peerId),
  });
  const { "POST /copies": copy } = poolOperations(pool).further;
  await expect(copy(new URLSearchParams(), { peer: 1 })).rejects.toMatchObject({
    code: "KV_REQUEST_INVALID",
    message: expect.stringMatching(/^the body is not .*: ✖ Invalid input: .*\n {2}→ at peer$/),
  });
});

it("drains: it finds nothing more, and ends when peers have let go", async () => {
  const a = await engine();
  const { keys, stored } = prompt(100, 2);
  holds(a, keys);
  const pool = await poolOf({ engines: [a.of] });
  await a.publish([stored(), stored()]);
  await expect.poll(() => pool.status().copied).toBe(2);
  const slots = (await pool.blocks.pin(keys)).filter((slot) => slot !== undefined);
  const drained = vi.fn();
  const draining = pool.drain(10_000).then(drained);
  expect(await a.tier.read(pool.localId, keys, () => {})).toBe(0);
  expect(pool.status()).toMatchObject({ draining: true, missing: 2, pinned: 2 });
  expect(pool.content("", 0)).toMatchObject({ draining: true });
  expect(drained).not.toHaveBeenCalled();
  pool.blocks.unpin(slots);
  await draining;
});

it("refuses a memory without a block", async () => {
  await expect(poolOf({ memoryBytes: 10 })).rejects.toMatchObject({ code: "KV_CONFIG_INVALID" });
});
