import { KvError } from "@kv/interface";
import { onSomeInstance } from "./attempts.js";
import { badAnswer, badStatus, isServerFailure } from "./bad-answer.js";
import { type HeldBody, heldAlready, hold } from "./bounded-body.js";
import { refuseNoAnswer } from "./choices.js";
import { whyEnded } from "./deadline.js";
import type { Endpoint } from "./endpoint.js";
import { beginIsKnown, beginsWithDone, firstEventError, isEventStream } from "./event-stream.js";
import { legHeaders } from "./headers.js";
import type { Visit } from "./instance.js";
import type { LegAnswer, LegOrderOptions, Part } from "./leg-order.js";
import type { RetryPolicy } from "./retry.js";
import { type LegSpan, NO_SPAN } from "./tracing.js";
import { failureStage, type Role, type UpstreamAnswer } from "./upstream.js";

export interface DecodeLegHints {
  /** Where the leg goes; a part that only concerns the prompt goes to a prefill instance whole. */
  readonly role?: Role;
  /** Until when the prefill worker surely holds the blocks that `body` names. Later nothing is sent: `KV_LEASE_EXPIRED`. */
  readonly leaseEndsAtMs?: number;
  /** Called when an instance may have the parameters. */
  readonly onSent?: () => void;
  /**
   * The request goes to one instance as it is: it may have several choices, and as no blocks are at stake a failure is tried on one
   * more instance.
   */
  readonly whole?: boolean;
}

/**
 * Sends `body` to a decode instance. The visit in the answer is the caller's to end. Errors: `KV_PROXY_UPSTREAM_FAILED`,
 * `KV_PROXY_NO_INSTANCE`, `KV_LEASE_EXPIRED`, the deadline's reason.
 */
export async function runDecodeLeg(
  options: LegOrderOptions,
  part: Part,
  body: string,
  hints: DecodeLegHints = {},
): Promise<LegAnswer> {
  const { role = "decode", leaseEndsAtMs = Number.POSITIVE_INFINITY, onSent, whole = false } = hints;
  const { ambient, prefillers, decoders, upstream, limits, timeouts, tracing } = options;
  const { clock, log } = ambient;
  const retry = whole ? onceMore(options.retry) : options.retry;
  const { request, requestId, deadline, trail } = part;
  const startedAtMs = clock.now();
  if (role === "decode") trail.decodeStartedAtMs = startedAtMs;
  else trail.prefillStartedAtMs = startedAtMs;
  let refusal: LegAnswer | undefined;

  async function leg(visit: Visit): Promise<LegAnswer> {
    if (clock.now() >= leaseEndsAtMs) throw leaseOver(requestId);
    const { url } = visit.instance;
    trail[role] = url;
    const span = tracing.leg(`kv_proxy.${role}`, part.headers, {
      "kv.request_id": requestId,
      "server.address": url,
    });
    try {
      const answer = await upstream.send({
        role,
        url,
        method: "POST",
        path: request.endpoint,
        headers: legHeaders(part.headers, requestId, visit.instance, span.headers),
        body,
        ending: deadline,
        onSent,
      });
      try {
        const eventStream = isEventStream(answer.headers["content-type"]);
        const limitBytes = limits.heldAnswerLengthBytes;
        const held =
          heldAlready(answer.body, limitBytes) ??
          (await hold(answer.body, limitBytes, eventStream ? beginIsKnown : undefined));
        const decoded = look(request.endpoint, endingSpan(visit, span), answer, held, eventStream, !whole);
        const firstByteMs = clock.now() - startedAtMs;
        if (role === "decode") trail.firstByteMs = firstByteMs;
        else trail.prefillMs = firstByteMs;
        span.set({ "http.response.status_code": answer.status, "kv.first_byte_ms": firstByteMs });
        if (!whole || !isServerFailure(decoded.status) || decoded.rest !== undefined) return decoded;
        refusal = { ...decoded, visit: overVisit(visit) };
        throw badStatus(role, url, decoded.status);
      } catch (error) {
        answer.discard();
        throw error;
      }
    } catch (error) {
      part.avoidDecode?.add(visit.instance);
      span.end(whyEnded(deadline, error));
      throw error;
    }
  }

  const pool = role === "decode" ? decoders : prefillers;
  deadline.enter(`the ${role} leg's first byte`, timeouts.firstByteMs);
  const avoid = role === "decode" ? part.avoidDecode : undefined;
  try {
    return await onSomeInstance({ pool, retry, log }, part, leg, avoid);
  } catch (error) {
    // No other instance did better: its own words are the answer.
    if (refusal !== undefined && failureStage(error) === "status") return refusal;
    throw error;
  } finally {
    deadline.pause();
  }
}

/** One that ended when the instance failed. */
function overVisit({ instance }: Visit): Visit {
  return { instance, succeeded() {}, abandoned() {}, failed() {} };
}

/** Where there are no blocks, any failure may be tried again as a part may begin again. */
function onceMore(retry: RetryPolicy): RetryPolicy {
  return { ...retry, again: (failed) => retry.again(failed) || retry.afresh(failed) };
}

/** The span ends with the visit, that is with the last byte. */
function endingSpan(visit: Visit, span: LegSpan): Visit {
  if (span === NO_SPAN) return visit;
  return {
    instance: visit.instance,
    succeeded() {
      visit.succeeded();
      span.end();
    },
    abandoned() {
      visit.abandoned();
      span.end();
    },
    failed(error) {
      visit.failed(error);
      span.end(error);
    },
  };
}

function leaseOver(requestId: string): KvError {
  return new KvError(
    "KV_LEASE_EXPIRED",
    `no decode instance took request ${requestId} while its blocks were surely leased`,
    { hint: "raise kv_lease_duration on the prefill side, and timeouts.leaseMs here with it" },
  );
}

function look(
  endpoint: Endpoint,
  visit: Visit,
  answer: UpstreamAnswer,
  { bytes, complete }: HeldBody,
  eventStream: boolean,
  part: boolean,
): LegAnswer {
  const { status, headers, discard } = answer;
  const { role, url } = visit.instance;
  const error = eventStream && status === 200 ? firstEventError(bytes) : undefined;
  if (error !== undefined) {
    discard();
    const held = Buffer.from(error.body);
    const own = { ...headers, "content-type": "application/json", "content-length": String(held.length) };
    return { visit, status: error.status, headers: own, eventStream: false, held, rest: undefined, discard };
  }
  if (status === 200 && eventStream) refuseEmptyStream(role, url, bytes);
  else if (status === 200 && complete) refuseNoAnswer(endpoint, role, url, parsed(role, url, bytes), part);
  else if (status !== 200 && status < 400) throw badAnswer(role, url, `answered with status ${status}`);
  const rest = complete ? undefined : answer.body;
  return { visit, status, headers, eventStream, held: bytes, rest, discard };
}

/** Status 200 promises an answer: an empty one, or one without choices, is a failure that nobody told. */
function refuseEmptyStream(role: Role, url: string, begin: Buffer): void {
  if (begin.length === 0) throw badAnswer(role, url, "answered 200 with an empty body");
  if (beginsWithDone(begin)) throw badAnswer(role, url, "answered 200 with a stream without choices");
}

function parsed(role: Role, url: string, bytes: Buffer): unknown {
  if (bytes.length === 0) throw badAnswer(role, url, "answered 200 with an empty body");
  try {
    return JSON.parse(bytes.toString("utf8"));
  } catch (cause) {
    throw badAnswer(role, url, `answered 200 with a body that is not JSON (${bytes.length} bytes)`, cause);
  }
}
