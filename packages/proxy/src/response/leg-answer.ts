import type { ServerResponse } from "node:http";
import type { Instance, Role, Visit } from "@kv/fleet";
import {
  answerHeaders,
  changedBodyHeaders,
  type Deadline,
  type Endpoint,
  type GenerationRequest,
  LEFT_OUT_HEADER,
  type UpstreamAnswer,
} from "@kv/fleet/front-end";
import { isDone, rawMember } from "@kv/http";
import { KvError } from "@kv/interface";
import { checkRemotePrefillParams } from "@kv/protocol";
import type { RequestRecord } from "../telemetry/request-record.js";
import { badAnswer, isBadAnswer } from "../upstream/upstream-errors.js";
import { AnswerFilter, type AnswerTraits } from "./answer-filter.js";
import { FirstEvent, isObject, streamedError } from "./stream-rules.js";

type Fields = Readonly<Record<string, unknown>>;

/**
 * An instance's answer, checked as far as its first bytes allow. Nothing of it has left for the
 * client.
 */
export interface LegAnswer extends AnswerTraits {
  /** Whoever passes the answer on ends the visit. */
  readonly visit: Visit;
  readonly headers: UpstreamAnswer["headers"];
  readonly held: Buffer;
  /** The body after `held`; undefined when `held` is all of it. */
  readonly rest: AsyncIterator<Uint8Array, undefined> | undefined;
  /**
   * The prefill worker's answer, where its log probabilities of the prompt belong into this one.
   */
  readonly promptAnswer?: Fields | undefined;
  /** Closes the connection, unless the body has ended. */
  discard(): void;
}

export interface AnswerTarget {
  readonly requestId: string;
  readonly request: GenerationRequest;
  readonly deadline: Deadline;
  readonly record: RequestRecord;
  readonly response: ServerResponse;
  /** The head of an event stream has left: a failure is now reported as an event. */
  eventStreamStarted: boolean;
}

/**
 * Reads of a stream as much as tells whether its first event is an error, of another answer at most
 * `limitBytes`, and checks it: status 200 promises an answer, so an empty one, or one without
 * choices, is a failure. A stream whose first event is an error becomes an error answer.
 * @throws That of the body, `KV_PROXY_UPSTREAM_FAILED`.
 */
export async function readLegAnswer(
  { endpoint, fields }: GenerationRequest,
  visit: Visit,
  answer: UpstreamAnswer,
  { onePart, kvFromPrefill }: Pick<AnswerTraits, "onePart" | "kvFromPrefill">,
  limitBytes: number,
): Promise<LegAnswer> {
  const { status, headers, body, discard } = answer;
  const { role, url } = visit.instance;
  const eventStream = isEventStream(answer);

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
    return {
      visit,
      status: error.status,
      headers: { ...changedBodyHeaders(headers), "content-type": "application/json" },
      eventStream: false,
      onePart,
      kvFromPrefill,
      held: Buffer.from(error.body),
      rest: undefined,
      discard,
    };
  }

  if (status !== 200 && status < 400) throw badAnswer(role, url, `answered with status ${status}`);
  if (status === 200) {
    const [got, asked] = eventStream ? ["an", "none"] : ["no", "one"];
    if (eventStream !== (fields.stream === true))
      throw badAnswer(
        role,
        url,
        `answered 200 with ${got} event stream, where ${asked} was requested`,
      );
    if (bytes.length === 0) throw badAnswer(role, url, "answered 200 with an empty body");
    if (first !== undefined && isDone(first))
      throw badAnswer(role, url, "answered 200 with a stream without choices");
    if (!eventStream && complete) validateAnswer(endpoint, role, url, bytes, onePart);
  }
  return {
    visit,
    status,
    headers,
    eventStream,
    onePart,
    kvFromPrefill,
    held: bytes,
    rest: complete ? undefined : body,
    discard,
  };
}

/**
 * @throws `KV_PROXY_UPSTREAM_FAILED` for a body that the proxy has to read and that has a coding,
 * although the leg accepts none.
 */
export function requireReadable(
  role: Role,
  url: string,
  { status, headers, discard }: UpstreamAnswer,
): void {
  const coding = String(headers["content-encoding"] ?? "");
  if (coding === "" || coding.toLowerCase() === "identity" || (status >= 400 && status < 500))
    return;
  discard();
  throw badAnswer(role, url, `answered in the content-encoding ${coding}, where none was accepted`);
}

export function isEventStream({ headers }: UpstreamAnswer): boolean {
  return /^text\/event-stream/i.test(String(headers["content-type"]));
}

/**
 * The next chunk of an answer; undefined at its end. The deadline aborts when none comes for
 * `stallMs`.
 * @throws The errors of the body.
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

export function endedVisit(instance: Instance): Visit {
  return { instance, succeeded() {}, abandoned() {}, failed() {} };
}

/**
 * Checks a complete unstreamed answer with status 200. `onePart`: the request had one prompt and
 * one copy, so the answer must have one choice. A response of the Responses API may have an empty
 * output, a message no content.
 * @throws `KV_PROXY_UPSTREAM_FAILED`.
 */
