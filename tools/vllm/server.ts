import { spawn } from "node:child_process";
import { once } from "node:events";
import {
  createWriteStream,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
} from "node:fs";
import { homedir, tmpdir } from "node:os";
import { join } from "node:path";
import { freePorts } from "@kv/testing/free-ports";
import { afterAll, beforeEach } from "vitest";
import { ONE_USE, plain } from "./completion.js";
import { CONNECTOR_NAMES, type PeerKind, prompt } from "./tiny-peer.js";
import { until } from "./until.js";

export const PEER_DIR = process.env.KV_PEER_DIR ?? join(homedir(), ".cache", "kv-peer");

/** Python sources of a release that `setup.sh` has installed. */
export function sourcesOf(version: PeerKind["version"]): string {
  if (version !== "0.32") return join(PEER_DIR, `vllm${version.replace("0.", "")}`);
  const lib = join(PEER_DIR, "vv", "lib");
  const [python = ""] = readdirSync(lib).filter((name) => name.startsWith("python"));
  return join(lib, python, "site-packages");
}

/** Kept, so that a run against another version can be compared. */
export function recordingFolder(name: string): string {
  const folder = join(PEER_DIR, "recordings", name);
  mkdirSync(folder, { recursive: true });
  return folder;
}

export interface VllmOptions {
  readonly kind: PeerKind;
  readonly name: string;
  readonly tp?: number;
  /** Of HTTP and the side channel. Default: free ones. */
  readonly ports?: readonly [number, number];
  readonly blocks?: number;
  readonly leaseSeconds?: number;
  readonly extra?: Readonly<Record<string, unknown>>;
  readonly args?: readonly string[];
  readonly env?: Readonly<Record<string, string>>;
}

export type VllmServer = Awaited<ReturnType<typeof startVllm>>;

const READY_WITHIN_MS = 540_000;
const PUSH_WAIT_SECONDS = 60;
const POLL_MS = 500;
const SHOWN_LINES = 60;

const script = (name: string) => join(import.meta.dirname, name);

/** It has computed once, so that this is not part of its first handshake. */
export async function startVllm(options: VllmOptions) {
  const { kind, name, tp = 1, blocks = 64, leaseSeconds = 60, extra, args = [], env } = options;
  const [port = 0, sideChannelPort = 0] = options.ports ?? (await freePorts(2));
  const folder = mkdtempSync(join(tmpdir(), `kv-vllm-${name}-`));
  const logFile = join(folder, "log");
  const connector = CONNECTOR_NAMES[kind.mode];
  const config = JSON.stringify({
    kv_lease_duration: leaseSeconds,
    // Else a push D runs empty steps for eight minutes while it waits for a P that is gone.
    ...(kind.mode === "push" ? { push_registration_timeout: PUSH_WAIT_SECONDS } : {}),
    ...extra,
  });
  const serve = [script("serve.sh"), port, sideChannelPort, connector, blocks, tp, config, ...args];
  // The guard ends the server when its stdin closes: by `stop`, or because this process is gone.
  const child = spawn(script("guard.sh"), serve.map(String), {
    detached: true,
    stdio: ["pipe", "pipe", "pipe"],
    env: { ...process.env, ...env, KV_PEER_DIR: PEER_DIR, PEER_VLLM: kind.version },
  });
  const file = createWriteStream(logFile);
  child.stdout.pipe(file, { end: false });
  child.stderr.pipe(file, { end: false });
  child.stdin.on("error", () => {});
  let ended = false;
  const closed = once(child, "close").then(() => {
    ended = true;
    file.end();
  });

  const url = `http://127.0.0.1:${port}`;
  let lastLog: string | undefined;
  const log = () => lastLog ?? readFileSync(logFile, "utf8");
  const server = {
    kind,
    name,
    url,
    tp,
    port,
    sideChannelPort,
    leaseSeconds,
    /** Summed over its labels; 0 when there is none. */
    async metric(metric: string): Promise<number> {
      const text = await (await fetch(`${url}/metrics`, { headers: ONE_USE })).text();
      const samples = text.matchAll(new RegExp(`^${metric}(?:\\{.*\\})? (\\S+)`, "gm"));
      return Array.from(samples, ([, value]) => Number(value)).reduce((a, b) => a + b, 0);
    },
    /** Also after `stop`. */
    log,
    /** Ends all processes. Safe to call twice. */
    async stop(): Promise<void> {
      child.stdin.end();
      await closed;
      lastLog ??= log();
      rmSync(folder, { recursive: true, force: true });
    },
  };
  try {
    const isHealthy = async () => {
      if (ended) throw new Error("its process ended");
      return (
        (await fetch(`${url}/health`, { headers: ONE_USE }).catch(() => undefined))?.ok === true
      );
    };
    await until(isHealthy, "healthy", { timeoutMs: READY_WITHIN_MS, everyMs: POLL_MS });
    await plain(url, prompt(40), 2);
  } catch (error) {
    const lines = lastLines(server);
    await server.stop();
    throw new Error(`vLLM ${kind.version} "${name}" did not start: ${String(error)}\n${lines}`);
  }
  return server;
}

const lastLines = (server: VllmServer) => server.log().split("\n").slice(-SHOWN_LINES).join("\n");

/** Stopped after the suite. Their logs are shown where a test fails. */
export function vllmServers(common: Omit<VllmOptions, "name">) {
  const starts = new Map<string, Promise<VllmServer>>();
  const options = new Map<string, Partial<VllmOptions>>();
  const running = new Map<string, VllmServer>();

  afterAll(async () => {
    const ends = await Promise.allSettled(starts.values());
    await Promise.all(
      ends.map((end) => (end.status === "fulfilled" ? end.value.stop() : undefined)),
    );
  });
  beforeEach(({ onTestFailed }) =>
    onTestFailed(() => {
      for (const server of running.values())
        process.stderr.write(`--- vLLM "${server.name}", last lines\n${lastLines(server)}\n`);
    }),
  );

  function of(name: string): VllmServer {
    const server = running.get(name);
    if (server === undefined) throw new Error(`${name} was not started`);
    return server;
  }

  async function start(name: string, more: Partial<VllmOptions> = {}): Promise<VllmServer> {
    const all = { ...common, ...more, args: [...(common.args ?? []), ...(more.args ?? [])] };
    const { mode, version } = all.kind;
    const begun = starts.get(name) ?? startVllm({ ...all, name: `${mode}-${version}-${name}` });
    starts.set(name, begun);
    options.set(name, more);
    running.set(name, await begun);
    return begun;
  }

  return {
    of,
    start,
    async restart(name: string, more: Partial<VllmOptions> = {}): Promise<void> {
      const { port, sideChannelPort, stop } = of(name);
      await stop();
      starts.delete(name);
      await start(name, { ...options.get(name), ports: [port, sideChannelPort], ...more });
    },
  };
}
