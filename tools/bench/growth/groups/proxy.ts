import { createServer, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { InstancePool, prefixAware } from "@kv/fleet";
import {
  AutoscalingSignals,
  PrefillCosts,
  PrometheusMetrics,
  parseGenerationRequest,
} from "@kv/fleet/front-end";
import { systemClock, systemRandom } from "@kv/interface";
import { createProxy } from "@kv/proxy";
import { Agent } from "undici";
import { RequestCounts } from "../../../../packages/proxy/src/telemetry/request-counts.js";
import { RequestHistory } from "../../../../packages/proxy/src/telemetry/request-history.js";
import { RequestRecord } from "../../../../packages/proxy/src/telemetry/request-record.js";
import { heldBytes, processorTimeOf } from "../costs.js";
import type { Group, Quantity } from "../quantity.js";

const PREFILLED = JSON.stringify({
  id: "c",
  choices: [{ index: 0, text: "x", finish_reason: "length" }],
  usage: { prompt_tokens: 10, completion_tokens: 1 },
  kv_transfer_params: {
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_block_ids: [[1, 2]],
    remote_engine_id: "e",
    remote_request_id: "r",
    remote_host: "127.0.0.1",
    remote_port: 5600,
    tp_size: 1,
  },
});
const NONE: ReadonlySet<never> = new Set();
const event = (text: string, end: string | null = null) =>
  `data: ${JSON.stringify({ id: "c", choices: [{ index: 0, text, finish_reason: end }] })}\n\n`;

/** How many chunks a decode server answers with. */
let chunks = 1;

interface Running {
  readonly url: string;
  readonly agent: Agent;
  close(): Promise<void>;
}

/**
 * A proxy, its two servers and its clients in this process: their cost is in what is measured, and
 * is the same at each size.
 */
async function open(): Promise<Running> {
  const [p, d] = [
    await serve((response) => response.end(PREFILLED), "application/json"),
    await serve(stream, "text/event-stream"),
  ];
  const most = 100_000;
  const proxy = createProxy({
    prefillers: [p.url],
    decoders: [d.url],
    pairing: { mode: "off" },
    health: { intervalMs: 0 },
    routing: { prefill: "prefix-aware", decode: "prefix-aware" },
    limits: {
      connections: most,
      connectionsPerAddress: most,
      requestsInFlight: most,
      requestsPerClient: most,
    },
  });
  const { url } = await proxy.listen({ port: 0 });
  const agent = new Agent({ pipelining: 1 });
  return {
    url,
    agent,
    async close() {
      await agent.close();
      await proxy.close({ graceMs: 0 });
      await Promise.all([p.close(), d.close()]);
    },
  };
}

async function serve(answer: (response: ServerResponse) => unknown, type: string) {
  const server = createServer((request, response) => {
    request.resume();
    request.once("end", () => {
      response.writeHead(200, { "content-type": type });
      answer(response);
    });
  });
  server.keepAliveTimeout = 0;
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", 4096, resolve));
  const { port } = server.address() as AddressInfo;
  const close = () =>
    new Promise<void>((resolve) => {
      server.close(() => resolve());
      server.closeAllConnections();
    });
  return { url: `http://127.0.0.1:${port}`, close };
}

/** One chunk in each turn, so that they do not come as one. */
function stream(response: ServerResponse): void {
  let sent = 0;
  const next = () => {
    sent += 1;
    response.write(event(" a", sent === chunks ? "length" : null));
    if (sent < chunks) setImmediate(next);
    else response.end("data: [DONE]\n\n");
  };
  next();
}

async function ask({ url, agent }: Running, prompt: string): Promise<void> {
  const body = JSON.stringify({ prompt, stream: true });
  const { statusCode, body: answer } = await agent.request({
    origin: url,
    path: "/v1/completions",
    method: "POST",
    body,
    headers: { "content-type": "application/json" },
  });
  const text = await answer.text();
  if (statusCode !== 200)
    throw new Error(`the proxy answered ${statusCode}: ${text.slice(0, 500)}`);
}

const REQUEST = parseGenerationRequest("/v1/completions", Buffer.from('{"prompt":"a"}'));

/**
 * All that keeps something of a request after its end, after so many requests with prompts of their
 * own.
 */
function recorded(requests: number) {
  const clock = systemClock();
  const [prefillers, decoders] = (["prefill", "decode"] as const).map(
    (role) =>
      new InstancePool({
        role,
        instances: [{ url: `http://${role}-0` }, { url: `http://${role}-1` }],
        routing: prefixAware(),
        clock,
        random: systemRandom(),
        times: { coolDownMs: 1000, maxCoolDownMs: 30_000, slowReturnMs: 10_000 },
      }),
  ) as [InstancePool, InstancePool];
  const metrics = new PrometheusMetrics([prefillers, decoders]);
  const signals = new AutoscalingSignals({
    prefillers,
    decoders,
    pairing: undefined,
    clock,
    costs: new PrefillCosts(),
    metrics: { count() {}, observe() {} },
  });
  const [history, counts, costs] = [
    new RequestHistory(clock),
    new RequestCounts(),
    new PrefillCosts(),
  ];
  const usage = { prompt_tokens: 100, prompt_tokens_details: { cached_tokens: 10 } };
  const endpoint = "/v1/completions";
  for (let at = 0; at < requests; at += 1) {
    const requestId = `request-${at}`;
    const context = { requestId, request: { fields: { prompt: `${at} `.padEnd(260, "a word ") } } };
    const record = new RequestRecord();
    counts.began();
    const p = prefillers.visit(context, NONE);
    record.prefill = p?.instance.url;
    p?.succeeded();
    costs.ended({ request: REQUEST, usage, durationMs: 10, wasAlone: true });
    signals.prefilled(100, 10, 10);
    const d = decoders.visit(context, NONE);
    record.decode = d?.instance.url;
    if (p !== undefined) signals.kvReady(p.instance, [[1, 2]], clock.now())();
    d?.succeeded();
    counts.answered(200);
    metrics.count("kv_proxy_requests_total", 1, { endpoint, outcome: "200" });
    metrics.observe("kv_proxy_request_duration_seconds", 0.1, { endpoint });
    metrics.observe("kv_proxy_prefill_duration_seconds", 0.01);
    const times = { startedAtMs: clock.now(), durationMs: 100 };
    history.add({ requestId, endpoint, ...times, outcome: "200", record });
  }
  return { prefillers, decoders, metrics, signals, history, counts, costs };
}

async function withProxy(measure: (running: Running) => Promise<number>): Promise<number> {
  const running = await open();
  for (let at = 0; at < 20; at += 1) await ask(running, "warm");
  const cost = await measure(running);
  await running.close();
  return cost;
}

const once = (items: number, run: () => unknown) =>
  processorTimeOf("us", items, { prepare: () => undefined, run });

const quantities: Quantity[] = [
  {
    name: "a request among others that run at the same time",
    unit: "us per request",
    sizeOf: "requests at once",
    sizes: [16, 64, 256, 1024, 4096],
    exponent: 0,
    measure: (size) =>
      withProxy(async (running) => {
        const all = () =>
          Promise.all(Array.from({ length: size }, (_, at) => ask(running, `prompt ${at}`)));
        // The connections are made.
        await all();
        return once(size, all);
      }),
  },
  {
    name: "a body, per KiB",
    unit: "us per KiB",
    sizeOf: "KiB of body",
    sizes: [1, 16, 256, 4096, 15_000],
    exponent: 0,
    measure: (size) =>
      withProxy((running) => {
        const prompt = "a word ".repeat(Math.floor((size * 1024) / 7) - 4);
        return once(size, () => ask(running, prompt));
      }),
  },
  {
    name: "a streamed answer",
    unit: "us per chunk",
    sizeOf: "chunks",
    sizes: [10, 100, 1000, 10_000],
    exponent: 0,
    measure: (size) =>
      withProxy(async (running) => {
        chunks = size;
        const cost = await once(size, () => ask(running, "a"));
        chunks = 1;
        return cost;
      }),
  },
  {
    name: "memory that a request leaves behind when it has ended",
    unit: "bytes per request",
    sizeOf: "requests",
    sizes: [1000, 4000, 16_000, 64_000],
    exponent: -0.5,
    measure: (size) =>
      withProxy((running) =>
        heldBytes(size, async () => {
          for (let at = 0; at < size; at += 50)
            await Promise.all(
              Array.from({ length: 50 }, (_, one) => ask(running, `prompt ${at + one}`)),
            );
        }),
      ),
  },
  {
    name: "memory that a request leaves behind in routing, metrics, signals and history, without HTTP",
    unit: "bytes per request",
    sizeOf: "requests",
    sizes: [16_000, 64_000, 256_000, 1_000_000],
    exponent: -0.5,
    measure: (size) => heldBytes(size, () => recorded(size)),
  },
];

export const proxy: Group = { name: "proxy", title: "@kv/proxy", quantities };
