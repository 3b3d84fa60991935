import { type LogFields, silentLog, systemClock, YieldingQueue } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { afterEach, expect, test } from "vitest";
import { type EventPublisher, startEventPublisher } from "../../test/support/event-publisher.js";
import type { InstanceGet } from "../pairing/engine-facts.js";
import { BlockIndex } from "./block-index.js";
import { BlockTree } from "./block-tree.js";
import { KvEventStream } from "./kv-event-stream.js";
import { KvEventSubscriber } from "./kv-event-subscriber.js";

const open: { close(): void }[] = [];
afterEach(() => {
  for (const one of open.splice(0)) one.close();
});

/** One block after `parent`, with its own number as each of its tokens. */
const stored = (hash: number, parent: number | null = null) => ({
  type: "BlockStored",
  block_hashes: [hash],
  parent_block_hash: parent,
  token_ids: [hash, hash],
  block_size: 2,
  lora_id: null,
  medium: "GPU",
  lora_name: null,
});
const removed = (hash: number) => ({ type: "BlockRemoved", block_hashes: [hash], medium: "GPU" });

async function publisher(options?: Parameters<typeof startEventPublisher>[0]) {
  const started = await startEventPublisher(options);
  open.push(started);
  return started;
}

function recordedLog() {
  const warnings: [string, LogFields | undefined][] = [];
  const warn = (event: string, fields?: LogFields) => void warnings.push([event, fields]);
  return { warnings, log: { ...silentLog, warn } };
}

function follow({ endpoint, replayEndpoint }: Pick<EventPublisher, "endpoint" | "replayEndpoint">) {
  const { log, warnings } = recordedLog();
  const subscriber = new KvEventSubscriber({ log, clock: systemClock() });
  open.push(subscriber);
  const publishes = { kvEvents: endpoint, kvEventsReplay: replayEndpoint };
  const instance = { role: "prefill", url: "http://p", inFlight: 0, ...publishes } as const;
  subscriber.follow([instance]);
  const prompt = (...blocks: readonly number[]) => [
    ...blocks.flatMap((block) => [block, block]),
    0,
  ];
  return {
    warnings,
    status: () => subscriber.status(instance),
    matched: (...blocks: readonly number[]) =>
      subscriber.matchedTokens(instance, prompt(...blocks)),
    following: () =>
      expect.poll(() => subscriber.status(instance)?.state, { timeout: 5000 }).toBe("following"),
    /** Waits until the batch before `next` is in the index. */
    reached: (next: number) =>
      expect.poll(() => subscriber.status(instance)?.next_batch, { timeout: 8000 }).toBe(next),
  };
}

test("a late subscriber fetches the batches before it, and its index is complete", async () => {
  const server = await publisher();
  await server.publish([stored(7)]);
  await server.publish([stored(8, 7), stored(9, 8)]);
  await server.publish([removed(9)]);
  const late = follow(server);
  await late.reached(3);
  // The last batch comes before the end of the replay.
  await late.following();
  expect(late.matched(7, 8, 9)).toBe(4);
  expect(late.status()).toMatchObject({
    complete: true,
    missed_batches: 0,
    blocks: 2,
    reason: null,
  });
});

test("after a gap of 100 batches the index equals that of a subscriber without the gap", async () => {
  const server = await publisher();
  await server.publish([stored(1)]);
  const follower = follow(server);
  await follower.reached(1);
  for (let hash = 2; hash <= 101; hash += 1)
    await server.publish(
      [stored(hash, hash - 1), ...(hash % 10 === 0 ? [stored(1000 + hash)] : [])],
      {
        lost: true,
      },
    );
  await server.publish([removed(1010)]);
  const without = follow(server);
  await Promise.all([follower.reached(102), without.reached(102)]);
  const all = Array.from({ length: 101 }, (_, at) => at + 1);
  for (const one of [follower, without]) {
    expect(one.status()).toMatchObject({ complete: true, blocks: 110 });
    expect([one.matched(...all), one.matched(1010), one.matched(1020)]).toEqual([202, 0, 2]);
  }
});

test("a subscriber that comes after batches were dropped says how many it has not seen, until the cache is cleared", async () => {
  const server = await publisher({ bufferSteps: 2 });
  for (const hash of [1, 2, 3, 4, 5]) await server.publish([stored(hash)]);
  const late = follow(server);
  await late.reached(5);
  expect(late.status()).toMatchObject({
    complete: false,
    missed_batches: 3,
    blocks: 2,
    reason: "the publisher no longer has the first batches",
  });
  await server.publish([{ type: "AllBlocksCleared" }, stored(6)]);
  await late.reached(6);
  expect(late.status()).toMatchObject({
    complete: true,
    missed_batches: 0,
    blocks: 1,
    reason: null,
  });
});

test("without a replay socket, a gap clears the index, which says that it is not complete", async () => {
  const server = await publisher({ replays: false });
  const follower = follow(server);
  await follower.following();
  // A subscription takes time to become active.
  let hash = 1;
  await expect
    .poll(
      async () => {
        await server.publish([stored(hash++)]);
        return follower.status()?.blocks;
      },
      { timeout: 5000 },
    )
    .toBeGreaterThan(0);
  await follower.reached(hash - 1);
  await server.publish([stored(500)], { lost: true });
  await server.publish([stored(501)]);
  await expect.poll(() => follower.matched(501), { timeout: 5000 }).toBe(2);
  expect(follower.status()?.blocks).toBe(1);
  expect(follower.status()).toMatchObject({
    complete: false,
    reason: "the publisher has no replay socket",
  });
});

