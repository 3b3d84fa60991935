import { type ChildProcess, spawn } from "node:child_process";
import { KvError, type KvErrorCode } from "@kv/interface";
import { childArguments } from "../child/run-in-child.js";
import type { Environment } from "../library/find-library.js";
import type { CheckAnswer, CheckRequest } from "./checker-messages.js";

/** A process with an agent, which loads what it is asked about. */
export interface CheckerProcess {
  /** Rejects with `KV_TRANSPORT_UNAVAILABLE` where it ends before it can be asked. */
  readonly ready: Promise<void>;
  /** Keeps this process alive until the answered function is called; several may do so at a time. */
  hold(): () => void;
  /** Settles with its answer; rejects with `KV_AGENT_METADATA_INVALID` where it ends instead. */
  ask(metadata: Uint8Array): Promise<CheckAnswer>;
  kill(): void;
  /** Has it end, and waits for that. */
  close(): Promise<void>;
}

/** Starts it with these backends; `onEnd` says that it has ended. */
export function checkerProcess(
  backends: readonly string[],
  environment: Environment,
  onEnd: () => void,
): CheckerProcess {
  const child = spawn(process.execPath, childArguments("check-metadata", [backends.join(",")]), {
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
  child.on("message", (message: CheckAnswer) => {
    if (message.ready === true) isReady = true;
    waiting.shift()?.resolve(message);
  });
  const ended = new Promise<void>((resolve) => {
    const end = (how: string) => {
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
  return {
    ready,
    hold: holding(child),
    ask(metadata) {
      const answered = answer();
      child.send({ metadata: Buffer.from(metadata).toString("base64") } satisfies CheckRequest);
      return answered;
    },
    kill: () => void child.kill("SIGKILL"),
    async close() {
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
