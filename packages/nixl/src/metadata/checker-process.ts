import { spawn } from "node:child_process";
import { KvError, type KvErrorCode } from "@kv/interface";
import { childArguments } from "../child/run-in-child.js";
import type { Environment } from "../environment.js";
import { RefCount } from "../ref-count.js";

/** A message to the process: metadata to load, in base64. */
export interface CheckRequest {
  /** The metadata, in base64. */
  readonly metadata: string;
}

/** A message from the process: `ready` once, then one answer for each request, in order. */
export interface CheckAnswer {
  /** The process has its agent, and takes requests. */
  readonly ready?: true | undefined;
  /** Why NIXL refused the metadata; absent when it loaded. */
  readonly error?: { readonly code: string; readonly message: string } | undefined;
}

/** A child process with an agent, which loads the metadata that it is sent. */
export interface CheckerProcess {
  /** Resolves when the process takes requests. Rejects with `KV_TRANSPORT_UNAVAILABLE` when it ends before that. */
  readonly ready: Promise<void>;
  /** Keeps this process alive until the returned function is called. */
  hold(): () => void;
  /** Resolves with the answer. Rejects with `KV_AGENT_METADATA_INVALID` when the process ends instead. */
  ask(metadata: Uint8Array): Promise<CheckAnswer>;
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
  const child = spawn(process.execPath, childArguments("check-metadata", [backends.join(",")]), {
    stdio: ["ignore", "ignore", "ignore", "ipc"],
    env: environment as NodeJS.ProcessEnv,
  });
  // Between two checks the child does not keep this process alive.
  const users = new RefCount((used) => {
    const method = used ? "ref" : "unref";
    child[method]();
    child.channel?.[method]();
  });
  const waiting: { resolve(answer: CheckAnswer): void; reject(error: KvError): void }[] = [];
  const nextAnswer = () =>
    new Promise<CheckAnswer>((resolve, reject) => {
      waiting.push({ resolve, reject });
    });
  const firstAnswer = nextAnswer();
  let isReady = false;
  child.on("message", (message: CheckAnswer) => {
    if (message.ready === true) isReady = true;
    waiting.shift()?.resolve(message);
  });
  const ended = new Promise<void>((resolve) => {
    const end = (how: string) => {
      onEnd();
      const error = isReady
        ? new KvError("KV_AGENT_METADATA_INVALID", `loading the metadata ends a process with ${how}`)
        : new KvError(
            "KV_TRANSPORT_UNAVAILABLE",
            `the process that checks metadata ended with ${how} before it was ready`,
            { hint: "run: npx --no-install kv-nixl doctor" },
          );
      for (const { reject } of waiting.splice(0)) reject(error);
      resolve();
    };
    child.once("error", (error) => end(error.message));
    child.once("exit", (code, signal) => end(signal ?? `exit code ${code}`));
  });
  const ready = firstAnswer.then(({ error }) => {
    if (error !== undefined) throw new KvError(error.code as KvErrorCode, error.message);
  });
  ready.catch(() => {});
  return {
    ready,
    hold: () => users.hold(),
    ask(metadata) {
      const answer = nextAnswer();
      child.send({ metadata: Buffer.from(metadata).toString("base64") } satisfies CheckRequest);
      return answer;
    },
    kill: () => void child.kill("SIGKILL"),
    async close() {
      child.ref();
      if (child.connected) child.disconnect();
      await ended;
    },
  };
}
