import type { IncomingMessage, ServerResponse } from "node:http";
import { KvError } from "@kv/interface";

/**
 * Refuses heads that Node's parser accepts, and that another server on the way may read differently: two `Host` headers, another major version of
 * HTTP, a transfer coding besides `chunked`, or any in HTTP/1.0. Errors: `KV_REQUEST_INVALID`; the answer closes the connection.
 */
export function checkRequestHead(request: IncomingMessage, response: ServerResponse): void {
  const error = refusalOf(request);
  if (error === undefined) return;
  // Another reading of this head would find another end of the request.
  response.setHeader("connection", "close");
  throw error;
}

function refusalOf(request: IncomingMessage): KvError | undefined {
  const { httpVersionMajor, httpVersionMinor, rawHeaders } = request;
  if (httpVersionMajor !== 1)
    return refused(505, `HTTP/${request.httpVersion} is not served here`, "send HTTP/1.1");
  let hosts = 0;
  for (let at = 0; at < rawHeaders.length; at += 2) {
    const name = rawHeaders[at];
    if (name?.length === 4 && name.toLowerCase() === "host") hosts += 1;
  }
  if (hosts > 1) return refused(400, `the request has ${hosts} Host headers`, "send one");
  const coding = request.headers["transfer-encoding"];
  if (coding === undefined) return undefined;
  if (httpVersionMinor === 0)
    return refused(400, "a request in HTTP/1.0 has a transfer coding", "send content-length");
  if (coding.trim().toLowerCase() !== "chunked")
    return refused(
      501,
      "the request has a transfer coding besides chunked",
      "send chunked, or content-length",
    );
  return undefined;
}

/** The path and the query of a request target in origin form or in absolute form (RFC 9112, 3.2). */
export function targetOf(url: string): { readonly path: string; readonly query: string } {
  const absolute = /^https?:\/\/[^/?#]*/i.exec(url)?.[0];
  const target = absolute === undefined ? url : url.slice(absolute.length);
  const at = target.indexOf("?");
  const path = at === -1 ? target : target.slice(0, at);
  return { path: path === "" ? "/" : path, query: at === -1 ? "" : target.slice(at) };
}

function refused(httpStatus: number, message: string, hint: string): KvError {
  return new KvError("KV_REQUEST_INVALID", message, { hint, details: { httpStatus } });
}
