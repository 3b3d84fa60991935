import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { type KvCacheKind, systemClock } from "@kv/interface";
import { groupsOfConfig } from "@kv/kv-plan";
import type { AgentMetadata } from "@kv/protocol";
import { afterEach, describe, expect, test } from "vitest";
import type { GivenGroups } from "../../src/protocol/cache-groups.js";
import { diffRecordings } from "../../src/recording/diff.js";
import { record } from "../../src/recording/record.js";
import { openRecording, type Recording } from "../../src/recording/recording.js";
import { Watch } from "../../src/watch/watch.js";
import { runKvPeer } from "../run-kv-peer.js";
import { type Pair, recordedPair } from "./pairs.js";

// Engines with several kinds of cache. They are recorded byte for byte, and compared only where it
// is known what a block holds: by given kinds, or by the model's config.json.

const model = (name: string) =>
  fileURLToPath(new URL(`../../../kv-plan/models/${name}.json`, import.meta.url));
/** Three blocks of 32 tokens, and four tokens of a fourth. */
const LENGTH = 100;
const BLOCK = 32_768;
const prompt = Array.from({ length: LENGTH }, (_, at) => at + 1);
const shared = { regionGroupIds: [-1, -1, -1, -1] };
const layers = (form: string, numbers = [0, 1, 2, 3]) => ({
  regionNames: numbers.map((at) => `model.layers.${at}.${form}`),
});

interface EngineCase {
  /** What the handshake says. */
  readonly change: Partial<AgentMetadata>;
  /** Of each group. */
  readonly blocks: number[];
  readonly kinds: KvCacheKind[];
  readonly file?: string;
  /** The last byte of the first region's first group or state that a prompt determines. */
  readonly last: number;
}

const HYBRID: EngineCase = {
  file: model("falcon-h1-0.5b"),
  change: { ...shared, ...layers("attn"), ssmSizes: [1000, 2000] },
  blocks: [4, 1],
  kinds: ["full", "mamba"],
  // In a page of the state group the state takes 3,000 bytes.
  last: 4 * BLOCK + 2999,
};
const WINDOWS = { change: { regionGroupIds: [0, 0, 1, 1] }, blocks: [4, 3] };
const ENGINES: readonly (readonly [string, EngineCase])[] = [
  ["hybrid", HYBRID],
  [
    "MLA with windows",
    {
      file: model("deepseek-v4-flash"),
      change: {
        ...shared,
        ...layers("attn.swa_cache", [0, 1, 3, 4]),
        attentionBackend: "FLASHMLA",
      },
      blocks: [3, 3, 4, 3, 3],
      kinds: ["swa-mla", "swa-mla", "mla", "swa-mla", "swa-mla"],
      last: 2 * BLOCK - 1,
    },
  ],
  ["attention with windows", { ...WINDOWS, kinds: ["full", "swa"], last: 3 * BLOCK - 1 }],
];

const folder = mkdtempSync(join(tmpdir(), "kv-peer-groups-"));
afterEach(() => rmSync(folder, { recursive: true, force: true }));

const kvOf = (recording: Recording) => recording.kv(recording.manifest.prompts[0] as never);

function recordP(
  { prefill, transport, sideChannel }: Pair,
  groups?: GivenGroups,
  to = join(folder, "made"),
) {
  return record({ folder: to, prefill, transport, sideChannel, prompts: [prompt], groups });
}

