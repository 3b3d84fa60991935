import { spawn } from "node:child_process";
import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import type { InstanceSpecInput } from "../../packages/fleet/src/instances/instance-spec.js";
import { firstLine, watchMemory } from "./child-processes.js";

/**
 * A kv-proxy that runs from its sources. `adminUrl` is empty without `--admin-port`. `end` tells
 * its exit code.
 */
export async function startProxy(flags: readonly string[]) {
  const cli = fileURLToPath(new URL("../../packages/proxy/src/cli.ts", import.meta.url));
  const args = ["--import", "tsx", cli, "--port", "0", "--log-level", "error", ...flags];
  const child = spawn(process.execPath, args, { stdio: ["ignore", "pipe", "inherit"] });
  const [, url = "", adminUrl = ""] =
    /ready (\S+)(?: .* admin (\S+))?/.exec(await firstLine(child)) ?? [];
  const memory = watchMemory(child.pid ?? 0);
  const end = async () => {
    child.kill("SIGTERM");
    const [code] = (await once(child, "close")) as [number | null];
    return code;
  };
  return { url, adminUrl, memory, end };
}

/** Counts reasons, and prints each with its count. */
export class Reasons {
  readonly #counts = new Map<string, number>();

  add(reason: string): void {
    this.#counts.set(reason, (this.#counts.get(reason) ?? 0) + 1);
  }

  print(lineOf: (reason: string, count: number) => string): void {
    for (const [reason, count] of this.#counts) console.log(lineOf(reason, count));
  }
}

/** An instance at the admin routes and in the status of kv-proxy. */
interface ListedInstance {
  readonly url: string;
  readonly available: boolean;
  readonly in_flight: number;
}

/**
 * Adds or drains an instance of kv-proxy at its admin routes. Resolves with the number of its
 * requests.
 */
export async function change(
  adminUrl: string,
  what: "add" | "drain",
  role: "prefill" | "decode",
  instance: InstanceSpecInput,
): Promise<number> {
  const url = typeof instance === "string" ? instance : instance.url;
  const answer = await fetch(`${adminUrl}/instances/${what}`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ role, instance }),
  });
  if (answer.status !== 200) throw new Error(`${what} ${url}: ${await answer.text()}`);
  const list = (await answer.json()) as readonly ListedInstance[];
  return list.find((one) => one.url === url)?.in_flight ?? 0;
}

/** Whether kv-proxy sends requests to all of its instances. */
export async function allAvailable(adminUrl: string): Promise<boolean> {
  const { prefillers, decoders } = (await (await fetch(`${adminUrl}/status`)).json()) as Record<
    "prefillers" | "decoders",
    readonly ListedInstance[]
  >;
  return [...prefillers, ...decoders].every(({ available }) => available);
}

/** The requests that kv-proxy has in flight, when there are none or after five seconds. */
export async function inFlightAtEnd(url: string): Promise<number> {
  for (let attempt = 0; ; attempt += 1) {
    const status = (await (await fetch(`${url}/status`)).json()) as {
      requests: { in_flight: number };
    };
    if (status.requests.in_flight === 0 || attempt === 50) return status.requests.in_flight;
    await sleep(100);
  }
}
