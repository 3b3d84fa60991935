import { createProxy, type ProxyOptions } from "@kv/proxy";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type EnvoyProcess, startEnvoy } from "../envoy/envoy-process.js";
import { type RunningPicker, startPicker } from "../envoy/support/start-picker.js";
import { greedyOf, salted, words } from "./boundary-cases.js";
import { ask } from "./completion.js";
import { type Front, frontSuite, long } from "./front-suite.js";
import { COMPLETIONS, proxyPair } from "./proxy-pair.js";
import { leaveBetweenTheLegs } from "./sidecar-suite.js";
import { until } from "./until.js";

const BODY_LIMIT_BYTES = 32 * 1024 * 1024;
const short = greedyOf(words(60, 31), 4);

// Client → Envoy → `kv-epp` → a sidecar → vLLM's P and D. tools/envoy/envoy.long.test.ts has streams
// byte for byte, clients that leave, and what happens when kv-epp or Envoy ends.

describe.each(["pull", "push"] as const)("0.33, %s, through Envoy", (mode) => {
  const pair = proxyPair({ version: "0.33", mode });
  const hostOf = (url: string) => new URL(url).host;
  let sidecar: ReturnType<typeof createProxy>;
  let picker: RunningPicker;
  let pickerArgs: string[] = [];
  let envoy: EnvoyProcess;
  let endpoints: string[] = [];

  const openSidecar = async (
    decoder: string,
    settings: ProxyOptions["sidecar"] = { allow: ["127.0.0.0/8"] },
  ) => {
    const opened = createProxy({
      mode,
      decoders: [decoder],
      sidecar: settings,
      limits: { bodyLengthBytes: BODY_LIMIT_BYTES },
    });
    return { proxy: opened, host: hostOf((await opened.listen({ port: 0 })).url) };
  };
  const pickerOf = (decoder: string) => [
    "--prefill",
    hostOf(pair.p.url),
    "--prefill-side-channel-port",
    `${pair.p.sideChannelPort}`,
    "--decode",
    decoder,
    "--decode-side-channel-port",
    `${pair.d.sideChannelPort}`,
    "--health-interval-ms",
    "200",
    "--body-limit-bytes",
    `${BODY_LIMIT_BYTES}`,
  ];
  const envoyBefore = ({ port }: RunningPicker, decoders: readonly string[]) =>
    startEnvoy({ pickerPort: port, endpoints: decoders, failOpen: false });
  async function openForOneTest(
    decoder: string,
    settings?: ProxyOptions["sidecar"],
  ): Promise<Front> {
    const opened = await openSidecar(decoder, settings);
    const other = await startPicker(pickerOf(opened.host));
    const before = await envoyBefore(other, [opened.host]);
    pair.closing({ close: () => before.stop() });
    pair.closing({ close: () => other.kill() });
    pair.closing({ close: () => opened.proxy.close({ graceMs: 0 }) });
    return { url: before.url, proxy: opened.proxy };
  }
  const statusOf = async (body: object = short) =>
    (await ask(envoy.url + COMPLETIONS, salted({ ...body }))).status;
  beforeAll(async () => {
    const opened = await openSidecar(pair.d.url);
    sidecar = opened.proxy;
    endpoints = [opened.host];
    pickerArgs = pickerOf(opened.host);
    picker = await startPicker(pickerArgs);
    envoy = await envoyBefore(picker, endpoints);
  });
  afterAll(async () => {
    await envoy?.stop();
    await picker?.kill();
    await sidecar?.close({ graceMs: 0 });
  });

  frontSuite(pair, {
    name: "a sidecar behind Envoy",
    mode,
    open: async () => ({ url: envoy.url, proxy: sidecar }),
  });

  test.each([
    ["300 KB", 300_000],
    ["20 MB", 20_000_000],
  ])(
    "a body of %s is answered as by D itself, with the prompt in it or beside it",
    async (_, length) => {
      for (const body of [
        { ...short, user: "u".repeat(length) },
        { ...short, prompt: "t11 ".repeat(length / 4) },
      ]) {
        await pair.answersAlike(envoy.url, body);
      }
      await (mode === "push" ? pair.leaseEnded() : pair.freed());
    },
  );

  test("a client that leaves between the legs: P holds no blocks", async () => {
    await leaveBetweenTheLegs(pair, (settings) => openForOneTest(pair.d.url, settings));
  });

  // The last one: no test after it has a D.
  test("D dies: its stream ends with an error, further requests get 503, and P holds no blocks after the lease", async () => {
    const answer = await ask(envoy.url + COMPLETIONS, salted({ ...long, stream: true }));
    const parts = (answer.body as ReadableStream<Uint8Array>).values();
    expect(Buffer.from((await parts.next()).value ?? []).toString()).toContain("data: ");
    await pair.d.stop();
    const rest = async () => {
      let text = "";
      for await (const part of parts) text += Buffer.from(part).toString();
      return text;
    };
    // vLLM's HTTP server can outlive its engine, and then ends the stream with an error event. An
    // engine that ends first names the end "abort".
    const ended = /^broken off$|^data: .*("error"|"finish_reason":"abort")/m;
    expect(await rest().catch(() => "broken off")).toMatch(ended);
    await until(async () => (await statusOf()) === 503, "kv-epp knows that D is away");
    await pair.leaseEnded();
  });
});
