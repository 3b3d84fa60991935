import type { Instance, Visit } from "@kv/fleet";
import { traceparentOf } from "@kv/fleet/front-end";
import type { Span, Tracer } from "@kv/interface";
import type { Disaggregation } from "../telemetry/request-record.js";
import type { Part } from "./client-request.js";

/** Starts the span of a leg, below the client's; undefined without a tracer. */
export function startLegSpan(
  tracer: Tracer | undefined,
  part: Part,
  { role, url }: Instance,
): Span | undefined {
  const span = tracer?.start(`kv_proxy.${role}`, {
    kind: "client",
    parent: traceparentOf(part.headers),
    attributes: { "kv.request_id": part.requestId, "server.address": url },
  });
  const { disaggregation } = part.record;
  const { readback, readbackTokens } = part.record;
  if (readback !== undefined)
    span?.set({ "kv.readback": readback, "kv.readback_tokens": readbackTokens ?? 0 });
  if (disaggregation !== undefined) span?.set(disaggregationAttributes(disaggregation));
  return span;
}

/** The inputs and the reason of the decision about one leg or two. */
function disaggregationAttributes(decision: Disaggregation): Record<string, string | number> {
  const attributes: Record<string, string | number> = {
    "kv.disaggregation.reason": decision.reason,
  };
  const { inputs } = decision;
  for (const [name, value] of [
    ["prompt_tokens", inputs.promptTokens],
    ["decode_cached_tokens", inputs.decodeCachedTokens],
    ["prefill_cached_tokens", inputs.prefillCachedTokens],
    ["readback_tokens", inputs.readbackTokens],
    ["prefill_compute_ms", inputs.prefillComputeMs],
    ["prefill_wait_ms", inputs.prefillWaitMs],
    ["decode_compute_ms", inputs.decodeComputeMs],
    ["decode_in_flight", inputs.decodeInFlight],
    ["decode_prompt_share", inputs.decodePromptShare],
  ] as const)
    if (value !== undefined) attributes[`kv.disaggregation.${name}`] = value;
  return attributes;
}

/** A visit that also ends the leg's span, with the last byte of the answer. */
export function withSpan(visit: Visit, span: Span | undefined): Visit {
  if (span === undefined) return visit;
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
