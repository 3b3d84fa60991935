// A long suite: runs kv-nixl bench between processes.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { benchReportSchema } from "@kv/nixl/reports";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { builtProgram } from "@kv/testing/node-programs";
import { describe, expect, test } from "vitest";
import { run } from "../support/run-child.js";

const CLI = [builtProgram("kv-nixl")];
const ROOT = fileURLToPath(new URL("../../../..", import.meta.url));
const bench = (...args: string[]) => run([...CLI, "bench", ...args]);
const SMALL = ["--sizes", "256KiB,1MiB", "--blocks", "4KiB,512KiB", "--rounds", "2"];

describe.skipIf(nixlMissing)(`kv-nixl bench (${nixlMissing ?? "found"})`, () => {
  test("two processes: reports each combination with its parts, and equal bytes on both sides", async () => {
    const { code, stdout, stderr } = await bench(
      ...SMALL,
      "--order",
      "contiguous,scattered",
      "--json",
    );
    expect(code, stderr).toBe(0);
    const { rows, backends } = benchReportSchema.parse(JSON.parse(stdout));
    expect(backends).toEqual(["UCX"]);
    // 512 KiB does not fit into 256 KiB.
    expect(rows).toHaveLength(3 * 2 * 2);
    for (const row of rows) {
      expect(row).toMatchObject({ rounds: 2, consistent: true });
      for (const part of [row.prepareMs, row.postMs, row.transferMs, row.totalMs]) {
        expect(part.min).toBeGreaterThanOrEqual(0);
        expect(part.max).toBeGreaterThanOrEqual(part.median);
      }
      expect(row.totalMs.max).toBeGreaterThanOrEqual(row.transferMs.min);
    }
  });

  test("two hosts: a listening target has a limit, serves, and exits on a signal", async () => {
    const listen = [...CLI, "bench", "--listen", "127.0.0.1:0", "--max-bytes", "1MiB"];
    const target = spawn(process.execPath, listen, {
      cwd: ROOT,
      stdio: ["ignore", "pipe", "ignore"],
    });
    try {
      const { value } = await createInterface({ input: target.stdout })
        [Symbol.asyncIterator]()
        .next();
      const [, port = ""] = /listening on 127\.0\.0\.1:(\d+)/.exec(String(value)) ?? [];
      const connect = ["--connect", `127.0.0.1:${port}`];
      const most = await bench(...connect, "--sizes", "2MiB");
      expect(most).toMatchObject({ code: 2, stderr: expect.stringContaining("raise --max-bytes") });
      const { code, stdout } = await bench(...connect, ...SMALL, "--operation", "READ");
      expect(code).toBe(0);
      expect(stdout).toMatch(/READ +1 MiB +4 KiB +scattered .* yes$/m);
    } finally {
      target.kill("SIGTERM");
    }
    expect(await once(target, "exit")).toEqual([0, null]);
  });

  test("exits with 2 when no target listens at the address", async () => {
    const end = await bench("--connect", "127.0.0.1:1");
    expect(end).toMatchObject({
      code: 2,
      stderr: expect.stringContaining("KV_SIDE_CHANNEL_UNREACHABLE"),
    });
  });
});