function validateAnswer(
  endpoint: Endpoint,
  role: Role,
  url: string,
  bytes: Buffer,
  onePart: boolean,
): void {
  let body: unknown;
  try {
    body = JSON.parse(bytes.toString("utf8"));
  } catch (cause) {
    throw badAnswer(
      role,
      url,
      `answered 200 with a body that is not JSON (${bytes.length} bytes)`,
      cause,
    );
  }
  const named =
    endpoint === "/v1/responses" ? "output" : endpoint === "/v1/messages" ? "content" : undefined;
  if (named === undefined) validateChoices(role, url, body, onePart);
  else if (!Array.isArray((body as Fields | null)?.[named]))
    throw badAnswer(role, url, `answered 200 without ${named}`);
}

export function validateChoices(role: Role, url: string, body: unknown, onePart: boolean): void {
  const { choices } = (body ?? {}) as { choices?: unknown };
  if (!Array.isArray(choices) || choices.length === 0)
    throw badAnswer(role, url, "answered 200 without choices");
  if (!choices.every(isObject))
    throw badAnswer(role, url, "answered 200 with a choice that is not an object");
  if (onePart && choices.length > 1)
    throw badAnswer(
      role,
      url,
      `answered 200 with ${choices.length} choices where one was requested`,
    );
  const [first] = choices as readonly Fields[];
  if (onePart && (first?.index ?? 0) !== 0)
    throw badAnswer(role, url, "answered 200 with a choice with another index than 0");
}

export type PrefillOutcome = PrefilledKv | PrefillWithoutKv | PrefillError;

/** The prompt is computed, and a decode worker can get its KV. */
export interface PrefilledKv {
  readonly kind: "kv";
  readonly instance: Instance;
  /** JSON text of the parameters by which a decode worker finds the KV. */
  readonly kvTransferParams: string;
  readonly fields: Fields;
  /** When the answer was there, on the proxy's clock. The lease of the blocks began before. */
  readonly atMs: number;
}

/** The prompt is computed, but the worker keeps no KV for a decode worker. */
export interface PrefillWithoutKv {
  readonly kind: "no-kv";
  readonly instance: Instance;
}

/** The worker answered with an error, which is for the client. */
export interface PrefillError {
  readonly kind: "error";
  readonly instance: Instance;
  readonly answer: LegAnswer;
}

/**
 * Reads a prefill worker's complete answer.
 * @throws `KV_PROXY_UPSTREAM_FAILED` for an answer that no decode worker could use.
 */
export function readPrefillAnswer(
  instance: Instance,
  answer: UpstreamAnswer,
  body: Buffer,
  atMs: number,
): PrefillOutcome {
  const { url } = instance;
  const { status, headers, discard } = answer;
  if (status >= 400) {
    const read = {
      visit: endedVisit(instance),
      status,
      headers,
      eventStream: false,
      onePart: true,
      kvFromPrefill: false,
      held: body,
      rest: undefined,
      discard,
    };
    return { kind: "error", instance, answer: read };
  }
  if (status !== 200)
    throw badAnswer(
      "prefill",
      url,
      `answered with status ${status}, which the proxy does not follow`,
    );
  const text = body.toString("utf8");
  const fields = parseObject(url, text, body.length);
  const { kv_transfer_params: params } = fields;
  // With any other value than `true`, a decode worker would compute the prompt itself without an
  // error.
  const hasKv = isObject(params) && params.do_remote_prefill === true;
  const kvTransferParams = hasKv ? rawMember(text, "kv_transfer_params") : undefined;
  if (kvTransferParams === undefined) return { kind: "no-kv", instance };
  const problem = checkRemotePrefillParams(params as Fields);
  if (problem !== undefined)
    throw badAnswer(
      "prefill",
      url,
      `answered kv_transfer_params that no decode worker could use: ${problem.message}`,
    );
  return { kind: "kv", instance, kvTransferParams, fields, atMs };
}

/**
 * A decode worker's answer, with the prefill worker's where the client is to get log probabilities
 * of the prompt.
 */
export function withPromptAnswer(
  answer: LegAnswer,
  { promptFields }: GenerationRequest,
  { fields }: PrefilledKv,
): LegAnswer {
  return promptFields === "none" || answer.status !== 200
    ? answer
    : { ...answer, promptAnswer: fields };
}

function parseObject(url: string, text: string, lengthBytes: number): Fields {
  let fields: unknown;
  try {
    fields = JSON.parse(text);
  } catch (cause) {
    const problem = `answered 200 with a body that is not JSON (${lengthBytes} bytes)`;
    throw badAnswer("prefill", url, problem, cause);
  }
  if (!isObject(fields))
    throw badAnswer("prefill", url, "answered 200 with JSON that is not an object");
  return fields;
}

