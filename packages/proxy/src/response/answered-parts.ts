import type { Deadline } from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import type { RequestPart } from "../request/leg-bodies.js";
import { isObject } from "./answer-filter.js";
import type { LegAnswer } from "./leg-answer.js";

export interface AnsweredPart extends RequestPart {
  readonly requestId: string;
  readonly deadline: Deadline;
  readonly answer: LegAnswer;
}

/** Throws the first error; only the instance of its part counts a failure. */
export function readAllParts<T>(
  parts: readonly AnsweredPart[],
  read: (part: AnsweredPart, index: number) => Promise<T>,
): Promise<T[]> {
  return Promise.all(
    parts.map(async (part, index) => {
      try {
        return await read(part, index);
      } catch (thrown) {
        const error = KvError.from(thrown, "KV_INTERNAL", "an answer could not be read");
        if (part.deadline.aborted) part.answer.visit.abandoned();
        else part.answer.visit.failed(error);
        throw error;
      }
    }),
  );
}

/** A part's answer id with the client's request id in it: `cmpl-ID-0` becomes `cmpl-ID`. */
export function mergedId(id: unknown, part: AnsweredPart | undefined, requestId: string): unknown {
  return typeof id === "string" && part !== undefined
    ? id.replace(part.requestId, () => requestId)
    : id;
}

export type Usage = Record<string, unknown>;

/**
 * Counts as vLLM does: a prompt's tokens, also cached ones, once for all its copies, and the tokens
 * of each completion.
 */
export function sumUsage(
  parts: readonly { readonly usage: Usage; readonly copy: number }[],
): Usage {
  const sum = total(parts.map(({ usage }) => usage)) as Usage;
  for (const key of Object.keys(sum).filter((name) => name.startsWith("prompt")))
    sum[key] = total(parts.filter(({ copy }) => copy === 0).map(({ usage }) => usage[key]));
  if ("total_tokens" in sum)
    sum.total_tokens = Number(sum.prompt_tokens ?? 0) + Number(sum.completion_tokens ?? 0);
  return sum;
}

/** Adds numbers, also within objects. Of other values it keeps the first. */
export function total(values: readonly unknown[]): unknown {
  const [first = null, ...others] = values.filter((value) => value != null);
  if (typeof first === "number")
    return others.reduce((sum: number, value) => sum + Number(value), first);
  if (!isObject(first)) return first;
  const objects = [first, ...others.filter(isObject)];
  const keys = new Set(objects.flatMap(Object.keys));
  return Object.fromEntries(
    Array.from(keys, (key) => [key, total(objects.map((value) => value[key]))]),
  );
}
