import { type ChildProcess, execFile, spawn } from "node:child_process";
import { existsSync, mkdtempSync, readdirSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";

/** `taskset` replaces itself by the program, so its process id is the program's. */
export const startOnCores = (cores: string, command: string, args: readonly string[]) =>
  spawn("taskset", ["-c", cores, command, ...args], { stdio: ["pipe", "pipe", "inherit"] });

export async function compileC(name: string, flags: readonly string[] = []): Promise<string> {
  const places = (process.env["PATH"] ?? "").split(":");
  const compiler = ["cc", "gcc", "clang"].find((one) =>
    places.some((place) => existsSync(join(place, one))),
  );
  if (compiler === undefined)
    throw new Error("this benchmark needs a C compiler: cc, gcc or clang on PATH");
  const program = join(mkdtempSync(join(tmpdir(), "kv-bench-")), name);
  const source = join(import.meta.dirname, `./c/${name}.c`);
  await promisify(execFile)(compiler, ["-O2", "-o", program, source, ...flags]);
  return program;
}

/** User and system time, with threads and children. */
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
