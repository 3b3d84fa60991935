import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { KvError } from "@kv/interface";
import { type EnvoyOptions, envoyConfig } from "./envoy-config.js";
import { installEnvoy } from "./install-envoy.js";

/** An Envoy that runs; its admin routes drain it. */
export interface EnvoyProcess {
  readonly url: string;
  readonly adminUrl: string;
  /** Ends it at once. */
  stop(): Promise<void>;
}

const READY_TIMEOUT_MS = 60_000;
/** Ends Envoy when standard input closes: by `stop`, or because this process has ended. */
const GUARD = `exec 3<&0; "$@" </dev/null 3<&- & envoy=$!; (cat <&3 >/dev/null; kill -9 $envoy 2>/dev/null) & exec 3<&-; wait $envoy`;

/**
 * Starts Envoy in front of a picker and decode instances, and waits until it is ready.
 * @throws `KV_INSTALL_FAILED`, `KV_ENGINE_FAILED`.
 */
export async function startEnvoy({ port = 0, ...options }: EnvoyOptions): Promise<EnvoyProcess> {
  const binary = await installEnvoy();
  const folder = mkdtempSync(join(tmpdir(), "kv-envoy-"));
  const config = join(folder, "envoy.json");
  const adminAddress = join(folder, "admin");
  writeFileSync(config, JSON.stringify(envoyConfig({ ...options, port })));
  const flags = ["--concurrency", "1", "--log-level", "error", "--disable-hot-restart"];
  const command = [binary, "-c", config, "--admin-address-path", adminAddress, ...flags];
  const child = spawn("sh", ["-c", GUARD, "sh", ...command], { stdio: ["pipe", "ignore", "pipe"] });
  child.stdin.on("error", () => {});
  let log = "";
  child.stderr.on("data", (chunk) => {
    log = `${log}${chunk}`.slice(-4_000);
  });
  const ended = once(child, "exit").then(() => {
    child.stdin.destroy();
    rmSync(folder, { recursive: true, force: true });
  });
  const stop = async () => {
    child.stdin.end();
    await ended;
  };
  const until = performance.now() + READY_TIMEOUT_MS;
  while (child.exitCode === null && performance.now() < until) {
    const adminUrl = existsSync(adminAddress)
      ? `http://${readFileSync(adminAddress, "utf8")}`
      : undefined;
    const bound = adminUrl === undefined ? undefined : await portWhenReady(adminUrl);
    if (adminUrl !== undefined && bound !== undefined)
      return { url: `http://127.0.0.1:${bound}`, adminUrl, stop };
    await sleep(50);
  }
  await stop();
  throw new KvError("KV_ENGINE_FAILED", `Envoy was not ready: ${log.trim()}`, {
    hint: "is its port taken?",
  });
}

/** The port for clients, when Envoy serves them. */
async function portWhenReady(adminUrl: string): Promise<number | undefined> {
  const ready = await fetch(`${adminUrl}/ready`).catch(() => undefined);
  if (ready?.status !== 200) return undefined;
  const { listener_statuses: listeners } = (await (
    await fetch(`${adminUrl}/listeners?format=json`)
  ).json()) as {
    readonly listener_statuses?: readonly {
      readonly local_address: { readonly socket_address: { readonly port_value: number } };
    }[];
  };
  return listeners?.[0]?.local_address.socket_address.port_value;
}
