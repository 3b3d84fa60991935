import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { join } from "node:path";
import { builtProgram } from "@kv/testing/node-programs";

const root = join(import.meta.dirname, "../../..");

/** Ends a process, and waits until it has ended. */
async function end(child: ChildProcess, signal: NodeJS.Signals): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const exited = once(child, "exit");
  child.kill(signal);
  await exited;
}

/** A `kv-epp` that runs from its sources. */
export interface RunningPicker {
  readonly port: number;
  readonly metricsUrl: string;
  /** Ends it without notice. */
  kill(): Promise<void>;
  /** Ends it as an operator does; resolves when it has ended, with its exit code. */
  stop(): Promise<number | null>;
}

/** Starts `kv-epp` and waits until it says that it is ready. */
export async function startPicker(args: readonly string[], port = 0): Promise<RunningPicker> {
  const flags = ["--port", `${port}`, "--metrics-port", "0", "--log-level", "warn"];
  const all = [builtProgram("kv-epp"), ...flags, ...args];
  const child = spawn(process.execPath, all, { cwd: root, stdio: ["ignore", "pipe", "pipe"] });
  let log = "";
  child.stderr.on("data", (chunk) => {
    log = `${log}${chunk}`.slice(-4_000);
  });
  const exited = once(child, "exit").then(() => {
    throw new Error(`kv-epp did not start: ${log}`);
  });
  exited.catch(() => {});
  const [line] = (await Promise.race([once(child.stdout, "data"), exited])) as [Buffer];
  const [, at = "", metricsUrl = ""] =
    /ready 127\.0\.0\.1:(\d+) .* metrics (\S+)/.exec(String(line)) ?? [];
  return {
    port: Number(at),
    metricsUrl,
    kill: () => end(child, "SIGKILL"),
    async stop() {
      await end(child, "SIGTERM");
      return child.exitCode;
    },
  };
}
