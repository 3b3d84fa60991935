import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { hasPython, pythonWith } from "../setup/user-cache.mjs";

export interface LinePeer {
  ask<T>(command: object): Promise<T>;
  /** Between two answers: NIXL's progress thread in Python uses most of a core even when idle. */
  pause(): void;
  resume(): void;
  close(): Promise<void>;
}

/** A child that answers each JSON line with one. */
export function linePeer(
  command: string,
  args: readonly string[],
  env: NodeJS.ProcessEnv = process.env,
): LinePeer {
  const child = spawn(command, args, { stdio: ["pipe", "pipe", "inherit"], env });
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const ended = new Promise<void>((resolve) => child.on("close", () => resolve()));
  return {
    async ask<T>(request: object) {
      child.stdin.write(`${JSON.stringify(request)}\n`);
      const { value, done } = await lines.next();
      if (done === true) throw new Error(`${command} ${args.join(" ")} ended before it answered`);
      return JSON.parse(value) as T;
    },
    pause: () => void child.kill("SIGSTOP"),
    resume: () => void child.kill("SIGCONT"),
    async close() {
      // A stopped process would not notice the end of its stdin.
      child.kill("SIGCONT");
      child.stdin.end();
      await ended;
    },
  };
}

const requirements = fileURLToPath(new URL("./requirements.txt", import.meta.url));
const digest = createHash("sha256").update(readFileSync(requirements)).digest("hex").slice(0, 12);
const CLIENTS = `clients-venv-${digest}`;

export const hasClients = () => hasPython(CLIENTS);

/** They answer `{ url, asked }` with their outcomes. Fetched once: 380 MB on disk. */
export async function startClients(): Promise<LinePeer> {
  // Wheels only, each with its digest: no package runs code when it is installed.
  const wheels = ["--disable-pip-version-check", "--only-binary", ":all:"];
  const install = [...wheels, "--require-hashes", "-r", requirements];
  const python = join(await pythonWith(CLIENTS, [install]), "python");
  return linePeer(python, [fileURLToPath(new URL("./clients.py", import.meta.url))]);
}
