import { type Span, systemClock, type Tracer } from "@kv/interface";
import { decodeAgentMetadata, decodeHandshakeReply, encodeHandshakeRequest } from "@kv/protocol";
import { recordedLog } from "@kv/testing/recorded-log";
import { memoryNetwork, memorySideChannel } from "@kv/transport-memory";
import { afterAll, beforeAll, describe, expect, it, vi } from "vitest";
import type { Instance, InstanceOptions } from "../src/instance/instance.js";
import type { InstanceConfigInput } from "../src/instance/instance-config.js";
import type { KvRecord } from "../src/instance/kv-journal.js";
import { post as postTo, startInMemory } from "./support/memory-pair.js";

// Each setting of an instance changes what its clients, its peers or its operator see.

const started: Instance[] = [];
afterAll(async () => {
  for (const each of started) await each.close();
});

const SPAN: Span = { traceparent: "", set() {}, event() {}, end() {} };

/** An instance; how many prompts or chunks of them it has computed, and its timers. */
async function start(
  settings: Partial<InstanceConfigInput> = {},
  network = memoryNetwork(),
  ambient: Pick<Partial<InstanceOptions>, "log" | "tracer"> = {},
) {
  const host = settings.sideChannelHost ?? "127.0.0.1";
  const sideChannel = memorySideChannel({ network, host });
  let chunks = 0;
  const timersMs: number[] = [];
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
          return SPAN;
        },
      },
      ...ambient,
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

describe("max_model_len", () => {
  it.each([
    [{ maxModelLen: 48 }, 48],
    // A cache of 4 blocks, one of which is the null block.
    [{ numBlocks: 4 }, 48],
  ])(
    "with %o, a sequence of that length is served, and one more token is refused",
    async (settings, length) => {
      const of = await start(settings);
      expect(of.instance.maxModelLen).toBe(length);
      const given = prompt(length - 8);
      expect(await post(of, { prompt: given, max_tokens: 8 })).toMatchObject({
        status: 200,
        body: { usage: { completion_tokens: 8 } },
      });
      const refused = await post(of, { prompt: given, max_tokens: 9 });
      expect(refused.status).toBe(400);
      expect(refused.body.error?.message).toContain(
        `${length - 8} prompt tokens and max_tokens 9 are more than the ${length} of max_model_len`,
      );
    },
  );

  it("is refused when the model or the cache is smaller", async () => {
    await expect(start({ maxModelLen: 1e6 })).rejects.toThrow(
      /maxModelLen is 1000000, and the model has/,
    );
    await expect(start({ maxModelLen: 64, numBlocks: 4 })).rejects.toThrow(
      /the cache holds 48 tokens/,
    );
  });
});

describe("maxConcurrentBatches", () => {
  it("is the platform's limit, and more is refused", async () => {
    for (const [platform, most] of [
      ["cpu", 2],
      ["neuron", 1],
    ] as const) {
      const { settings } = (await start({ platform })).instance;
      expect(settings).toMatchObject({ maxConcurrentBatches: most });
    }
    await expect(start({ platform: "neuron", maxConcurrentBatches: 2 })).rejects.toThrow(
      "maxConcurrentBatches is 2, and platform neuron executes at most 1",
    );
  });

  const simulate = {
    forwardMsPer512Tokens: 5,
    layers: 1,
    kvHeads: 1,
    headDim: 16,
    maxModelLen: 1024,
  };
  it.each([
    ["the platform's limit of 2", {}, 2],
    ["a lower setting", { maxConcurrentBatches: 1 }, 1],
    ["a simulated model, which computes one after another", { simulate }, 1],
  ])(
    "the engine obeys %s: so many of 4 prompts are computed at the same time",
    async (_, settings, most) => {
      let computing = 0;
      let seen = 0;
      let begun = () => {};
      const tracer: Tracer = {
        start(name) {
          if (name !== "kv_engine.compute_prompt") return SPAN;
          computing += 1;
          seen = Math.max(seen, computing);
          begun();
          const end = () => {
            computing -= 1;
          };
          return { ...SPAN, end };
        },
      };
      const [engine] = (await start(settings, undefined, { tracer })).instance.engines;
      const outcomes: Promise<unknown>[] = [];
      for (let n = 0; n < 4; n++) {
        // Each next prompt comes when the one before begins: they are in batches of their own.
        const computed = new Promise<void>((resolve) => {
          begun = resolve;
        });
        const promptTokens = [n + 3, n + 4];
        outcomes.push(
          engine?.submit({ requestId: `r${n}`, promptTokens, maxTokens: 1 }).done ??
            Promise.reject(),
        );
        await computed;
      }
      await Promise.all(outcomes);
      expect(seen).toBe(most);
    },
  );
});

