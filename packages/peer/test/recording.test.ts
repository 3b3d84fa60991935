import {
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { systemRandom } from "@kv/interface";
import { startUpstream } from "@kv/testing/http/fake-upstream";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, onTestFinished, test, vi } from "vitest";
import { openHeadlessDecode } from "../src/headless/headless-decode.js";
import { matchingSettings } from "../src/headless/matching-decode.js";
import { EngineServer } from "../src/http/engine-server.js";
import {
  decodeRequestId,
  readRankMetadata,
  readRemotePrefill,
} from "../src/protocol/remote-engine.js";
import { diffRecordings } from "../src/recording/diff.js";
import { record } from "../src/recording/record.js";
import { openRecording } from "../src/recording/recording.js";
import { kvOf, sampleRecording, tokensOf } from "./sample-recording.js";
import { serveSample } from "./served.js";

const emptyFolder = () => scratchFolder(onTestFinished);

async function sample(
  lengths: readonly number[],
  change?: (bytes: Uint8Array) => void,
): Promise<string> {
  const folder = await sampleRecording(lengths, change);
  onTestFinished(() => rmSync(folder, { recursive: true, force: true }));
  return folder;
}

test("recording a server that serves a recording gives the same recording", async () => {
  const served = await serveSample({ lengths: [100, 40] });
  const folder = emptyFolder();
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

test("first-contact.md 1: recording leaves no request at D, or at P when D fails or the groups are wrong", async () => {
  const served = await serveSample({ lengths: [100] });
  const other = await serveSample({ network: served.network });
  const { server: prefill, transport, sideChannel } = served;
  const recordTo = (options: Partial<Parameters<typeof record>[0]>) => {
    return record({
      folder: emptyFolder(),
      prefill,
      transport,
      sideChannel,
      prompts: [tokensOf(100)],
      ...options,
    });
  };
  const { server: decode } = other;
  class Deaf extends EngineServer {
    override decode = () => Promise.reject(new Error("D is gone"));
  }
  class Reading extends EngineServer {
    override decode = async () => {
      stop.abort();
      return [];
    };
  }
  const stop = new AbortController();
  await expect(recordTo({ decode: new Deaf(decode.url) })).rejects.toThrow("D is gone");
  await vi.waitFor(() => expect(served.prefill.blocks.used).toBe(0));
  await expect(recordTo({ groups: ["full", "mamba"] })).rejects.toThrow();
  await vi.waitFor(() => expect(served.prefill.blocks.used).toBe(0));

  const reading = new Reading(decode.url);
  const interrupted = recordTo({ decode: reading, signal: stop.signal });
  await expect(interrupted).rejects.toMatchObject({ code: "KV_REQUEST_ABORTED" });
  expect(other.prefill.blocks.used).toBe(0);
  const { decode: recorded } = await recordTo({ decode: reading });
  expect(recorded?.ranks).toHaveLength(1);
  await vi.waitFor(() => expect(other.prefill.blocks.used).toBe(0));
});

test("a server that cannot be reached leaves no recording behind", async () => {
  const served = await serveSample();
  const { transport, sideChannel } = served;
  const folder = emptyFolder();
  const prefill = new EngineServer("http://127.0.0.1:1");
  const made = record({ folder, prefill, transport, sideChannel, prompts: [tokensOf(100)] });
  await expect(made).rejects.toThrow(/127\.0\.0\.1:1/);
  expect(readdirSync(folder)).toEqual([]);
});

test("a recording of one rank is pushed to two ranks: each gets its heads", async () => {
  const served = await serveSample({ lengths: [100], factors: { transfer_mode: "push" } });
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
  const other = await startUpstream(({ response }) => void response.end("{}"));
  const target = `${other.url}/version`;
  const server = await startUpstream(({ response }) => {
    response.writeHead(307, { location: target }).end();
  });
  try {
    const redirected = new EngineServer(server.url).version();
    await expect(redirected).rejects.toThrow(`a redirect to "${target}"`);
    expect(other.seen).toEqual([]);
  } finally {
    await server.close();
    await other.close();
  }
});
