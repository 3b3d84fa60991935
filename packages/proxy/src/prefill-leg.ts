import { onSomeInstance } from "./attempts.js";
import { badAnswer, badStatus, isServerFailure } from "./bad-answer.js";
import { heldAlready, hold } from "./bounded-body.js";
import { whyEnded } from "./deadline.js";
import { legHeaders } from "./headers.js";
import type { Visit } from "./instance.js";
import { rawMember } from "./json-members.js";
import { whyUnusable } from "./kv-params.js";
import { prefillBody } from "./leg-bodies.js";
import type { LegOrderOptions, Part } from "./leg-order.js";
import { failureStage, type UpstreamAnswer } from "./upstream.js";

export type PrefillOutcome =
  /** The prompt is computed; JSON text of the parameters under which a decode worker finds its KV. */
  | {
      readonly kind: "kv";
      readonly kvTransferParams: string;
      readonly answer: Readonly<Record<string, unknown>>;
      /** When the answer was there: the lease began before. */
      readonly atMs: number;
    }
  /** The prompt is computed, and its KV is nowhere to be had. */
  | { readonly kind: "no-kv"; readonly instance: string }
  /** The worker refused or failed, in its own words. */
  | { readonly kind: "error"; readonly answer: UpstreamAnswer; readonly body: Buffer };

/** Sends the prompt to a prefill instance. Errors: `KV_PROXY_UPSTREAM_FAILED`, `KV_PROXY_NO_INSTANCE`, the deadline's reason. */
export async function runPrefillLeg(
  options: LegOrderOptions,
  part: Part,
  body = prefillBody(part.request, options.askForKv),
): Promise<PrefillOutcome> {
  const { ambient, prefillers: pool, retry, upstream, limits, timeouts, tracing } = options;
  const { clock, log } = ambient;
  const { request, requestId, deadline, trail } = part;
  let refusal: PrefillOutcome | undefined;

  async function leg(visit: Visit): Promise<PrefillOutcome> {
    const { url } = visit.instance;
    const startedAtMs = clock.now();
    trail.prefill = url;
    trail.prefillStartedAtMs = startedAtMs;
    const span = tracing.leg("kv_proxy.prefill", part.headers, {
      "kv.request_id": requestId,
      "server.address": url,
    });
    try {
      const answer = await upstream.send({
        role: "prefill",
        url,
        method: "POST",
        path: request.endpoint,
        headers: legHeaders(part.headers, requestId, visit.instance, span.headers),
        body,
        ending: deadline,
      });
      const limitBytes = limits.prefillAnswerLengthBytes;
      const held = heldAlready(answer.body, limitBytes) ?? (await hold(answer.body, limitBytes));
      if (!held.complete) {
        answer.discard();
        throw badAnswer("prefill", url, `answered with more than ${limitBytes} bytes`);
      }
      trail.prefillMs = clock.now() - startedAtMs;
      const outcome = readAnswer(url, answer, held.bytes, clock.now());
      if (outcome.kind === "error" && isServerFailure(answer.status)) {
        refusal = outcome;
        throw badStatus("prefill", url, answer.status);
      }
      visit.succeeded();
      part.onPrefilled?.(visit.instance);
      if (outcome.kind === "kv") options.onKv?.(visit.instance, outcome.kvTransferParams);
      span.set({ "http.response.status_code": answer.status });
      span.end();
      return outcome;
    } catch (error) {
      span.end(whyEnded(deadline, error));
      throw error;
    }
  }

  deadline.enter("the prefill leg", timeouts.prefillMs);
  try {
    return await onSomeInstance({ pool, retry, log }, part, leg, part.avoidPrefill);
  } catch (error) {
    // No other instance did better: its own words are the answer.
    if (refusal !== undefined && failureStage(error) === "status") return refusal;
    throw error;
  } finally {
    deadline.pause();
  }
}

function readAnswer(url: string, answer: UpstreamAnswer, body: Buffer, atMs: number): PrefillOutcome {
  if (answer.status >= 400) return { kind: "error", answer, body };
  if (answer.status !== 200)
    throw badAnswer("prefill", url, `answered with status ${answer.status}, which the proxy does not follow`);
  const text = body.toString("utf8");
  let fields: unknown;
  try {
    fields = JSON.parse(text);
  } catch (cause) {
    throw badAnswer(
      "prefill",
      url,
      `answered 200 with a body that is not JSON (${body.length} bytes)`,
      cause,
    );
  }
  if (typeof fields !== "object" || fields === null || Array.isArray(fields)) {
    throw badAnswer("prefill", url, "answered 200 with JSON that is not an object");
  }
  const { kv_transfer_params: params } = fields as { kv_transfer_params?: unknown };
  // With anything but `true` a decode worker would compute the prompt itself and say nothing.
  const usable =
    typeof params === "object" &&
    params !== null &&
    "do_remote_prefill" in params &&
    params.do_remote_prefill === true;
  const raw = usable ? rawMember(text, "kv_transfer_params") : undefined;
  if (raw === undefined) return { kind: "no-kv", instance: url };
  const why = whyUnusable(params as Readonly<Record<string, unknown>>);
  if (why !== undefined) {
    throw badAnswer("prefill", url, `answered kv_transfer_params that no decode worker could use: ${why}`);
  }
  return { kind: "kv", kvTransferParams: raw, answer: fields as Record<string, unknown>, atMs };
}
