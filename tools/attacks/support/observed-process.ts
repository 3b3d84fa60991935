import { type ChildProcess, spawn } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../../../", import.meta.url));

/** A program of this repository in a process of its own, observed from outside. */
export class ObservedProcess {
  readonly #child: ChildProcess;
  readonly #lines: AsyncIterator<string>;
  #watch: NodeJS.Timeout | undefined;

  /**
   * Starts a file, from its source where that is TypeScript. `file` is relative to the repository.
   */
  constructor(file: string, args: readonly string[]) {
    const loader = file.endsWith(".ts") ? ["--import", "tsx"] : [];
    this.#child = spawn(process.execPath, [...loader, `${ROOT}${file}`, ...args], {
      cwd: ROOT,
      stdio: ["pipe", "pipe", "inherit"],
    });
    if (this.#child.stdout === null) throw new Error("the process has no stdout");
    this.#lines = createInterface({ input: this.#child.stdout })[Symbol.asyncIterator]();
  }

  /** The next line of its stdout. */
  async line(): Promise<string> {
    const { value, done } = await this.#lines.next();
    if (done === true) throw new Error("the process ended before it wrote its line");
    return value;
  }

  /** Writes a line to its stdin. */
  tell(line: string): void {
    this.#child.stdin?.write(`${line}\n`);
  }

  /** Open descriptors. */
  descriptors(): number {
    return readdirSync(`/proc/${this.#child.pid}/fd`).length;
  }

  /** Resident memory in MiB; 0 when it has ended. */
  residentMib(): number {
    try {
      const status = readFileSync(`/proc/${this.#child.pid}/status`, "utf8");
      return Math.round(Number(/VmRSS:\s+(\d+)/.exec(status)?.[1] ?? 0) / 1024);
    } catch {
      return 0;
    }
  }

  /**
   * Watches its memory. The returned function ends that, and returns how much it had grown at most,
   * in MiB.
   */
  watchMemory(): () => number {
    const before = this.residentMib();
    let most = before;
    clearInterval(this.#watch);
    this.#watch = setInterval(() => {
      most = Math.max(most, this.residentMib());
    }, 50);
    return () => {
      clearInterval(this.#watch);
      return Math.max(most, this.residentMib()) - before;
    };
  }

  /** Whether it still runs. */
  get isRunning(): boolean {
    return this.#child.exitCode === null && this.#child.signalCode === null;
  }

  /** Ends it. */
  kill(): void {
    clearInterval(this.#watch);
    this.#child.kill("SIGKILL");
  }
}
