import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type KvCacheKind, systemClock, systemRandom } from "@kv/interface";
import type { AgentMetadata } from "@kv/protocol";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { diffRecordings } from "../../src/recording/diff.js";
import { record } from "../../src/recording/record.js";
import { openRecording } from "../../src/recording/recording.js";
import { Watch } from "../../src/watch/watch.js";
import { type Pair, recordedPair } from "./pairs.js";

// Engines with several kinds of cache. They are recorded byte for byte, and compared only where it
// is known what a block holds.

/** Three blocks of 32 tokens, and four tokens of a fourth. */
const LENGTH = 100;
const BLOCK = 32_768;
const prompt = Array.from({ length: LENGTH }, (_, at) => at + 1);
const shared = [-1, -1, -1, -1];

/**
 * What the handshake says, the blocks of each group, and the kinds. In a page of the state group
 * the state takes 3,000 bytes.
 */
const ENGINES: Readonly<
  Record<string, { change: Partial<AgentMetadata>; blocks: number[]; groups: KvCacheKind[] }>
> = {
  hybrid: {
    change: { ssmSizes: [1000, 2000], regionGroupIds: shared },
    blocks: [4, 1],
    groups: ["full", "mamba"],
  },
  "MLA with windows": {
    change: { attentionBackend: "FLASHMLA", regionGroupIds: [0, 0, 1, 1] },
    blocks: [4, 3],
    groups: ["mla", "swa-mla"],
  },
  "attention with windows": {
    change: { regionGroupIds: [0, 0, 1, 1] },
    blocks: [4, 3],
    groups: ["full", "swa"],
  },
};

let pair: (Pair & { readonly folder: string }) | undefined;
let folder = "";
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), "kv-peer-groups-"));
});
afterEach(async () => {
  await pair?.close();
  pair = undefined;
  rmSync(folder, { recursive: true, force: true });
});

describe.each(Object.entries(ENGINES))("field.md P3: %s", (_, { change, blocks, groups }) => {
  const open = (damage?: (kv: Uint8Array) => void) =>
    recordedPair("0.33 pull", {
      length: LENGTH,
      change,
      blocks,
      ...(damage === undefined ? {} : { damage }),
    });

  test("record copies every byte of every block, the unfilled ones too, and needs no kinds", async () => {
    pair = await open();
    const { prefill, transport, sideChannel } = pair;
    await record({ folder, prefill, transport, sideChannel, prompts: [prompt] });
    const [served, made] = await Promise.all(
      [pair.folder, folder].map(async (path) => {
        const recording = await openRecording(path);
        return recording.kv(recording.manifest.prompts[0] as never);
      }),
    );
    expect(Buffer.compare(made as Uint8Array, served as Uint8Array)).toBe(0);
  });

  test("diff refuses to guess, and names what to give; with the kinds it compares what the prompt determines", async () => {
    // The last byte of each group's part of the first region that the prompt determines, and the
    // first that it does not.
    const [first = 0] = blocks;
    const state = first * BLOCK + 2999;
    const inside = groups.includes("mamba") ? state : 3 * BLOCK - 1;
    const behind = groups.includes("mamba") ? state + 1 : 3 * BLOCK;
    const recordTo = async (name: string, at: number | undefined, kinds?: KvCacheKind[]) => {
      pair = await open((kv) => {
        if (at !== undefined) kv[at] = (kv[at] ?? 0) ^ 1;
      });
      const { prefill, transport, sideChannel } = pair;
      const path = join(folder, name);
      await record({
        folder: path,
        prefill,
        transport,
        sideChannel,
        prompts: [prompt],
        groups: kinds as never,
      });
      await pair.close();
      pair = undefined;
      return openRecording(path);
    };
    const [one, same] = [await recordTo("one", undefined), await recordTo("same", behind)];
    await expect(diffRecordings(one, same)).rejects.toMatchObject({
      code: "KV_CONFIG_INVALID",
      hint: expect.stringMatching(/--groups /),
    });
    const results = async (other: typeof one) =>
      (await diffRecordings(one, other, { groups })).filter(({ kind }) => kind === "result");
    expect(await results(same)).toEqual([]);
    expect(await results(await recordTo("other", inside, groups))).toMatchObject([
      {
        where: expect.stringMatching(/prompt 0: rank 0, model.layers.0/),
        one: expect.stringMatching(/^1 of /),
      },
    ]);
  });

  test("watch refuses to guess too", async () => {
    pair = await open();
    const { prefill, transport, sideChannel } = pair;
    const watch = (kinds?: readonly KvCacheKind[]) =>
      new Watch({
        pairs: [{ prefill, decode: undefined }],
        prompt,
        outputTokens: 1,
        transport,
        sideChannel,
        reference: undefined,
        groups: kinds,
        random: systemRandom(),
        clock: systemClock(),
      });
    const unknown = watch();
    await unknown.round();
    expect((await unknown.round()).findings).toMatchObject([
      { id: "watch.canary-failed", found: expect.stringMatching(/KV_CONFIG_INVALID/) },
    ]);
    const known = watch(groups);
    await known.round();
    expect((await known.round()).findings).toEqual([]);
  });
});

test.each<[string, KvCacheKind[], RegExp]>([
  ["too few kinds", ["full"], /names 1 kinds \(full\), and the engine has 2/],
  [
    "no state",
    ["full", "swa"],
    /names no group of states, and the engine announces states of 1000 \+ 2000/,
  ],
])("field.md P3: %s are refused with both values", async (_, groups, message) => {
  const { change, blocks } = ENGINES["hybrid"] as NonNullable<(typeof ENGINES)[string]>;
  pair = await recordedPair("0.33 pull", { length: LENGTH, change, blocks });
  const { prefill, transport, sideChannel } = pair;
  await record({ folder, prefill, transport, sideChannel, prompts: [prompt] });
  const other = await openRecording(pair.folder);
  await expect(diffRecordings(await openRecording(folder), other, { groups })).resolves.toEqual(
    expect.any(Array),
  );
  const { filledParts } = await import("../../src/recording/diff.js");
  const handshakes = await other.handshakes(other.manifest.prefill);
  expect(() => filledParts(handshakes, other.manifest.prompts[0] as never, groups)).toThrow(
    message,
  );
});

test("field.md P3: a recording of states or of several groups is not pushed on a guess", async () => {
  const { change, blocks } = ENGINES["hybrid"] as NonNullable<(typeof ENGINES)[string]>;
  const push = (engine: Omit<Parameters<typeof recordedPair>[1], "length">) =>
    recordedPair("0.32 push", { length: LENGTH, ...engine });
  await expect(push({ change, blocks })).rejects.toMatchObject({ code: "KV_PLAN_UNSUPPORTED" });
  const windows = { change: { regionGroupIds: [0, 0, 1, 1] }, blocks: [4, 3] };
  await expect(push(windows)).rejects.toMatchObject({ code: "KV_CONFIG_INVALID" });
  pair = await push({ ...windows, groups: ["full", "swa"] });
});
