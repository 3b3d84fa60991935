import type { Instance, Role, Visit } from "@kv/fleet";
import type { Deadline, Endpoint, UpstreamAnswer } from "@kv/fleet/front-end";
import { badAnswer } from "../upstream/upstream-errors.js";
import { beginsWithDone, firstEventError } from "./event-stream.js";

type Fields = Readonly<Record<string, unknown>>;

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
  readonly promptAnswer?: Fields | undefined;
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

/** What a request lets expect of its answer. */
export interface AnswerExpected {
  /** The request had one prompt and one copy. */
  readonly onePart: boolean;
  /** The request asked for a stream. */
  readonly streamed: boolean;
}

/**
 * Checks the begin of an answer: status 200 promises one, so an empty one, or one without choices, is a failure. A stream whose first event
 * is an error becomes an error answer. Errors: `KV_PROXY_UPSTREAM_FAILED`.
 */
export function readLegAnswer(
  endpoint: Endpoint,
  visit: Visit,
  { answer, eventStream, bytes, complete }: AnswerBegin,
  { onePart, streamed }: AnswerExpected,
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
  if (status === 200 && eventStream !== streamed) {
    const type = eventStream ? "an event stream" : "no event stream";
    throw badAnswer(role, url, `answered 200 with ${type}, where ${streamed ? "one" : "none"} was requested`);
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

/**
 * Checks a complete unstreamed answer with status 200. `onePart`: the request had one prompt and one copy, so the answer must have one
 * choice. A response of the Responses API may have an empty output, a message no content. Errors: `KV_PROXY_UPSTREAM_FAILED`.
 */
function validateAnswer(endpoint: Endpoint, role: Role, url: string, bytes: Buffer, onePart: boolean): void {
  if (bytes.length === 0) throw badAnswer(role, url, "answered 200 with an empty body");
  let body: unknown;
  try {
    body = JSON.parse(bytes.toString("utf8"));
  } catch (cause) {
    throw badAnswer(role, url, `answered 200 with a body that is not JSON (${bytes.length} bytes)`, cause);
  }
  const named = endpoint === "/v1/responses" ? "output" : endpoint === "/v1/messages" ? "content" : undefined;
  if (named === undefined) validateChoices(role, url, body, onePart);
  else if (!Array.isArray((body as Fields | null)?.[named]))
    throw badAnswer(role, url, `answered 200 without ${named}`);
}

/** Checks the first bytes of a stream with status 200. Errors: `KV_PROXY_UPSTREAM_FAILED`. */
function validateStreamBegin(role: Role, url: string, begin: Buffer): void {
  if (begin.length === 0) throw badAnswer(role, url, "answered 200 with an empty body");
  if (beginsWithDone(begin)) throw badAnswer(role, url, "answered 200 with a stream without choices");
}

/** Checks the choices of a complete answer. Errors: `KV_PROXY_UPSTREAM_FAILED`. */
export function validateChoices(role: Role, url: string, body: unknown, onePart: boolean): void {
  const { choices } = (body ?? {}) as { choices?: unknown };
  if (!Array.isArray(choices) || choices.length === 0)
    throw badAnswer(role, url, "answered 200 without choices");
  if (!choices.every(isObject))
    throw badAnswer(role, url, "answered 200 with a choice that is not an object");
  if (onePart && choices.length > 1)
    throw badAnswer(role, url, `answered 200 with ${choices.length} choices where one was requested`);
  const [first] = choices as readonly Fields[];
  if (onePart && (first?.index ?? 0) !== 0)
    throw badAnswer(role, url, "answered 200 with a choice with another index than 0");
}

/** Checks the choices of one event of a part's stream, which may have none. Errors: `KV_PROXY_UPSTREAM_FAILED`. */
export function validateStreamedChoices(url: string, choices: readonly unknown[]): void {
  const other = choices.find((choice) => !isObject(choice) || (choice.index ?? 0) !== 0);
  if (other !== undefined || choices.length > 1)
    throw badAnswer("decode", url, "streamed more than the one choice that was requested");
}

function isObject(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
