import { ChildProcess } from "@kv/program";
import { childTask } from "../child/child-task.js";
import type { Environment } from "../environment.js";
import { RefCount } from "../ref-count.js";

/** A message to the process: metadata to load, in base64. It answers `ready` once, then each request, in order. */
export interface CheckRequest {
  /** The metadata, in base64. */
  readonly metadata: string;
}

/** A child process with an agent, which loads the metadata that it is sent. */
export interface CheckerProcess {
  /** Resolves when the process takes requests. Rejects with `KV_TRANSPORT_UNAVAILABLE` when it ends before that. */
  readonly ready: Promise<void>;
  /** Keeps this process alive until the returned function is called. */
  hold(): () => void;
  /** Resolves when the metadata was loaded. Rejects with NIXL's error, or with `KV_AGENT_METADATA_INVALID` when the process ends. */
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
  const child = new ChildProcess({ ...childTask("check-metadata", backends.join(",")), env: environment });
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
      return child.answer({ what: "loading the metadata ends a process", code: "KV_AGENT_METADATA_INVALID" });
    },
    kill: () => child.kill(),
    close: () => child.close(),
  };
}
