import type { AgentMetadata, RemotePrefillParams } from "@kv/protocol";
import { expect, test } from "vitest";
import { METADATA } from "../../test/sample-recording.js";
import type { Role } from "../checks/report.js";
import { planChecks } from "./plan-checks.js";
import type { ServerFacts } from "./server-facts.js";

const server = (
  role: Role,
  changes: Partial<AgentMetadata> = {},
  more: Partial<ServerFacts> = {},
): ServerFacts => ({
  role,
  vllmVersion: "0.33.0",
  metadata: { ...METADATA, engineId: role, ...changes },
  ...more,
});
const lengths = (factor: number) => METADATA.blockLengthsBytes.map((length) => length * factor);
const sized = (factor: number) => ({
  blockLengthsBytes: lengths(factor),
  blockStridesBytes: lengths(factor),
});
const options = { prefillTp: 1, decodeTp: 1, tpIsAssumed: false, numKvHeads: 4 };
const plan = (prefill: ServerFacts, decode: ServerFacts, more = {}) =>
  planChecks(prefill, decode, { ...options, ...more });

test("TP 1 to 2: each decode rank reads half of the heads, and prefill waits for both", () => {
  const [check] = plan(server("prefill"), server("decode", sized(0.5)), { decodeTp: 2 });
  expect(check).toMatchObject({
    status: "ok",
    found: expect.stringMatching(
      /each of 2 decode ranks reads one prefill rank.*waits for 2 notifications/s,
    ),
  });
});

