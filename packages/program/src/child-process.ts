import { type ChildProcess as NodeProcess, spawn } from "node:child_process";
import type { Socket } from "node:net";
import { KV_ERROR_CODES, KvError, type KvErrorCode } from "@kv/interface";
import { lastLines } from "./last-lines.js";
import { processEnd, readText } from "./process-end.js";

/** An error of a task, as it crosses the IPC channel. */
export interface ChildError {
  /** The code of the `KvError`. */
  readonly code: string;
  readonly message: string;
  readonly hint?: string | undefined;
}

/**
 * A message of a child process to its owner: the step that begins, or an answer, which is a value
 * or an error.
 */
export type ChildMessage =
  | { readonly step: string }
  | { readonly value?: unknown; readonly error?: ChildError | undefined };

/** How a child process is started. */
export interface ChildOptions {
  /** Path of the module that Node runs. It calls `runTask`. */
  readonly module: string;
  readonly args?: readonly string[] | undefined;
  /** Its whole environment. @default process.env */
  readonly env?: Readonly<Record<string, string | undefined>> | undefined;
  /**
   * What becomes of its stdout and stderr: kept for errors, or passed on to this process's stderr.
   * @default "kept"
   */
  readonly output?: "kept" | "stderr" | undefined;
}

/** What a child process was waited for, for the error of its end. */
export interface Awaited {
  readonly what: string;
  readonly code: KvErrorCode;
  /** Stands before the message of the child's own error. @default nothing */
  readonly prefix?: string | undefined;
  readonly hint?: string | undefined;
  /** The process is killed after this long. @default no limit */
  readonly timeoutMs?: number | undefined;
}

const KEPT_CHARACTERS = 1 << 20;
const CLOSE_TIMEOUT_MS = 10_000;

/**
 * A Node process that ends when this one does, and talks to it over Node's IPC channel, because
 * libraries write to stdout.
 */
export class ChildProcess {
  /** Resolves with how it ended: an exit code, a signal, or why it was not started. */
  readonly ended: Promise<string>;
  readonly #process: NodeProcess;
  readonly #messages: ChildMessage[] = [];
  #output = "";
  #wake: () => void = () => {};
  #hasEnded = false;

  /**
   * Starts the process. Throws `KV_TRANSPORT_UNAVAILABLE` in a single executable application, which
   * would start itself, and where `node --permission` allows no children.
   */
  constructor({ module, args = [], env = process.env, output = "kept" }: ChildOptions) {
    requireNode(module);
    const to = output === "kept" ? "pipe" : 2;
    this.#process = spawn(process.execPath, [module, ...args], {
      stdio: ["ignore", to, to, "ipc"],
      env: env as NodeJS.ProcessEnv,
    });
    for (const stream of [this.#process.stdout, this.#process.stderr])
      readText(stream, (text) => {
        this.#output = (this.#output + text).slice(-KEPT_CHARACTERS);
      });
    this.#process.on("message", (message: ChildMessage) => {
      this.#messages.push(message);
      this.#wake();
    });
    this.ended = processEnd(this.#process).then(({ how }) => {
      this.#hasEnded = true;
      this.#wake();
      return how;
    });
  }

  /** The process's id; 0 when it was not started. */
  get pid(): number {
    return this.#process.pid ?? 0;
  }

  get output(): string {
    return this.#output;
  }

  send(message: object): void {
    this.#process.send(message, () => {});
  }

  /** The next message; undefined when the process has ended. One caller waits at a time. */
  async next(): Promise<ChildMessage | undefined> {
    while (this.#messages.length === 0 && !this.#hasEnded)
      await new Promise<void>((resolve) => {
        this.#wake = resolve;
      });
    return this.#messages.shift();
  }

  /**
   * The value of the next answer. Rejects with the child's own error, or with that of `awaited`
   * when the process ends or is too slow.
   */
  async answer<T>({ what, code, hint, prefix = "", timeoutMs }: Awaited): Promise<T> {
    let late = false;
    const timer =
      timeoutMs &&
      setTimeout(() => {
        late = true;
        this.kill();
      }, timeoutMs);
    const message = await this.next();
    clearTimeout(timer);
    if (message === undefined) {
      const how = late ? `no answer within ${Number(timeoutMs) / 1000} s` : await this.ended;
      throw new KvError(code, `${what}: ${how}`, {
        hint,
        details: { output: lastLines(this.#output) },
      });
    }
    if ("error" in message && message.error !== undefined) throw errorOf(prefix, message.error);
    return ("value" in message ? message.value : undefined) as T;
  }

  /** Whether this process stays alive for the child; at first it does. */
  keepAlive(kept: boolean): void {
    const method = kept ? "ref" : "unref";
    this.#process[method]();
    this.#process.channel?.[method]();
    for (const stream of [this.#process.stdout, this.#process.stderr])
      (stream as Socket | null)?.[method]();
  }

  kill(): void {
    this.#process.kill("SIGKILL");
  }

  /**
   * Ends the process: closes the channel, or sends the signal; kills it 10 s later. Resolves when
   * it has ended.
   */
  async close(signal?: NodeJS.Signals): Promise<void> {
    this.keepAlive(true);
    if (signal !== undefined) this.#process.kill(signal);
    else if (this.#process.connected) this.#process.disconnect();
    const timer = setTimeout(() => this.kill(), CLOSE_TIMEOUT_MS);
    await this.ended;
    clearTimeout(timer);
  }
}

/**
 * Refuses to run a module with a program that is not Node: a single executable application starts
 * itself, whatever its arguments are. And names what `node --permission` needs.
 */
function requireNode(module: string): void {
  const { permission } = process as { permission?: { has(scope: string): boolean } };
  const isSea = process.getBuiltinModule("node:sea")?.isSea() === true;
  if (!isSea && permission?.has("child") !== false) return;
  throw new KvError(
    "KV_TRANSPORT_UNAVAILABLE",
    `${process.execPath} ${isSea ? "is a single executable application and" : "was started with --permission and"} cannot run ${module} in another process`,
    {
      hint: isSea
        ? "run this program with Node, or leave out what needs another process, such as checkMetadata"
        : "add --allow-child-process and --allow-worker, or leave out what needs another process, such as checkMetadata",
    },
  );
}

function errorOf(prefix: string, { code, message, hint }: ChildError): KvError {
  const known = KV_ERROR_CODES.find((each) => each === code) ?? "KV_INTERNAL";
  return new KvError(known, `${prefix}${message}`, { hint });
}
