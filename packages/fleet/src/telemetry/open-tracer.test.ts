import { mkdtempSync, readFileSync, rmSync, statSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { silentLog } from "@kv/interface";
import { readSpans } from "@kv/testing/recorded-spans";
import { afterEach, expect, test, vi } from "vitest";
import { openTracer } from "./open-tracer.js";

const cleanUp: (() => void)[] = [];
afterEach(() => {
  vi.unstubAllEnvs();
  for (const run of cleanUp.splice(0)) run();
});

interface Received {
  readonly url: string | undefined;
  readonly headers: Readonly<Record<string, unknown>>;
  readonly body: string;
}

/** A collector that answers with `status`. */
async function collector(status = 200) {
  const received: Received[] = [];
  const server = createServer((request, response) => {
    let body = "";
    request.on("data", (piece) => (body += piece));
    request.on("end", () => {
      received.push({ url: request.url, headers: request.headers, body });
      response.writeHead(status).end();
    });
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  cleanUp.push(() => server.close());
  return { received, endpoint: `http://127.0.0.1:${(server.address() as AddressInfo).port}` };
}

function temporaryFile(): string {
  const folder = mkdtempSync(join(tmpdir(), "kv-spans-"));
  cleanUp.push(() => rmSync(folder, { recursive: true }));
  return join(folder, "spans.jsonl");
}

const names = { service: "s", instance: "i", log: silentLog };

test("only the owner can read a trace file", async () => {
  const file = temporaryFile();
  await (await openTracer(file, names)).close();
  expect(statSync(file).mode & 0o777).toBe(0o600);
});

test("spans are appended to the file and posted to the collector's /v1/traces, with its headers", async () => {
  const { received, endpoint } = await collector();
  const file = temporaryFile();
  vi.stubEnv("OTEL_EXPORTER_OTLP_ENDPOINT", `${endpoint}/`);
  vi.stubEnv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a=b, x-more=1");
  for (const name of ["a", "b"]) {
    const { tracer, close } = await openTracer(file, names);
    const open = tracer?.start("ends too late");
    tracer?.start(name)?.end();
    await close();
    open?.end();
  }
  const lines = readFileSync(file, "utf8").trimEnd().split("\n");
  const read = (line: string) => readSpans(line).map(({ name, process }) => [name, process]);
  const spans = [[["a", "s i"]], [["b", "s i"]]];
  expect(lines.map(read)).toEqual(spans);
  expect(received.map(({ body }) => read(body))).toEqual(spans);
  expect(received.map(({ url }) => url)).toEqual(["/v1/traces", "/v1/traces"]);
  expect(received[0]?.headers).toMatchObject({
    "content-type": "application/json",
    "x-key": "a=b",
    "x-more": "1",
  });
});

test("spans are written while the program runs, and none of thousands is lost", async () => {
  const file = temporaryFile();
  const { tracer, close } = await openTracer(file, names);
  for (let i = 0; i < 10_000; i++) tracer?.start("a")?.end();
  await expect.poll(() => readFileSync(file, "utf8").length).toBeGreaterThan(0);
  await close();
  const lines = readFileSync(file, "utf8").trimEnd().split("\n");
  expect(lines.flatMap(readSpans)).toHaveLength(10_000);
  expect(lines.length).toBeLessThan(100);
});

test("neither a file nor an endpoint: no tracer", async () => {
  const { tracer, close } = await openTracer(undefined, names);
  expect(tracer).toBeUndefined();
  await close();
});

test("a collector that refuses does not throw: the loss is logged", async () => {
  const { endpoint } = await collector(400);
  vi.stubEnv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", `${endpoint}/x`);
  const warnings: object[] = [];
  const warn = (event: string, fields?: object) => void warnings.push({ event, ...fields });
  const { tracer, close } = await openTracer(undefined, { ...names, log: { ...silentLog, warn } });
  // Twelve batches of 512.
  for (let i = 0; i < 12 * 512; i++) tracer?.start("a")?.end();
  await close();
  expect(warnings).toEqual([
    { event: "spans-dropped", to: endpoint, why: "Bad Request", losses: 1 },
    { event: "spans-dropped", to: endpoint, why: "Bad Request", losses: 10 },
  ]);
});

test.each([
  ["/nowhere/at/all", {}, /--trace \/nowhere\/at\/all cannot be written/],
  [undefined, { OTEL_EXPORTER_OTLP_ENDPOINT: "collector:4318" }, /no HTTP URL/],
  [
    undefined,
    { OTEL_EXPORTER_OTLP_ENDPOINT: "http://c:4317", OTEL_EXPORTER_OTLP_PROTOCOL: "grpc" },
    /OTEL_EXPORTER_OTLP_PROTOCOL is grpc/,
  ],
])("file %s with %j is refused", async (file, env, message) => {
  for (const [name, value] of Object.entries(env)) vi.stubEnv(name, value);
  await expect(openTracer(file, names)).rejects.toThrow(message);
});
