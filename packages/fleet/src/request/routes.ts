import TABLE from "./routes.json" with { type: "json" };

/** Paths for generated text, at the proxy and at instances, which may take two legs. */
export const ENDPOINTS = [
  "/v1/completions",
  "/v1/chat/completions",
  "/v1/responses",
  "/v1/messages",
] as const;
/** One of `ENDPOINTS`. */
export type Endpoint = (typeof ENDPOINTS)[number];

/**
 * Routes of vLLM that any decode instance answers alone: tokenizer, chat template, pooling models.
 */
export const DECODE_ROUTES: readonly string[] = TABLE.decode;

/** One server's own state. A sidecar passes them on. */
export const SIDECAR_ROUTES: readonly string[] = TABLE.sidecar.routes;

/** Refused routes of vLLM, by method and path, with the reason. */
export const REFUSED_ROUTES: ReadonlyMap<string, string> = new Map(
  TABLE.refused.flatMap(({ why, routes }) => routes.map((route) => [route, why] as const)),
);

/** Why a route of vLLM is refused; undefined for a route that vLLM lacks. */
export function whyRefused(method: string, path: string): string | undefined {
  if (SIDECAR_ROUTES.includes(path)) return TABLE.sidecar.why;
  const known = path.replace(/^\/v1\/responses\/[^/]+/, "/v1/responses/{response_id}");
  const methods = method === "GET" || method === "HEAD" ? ["GET", "WEBSOCKET"] : [method];
  return methods.map((one) => REFUSED_ROUTES.get(`${one} ${known}`)).find(Boolean);
}
