import type { IncomingMessage, ServerResponse } from "node:http";
import { refusedRequest, shortened } from "@kv/http";

/** Header names as a browser's preflight lists them. */
const HEADER_NAMES = /^[A-Za-z0-9-]{1,64}( *, *[A-Za-z0-9-]{1,64}){0,31}$/;

/**
 * Lets pages of these origins (`*`: all) read answers. Returns true for a preflight request, which
 * it answers.
 * @throws `KV_REQUEST_INVALID` (403) for a preflight of another origin.
 */
export function applyCors(
  origins: readonly string[],
  request: IncomingMessage,
  response: ServerResponse,
): boolean {
  const {
    origin,
    "access-control-request-method": wanted,
    "access-control-request-headers": names,
  } = request.headers;
  const all = origins.includes("*");
  if (!all) response.setHeader("vary", "origin");
  if (origin === undefined) return false;
  const isPreflight = request.method === "OPTIONS" && wanted !== undefined;
  if (!all && !origins.includes(origin)) {
    if (!isPreflight) return false;
    const message = `pages of ${shortened(origin)} may not use this server`;
    throw refusedRequest(403, message, "name the origin in cors.origins (--cors-origin)");
  }
  response.setHeader("access-control-allow-origin", all ? "*" : origin);
  response.setHeader("access-control-expose-headers", "x-request-id, retry-after");
  if (!isPreflight) return false;
  const headers: Record<string, string> = {
    "access-control-allow-methods": "GET, POST",
    "access-control-max-age": "600",
  };
  if (names !== undefined && HEADER_NAMES.test(names))
    headers["access-control-allow-headers"] = names;
  response.writeHead(204, headers).end();
  return true;
}
