import {
  COMPLETION,
  type FakeUpstream,
  KV_PARAMS_TEXT,
  sendJson,
  startUpstream,
} from "@kv/testing/http/fake-upstream";
import { type FakeSideChannel, startSideChannel } from "@kv/testing/http/side-channel";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, onTestFinished, test } from "vitest";
import { errorOf, runProxy, upstream } from "../support/set-up.js";

/**
 * An engine with both of its servers. As vLLM's, a decode engine fails (500) with KV of an engine
 * of another version.
 */
class FakeEngine {
  readonly misfits: string[] = [];
  served = 0;
  #starts = 0;
  #http: FakeUpstream | undefined;
  #side: FakeSideChannel | undefined;
  #ports = { http: 0, side: 0 };

  constructor(
    readonly name: string,
    public version: string,
  ) {
    onTestFinished(() => this.stop());
  }

  get spec() {
    return {
      url: `http://127.0.0.1:${this.#ports.http}`,
      kv: { host: "127.0.0.1", port: this.#ports.side },
    };
  }

  async start(): Promise<this> {
    this.#starts += 1;
    const engineId = `${this.name}-${this.#starts}-${this.version}`;
    this.#side = await startSideChannel(
      () => ({ engineId, vllmVersion: this.version }),
      this.#ports.side,
    );
    this.#http = await startUpstream((seen) => {
      const { response, json, path } = seen;
      if (path === "/version") return sendJson(response, { version: this.version });
      if (path === "/v1/models") return sendJson(response, { data: [{ id: "m" }] });
      if (path !== "/v1/completions") return sendJson(response, {}, path === "/health" ? 200 : 404);
      const params = (json.kv_transfer_params ?? {}) as Record<string, unknown>;
      if (json.use_beam_search === true) return sendJson(response, {}, 400);
      this.served += 1;
      if (params.do_remote_decode === true) {
        const own = {
          ...JSON.parse(KV_PARAMS_TEXT),
          remote_engine_id: engineId,
          remote_port: this.#ports.side,
        };
        return sendJson(response, { ...COMPLETION, kv_transfer_params: own });
      }
      if (String(params.remote_engine_id).endsWith(this.version))
        return sendJson(response, COMPLETION);
      this.misfits.push(String(params.remote_engine_id));
      return sendJson(response, { error: { message: "the hashes differ" } }, 500);
    }, this.#ports.http);
    this.#ports = { http: Number(new URL(this.#http.url).port), side: this.#side.port };
    return this;
  }

  async stop(): Promise<void> {
    await Promise.all([this.#http?.close(), this.#side?.close()]);
    [this.#http, this.#side] = [undefined, undefined];
  }
}

const engine = (name: string, version: string) => new FakeEngine(name, version).start();
const pairing = { mode: "strict" } as const;

test("a request goes only to engines with equal hashes; each unpaired instance is in /status, /metrics and one log line", async () => {
  const [p33, p32] = [await engine("p33", "0.33.0"), await engine("p32", "0.32.0")];
  const d33 = await engine("d33", "0.33.0");
  const { log, logged } = recordedLog();
  const { metrics, ask, proxy } = await runProxy({
    prefillers: [p33.spec, p32.spec],
    decoders: [d33.spec],
    pairing,
    log,
  });
  for (let index = 0; index < 10; index++) expect((await ask()).status).toBe(200);
  expect([p33.served, p32.served, d33.misfits]).toEqual([10, 0, []]);
  expect(proxy.status().prefillers.map((one) => one.pairing)).toMatchObject([
    { state: "paired", partners: 1, engine_id: "p33-1-0.33.0", vllm_version: "0.33.0" },
    {
      state: "unpaired",
      differences: [{ factor: "vllm_version", prefill: "0.32.0", decode: "0.33.0" }],
    },
  ]);
  const shown = (await metrics()).split("\n");
  expect(shown).toContain(
    `kv_proxy_instance_unpaired{role="prefill",server="${p32.spec.url}",factor="vllm_version"} 1`,
  );
  expect(shown).toContain(`kv_proxy_instance_pairs{role="prefill",server="${p33.spec.url}"} 1`);
  expect(logged("instance-unpaired").map((fields) => fields["instance"])).toEqual([p32.spec.url]);
});

test.each(["pull", "push", "auto"] as const)(
  "with no pair left, the answer is 503 with the reason (%s)",
  async (mode) => {
    const [p, d] = [await engine("p", "0.32.0"), await engine("d", "0.33.0")];
    const { ask } = await runProxy({ prefillers: [p.spec], decoders: [d.spec], pairing, mode });
    expect(await errorOf(await ask())).toMatchObject({
      status: 503,
      code: "KV_PROXY_NO_INSTANCE",
      type: "server_error",
      message:
        "no prefill instance fits a decode instance: vllm_version is 0.32.0 at prefill and 0.33.0 at decode",
    });
    expect(p.served).toBe(0);
  },
);

test("a rollout of three engines under load changes the pairs without a lost request, and no request meets a wrong pair", async () => {
  const old = [await engine("p32", "0.32.0"), await engine("d32", "0.32.0")] as const;
  const fresh = [await engine("p33", "0.33.0"), await engine("d33", "0.33.0")] as const;
  const { ask, proxy } = await runProxy({
    prefillers: [old[0].spec, fresh[0].spec],
    decoders: [old[1].spec, fresh[1].spec],
    pairing,
  });
  const results: number[] = [];
  let isRunning = true;
  const clients = Array.from({ length: 4 }, async () => {
    while (isRunning) results.push((await ask()).status);
  });
  const answered = async (count: number) => {
    const goal = results.length + count;
    await expect.poll(() => results.length).toBeGreaterThan(goal);
  };
  const states = () => {
    const { prefillers, decoders } = proxy.status();
    return [...prefillers, ...decoders].map(
      (one) => `${one.pairing?.state} ${one.pairing?.partners}`,
    );
  };
  await answered(50);
  expect(states()).toEqual(["paired 1", "paired 1", "paired 1", "paired 1"]);
  await old[0].stop();
  await answered(50);
  old[0].version = "0.33.0";
  await old[0].start();
  await expect.poll(states).toEqual(["paired 1", "paired 1", "unpaired 0", "paired 2"]);
  await answered(50);
  // Without a pause: only the new engine id of its answers shows that it was restarted.
  old[0].version = "0.32.0";
  await old[0].stop();
  await old[0].start();
  await answered(50);
  await old[1].stop();
  await answered(50);
  old[1].version = "0.33.0";
  await old[1].start();
  await expect.poll(states).toEqual(["unpaired 0", "paired 2", "paired 1", "paired 1"]);
  isRunning = false;
  await Promise.all(clients);
  expect(results.filter((status) => status !== 200)).toEqual([]);
  expect([...old, ...fresh].map(({ misfits }) => misfits)).toEqual([[], [], [], []]);
}, 60_000);

test("push to a vLLM engine of another block size is refused with both sizes, before a leg; to one of ours it is not", async () => {
  const served: string[] = [];
  const engineOf = async (name: string, blockSize: number, announcesFactors = true) => {
    const announced = {
      engineId: name,
      vllmVersion: "0.33.0",
      mode: "push",
      blockSize,
      announcesFactors,
    } as const;
    const side = await startSideChannel(() => announced);
    const http = await upstream(({ response, path }) => {
      if (path === "/v1/completions") served.push(name);
      sendJson(response, COMPLETION);
    });
    onTestFinished(side.close);
    return { url: http.url, kv: { host: "127.0.0.1", port: side.port } };
  };
  const p = await engineOf("p", 16);
  const proxied = (decoder: typeof p) =>
    runProxy({ prefillers: [p], decoders: [decoder], mode: "push", pairing });
  const vllm = await proxied(await engineOf("vllm", 32, false));
  expect(await errorOf(await vllm.ask())).toMatchObject({
    status: 503,
    code: "KV_PROXY_NO_INSTANCE",
    message: expect.stringContaining(
      "no prefill instance fits a decode instance: block_size is 16 at prefill and 32 at decode (push with",
    ),
  });
  expect(served).toEqual([]);
  await (await proxied(await engineOf("ours", 32))).ask();
  expect(served).toContain("p");
});

test("--pairing off pairs all instances, and warns", async () => {
  const [p, d] = [await engine("p", "0.33.0"), await engine("d", "0.33.0")];
  const { log, logged } = recordedLog();
  const { ask, proxy } = await runProxy({
    prefillers: [p.spec],
    decoders: [d.spec],
    pairing: { mode: "off" },
    log,
  });
  expect(logged("pairing-off")).toHaveLength(1);
  expect(proxy.status().prefillers[0]?.pairing).toBeNull();
  expect((await ask()).status).toBe(200);
});
