import { spawnSync } from "node:child_process";
import { cpSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { bundled } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, expect, test } from "vitest";

const root = fileURLToPath(new URL("../..", import.meta.url));
const folder = scratchFolder();
let program = "";
beforeAll(async () => {
  program = await bundled(fileURLToPath(new URL("main.ts", import.meta.url)));
});

const run = (args: readonly string[]) => start([program, ...args], folder);

/** As npm starts it: in the root, with paths relative to the folder of the command. */
const runScript = (args: readonly string[]) =>
  start([join(root, "tools/conformance/conformance.mjs"), ...args], root);

function start(args: readonly string[], cwd: string) {
  const { status, stdout } = spawnSync(process.execPath, args, {
    cwd,
    encoding: "utf8",
    env: { ...process.env, INIT_CWD: folder },
  });
  const lines = stdout.trimEnd().split("\n");
  return { status, lines, last: lines.at(-1) };
}

function file(name: string, cases: readonly unknown[]): string {
  const lines = [{ meta: { vllm: "0.33.0" } }, ...cases].map((one) => JSON.stringify(one));
  writeFileSync(join(folder, name), `${lines.join("\n")}\n`);
  return name;
}

const blocks = (ratio: number, out: unknown) => ({
  in: { fn: "logical_to_kernel_block_ids", groups: ["full"], ratio, block_ids: [[1]] },
  out,
});
const mapping = {
  tp_rank: 0,
  kv_heads: 4,
  is_mla: false,
  groups: ["full"],
  dcp_size: 1,
  remote_dcp_size: 1,
};

test("equal results and shared refusals pass; differences and cases that it cannot handle fail", () => {
  const name = file("mixed.jsonl", [
    blocks(2, [[2, 3]]),
    blocks(2, [[2, 4]]),
    {
      in: { ...mapping, tp_size: 2, remote_tp_size: 3 },
      error: { type: "AssertionError", msg: "not divisible" },
    },
    {
      in: { ...mapping, tp_size: 1, remote_tp_size: 1 },
      error: { type: "AssertionError", msg: "made up" },
    },
    { in: { something: "else" }, out: 1 },
    { in: { ...blocks(2, 0).in, groups: ["ring"] }, out: [[2, 3]] },
    "no vector",
  ]);
  const { status, last, lines } = runScript([name]);
  expect(last).toBe("2 passed, 5 failed");
  expect(status).toBe(1);
  expect(
    lines
      .filter((line) => line.startsWith("FAIL"))
      .map((line) => /:(\d+): (.{12})/.exec(line)?.slice(1)),
  ).toEqual([
    ["3", "out[0][1]: 3"],
    ["5", "vLLM refuses"],
    ["6", "no known fam"],
    ["7", "in.groups is"],
    ["8", "the line is "],
  ]);
});

test("--only selects cases by the JSON text of an input field", () => {
  const name = file("only.jsonl", [blocks(2, [[2, 3]]), blocks(3, [[9]]), blocks(1, [[1]])]);
  expect(run(["--only", "ratio=2", name])).toMatchObject({ status: 0, last: "1 passed, 0 failed" });
  expect(run(["--only", 'groups=["full"]', "--only", "ratio=3", name])).toMatchObject({
    status: 1,
    last: "0 passed, 1 failed",
  });
  expect(run(["--only", "ratio=7", name])).toMatchObject({ status: 1, last: "0 passed, 0 failed" });
});

test("a case that vLLM refuses and we support is counted as beyond, by rule", () => {
  const input = {
    tp_rank: 0,
    tp_size: 1,
    remote_tp_size: 4,
    kv_heads: 2,
    is_mla: false,
    has_mamba: false,
    prefix_caching: true,
    block_size: 16,
    remote_block_size: 16,
    dcp_size: 1,
    remote_dcp_size: 1,
    ppl: 1,
    remote_ppl: 1,
    layout: "LBHNC",
    remote_layout: "LBHNC",
    backend: "X",
    remote_backend: "X",
    enable_permute_local_kv: false,
    block_len: 1024,
    remote_block_len: 512,
    remote_block_stride: 512,
    remote_regions: 2,
    remote_names: ["l0", "l1"],
    is_hma_required: false,
    use_host_buffer: false,
  };
  const refused = { in: input, error: { type: "AssertionError", msg: "" } };
  const { status, lines } = run([file("beyond.jsonl", [refused, blocks(1, [[1]])])]);
  expect(status).toBe(0);
  expect(lines.slice(-3)).toEqual([
    "beyond, by rule prefill-tp-above-kv-heads: 1",
    "1 beyond",
    "1 passed, 0 failed",
  ]);
  // The rule does not match another refusal of the same input.
  const other = { in: input, error: { type: "RuntimeError", msg: "something else" } };
  expect(run([file("other.jsonl", [other])])).toMatchObject({
    status: 1,
    last: "0 passed, 1 failed",
  });
});

test("a missing file or folder fails", () => {
  expect(run(["absent.jsonl"])).toMatchObject({ status: 1, last: "0 passed, 1 failed" });
  expect(run(["--wire", "absent"])).toMatchObject({ status: 1, last: "0 passed, 1 failed" });
});

/** A copy of the recorded traffic in which `change` rewrites the lines of one run's handshakes. */
function recordedTraffic(
  name: string,
  change: (handshakes: Record<string, unknown>[]) => unknown[],
): string {
  const copy = join(folder, name);
  cpSync(join(root, "packages/protocol/fixtures/wire"), copy, { recursive: true });
  for (const recording of ["pull_p1d2", "v33_push_p1d2"]) {
    const path = join(copy, `${recording}.handshake_agents.jsonl`);
    const lines = readFileSync(path, "utf8").trimEnd().split("\n");
    const changed = change(lines.map((line) => JSON.parse(line) as Record<string, unknown>));
    writeFileSync(path, changed.map((line) => `${JSON.stringify(line)}\n`).join(""));
  }
  return copy;
}

function ofAnotherEngine(handshakes: Record<string, unknown>[]): unknown[] {
  const ofAnother = structuredClone(handshakes);
  for (const line of ofAnother) {
    const meta = line["meta"] as Record<string, unknown> | undefined;
    if (meta === undefined) continue;
    meta["engine_id"] = "another-engine";
    meta["num_blocks"] = 20;
    meta["region_num_blocks"] = (meta["region_num_blocks"] as number[]).map(() => 20);
  }
  return ofAnother;
}

test.each<[string, Parameters<typeof recordedTraffic>[1]]>([
  ["twice with one engine", (handshakes) => [...handshakes, ...handshakes]],
  ["with two engines", (handshakes) => [...ofAnotherEngine(handshakes), ...handshakes]],
])("replays a recording in which a worker shakes hands %s", (name, change) => {
  const { status, last, lines } = run(["--wire", recordedTraffic(name, change)]);
  expect(lines.filter((line) => line.startsWith("FAIL"))).toEqual([]);
  expect(last).toBe("139 passed, 0 failed");
  expect(status).toBe(0);
});
