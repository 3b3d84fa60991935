// A long suite: waits for a lease of etcd to end.
import { type ChildProcess, execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type Etcd, etcdMissing, skipsEtcd, startEtcd } from "../support/etcd.js";

const [HERE, THERE] = [`kv-here-${process.pid}`, `kv-there-${process.pid}`];
/** A network for documentation, inside the two namespaces only. */
const [NEAR, FAR] = ["192.0.2.1", "192.0.2.2"];
const PORT = 2379;
const ROOT = fileURLToPath(new URL("../../../..", import.meta.url));

const ip = (...args: string[]) => execFileSync("ip", args, { stdio: "pipe" });
const noNamespaces: string | undefined = (() => {
  try {
    ip("netns", "add", HERE);
    return undefined;
  } catch {
    return "missing: ip of iproute2, and the right to create network namespaces";
  }
})();
const missing = nixlMissing ?? etcdMissing ?? noNamespaces;
const isSkipped = nixlMissing !== undefined || skipsEtcd || noNamespaces !== undefined;

/** A process with an agent in a network namespace. */
class Host {
  readonly gone: string[] = [];
  readonly #child: ChildProcess;
  readonly #answers: ((answer: unknown) => void)[] = [];

  constructor(namespace: string, options: { name: string; value: number }) {
    const script = fileURLToPath(new URL("../children/etcd-agent.ts", import.meta.url));
    const argument = JSON.stringify({ ...options, endpoint: `http://${NEAR}:${PORT}` });
    const command = [
      "netns",
      "exec",
      namespace,
      process.execPath,
      "--import",
      "tsx",
      script,
      argument,
    ];
    this.#child = spawn("ip", command, {
      cwd: ROOT,
      stdio: ["ignore", "inherit", "inherit", "ipc"],
    });
    this.#child.on("message", (message: { gone: string } | { answer: unknown }) => {
      if ("gone" in message) this.gone.push(message.gone);
      else this.#answers.shift()?.(message.answer);
    });
  }

  /** The next answer; the first one is the address of its memory. */
  answer<T>(): Promise<T> {
    return new Promise((resolve) => this.#answers.push(resolve as (answer: unknown) => void));
  }

  ask<T>(request: object): Promise<T> {
    const answer = this.answer<T>();
    this.#child.send(request);
    return answer;
  }

  async kill(): Promise<void> {
    const exited = once(this.#child, "exit");
    this.#child.kill("SIGKILL");
    await exited;
  }
}

describe.skipIf(isSkipped)(`two hosts and etcd (${missing ?? "found"})`, () => {
  let etcd: Etcd;
  beforeAll(async () => {
    ip("netns", "add", THERE);
    ip("link", "add", "kv0", "netns", HERE, "type", "veth", "peer", "name", "kv0", "netns", THERE);
    for (const [namespace, address] of [
      [HERE, NEAR],
      [THERE, FAR],
    ] as const) {
      ip("-n", namespace, "address", "add", `${address}/24`, "dev", "kv0");
      ip("-n", namespace, "link", "set", "kv0", "up");
      ip("-n", namespace, "link", "set", "lo", "up");
    }
    // UCX leaves out an interface that has no carrier yet.
    const hasCarrier = (namespace: string) =>
      / state UP /.test(ip("-n", namespace, "link", "show", "dev", "kv0").toString());
    for (const namespace of [HERE, THERE]) while (!hasCarrier(namespace)) await sleep(20);
    etcd = await startEtcd({ host: NEAR, port: PORT, prefix: ["ip", "netns", "exec", HERE] });
  }, 60_000);
  afterAll(async () => {
    await etcd?.end();
    for (const namespace of [HERE, THERE]) ip("netns", "delete", namespace);
  });

  test("find one another through etcd; one dies, its lease removes it, and it comes back", async () => {
    const near = new Host(HERE, { name: "near", value: 1 });
    await near.answer();
    const far = new Host(THERE, { name: "far", value: 42 });
    const address = await far.answer<number>();
    expect(await near.ask({ fetch: "far", address })).toBe(42);
    expect(await far.ask({ fetch: "near", address: 4096 })).toBe("KV_LIST_INVALID");

    await far.kill();
    expect(near.gone).toEqual([]);
    await expect.poll(() => near.gone, { timeout: 15_000 }).toEqual(["far"]);
    expect(await near.ask({ notify: "far" })).toBe("KV_AGENT_UNKNOWN_REMOTE");

    const again = new Host(THERE, { name: "far", value: 43 });
    const anew = await again.answer<number>();
    expect(await near.ask({ fetch: "far", address: anew })).toBe(43);
    await Promise.all([near.kill(), again.kill()]);
  }, 90_000);
});
if (isSkipped && noNamespaces === undefined) ip("netns", "delete", HERE);
