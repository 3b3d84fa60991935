import type { Instance, Visit } from "@kv/fleet";
import { traceparentOf } from "@kv/fleet/front-end";
import type { KvError, Span, Tracer } from "@kv/interface";
import type { Disaggregation } from "../telemetry/request-record.js";
import type { Requester } from "./client-request.js";

export function startLegSpan(
  tracer: Tracer,
  { headers, requestId, record }: Requester,
  { role, url }: Instance,
): Span | undefined {
  const span = tracer.start(`kv_proxy.${role}`, {
    kind: "client",
    parent: traceparentOf(headers),
    attributes: { "kv.request_id": requestId, "server.address": url },
  });
  const { disaggregation, readback, readbackTokens } = record;
  if (readback !== undefined)
    span?.set({ "kv.readback": readback, "kv.readback_tokens": readbackTokens ?? 0 });
  if (disaggregation !== undefined) span?.set(disaggregationAttributes(disaggregation));
  return span;
}

function disaggregationAttributes({
  inputs,
  reason,
}: Disaggregation): Record<string, string | number> {
  const attributes: Record<string, string | number> = {
    "kv.disaggregation.reason": reason,
  };
  for (const [name, value] of Object.entries(inputs)) {
    const snake = name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
    if (value !== undefined) attributes[`kv.disaggregation.${snake}`] = value;
  }
  return attributes;
}

/** The visit's end, at the answer's last byte, also ends the span. */
export function withSpan(visit: Visit, span: Span): Visit {
  let isOpen = true;
  const end = (error?: KvError) => {
    if (isOpen) span.end(error);
    isOpen = false;
  };
  return {
    instance: visit.instance,
    succeeded() {
      visit.succeeded();
      end();
    },
    abandoned() {
      visit.abandoned();
      end();
    },
    failed(error) {
      visit.failed(error);
      end(error);
    },
  };
}
