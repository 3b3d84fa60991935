import { fork } from "node:child_process";
import { createRequire } from "node:module";
import type { ProbeRequest, ProbeResult } from "./memory-probe.js";
import { readUcxLanes, type UcxLane } from "./ucx-lanes.js";

/** How the child process ended. */
export type ProbeOutcome =
  | { readonly kind: "completed"; readonly result: ProbeResult; readonly lanes: readonly UcxLane[] }
  | {
      readonly kind: "failed";
      readonly code: string;
      readonly message: string;
      readonly hint?: string | undefined;
    }
  | { readonly kind: "crashed"; readonly how: string }
  | { readonly kind: "timeout"; readonly timeoutMs: number };

/** The message that the child sends back. */
export type ProbeReply =
  | { readonly result: ProbeResult }
  | {
      readonly error: { readonly code: string; readonly message: string; readonly hint?: string | undefined };
    };

const MAX_KEPT_OUTPUT = 1 << 20;

/** Runs `probeMemory` over NIXL in a child process and kills it after `timeoutMs`. `environment` is added to this one's. Never rejects. */
export function probeInChildProcess(
  request: ProbeRequest,
  timeoutMs: number,
  environment: Readonly<Record<string, string>> = {},
): Promise<ProbeOutcome> {
  return new Promise((resolve) => {
    const child = fork(createRequire(import.meta.url).resolve("@kv/peer/probe-child"), {
      stdio: ["ignore", "pipe", "pipe", "ipc"],
      // Makes UCX print the transports that it uses.
      env: { ...process.env, UCX_PROTO_INFO: "y", ...environment },
    });
    let output = "";
    const append = (chunk: string) => {
      output = (output + chunk).slice(-MAX_KEPT_OUTPUT);
    };
    child.stdout?.setEncoding("utf8").on("data", append);
    child.stderr?.setEncoding("utf8").on("data", append);
    let reply: ProbeReply | undefined;
    let isTimedOut = false;
    child.on("message", (message) => {
      reply = message as ProbeReply;
    });
    const timer = setTimeout(() => {
      isTimedOut = true;
      child.kill("SIGKILL");
    }, timeoutMs);
    child.on("error", (error) => {
      clearTimeout(timer);
      resolve({ kind: "crashed", how: error.message });
    });
    child.on("close", (code, signal) => {
      clearTimeout(timer);
      if (reply !== undefined && "result" in reply)
        resolve({ kind: "completed", result: reply.result, lanes: readUcxLanes(output) });
      else if (reply !== undefined) resolve({ kind: "failed", ...reply.error });
      else if (isTimedOut) resolve({ kind: "timeout", timeoutMs });
      else resolve({ kind: "crashed", how: signal ?? `exit code ${code}` });
    });
    child.send(request);
  });
}
