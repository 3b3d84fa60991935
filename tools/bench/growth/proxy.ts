import { createServer, type ServerResponse } from "node:http";
import { createProxy } from "@kv/proxy";
import { listening } from "@kv/testing/http/listening";
import { Agent } from "undici";
import { prefillAnswer } from "../upstream-answers.js";
import { type Group, heldBytes, processorTimeOf } from "./measure.js";

const PREFILLED = prefillAnswer("e", 5600);
const event = (text: string, end: string | null = null) =>
  `data: ${JSON.stringify({ id: "c", choices: [{ index: 0, text, finish_reason: end }] })}\n\n`;

let chunks = 1;

interface Running {
  readonly url: string;
  readonly agent: Agent;
}

/**
 * A proxy, its two servers and its clients in this process: their cost is in what is measured, and
 * is the same at each size.
 */
async function withProxy(measure: (running: Running) => Promise<number>): Promise<number> {
  const p = await serve((response) => response.end(PREFILLED), "application/json");
  const d = await serve(stream, "text/event-stream");
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
  const running = { url, agent: new Agent({ pipelining: 1 }) };
  for (let at = 0; at < 20; at += 1) await ask(running, "warm");
  const cost = await measure(running);
  await running.agent.close();
  await proxy.close({ graceMs: 0 });
  await Promise.all([p.close(), d.close()]);
  return cost;
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
  const close = () =>
    new Promise<void>((resolve) => {
      server.close(() => resolve());
      server.closeAllConnections();
    });
  return { url: `http://127.0.0.1:${await listening(server)}`, close };
}

function stream(response: ServerResponse) {
  let sent = 0;
  const next = () => {
    sent += 1;
    response.write(event(" a", sent === chunks ? "length" : null));
    if (sent < chunks) setImmediate(next);
    else response.end("data: [DONE]\n\n");
  };
  next();
}

async function ask({ url, agent }: Running, prompt: string) {
  const { statusCode, body } = await agent.request({
    origin: url,
    path: "/v1/completions",
    method: "POST",
    body: JSON.stringify({ prompt, stream: true }),
    headers: { "content-type": "application/json" },
  });
  const text = await body.text();
  if (statusCode !== 200)
    throw new Error(`the proxy answered ${statusCode}: ${text.slice(0, 500)}`);
}

const askAll = (running: Running, count: number, first = 0) =>
  Promise.all(Array.from({ length: count }, (_, at) => ask(running, `prompt ${first + at}`)));

const time = (items: number, run: () => unknown) =>
  processorTimeOf("us", items, () => undefined, run);

export const group: Group = {
  title: "@kv/proxy",
  quantities: [
    {
      name: "a request among others that run at the same time",
      unit: "us per request",
      sizeOf: "requests at once",
      sizes: [16, 64, 256, 1024, 4096],
      measure: (size) =>
        withProxy(async (running) => {
          await askAll(running, size);
          return time(size, () => askAll(running, size));
        }),
    },
    {
      name: "a body, per KiB",
      unit: "us per KiB",
      sizeOf: "KiB of body",
      sizes: [1, 16, 256, 4096, 15_000],
      measure: (size) =>
        withProxy((running) => {
          const prompt = "a word ".repeat(Math.floor((size * 1024) / 7) - 4);
          return time(size, () => ask(running, prompt));
        }),
    },
    {
      name: "a streamed answer",
      unit: "us per chunk",
      sizeOf: "chunks",
      sizes: [10, 100, 1000, 10_000],
      measure: (size) =>
        withProxy(async (running) => {
          chunks = size;
          const cost = await time(size, () => ask(running, "a"));
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
            for (let at = 0; at < size; at += 50) await askAll(running, 50, at);
          }),
        ),
    },
  ],
};
