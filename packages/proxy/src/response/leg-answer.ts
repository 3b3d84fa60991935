import type { Instance, Visit } from "@kv/fleet";
import type { Deadline } from "../request/deadline.js";
import type { Endpoint } from "../request/generation-request.js";
import type { UpstreamAnswer } from "../upstream/upstream.js";
import { badAnswer } from "../upstream/upstream-errors.js";
import { firstEventError } from "./event-stream.js";
import { validateAnswer, validateStreamBegin } from "./validate-answer.js";

/** An instance's answer, checked as far as its first bytes allow. Nothing of it has left for the client. */
export interface LegAnswer {
  /** Whoever passes the answer on ends the visit. */
  readonly visit: Visit;
  readonly status: number;
  readonly headers: UpstreamAnswer["headers"];
  readonly eventStream: boolean;
  /** The first bytes of the body. */
  readonly held: Buffer;
  /** The body after `held`; undefined when `held` is all of it. */
  readonly rest: UpstreamAnswer["body"] | undefined;
  /** The prefill worker's answer, where its log probabilities of the prompt belong into this one. */
  readonly promptAnswer?: Readonly<Record<string, unknown>> | undefined;
  /** Closes the connection, unless the body has ended. */
  discard(): void;
}

/** The head and first bytes of an answer, before they are checked. */
export interface AnswerBegin {
  readonly answer: UpstreamAnswer;
  readonly eventStream: boolean;
  readonly bytes: Buffer;
  /** Whether `bytes` is all of the body. */
  readonly complete: boolean;
}

/**
 * Checks the begin of an answer: status 200 promises one, so an empty one, or one without choices, is a failure. A stream whose first event
 * is an error becomes an error answer. `onePart`: the request had one prompt and one copy. Errors: `KV_PROXY_UPSTREAM_FAILED`.
 */
export function readLegAnswer(
  endpoint: Endpoint,
  visit: Visit,
  { answer, eventStream, bytes, complete }: AnswerBegin,
  onePart: boolean,
): LegAnswer {
  const { status, headers, discard } = answer;
  const { role, url } = visit.instance;
  const error = eventStream && status === 200 ? firstEventError(bytes) : undefined;
  if (error !== undefined) {
    discard();
    const held = Buffer.from(error.body);
    const errorHeaders = {
      ...headers,
      "content-type": "application/json",
      "content-length": String(held.length),
    };
    const { status } = error;
    return { visit, status, headers: errorHeaders, eventStream: false, held, rest: undefined, discard };
  }
  if (status === 200 && eventStream) validateStreamBegin(role, url, bytes);
  else if (status === 200 && complete) validateAnswer(endpoint, role, url, bytes, onePart);
  else if (status !== 200 && status < 400) throw badAnswer(role, url, `answered with status ${status}`);
  const rest = complete ? undefined : answer.body;
  return { visit, status, headers, eventStream, held: bytes, rest, discard };
}

/**
 * The next chunk of an answer; undefined at its end. The deadline aborts when none comes for `stallMs`. Errors: those of the body.
 */
export async function readChunk(
  { rest, visit }: LegAnswer,
  deadline: Deadline,
  stallMs: number,
): Promise<Uint8Array | undefined> {
  if (rest === undefined) return undefined;
  const { role, url } = visit.instance;
  deadline.startPhase(`waiting for more from the ${role} instance ${url}`, stallMs);
  const { value } = await rest.next();
  deadline.endPhase();
  return value;
}

/** A visit that has ended already. */
export function endedVisit(instance: Instance): Visit {
  return { instance, succeeded() {}, abandoned() {}, failed() {} };
}
