import { type Span, systemClock } from "@kv/interface";
import { decodeAgentMetadata, decodeHandshakeReply, encodeHandshakeRequest } from "@kv/protocol";
import { memoryNetwork, memorySideChannel } from "@kv/transport-memory";
import { afterAll, beforeAll, describe, expect, it, vi } from "vitest";
import type { Instance } from "../src/instance/instance.js";
import type { InstanceConfigInput } from "../src/instance/instance-config.js";
import type { KvRecord } from "../src/instance/kv-journal.js";
import { post as postTo, startInMemory } from "./support/memory-pair.js";

// Each setting of an instance changes what its clients, its peers or its operator see.

const started: Instance[] = [];
afterAll(async () => {
  for (const each of started) await each.close();
});

/** An instance; how many prompts or chunks of them it has computed, and its timers. */
async function start(settings: Partial<InstanceConfigInput>, network = memoryNetwork()) {
  const host = settings.sideChannelHost ?? "127.0.0.1";
  const sideChannel = memorySideChannel({ network, host });
  let chunks = 0;
  const timersMs: number[] = [];
  const span: Span = { traceparent: "", set() {}, event() {}, end() {} };
  const clock = systemClock();
  const instance = await startInMemory(
    host,
    {
      role: "both",
      kvTransferConfig: { kv_connector: "NixlConnector", kv_role: "kv_both" },
      ...settings,
    },
    network,
    {
      clock: {
        now: clock.now,
        setTimer(run, delayMs, options) {
          timersMs.push(delayMs);
          return clock.setTimer(run, delayMs, options);
        },
      },
      tracer: {
        start(name) {
          if (name === "kv_engine.compute_prompt") chunks += 1;
          return span;
        },
      },
    },
  );
  started.push(instance);
  return { instance, sideChannel, chunks: () => chunks, timersMs };
}
type Started = Awaited<ReturnType<typeof start>>;

let serial = 0;
/** A prompt that no other test sends. */
const prompt = (length: number) => {
  serial += 1;
  return Array.from({ length }, (_, i) => 10 + ((serial * 37 + i * i) % 200));
};

const post = ({ instance }: Started, body: object, headers?: Readonly<Record<string, string>>) =>
  postTo(instance.url, { max_tokens: 1, ...body }, headers);

/** Computes a prompt for a peer: the ids of its blocks, and the record of it. */
async function prefill(of: Started, length: number) {
  const { status, body } = await post(of, {
    prompt: prompt(length),
    kv_transfer_params: { do_remote_decode: true },
  });
  const records = (of.instance.kvTransfers() as { records: readonly KvRecord[] }).records;
  const [ids = []] = (body.kv_transfer_params?.remote_block_ids ?? []) as number[][];
  return { status, ids, record: records.at(-1), error: body.error };
}

/** What a peer's handshake with the last rank shows. */
async function told({ instance, sideChannel }: Started) {
  const { host, port } = instance.sideChannel ?? { host: "", port: 0 };
  const { tp } = instance.status() as { tp: number };
  const frames = [encodeHandshakeRequest({ ppRank: 0, tpRank: tp - 1 })];
  const { payload } = decodeHandshakeReply(
    (await sideChannel.request({ host, port, frames, timeoutMs: 5000 })).frames,
  );
  return {
    ...decodeAgentMetadata(payload.agentMetadataBytes),
    factors: payload.extension?.factors,
  };
}
const factor = (name: string) => async (of: Started) =>
  ((await told(of)).factors as Readonly<Record<string, unknown>>)[name];

/** The most requests that run at the same time, of four. */
async function atOnce({ instance }: Started): Promise<number> {
  const [engine] = instance.engines;
  let most = 0;
  const onToken = () => {
    most = Math.max(most, engine?.requestCounts().running ?? 0);
  };
  const ask = (n: number) => {
    const promptTokens = prompt(3);
    return engine?.submit({
      requestId: `r${n} ${serial}`,
      promptTokens,
      maxTokens: 4,
      ignoreEos: true,
      onToken,
    }).done;
  };
  await Promise.all([1, 2, 3, 4].map(ask));
  return most;
}

async function chunksOf100Tokens(of: Started): Promise<number> {
  const before = of.chunks();
  await post(of, { prompt: prompt(100) });
  return of.chunks() - before;
}

async function cachedOnRepeat({ instance }: Started): Promise<number | undefined> {
  const promptTokens = prompt(70);
  const [engine] = instance.engines;
  const ask = (requestId: string) =>
    engine?.submit({ requestId, promptTokens, maxTokens: 1, ignoreEos: true }).done;
  await ask(`first ${serial}`);
  return (await ask(`again ${serial}`))?.cachedTokens;
}

