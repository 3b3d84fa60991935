import type { ChildProcess } from "node:child_process";
import type { Readable } from "node:stream";
import { finished } from "node:stream/promises";

/** A grandchild may hold the output open. */
const OUTPUT_MS = 1000;

/** How a process ended. */
export interface ProcessEnd {
  readonly exitCode: number | undefined;
  /** `exit code 1`, a signal such as `SIGSEGV`, or why it did not start. */
  readonly how: string;
  readonly isFound: boolean;
}

export function processEnd(child: ChildProcess): Promise<ProcessEnd> {
  return new Promise((resolve) => {
    // Failed signals and messages emit it too; then the end follows.
    child.on("error", (error: NodeJS.ErrnoException) => {
      if (child.pid === undefined)
        resolve({ exitCode: undefined, how: error.message, isFound: error.code !== "ENOENT" });
    });
    child.once("exit", (code, signal) => {
      const streams = [child.stdout, child.stderr].filter((stream) => stream !== null);
      const read: Promise<unknown>[] = streams.map((stream) => finished(stream).catch(() => {}));
      if (child.connected) read.push(new Promise((done) => child.once("disconnect", done)));
      const timer = setTimeout(() => {
        for (const stream of streams) stream.destroy();
        if (child.connected) child.disconnect();
      }, OUTPUT_MS);
      const end = {
        exitCode: code ?? undefined,
        how: signal ?? `exit code ${code}`,
        isFound: true,
      };
      void Promise.all(read).then(() => {
        clearTimeout(timer);
        resolve(end);
      });
    });
  });
}

export function readText(stream: Readable | null, take: (text: string) => void): void {
  stream?.setEncoding("utf8").on("data", take);
}
