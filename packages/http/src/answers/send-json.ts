import type { ServerResponse } from "node:http";

/** Answers with a value as JSON. */
export function sendJson(response: ServerResponse, status: number, value: object): void {
  send(response, status, "application/json", JSON.stringify(value));
}

/** Answers with a text of the given media type. */
export function send(
  response: ServerResponse,
  status: number,
  type: string,
  body: string | Uint8Array,
): void {
  response.writeHead(status, { "content-type": type, "content-length": Buffer.byteLength(body) });
  response.end(body);
}
