import type { Clock } from "@kv/interface";
import { type AttemptOptions, onSomeInstance } from "./attempts.js";
import { badAnswer } from "./bad-answer.js";
import { hold } from "./bounded-body.js";
import type { Exchange } from "./exchange.js";
import { legHeaders } from "./headers.js";
import type { Visit } from "./instances.js";
import { rawMember } from "./json-members.js";
import { prefillBody } from "./leg-bodies.js";
import type { ProxyLimits, ProxyTimeouts } from "./options.js";
import type { Upstream, UpstreamAnswer } from "./upstream.js";

export type PrefillOutcome =
  /** The prompt is computed; JSON text of the parameters under which a decode worker finds its KV. */
  | { readonly kind: "kv"; readonly kvTransferParams: string }
  /** The prompt is computed, and its KV is nowhere to be had. */
  | { readonly kind: "no-kv"; readonly instance: string }
  /** The worker refused or failed, in its own words. */
  | { readonly kind: "error"; readonly answer: UpstreamAnswer; readonly body: Buffer };

export interface PrefillLegOptions extends AttemptOptions {
  readonly upstream: Upstream;
  readonly clock: Clock;
  readonly limits: ProxyLimits;
  readonly timeouts: ProxyTimeouts;
}

export function runPrefillLeg(options: PrefillLegOptions, exchange: Exchange): Promise<PrefillOutcome> {
  const { upstream, clock, limits, timeouts } = options;
  const { request, requestId, deadline, trail } = exchange;
  const body = prefillBody(request);
  const headers = legHeaders(exchange.headers, requestId);

  async function leg(visit: Visit): Promise<PrefillOutcome> {
    const { url } = visit.instance;
    const startedAtMs = clock.now();
    trail.prefill = url;
    const answer = await upstream.send({
      role: "prefill",
      url,
      method: "POST",
      path: request.endpoint,
      headers,
      body,
      signal: deadline.signal,
    });
    const held = await hold(answer.body, limits.prefillAnswerLengthBytes);
    if (!held.complete) {
      answer.discard();
      throw badAnswer("prefill", url, `answered with more than ${limits.prefillAnswerLengthBytes} bytes`);
    }
    trail.prefillMs = clock.now() - startedAtMs;
    const outcome = readAnswer(url, answer, held.bytes);
    if (outcome.kind === "error" && answer.status >= 500) {
      visit.failed(badAnswer("prefill", url, `answered with status ${answer.status}`));
    } else visit.succeeded();
    return outcome;
  }

  deadline.enter("the prefill leg", timeouts.prefillMs);
  return onSomeInstance(options, exchange, leg).finally(deadline.pause);
}

function readAnswer(url: string, answer: UpstreamAnswer, body: Buffer): PrefillOutcome {
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
  return raw === undefined ? { kind: "no-kv", instance: url } : { kind: "kv", kvTransferParams: raw };
}
