import { execFile } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { expect, onTestFinished, test } from "vitest";

const run = promisify(execFile);
const native = fileURLToPath(new URL("../../../../native/", import.meta.url));

test("polling of an agent's thread: it sleeps when idle, and does not pause while a peer sends data", async () => {
  const folder = await mkdtemp(join(tmpdir(), "kv-pace-"));
  onTestFinished(() => rm(folder, { recursive: true }));
  const program = join(folder, "pace_test");
  const units = ["test/pace_test.cc", "src/pace.cc"].map((file) => join(native, file));
  await run(process.env["CXX"] ?? "c++", ["-std=c++20", "-O1", ...units, "-o", program]);
  // It reports failures on stderr and by its exit code.
  await expect(run(program)).resolves.toBeDefined();
}, 60_000);
