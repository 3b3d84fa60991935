import type { SideChannel } from "@kv/interface";
import type { PairReport } from "@kv/kv-plan";
import {
  decodeHandshakeRequest,
  encodeAgentMetadata,
  encodeHandshakePayload,
  encodeHandshakeReply,
} from "@kv/protocol";
import { zmqSideChannel } from "@kv/side-channel";
import { afterAll, beforeAll, expect, test } from "vitest";
import { runKvPeer } from "../../test/run-kv-peer.js";
import { METADATA } from "../../test/sample-recording.js";

const asked: { ppRank: number; tpRank: number }[] = [];
let channel: SideChannel;
let [prefill, decode] = ["", ""];

/** An engine of 8 KV heads with two layers. */
async function serve(tpSize: number): Promise<string> {
  const blockBytes = Array(2).fill((8 / tpSize) * 16 * 256);
  const agentMetadataBytes = encodeAgentMetadata({
    ...METADATA,
    engineId: `engine-of-${tpSize}`,
    baseAddresses: [2 ** 33, 2 ** 34],
    numBlocks: 400,
    regionNumBlocks: [400, 400],
    regionGroupIds: [0, 0],
    blockLengthsBytes: blockBytes,
    blockStridesBytes: blockBytes,
    blockSize: 16,
    attentionBackend: "FLASH_ATTN",
    regionNames: ["model.layers.0", "model.layers.1"],
    regionMemoryTypes: ["VRAM", "VRAM"],
  });
  const payload = { compatibilityHash: "ab".repeat(32), agentMetadataBytes, rest: {} };
  const { port } = await channel.listen({
    host: "127.0.0.1",
    port: 0,
    answer(frames) {
      asked.push(decodeHandshakeRequest(frames));
      return encodeHandshakeReply(encodeHandshakePayload(payload), 1);
    },
  });
  return `127.0.0.1:${port}`;
}

beforeAll(async () => {
  channel = zmqSideChannel();
  [prefill, decode] = [await serve(8), await serve(4)];
});
afterAll(() => channel.close());

test("plans from the metadata of rank (0, 0) of two running engines, and requests nothing else", async () => {
  const { code, stdout } = await runKvPeer(
    `plan --from ${prefill} --tp 8 --from ${decode} --tp 4 --kv-heads 8 --tokens 160 --json`,
  );
  expect(code).toBe(0);
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

test("the error names an engine that does not answer", async () => {
  const free = await channel.listen({ host: "127.0.0.1", port: 0, answer: () => undefined });
  await free.close();
  const from = `--from 127.0.0.1:${free.port} --from ${decode}`;
  const { stderr } = await runKvPeer(`plan ${from} --tp 4 --kv-heads 8 --timeout 20000`);
  expect(stderr).toMatch(
    new RegExp(`127.0.0.1:${free.port} cannot be reached.*KV_SIDE_CHANNEL_UNREACHABLE`),
  );
});

test("prints the reason and exits with 1 for a pair without a plan", async () => {
  // The second engine runs TP 4. TP 3 is invalid, because neither of TP 8 and TP 3 divides the
  // other.
  const { code, stdout } = await runKvPeer(
    `plan --from ${prefill} --tp 8 --from ${decode} --tp 3 --kv-heads 8`,
  );
  expect(code).toBe(1);
  expect(stdout).toMatch(/^refused: .*KV_TOPOLOGY_INVALID/m);
});

test.each([
  ["one engine", "--from localhost:5600 --tp 1", /--from is given 1 times, expected twice/],
  ["an address without a port", "--from x --tp 1", /host:port/],
  ["no TP size", "--from x:1 --from y:1", /required option '--tp/],
  ["three TP sizes", "--from x:1 --from y:1 --tp 1,2,4 --kv-heads 1", /--tp is given 3 times/],
  ["more ranks than a plan may have", "--from x:1 --tp 1025", /from 1 to 1024/],
  ["no KV heads", "--from x:1 --from y:1 --tp 1", /--kv-heads is missing/],
  ["an unknown kind", "--from x:1 --groups ring", /must be one of full, /],
])("refuses %s", async (_what, args, message) => {
  const { code, stderr } = await runKvPeer(`plan ${args}`);
  expect(stderr).toMatch(message);
  expect(code).toBe(2);
});
