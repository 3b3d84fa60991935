import type { ServerResponse } from "node:http";
import type { Instance, Visit } from "@kv/fleet";
import {
  answerHeaders,
  changedBodyHeaders,
  type Deadline,
  type Endpoint,
  type GenerationRequest,
  LEFT_OUT_HEADER,
  type UpstreamAnswer,
} from "@kv/fleet/front-end";
import { asBuffer, isDone, isObject, rawMember, withoutAddresses } from "@kv/http";
import { KvError } from "@kv/interface";
import { checkRemotePrefillParams } from "@kv/protocol";
import type { ProxySettings } from "../config/settings.js";
import type { RequestRecord } from "../telemetry/request-record.js";
import { badAnswer, faultOfStatus, tooLong } from "../upstream/upstream-errors.js";
import type { AnswerFilter, AnswerTraits } from "./answer-filter.js";
import { FirstEvent, streamedError } from "./answer-filter.js";
import type { Fields } from "./answer-members.js";

/** An answer, checked as far as its first bytes allow. The client has none of it yet. */
export interface LegAnswer extends AnswerTraits {
  /** Whoever passes the answer on ends it. */
  readonly visit: Visit;
  readonly headers: UpstreamAnswer["headers"];
  readonly held: Buffer;
  /** The body after `held`; undefined where `held` is everything. */
  readonly rest: AsyncIterator<Uint8Array, undefined> | undefined;
  discard(): void;
}

export interface AnswerTarget {
  readonly requestId: string;
  readonly deadline: Deadline;
  readonly record: RequestRecord;
  readonly response: ServerResponse;
  /** The stream's head has left, so a failure becomes an event. */
  eventStreamStarted: boolean;
  /** An instance's failure, which ends the stream. */
  lastEvent?: string | undefined;
}

/** Most bytes held before another route's answer passes on. */
const HELD_BYTES = 256 * 1024;

/**
 * Reads the start of an answer that passes unchanged.
 * @throws The body's errors, `KV_PROXY_UPSTREAM_FAILED` for what is no answer.
 */
export async function readPassedAnswer(visit: Visit, answer: UpstreamAnswer): Promise<LegAnswer> {
  const { status, body } = answer;
  const { instance } = visit;
  requireStatus(instance, status);
  const { bytes, complete } = body.readBuffered(HELD_BYTES) ?? (await body.readLimited(HELD_BYTES));
  if (status === 200 && /^\s*</.test(bytes.subarray(0, 64).toString("latin1")))
    throw badAnswer(instance, "answered 200 with HTML");
  return { ...wholeAnswer(visit, answer, bytes), rest: complete ? undefined : body };
}

function wholeAnswer(
  visit: Visit,
  { status, headers, discard }: UpstreamAnswer,
  held: Buffer,
): LegAnswer {
  const traits = { eventStream: false, onePart: true, kvFromPrefill: false };
  return { visit, status, headers, held, rest: undefined, discard, ...traits };
}

/** @throws `KV_PROXY_UPSTREAM_FAILED` for a status that is neither 200 nor an error. */
function requireStatus(instance: Instance, status: number): void {
  if ((status !== 200 && status < 400) || status > 599)
    throw badAnswer(instance, `answered with status ${status}, which the proxy does not follow`);
}

/**
 * Reads a stream up to its first event, or at most `limitBytes` of another answer. Status 200
 * promises an answer, so an empty one, or one without choices, is a failure. A stream that begins
 * with an error becomes an error answer.
 * @throws The body's errors, `KV_PROXY_UPSTREAM_FAILED`.
 */
export async function readLegAnswer(
  { endpoint, fields }: GenerationRequest,
  visit: Visit,
  answer: UpstreamAnswer,
  { onePart, kvFromPrefill }: Pick<AnswerTraits, "onePart" | "kvFromPrefill">,
  limitBytes: number,
): Promise<LegAnswer> {
  const { status, headers, body, discard } = answer;
  const { instance } = visit;
  const eventStream = isEventStream(answer);
  requireReadable(instance, answer);
  requireStatus(instance, status);

  const firstEvent = status === 200 && eventStream ? new FirstEvent(limitBytes) : undefined;
  const buffered = body.readBuffered(limitBytes);
  if (buffered !== undefined) firstEvent?.push(buffered.bytes);
  const { bytes, complete } =
    buffered ??
    (firstEvent === undefined
      ? await body.readLimited(limitBytes)
      : await body.readLimited(Number.POSITIVE_INFINITY, (chunk) => firstEvent.push(chunk)));
  if (complete) firstEvent?.end();
  const first = firstEvent?.event;
  const error = first === undefined ? undefined : streamedError(first);
  if (error !== undefined) {
    discard();
    const { status } = error;
    const typed = { ...changedBodyHeaders(headers), "content-type": "application/json" };
    return wholeAnswer(visit, { ...answer, status, headers: typed }, Buffer.from(error.body));
  }

  if (status === 200) {
    const [got, asked] = eventStream ? ["an", "none"] : ["no", "one"];
    if (eventStream !== (fields.stream === true))
      throw badAnswer(
        instance,
        `answered 200 with ${got} event stream, where ${asked} was requested`,
      );
    if (bytes.length === 0) throw badAnswer(instance, "answered 200 with an empty body");
    if (first !== undefined && isDone(first))
      throw badAnswer(instance, "answered 200 with a stream without choices");
    if (!eventStream && complete) validateAnswer(endpoint, instance, bytes, onePart);
  }
  const rest = complete ? undefined : body;
  return { ...wholeAnswer(visit, answer, bytes), eventStream, onePart, kvFromPrefill, rest };
}

