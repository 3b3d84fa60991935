import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

const program = (process.env.PATH ?? "")
  .split(":")
  .map((folder) => join(folder, "etcd"))
  .find((path) => existsSync(path));

/** Why tests with etcd cannot run; undefined when they can. With CI=true it must be there. */
export const etcdMissing: string | undefined =
  program === undefined ? "missing: apt-get install etcd-server" : undefined;
/** Whether those tests are skipped. */
export const skipsEtcd: boolean = etcdMissing !== undefined && process.env.CI !== "true";

/** A real etcd with an empty store. */
export interface Etcd {
  readonly url: string;
  /** Ends it and starts it again with the same store and address. */
  restart(): Promise<void>;
  /** Ends it and deletes its store. */
  end(): Promise<void>;
}

/**
 * Starts etcd at `host`, and waits until it answers; `prefix` is a command that runs it, such as in
 * a network namespace. With `tls` it speaks HTTPS only, and only to clients with a certificate of
 * the same authority; the values are paths of PEM files.
 */
export async function startEtcd(
  options: {
    host?: string;
    port?: number;
    prefix?: readonly string[];
    tls?: { readonly ca: string; readonly cert: string; readonly key: string };
  } = {},
): Promise<Etcd> {
  const { host = "127.0.0.1", prefix = [], tls } = options;
  const port = options.port ?? (await freePort());
  const folder = mkdtempSync(join(tmpdir(), "kv-etcd-"));
  const url = `${tls === undefined ? "http" : "https"}://${host}:${port}`;
  const healthUrl = tls === undefined ? url : `http://${host}:${await freePort()}`;
  const peerUrl = `http://127.0.0.1:${options.port ?? (await freePort())}`;
  const settings = {
    "data-dir": folder,
    "listen-client-urls": url,
    "advertise-client-urls": url,
    "listen-peer-urls": peerUrl,
    "initial-advertise-peer-urls": peerUrl,
    "initial-cluster": `default=${peerUrl}`,
    ...(tls && {
      "listen-metrics-urls": healthUrl,
      "cert-file": tls.cert,
      "key-file": tls.key,
      "trusted-ca-file": tls.ca,
      "client-cert-auth": "true",
    }),
  };
  const command = [
    ...prefix,
    program ?? "etcd",
    ...Object.entries(settings).map(([name, value]) => `--${name}=${value}`),
  ];
  const start = async () => {
    const child = spawn(command[0] as string, command.slice(1), { stdio: "ignore" });
    await answers(child, [...prefix, process.execPath, "-e", PROBE, healthUrl]);
    return child;
  };
  const stop = async (child: ChildProcess) => {
    const exited = once(child, "exit");
    child.kill("SIGKILL");
    await exited;
  };
  let child = await start();
  return {
    url,
    async restart() {
      await stop(child);
      child = await start();
    },
    async end() {
      await stop(child);
      rmSync(folder, { recursive: true, force: true });
    },
  };
}

const PROBE =
  "fetch(process.argv[1] + '/health').then((a) => process.exit(a.ok ? 0 : 1), () => process.exit(1))";

async function answers(child: ChildProcess, probe: readonly string[]): Promise<void> {
  for (let attempts = 0; attempts < 100; attempts++) {
    if (child.exitCode !== null) break;
    const [code] = await once(spawn(probe[0] as string, probe.slice(1)), "exit");
    if (code === 0) return;
    await sleep(100);
  }
  child.kill("SIGKILL");
  throw new Error("etcd did not start");
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as { port: number };
  server.close();
  return port;
}
