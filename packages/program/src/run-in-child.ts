import {
  type ChildError,
  type ChildMessage,
  type ChildOptions,
  ChildProcess,
} from "./child-process.js";
import { lastLines } from "./last-lines.js";

/** How a task in a child process ended. */
export type ChildOutcome<T = unknown> =
  | {
      /** It answered, and its process ended well. */
      readonly kind: "answered";
      readonly value: T;
      /** The end of its stdout and stderr. */
      readonly output: string;
    }
  | ChildFailure;

/** How a task ended without a value. */
export type ChildFailure =
  | {
      /** It threw. */
      readonly kind: "failed";
      readonly error: ChildError;
      /** The end of its stdout and stderr. */
      readonly output: string;
    }
  | {
      /** Its process ended before it answered or not well, or was killed at its limit. */
      readonly kind: "crashed" | "timeout";
      /** Such as `SIGSEGV`, `exit code 1`, or `no answer within 5 s`. */
      readonly how: string;
      /** The last step that it named. */
      readonly step?: string | undefined;
      /** The end of its stdout and stderr. */
      readonly output: string;
    };

/** How a task is run. */
export interface RunOptions extends Omit<ChildOptions, "output"> {
  /** The process is killed when a step takes longer. A task without steps is one step. */
  readonly timeoutMs: number;
  /**
   * The process is killed when it has not named its first step after this long. @default timeoutMs
   */
  readonly startTimeoutMs?: number | undefined;
  /** What `receiveRequest` of the task returns. */
  readonly request?: object | undefined;
}

/**
 * Runs a task in a process of its own, so that a crash or a hang does not affect this one. The
 * module calls `runTask`. Never rejects.
 */
export async function runInChild<T>(options: RunOptions): Promise<ChildOutcome<T>> {
  const { timeoutMs, startTimeoutMs = timeoutMs, request } = options;
  let child: ChildProcess;
  try {
    child = new ChildProcess(options);
  } catch (error) {
    return { kind: "crashed", how: (error as Error).message, output: "" };
  }
  if (request !== undefined) child.send(request);
  let step: string | undefined;
  let answer: Exclude<ChildMessage, { step: string }> | undefined;
  let limitMs = startTimeoutMs;
  let late = false;
  const limit = () =>
    setTimeout(() => {
      late = true;
      child.kill();
    }, limitMs);
  let timer = limit();
  for (let message = await child.next(); message !== undefined; message = await child.next()) {
    clearTimeout(timer);
    limitMs = timeoutMs;
    timer = limit();
    if ("step" in message) step = message.step;
    else answer ??= message;
  }
  clearTimeout(timer);
  const how = await child.ended;
  const { output } = child;
  if (answer?.error !== undefined) return { kind: "failed", error: answer.error, output };
  const missing = answer === undefined ? "answer" : "end";
  if (late)
    return { kind: "timeout", how: `no ${missing} within ${limitMs / 1000} s`, step, output };
  // A crash after the answer is one too: a program that does the same work would crash.
  if (answer === undefined || how !== "exit code 0") return { kind: "crashed", how, step, output };
  return { kind: "answered", value: answer.value as T, output };
}

/** What a failure was, for a person, with the last lines of the process's output. */
export function failureText(failure: ChildFailure): string {
  const lines = lastLines(failure.output);
  const output = lines.length === 0 ? [] : ["its output ended with:", ...lines];
  return [summary(failure), ...output].join("\n");
}

function summary(failure: ChildFailure): string {
  if (failure.kind === "failed") return `${failure.error.message} [${failure.error.code}]`;
  const step = failure.step === undefined ? "" : `, in ${failure.step}`;
  return `${failure.kind === "crashed" ? "the process ended with " : ""}${failure.how}${step}`;
}
