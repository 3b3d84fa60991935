import type { AgentMetadata, RemotePrefillParams } from "@kv/protocol";
import { expect, test } from "vitest";
import { METADATA } from "../../test/sample-recording.js";
import { planChecks } from "./plan-checks.js";
import type { Role, Side } from "./side.js";

const side = (role: Role, changes: Partial<AgentMetadata> = {}, more: Partial<Side> = {}): Side => ({
  role,
  target: { kind: "side-channel", host: "h", port: 1 },
  vllmVersion: "0.33.0",
  model: undefined,
  cacheSettings: undefined,
  wallClockMs: undefined,
  told: undefined,
  address: undefined,
  payload: undefined,
  metadata: { ...METADATA, ...changes },
  clockSamples: [],
  ...more,
});
const lengths = (factor: number) => METADATA.blockLengthsBytes.map((length) => length * factor);
const sized = (factor: number) => ({
  blockLengthsBytes: lengths(factor),
  blockStridesBytes: lengths(factor),
});
const options = { prefillTp: 1, decodeTp: 1, tpIsAssumed: false, numKvHeads: 4 };
const plan = (p: Side, d: Side, more = {}) => planChecks(p, d, { ...options, ...more });

test("TP 1 to 2: each decode rank reads half of the heads, and prefill waits for both", () => {
  const [check] = plan(side("prefill"), side("decode", sized(0.5)), { decodeTp: 2 });
  expect(check).toMatchObject({ status: "ok" });
  expect(check?.found).toContain("each of 2 decode ranks reads one prefill rank");
  expect(check?.found).toContain("waits for 2 notifications");
});

test("layouts that differ: refused, with both names", () => {
  const [check] = plan(side("prefill", { kvCacheLayout: "LBNHC" }), side("decode"));
  expect(check).toMatchObject({ status: "fail" });
  expect(check?.found).toMatch(/LBHNC.*LBNHC/);
});

test("attention backends that differ: only with a conversion", () => {
  const [check] = plan(side("prefill", { attentionBackend: "PLAIN" }), side("decode"));
  expect(check).toMatchObject({ status: "warn" });
});

test("block lengths that do not fit the TP sizes: refused", () => {
  const [check] = plan(side("prefill"), side("decode"), { decodeTp: 2 });
  expect(check).toMatchObject({ status: "fail" });
  expect(check?.fix).toBeDefined();
});

test("what vLLM cannot do although a plan exists: more prefill ranks than KV heads, push with other block sizes", () => {
  const heads = plan(side("prefill", sized(0.25)), side("decode"), { prefillTp: 8 });
  expect(heads.at(-1)).toMatchObject({ id: "plan.vllm", status: "fail" });
  const told = { transferMode: "push", remoteBlockIds: [[1]] } as unknown as RemotePrefillParams;
  const push = plan(side("prefill", { blockSize: 16, ...sized(0.5) }, { told }), side("decode"));
  expect(push.at(-1)?.found).toContain("push with kernel blocks of 16 and 32 tokens");
});

test("what was assumed is said", () => {
  const [check] = plan(side("prefill"), side("decode"), { tpIsAssumed: true });
  expect(check?.found).toContain("assumed: a TP size");
});
