import {
  type ChildError,
  type ChildMessage,
  type ChildOptions,
  ChildProcess,
} from "./child-process.js";
import { lastLines } from "./last-lines.js";

/** `output`: the end of its stdout and stderr. */
export type ChildOutcome<T = unknown> =
  | {
      readonly kind: "answered";
      readonly value: T;
      readonly output: string;
    }
  | ChildFailure;

/** How a task ended without a value. */
export type ChildFailure =
  | {
      readonly kind: "failed";
      readonly error: ChildError;
      readonly output: string;
    }
  | {
      /** It ended too early or badly, or was killed at its limit. */
      readonly kind: "crashed" | "timeout";
      /** Such as `SIGSEGV`, `exit code 1`, or `no answer within 5 s`. */
      readonly how: string;
      readonly step?: string | undefined;
      readonly output: string;
    };

/** How a task is run. */
export interface RunOptions extends Omit<ChildOptions, "output"> {
  /** Limit of a step, and of a task without steps. Then the process is killed. */
  readonly timeoutMs: number;
  /** Limit before the first step. @default timeoutMs */
  readonly startTimeoutMs?: number | undefined;
  /** The task's `receiveRequest` returns it. */
  readonly request?: object | undefined;
}

/** Runs a module that calls `runTask`. Its crash or hang does not end this process. */
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
  // Other programs with this work would crash too.
  if (answer === undefined || how !== "exit code 0") return { kind: "crashed", how, step, output };
  return { kind: "answered", value: answer.value as T, output };
}

/** A failure for people, with the process's last lines. */
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
