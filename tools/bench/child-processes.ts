import { type ChildProcess, execFile, spawn } from "node:child_process";
import { existsSync, mkdtempSync, readdirSync, readFileSync } from "node:fs";
import { type AddressInfo, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

/**
 * Starts a program on some cores, with pipes for stdin and stdout. `taskset` replaces itself by the
 * program, so its process id is the program's.
 */
export const startOnCores = (cores: string, command: string, args: readonly string[]) =>
  spawn("taskset", ["-c", cores, command, ...args], { stdio: ["pipe", "pipe", "inherit"] });

/** Compiles `tools/bench/c/NAME.c` into a temporary folder. Resolves with the program's path. */
export async function compileC(name: string, flags: readonly string[] = []): Promise<string> {
  const places = (process.env["PATH"] ?? "").split(":");
  const compiler = ["cc", "gcc", "clang"].find((one) =>
    places.some((place) => existsSync(join(place, one))),
  );
  if (compiler === undefined)
    throw new Error("this benchmark needs a C compiler: cc, gcc or clang on PATH");
  const program = join(mkdtempSync(join(tmpdir(), "kv-bench-")), name);
  const source = fileURLToPath(new URL(`./c/${name}.c`, import.meta.url));
  await promisify(execFile)(compiler, ["-O2", "-o", program, source, ...flags]);
  return program;
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
