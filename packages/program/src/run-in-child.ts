import { type ChildError, type ChildMessage, type ChildOptions, ChildProcess } from "./child-process.js";
import { lastLines } from "./last-lines.js";

/** How a task in a child process ended. `output` is the end of its stdout and stderr; `step` is the last one that it named. */
export type ChildOutcome<T = unknown> =
  | { readonly kind: "answered"; readonly value: T; readonly output: string }
  | ChildFailure;

/** How a task ended without a value: with an error of the task, with a crash, or not in time. A process that answers and then crashes has crashed. */
export type ChildFailure =
  | { readonly kind: "failed"; readonly error: ChildError; readonly output: string }
  | {
      readonly kind: "crashed";
      readonly how: string;
      readonly step?: string | undefined;
      readonly output: string;
    }
  | {
      readonly kind: "timeout";
      readonly timeoutMs: number;
      readonly step?: string | undefined;
      readonly output: string;
    };

/** How a task is run. */
export interface RunOptions extends ChildOptions {
  /** The process is killed when a step takes longer. A task without steps is one step. */
  readonly timeoutMs: number;
  /** The process is killed when it has not named its first step after this long. @default timeoutMs */
  readonly startTimeoutMs?: number | undefined;
  /** What `receiveRequest` of the task returns. */
  readonly request?: object | undefined;
}

/** Runs a task in a process of its own, so that a crash or a hang does not affect this one. The module calls `runTask`. Never rejects. */
export async function runInChild<T>(options: RunOptions): Promise<ChildOutcome<T>> {
  const { timeoutMs, startTimeoutMs = timeoutMs, request } = options;
  const child = new ChildProcess({ ...options, output: "kept" });
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
  if (late) return { kind: "timeout", timeoutMs: limitMs, step, output };
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
  if (failure.kind === "timeout") return `no answer within ${failure.timeoutMs / 1000} s${step}`;
  return `the process ended with ${failure.how}${step}`;
}
