// A long suite: runs kv-peer with each older wire version; peers/ has the newest.
import { readFileSync } from "node:fs";
import type { SideChannelListener } from "@kv/interface";
import {
  decodeAgentMetadata,
  decodeHandshakeReply,
  encodeHandshakePayload,
  encodeMsgpack,
  NEWEST_VLLM_VERSION,
  VLLM_VERSIONS,
} from "@kv/protocol";
import { zmqSideChannel } from "@kv/side-channel";
import { someOf } from "@kv/testing/long-run";
import Fastify from "fastify";
import { afterAll, afterEach, expect, test } from "vitest";
import { pairDoctor } from "../src/doctor/pair-doctor.js";
import type { ServerFacts } from "../src/doctor/server-facts.js";
import { readTarget } from "../src/doctor/target.js";
import { serverVersion } from "../src/doctor/versions.js";
import { REPLY } from "./sample-recording.js";

// The doctor reads the handshakes that the Python code of older wheels made
// (protocol/fixtures/README.md), over real ZMQ.
const folder = new URL("../../protocol/fixtures/wire/versions/", import.meta.url);
const OLDER = VLLM_VERSIONS.filter(({ connectorVersion }) => connectorVersion < 14);
const framesOf = (version: string) =>
  ["rep0", "rep1"].map(
    (name) => new Uint8Array(readFileSync(new URL(`${version}.${name}.bin`, folder))),
  );

const sideChannel = zmqSideChannel();
const listeners: SideChannelListener[] = [];
afterEach(async () => {
  for (const listener of listeners.splice(0)) await listener.close();
});
afterAll(() => sideChannel.close());

async function serve(frames: readonly Uint8Array[]): Promise<string> {
  const listener = await sideChannel.listen({ host: "127.0.0.1", port: 0, answer: () => frames });
  listeners.push(listener);
  return `127.0.0.1:${listener.port}`;
}

const serveVersion = (version: string) => serve(framesOf(version));
const examinePair = async (p: string, d: string, more?: Parameters<typeof examine>[2]) =>
  examine(await serveVersion(p), await serveVersion(d), more);

async function examine(
  prefill: string,
  decode?: string,
  more: Partial<Parameters<typeof pairDoctor>[0]> = {},
) {
  const { checks } = await pairDoctor({
    prefill: readTarget(prefill),
    decode: decode === undefined ? undefined : readTarget(decode),
    sideChannel,
    factors: { model: "tiny-qwen3" },
    ...more,
  });
  return (id: string) => checks.find((check) => check.id === id);
}

test.each(someOf(OLDER, 3))(
  "$version: the handshake is read, its hash factors are found, and an upgrade is advised",
  async ({ version, connectorVersion, support }) => {
    const check = await examine(await serveVersion(version));
    expect(check("prefill.metadata")).toMatchObject({
      status: "ok",
      found: expect.stringContaining("4 regions of 64 blocks"),
    });
    expect(check("compatibility.prefill")?.details).toMatchObject({
      factors: JSON.parse(readFileSync(new URL(`${version}.json`, folder), "utf8")).factors,
    });
    const found = `vLLM ${version}, connector version ${connectorVersion}`;
    expect(check("versions.prefill")).toMatchObject(
      support === "transfers"
        ? { status: "ok", found }
        : {
            status: "warn",
            found: expect.stringContaining(`${found}: its handshake is read`),
            fix: `upgrade it to vLLM ${NEWEST_VLLM_VERSION.version}`,
          },
    );
  },
);

test("an older server and a new one: the check says which to upgrade and what changed", async () => {
  const check = await examinePair("0.28.0", "0.30.0");
  expect(check("versions.vllm")).toMatchObject({
    status: "fail",
    fix: "run one version on both sides: upgrade prefill to vLLM 0.30.0",
  });
  const found = check("versions.vllm")?.found ?? "";
  expect(found).toContain("0.28.0 at prefill and 0.30.0 at decode");
  expect(found).toContain("agent metadata gained block_strides, region_num_blocks");
  expect(found).toContain("compatibility hash lost cross_layers_blocks");
  expect(check("compatibility.pair")?.found).toContain(
    "cross_layers_blocks is false at prefill and no factor at decode",
  );
});

