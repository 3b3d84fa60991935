import { mkdtempSync, readFileSync, rmSync, statSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { silentLog } from "@kv/interface";
import { afterEach, expect, test } from "vitest";
import { openSpanOutput } from "./span-output.js";

const cleanUp: (() => void)[] = [];
afterEach(() => {
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

test("only the owner can read a trace file", async () => {
  const file = temporaryFile();
  await openSpanOutput({ file, env: {}, log: silentLog })?.close();
  expect(statSync(file).mode & 0o777).toBe(0o600);
});

test("lines are appended to the file and posted to the collector's /v1/traces, with its headers", async () => {
  const { received, endpoint } = await collector();
  const file = temporaryFile();
  const env = {
    OTEL_EXPORTER_OTLP_ENDPOINT: `${endpoint}/`,
    OTEL_EXPORTER_OTLP_HEADERS: "x-key=a=b, x-more=1",
  };
  for (const line of ["{1}", "{2}"]) {
    const output = openSpanOutput({ file, env, log: silentLog });
    output?.write(line);
    await output?.close();
  }
  expect(readFileSync(file, "utf8")).toBe("{1}\n{2}\n");
  expect(received.map(({ url, body }) => [url, body])).toEqual([
    ["/v1/traces", "{1}"],
    ["/v1/traces", "{2}"],
  ]);
  expect(received[0]?.headers).toMatchObject({
    "content-type": "application/json",
    "x-key": "a=b",
    "x-more": "1",
  });
});

test("neither a file nor an endpoint: no output", () => {
  expect(openSpanOutput({ env: {}, log: silentLog })).toBeUndefined();
});

test("a collector that refuses does not throw: the loss is logged once, and at ten times as many", async () => {
  const { endpoint } = await collector(503);
  const warnings: object[] = [];
  const log = {
    ...silentLog,
    warn: (event: string, fields?: object) => void warnings.push({ event, ...fields }),
  };
  const output = openSpanOutput({
    env: { OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: `${endpoint}/x` },
    log,
  });
  for (let i = 0; i < 12; i++) output?.write("{}");
  await output?.close();
  expect(warnings).toEqual([
    { event: "spans-dropped", to: endpoint, why: "status 503", losses: 1 },
    { event: "spans-dropped", to: endpoint, why: "status 503", losses: 10 },
  ]);
});

test.each([
  [{ file: "/nowhere/at/all" }, /--trace \/nowhere\/at\/all cannot be written/],
  [{ env: { OTEL_EXPORTER_OTLP_ENDPOINT: "collector:4318" } }, /no HTTP URL/],
  [
    { env: { OTEL_EXPORTER_OTLP_ENDPOINT: "http://c:4317", OTEL_EXPORTER_OTLP_PROTOCOL: "grpc" } },
    /OTEL_EXPORTER_OTLP_PROTOCOL is grpc/,
  ],
])("%j is refused", (given, message) => {
  expect(() => openSpanOutput({ env: {}, log: silentLog, ...given })).toThrow(message);
});
