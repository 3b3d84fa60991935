import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import type { DescribedLibrary } from "../libnrt.js";

/** What a probe tries: to load the library, or to initialise the runtime and copy. */
export type Probe = "library" | "runtime";

/** Result of the probe "runtime". */
export interface TriedRuntime {
  /** Duration of `nrt_init`. */
  readonly initMs: number;
  /** True when bytes that were written to a tensor were read back unchanged. */
  readonly copied: boolean;
}

/** A message from a probe's process: a step that begins, the result, or an error. */
export type ProbeMessage =
  | { readonly step: string }
  | { readonly result: DescribedLibrary | TriedRuntime }
  | { readonly error: string; readonly hint?: string | undefined };

/** How a probe ended. A crash or a hang of its process is an outcome as well. */
export type ProbeOutcome =
  | { readonly kind: "finished"; readonly result: unknown }
  | { readonly kind: "failed"; readonly error: string; readonly hint?: string | undefined }
  | { readonly kind: "died"; readonly cause: string; readonly step: string; readonly output: string }
  | { readonly kind: "timeout"; readonly timeoutMs: number; readonly step: string };

/** Characters of output that are kept for the report. */
const MAX_OUTPUT = 2000;
/** Limit for the start of the process, before it loads the library. A busy machine makes it slow. */
const START_TIMEOUT_MS = 300_000;

/** Runs a probe in a process of its own and kills it when one step takes longer than `timeoutMs`. */
export function runProbe(
  probe: Probe,
  { env, timeoutMs }: { env: Readonly<Record<string, string | undefined>>; timeoutMs: number },
): Promise<ProbeOutcome> {
  const file = createRequire(import.meta.url).resolve("@kv/neuron/probe");
  return new Promise((resolve) => {
    const child = spawn(process.execPath, [file, probe], {
      stdio: ["ignore", "pipe", "pipe", "ipc"],
      env: env as NodeJS.ProcessEnv,
    });
    let step = "its start";
    let output = "";
    let outcome: ProbeOutcome | undefined;
    const keep = (chunk: string) => {
      output = (output + chunk).slice(-MAX_OUTPUT);
    };
    child.stdout?.setEncoding("utf8").on("data", keep);
    child.stderr?.setEncoding("utf8").on("data", keep);
    let timedOut = false;
    const killAfter = (ms: number) =>
      setTimeout(() => {
        timedOut = true;
        child.kill("SIGKILL");
      }, ms);
    let timer = killAfter(Math.max(timeoutMs, START_TIMEOUT_MS));
    child.on("message", (message) => {
      const received = message as ProbeMessage;
      clearTimeout(timer);
      timer = killAfter(timeoutMs);
      if ("step" in received) step = received.step;
      else if ("error" in received) outcome = { kind: "failed", ...received };
      else outcome = { kind: "finished", result: received.result };
    });
    child.once("error", (error) => {
      clearTimeout(timer);
      resolve({ kind: "died", cause: error.message, step, output });
    });
    child.once("close", (code, signal) => {
      clearTimeout(timer);
      if (timedOut) resolve({ kind: "timeout", timeoutMs, step });
      // A result followed by a crash is a crash: an engine would crash in the same way.
      else if (code === 0 && outcome !== undefined) resolve(outcome);
      else resolve({ kind: "died", cause: signal ?? `exit code ${code}`, step, output: output.trim() });
    });
  });
}
