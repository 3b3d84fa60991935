import { KvError } from "@kv/interface";
import { onSomeInstance } from "./attempts.js";
import { badAnswer } from "./bad-answer.js";
import { type HeldBody, heldAlready, hold } from "./bounded-body.js";
import { whyEnded } from "./deadline.js";
import type { Endpoint } from "./endpoint.js";
import { beginIsKnown, firstEventError, isEventStream } from "./event-stream.js";
import { legHeaders } from "./headers.js";
import type { Visit } from "./instance.js";
import type { LegAnswer, LegOrderOptions, Part } from "./leg-order.js";
import { type LegSpan, NO_SPAN } from "./tracing.js";
import type { Role, UpstreamAnswer } from "./upstream.js";

export interface DecodeLegHints {
  /** Where the leg goes; a part that only concerns the prompt goes to a prefill instance whole. */
  readonly role?: Role;
  /** Until when the prefill worker surely holds the blocks that `body` names. Later nothing is sent: `KV_LEASE_EXPIRED`. */
  readonly leaseEndsAtMs?: number;
  /** Called when an instance may have the parameters. */
  readonly onSent?: () => void;
}

/**
 * Sends `body` to a decode instance. The visit in the answer is the caller's to end. Errors: `KV_PROXY_UPSTREAM_FAILED`,
 * `KV_PROXY_NO_INSTANCE`, `KV_LEASE_EXPIRED`, the deadline's reason.
 */
export async function runDecodeLeg(
  options: LegOrderOptions,
  part: Part,
  body: string,
  { role = "decode", leaseEndsAtMs = Number.POSITIVE_INFINITY, onSent }: DecodeLegHints = {},
): Promise<LegAnswer> {
  const { ambient, prefillers, decoders, retry, upstream, limits, timeouts, tracing } = options;
  const { clock, log } = ambient;
  const { request, requestId, deadline, trail } = part;
  const startedAtMs = clock.now();
  if (role === "decode") trail.decodeStartedAtMs = startedAtMs;
  else trail.prefillStartedAtMs = startedAtMs;

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
        const decoded = look(request.endpoint, endingSpan(visit, span), answer, held, eventStream);
        const firstByteMs = clock.now() - startedAtMs;
        if (role === "decode") trail.firstByteMs = firstByteMs;
        else trail.prefillMs = firstByteMs;
        span.set({ "http.response.status_code": answer.status, "kv.first_byte_ms": firstByteMs });
        return decoded;
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
  } finally {
    deadline.pause();
  }
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
  if (status === 200 && complete) refuseEmpty(endpoint, role, url, bytes, eventStream);
  else if (status !== 200 && status < 400) throw badAnswer(role, url, `answered with status ${status}`);
  const rest = complete ? undefined : answer.body;
  return { visit, status, headers, eventStream, held: bytes, rest, discard };
}

/** Status 200 promises an answer: an empty one, or one without choices, is a failure that nobody told. */
function refuseEmpty(endpoint: Endpoint, role: Role, url: string, bytes: Buffer, eventStream: boolean): void {
  if (bytes.length === 0) throw badAnswer(role, url, "answered 200 with an empty body");
  if (eventStream) return;
  const field = endpoint === "/v1/responses" ? "output" : "choices";
  let fields: Record<string, unknown> | null;
  try {
    fields = JSON.parse(bytes.toString("utf8")) as Record<string, unknown> | null;
  } catch (cause) {
    throw badAnswer(role, url, `answered 200 with a body that is not JSON (${bytes.length} bytes)`, cause);
  }
  const list = fields?.[field];
  // A response may be empty of output, as one that thought until its limit; a completion has its choices.
  if (!Array.isArray(list) || (field === "choices" && list.length === 0))
    throw badAnswer(role, url, `answered 200 without ${field}`);
}
