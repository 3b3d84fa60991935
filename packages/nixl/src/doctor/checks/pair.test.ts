import { readFileSync } from "node:fs";
import type { ChildOutcome } from "@kv/program";
import { describe, expect, test } from "vitest";
import type { PairAnswer } from "../probes.js";
import { pairChecks } from "./pair.js";
import { readUcxProtocols } from "./ucx-protocols.js";

/** As UCX 1.23 prints it. */
const printed = (name: string) =>
  readFileSync(new URL(`../../../test/fixtures/${name}.txt`, import.meta.url), "utf8");
const CMA = printed("ucx-cma");
const TCP = printed("ucx-tcp");

const answers = (change: Partial<PairAnswer> = {}): PairAnswer[] =>
  (["READ", "WRITE"] as const).map((operation) => ({
    operation,
    gigabytesPerSecond: 5,
    postMs: 10,
    transferMs: 10.1,
    consistent: true,
    ...change,
  }));
const answered = (value: unknown, output = ""): ChildOutcome => ({
  kind: "answered",
  value,
  output,
});

describe("the protocols that UCX prints", () => {
  test("the last table of each operation counts", () => {
    expect(readUcxProtocols(CMA)).toEqual([
      { operation: "READ", range: "0..inf", how: "zero-copy", lanes: "cma/memory" },
      { operation: "WRITE", range: "0..inf", how: "zero-copy", lanes: "cma/memory" },
    ]);
    expect(readUcxProtocols(TCP).map(({ how }) => how)).toEqual(["short", "software emulation"]);
    expect(readUcxProtocols("nothing of the kind\n| a | b |")).toEqual([]);
  });
});

describe("a pair of processes", () => {
  test("CMA is fine; TCP on one host gives a warning", () => {
    expect(pairChecks("UCX", answered(answers(), CMA))).toMatchObject([
      { id: "pair.UCX.READ", status: "ok", found: expect.stringContaining("cma/memory") },
      { id: "pair.UCX.WRITE", status: "ok" },
    ]);
    expect(pairChecks("UCX", answered(answers(), TCP))[0]).toMatchObject({
      status: "warn",
      found: expect.stringContaining("software emulation"),
      fix: expect.stringContaining("CMA"),
    });
  });

  test("without UCX's tables, the post time shows whether the post copied the data", () => {
    expect(pairChecks("LIBFABRIC", answered(answers({ postMs: 0.1 })))[0]).toMatchObject({
      found: expect.stringContaining("in the background"),
    });
    expect(pairChecks("UCX", answered(answers()))[0]).toMatchObject({
      found: expect.stringContaining("during the post"),
    });
  });

  test("wrong bytes, a crash, a hang and an error fail, each with its own message", () => {
    const fail = (outcome: ChildOutcome, words: string) =>
      expect(pairChecks("UCX", outcome)[0]).toMatchObject({
        status: "fail",
        found: expect.stringContaining(words),
      });
    fail(answered(answers({ consistent: false }), CMA), "differ from those that were sent");
    fail(
      { kind: "crashed", how: "SIGSEGV", output: "first\nlast words\n" },
      "SIGSEGV\nits output ended with:\nfirst\nlast words",
    );
    fail(
      { kind: "timeout", how: "no answer within 5 s", output: "waits" },
      "do not reach each other: no answer within 5 s",
    );
    fail(
      { kind: "timeout", how: "no answer within 5 s", output: "waits" },
      "its output ended with:\nwaits",
    );
    fail(
      {
        kind: "failed",
        error: { code: "KV_BACKEND_UNAVAILABLE", message: "no UCX" },
        output: "why",
      },
      "no UCX [KV_BACKEND_UNAVAILABLE]\nits output ended with:\nwhy",
    );
  });
});
