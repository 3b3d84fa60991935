import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { groupsOfConfig } from "@kv/kv-plan";
import type { AgentMetadata } from "@kv/protocol";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { diffRecordings } from "../../src/recording/diff.js";
import { record } from "../../src/recording/record.js";
import { openRecording } from "../../src/recording/recording.js";
import { runKvPeer } from "../run-kv-peer.js";
import { type Pair, recordedPair } from "./pairs.js";

// The kinds of a remote engine's KV cache groups, from its model's config.json.

const model = (name: string) =>
  fileURLToPath(new URL(`../../../kv-plan/models/${name}.json`, import.meta.url));
/** Three blocks of 32 tokens, and four tokens of a fourth. */
const LENGTH = 100;
const BLOCK = 32_768;
const prompt = Array.from({ length: LENGTH }, (_, at) => at + 1);
const shared = { regionGroupIds: [-1, -1, -1, -1] };

/**
 * What the handshake says, the blocks of each group, and the last byte of the first region's first
 * group or state that a prompt determines.
 */
const ENGINES: Readonly<
  Record<
    string,
    { file: string; change: Partial<AgentMetadata>; blocks: number[]; kinds: string; last: number }
  >
> = {
  hybrid: {
    file: model("falcon-h1-0.5b"),
    change: {
      ...shared,
      ssmSizes: [1000, 2000],
      regionNames: [0, 1, 2, 3].map((at) => `model.layers.${at}.attn`),
    },
    blocks: [4, 1],
    kinds: "full,mamba",
    last: 4 * BLOCK + 2999,
  },
  "MLA with windows": {
    file: model("deepseek-v4-flash"),
    change: {
      ...shared,
      attentionBackend: "FLASHMLA",
      regionNames: [0, 1, 3, 4].map((at) => `model.layers.${at}.attn.swa_cache`),
    },
    blocks: [3, 3, 4, 3, 3],
    kinds: "swa-mla,swa-mla,mla,swa-mla,swa-mla",
    last: 2 * BLOCK - 1,
  },
};

let pair: (Pair & { readonly folder: string }) | undefined;
let folder = "";
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), "kv-peer-config-"));
});
afterEach(async () => {
  await pair?.close();
  pair = undefined;
  rmSync(folder, { recursive: true, force: true });
});

describe.each(Object.entries(ENGINES))("field.md P3: %s, by its config.json", (_, engine) => {
  const { file, change, blocks, kinds, last } = engine;
  const recordTo = async (name: string, damagedAt?: number) => {
    pair = await recordedPair("0.33 pull", {
      length: LENGTH,
      change,
      blocks,
      damage: (kv) => {
        if (damagedAt !== undefined) kv[damagedAt] = (kv[damagedAt] ?? 0) ^ 1;
      },
    });
    const { prefill, transport, sideChannel } = pair;
    const path = join(folder, name);
    await record({
      folder: path,
      prefill,
      transport,
      sideChannel,
      prompts: [prompt],
      groups: await groupsOfConfig(file),
    });
    const served = await openRecording(pair.folder);
    const first = served.manifest.prompts[0] as never;
    const kv = await served.kv(first);
    await pair.close();
    pair = undefined;
    return { path, kv, made: await openRecording(path) };
  };

  test("is recorded byte for byte with its kinds, and compared up to the last byte that a prompt determines", async () => {
    const [one, same, other] = [
      await recordTo("one"),
      await recordTo("same", last + 1),
      await recordTo("other", last),
    ];
    expect(one.made.manifest.groups?.join()).toBe(kinds);
    const kv = await one.made.kv(one.made.manifest.prompts[0] as never);
    expect(Buffer.compare(kv, one.kv)).toBe(0);
    const results = async (compared: typeof one) =>
      (await diffRecordings(one.made, compared.made)).filter(({ kind }) => kind === "result");
    expect(await results(same)).toEqual([]);
    expect(await results(other)).toMatchObject([{ one: expect.stringMatching(/^1 of /) }]);
    const { code, stdout } = await runKvPeer("diff", one.path, other.path, "--config", file);
    expect(stdout).toMatch(/result .*rank 0, model\.layers\.0.* 1 of /);
    expect(code).toBe(1);
  });
});

test("field.md P3: the config.json of another model, groups in another order, and two sources are refused by name", async () => {
  const { change, blocks, file } = ENGINES["hybrid"] as NonNullable<(typeof ENGINES)[string]>;
  pair = await recordedPair("0.33 pull", { length: LENGTH, change, blocks });
  const { prefill, transport, sideChannel } = pair;
  const recorded = async (from: string) =>
    record({
      folder,
      prefill,
      transport,
      sideChannel,
      prompts: [prompt],
      groups: await groupsOfConfig(from),
    });
  await expect(recorded(model("jamba-1.5-mini"))).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: expect.stringMatching(
      /jamba-1\.5-mini\.json names 8 kinds .* the engine has 2 KV cache groups/,
    ),
  });
  await expect(recorded(model("gpt-oss-20b"))).rejects.toMatchObject({
    message: expect.stringMatching(/\(swa,full\) names no group of states/),
  });
  const both = await runKvPeer(
    "diff",
    pair.folder,
    pair.folder,
    "--config",
    file,
    "--groups",
    "full,mamba",
  );
  expect(both.stderr).toMatch(/--config .* and --groups full,mamba are both given/);
  await pair.close();
  const [window, layers] = [
    model("gpt-oss-20b"),
    [0, 1, 2, 3].map((at) => `model.layers.${at}.attn.attn`),
  ];
  // vLLM's order of the groups, then the other one.
  for (const [regionGroupIds, refused] of [
    [[0, 1, 0, 1], undefined],
    [
      [1, 0, 1, 0],
      /model\.layers\.0\.attn\.attn is in KV cache group 1 of the engine, and in group 0 by/,
    ],
  ] as const) {
    pair = await recordedPair("0.33 pull", {
      length: LENGTH,
      blocks: [3, 4],
      change: { regionGroupIds, regionNames: layers },
    });
    const { prefill, transport, sideChannel } = pair;
    const groups = await groupsOfConfig(window);
    const made = record({ folder, prefill, transport, sideChannel, prompts: [prompt], groups });
    if (refused === undefined) expect((await made).groups).toEqual(["swa", "full"]);
    else await expect(made).rejects.toThrow(refused);
    await pair.close();
  }
});
