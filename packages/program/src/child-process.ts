import { type ChildProcess as NodeProcess, spawn } from "node:child_process";
import type { Socket } from "node:net";
import { KV_ERROR_CODES, KvError, type KvErrorCode } from "@kv/interface";
import { lastLines } from "./last-lines.js";
import { processEnd, readText } from "./process-end.js";

/** A task's error as it crosses the IPC channel. */
export interface ChildError {
  readonly code: string;
  readonly message: string;
  readonly hint?: string | undefined;
}

/** From child to owner: a step that begins, or an answer. */
export type ChildMessage =
  | { readonly step: string }
  | { readonly value?: unknown; readonly error?: ChildError | undefined };

/** How a child process is started. */
export interface ChildOptions {
  /** The module that Node runs; it calls `runTask`. */
  readonly module: string;
  readonly args?: readonly string[] | undefined;
  /** The whole environment. @default process.env */
  readonly env?: Readonly<Record<string, string | undefined>> | undefined;
  /**
   * Keeps stdout and stderr for errors, or passes both on to this process's stderr.
   * @default "kept"
   */
  readonly output?: "kept" | "stderr" | undefined;
}

/** What the error says of a process that ends during the wait. */
export interface Awaited {
  readonly what: string;
  readonly code: KvErrorCode;
  /** Precedes the child's own message. @default nothing */
  readonly prefix?: string | undefined;
  readonly hint?: string | undefined;
  /** Then the process is killed. @default no limit */
  readonly timeoutMs?: number | undefined;
}

const KEPT_CHARACTERS = 1 << 20;
const CLOSE_TIMEOUT_MS = 10_000;

/**
 * A Node process that ends with this one. It talks over Node's IPC channel, because libraries write
 * to stdout.
 */
export class ChildProcess {
  readonly ended: Promise<string>;
  readonly #process: NodeProcess;
  readonly #messages: ChildMessage[] = [];
  #output = "";
  #wake: () => void = () => {};
  #hasEnded = false;

  /**
   * @throws `KV_TRANSPORT_UNAVAILABLE` in a single executable application, which would start
   * itself, and where `node --permission` allows no children.
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

  /** 0 if it did not start. */
  get pid(): number {
    return this.#process.pid ?? 0;
  }

  get output(): string {
    return this.#output;
  }

  send(message: object): void {
    this.#process.send(message, () => {});
  }

  /** Undefined after the process's end. One caller at a time. */
  async next(): Promise<ChildMessage | undefined> {
    while (this.#messages.length === 0 && !this.#hasEnded)
      await new Promise<void>((resolve) => {
        this.#wake = resolve;
      });
    return this.#messages.shift();
  }

  /** Rejects with the child's error, or with `awaited`'s when the process ends or is too slow. */
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

  /** Closes the channel or sends the signal; kills the process 10 s later. */
  async close(signal?: NodeJS.Signals): Promise<void> {
    this.keepAlive(true);
    if (signal !== undefined) this.#process.kill(signal);
    else if (this.#process.connected) this.#process.disconnect();
    const timer = setTimeout(() => this.kill(), CLOSE_TIMEOUT_MS);
    await this.ended;
    clearTimeout(timer);
  }
}

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