test("vllm#55434: the plan's check counts the descriptors of a request and what posting them takes", () => {
  const pools = {
    numBlocks: 500,
    regionNumBlocks: METADATA.blockLengthsBytes.map(() => 500),
    baseAddresses: METADATA.baseAddresses.map((_, region) => 2 ** 40 * (region + 1)),
  };
  const [check] = plan(server("prefill", pools), server("decode", pools));
  // 2,048 tokens in blocks of 32, in four regions.
  expect(check?.found).toContain("a request of 2048 tokens:\nD0 posts 256 descriptors.");
  expect(check?.found).toMatch(/posting over UCX: .* ms \(1\.4 µs each/);
  expect(check?.found).toContain(
    "fewer with kernel blocks of 64 tokens on both sides: 128 descriptors, 4 after merging",
  );
  // 64 blocks: block 0 is never a request's, so 63 are left.
  const [small] = plan(server("prefill"), server("decode", pools));
  expect(small?.found).toContain(
    "descriptors are not counted: the pools are too small for 2048 tokens",
  );
});

test.each<[string, Partial<AgentMetadata>, object, object]>([
  [
    "different layouts are refused with both names",
    { kvCacheLayout: "LBNHC" },
    {},
    { status: "fail", found: expect.stringMatching(/LBHNC.*LBNHC/) },
  ],
  [
    "different attention backends work only with a conversion",
    { attentionBackend: "PLAIN" },
    {},
    { status: "warn" },
  ],
  [
    "block lengths that do not match the TP sizes are refused",
    {},
    { decodeTp: 2 },
    { status: "fail", fix: expect.any(String) },
  ],
  [
    "the check says that the TP size is assumed",
    {},
    { tpIsAssumed: true },
    { found: expect.stringContaining("assumed: a TP size") },
  ],
])("%s", (_, p, more, check) => {
  expect(plan(server("prefill", p), server("decode"), more)[0]).toMatchObject(check);
});

test("pairs that vLLM cannot serve although a plan exists fail: more prefill ranks than KV heads, push with different block sizes", () => {
  const heads = plan(server("prefill", sized(0.25)), server("decode"), { prefillTp: 8 });
  expect(heads.at(-1)).toMatchObject({ id: "plan.vllm", status: "fail" });
  const remotePrefill = {
    transferMode: "push",
    remoteBlockIds: [[1]],
  } as unknown as RemotePrefillParams;
  const push = plan(
    server("prefill", { blockSize: 16, ...sized(0.5) }, { remotePrefill }),
    server("decode"),
  );
  expect(push.at(-1)?.found).toContain("push with kernel blocks of 16 and 32 tokens");
});

test("a vLLM 0.31 decode worker that merges smaller blocks fails; 0.32 and equal blocks pass", () => {
  const attentionBackend = "FLASH_ATTN";
  const small = server("prefill", { blockSize: 16, ...sized(0.5), attentionBackend });
  const of = (vllmVersion: string, p = small) =>
    plan(p, server("decode", { attentionBackend }, { vllmVersion })).at(-1);
  expect(of("0.31.0")).toMatchObject({ id: "plan.vllm", status: "fail" });
  expect(of("0.31.0")?.found).toContain("the text is wrong");
  expect(of("0.32.0")).toMatchObject({ id: "plan.built", status: "ok" });
  expect(of("0.31.0", server("prefill", { attentionBackend }))).toMatchObject({
    id: "plan.built",
    status: "ok",
  });
});

test("vllm#52516: nvfp4 at TP 1 to 2 is refused by name, at equal TP sizes it is ok; an unknown type is assumed to be another", () => {
  const at = (cacheDtype: string | undefined, decodeTp: number) =>
    plan(server("prefill"), server("decode", sized(1 / decodeTp)), { decodeTp, cacheDtype })[0];
  expect(at("nvfp4", 2)).toMatchObject({ status: "fail", fix: "use equal TP sizes on both sides" });
  expect(at("nvfp4", 2)?.found).toMatch(
    /split by head, and blocks of cache dtype "nvfp4" do not keep heads and tokens apart: local 2 heads, TP 2, remote 4 heads, TP 1/,
  );
  expect(at("nvfp4", 1)).toMatchObject({ status: "ok" });
  expect(at("fp8", 2)?.found).not.toContain("assumed");
  expect(at(undefined, 2)?.found).toContain("assumed: a cache whose blocks are split by head");
});

test("field.md P3: an engine with states is planned with given kinds only", () => {
  const hybrid = { ssmSizes: [1000, 2000] as [number, number], regionGroupIds: [-1, -1, -1, -1] };
  const [p, d] = [server("prefill", hybrid), server("decode", hybrid)];
  expect(plan(p, d)).toMatchObject([
    {
      status: "note",
      found: expect.stringMatching(/no plan was tried: the engine has states/),
      fix: expect.stringMatching(/--groups full,mamba/),
    },
  ]);
});

test("field.md P3: several groups of attention are not planned on a guess", () => {
  const windows = { regionGroupIds: [0, 0, 1, 1] };
  const pair = [server("prefill", windows), server("decode", windows)] as const;
  expect(plan(...pair)).toMatchObject([
    {
      status: "note",
      found: expect.stringMatching(
        /no plan was tried: the engine has attention .* and 2 KV cache groups/,
      ),
      fix: expect.stringMatching(/--config .*--groups full,swa/),
    },
  ]);
  expect(plan(...pair, { groups: ["full", "swa"] })).toMatchObject([
    { id: "plan.built", status: "ok" },
  ]);
});

test("field.md P5: a plan in the direct form is not said to need a pass", () => {
  const attentionBackend = "FLASH_ATTN";
  const larger = server("prefill", { blockSize: 64, ...sized(2), attentionBackend });
  const [check] = plan(larger, server("decode", { attentionBackend }));
  expect(check?.found).toMatch(/blocks are cut so that each piece is read to its final place/);
});

test.each<[string, Partial<AgentMetadata>, Partial<AgentMetadata>, number]>([
  ["32 to 16", {}, { blockSize: 16, ...sized(0.5) }, 1],
  ["32 to 48", {}, { blockSize: 48, ...sized(1.5) }, 1],
  ["16 to 32 with more ranks at prefill", { blockSize: 16, ...sized(0.25) }, {}, 2],
])(
  "vllm#42895: kernel blocks of %s: vLLM's D refuses every request, and the check fails",
  (_, p, d, prefillTp) => expectRefused(p, d, /^a vLLM .* refuses a peer /, { prefillTp }),
);

function expectRefused(
  p: Partial<AgentMetadata>,
  d: Partial<AgentMetadata>,
  found: RegExp,
  more = {},
): void {
  const attentionBackend = "FLASH_ATTN";
  const checks = plan(
    server("prefill", { ...p, attentionBackend }),
    server("decode", { ...d, attentionBackend }),
    more,
  );
  expect(checks.at(-1)).toMatchObject({
    id: "plan.vllm",
    status: "fail",
    found: expect.stringMatching(found),
  });
}

const regions = METADATA.baseAddresses.map((_, region) => region);
test.each<[string, Partial<AgentMetadata>, RegExp]>([
  [
    "read-groups",
    { regionGroupIds: regions.map((region) => region % 2) },
    /belong to other KV cache groups/,
  ],
  [
    "mixed-memory",
    { regionMemoryTypes: regions.map((region) => (region === 0 ? "DRAM" : "VRAM")) },
    /regions in host and in device memory/,
  ],
  ["pcp-spans-dcp", { pcpSize: 4, dcpSize: 2 }, /refuses a peer with PCP 4 and DCP 2/],
  ["own-engine-id", { engineId: "decode" }, /both servers are engine decode/],
])(
  "field.md P2: %s, outside of the handshake's validation: the check fails for vLLM's reason",
  (_, p, found) => expectRefused(p, {}, found),
);