/**
 * @throws `KV_PROXY_UPSTREAM_FAILED` for a content coding where the proxy must read the body: the
 * leg accepts none.
 */
function requireReadable(instance: Instance, { status, headers }: UpstreamAnswer): void {
  const coding = String(headers["content-encoding"] ?? "");
  if (coding === "" || coding.toLowerCase() === "identity" || (status >= 400 && status < 500))
    return;
  throw badAnswer(instance, `answered in the content-encoding ${coding}, where none was accepted`);
}

export function isEventStream({ headers }: UpstreamAnswer): boolean {
  return /^text\/event-stream/i.test(String(headers["content-type"]));
}

/**
 * Returns undefined at the end. The deadline aborts after `stallMs` without a chunk.
 * @throws The body's errors.
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

/**
 * Answers held together share `budget`.
 * @throws The body's errors, `KV_PROXY_UPSTREAM_FAILED` where it is too long.
 */
export async function readWhole(
  answer: LegAnswer,
  deadline: Deadline,
  stallMs: number,
  budget: { leftBytes: number; readonly limit: string },
): Promise<Buffer> {
  const { instance } = answer.visit;
  const chunks: Uint8Array[] = [];
  let chunk: Uint8Array | undefined = answer.held;
  while (chunk !== undefined) {
    chunks.push(chunk);
    budget.leftBytes -= chunk.byteLength;
    if (budget.leftBytes < 0) throw tooLong(instance, budget.limit);
    chunk = await readChunk(answer, deadline, stallMs);
  }
  return Buffer.concat(chunks);
}

/**
 * `onePart` requires exactly one choice. The Responses API's output and a message's content may be
 * empty.
 * @throws `KV_PROXY_UPSTREAM_FAILED`.
 */
function validateAnswer(
  endpoint: Endpoint,
  instance: Instance,
  bytes: Buffer,
  onePart: boolean,
): void {
  const body = parsedAnswer(instance, bytes);
  const named =
    endpoint === "/v1/responses" ? "output" : endpoint === "/v1/messages" ? "content" : undefined;
  if (named === undefined) validateChoices(instance, body, onePart);
  else if (!Array.isArray((body as Fields | null)?.[named]))
    throw badAnswer(instance, `answered 200 without ${named}`);
}

/** @throws `KV_PROXY_UPSTREAM_FAILED` for an answer that is not JSON. */
export function parsedAnswer(instance: Instance, bytes: Buffer): unknown {
  try {
    return JSON.parse(bytes.toString("utf8"));
  } catch (cause) {
    const problem = `answered 200 with a body that is not JSON (${bytes.length} bytes)`;
    throw badAnswer(instance, problem, cause);
  }
}

export function validateChoices(instance: Instance, body: unknown, onePart: boolean): void {
  const { choices } = (body ?? {}) as { choices?: unknown };
  if (!Array.isArray(choices) || choices.length === 0)
    throw badAnswer(instance, "answered 200 without choices");
  if (!choices.every(isObject))
    throw badAnswer(instance, "answered 200 with a choice that is not an object");
  if (onePart && choices.length > 1)
    throw badAnswer(
      instance,
      `answered 200 with ${choices.length} choices where one was requested`,
    );
  const [first] = choices as readonly Fields[];
  if (onePart && (first?.index ?? 0) !== 0)
    throw badAnswer(instance, "answered 200 with a choice with another index than 0");
}

export type PrefillOutcome = PrefilledKv | PrefillWithoutKv | PrefillError;

