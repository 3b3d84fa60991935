import type { Endpoint } from "./generation-request.js";

/** Paths for generated text, which may take two legs. */
export const ENDPOINTS: readonly Endpoint[] = [
  "/v1/completions",
  "/v1/chat/completions",
  "/v1/responses",
  "/v1/messages",
];

/**
 * Routes of vLLM that any decode instance answers alone: tokenizer, chat template, pooling models.
 */
export const DECODE_ROUTES: readonly string[] = [
  ..."/tokenize /detokenize /v1/messages/count_tokens".split(" "),
  ...ENDPOINTS.map((endpoint) => `${endpoint}/render`),
  ..."/v1/completions/derender /v1/chat/completions/derender".split(" "),
  ..."/v1/embeddings /v2/embed /rerank /v1/rerank /v2/rerank /score /v1/score /pooling /classify".split(
    " ",
  ),
];

/** One server's own state. A sidecar passes them on. */
export const SIDECAR_ROUTES: readonly string[] = [
  "/metrics",
  "/version",
  "/load",
  "/kv_event_sources",
];

const ONE_SERVER = "it is the state of one server: ask that server";
const OPERATORS = "it changes or stops one server, and no client may: ask that server";

/** Refused routes of vLLM, by method and path, with the reason. */
export const REFUSED_ROUTES: ReadonlyMap<string, string> = new Map(
  (
    [
      [
        OPERATORS,
        "POST /abort_requests POST /collective_rpc POST /fault_tolerance/apply POST /finish_weight_update POST /init_weight_transfer_engine POST /pause " +
          "POST /release_kv_cache_memory POST /reset_encoder_cache POST /reset_mm_cache POST /reset_prefix_cache POST /resume POST /scale_elastic_ep " +
          "POST /shutdown_weight_transfer_engine POST /sleep POST /start_draft_weight_update POST /start_profile POST /start_weight_update POST /stop_profile " +
          "POST /update_weight_version POST /update_weights POST /v1/load_lora_adapter POST /v1/unload_lora_adapter POST /wake_up POST /weight_checker " +
          "POST /inference/v1/abort_requests",
      ],
      [
        ONE_SERVER,
        "GET /fault_tolerance/status GET /get_world_size GET /is_paused GET /is_sleeping GET /ping POST /ping GET /server_info GET /tokenizer_info GET /weight_info " +
          "POST /is_scaling_elastic_ep",
      ],
      [
        "it takes parameters of the engine's KV connector, which clients must not set: use /v1/completions with token ids",
        "POST /inference/v1/generate",
      ],
      ["it takes the body of any other route: use that route", "POST /invocations"],
      [
        "it runs several chats in one server, which share no KV with a prefill instance: send each to /v1/chat/completions",
        "POST /v1/chat/completions/batch",
      ],
      [
        "it generates text in a form that has no prefill leg: use /v1/chat/completions",
        "POST /cohere/v2/chat POST /cohere/v2/chat/render POST /v1/decisions POST /v1/systemone POST /generative_scoring",
      ],
      [
        "responses are kept by the server that has made them: use store false, and send the whole conversation",
        "GET /v1/responses/{response_id} POST /v1/responses/{response_id}/cancel",
      ],
      [
        "bodies are JSON here: send sound to a server of that model",
        "POST /v1/audio/transcriptions POST /v1/audio/translations WEBSOCKET /v1/realtime",
      ],
    ] as const
  ).flatMap(([why, routes]) =>
    Array.from(
      routes.matchAll(/([A-Z]+) (\S+)/g),
      ([, method, path]) => [`${method} ${path}`, why] as const,
    ),
  ),
);

/** Why a route of vLLM is refused; undefined for a route that vLLM lacks. */
export function whyRefused(method: string, path: string): string | undefined {
  if (SIDECAR_ROUTES.includes(path)) return ONE_SERVER;
  const known = path.replace(/^\/v1\/responses\/[^/]+/, "/v1/responses/{response_id}");
  const methods = method === "GET" || method === "HEAD" ? ["GET", "WEBSOCKET"] : [method];
  return methods.map((one) => REFUSED_ROUTES.get(`${one} ${known}`)).find(Boolean);
}
