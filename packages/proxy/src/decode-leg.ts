import type { Clock } from "@kv/interface";
import { type AttemptOptions, onSomeInstance } from "./attempts.js";
import { badAnswer } from "./bad-answer.js";
import { hold } from "./bounded-body.js";
import { beginIsKnown, firstEventError, isEventStream } from "./event-stream.js";
import type { Exchange } from "./exchange.js";
import { legHeaders } from "./headers.js";
import type { Visit } from "./instances.js";
import type { ProxyLimits, ProxyTimeouts } from "./options.js";
import type { Upstream, UpstreamAnswer } from "./upstream.js";

/** A decode worker's answer, looked at as far as is needed to know that it is one; nothing of it has left yet. */
export interface DecodeAnswer {
  readonly visit: Visit;
  readonly status: number;
  readonly headers: UpstreamAnswer["headers"];
  readonly eventStream: boolean;
  readonly held: Buffer;
  /** What comes after `held`; undefined when that was all. */
  readonly rest: UpstreamAnswer["body"] | undefined;
  discard(): void;
}

export interface DecodeLegOptions extends AttemptOptions {
  readonly upstream: Upstream;
  readonly clock: Clock;
  readonly limits: ProxyLimits;
  readonly timeouts: ProxyTimeouts;
}

/** Sends `body` to a decode instance. The visit in the answer is the caller's to end. */
export function runDecodeLeg(
  options: DecodeLegOptions,
  exchange: Exchange,
  body: string,
): Promise<DecodeAnswer> {
  const { upstream, clock, limits, timeouts } = options;
  const { request, requestId, deadline, trail } = exchange;
  const startedAtMs = clock.now();

  async function leg(visit: Visit): Promise<DecodeAnswer> {
    const { url } = visit.instance;
    trail.decode = url;
    const answer = await upstream.send({
      role: "decode",
      url,
      method: "POST",
      path: request.endpoint,
      headers: legHeaders(exchange.headers, requestId),
      body,
      signal: deadline.signal,
    });
    try {
      const decoded = await look(visit, answer, limits);
      trail.firstByteMs = clock.now() - startedAtMs;
      return decoded;
    } catch (error) {
      answer.discard();
      throw error;
    }
  }

  deadline.enter("the decode leg's first byte", timeouts.firstByteMs);
  return onSomeInstance(options, exchange, leg).finally(deadline.pause);
}

async function look(visit: Visit, answer: UpstreamAnswer, limits: ProxyLimits): Promise<DecodeAnswer> {
  const { status, headers } = answer;
  const eventStream = isEventStream(headers["content-type"]);
  const { bytes, complete } = await hold(
    answer.body,
    limits.heldAnswerLengthBytes,
    eventStream ? beginIsKnown : undefined,
  );
  const seen = { visit, discard: answer.discard };
  const error = eventStream && status === 200 ? firstEventError(bytes) : undefined;
  if (error !== undefined) {
    answer.discard();
    const held = Buffer.from(error.body);
    const own = { ...headers, "content-type": "application/json", "content-length": String(held.length) };
    return { ...seen, status: error.status, headers: own, eventStream: false, held, rest: undefined };
  }
  if (status === 200 && complete) refuseEmpty(visit.instance.url, bytes, eventStream);
  else if (status !== 200 && status < 400)
    throw badAnswer("decode", visit.instance.url, `answered with status ${status}`);
  return { ...seen, status, headers, eventStream, held: bytes, rest: complete ? undefined : answer.body };
}

/** Status 200 promises an answer: an empty one, or one without choices, is a failure that nobody told. */
function refuseEmpty(url: string, bytes: Buffer, eventStream: boolean): void {
  if (bytes.length === 0) throw badAnswer("decode", url, "answered 200 with an empty body");
  if (eventStream) return;
  let choices: unknown;
  try {
    ({ choices } = JSON.parse(bytes.toString("utf8")) as { choices?: unknown });
  } catch (cause) {
    throw badAnswer(
      "decode",
      url,
      `answered 200 with a body that is not JSON (${bytes.length} bytes)`,
      cause,
    );
  }
  if (!Array.isArray(choices) || choices.length === 0)
    throw badAnswer("decode", url, "answered 200 without choices");
}