/** P computed the prompt, and D can get its KV. */
export interface PrefilledKv {
  readonly kind: "kv";
  readonly status: 200;
  readonly instance: Instance;
  /** JSON text of the parameters that locate the KV. */
  readonly kvTransferParams: string;
  readonly fields: Fields;
  /** On the proxy's clock. The blocks' lease began before. */
  readonly atMs: number;
}

/** P computed the prompt but keeps no KV for D. */
export interface PrefillWithoutKv {
  readonly kind: "no-kv";
  readonly status: 200;
  readonly instance: Instance;
}

/** P's error, which the client gets. */
export interface PrefillError {
  readonly kind: "error";
  readonly status: number;
  readonly instance: Instance;
  readonly answer: LegAnswer;
}

/** @throws `KV_PROXY_UPSTREAM_FAILED` for an answer that no D could use. */
export function readPrefillAnswer(
  visit: Visit,
  answer: UpstreamAnswer,
  body: Buffer,
  atMs: number,
): PrefillOutcome {
  const { instance } = visit;
  const { status } = answer;
  requireReadable(instance, answer);
  requireStatus(instance, status);
  if (status !== 200)
    return { kind: "error", status, instance, answer: wholeAnswer(visit, answer, body) };
  const text = body.toString("utf8");
  const fields = parsedAnswer(instance, body);
  if (!isObject(fields)) throw badAnswer(instance, "answered 200 with JSON that is not an object");
  const { kv_transfer_params: params } = fields;
  // With any value but `true`, D would silently compute the prompt itself.
  const hasKv = isObject(params) && params.do_remote_prefill === true;
  const kvTransferParams = hasKv ? rawMember(text, "kv_transfer_params") : undefined;
  if (kvTransferParams === undefined) return { kind: "no-kv", status, instance };
  const problem = checkRemotePrefillParams(params as Fields);
  if (problem !== undefined)
    throw badAnswer(
      instance,
      `answered kv_transfer_params that no decode worker could use: ${problem.message}`,
    );
  return { kind: "kv", status, instance, kvTransferParams, fields, atMs };
}

/** Longer answers leave in pieces, so that a slow reader is told from one that does not read. */
const PIECE_BYTES = 256 * 1024;
/** Node writes shorter strings together with the headers, without a copy. */
const SINGLE_WRITE_BYTES = 8 * 1024;

/**
 * Resolves when the client has read everything. After `stallMs` without a read the deadline aborts,
 * and the promise rejects with its reason.
 */
export function drained(
  response: ServerResponse,
  deadline: Deadline,
  stallMs: number,
): Promise<void> {
  deadline.startPhase("waiting for the client to read its answer", stallMs);
  return new Promise((resolve, reject) => {
    const onDrain = () => {
      deadline.endPhase();
      stopListening();
      resolve();
    };
    response.once("drain", onDrain);
    const stopListening = deadline.onAbort(() => {
      response.off("drain", onDrain);
      reject(deadline.reason);
    });
  });
}

type PassingFilter = Pick<AnswerFilter, "push" | "end" | "leftOut" | "problem" | "failed">;

const NOTHING = Buffer.alloc(0);
const RAW: PassingFilter = {
  push: asBuffer,
  end: async () => NOTHING,
  leftOut: [],
  problem: undefined,
  failed: false,
};

/**
 * Writes an answer no faster than the client reads, and ends the visit. Without `filter` the bytes
 * stay unchanged. Returns a failure that the instance reported in its stream, which the client has
 * received.
 * @throws `KV_PROXY_UPSTREAM_FAILED`, the deadline's reason.
 */
export async function streamResponse(
  client: AnswerTarget,
  given: LegAnswer,
  { timeouts, exposeInstances }: ProxySettings,
  filter: PassingFilter = RAW,
): Promise<KvError | undefined> {
  const { deadline } = client;
  const answer = exposeInstances ? given : hideAddresses(given);
  const { visit, status } = answer;
  const { instance } = visit;
  try {
    await passOn(client, answer, timeouts.stallMs, filter);
    const reported = filter.failed
      ? badAnswer(instance, "reported a failure in the middle of its stream")
      : undefined;
    if (reported !== undefined) visit.failed(reported);
    // Earlier tries decided who is to blame.
    else if (status >= 500 || faultOfStatus(status) === "refused") visit.abandoned();
    else visit.succeeded();
    return reported;
  } catch (thrown) {
    answer.discard();
    const error = KvError.from(
      deadline.reasonOr(thrown),
      "KV_INTERNAL",
      "the answer could not be passed on",
    );
    if (deadline.aborted) visit.abandoned();
    else visit.failed(error);
    throw error;
  }
}

/**
 * Removes instance addresses from server failures. A client's error may repeat its own URL, so it
 * stays unchanged.
 */
