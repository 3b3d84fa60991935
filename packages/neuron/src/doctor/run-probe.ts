import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";
import type { Probe, ProbeMessage } from "./probe-answers.js";

/** How a probe ended. Whatever the library does to its process is an outcome here. */
export type ProbeOutcome =
  | { readonly kind: "answered"; readonly answer: unknown }
  | { readonly kind: "failed"; readonly error: string; readonly hint?: string }
  | { readonly kind: "died"; readonly how: string; readonly stage: string; readonly output: string }
  | { readonly kind: "late"; readonly timeoutMs: number; readonly stage: string };

const KEPT_OUTPUT = 2000;
/** Of the process itself, which a busy machine makes slow; the library is not in it yet. */
const START_TIMEOUT_MS = 300_000;
/** In the repository the sources run as they are, through tsx; in the package the build does. */
const isSource = import.meta.url.endsWith(".ts");

/** Runs a probe in another process, and kills it when a stage of it takes longer than `timeoutMs`. */
export function runProbe(
  probe: Probe,
  { env, timeoutMs }: { env: Readonly<Record<string, string | undefined>>; timeoutMs: number },
): Promise<ProbeOutcome> {
  const file = fileURLToPath(new URL(isSource ? "./probe.ts" : "./probe.js", import.meta.url));
  return new Promise((resolve) => {
    const child = spawn(process.execPath, [...(isSource ? ["--import", "tsx"] : []), file, probe], {
      stdio: ["ignore", "pipe", "pipe", "ipc"],
      env: env as NodeJS.ProcessEnv,
    });
    let stage = "its start";
    let output = "";
    let outcome: ProbeOutcome | undefined;
    const keep = (chunk: string) => {
      output = (output + chunk).slice(-KEPT_OUTPUT);
    };
    child.stdout?.setEncoding("utf8").on("data", keep);
    child.stderr?.setEncoding("utf8").on("data", keep);
    let late = false;
    const patience = (ms: number) =>
      setTimeout(() => {
        late = true;
        child.kill("SIGKILL");
      }, ms);
    let timer = patience(Math.max(timeoutMs, START_TIMEOUT_MS));
    child.on("message", (message) => {
      const said = message as ProbeMessage;
      clearTimeout(timer);
      timer = patience(timeoutMs);
      if ("stage" in said) stage = said.stage;
      else if ("error" in said) outcome = { kind: "failed", ...said };
      else outcome = { kind: "answered", answer: said.answer };
    });
    child.once("error", (error) => {
      clearTimeout(timer);
      resolve({ kind: "died", how: error.message, stage, output });
    });
    child.once("close", (code, signal) => {
      clearTimeout(timer);
      if (late) resolve({ kind: "late", timeoutMs, stage });
      // An answer and then a crash is a crash: whoever does the same in its own process would see it.
      else if (code === 0 && outcome !== undefined) resolve(outcome);
      else resolve({ kind: "died", how: signal ?? `exit code ${code}`, stage, output: output.trim() });
    });
  });
}
