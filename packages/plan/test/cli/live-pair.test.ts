import {
  decodeHandshakeRequest,
  encodeAgentMetadata,
  encodeHandshakePayload,
  encodeHandshakeReply,
  zmqSideChannel,
} from "@kv/connector";
import { KvError, type SideChannel } from "@kv/interface";
import { afterAll, beforeAll, expect, test } from "vitest";
import { loadLiveClient } from "../../src/cli/input/live-pair.js";
import type { PairReport } from "../../src/cli/report/report.js";
import { captured } from "./captured-run.js";

const asked: { ppRank: number; tpRank: number }[] = [];
let channel: SideChannel;
let [prefillPort, decodePort] = [0, 0];

function metadata(tpSize: number, layout: "LBHNC" | "LBNHC") {
  const heads = 8 / tpSize;
  return encodeAgentMetadata({
    engineId: `engine-of-${tpSize}`,
    agentMetadata: Uint8Array.of(1),
    baseAddresses: [2 ** 33, 2 ** 34],
    deviceId: 0,
    numBlocks: 400,
    blockLengthsBytes: [heads * 16 * 256, heads * 16 * 256],
    blockStridesBytes: [heads * 16 * 256, heads * 16 * 256],
    kvCacheLayout: layout,
    blockSize: 16,
    ssmSizes: [0, 0],
    attentionBackend: "FLASH_ATTN",
    physicalBlocksPerLogical: 1,
    regionNames: ["model.layers.0", "model.layers.1"],
    regionMemoryTypes: ["VRAM", "VRAM"],
    dcpSize: 1,
    pcpSize: 1,
    pleBlockLengthBytes: null,
    regionMembers: [],
    packedMemberLayouts: {},
    rest: {},
  });
}

async function serve(tpSize: number, layout: "LBHNC" | "LBNHC"): Promise<number> {
  const listener = await channel.listen({
    host: "127.0.0.1",
    port: 0,
    answer(frames) {
      asked.push(decodeHandshakeRequest(frames));
      const payload = {
        compatibilityHash: "ab".repeat(32),
        agentMetadataBytes: metadata(tpSize, layout),
        rest: {},
      };
      return encodeHandshakeReply(encodeHandshakePayload(payload), 1);
    },
  });
  return listener.port;
}

beforeAll(async () => {
  channel = zmqSideChannel();
  prefillPort = await serve(8, "LBHNC");
  decodePort = await serve(4, "LBHNC");
});
afterAll(() => channel.close());

test("two live engines are asked for rank (0, 0) and nothing else", async () => {
  const from = [
    "--from",
    `127.0.0.1:${prefillPort}`,
    "--tp",
    "8",
    "--from",
    `127.0.0.1:${decodePort}`,
    "--tp",
    "4",
  ];
  const { code, stdout, stderr } = await captured(...from, "--kv-heads", "8", "--tokens", "160", "--json");
  expect([code, stderr]).toEqual([0, ""]);
  const report = JSON.parse(stdout) as PairReport;
  if (report.outcome !== "planned") return expect.fail(report.reason);
  expect(report.ranks.map((rank) => rank.reads.map((read) => read.prefillRank))).toEqual([
    [0, 1],
    [2, 3],
    [4, 5],
    [6, 7],
  ]);
  expect(report.request.lengthBytes).toBe(160 * 2 * 256 * 8);
  expect(report.proof.proven).toBe(true);
  expect(report.assumed.join("\n")).toMatch(/rank \(0, 0\).*\n.*hashes are equal/);
  expect(asked).toEqual([
    { ppRank: 0, tpRank: 0 },
    { ppRank: 0, tpRank: 0 },
  ]);
});

test("an engine that does not answer is named", async () => {
  const free = await channel.listen({ host: "127.0.0.1", port: 0, answer: () => undefined });
  await free.close();
  const from = [
    "--from",
    `127.0.0.1:${free.port}`,
    "--from",
    `127.0.0.1:${decodePort}`,
    "--tp",
    "4",
    "--kv-heads",
    "8",
  ];
  const { code, stderr } = await captured(...from, "--timeout", "20000");
  expect(code).toBe(1);
  expect(stderr).toMatch(new RegExp(`127.0.0.1:${free.port} cannot be reached.*KV_SIDE_CHANNEL_UNREACHABLE`));
});

test("without the package the command says how to get it", async () => {
  const load = () => Promise.reject(new Error("not found"));
  await expect(loadLiveClient(load)).rejects.toSatisfy(
    (error) => KvError.is(error) && error.hint === "npm install @kv/connector",
  );
});
