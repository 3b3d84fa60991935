import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";

const ROOT = join(import.meta.dirname, "../../");
const SAMPLE_MS = 50;

const children = new Set<ChildProcess>();
process.on("exit", () => {
  for (const child of children) child.kill("SIGKILL");
});

/** A program of this repository. It ends with this process, if not before. */
export class ObservedProcess {
  readonly #child: ChildProcess;
  readonly #lines: AsyncIterator<string>;

  /** `file` is relative to the repository. */
  constructor(file: string, args: readonly string[] = []) {
    const loader = file.endsWith(".ts") ? ["--import", "tsx"] : [];
    this.#child = spawn(process.execPath, [...loader, `${ROOT}${file}`, ...args], {
      cwd: ROOT,
      stdio: ["pipe", "pipe", "inherit"],
    });
    children.add(this.#child);
    if (this.#child.stdout === null) throw new Error("the process has no stdout");
    this.#lines = createInterface({ input: this.#child.stdout })[Symbol.asyncIterator]();
  }

  get pid(): number {
    return this.#child.pid ?? 0;
  }

  get isRunning(): boolean {
    return this.#child.exitCode === null && this.#child.signalCode === null;
  }

  async line(): Promise<string> {
    const { value, done } = await this.#lines.next();
    if (done === true) throw new Error(`${this.#child.spawnargs.join(" ")} ended without a line`);
    return value;
  }

  ask(line: string): Promise<string> {
    this.#child.stdin?.write(`${line}\n`);
    return this.line();
  }

  /**
   * `early` and `late`: means of thirds of the samples, without the first fifth, which is warm-up.
   */
  watch() {
    const mib: number[] = [];
    let mostOpen = 0;
    const sample = () => {
      if (!this.isRunning) return;
      mib.push(residentMib(this.pid));
      mostOpen = Math.max(mostOpen, descriptors(this.pid));
    };
    sample();
    const watch = setInterval(sample, SAMPLE_MS).unref();

    return () => {
      sample();
      clearInterval(watch);
      const steady = mib.slice(Math.floor(mib.length / 5));
      const third = Math.ceil(steady.length / 3);
      return {
        grownMib: Math.round(Math.max(...mib) - (mib[0] ?? 0)),
        early: mean(steady.slice(0, third)),
        late: mean(steady.slice(-third)),
        mostOpen,
      };
    };
  }

  async end(signal: NodeJS.Signals = "SIGKILL"): Promise<number | null> {
    const closed = once(this.#child, "close");
    this.#child.kill(signal);
    if (this.isRunning) await closed;
    return this.#child.exitCode;
  }
}

export const descriptors = (pid: number): number => readdirSync(`/proc/${pid}/fd`).length;

function residentMib(pid: number): number {
  const status = readFileSync(`/proc/${pid}/status`, "utf8");
  return Number(/VmRSS:\s+(\d+)/.exec(status)?.[1] ?? 0) / 1024;
}

const mean = (list: readonly number[]) =>
  Math.round(list.reduce((sum, value) => sum + value, 0) / list.length);