async function areNeighbours(of: Started): Promise<boolean> {
  const { ids } = await prefill(of, 130);
  expect(ids.length).toBeGreaterThan(2);
  return ids.every((id, i) => i === 0 || id === (ids[i - 1] ?? 0) + 1);
}

/** The message of the error for a decode request whose P is not there. */
async function shownFailure(of: Started): Promise<string | undefined> {
  const { body } = await post(of, {
    prompt: prompt(40),
    kv_transfer_params: {
      do_remote_prefill: true,
      do_remote_decode: false,
      remote_engine_id: "p",
      remote_host: "nowhere",
      remote_port: 1,
      remote_request_id: "r",
      remote_block_ids: [[1, 2, 3]],
      tp_size: 1,
    },
  });
  return body.error?.message;
}

const connectorLabels = ({ instance }: Started) => [
  ...new Set(
    Array.from(
      instance.metrics().matchAll(/^vllm:nixl_\w+\{.*?engine="(\d)"/gm),
      ([, engine]) => engine,
    ),
  ),
];
const status = (name: string) => async (of: Started) =>
  (of.instance.status() as Readonly<Record<string, unknown>>)[name];

const CHANGED: Partial<InstanceConfigInput> = {
  role: "decode",
  name: "changed",
  host: "localhost",
  servedModelName: "served",
  tinyKvHeads: 2,
  tp: 2,
  dp: 2,
  blockSize: 32,
  numBlocks: 40,
  maxNumSeqs: 3,
  maxNumBatchedTokens: 48,
  maxModelLen: 300,
  prefixCaching: false,
  attentionBackend: "OURS",
  sideChannelHost: "changed-host",
  sideChannelPort: 5700,
  compat: {
    model: "meta/llama",
    vllmVersion: "0.32.0",
    connectorVersion: 14,
    isHmaEnabled: false,
    attentionBackend: "CPU_ATTN",
  },
  digests: true,
  httpLimits: { maxBodyBytes: 3000 },
  exposeErrors: true,
  debug: true,
  fragmented: true,
  kvTransferConfig: { kv_connector: "NixlConnector", kv_role: "kv_both", engine_id: "own" },
};

describe("an instance with its defaults, and one with other settings", () => {
  let usual: Started;
  let changed: Started;
  beforeAll(async () => {
    vi.stubEnv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5650");
    usual = await start({});
    changed = await start(CHANGED);
    vi.unstubAllEnvs();
  });

  const uuid = expect.stringMatching(/^[0-9a-f-]{36}$/) as string;
  const hidden = "the request failed on this instance";
  it.each<[string, (of: Started) => unknown, usual: unknown, changed: unknown]>([
    ["fragmented", areNeighbours, true, false],
    ["role", status("role"), "both", "decode"],
    ["name", status("name"), null, "changed"],
    ["host", ({ instance }) => new URL(instance.url).hostname, "127.0.0.1", "localhost"],
    ["servedModelName", ({ instance }) => instance.modelNames[0], "tiny-qwen3", "served"],
    ["maxModelLen", ({ instance }) => instance.maxModelLen, 2048, 300],
    [
      "numBlocks and blockSize, as max_tokens",
      ({ instance }) => instance.maxOutputTokens,
      511 * 16,
      39 * 32,
    ],
    ["blockSize", async (of) => (await told(of)).blockSize, 16, 32],
    ["numBlocks", async (of) => (await told(of)).numBlocks, 512, 40],
    ["attentionBackend", async (of) => (await told(of)).attentionBackend, "PLAIN", "OURS"],
    ["engine_id and dp", async (of) => (await told(of)).engineId, uuid, "own_dp0"],
    ["tinyKvHeads", factor("num_kv_heads"), 4, 2],
    ["compat.model", factor("model"), "tiny-qwen3", "meta/llama"],
    ["compat.vllmVersion", factor("vllm_version"), "0.33.0", "0.32.0"],
    ["compat.connectorVersion", factor("nixl_connector_version"), 15, 14],
    ["compat.isHmaEnabled", factor("is_hma_enabled"), true, false],
    ["compat.attentionBackend", factor("attn_backend_name"), "PLAIN", "CPU_ATTN"],
    [
      "sideChannelPort, after the variable",
      ({ instance }) => instance.sideChannel?.port,
      5650,
      5700,
    ],
    ["sideChannelHost", ({ instance }) => instance.sideChannel?.host, "127.0.0.1", "changed-host"],
    ["dp, as a label of metrics", connectorLabels, ["0"], ["0", "1"]],
    ["maxNumSeqs", atOnce, 4, 3],
    ["maxNumBatchedTokens", chunksOf100Tokens, 1, 3],
    ["prefixCaching", cachedOnRepeat, 64, 0],
    ["digests", async (of) => (await prefill(of, 40)).record?.digests.length, 0, 3],
    [
      "debug",
      async (of) => (await post(of, { prompt: prompt(3), demo_zero_block: 0 })).status,
      400,
      200,
    ],
    [
      "httpLimits",
      async (of) => (await post(of, { prompt: [3], user: "x".repeat(4000) })).status,
      200,
      413,
    ],
    ["exposeErrors", shownFailure, hidden, expect.stringContaining("does not answer")],
  ])("%s", async (_, probe, ofUsual, ofChanged) => {
    expect(await probe(usual)).toEqual(ofUsual);
    expect(await probe(changed)).toEqual(ofChanged);
  });

  it("port: one that another instance has is refused", async () => {
    const { port } = usual.instance;
    await expect(start({ port })).rejects.toThrow(
      `cannot listen on 127.0.0.1:${port} (EADDRINUSE)`,
    );
  });
});

it("simulate: peers see the layers, heads and sizes of the simulated model", async () => {
  const simulate = {
    forwardMsPer512Tokens: 0,
    layers: 3,
    kvHeads: 5,
    headDim: 16,
    maxModelLen: 100,
  };
  const simulated = await start({ simulate });
  const names = ["num_hidden_layers", "num_kv_heads", "head_size"];
  expect(await Promise.all(names.map((name) => factor(name)(simulated)))).toEqual([3, 5, 16]);
  expect(simulated.instance.maxModelLen).toBe(100);
});

describe("a Neuron device", () => {
  it.each<[string, Partial<InstanceConfigInput>]>([
    ["deviceLatencyMs", { deviceLatencyMs: 40 }],
    // 3 blocks of 16 tokens, 4 layers, 4 heads of 2 x 32 numbers of 4 bytes.
    ["deviceBytesPerMs", { deviceLatencyMs: 0, deviceBytesPerMs: (3 * 16 * 4 * 4 * 64 * 4) / 40 }],
  ])("%s: a copy takes that time", async (_, settings) => {
    const { record } = await prefill(await start({ platform: "neuron", ...settings }), 40);
    expect(record?.save_ms).toBeGreaterThanOrEqual(39);
  });

  it("stagingBlocks: a prompt that needs more of them is refused", async () => {
    const neuron = await start({ platform: "neuron", stagingBlocks: 4 });
    const ofTokens = async (length: number) => (await prefill(neuron, length)).status;
    expect([await ofTokens(40), await ofTokens(100)]).toEqual([200, 500]);
  });
});

it.each([
  [{}, 1],
  [{ push_layerwise: true }, 4],
])("with %j, the four layers of a prompt that is pushed take %i WRITEs", async (extra, writes) => {
  let posted = 0;
  const countWrite = () => {
    posted += 1;
    return false;
  };
  const network = memoryNetwork({
    faults: [{ fault: "delay", operation: "WRITE", where: countWrite }],
  });
  const kvTransferConfig = {
    kv_connector: "push",
    kv_role: "kv_both",
    kv_connector_extra_config: extra,
  };
  const [p, d] = await Promise.all(
    ["p", "d"].map((sideChannelHost) => start({ sideChannelHost, kvTransferConfig }, network)),
  );
  if (p === undefined || d === undefined) throw new Error("no pair");
  const request = { prompt: prompt(40), max_tokens: 2 };
  const named = { "x-request-id": "one" };
  const { host, port } = p.instance.sideChannel ?? {};
  const received = post(
    d,
    {
      ...request,
      kv_transfer_params: {
        do_remote_prefill: true,
        remote_engine_id: p.instance.engineIds[0],
        remote_request_id: "one",
        remote_host: host,
        remote_port: port,
        tp_size: 1,
        transfer_mode: "push",
      },
    },
    named,
  );
  const waiting = () =>
    (p.instance.status() as { workers: { registrations: number }[] }).workers[0];
  await expect.poll(() => waiting()?.registrations).toBe(1);
  await post(
    p,
    { ...request, kv_transfer_params: { do_remote_decode: true, transfer_mode: "push" } },
    named,
  );
  expect((await received).status).toBe(200);
  expect(posted).toBe(writes);
  const { records } = p.instance.kvTransfers() as { readonly records: readonly KvRecord[] };
  const sent = () => records.find(({ direction }) => direction === "sent");
  await expect.poll(() => sent()?.transfer?.transfers).toBe(writes);
});

it("model: the directory of the checkpoint", async () => {
  await expect(start({ model: "/nowhere/model" })).rejects.toThrow("/nowhere/model");
});

it("graceMs: closing waits that long for blocks that a peer is to read", async () => {
  const draining = await start({ graceMs: 23 });
  await prefill(draining, 20);
  draining.timersMs.length = 0;
  await draining.instance.drain();
  expect(draining.timersMs).toContain(23);
});
