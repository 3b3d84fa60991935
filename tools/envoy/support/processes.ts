import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { freePorts } from "../../vllm/free-ports.js";
import { type EnvoyOptions, envoyConfig } from "./envoy-config.js";
import { findEnvoy } from "./find-envoy.js";

const root = join(import.meta.dirname, "../../..");

/** Ends a process, and waits until it has ended. */
async function end(child: ChildProcess, signal: NodeJS.Signals): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const exited = once(child, "exit");
  child.kill(signal);
  await exited;
}

/** An Envoy that runs. */
export interface RunningEnvoy {
  /** For clients. */
  readonly url: string;
  readonly adminUrl: string;
  close(): Promise<void>;
}

/** Starts Envoy in front of a picker and decode instances, and waits until it is ready. */
export async function startEnvoy(options: Omit<EnvoyOptions, "port" | "adminPort">): Promise<RunningEnvoy> {
  const [port = 0, adminPort = 0] = await freePorts(2);
  const folder = mkdtempSync(join(tmpdir(), "kv-envoy-"));
  const file = join(folder, "envoy.json");
  writeFileSync(file, JSON.stringify(envoyConfig({ ...options, port, adminPort })));
  const flags = ["--concurrency", "1", "--log-level", "error", "--disable-hot-restart"];
  const child = spawn(await findEnvoy(), ["-c", file, ...flags], { stdio: ["ignore", "ignore", "pipe"] });
  let log = "";
  child.stderr.on("data", (chunk) => {
    log = `${log}${chunk}`.slice(-4_000);
  });
  const close = async () => {
    await end(child, "SIGKILL");
    rmSync(folder, { recursive: true, force: true });
  };
  const adminUrl = `http://127.0.0.1:${adminPort}`;
  for (let attempts = 0; attempts < 300 && child.exitCode === null; attempts += 1) {
    const ready = await fetch(`${adminUrl}/ready`).catch(() => undefined);
    if (ready?.status === 200) return { url: `http://127.0.0.1:${port}`, adminUrl, close };
    await sleep(50);
  }
  await close();
  throw new Error(`Envoy did not start: ${log}`);
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
  const cli = join(root, "packages/epp/src/cli.ts");
  const all = [
    "--import",
    "tsx",
    cli,
    "--port",
    `${port}`,
    "--metrics-port",
    "0",
    "--log-level",
    "warn",
    ...args,
  ];
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
  const [, at = "", metricsUrl = ""] = /ready 127\.0\.0\.1:(\d+) .* metrics (\S+)/.exec(String(line)) ?? [];
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
