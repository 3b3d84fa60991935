import { type ChildProcess, fork } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { bundled } from "@kv/testing/node-programs";

export interface PeerProcess {
  readonly process: ChildProcess;
  readonly name: string;
  readonly address: number;
  readonly metadata: Uint8Array;
  ask<T>(what: string, message?: { lengthBytes?: number }): Promise<T>;
  /** Closes everything and ends it; returns its exit code. */
  end(): Promise<number | null>;
  kill(): Promise<void>;
  /** Stops all its threads until it gets SIGCONT. */
  stop(): Promise<void>;
}

/**
 * Starts a process with an agent and `lengthBytes` of registered memory, filled by
 * `fillPattern(seed)`.
 */
export async function startPeer(
  lengthBytes: number,
  seed = 1,
  {
    env = {},
    backends = [],
  }: { env?: Readonly<Record<string, string>>; backends?: readonly string[] } = {},
): Promise<PeerProcess> {
  const child = fork(
    await bundled(fileURLToPath(new URL("../children/peer.ts", import.meta.url))),
    [JSON.stringify({ lengthBytes, seed, env, backends })],
    { cwd: fileURLToPath(new URL("../../../..", import.meta.url)) },
  );
  const exited = new Promise<number | null>((resolve) =>
    child.once("exit", (code) => resolve(code)),
  );
  const answer = <T>() =>
    Promise.race([
      new Promise<T>((resolve) =>
        child.once("message", (message) => resolve((message as { answer: T }).answer)),
      ),
      exited.then((code) => {
        throw new Error(`the peer process ended with ${code}`);
      }),
    ]);
  const { name, address, metadata } = await answer<{
    name: string;
    address: number;
    metadata: string;
  }>();
  return {
    process: child,
    name,
    address,
    metadata: Buffer.from(metadata, "base64"),
    ask<T>(what: string, message = {}) {
      const answered = answer<T>();
      child.send({ do: what, ...message });
      return answered;
    },
    async end() {
      child.send({ do: "close" });
      return exited;
    },
    async kill() {
      child.kill("SIGKILL");
      await exited;
    },
    async stop() {
      child.kill("SIGSTOP");
      // `kill` returns before the signal has arrived at every thread.
      while (!allStopped(child.pid ?? 0)) await new Promise((resolve) => setTimeout(resolve, 5));
    },
  };
}

/** Whether the kernel has stopped all threads of a process. */
function allStopped(pid: number): boolean {
  const tasks = `/proc/${pid}/task`;
  return readdirSync(tasks).every((task) => {
    const stat = readFileSync(`${tasks}/${task}/stat`, "utf8");
    return stat.slice(stat.lastIndexOf(")") + 2).startsWith("T");
  });
}
