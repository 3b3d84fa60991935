import { type ChildProcess, spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { type Clock, KvError, type KvErrorCode } from "@kv/interface";
import { childArguments } from "../child/child-process.js";
import type { Environment } from "../library.js";
import type { CheckAnswer, CheckRequest } from "./checker-messages.js";

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
  readonly backends: readonly string[];
  readonly environment: Environment;
  /** Longest that one check may take; 5 s. A sound peer's takes some ms. */
  readonly timeoutMs?: number;
}

interface Running {
  readonly child: ChildProcess;
  /** Keeps this process alive until the answered function is called; several may do so at a time. */
  hold(): () => void;
  readonly ready: Promise<void>;
  /** Settles with the next answer, or the end of the process. */
  answer(): Promise<CheckAnswer>;
  readonly ended: Promise<void>;
}

const TIMEOUT_MS = 5000;
/** Digests of what was loaded; the oldest goes first. */
const KEPT_DIGESTS = 4096;

export function metadataChecker(options: MetadataCheckerOptions): MetadataChecker {
  const { clock, backends, environment, timeoutMs = TIMEOUT_MS } = options;
  const sound = new Set<string>();
  let running: Running | undefined;
  let turn: Promise<unknown> = Promise.resolve();
  let closed = false;

  function process(): Running {
    if (closed) throw new KvError("KV_TRANSPORT_CLOSED", "the checker of metadata is closed");
    running ??= start(backends, environment, () => {
      running = undefined;
    });
    return running;
  }

  async function load(metadata: Uint8Array): Promise<void> {
    const { child, hold, ready, answer } = process();
    const letGo = hold();
    try {
      await ready;
      const answered = answer();
      child.send({ metadata: Buffer.from(metadata).toString("base64") } satisfies CheckRequest);
      const timer = clock.setTimer(() => child.kill("SIGKILL"), timeoutMs);
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
      if (running === undefined) return;
      const { child, ended } = running;
      child.ref();
      if (child.connected) child.disconnect();
      await ended;
    },
  };
}

/** While nothing is asked, the process does not keep this one alive. */
function holding(child: ChildProcess): () => () => void {
  let holders = 0;
  return () => {
    if (++holders === 1) {
      child.ref();
      child.channel?.ref();
    }
    let over = false;
    return () => {
      if (over) return;
      over = true;
      if (--holders > 0) return;
      child.unref();
      child.channel?.unref();
    };
  };
}

function start(backends: readonly string[], environment: Environment, onEnd: () => void): Running {
  const child = spawn(globalThis.process.execPath, childArguments("check-metadata", [backends.join(",")]), {
    stdio: ["ignore", "ignore", "ignore", "ipc"],
    env: environment as NodeJS.ProcessEnv,
  });
  const waiting: { resolve(answer: CheckAnswer): void; reject(error: KvError): void }[] = [];
  const answer = () =>
    new Promise<CheckAnswer>((resolve, reject) => {
      waiting.push({ resolve, reject });
    });
  const first = answer();
  let isReady = false;
  let how = "";
  child.on("message", (message: CheckAnswer) => {
    if (message.ready === true) isReady = true;
    waiting.shift()?.resolve(message);
  });
  const ended = new Promise<void>((resolve) => {
    const end = (why: string) => {
      how = why;
      onEnd();
      const code = isReady ? "KV_AGENT_METADATA_INVALID" : "KV_TRANSPORT_UNAVAILABLE";
      const what = isReady
        ? `loading the metadata ends a process with ${how}`
        : `the process that checks metadata ended with ${how} before it was ready`;
      for (const { reject } of waiting.splice(0)) {
        reject(new KvError(code, what, isReady ? {} : { hint: "run: npx --no-install kv-nixl doctor" }));
      }
      resolve();
    };
    child.once("error", (error) => end(error.message));
    child.once("exit", (code, signal) => end(signal ?? `exit code ${code}`));
  });
  const ready = first.then(({ error }) => {
    if (error !== undefined) throw new KvError(error.code as KvErrorCode, error.message);
  });
  ready.catch(() => {});
  return { child, hold: holding(child), ready, answer, ended };
}
