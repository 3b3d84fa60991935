import type { Deadline } from "@kv/fleet/front-end";
import type { RequestPart } from "../request/leg-bodies.js";
import type { LegAnswer } from "./leg-answer.js";

/** A part of a client's request, with the begin of its answer. */
export interface AnsweredPart extends RequestPart {
  /** Its own. */
  readonly requestId: string;
  readonly deadline: Deadline;
  readonly answer: LegAnswer;
}

/**
 * The part whose answer failed. Several parts may share a URL (the ranks of a data-parallel
 * server), so the error alone does not identify the part.
 */
export class PartFailure {
  constructor(
    readonly part: AnsweredPart,
    readonly error: unknown,
  ) {}
}

/** Reads the answers of all parts at once. The first error is thrown as a `PartFailure`. */
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

/**
 * The id of the merged answer: that of a part's answer, with the client's request id in it.
 * `cmpl-ID-0` becomes `cmpl-ID`.
 */
export function mergedId(id: unknown, part: AnsweredPart | undefined, requestId: string): unknown {
  return typeof id === "string" && part !== undefined
    ? id.replace(part.requestId, () => requestId)
    : id;
}
