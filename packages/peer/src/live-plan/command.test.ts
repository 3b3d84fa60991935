import { KvError, type SideChannel } from "@kv/interface";
import type { PairReport } from "@kv/kv-plan";
import {
  decodeHandshakeRequest,
  encodeAgentMetadata,
  encodeHandshakePayload,
  encodeHandshakeReply,
} from "@kv/protocol";
import { zmqSideChannel } from "@kv/side-channel";
import { Command } from "commander";
import { afterAll, afterEach, beforeAll, expect, test, vi } from "vitest";
import { addPlan } from "./command.js";

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
afterEach(() => {
  process.exitCode = undefined;
});

/** `kv-peer plan` in this process: what it prints, and its exit code. */
async function kvPeerPlan(
  ...args: string[]
): Promise<{ readonly code: number; readonly stdout: string }> {
  let stdout = "";
  const write = vi.spyOn(process.stdout, "write").mockImplementation((text) => {
    stdout += String(text);
    return true;
  });
  try {
    const program = new Command("kv-peer").exitOverride().configureOutput({ writeErr: () => {} });
    addPlan(program);
    await program.parseAsync(["plan", ...args], { from: "user" });
  } finally {
    write.mockRestore();
  }
  return { code: Number(process.exitCode ?? 0), stdout };
}

async function refusal(...args: string[]): Promise<string> {
  try {
    await kvPeerPlan(...args);
  } catch (error) {
    if (KvError.is(error)) return `${error.message} [${error.code}]`;
    if (error instanceof Error) return error.message;
  }
  return expect.fail("nothing was refused");
}

test("plans from the metadata of rank (0, 0) of two running engines, and requests nothing else", async () => {
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
  const { code, stdout } = await kvPeerPlan(
    ...from,
    "--kv-heads",
    "8",
    "--tokens",
    "160",
    "--json",
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
  expect(await refusal(...from, "--timeout", "20000")).toMatch(
    new RegExp(`127.0.0.1:${free.port} cannot be reached.*KV_SIDE_CHANNEL_UNREACHABLE`),
  );
});

test("prints the reason and exits with 1 for a pair without a plan", async () => {
  const address = `127.0.0.1:${prefillPort}`;
  // The second engine runs TP 4. TP 3 is invalid, because neither of TP 8 and TP 3 divides the
  // other.
  const { code, stdout } = await kvPeerPlan(
    "--from",
    address,
    "--tp",
    "8",
    "--from",
    `127.0.0.1:${decodePort}`,
    "--tp",
    "3",
    "--kv-heads",
    "8",
  );
  expect(code).toBe(1);
  expect(stdout).toMatch(/^refused: .*KV_TOPOLOGY_INVALID/m);
});

test.each<[string, string[], RegExp]>([
  [
    "one engine",
    ["--from", "localhost:5600", "--tp", "1"],
    /--from is given 1 times, expected twice/,
  ],
  ["an address without a port", ["--from", "x", "--tp", "1"], /host:port/],
  ["no TP size", ["--from", "x:1", "--from", "y:1"], /required option '--tp/],
  [
    "three TP sizes",
    ["--from", "x:1", "--from", "y:1", "--tp", "1,2,4", "--kv-heads", "1"],
    /--tp is given 3 times/,
  ],
  ["more ranks than a plan may have", ["--from", "x:1", "--tp", "1025"], /from 1 to 1024/],
  ["no KV heads", ["--from", "x:1", "--from", "y:1", "--tp", "1"], /--kv-heads is missing/],
  ["an unknown kind", ["--from", "x:1", "--groups", "ring"], /must be one of full, /],
])("refuses %s", async (_what, args, message) => {
  expect(await refusal(...args)).toMatch(message);
});