test("two servers of one older version pass the comparison of versions, and the order of the roles does not matter", async () => {
  expect((await examinePair("0.29.0", "0.29.0"))("versions.vllm")).toMatchObject({
    status: "ok",
    found: "0.29.0 on both",
  });
  expect((await examinePair("0.31.0", "0.29.0"))("versions.vllm")?.fix).toContain(
    "upgrade decode to vLLM 0.31.0",
  );
});

test("when the factors are not found, the fields of the metadata name the possible versions", async () => {
  const unknownModel = { factors: { model: "another" } };
  const check = await examinePair("0.27.1", "0.30.0", unknownModel);
  expect(check("compatibility.prefill")?.status).toBe("note");
  expect(check("versions.prefill")?.found).toContain(
    "vLLM 0.27.1 or 0.28.0 by the fields of its metadata",
  );
  expect(check("versions.vllm")?.fix).toContain("upgrade prefill to vLLM 0.30.0");
  // Both may be 0.28.0.
  const same = await examinePair("0.27.1", "0.28.0", unknownModel);
  expect(same("versions.vllm")).toBeUndefined();
});

/** The newest recorded handshake with other metadata fields. */
function changedFrames(change: (fields: Record<string, unknown>) => void): readonly Uint8Array[] {
  const { payload } = decodeHandshakeReply(REPLY);
  const metadata = decodeAgentMetadata(payload.agentMetadataBytes);
  const fields: Record<string, unknown> = {
    engine_id: metadata.engineId,
    agent_metadata: metadata.agentMetadata,
    kv_caches_base_addr: metadata.baseAddresses,
    device_id: metadata.deviceId,
    num_blocks: metadata.numBlocks,
    block_lens: metadata.blockLengthsBytes,
    kv_cache_layout: metadata.kvCacheLayout,
    block_size: metadata.blockSize,
    attn_backend_name: metadata.attentionBackend,
  };
  change(fields);
  return [
    encodeHandshakePayload({ ...payload, agentMetadataBytes: encodeMsgpack(fields) }),
    REPLY[1],
  ];
}

test("fields that no described version has are named, and the others are read", async () => {
  const frames = changedFrames((fields) => Object.assign(fields, { kv_scales: [1], rope: "x" }));
  const check = await examine(await serve(frames));
  expect(check("prefill.metadata")?.status).toBe("ok");
  expect(check("versions.prefill")).toMatchObject({
    status: "warn",
    found: expect.stringContaining("unknown fields: kv_scales, rope; the others are read by name"),
    fix: expect.stringContaining("kv-peer wire"),
  });
});

test("a field that cannot be done without is refused by name", async () => {
  const frames = changedFrames((fields) => {
    fields["block_bytes"] = fields["block_lens"];
    delete fields["block_lens"];
  });
  expect((await examine(await serve(frames)))("prefill.metadata")).toMatchObject({
    status: "fail",
    found: expect.stringContaining("block_lens is missing"),
    fix: expect.stringContaining("kv-peer wire"),
  });
});

test("a release that is not described is named from /version", async () => {
  const app = Fastify();
  app.get("/health", () => ({}));
  app.get("/version", () => ({ version: "0.99.0" }));
  const url = await app.listen({ host: "127.0.0.1", port: 0 });
  const [host = "", port] = (await serve(REPLY)).split(":");
  try {
    const check = await examine(url, undefined, {
      ask: false,
      sideChannels: { prefill: { host, port: Number(port) } },
    });
    expect(check("versions.prefill")).toMatchObject({
      status: "warn",
      found: "0.99.0 is not among the described versions",
      fix: "upgrade @kv/peer; kv-peer wire on the wheel of 0.99.0 lists what it changed",
    });
  } finally {
    await app.close();
  }
});

test("an engine with a name of its own speaks the wire of the vLLM in its hash", () => {
  const facts = { role: "prefill", vllmVersion: "our-engine" } as ServerFacts;
  const { vllm, described } = serverVersion(facts, { vllm_version: "0.33.0" });
  expect([vllm, described.map(({ version }) => version)]).toEqual(["0.33.0", ["0.33.0"]]);
  expect(serverVersion(facts, undefined)).toMatchObject({ vllm: "our-engine", described: [] });
});
