// A long suite: data parallel ranks of the demo.
import { silentLog } from "@kv/interface";
import { createProxy } from "@kv/proxy";
import { recordedLog } from "@kv/testing/recorded-log";
import { memoryNetwork } from "@kv/transport-memory";
import { describe, expect, it, onTestFinished } from "vitest";
import { planInstances } from "../src/cluster/cluster-plan.js";
import type { Instance } from "../src/instance/instance.js";
import { readInstanceConfig, transferConfigOf } from "../src/instance/instance-config.js";
import { fetchRecords } from "../src/run/check-run.js";
import { complete } from "../src/run/completion-client.js";
import { expectIdle, PAIR, preparedRun } from "./support/matrix.js";
import { post, startInMemory } from "./support/memory-pair.js";

/** A prefill and a decode instance with two data-parallel ranks each. */
async function pair(connector: string, config: object = {}, extra: object = {}) {
  const network = memoryNetwork();
  const start = async (role: "prefill" | "decode"): Promise<Instance> => {
    const planned = planInstances({ ...PAIR, connector })[`${role}s`][0]?.config;
    const kvTransferConfig = {
      ...planned?.kvTransferConfig,
      engine_id: role,
      kv_connector_extra_config: extra,
    };
    const settings = { ...planned, dp: 2, kvTransferConfig, sideChannelPort: 5600, ...config };
    const instance = await startInMemory(`${role}-0`, settings, network);
    onTestFinished(() => instance.close());
    return instance;
  };
  return { prefill: await start("prefill"), decode: await start("decode") };
}

/** The coordinates that a rank of P gives to D. */
async function coordinates({ url }: Instance, rank?: number | string) {
  const params = { do_remote_decode: true };
  const { status, body } = await post(
    url,
    { prompt: [1, 2, 3], max_tokens: 1, kv_transfer_params: params },
    rank === undefined ? {} : { "x-data-parallel-rank": String(rank) },
  );
  const { remote_engine_id: engine, remote_port: port } = body.kv_transfer_params ?? {};
  return { status, engine, port, message: body.error?.message };
}

describe("two data-parallel ranks", () => {
  it.each([
    ["side-channel ports of vLLM: port + data-parallel rank", {}, 5601],
    ["ports of vLLM's older guide: port + rank * TP size", { per_worker_ports: true }, 5602],
  ])("have the engine ids and %s", async (_, extra, port) => {
    const { prefill } = await pair("NixlConnector", { tp: 2 }, extra);
    expect(await coordinates(prefill, 0)).toMatchObject({ engine: "prefill_dp0", port: 5600 });
    expect(await coordinates(prefill, 1)).toMatchObject({ engine: "prefill_dp1", port });
  });

  it("refuse a rank that is not there, and share requests that name none", async () => {
    const { prefill } = await pair("NixlConnector");
    const refused = await coordinates(prefill, 2);
    expect(refused).toMatchObject({
      status: 400,
      message: expect.stringContaining("ranks 0 to 1"),
    });
    expect((await coordinates(prefill, "one")).status).toBe(400);
    expect((await coordinates(prefill)).engine).toBe("prefill_dp0");
  });

  it.each(["NixlConnector", "push"])(
    "of P and D behind the proxy: every pair of ranks has the tokens of one process, with %s",
    async (connector) => {
      const { prompts, expected } = await preparedRun();
      const { prefill, decode } = await pair(connector);
      const proxy = createProxy({
        prefillers: [`${prefill.url}@0`, `${prefill.url}@1`],
        decoders: [`${decode.url}@0`, `${decode.url}@1`],
        mode: connector === "push" ? "push" : "pull",
        log: silentLog,
      });
      onTestFinished(() => proxy.close());
      const { url } = await proxy.listen({ port: 0 });
      const outcomes = await Promise.all(
        prompts
          .slice(0, 8)
          .map((promptTokens, i) =>
            complete({ url, requestId: `r${i}`, promptTokens, maxTokens: 16 }),
          ),
      );
      expect(outcomes.map(({ tokens }) => tokens)).toEqual(expected.slice(0, 8));
      const received = (await fetchRecords(decode.url)).filter(
        ({ direction }) => direction === "received",
      );
      const sources = new Set(received.map(({ transfer }) => transfer?.remote_engine_id));
      expect(sources).toEqual(new Set(["prefill_dp0", "prefill_dp1"]));
      for (const [engine, held] of decode.engines.entries()) {
        expect([engine, held.outstanding().blocks]).toEqual([engine, 0]);
      }
      await expectIdle(prefill, decode);
    },
  );
});

describe("the side channel's address", () => {
  const HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST";
  const PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT";
  const env = { [HOST]: "10.0.0.1", [PORT]: "5700" };
  const given = { sideChannelHost: "127.0.0.1", sideChannelPort: 0 };

  it.each([
    ["of vLLM's variables", {}, env, "10.0.0.1:5700", []],
    ["a free port of this host", {}, {}, "127.0.0.1:0", []],
    ["of the settings, with a warning for each variable", given, env, "127.0.0.1:0", [HOST, PORT]],
  ])("is that %s", (_, settings, variables, at, warned) => {
    const { log, logged } = recordedLog();
    const kvTransferConfig = { kv_connector: "NixlConnector", kv_role: "kv_producer" };
    const config = readInstanceConfig({ role: "prefill", kvTransferConfig, ...settings });
    const { sideChannelHost, sideChannelPort } = transferConfigOf(config, { env: variables, log });
    expect(`${sideChannelHost}:${sideChannelPort}`).toBe(at);
    expect(logged("setting-not-used").map(({ key }) => key)).toEqual(warned);
  });
});
