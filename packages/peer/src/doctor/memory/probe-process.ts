import { createRequire } from "node:module";
import { type ChildOutcome, runInChild } from "@kv/program";
import type { ProbeRequest, ProbeResult } from "./memory-probe.js";

/**
 * Runs `probeMemory` over NIXL in a child process and kills it after `timeoutMs`. `environment` is
 * added to this one's. Never rejects.
 */
export function probeInChildProcess(
  request: ProbeRequest,
  timeoutMs: number,
  environment: Readonly<Record<string, string>> = {},
): Promise<ChildOutcome<ProbeResult>> {
  return runInChild({
    module: createRequire(import.meta.url).resolve("@kv/peer/probe-child"),
    request,
    timeoutMs,
    // Makes UCX print the transports that it uses.
    env: { ...process.env, UCX_PROTO_INFO: "y", ...environment },
  });
}
