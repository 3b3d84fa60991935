import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { systemRandom } from "@kv/interface";
import { afterEach, expect, test } from "vitest";
import { decodeIdOf } from "../src/connector-for.js";
import { openHeadlessDecode } from "../src/decode/headless-decode.js";
import { handshakeOf } from "../src/decode/load.js";
import { mirrorOf } from "../src/decode/mirror.js";
import { readTold } from "../src/decode/pull-one.js";
import { diffRecordings } from "../src/recording/diff.js";
import { record } from "../src/recording/record.js";
import { openRecording } from "../src/recording/recording.js";
import { engineServer } from "../src/server/server.js";
import { kvOf, sampleRecording, tokensOf } from "./sample-recording.js";
import { type Served, serveSample } from "./served.js";

let served: Served | undefined;
const folders: string[] = [];
afterEach(async () => {
  await served?.close();
  served = undefined;
  for (const folder of folders.splice(0)) rmSync(folder, { recursive: true, force: true });
});

async function sample(lengths: readonly number[], change?: (bytes: Uint8Array) => void): Promise<string> {
  const folder = await sampleRecording(lengths, change);
  folders.push(folder);
  return folder;
}

test("a recording of a server that serves a recording is that recording", async () => {
  served = await serveSample({ lengths: [100, 40] });
  const folder = mkdtempSync(join(tmpdir(), "kv-peer-again-"));
  folders.push(folder);
  const { server: prefill, transport, sideChannel } = served;
  await record({ folder, prefill, transport, sideChannel, prompts: [tokensOf(100), tokensOf(40)] });
  const [one, again] = [await openRecording(served.folder), await openRecording(folder)];
  expect(Buffer.compare(await again.kv(again.manifest.prompts[0] as never), kvOf(0, 4))).toBe(0);
  const found = await diffRecordings(one, again);
  expect(found.filter(({ kind }) => kind !== "fact")).toEqual([
    // Said by our side and left out by a vLLM of that time, or the reverse.
    ...found.filter(({ where }) => /: (pp_size|dcp_size|remote_registration_generation)$/.test(where)),
  ]);
  expect(served.prefill.blocks.used).toBe(0);
});

test("a server that cannot be reached leaves nothing behind that looks like a recording", async () => {
  served = await serveSample();
  const { transport, sideChannel } = served;
  const folder = mkdtempSync(join(tmpdir(), "kv-peer-none-"));
  folders.push(folder);
  const prefill = engineServer("http://127.0.0.1:1");
  const made = record({ folder, prefill, transport, sideChannel, prompts: [tokensOf(100)] });
  await expect(made).rejects.toThrow(/127\.0\.0\.1:1/);
  expect(readdirSync(folder)).toEqual([]);
});

test("what was recorded of one rank is pushed to two: each has its heads", async () => {
  served = await serveSample({ lengths: [100], factors: { transfer_mode: "push" } });
  const { server, transport, sideChannel } = served;
  const params = await server.prefill(tokensOf(100));
  const { metadata, compatibilityHash: announcedHash } = await handshakeOf(readTold(params), sideChannel);
  const mirror = mirrorOf(metadata, readTold(params), { engineId: "two-ranks", numBlocks: 8 });
  const decode = await openHeadlessDecode({
    ...{ ...mirror, transport, sideChannel, announcedHash },
    engine: { ...mirror.engine, tpSize: 2 },
    cache: { ...mirror.cache, numKvHeads: 4 },
    regions: mirror.regions.map((region) => ({ ...region, blockLengthBytes: region.blockLengthBytes / 2 })),
  });
  try {
    const blockIds = [[5, 2, 7, 1]];
    const request = {
      requestId: decodeIdOf(readTold(params), systemRandom()),
      numPromptTokens: 100,
      kvTransferParams: params,
    };
    const { failure } = await decode.receive(request, blockIds);
    expect(failure).toBeUndefined();
    // Four blocks of 32 KiB in each of four regions; in each block the heads of rank 0, then those of rank 1.
    const sent = kvOf(0, 4);
    for (const [region] of mirror.regions.entries()) {
      for (const [at, id] of [5, 2, 7, 1].entries()) {
        const halves = [0, 1].map((tpRank) => decode.block(tpRank, region, id));
        const begin = (region * 4 + at) * 32_768;
        expect(Buffer.compare(Buffer.concat(halves), sent.subarray(begin, begin + 32_768))).toBe(0);
      }
    }
    decode.finish(request, blockIds);
  } finally {
    await decode.close();
  }
  expect(served.prefill.blocks.used).toBe(0);
});

test("a byte that differs is told with its region; one behind the prompt's last token is not", async () => {
  const one = await openRecording(await sample([100]));
  // 100 tokens fill three blocks of 32 KiB in each region; the fourth holds four of them.
  const inside = await openRecording(
    await sample([100], (bytes) => bytes.fill(0, 5 * 32_768 + 8, 5 * 32_768 + 9)),
  );
  const behind = await openRecording(
    await sample([100], (bytes) => bytes.fill(0, 3 * 32_768 + 8, 3 * 32_768 + 9)),
  );
  const found = await diffRecordings(one, inside);
  expect(found).toMatchObject([{ where: "prompt 0: rank 0, model.layers.1.self_attn.attn", kind: "result" }]);
  expect(found[0]?.one).toBe("1 of 98304 bytes differ");
  expect(await diffRecordings(one, behind)).toEqual([]);
});

test("KV that was changed on disk is refused, naming both digests", async () => {
  const folder = await sample([100]);
  const file = join(folder, "kv/prompt-0.bin");
  const bytes = readFileSync(file);
  bytes[7] = (bytes[7] ?? 0) ^ 1;
  writeFileSync(file, bytes);
  const recording = await openRecording(folder);
  await expect(recording.kv(recording.manifest.prompts[0] as never)).rejects.toThrow(
    /recorded were 524288 with/,
  );
});

test("a manifest that names a file outside of its folder is refused", async () => {
  const folder = await sample([40]);
  const file = join(folder, "manifest.json");
  writeFileSync(file, readFileSync(file, "utf8").replace("kv/prompt-0.bin", "../../etc/passwd"));
  await expect(openRecording(folder)).rejects.toThrow(/prompts\.0\.kv\.file/);
});
