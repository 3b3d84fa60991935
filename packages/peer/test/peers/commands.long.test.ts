import { join } from "node:path";
import { systemClock } from "@kv/interface";
import { isLongRun, someOf } from "@kv/testing/long-run";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, onTestFinished, test } from "vitest";
import { readUsedBlocks } from "../../src/load/block-leaks.js";
import { load } from "../../src/load/load.js";
import { diffRecordings } from "../../src/recording/diff.js";
import { record } from "../../src/recording/record.js";
import { openRecording } from "../../src/recording/recording.js";
import { Watch } from "../../src/watch/watch.js";
import { ownPair, type Pair, RECORDED, recordedPair } from "./pairs.js";

// Every command that moves KV, at every kind of pair: those of this project, and what vLLM 0.31 to
// 0.33 puts on the wire.

const LENGTH = 96;
const prompt = Array.from({ length: LENGTH }, (_, at) => 10 + ((at * 7) % 300));
/** A busy machine must finish a request of the first two tests within it. */
const LEASE_SECONDS = 20;
/** The last test waits for its end. */
const SHORT_LEASE_SECONDS = 4;

type Open = (leaseSeconds: number) => Promise<Pair>;
const own = (options: Parameters<typeof ownPair>[0]): Open => {
  return (leaseSeconds) => ownPair({ ...options, leaseSeconds });
};
const recorded = (name: keyof typeof RECORDED): Open => {
  return (leaseSeconds) => recordedPair(name, { length: LENGTH, leaseMs: leaseSeconds * 1000 });
};

const PAIRS: readonly (readonly [string, Open])[] = [
  ["our pull", own({ mode: "pull" })],
  ["our push", own({ mode: "push" })],
  ["our pull, TP 2 at P, with a key", own({ mode: "pull", prefillTp: 2, key: true })],
  ["our push, TP 2, with a key", own({ mode: "push", prefillTp: 2, decodeTp: 2, key: true })],
  ["our pull, TP 2 at D", own({ mode: "pull", decodeTp: 2 })],
  ...(Object.keys(RECORDED) as (keyof typeof RECORDED)[]).map(
    (name) => [`vLLM ${name}`, recorded(name)] as const,
  ),
];

describe.each(someOf(PAIRS, 3))("field.md P1 at %s", { timeout: 180_000 }, (_, open) => {
  const expectFreed = ({ prefill }: Pair) =>
    expect.poll(async () => (await readUsedBlocks(prefill))?.used).toBe(0);

  test("record with a D, twice, and diff: equal KV and tokens, and P frees its blocks", async () => {
    const pair = await open(LEASE_SECONDS);
    const folder = scratchFolder(onTestFinished);
    const to = async (name: string) => {
      const path = join(folder, name);
      await record({ ...pair, folder: path, prompts: [prompt], outputTokens: 4 });
      return openRecording(path);
    };
    const [one, other] = [await to("one"), await to("other")];
    expect(one.manifest.prompts[0]?.made).toHaveLength(4);
    expect((await diffRecordings(one, other)).filter(({ kind }) => kind !== "fact")).toEqual([]);
    await expectFreed(pair);
  });

  test("watch: two rounds without a finding, and P frees its blocks", async () => {
    const pair = await open(LEASE_SECONDS);
    const canary = { prompt, outputTokens: 4, pairs: [pair] };
    const watch = new Watch({ ...pair, ...canary, clock: systemClock() });
    for (let round = 1; round <= 2; round++)
      expect(await watch.round()).toMatchObject({ findings: [], cost: { outputTokens: 4 } });
    await expectFreed(pair);
  });
});

describe.each(someOf(PAIRS, 6))("field.md P1 at %s", { timeout: 180_000 }, (_, open) => {
  test("decode --no-notify: the blocks stay at P until the lease ends, and are not leaked", async () => {
    const pair = await open(SHORT_LEASE_SECONDS);
    const requests = isLongRun ? 10 : 2;
    const { pulls, leaks } = await load({
      ...pair,
      server: pair.prefill,
      requests,
      promptTokens: [LENGTH],
      concurrency: 2,
      noNotifyShare: 1,
      leaseMs: SHORT_LEASE_SECONDS * 1000,
      leaseMarginMs: 2000,
    });
    expect(pulls.map(({ outcome, message }) => [outcome, message])).toEqual(
      Array(requests).fill(["ok", undefined]),
    );
    const unnotified = pulls.reduce((sum, { serverBlocks }) => sum + serverBlocks, 0);
    expect(leaks).toMatchObject({ afterTold: unnotified, leaked: 0, heldAlthoughTold: 0 });
  });
});
