import { createHash } from "node:crypto";
import { type Clock, KvError, type KvErrorCode } from "@kv/interface";
import type { CheckerProcess } from "./checker-process.js";

/** Loads metadata in another process first: damaged bytes may end a process within NIXL, whatever was checked before. */
export interface MetadataChecker {
  /** Starts the process, so that the first check need not wait for NIXL. Errors as of `check`. */
  warm(): Promise<void>;
  /**
   * Resolves when the other process has loaded these bytes, now or earlier. Errors: `KV_AGENT_METADATA_INVALID` when NIXL refuses them, dies of
   * them or does not come back; `KV_TRANSPORT_UNAVAILABLE` when the process cannot be started.
   */
  check(metadata: Uint8Array): Promise<void>;
  close(): Promise<void>;
}

export interface MetadataCheckerOptions {
  readonly clock: Clock;
  /** Starts a process that loads what it is asked about; `onEnd` says that it has ended. */
  start(onEnd: () => void): CheckerProcess;
  /** Longest that one check may take; 5 s. A sound peer's takes some ms. */
  readonly timeoutMs?: number;
}

const TIMEOUT_MS = 5000;
/** Digests of what was loaded; the oldest goes first. */
const KEPT_DIGESTS = 4096;

export function metadataChecker(options: MetadataCheckerOptions): MetadataChecker {
  const { clock, start, timeoutMs = TIMEOUT_MS } = options;
  const sound = new Set<string>();
  let running: CheckerProcess | undefined;
  let turn: Promise<unknown> = Promise.resolve();
  let closed = false;

  function process(): CheckerProcess {
    if (closed) throw new KvError("KV_TRANSPORT_CLOSED", "the checker of metadata is closed");
    running ??= start(() => {
      running = undefined;
    });
    return running;
  }

  async function load(metadata: Uint8Array): Promise<void> {
    const { hold, ready, ask, kill } = process();
    const letGo = hold();
    try {
      await ready;
      const answered = ask(metadata);
      const timer = clock.setTimer(kill, timeoutMs);
      const { error } = await answered.finally(() => timer.cancel());
      if (error !== undefined) throw new KvError(error.code as KvErrorCode, error.message);
    } finally {
      letGo();
    }
  }

  return {
    async warm() {
      const { hold, ready } = process();
      await ready.finally(hold());
    },
    check(metadata) {
      // A Buffer's own slice would be a view.
      const bytes = new Uint8Array(metadata);
      const digest = createHash("sha256").update(bytes).digest("base64");
      if (sound.has(digest)) return Promise.resolve();
      const checked = turn
        .catch(() => {})
        .then(() => (sound.has(digest) ? undefined : load(bytes)))
        .then(() => {
          sound.add(digest);
          const [oldest] = sound;
          if (sound.size > KEPT_DIGESTS && oldest !== undefined) sound.delete(oldest);
        });
      turn = checked;
      return checked;
    },
    async close() {
      closed = true;
      await running?.close();
    },
  };
}
