// A long suite: starts the demo with each kind of arguments.

import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { someOf } from "@kv/testing/long-run";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, it, onTestFinished } from "vitest";
import { ended, startDemo, startNode } from "./support/run-demo.js";

const root = fileURLToPath(new URL("../../..", import.meta.url));
async function run(args: readonly string[], env: Record<string, string> = {}) {
  return await ended(startDemo(args, env));
}

describe("the demo's command line", () => {
  const absent = { KV_NIXL_LIBRARY: "/nowhere/libnixl_capi.so" };

  it("prints one JSON object and nothing else on stdout with --json; when NIXL is missing it continues with the embedded transport, and prints why", async () => {
    const { code, stdout, stderr } = await run(
      ["--json", "--requests", "2", "--max-tokens", "4"],
      absent,
    );
    expect(stderr).toMatch(
      /^NIXL is not available \(.*kv-nixl.*Continuing with the embedded transport\.$/m,
    );
    const report = JSON.parse(stdout) as {
      requests: Record<string, number>[];
      warm_requests: Record<string, number>[];
    };
    expect(report).toMatchObject({
      ok: true,
      transport: "memory",
      backend: "MEMORY",
      connector: "NixlConnector",
      prefill_tp: 1,
      decode_tp: 1,
    });
    expect(report.requests).toHaveLength(2);
    expect(report.requests[0]).toEqual({
      prompt_tokens: 100,
      output_tokens: 4,
      ttft_ms: expect.any(Number),
      queue_ms: expect.any(Number),
      prefill_ms: expect.any(Number),
      save_ms: 0,
      connect_ms: expect.any(Number),
      transfer_ms: expect.any(Number),
      load_ms: 0,
      first_token_ms: expect.any(Number),
      other_ms: expect.any(Number),
      decode_ms: expect.any(Number),
      total_ms: expect.any(Number),
      transfer_bytes: 458_752,
      tokens_equal: true,
    });
    // The parts are all of the time to first token.
    const all = [...report.requests, ...report.warm_requests];
    expect(all).toHaveLength(4);
    const parts = "queue prefill save connect transfer load first_token other".split(" ");
    for (const request of all) {
      const sum = parts.reduce((ms, part) => ms + (request[`${part}_ms`] ?? Number.NaN), 0);
      expect(sum).toBeCloseTo(request.ttft_ms ?? 0, 1);
      expect(request.first_token_ms).toBeGreaterThan(0);
    }
    expect(code).toBe(0);
  });

  it("prints a table and reads prompts from a file", async () => {
    const file = join(scratchFolder(onTestFinished), "prompts");
    writeFileSync(file, `t5 t6 t7 t8\n\n"t9 t10"\n[11, 12, 13]\n`);
    const line = "--transport memory --max-tokens 2 --prefill-platform neuron --prompts";
    const { code, stdout, stderr } = await run([...line.split(" "), file]);
    expect(stderr).toMatch(
      /1 prefill \(TP 1, block 16, neuron, simulated\), 1 decode \(TP 1, block 16\)/,
    );
    expect(stdout).toMatch(
      /prompt +TTFT +queue +prefill +save +connect +transfer +load +first +other +decode +bytes +KV +tokens/,
    );
    expect(stdout.split("\n").filter((line) => line.length > 100)).toEqual([]);
    expect(stdout).toMatch(/\n +4 .*\n +2 .*\n +3 /);
    expect(stdout).toContain("all 6 requests have the tokens of a run in one process");
    expect(code).toBe(0);
  });

  const refused: [string[], RegExp][] = [
    [["--turns", "2", "--keep"], /leave out --keep, --prompts and --requests/],
    [["--transport", "tcp"], /Allowed choices are nixl, memory/],
    [["--decode-platform", "rocm"], /Allowed choices are cpu, cuda, neuron/],
    [["--backend", "RDMA"], /must be one of UCX, LIBFABRIC, MEMORY/],
    [["--transport", "memory", "--backend", "UCX"], /--backend UCX is not one of MEMORY/],
    [["--prefill-tp", "0"], /whole number from 1 to 16/],
    [["--decode-block-size", "257"], /whole number from 1 to 256/],
    [["--prefill-tp", "3", "--transport", "memory"], /4 KV heads cannot be split over 3 ranks/],
    [["--prompts", "/nowhere", "--transport", "memory"], /--prompts \/nowhere cannot be read/],
  ];
  it.each(someOf(refused, 4))("refuses %j", async (args, message) => {
    const { code, stdout, stderr } = await run(args);
    expect(stderr).toMatch(message);
    expect(stdout).toBe("");
    expect(code).toBe(2);
  });

  // `npm run demo` starts the app with an IPC channel, which must not keep the app alive.
  it.each(someOf([[["--transport", "memory"]], [[]]], 2))(
    "exits after its run when npm run demo starts it with %j",
    async (options) => {
      const script = join(root, "tools/setup/demo.mjs");
      const child = startNode(
        [script, ...options, "--json", "--requests", "1", "--max-tokens", "2"],
        {},
      );
      const { code, stdout } = await ended(child);
      expect(JSON.parse(stdout)).toMatchObject({ ok: true });
      expect(code).toBe(0);
    },
    180_000,
  );

  it("ends a conversation at Ctrl-C", async () => {
    const demo = startDemo(["--transport", "memory", "--turns", "64"]);
    demo.stderr?.once("data", () => demo.kill("SIGINT"));
    const { stdout } = await ended(demo);
    expect([demo.signalCode, stdout]).toEqual(["SIGINT", ""]);
  });

  it("ends with an error when NIXL is missing and was asked for", async () => {
    const asked = await run(["--json", "--transport", "nixl", "--requests", "1"], absent);
    expect(asked.code).toBe(2);
    expect(asked.stderr).toMatch(/KV_(LIBRARY|ADDON)_NOT_FOUND/);
  });
});
