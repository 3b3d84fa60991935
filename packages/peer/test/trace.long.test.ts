// A long suite: traces requests between processes.
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { recordedSpans } from "@kv/testing/recorded-spans";
import { afterAll, expect, test } from "vitest";
import { runKvPeer } from "./run-kv-peer.js";

const folder = mkdtempSync(join(tmpdir(), "kv-peer-trace-"));
afterAll(() => rmSync(folder, { recursive: true }));

function file(name: string, content: string): string {
  const path = join(folder, name);
  writeFileSync(path, content);
  return path;
}

function recorded(): string {
  const { tracer, line } = recordedSpans();
  const request = tracer.start("kv_proxy.request", { attributes: { "kv.request_id": "r1" } });
  tracer.start("kv_proxy.prefill", { parent: request?.traceparent })?.end();
  request?.end();
  return `${line()}\n`;
}

test("trace prints the request and writes the drawing; a last line that breaks off is left out with a warning", async () => {
  const svg = join(folder, "out.svg");
  const { code, stdout } = await runKvPeer("trace", file("good", recorded()), "--svg", svg);
  expect(code).toBe(0);
  expect(stdout).toContain("request r1");
  expect(stdout).toContain("kv_proxy.prefill");
  expect(readFileSync(svg, "utf8")).toMatch(/^<svg .*<\/svg>\n$/s);
  const broken = await runKvPeer("trace", file("broken", `${recorded()}{"resourceSp`));
  expect([broken.code, broken.stdout.includes("request r1")]).toEqual([0, true]);
});

const spans = (name: string) =>
  JSON.stringify({
    resourceSpans: [
      {
        scopeSpans: [
          {
            spans: [
              {
                traceId: "a".repeat(32),
                spanId: "b".repeat(16),
                name,
                startTimeUnixNano: "1",
                endTimeUnixNano: "2",
              },
            ],
          },
        ],
      },
    ],
  });

test.each([
  [
    "a file that is not there",
    () => join(folder, "none"),
    /cannot be read: .*ENOENT.* \[KV_CONFIG_INVALID\]/,
  ],
  [
    "a trace of another form",
    () => file("chrome", '{"traceEvents":[]}'),
    /line 1: .*\[KV_WIRE_MALFORMED\]/,
  ],
  [
    "a trace of another program",
    () => file("other", spans("GET /")),
    /1 spans, none .* \[KV_CONFIG_INVALID\]/,
  ],
  [
    "a damaged line in the middle",
    () => file("middle", `${spans("kv.read")}\n{"a\n${spans("kv.read")}\n`),
    /line 2/,
  ],
  ["an empty file", () => file("empty", ""), /0 spans/],
])("%s is a named error with exit code 2", async (_, path, message) => {
  const { code, stdout, stderr } = await runKvPeer("trace", path());
  expect({ code, stdout }).toEqual({ code: 2, stdout: "" });
  expect(stderr).toMatch(message);
});

test("an id that no request has, and a drawing that cannot be written, are errors too", async () => {
  const path = file("good2", recorded());
  const unknown = await runKvPeer("trace", path, "--request", "zzz");
  expect([unknown.code, unknown.stderr]).toEqual([
    2,
    expect.stringMatching(/no request of the file is zzz/),
  ]);
  const nowhere = await runKvPeer("trace", path, "--svg", "/nowhere/at/all.svg");
  expect([nowhere.code, nowhere.stderr]).toEqual([2, expect.stringMatching(/cannot be written/)]);
});
