import type { Instance, Role, Visit } from "@kv/fleet";
import { changedBodyHeaders, type Deadline, type Endpoint, type UpstreamAnswer } from "@kv/fleet/front-end";
import { badAnswer } from "../upstream/upstream-errors.js";
import { FirstEvent, streamedError } from "./event-stream.js";

type Fields = Readonly<Record<string, unknown>>;

/** An instance's answer, checked as far as its first bytes allow. Nothing of it has left for the client. */
export interface LegAnswer {
  /** Whoever passes the answer on ends the visit. */
  readonly visit: Visit;
  readonly status: number;
  readonly headers: UpstreamAnswer["headers"];
  readonly eventStream: boolean;
  /** The leg had one prompt and one copy, so the answer has one choice, with the index 0. */
  readonly onePart: boolean;
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
  /** Of a stream with status 200. */
  readonly firstEvent: FirstEvent | undefined;
}

/** Reads of a stream as much as tells whether its first event is an error, of another answer at most `limitBytes`. Rejects with the error of the body. */
export async function readAnswerBegin(answer: UpstreamAnswer, limitBytes: number): Promise<AnswerBegin> {
  const { status, headers, body } = answer;
  const eventStream = isEventStream(headers["content-type"]);
  const buffered = body.readBuffered(limitBytes);
  if (!eventStream || status !== 200) {
    const begin = buffered ?? (await body.readLimited(limitBytes));
    return { answer, eventStream, ...begin, firstEvent: undefined };
  }
  const firstEvent = new FirstEvent(limitBytes);
  if (buffered !== undefined) firstEvent.push(buffered.bytes);
  const begin =
    buffered ?? (await body.readLimited(Number.POSITIVE_INFINITY, (chunk) => firstEvent.push(chunk)));
  if (begin.complete) firstEvent.end();
  return { answer, eventStream, ...begin, firstEvent };
}

/** What a request lets expect of its answer. */
export interface AnswerExpected {
  /** The leg had one prompt and one copy. */
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
  { answer, eventStream, bytes, complete, firstEvent }: AnswerBegin,
  { onePart, streamed }: AnswerExpected,
): LegAnswer {
  const { status, headers, discard } = answer;
  const { role, url } = visit.instance;
  const error = firstEvent?.kind === "error" ? streamedError(firstEvent.data) : undefined;
  if (error !== undefined) {
    discard();
    const held = Buffer.from(error.body);
    const errorHeaders = { ...changedBodyHeaders(headers), "content-type": "application/json" };
    const { status } = error;
    return {
      visit,
      status,
      headers: errorHeaders,
      eventStream: false,
      onePart,
      held,
      rest: undefined,
      discard,
    };
  }
  if (status === 200 && eventStream !== streamed) {
    const type = eventStream ? "an event stream" : "no event stream";
    throw badAnswer(role, url, `answered 200 with ${type}, where ${streamed ? "one" : "none"} was requested`);
  }
  if (status === 200 && bytes.length === 0) throw badAnswer(role, url, "answered 200 with an empty body");
  if (firstEvent?.kind === "done") throw badAnswer(role, url, "answered 200 with a stream without choices");
  if (status === 200 && !eventStream && complete) validateAnswer(endpoint, role, url, bytes, onePart);
  if (status !== 200 && status < 400) throw badAnswer(role, url, `answered with status ${status}`);
  const rest = complete ? undefined : answer.body;
  return { visit, status, headers, eventStream, onePart, held: bytes, rest, discard };
}

/** Errors: `KV_PROXY_UPSTREAM_FAILED` for a body that the proxy has to read and that has a coding, although the leg accepts none. */
export function requireReadable(role: Role, url: string, { status, headers, discard }: UpstreamAnswer): void {
  const coding = String(headers["content-encoding"] ?? "");
  if (coding === "" || coding.toLowerCase() === "identity" || (status >= 400 && status < 500)) return;
  discard();
  throw badAnswer(role, url, `answered in the content-encoding ${coding}, where none was accepted`);
}

/** Whether a `content-type` is that of server-sent events. */
function isEventStream(contentType: string | string[] | undefined): boolean {
  return typeof contentType === "string" && contentType.toLowerCase().startsWith("text/event-stream");
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
