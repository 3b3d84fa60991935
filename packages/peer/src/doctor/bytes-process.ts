import { fork } from "node:child_process";
import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import type { BytesOutcome } from "./bytes-checks.js";
import type { BytesAnswer, BytesQuestion } from "./bytes-probe.js";
import { readUcxLanes } from "./ucx-lanes.js";

const KEPT_OUTPUT = 1 << 20;

/** In the package the builds lie beside one another; in the repository the sources run through tsx. */
function childFile(): { file: string; execArgv: string[] } {
  const built = fileURLToPath(new URL("./bytes-child.js", import.meta.url));
  if (existsSync(built)) return { file: built, execArgv: [] };
  return {
    file: fileURLToPath(new URL("../bytes-child.ts", import.meta.url)),
    execArgv: ["--import", "tsx"],
  };
}

/** Puts the question to a process of its own, and ends it when it has not answered in time. Never throws. */
export function bytesInProcess(question: BytesQuestion, timeoutMs: number): Promise<BytesOutcome> {
  return new Promise((resolve) => {
    const { file, execArgv } = childFile();
    const child = fork(file, {
      execArgv,
      stdio: ["ignore", "pipe", "pipe", "ipc"],
      // UCX's own account of what it uses; nothing but its output depends on it.
      env: { ...process.env, UCX_PROTO_INFO: "y" },
    });
    let output = "";
    const keep = (chunk: string) => {
      output = (output + chunk).slice(-KEPT_OUTPUT);
    };
    child.stdout?.setEncoding("utf8").on("data", keep);
    child.stderr?.setEncoding("utf8").on("data", keep);
    let said: { answer?: BytesAnswer; error?: { code: string; message: string; hint?: string } } | undefined;
    let late = false;
    child.on("message", (message) => {
      said = message as typeof said;
    });
    const timer = setTimeout(() => {
      late = true;
      child.kill("SIGKILL");
    }, timeoutMs);
    child.on("error", (error) => {
      clearTimeout(timer);
      resolve({ kind: "died", how: error.message });
    });
    child.on("close", (code, signal) => {
      clearTimeout(timer);
      if (said?.answer !== undefined) {
        resolve({ kind: "answered", answer: said.answer, lanes: readUcxLanes(output) });
      } else if (said?.error !== undefined) resolve({ kind: "failed", ...said.error });
      else if (late) resolve({ kind: "late", timeoutMs });
      else resolve({ kind: "died", how: signal ?? `exit code ${code}` });
    });
    child.send(question);
  });
}
