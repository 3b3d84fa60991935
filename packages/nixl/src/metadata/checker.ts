import { createHash } from "node:crypto";
import { type Clock, KvError } from "@kv/interface";
import { ChildProcess } from "@kv/program";
import { childTask } from "../child/child-task.js";
import type { Environment } from "../environment.js";
import { RefCount } from "../ref-count.js";

/** Options of `MetadataChecker`. */
export interface MetadataCheckerOptions {
  /** Clock for `timeoutMs`. */
  readonly clock: Clock;
  /** Starts the process that loads metadata; `onEnd` is to be called when it has ended. */
  startProcess(onEnd: () => void): CheckerProcess;
  /**
   * The longest that one check may take; 5 s by default. A valid peer's metadata takes some
   * milliseconds.
   */
  readonly timeoutMs?: number | undefined;
  /** The longest that a process may take to start; 30 s by default. It takes about a second. */
  readonly startTimeoutMs?: number | undefined;
}

const TIMEOUT_MS = 5000;
const START_TIMEOUT_MS = 30_000;
/** How many digests of valid metadata are kept; the oldest goes first. */
const KEPT_DIGESTS = 4096;

/**
 * Loads metadata in another process before this one does. Damaged metadata can crash NIXL (1.5.0: 2
 * of 451 single flipped bytes did), even after all checks that are possible outside of NIXL.
 */
export class MetadataChecker {
  readonly #options: MetadataCheckerOptions;
  readonly #validDigests = new Set<string>();
  #process: CheckerProcess | undefined;
  /** The running check. Only one check runs at a time. */
  #lastCheck: Promise<unknown> = Promise.resolve();
  #closed = false;

  /** The process is started by `warm` or by the first check. */
  constructor(options: MetadataCheckerOptions) {
    this.#options = options;
  }

  /**
   * Starts the process, so that the first check does not wait for NIXL. Rejects with
   * `KV_TRANSPORT_UNAVAILABLE` or `KV_TRANSPORT_CLOSED`.
   */
  async warm(): Promise<void> {
    const child = this.#running();
    await this.#awaitReady(child).finally(child.hold());
  }

  /**
   * Resolves when the other process has loaded these bytes, now or earlier. Rejects with
   * `KV_AGENT_METADATA_INVALID` when NIXL refuses them, crashes on them or does not return; with
   * `KV_TRANSPORT_UNAVAILABLE` when the process cannot be started.
   */
  check(metadata: Uint8Array): Promise<void> {
    // A copy: the slice of a Buffer would be a view.
    const bytes = new Uint8Array(metadata);
    const digest = createHash("sha256").update(bytes).digest("base64");
    if (this.#validDigests.has(digest)) return Promise.resolve();
    const checked = this.#lastCheck
      .catch(() => {})
      .then(() => (this.#validDigests.has(digest) ? undefined : this.#load(bytes)))
      .then(() => this.#keep(digest));
    this.#lastCheck = checked;
    return checked;
  }

  /** Ends the process and waits for its end. */
  async close(): Promise<void> {
    this.#closed = true;
    await this.#process?.close();
  }

  /** The same as `close()`. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #running(): CheckerProcess {
    if (this.#closed) throw new KvError("KV_TRANSPORT_CLOSED", "the checker of metadata is closed");
    this.#process ??= this.#options.startProcess(() => {
      this.#process = undefined;
    });
    return this.#process;
  }

  async #load(metadata: Uint8Array): Promise<void> {
    const { clock, timeoutMs = TIMEOUT_MS } = this.#options;
    const child = this.#running();
    const { hold, ask, kill } = child;
    const release = hold();
    try {
      await this.#awaitReady(child);
      const answer = ask(metadata);
      const timer = clock.setTimer(kill, timeoutMs);
      await answer.finally(() => timer.cancel());
    } finally {
      release();
    }
  }

  /** A process that does not get ready is killed, and the next check starts another one. */
  async #awaitReady({ ready, kill }: CheckerProcess): Promise<void> {
    const { clock, startTimeoutMs = START_TIMEOUT_MS } = this.#options;
    const timer = clock.setTimer(kill, startTimeoutMs);
    await ready.finally(() => timer.cancel());
  }

  #keep(digest: string): void {
    this.#validDigests.add(digest);
    const [oldest] = this.#validDigests;
    if (this.#validDigests.size > KEPT_DIGESTS && oldest !== undefined)
      this.#validDigests.delete(oldest);
  }
}

/**
 * A message to the process: metadata to load, in base64. It answers `ready` once, then each
 * request, in order.
 */
export interface CheckRequest {
  /** The metadata, in base64. */
  readonly metadata: string;
}

/** A child process with an agent, which loads the metadata that it is sent. */
export interface CheckerProcess {
  /**
   * Resolves when the process takes requests. Rejects with `KV_TRANSPORT_UNAVAILABLE` when it ends
   * before that.
   */
  readonly ready: Promise<void>;
  /** Keeps this process alive until the returned function is called. */
  hold(): () => void;
  /**
   * Resolves when the metadata was loaded. Rejects with NIXL's error, or with
   * `KV_AGENT_METADATA_INVALID` when the process ends.
   */
  ask(metadata: Uint8Array): Promise<void>;
  /** Kills the process. */
  kill(): void;
  /** Ends the process and waits for its end. */
  close(): Promise<void>;
}

/** Starts a process whose agent has these backends. `onEnd` is called when it has ended. */
export function startCheckerProcess(
  backends: readonly string[],
  environment: Environment,
  onEnd: () => void,
): CheckerProcess {
  const child = new ChildProcess({
    ...childTask("check-metadata", backends.join(",")),
    env: environment,
  });
  // Between two checks the child does not keep this process alive.
  const users = new RefCount((used) => child.keepAlive(used));
  void child.ended.then(onEnd);
  const ready = child.answer<void>({
    what: "the process that checks metadata did not start",
    code: "KV_TRANSPORT_UNAVAILABLE",
    hint: "run: npx --no-install kv-nixl doctor",
  });
  ready.catch(() => {});
  return {
    ready,
    hold: () => users.hold(),
    ask(metadata) {
      child.send({ metadata: Buffer.from(metadata).toString("base64") } satisfies CheckRequest);
      return child.answer({
        what: "loading the metadata ends a process",
        code: "KV_AGENT_METADATA_INVALID",
      });
    },
    kill: () => child.kill(),
    close: () => child.close(),
  };
}
