import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { KvError } from "@kv/interface";
import { runCommand } from "@kv/program";
import { z } from "zod";
import { parseJson } from "../http/http-request.js";

const wireSchema = z.object({
  vllm: z.string().max(200).nullable(),
  connectorVersion: z.int().nullable(),
  wire: z.record(z.string(), z.record(z.string(), z.string())),
  checks: z.array(z.string()),
  requests: z.record(z.string(), z.array(z.string())).nullable(),
});
const errorSchema = z.object({ error: z.object({ message: z.string(), hint: z.string() }) });

/**
 * Named as in `vllmWire` and `vllmRequests`; null without an API server. A section that was not
 * found is absent.
 */
export type WireReading = z.infer<typeof wireSchema>;

const TIMEOUT_MS = 50_000;

/**
 * Parses the sources with Python's own `ast` and `zipfile`, which every user of vLLM has. vLLM's
 * code is not executed.
 *
 * @throws `KV_CONFIG_INVALID` when the input is neither a wheel nor a tree or is damaged, and when
 * there is no python3.
 */
export async function readWire(wheelOrTree: string): Promise<WireReading> {
  const script = join(
    dirname(createRequire(import.meta.url).resolve("@kv/peer/package.json")),
    "python/read_wire.py",
  );
  // -I: no module of the current folder or the user's environment is imported.
  const args = ["-I", "-S", "-W", "ignore", script, wheelOrTree];
  const { exitCode, how, isFound, stdout, stderr } = await runCommand("python3", args, {
    timeoutMs: TIMEOUT_MS,
  });
  if (!isFound) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      "python3 was not found on PATH; it parses vLLM's Python sources",
      {
        hint: "install Python 3.9 or newer, such as: apt-get install python3",
      },
    );
  }
  const output = exitCode === 0 ? parseJson(stdout) : undefined;
  const reading = wireSchema.safeParse(output);
  if (reading.success) return reading.data;
  const refusal = errorSchema.safeParse(output);
  if (refusal.success) {
    const { message, hint } = refusal.data.error;
    throw new KvError("KV_CONFIG_INVALID", message, { hint });
  }
  const why = stderr.trim().split("\n").at(-1) || `python3: ${how}`;
  throw new KvError("KV_CONFIG_INVALID", `${wheelOrTree} could not be read: ${why}`, {
    hint: "is it a wheel or a source tree of vLLM? A newer python3 on PATH may be needed",
  });
}
