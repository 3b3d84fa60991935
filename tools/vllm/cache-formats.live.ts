import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { expect, test } from "vitest";
import { PEER_DIR } from "./server.js";

const here = (path: string) => new URL(path, import.meta.url);

test("the fixture of cache dtypes and attention backends is what vLLM 0.33 says (vllm#52516)", () => {
  const printed = execFileSync(
    join(PEER_DIR, "vv/bin/python"),
    [here("cache_formats.py").pathname],
    {
      env: { ...process.env, PYTHONPATH: join(PEER_DIR, "vllm33") },
      stdio: ["ignore", "pipe", "ignore"],
    },
  );
  const fixture = readFileSync(
    here("../../packages/plan/fixtures/vllm-cache-formats.json"),
    "utf8",
  );
  expect(JSON.parse(printed.toString())).toEqual(JSON.parse(fixture));
});
