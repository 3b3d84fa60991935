// A long suite: data parallel ranks of the demo.
import { type KvTransferConfig, type Log, silentLog } from "@kv/interface";
import { createProxy } from "@kv/proxy";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { afterEach, describe, expect, it } from "vitest";
import { planInstances } from "../src/cluster/cluster-plan.js";
import { type Instance, startInstance } from "../src/instance/instance.js";
import { readInstanceConfig, transferConfigOf } from "../src/instance/instance-config.js";
import { fetchRecords } from "../src/run/check-run.js";
import { complete } from "../src/run/completion-client.js";
import { expectIdle, PAIR, preparedRun } from "./support/matrix.js";

const closing: { close(): Promise<void> }[] = [];
afterEach(async () => {
  for (const each of closing.splice(0).reverse()) await each.close();
});

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
    const instance = await startInstance(readInstanceConfig(settings), {
      log: silentLog,
      transport: memoryTransport({ network, host: `${role}-0` }),
      sideChannel: memorySideChannel({ network, host: `${role}-0` }),
    });
    closing.push(instance);
    return instance;
  };
  return { prefill: await start("prefill"), decode: await start("decode") };
}

/** The coordinates that a rank of P gives to D. */
async function coordinates({ url }: Instance, rank?: number | string) {
  const response = await fetch(`${url}/v1/completions`, {
    method: "POST",
    headers: {
      "content-type": "application/json",
      ...(rank === undefined ? {} : { "x-data-parallel-rank": String(rank) }),
    },
    body: JSON.stringify({
      prompt: [1, 2, 3],
      max_tokens: 1,
      kv_transfer_params: { do_remote_decode: true },
    }),
  });
  const body = (await response.json()) as {
    kv_transfer_params?: { remote_engine_id: string; remote_port: number };
    error?: { message: string };
  };
  const { remote_engine_id: engine, remote_port: port } = body.kv_transfer_params ?? {};
  return { status: response.status, engine, port, message: body.error?.message };
}

describe("two data-parallel ranks", () => {
  it("have the engine ids and side-channel ports of vLLM: port + data-parallel rank", async () => {
    const { prefill } = await pair("NixlConnector", { tp: 2 });
    expect(await coordinates(prefill, 0)).toMatchObject({ engine: "prefill_dp0", port: 5600 });
    expect(await coordinates(prefill, 1)).toMatchObject({ engine: "prefill_dp1", port: 5601 });
  });

  it("have the ports of vLLM's older guide with per_worker_ports: port + rank * TP size", async () => {
    const { prefill } = await pair("NixlConnector", { tp: 2 }, { per_worker_ports: true });
    expect(await coordinates(prefill, 0)).toMatchObject({ engine: "prefill_dp0", port: 5600 });
    expect(await coordinates(prefill, 1)).toMatchObject({ engine: "prefill_dp1", port: 5602 });
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
      closing.push(proxy);
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
      for (const { url: of } of [prefill, decode])
        await expectIdle({ name: "", url: of, backend: null });
    },
  );
});

describe("the side channel's address", () => {
  const resolve = (settings: object, env: Record<string, string>) => {
    const warnings: unknown[] = [];
    const log: Log = { ...silentLog, warn: (event, fields) => warnings.push([event, fields]) };
    const kvTransferConfig = { kv_connector: "NixlConnector", kv_role: "kv_producer" };
    const config = readInstanceConfig({ role: "prefill", kvTransferConfig, ...settings });
    const { sideChannelHost, sideChannelPort }: KvTransferConfig = transferConfigOf(config, {
      env,
      log,
    });
    return { at: `${sideChannelHost}:${sideChannelPort}`, warnings };
  };
  const env = { VLLM_NIXL_SIDE_CHANNEL_HOST: "10.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT: "5700" };

  it("is that of vLLM's variables, else a free port of this host", () => {
    expect(resolve({}, env)).toEqual({ at: "10.0.0.1:5700", warnings: [] });
    expect(resolve({}, {})).toEqual({ at: "127.0.0.1:0", warnings: [] });
  });

  it("is that of the settings, and a warning names each variable that they override", () => {
    const { at, warnings } = resolve({ sideChannelHost: "127.0.0.1", sideChannelPort: 0 }, env);
    expect(at).toBe("127.0.0.1:0");
    expect(warnings).toEqual([
      [
        "setting-not-used",
        {
          key: "VLLM_NIXL_SIDE_CHANNEL_HOST",
          value: "10.0.0.1",
          used: "127.0.0.1",
          reason: "sideChannelHost is set",
        },
      ],
      [
        "setting-not-used",
        {
          key: "VLLM_NIXL_SIDE_CHANNEL_PORT",
          value: "5700",
          used: "0",
          reason: "sideChannelPort is set",
        },
      ],
    ]);
  });
});
