import { createHash } from "node:crypto";
import { type Clock, KvError } from "@kv/interface";
import { ChildProcess } from "@kv/program";
import { childTask } from "../child/child-task.js";
import type { Environment } from "../environment.js";
import { RefCount } from "../ref-count.js";

export interface MetadataCheckerOptions {
  readonly clock: Clock;
  /** `onEnd` is called when the process has ended. */
  startProcess(onEnd: () => void): CheckerProcess;
}

/** The longest check. Valid metadata takes some milliseconds. */
const TIMEOUT_MS = 5000;
/** The longest start of the process, which takes about a second. */
const START_TIMEOUT_MS = 30_000;
/** The oldest digest of valid metadata goes first. */
const KEPT_DIGESTS = 4096;

/**
 * Damaged metadata can crash NIXL in spite of all checks outside it (1.5.0: 2 of 451 single flipped
 * bytes did), so another process loads it first.
 */
export class MetadataChecker {
  readonly #options: MetadataCheckerOptions;
  readonly #validDigests = new Set<string>();
  #process: CheckerProcess | undefined;
  /** Only one check runs at a time. */
  #lastCheck: Promise<unknown> = Promise.resolve();
  #closed = false;

  constructor(options: MetadataCheckerOptions) {
    this.#options = options;
  }

  /**
   * Starts the process, so that the first check does not wait for it. Rejects with
   * `KV_TRANSPORT_UNAVAILABLE` or `KV_TRANSPORT_CLOSED`.
   */
  async warm(): Promise<void> {
    const child = this.#running();
    await this.#awaitReady(child).finally(child.hold());
  }

  /**
   * Resolves when the process has loaded these bytes, now or earlier. Rejects with
   * `KV_AGENT_METADATA_INVALID` when NIXL refuses them, crashes or does not return, and with
   * `KV_TRANSPORT_UNAVAILABLE` when the process cannot start.
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

  async close(): Promise<void> {
    this.#closed = true;
    await this.#process?.close();
  }

  #running(): CheckerProcess {
    if (this.#closed) throw new KvError("KV_TRANSPORT_CLOSED", "the checker of metadata is closed");
    this.#process ??= this.#options.startProcess(() => {
      this.#process = undefined;
    });
    return this.#process;
  }

  async #load(metadata: Uint8Array): Promise<void> {
    const child = this.#running();
    const { hold, ask, kill } = child;
    const release = hold();
    try {
      await this.#awaitReady(child);
      const answer = ask(metadata);
      const timer = this.#options.clock.setTimer(kill, TIMEOUT_MS);
      await answer.finally(() => timer.cancel());
    } finally {
      release();
    }
  }

  /** Kills a process that does not get ready; the next check starts another. */
  async #awaitReady({ ready, kill }: CheckerProcess): Promise<void> {
    const timer = this.#options.clock.setTimer(kill, START_TIMEOUT_MS);
    await ready.finally(() => timer.cancel());
  }

  #keep(digest: string): void {
    this.#validDigests.add(digest);
    const [oldest] = this.#validDigests;
    if (this.#validDigests.size > KEPT_DIGESTS && oldest !== undefined)
      this.#validDigests.delete(oldest);
  }
}

/** The process answers `ready` once, then each request, in order. */
export interface CheckRequest {
  /** In base64. */
  readonly metadata: string;
}

export interface CheckerProcess {
  /** Rejects with `KV_TRANSPORT_UNAVAILABLE` when the process ends first. */
  readonly ready: Promise<void>;
  /** Keeps this process alive until the returned function is called. */
  hold(): () => void;
  /** Rejects with NIXL's error, or with `KV_AGENT_METADATA_INVALID` when the process ends. */
  ask(metadata: Uint8Array): Promise<void>;
  kill(): void;
  /** Waits for the end of the process. */
  close(): Promise<void>;
}

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