describe.each(ENGINES)("field.md P3: %s", (_, { change, blocks, kinds, file, last }) => {
  const open = (damage: (kv: Uint8Array) => void = () => {}) =>
    recordedPair("0.33 pull", { length: LENGTH, change, blocks, damage });
  const given = async (): Promise<GivenGroups> => (file ? await groupsOfConfig(file) : kinds);

  test("record copies every byte of every block, the unfilled ones too, and needs no kinds", async () => {
    const pair = await open();
    await recordP(pair);
    const served = await kvOf(await openRecording(pair.folder));
    const made = await kvOf(await openRecording(join(folder, "made")));
    expect(Buffer.compare(made, served)).toBe(0);
  });

  test("diff refuses to guess, and names what to give; with the kinds it compares what the prompt determines", async () => {
    const recordTo = async (name: string, damagedAt?: number, groups?: GivenGroups) => {
      const pair = await open((kv) => {
        if (damagedAt !== undefined) kv[damagedAt] = (kv[damagedAt] ?? 0) ^ 1;
      });
      const path = join(folder, name);
      await recordP(pair, groups, path);
      return openRecording(path);
    };
    const groups = await given();
    const [one, same] = [await recordTo("one"), await recordTo("same", last + 1)];
    const other = await recordTo("other", last, groups);
    expect(other.manifest.groups).toEqual(kinds);
    await expect(diffRecordings(one, same)).rejects.toMatchObject({
      code: "KV_CONFIG_INVALID",
      hint: expect.stringMatching(/--groups /),
    });
    const results = async (compared: Recording) =>
      (await diffRecordings(one, compared, { groups })).filter(({ kind }) => kind === "result");
    expect(await results(same)).toEqual([]);
    expect(await results(other)).toMatchObject([
      {
        where: expect.stringMatching(/prompt 0: rank 0, model.layers.0/),
        one: expect.stringMatching(/^1 of /),
      },
    ]);
    const flag = file === undefined ? `--groups ${kinds}` : `--config ${file}`;
    const { code, stdout } = await runKvPeer(`diff ${one.folder} ${other.folder} ${flag}`);
    expect(stdout).toMatch(/result .*rank 0, model\.layers\.0.* 1 of /);
    expect(code).toBe(1);
  });

  test("watch refuses to guess too", async () => {
    const { prefill, transport, sideChannel } = await open();
    const canary = { prompt, outputTokens: 1, pairs: [{ prefill, decode: undefined }] };
    const secondRound = async (groups?: GivenGroups) => {
      const clock = systemClock();
      const watch = new Watch({ ...canary, transport, sideChannel, groups, clock });
      await watch.round();
      return (await watch.round()).findings;
    };
    expect(await secondRound()).toMatchObject([
      { id: "watch.canary-failed", found: expect.stringMatching(/KV_CONFIG_INVALID/) },
    ]);
    expect(await secondRound(await given())).toEqual([]);
  });
});

test.each<[string, KvCacheKind[] | string, RegExp]>([
  ["too few kinds", ["full"], /names 1 kinds \(full\), and the engine has 2/],
  [
    "no state",
    ["full", "swa"],
    /names no group of states, and the engine announces states of 1000 \+ 2000/,
  ],
  [
    "the config.json of a model with more groups",
    model("jamba-1.5-mini"),
    /jamba-1\.5-mini\.json names 8 kinds .* the engine has 2 KV cache groups/,
  ],
  [
    "the config.json of a model without states",
    model("gpt-oss-20b"),
    /\(swa,full\) names no group of states/,
  ],
])("field.md P3: %s: refused with both values", async (_, given, message) => {
  const { change, blocks } = HYBRID;
  const pair = await recordedPair("0.33 pull", { length: LENGTH, change, blocks });
  const groups = typeof given === "string" ? await groupsOfConfig(given) : given;
  await expect(recordP(pair, groups)).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: expect.stringMatching(message),
  });
});

test("field.md P3: kinds from two sources are refused by name", async () => {
  const { change, blocks, file } = HYBRID;
  const pair = await recordedPair("0.33 pull", { length: LENGTH, change, blocks });
  const { stderr } = await runKvPeer(
    `diff ${pair.folder} ${pair.folder} --config ${file} --groups full,mamba`,
  );
  expect(stderr).toMatch(/--config .* and --groups full,mamba are both given/);
});

test.each([
  ["vLLM's order", [0, 1, 0, 1], undefined],
  [
    "another order",
    [1, 0, 1, 0],
    /model\.layers\.0\.attn\.attn is in KV cache group 1 of the engine, and in group 0 by/,
  ],
])("field.md P3: the groups of a config.json in %s", async (_, regionGroupIds, refused) => {
  const change = { regionGroupIds, ...layers("attn.attn") };
  const pair = await recordedPair("0.33 pull", { length: LENGTH, blocks: [3, 4], change });
  const made = recordP(pair, await groupsOfConfig(model("gpt-oss-20b")));
  if (refused === undefined) expect((await made).groups).toEqual(["swa", "full"]);
  else await expect(made).rejects.toThrow(refused);
});

test("field.md P3: a recording of states or of several groups is not pushed on a guess", async () => {
  const push = (engine: Omit<Parameters<typeof recordedPair>[1], "length">) =>
    recordedPair("0.32 push", { length: LENGTH, ...engine });
  const { change, blocks } = HYBRID;
  await expect(push({ change, blocks })).rejects.toMatchObject({ code: "KV_PLAN_UNSUPPORTED" });
  await expect(push(WINDOWS)).rejects.toMatchObject({ code: "KV_CONFIG_INVALID" });
  await push({ ...WINDOWS, groups: ["full", "swa"] });
});
