import { spawnSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { pairOf, REFUSALS_FILE, refusalCases } from "./refusal-cases.js";

/**
 * Records which pairs of `fixtures/refusals.jsonl` vLLM refuses: `npx tsx tools/vllm/refusals.ts`.
 * Needs the peer of `setup.sh`; takes a minute for each version.
 */
const peer = process.env["KV_PEER_DIR"] ?? join(homedir(), ".cache/kv-peer");
const TREES = {
  "0.31.0": `${peer}/vllm31:${peer}/nixl14`,
  "0.32.0": "",
  "0.33.0": `${peer}/vllm33`,
} as const;

const cases = refusalCases();
const input = cases.map(({ changed }) => JSON.stringify(pairOf(changed))).join("\n");
const answers = Object.entries(TREES).map(([version, tree]) => {
  const { status, stdout, stderr } = spawnSync(
    `${peer}/vv/bin/python`,
    [join(import.meta.dirname, "refusals.py")],
    {
      input,
      encoding: "utf8",
      maxBuffer: 64 << 20,
      env: {
        ...process.env,
        PYTHONPATH: tree,
        VLLM_TARGET_DEVICE: "cpu",
        VLLM_NO_USAGE_STATS: "1",
      },
    },
  );
  if (status !== 0) throw new Error(`vLLM ${version}: ${stderr.slice(-2000)}`);
  const lines = stdout.split("\n").filter((line) => line === "null" || line.startsWith('"'));
  if (lines.length !== cases.length)
    throw new Error(`vLLM ${version}: ${lines.length} answers for ${cases.length} pairs`);
  return [version, lines.map((line) => JSON.parse(line) as string | null)] as const;
});
const lines = cases.map(({ changed }, at) => {
  const says = Object.fromEntries(answers.map(([version, all]) => [version, all[at]]));
  return `${JSON.stringify({ changed, says })}\n`;
});
writeFileSync(REFUSALS_FILE, lines.join(""));
