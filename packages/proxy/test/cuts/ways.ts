import type { Endpoint } from "@kv/fleet/front-end";
import type { ProxyOptions } from "../../src/index.js";

type Fields = Readonly<Record<string, unknown>>;

/** A way of a request through a router, to the prefill and the decode instance at these URLs. */
export interface Way {
  readonly name: string;
  readonly options: (p: string, d: string) => ProxyOptions;
  /** Whether the request names the prefill instance in a header. */
  readonly named?: boolean | undefined;
  /** Members of each body. */
  readonly body?: Fields | undefined;
  /** Default: true. */
  readonly streams?: boolean | undefined;
  /** Default: all. */
  readonly endpoints?: readonly Endpoint[] | undefined;
}

const sidecar = (p: string, d: string): ProxyOptions => ({
  decoders: [d],
  sidecar: { allow: [new URL(p).host] },
});
const push = (p: string, d: string, pushLegs?: "prefill-first"): ProxyOptions => ({
  mode: "push",
  ...(pushLegs === undefined ? {} : { pushLegs }),
  prefillers: [{ url: p, kv: { engineId: "e" } }],
  decoders: [d],
});

/** The ways of kv-proxy and of its sidecar. */
export const WAYS: readonly Way[] = [
  { name: "pull", options: (p, d) => ({ prefillers: [p], decoders: [d] }) },
  { name: "push at once", options: (p, d) => push(p, d) },
  { name: "push in turn", options: (p, d) => push(p, d, "prefill-first") },
  {
    name: "decode alone, as prefill does not pay",
    options: (p, d) => ({ prefillers: [p], decoders: [d], disaggregateAbove: 1_000_000 }),
  },
  {
    name: "decode alone, as the request cannot be split",
    options: (p, d) => ({
      prefillers: [p],
      decoders: [d],
      policy: { unsplittable: "decode-computes" },
    }),
    body: { use_beam_search: true },
    streams: false,
    endpoints: ["/v1/completions", "/v1/chat/completions"],
  },
  {
    name: "prefill alone",
    options: (p, d) => ({ prefillers: [p], decoders: [d] }),
    body: { echo: true, max_tokens: 0 },
    endpoints: ["/v1/completions"],
  },
  { name: "sidecar with its header", options: sidecar, named: true },
  { name: "sidecar without its header", options: sidecar },
];

/** A request for generated text. */
export interface AskedBody {
  readonly endpoint: Endpoint;
  readonly body: Fields;
}

const messages = [{ role: "user", content: "é" }];
const BODIES: readonly AskedBody[] = [
  { endpoint: "/v1/completions", body: { prompt: "a" } },
  { endpoint: "/v1/completions", body: { prompt: "a", n: 3 } },
  { endpoint: "/v1/completions", body: { prompt: ["a", "b"] } },
  { endpoint: "/v1/completions", body: { prompt: ["a", "b"], n: 3 } },
  { endpoint: "/v1/chat/completions", body: { messages } },
  { endpoint: "/v1/chat/completions", body: { messages, n: 3 } },
  { endpoint: "/v1/responses", body: { input: "a" } },
  { endpoint: "/v1/messages", body: { messages, max_tokens: 9 } },
];
const STREAM = { stream: true, stream_options: { include_usage: true } };

/** The requests of a way, streamed and not. */
export function bodiesOf({ endpoints, streams = true, body: more }: Way): AskedBody[] {
  return BODIES.filter(({ endpoint }) => endpoints?.includes(endpoint) ?? true).flatMap(
    ({ endpoint, body }) =>
      [{}, ...(streams ? [STREAM] : [])].map((how) => ({
        endpoint,
        body: { ...body, ...how, ...more },
      })),
  );
}
