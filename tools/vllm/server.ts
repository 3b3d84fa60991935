import { spawn } from "node:child_process";
import { once } from "node:events";
import { createWriteStream, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { homedir, tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { ONE_USE, plain } from "./completion.js";
import { freePorts } from "./free-ports.js";
import { CONNECTOR_NAMES, type PeerKind, prompt } from "./tiny-peer.js";

/** The folder into which `setup.sh` installs the peer. */
export const PEER_DIR = process.env.KV_PEER_DIR ?? join(homedir(), ".cache", "kv-peer");

/** The folder with the Python sources of a release that `setup.sh` has installed. */
export function sourcesOf(version: PeerKind["version"]): string {
  if (version !== "0.32") return join(PEER_DIR, `vllm${version.replace("0.", "")}`);
  const lib = join(PEER_DIR, "vv", "lib");
  const [python = ""] = readdirSync(lib).filter((name) => name.startsWith("python"));
  return join(lib, python, "site-packages");
}

export interface VllmOptions {
  readonly kind: PeerKind;
  /** The name in messages. */
  readonly name: string;
  readonly tp?: number;
  /** Ports of HTTP and the side channel. Default: free ports. */
  readonly ports?: readonly [number, number];
  /** Blocks of 32 tokens, the null block included. */
  readonly blocks?: number;
  readonly leaseSeconds?: number;
  /** Further keys of `kv_connector_extra_config`. */
  readonly extra?: Readonly<Record<string, unknown>>;
  /** Additional arguments of vLLM's API server. */
  readonly args?: readonly string[];
  /** Additional environment variables. */
  readonly env?: Readonly<Record<string, string>>;
}

/** A real vLLM server on this machine's CPU, with its NixlConnector. */
export interface VllmServer {
  readonly kind: PeerKind;
  readonly name: string;
  readonly url: string;
  readonly tp: number;
  readonly port: number;
  readonly sideChannelPort: number;
  readonly leaseSeconds: number;
  /** The value of a metric of `/metrics`, summed over its labels; 0 when there is none. */
  metric(name: string): Promise<number>;
  /** The output so far, also after `stop`. */
  log(): string;
  /** Ends all of its processes. Safe to call twice. */
  stop(): Promise<void>;
}

const READY_WITHIN_MS = 540_000;
const LEASE_SECONDS = 60;
const PUSH_WAIT_SECONDS = 60;
const POLL_MS = 500;
const SHOWN_LINES = 60;

const script = (name: string) => fileURLToPath(new URL(name, import.meta.url));

/**
 * Starts a server, waits until it is healthy, and sends it one completion, so that its first
 * computation is not part of its first handshake.
 */
export async function startVllm(options: VllmOptions): Promise<VllmServer> {
  const {
    kind,
    name,
    tp = 1,
    blocks = 64,
    leaseSeconds = LEASE_SECONDS,
    extra,
    args = [],
    env = {},
  } = options;
  const [port = 0, sideChannelPort = 0] = options.ports ?? (await freePorts(2));
  const folder = mkdtempSync(join(tmpdir(), `kv-vllm-${name}-`));
  const logFile = join(folder, "log");
  const connector = CONNECTOR_NAMES[kind.mode];
  const config = JSON.stringify({
    kv_lease_duration: leaseSeconds,
    // A push D that waits for a P that is gone runs empty engine steps without pause, by default
    // for eight minutes. This slows the next tests.
    ...(kind.mode === "push" ? { push_registration_timeout: PUSH_WAIT_SECONDS } : {}),
    ...extra,
  });
  const serve = [script("serve.sh"), port, sideChannelPort, connector, blocks, tp, config, ...args];
  // The guard ends the server's process group when its standard input closes: because of `stop`, or
  // because this process is gone.
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
  const server: VllmServer = {
    kind,
    name,
    url,
    tp,
    port,
    sideChannelPort,
    leaseSeconds,
    async metric(metric) {
      const text = await (await fetch(`${url}/metrics`, { headers: ONE_USE })).text();
      const samples = text
        .split("\n")
        .filter((line) => line.startsWith(`${metric}{`) || line.startsWith(`${metric} `));
      return samples.reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" ") + 1)), 0);
    },
    log,
    async stop() {
      child.stdin.end();
      await closed;
      lastLog ??= log();
      rmSync(folder, { recursive: true, force: true });
    },
  };
  try {
    await healthy(url, () => ended);
    await plain(url, prompt(40), 2);
  } catch (error) {
    const lines = log().split("\n").slice(-SHOWN_LINES).join("\n");
    await server.stop();
    throw new Error(`vLLM ${kind.version} "${name}" did not start: ${String(error)}\n${lines}`);
  }
  return server;
}

/** Prints the last lines of the servers' logs to the terminal, for a failed test. */
export function showLogs(...servers: readonly (VllmServer | undefined)[]): void {
  for (const server of servers) {
    if (server === undefined) continue;
    const lines = server.log().split("\n").slice(-SHOWN_LINES);
    process.stderr.write(`--- vLLM "${server.name}", last lines\n${lines.join("\n")}\n`);
  }
}

async function healthy(url: string, ended: () => boolean): Promise<void> {
  const until = Date.now() + READY_WITHIN_MS;
  while (!ended()) {
    const answer = await fetch(`${url}/health`, { headers: ONE_USE }).catch(() => undefined);
    if (answer?.ok === true) return;
    if (Date.now() > until) throw new Error(`not healthy within ${READY_WITHIN_MS / 1000} s`);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
  throw new Error("its process ended");
}