/**
 * Longer answers leave in pieces of this length, so that a client that reads slowly is told from
 * one that does not read.
 */
const PIECE_BYTES = 256 * 1024;
/** Up to this length Node writes a string together with the headers, without a copy on the heap. */
const SINGLE_WRITE_BYTES = 8 * 1024;

/**
 * Resolves when the client has read what was written. The deadline aborts when it reads nothing for
 * `stallMs`; rejects with the reason.
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

/**
 * Writes one instance's answer to the client, no faster than the client reads, and ends the visit.
 * Returns the failure that the instance reported in its stream: the client has received it, and the
 * request counts as failed.
 * @throws `KV_PROXY_UPSTREAM_FAILED`, the deadline's reason.
 */
export async function streamResponse(
  client: AnswerTarget,
  answer: LegAnswer,
  stallMs: number,
): Promise<KvError | undefined> {
  const { response, deadline, requestId, record } = client;
  const { visit, rest, eventStream, held } = answer;
  const { role, url } = visit.instance;
  const filter = new AnswerFilter(client.request.endpoint, answer);
  let lengthBytes = 0;

  async function write(chunk: Uint8Array): Promise<void> {
    lengthBytes += chunk.byteLength;
    if (chunk.byteLength > 0 && !response.write(chunk)) await drained(response, deadline, stallMs);
  }
  function requireNoProblem(): void {
    if (filter.problem !== undefined) throw badAnswer(role, url, filter.problem);
  }
  async function end(bytes: Buffer): Promise<void> {
    let at = 0;
    for (; bytes.length - at > PIECE_BYTES; at += PIECE_BYTES) {
      if (!response.write(bytes.subarray(at, at + PIECE_BYTES)))
        await drained(response, deadline, stallMs);
    }
    response.end(bytes.subarray(at));
  }

  try {
    const headers = answerHeaders(answer.headers, requestId);
    record.status = answer.status;
    let passing = await filter.push(held);
    if (filter.leftOut.length > 0) headers[LEFT_OUT_HEADER] = filter.leftOut.join(", ");
    if (rest === undefined) {
      const last = await filter.end();
      if (last.length > 0) passing = Buffer.concat([passing, last]);
      // Nothing has left yet, so a problem can still be answered with an error status.
      requireNoProblem();
      lengthBytes = passing.length;
      headers["content-length"] = passing.length;
      response.writeHead(answer.status, headers);
      // Latin-1 maps each byte to one character.
      if (passing.length <= SINGLE_WRITE_BYTES) response.end(passing.toString("latin1"), "latin1");
      else await end(passing);
    } else {
      // A stream may end with an error event that the instance has not counted, and members are
      // hidden as they pass.
      delete headers["content-length"];
      response.writeHead(answer.status, headers);
      client.eventStreamStarted = eventStream;
      await write(passing);
      requireNoProblem();
      let chunk = await readChunk(answer, deadline, stallMs);
      while (chunk !== undefined) {
        await write(await filter.push(chunk));
        requireNoProblem();
        chunk = await readChunk(answer, deadline, stallMs);
      }
      await write(await filter.end());
      requireNoProblem();
      response.end();
    }
    const reported = filter.failed
      ? badAnswer(role, url, "reported a failure in the middle of its stream")
      : undefined;
    if (reported !== undefined) visit.failed(reported);
    else if (answer.status >= 500)
      visit.failed(badAnswer(role, url, `answered with status ${answer.status}`));
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
  } finally {
    record.answerLengthBytes = lengthBytes;
  }
}

/**
 * How many tokens of the prompt P had cached by its answer, from where D takes it in pull, or from
 * P's usage; undefined where P does not say so.
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

/** What a decode leg has shown of the KV that a prefill worker holds for it. */
export class KvUse {
  #state: "unseen" | "unsure" | "taken" = "unseen";

  /**
   * An instance may have the parameters. It frees the blocks itself when its connection ends: a
   * release could free them while it reads.
   */
  readonly sent = (): void => {
    this.#state = "taken";
  };

  /**
   * An instance has answered, and not with a generation. A status below 500 and 501 come from its
   * HTTP layer, or from a gateway before it.
   */
  refused(status: number): void {
    this.#state = (status !== 200 && status < 500) || status === 501 ? "unseen" : "unsure";
  }

  /**
   * The answer with this status could not be read. A 200 that breaks off, or is aborted, may be a
   * generation.
   */
  failed(status: number, error: unknown): void {
    if (status !== 200 || isBadAnswer(error)) this.refused(status);
  }

  /** Whether an instance has taken the KV, or frees the blocks itself. */
  get isTaken(): boolean {
    return this.#state === "taken";
  }

  /** Whether no engine has seen the parameters. */
  get isUnseen(): boolean {
    return this.#state === "unseen";
  }
}
