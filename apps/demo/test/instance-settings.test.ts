import { type Ambient, type LogFields, type Span, silentLog, type Tracer } from "@kv/interface";
import { memoryNetwork } from "@kv/transport-memory";
import { describe, expect, it, onTestFinished } from "vitest";
import type { Instance } from "../src/instance/instance.js";
import { post, startInMemory } from "./support/memory-pair.js";

async function start(
  settings: object = {},
  ambient: Partial<Pick<Ambient, "log" | "tracer">> = {},
): Promise<Instance> {
  const config = {
    role: "both",
    kvTransferConfig: { kv_connector: "NixlConnector", kv_role: "kv_both" },
    ...settings,
  };
  const instance = await startInMemory("127.0.0.1", config, memoryNetwork(), ambient);
  onTestFinished(() => instance.close());
  return instance;
}

async function announced({ url }: Instance): Promise<number | undefined> {
  const models = (await (await fetch(`${url}/v1/models`)).json()) as {
    data: { max_model_len: number }[];
  };
  return models.data[0]?.max_model_len;
}

describe("max_model_len", () => {
  it.each([
    [{ maxModelLen: 48 }, 48],
    // A cache of 4 blocks, one of which is the null block.
    [{ numBlocks: 4 }, 48],
  ])(
    "with %o, a sequence of that length is served, and one more token is refused",
    async (settings, length) => {
      const instance = await start(settings);
      expect(await announced(instance)).toBe(length);
      const prompt = Array.from({ length: length - 8 }, (_, i) => i + 3);
      expect(await post(instance.url, { prompt, max_tokens: 8 })).toMatchObject({
        status: 200,
        body: { usage: { completion_tokens: 8 } },
      });
      const refused = await post(instance.url, { prompt, max_tokens: 9 });
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
    expect((await start()).settings).toMatchObject({ maxConcurrentBatches: 2 });
    expect((await start({ platform: "neuron" })).settings).toMatchObject({
      maxConcurrentBatches: 1,
    });
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
      const span: Span = { traceparent: "", set() {}, event() {}, end() {} };
      const tracer: Tracer = {
        start(name) {
          if (name !== "kv_engine.compute_prompt") return span;
          computing += 1;
          seen = Math.max(seen, computing);
          begun();
          const end = () => {
            computing -= 1;
          };
          return { ...span, end };
        },
      };
      const [engine] = (await start(settings, { tracer })).engines;
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
    const warned: unknown[] = [];
    const warn = (event: string, fields?: LogFields) => void warned.push([event, fields?.setting]);
    const settings = { platform: "neuron", maxNumSeqs: 2 };
    await expect(start({ ...settings, neuronFamily: "trn1.32xlarge" })).rejects.toThrow("on trn1");
    await start({ ...settings, neuronFamily: "trn2" }, { log: { ...silentLog, warn } });
    expect(warned).toContainEqual(["platform-setting", "maxNumSeqs"]);
  });

  it("is a warning at the start where the platform says no more", async () => {
    const platformModule = `data:text/javascript,${encodeURIComponent(WARNING_PLATFORM)}`;
    const warned: unknown[] = [];
    const warn = (event: string, fields?: LogFields) => void warned.push([event, fields]);
    await start({ platformModule, maxNumSeqs: 3 }, { log: { ...silentLog, warn } });
    expect(warned).toContainEqual([
      "platform-setting",
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
  const instance = await start({ numBlocks: 64 });
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
