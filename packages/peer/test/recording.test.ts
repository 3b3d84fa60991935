import { once } from "node:events";
import {
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
} from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { systemRandom } from "@kv/interface";
import { afterEach, expect, test } from "vitest";
import { openHeadlessDecode } from "../src/headless/headless-decode.js";
import { matchingSettings } from "../src/headless/matching-decode.js";
import { EngineServer } from "../src/http/engine-server.js";
import { readRankMetadata } from "../src/protocol/handshake.js";
import { decodeRequestId, readRemotePrefill } from "../src/protocol/remote-prefill.js";
import { diffRecordings } from "../src/recording/diff.js";
import { record } from "../src/recording/record.js";
import { openRecording } from "../src/recording/recording.js";
import { kvOf, sampleRecording, tokensOf } from "./sample-recording.js";
import { type Served, serveSample } from "./served.js";

let served: Served | undefined;
const folders: string[] = [];
afterEach(async () => {
  await served?.close();
  served = undefined;
  for (const folder of folders.splice(0)) rmSync(folder, { recursive: true, force: true });
});

async function sample(
  lengths: readonly number[],
  change?: (bytes: Uint8Array) => void,
): Promise<string> {
  const folder = await sampleRecording(lengths, change);
  folders.push(folder);
  return folder;
}

test("recording a server that serves a recording gives the same recording", async () => {
  served = await serveSample({ lengths: [100, 40] });
  const folder = mkdtempSync(join(tmpdir(), "kv-peer-again-"));
  folders.push(folder);
  const { server: prefill, transport, sideChannel } = served;
  await record({ folder, prefill, transport, sideChannel, prompts: [tokensOf(100), tokensOf(40)] });
  const [one, again] = [await openRecording(served.folder), await openRecording(folder)];
  expect(Buffer.compare(await again.kv(again.manifest.prompts[0] as never), kvOf(0, 4))).toBe(0);
  const found = await diffRecordings(one, again);
  expect(found.filter(({ kind }) => kind !== "fact")).toEqual([
    // Only this project or only the recorded version of vLLM announces these fields.
    ...found.filter(({ where }) =>
      /: (pp_size|dcp_size|remote_registration_generation)$/.test(where),
    ),
  ]);
  expect(served.prefill.blocks.used).toBe(0);
});

test("a server that cannot be reached leaves no recording behind", async () => {
  served = await serveSample();
  const { transport, sideChannel } = served;
  const folder = mkdtempSync(join(tmpdir(), "kv-peer-none-"));
  folders.push(folder);
  const prefill = new EngineServer("http://127.0.0.1:1");
  const made = record({ folder, prefill, transport, sideChannel, prompts: [tokensOf(100)] });
  await expect(made).rejects.toThrow(/127\.0\.0\.1:1/);
  expect(readdirSync(folder)).toEqual([]);
});

test("a recording of one rank is pushed to two ranks: each gets its heads", async () => {
  served = await serveSample({ lengths: [100], factors: { transfer_mode: "push" } });
  const { server, transport, sideChannel } = served;
  const params = await server.prefill(tokensOf(100));
  const remote = readRemotePrefill(params);
  const address = { host: remote.remoteHost, port: remote.remotePort };
  const { metadata, compatibilityHash: announcedHash } = await readRankMetadata(
    sideChannel,
    address,
  );
  const settings = matchingSettings(metadata, remote, { engineId: "two-ranks", numBlocks: 8 });
  const decode = await openHeadlessDecode({
    ...settings,
    transport,
    sideChannel,
    announcedHash,
    engine: { ...settings.engine, tpSize: 2 },
    cache: { ...settings.cache, numKvHeads: 4 },
    regions: settings.regions.map((region) => ({
      ...region,
      blockLengthBytes: region.blockLengthBytes / 2,
    })),
  });
  try {
    const blockIds = [[5, 2, 7, 1]];
    const request = {
      requestId: decodeRequestId(remote, systemRandom()),
      numPromptTokens: 100,
      kvTransferParams: params,
    };
    const { failure } = await decode.receive(request, blockIds);
    expect(failure).toBeUndefined();
    // Four blocks of 32 KiB in each of four regions; in each block the heads of rank 0, then those
    // of rank 1.
    const sent = kvOf(0, 4);
    for (const [region] of settings.regions.entries()) {
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

test("a different byte is reported with its region, unless it lies behind the prompt's last token", async () => {
  const one = await openRecording(await sample([100]));
  // 100 tokens fill three blocks of 32 KiB in each region; the fourth holds four of them.
  const inside = await openRecording(
    await sample([100], (bytes) => bytes.fill(0, 5 * 32_768 + 8, 5 * 32_768 + 9)),
  );
  const behind = await openRecording(
    await sample([100], (bytes) => bytes.fill(0, 3 * 32_768 + 8, 3 * 32_768 + 9)),
  );
  const found = await diffRecordings(one, inside);
  expect(found).toMatchObject([
    { where: "prompt 0: rank 0, model.layers.1.self_attn.attn", kind: "result" },
  ]);
  expect(found[0]?.one).toBe("1 of 98304 bytes differ");
  expect(await diffRecordings(one, behind)).toEqual([]);
});

test("KV that was changed on disk is refused with both digests", async () => {
  const folder = await sample([100]);
  const file = join(folder, "kv/prompt-0.bin");
  const bytes = readFileSync(file);
  bytes[7] = (bytes[7] ?? 0) ^ 1;
  writeFileSync(file, bytes);
  const recording = await openRecording(folder);
  await expect(recording.kv(recording.manifest.prompts[0] as never)).rejects.toThrow(
    /recorded were 524288 bytes with/,
  );
});

test("a manifest that names a file outside its folder is refused", async () => {
  const folder = await sample([40]);
  const file = join(folder, "manifest.json");
  writeFileSync(file, readFileSync(file, "utf8").replace("kv/prompt-0.bin", "../../etc/passwd"));
  await expect(openRecording(folder)).rejects.toThrow(/prompts\.0\.kv\.file/);
});

test("strain.md: a recording that links to /dev/zero, or has a larger file than a frame, is refused and not read", async () => {
  const folder = await sample([40]);
  const recording = await openRecording(folder);
  const frame = join(folder, "frames/p.pp0tp0.rep0.bin");
  rmSync(frame);
  symlinkSync("/dev/zero", frame);
  await expect(recording.handshakes(recording.manifest.prefill)).rejects.toThrow(
    /rep0\.bin is not a file/,
  );
  rmSync(frame);
  writeFileSync(frame, "");
  truncateSync(frame, 2 ** 30);
  await expect(recording.handshakes(recording.manifest.prefill)).rejects.toThrow(
    /1073741824 bytes; the limit is/,
  );
});

test("strain.md: a redirect of a server is an error that names where it leads, and nothing is sent there", async () => {
  let asked = 0;
  const other = createServer((_, response) => {
    asked += 1;
    response.end("{}");
  }).listen(0, "127.0.0.1");
  await once(other, "listening");
  const target = `http://127.0.0.1:${(other.address() as AddressInfo).port}/version`;
  const server = createServer((_, response) => response.writeHead(307, { location: target }).end());
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  try {
    const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
    await expect(new EngineServer(url).version()).rejects.toThrow(`a redirect to "${target}"`);
    expect(asked).toBe(0);
  } finally {
    server.close();
    other.close();
  }
});
