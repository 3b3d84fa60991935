import { type ChildProcess, spawn } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { type AddressInfo, createServer } from "node:net";

/**
 * Starts a program on one core, with pipes for stdin and stdout. `taskset` replaces itself by the
 * program, so its process id is the program's.
 */
export function startOnCore(
  core: string,
  command: string,
  args: readonly string[],
  env: NodeJS.ProcessEnv = process.env,
): ChildProcess {
  return spawn("taskset", ["-c", core, command, ...args], {
    stdio: ["pipe", "pipe", "inherit"],
    env,
  });
}

/** User and system time of a process, its threads and its children, in ms. */
export function cpuMs(pid: number): number {
  const fields = readFileSync(`/proc/${pid}/stat`, "utf8").split(") ")[1]?.split(" ") ?? [];
  const own = (Number(fields[11]) + Number(fields[12])) * 10;
  const children = readdirSync(`/proc/${pid}/task`).flatMap((task) =>
    readFileSync(`/proc/${pid}/task/${task}/children`, "utf8").trim().split(/\s+/).filter(Boolean),
  );
  return children.reduce((sum, child) => sum + cpuMs(Number(child)), own);
}

/** Resident memory of a process, in bytes. */
export function residentBytes(pid: number): number {
  return Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1]) * 1024;
}

/** The first line of a process on stdout. */
export async function firstLine(child: ChildProcess): Promise<string> {
  let text = "";
  for await (const chunk of child.stdout ?? []) {
    text += String(chunk);
    const end = text.indexOf("\n");
    if (end !== -1) {
      child.stdout?.resume();
      return text.slice(0, end);
    }
  }
  throw new Error("a process ended before it was ready");
}

export function freePort(): Promise<number> {
  return new Promise((resolve) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address() as AddressInfo;
      server.close(() => resolve(port));
    });
  });
}