function hideAddresses(answer: LegAnswer): LegAnswer {
  if (answer.status < 500 || answer.rest !== undefined) return answer;
  const given = answer.held.toString();
  const held = withoutAddresses(given);
  if (held === given) return answer;
  return { ...answer, headers: changedBodyHeaders(answer.headers), held: Buffer.from(held) };
}

async function passOn(
  client: AnswerTarget,
  answer: LegAnswer,
  stallMs: number,
  filter: PassingFilter,
): Promise<void> {
  const { response, deadline, requestId, record } = client;
  const { rest, visit, status, held } = answer;
  const headers = answerHeaders(answer.headers, requestId);
  record.status = status;
  record.answerLengthBytes = 0;
  const write = async (bytes: Buffer) => {
    record.answerLengthBytes = (record.answerLengthBytes ?? 0) + bytes.length;
    if (bytes.length > 0 && !response.write(bytes)) await drained(response, deadline, stallMs);
  };
  const requireNoProblem = () => {
    const { instance } = visit;
    if (filter.problem !== undefined) throw badAnswer(instance, filter.problem);
  };

  let passing = await filter.push(held);
  if (filter.leftOut.length > 0) headers[LEFT_OUT_HEADER] = filter.leftOut.join(", ");
  if (rest === undefined) {
    const last = await filter.end();
    // Nothing has left yet, so an error status is still possible.
    requireNoProblem();
    if (last.length > 0) passing = Buffer.concat([passing, last]);
    headers["content-length"] = passing.length;
    response.writeHead(status, headers);
    while (passing.length > PIECE_BYTES) {
      await write(passing.subarray(0, PIECE_BYTES));
      passing = passing.subarray(PIECE_BYTES);
    }
    record.answerLengthBytes += passing.length;
    // Latin-1 maps each byte to one character.
    if (passing.length <= SINGLE_WRITE_BYTES) response.end(passing.toString("latin1"), "latin1");
    else response.end(passing);
    return;
  }
  // The instance's length counts neither hidden members nor a final error event.
  if (filter !== RAW) delete headers["content-length"];
  response.writeHead(status, headers);
  client.eventStreamStarted = answer.eventStream;
  await write(passing);
  requireNoProblem();
  const chunks = new ChunkWriter(response);
  try {
    for (;;) {
      if (response.writableNeedDrain) await drained(response, deadline, stallMs);
      const chunk = await readChunk(answer, deadline, stallMs);
      const passed = chunk === undefined ? filter.end() : filter.push(chunk);
      const bytes = passed instanceof Promise ? await passed : passed;
      record.answerLengthBytes += bytes.length;
      chunks.write(bytes);
      requireNoProblem();
      if (chunk === undefined) break;
    }
  } finally {
    chunks.flush();
  }
  response.end();
}

/** Writes that wait for the end of this turn of the event loop. */
const waiting: ChunkWriter[] = [];

/**
 * Writes small chunks at the end of a turn of the event loop. Many streams get a token in one turn,
 * and a client that reads several of them wakes once for all.
 */
class ChunkWriter {
  #held: Buffer | undefined;

  constructor(private readonly response: ServerResponse) {}

  write(bytes: Buffer): void {
    this.flush();
    if (bytes.length === 0) return;
    if (bytes.length > SINGLE_WRITE_BYTES) {
      this.response.write(bytes);
      return;
    }
    this.#held = bytes;
    if (waiting.push(this) === 1)
      setImmediate(() => {
        for (const writer of waiting.splice(0)) writer.flush();
      });
  }

  flush(): void {
    const { response } = this;
    const bytes = this.#held;
    this.#held = undefined;
    if (bytes === undefined || response.destroyed) return;
    const { chunkedEncoding } = response;
    const text = bytes.toString("latin1");
    // Node would write the frame of a chunk as three pieces.
    response.chunkedEncoding = false;
    const framed = chunkedEncoding ? `${bytes.length.toString(16)}\r\n${text}\r\n` : text;
    response.write(framed, "latin1");
    response.chunkedEncoding = chunkedEncoding;
  }
}

/**
 * P's cached tokens: from the KV parameters, where D reads them in pull, else from P's usage.
 * Undefined where P does not say.
 */
export function cachedTokensOf(prefillAnswer: Fields): number | undefined {
  const { kv_transfer_params: params, usage } = prefillAnswer;
  if (isObject(params) && typeof params.remote_prefill_cached_tokens === "number")
    return params.remote_prefill_cached_tokens;
  const details = isObject(usage) ? usage.prompt_tokens_details : undefined;
  return isObject(details) && typeof details.cached_tokens === "number"
    ? details.cached_tokens
    : undefined;
}