describe("what the platform cannot do", () => {
  it.each([
    [{ prefixCaching: true }, "prefixCaching is true: on trn1"],
    [{ maxNumSeqs: 2 }, "maxNumSeqs is 2: on trn1"],
  ])(
    "is refused at the start on Neuron, with the compiler's bug: %j",
    async (settings, message) => {
      const refused = start({ platform: "neuron", ...settings });
      await expect(refused).rejects.toMatchObject({
        code: "KV_PLATFORM_UNSUPPORTED",
        message: `${message} the Neuron compiler fails on its graphs (NCC_ITEN404, aws-neuron-sdk #1304)`,
      });
    },
  );

  it("S1.8: the instance's neuronFamily decides: what trn1 refuses is a warning on trn2", async () => {
    const { log, logged } = recordedLog();
    const settings = { platform: "neuron", maxNumSeqs: 2 } as const;
    await expect(start({ ...settings, neuronFamily: "trn1.32xlarge" })).rejects.toThrow("on trn1");
    await start({ ...settings, neuronFamily: "trn2" }, undefined, { log });
    expect(logged("platform-setting")).toMatchObject([{ setting: "maxNumSeqs" }]);
  });

  it("is a warning at the start where the platform says no more", async () => {
    const platformModule = `data:text/javascript,${encodeURIComponent(WARNING_PLATFORM)}`;
    const { log, logged } = recordedLog();
    await start({ platformModule, maxNumSeqs: 3 }, undefined, { log });
    expect(logged("platform-setting")).toEqual([
      { setting: "maxNumSeqs", message: 'checked {"maxNumSeqs":3,"prefixCaching":true}' },
    ]);
  });
});

/** A module of a platform that registers host memory and warns of each setting. */
const WARNING_PLATFORM = `export default () => ({
  deviceType: "cpu",
  capabilities: { registersAs: ["DRAM"], bufferDevices: ["cpu"], maxConcurrentBatches: 1 },
  kvCacheShape: () => [],
  maxModelLen: ({ max_model_len, max_position_embeddings }) => max_model_len ?? max_position_embeddings,
  check: (settings) => [{ setting: "maxNumSeqs", message: "checked " + JSON.stringify(settings) }],
});`;

it("publishes vLLM's metrics of the cache, from which kv-peer computes the used blocks", async () => {
  const { instance } = await start({ numBlocks: 64 });
  const [engine] = instance.engines;
  const metrics = async () => (await fetch(`${instance.url}/metrics`)).text();
  expect(await metrics()).toContain(
    'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="64"} 1.0',
  );
  expect(await metrics()).toMatch(/^vllm:kv_cache_usage_perc\{engine="0",model_name=".*"\} 0$/m);
  let during = "";
  const request = { requestId: "r", promptTokens: [1, 2, 3], maxTokens: 400, ignoreEos: true };
  await engine?.submit({
    ...request,
    onToken: () => {
      during ||= instance.metrics();
    },
  }).done;
  // 3 + 400 - 1 tokens need 26 of 63 blocks.
  expect(during).toMatch(new RegExp(`^vllm:kv_cache_usage_perc\\{.*\\} ${26 / 63}$`, "m"));
  expect(during).toMatch(/^vllm:num_requests_running\{.*\} 1$/m);
});

it("S1.9: a kv_buffer_device that the machine lacks is an error that lists what it has", async () => {
  const kvTransferConfig = {
    kv_connector: "NixlConnector",
    kv_role: "kv_both",
    kv_buffer_device: "cuda",
    kv_connector_extra_config: { backends: ["LIBFABRIC"] },
  };
  await expect(start({ kvTransferConfig })).rejects.toMatchObject({
    message: expect.stringMatching(/kv_buffer_device is "cuda"; platform cpu has cpu/) as string,
    hint: expect.stringContaining("the demo: --platform cuda") as string,
  });
});
