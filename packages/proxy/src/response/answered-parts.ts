import type { Deadline } from "@kv/fleet/front-end";
import type { RequestPart } from "../request/leg-bodies.js";
import type { LegAnswer } from "./leg-answer.js";

export interface AnsweredPart extends RequestPart {
  readonly requestId: string;
  readonly deadline: Deadline;
  readonly answer: LegAnswer;
}

/**
 * Names the part whose answer failed. The error's URL does not: ranks of a data-parallel server
 * share one.
 */
export class PartFailure {
  constructor(
    readonly part: AnsweredPart,
    readonly error: unknown,
  ) {}
}

/** Throws the first error as a `PartFailure`. */
export function readAllParts<T>(
  parts: readonly AnsweredPart[],
  read: (part: AnsweredPart, index: number) => Promise<T>,
): Promise<T[]> {
  return Promise.all(
    parts.map(async (part, index) => {
      try {
        return await read(part, index);
      } catch (error) {
        throw new PartFailure(part, error);
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
  const firstCopies = parts.filter(({ copy }) => copy === 0).map(({ usage }) => usage);
  const all = parts.map(({ usage }) => usage);
  const sum: Usage = { ...all[0] };
  for (const key of Object.keys(sum)) {
    const source = key.startsWith("prompt") ? firstCopies : all;
    sum[key] = total(source.map((usage) => usage[key]));
  }
  if ("total_tokens" in sum)
    sum.total_tokens = Number(sum.prompt_tokens ?? 0) + Number(sum.completion_tokens ?? 0);
  return sum;
}

/** Adds numbers, also within objects. Of other values it keeps the first. */
function total(values: readonly unknown[]): unknown {
  const [first] = values;
  if (typeof first === "number")
    return values.reduce((sum: number, value) => sum + Number(value ?? 0), 0);
  if (typeof first !== "object" || first === null)
    return values.find((value) => value != null) ?? first;
  const objects = values.filter(
    (value): value is Usage => typeof value === "object" && value !== null,
  );
  return Object.fromEntries(
    Object.keys(first).map((key) => [key, total(objects.map((value) => value[key]))]),
  );
}
