import { execFile } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { expect, onTestFinished, test } from "vitest";

const run = promisify(execFile);
const native = fileURLToPath(new URL("../../../../native/", import.meta.url));

test("PollBackoff: an idle agent's thread sleeps, and does not pause while a peer's data arrives", async () => {
  const folder = await mkdtemp(join(tmpdir(), "kv-poll-backoff-"));
  onTestFinished(() => rm(folder, { recursive: true }));
  const program = join(folder, "poll_backoff_test");
  const units = ["test/poll_backoff_test.cc", "src/agent/poll_backoff.cc"].map((file) => join(native, file));
  const flags = ["-std=c++20", "-O1", `-I${join(native, "src")}`];
  await run(process.env["CXX"] ?? "c++", [...flags, ...units, "-o", program]);
  // The program exits with the number of failed expectations and prints them to stderr.
  await expect(run(program)).resolves.toBeDefined();
}, 60_000);