test.each([2, 5])(
  "a publisher that was restarted, and has sent %i batches, is begun anew",
  async (batches) => {
    const first = await publisher();
    for (const hash of [1, 2, 3]) await first.publish([stored(hash)]);
    const follower = follow(first);
    await follower.reached(3);
    first.close();
    const second = await publisher({ at: first.endpoint });
    for (let hash = 0; hash < batches; hash += 1) await second.publish([stored(100 + hash)]);
    // The replay socket has another port here, as this test could not bind the same one in time.
    const again = follow({ endpoint: first.endpoint, replayEndpoint: second.replayEndpoint });
    await again.reached(batches);
    expect([again.matched(1), again.matched(100)]).toEqual([0, 2]);
  },
);

test("a sequence that runs backwards is asked about once a second, with one warning that names the source", async () => {
  const server = await publisher();
  await server.publish([stored(1)]);
  const follower = follow(server);
  await follower.reached(1);
  await server.publish([stored(2)]);
  await follower.reached(2);
  for (let round = 0; round < 200; round += 1)
    await server.publish([stored(7)], { sequence: BigInt(round % 2) });
  await expect.poll(() => follower.warnings.length).toBe(1);
  expect(follower.warnings[0]).toMatchObject([
    "kv-events-out-of-order",
    { endpoint: server.endpoint },
  ]);
  expect(server.asked.length).toBeLessThan(5);
  expect(follower.matched(1)).toBe(2);
});

test("batches with wrong hashes cause one warning that names the source", async () => {
  const server = await publisher();
  await server.publish([stored(1), { ...stored(1), token_ids: [5, 5] }]);
  await server.publish([{ ...stored(2), token_ids: [1] }]);
  await server.publish([stored(3)]);
  const follower = follow(server);
  await follower.reached(3);
  expect(follower.warnings).toMatchObject([
    ["kv-events-contradictory", { endpoint: server.endpoint }],
  ]);
  expect(follower.status()).toMatchObject({ complete: false, missed_batches: 1 });
  expect([follower.matched(1), follower.matched(3)]).toEqual([2, 2]);
});

test("a stream that is closed while its cache is being cleared gives all memory back", async () => {
  const { endpoint, replayEndpoint, publish } = await publisher();
  const ids = Array.from({ length: 10_000 }, (_, at) => at);
  const blocks = { ...stored(0), block_hashes: ids, token_ids: ids, block_size: 1 };
  await publish([blocks, { type: "AllBlocksCleared" }]);
  const [tree, clock] = [new BlockTree(), systemClock()];
  const turns = new YieldingQueue({ clock });
  const index = new BlockIndex(tree, { role: "prefill", url: "http://p", inFlight: 0 });
  const stream = new KvEventStream({ endpoint, replayEndpoint }, index, {
    log: silentLog,
    clock,
    turns,
  });
  for (let most = 0; tree.size >= most; await new Promise((resolve) => setImmediate(resolve)))
    most = tree.size;
  expect(tree.size).toBeGreaterThan(0);
  await turns.run(stream.close());
  await expect.poll(() => tree.size, { timeout: 5000 }).toBe(0);
});

test("an instance without a configured endpoint is asked for it, and its wildcard is the instance's host", async () => {
  const server = await publisher();
  await server.publish([stored(1)]);
  const wild = (endpoint = "") => endpoint.replace("127.0.0.1", "*");
  const answers = [
    { status: 503, body: "" },
    { status: 200, body: "{}" },
    {
      status: 200,
      body: JSON.stringify({
        0: {
          publisher: "zmq",
          endpoint: wild(server.endpoint),
          replay_endpoint: wild(server.replayEndpoint),
        },
      }),
    },
  ];
  const asked: string[] = [];
  const get: InstanceGet = async ({ path }) => {
    asked.push(path);
    return answers.shift() ?? { status: 500, body: "" };
  };
  const clock = manualClock();
  using subscriber = new KvEventSubscriber({ log: silentLog, clock, get });
  const instance = { role: "prefill", url: "http://127.0.0.1:1", inFlight: 0 } as const;
  subscriber.follow([instance]);
  for (const count of [1, 2]) {
    await expect.poll(() => asked.length).toBe(count);
    await new Promise((resolve) => setImmediate(resolve));
    expect(subscriber.matchedTokens(instance, [1, 1, 0])).toBeUndefined();
    clock.advance(30_000);
  }
  await expect.poll(() => subscriber.matchedTokens(instance, [1, 1, 0])).toBe(2);
  expect(asked).toEqual(Array(3).fill("/kv_event_sources"));
});

test("the ranks of a data-parallel server are followed one by one", async () => {
  const body = JSON.stringify({
    0: { publisher: "zmq", endpoint: "tcp://*:5557", replay_endpoint: null },
    1: { publisher: "zmq", endpoint: "tcp://*:5558", replay_endpoint: null },
  });
  const { log, warnings } = recordedLog();
  using subscriber = new KvEventSubscriber({
    log,
    clock: manualClock(),
    get: async () => ({ status: 200, body }),
  });
  const server = { role: "prefill", url: "http://127.0.0.1:1", inFlight: 0 } as const;
  const rank = { ...server, dataParallelRank: 1 };
  subscriber.follow([server, rank]);
  await expect.poll(() => subscriber.status(rank)?.endpoint).toBe("tcp://127.0.0.1:5558");
  expect(subscriber.status(server)).toBeNull();
  const reason: unknown = expect.stringContaining("URL@RANK");
  expect(warnings).toMatchObject([["kv-events-not-followed", { reason }]]);
});
