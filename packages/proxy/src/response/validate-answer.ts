import type { Role } from "@kv/fleet";
import type { Endpoint } from "../request/generation-request.js";
import { badAnswer } from "../upstream/upstream-errors.js";
import { beginsWithDone } from "./event-stream.js";

type Fields = Readonly<Record<string, unknown>>;

/**
 * Checks a complete unstreamed answer with status 200. `onePart`: the request had one prompt and one copy, so the answer must have one
 * choice. A response of the Responses API may have an empty output. Errors: `KV_PROXY_UPSTREAM_FAILED`.
 */
export function validateAnswer(
  endpoint: Endpoint,
  role: Role,
  url: string,
  bytes: Buffer,
  onePart: boolean,
): void {
  if (bytes.length === 0) throw badAnswer(role, url, "answered 200 with an empty body");
  let body: unknown;
  try {
    body = JSON.parse(bytes.toString("utf8"));
  } catch (cause) {
    throw badAnswer(role, url, `answered 200 with a body that is not JSON (${bytes.length} bytes)`, cause);
  }
  if (endpoint !== "/v1/responses") validateChoices(role, url, body, onePart);
  else if (!Array.isArray((body as Fields | null)?.output))
    throw badAnswer(role, url, "answered 200 without output");
}

/** Checks the first bytes of a stream with status 200. Errors: `KV_PROXY_UPSTREAM_FAILED`. */
export function validateStreamBegin(role: Role, url: string, begin: Buffer): void {
  if (begin.length === 0) throw badAnswer(role, url, "answered 200 with an empty body");
  if (beginsWithDone(begin)) throw badAnswer(role, url, "answered 200 with a stream without choices");
}

/** Checks the choices of a complete answer. Errors: `KV_PROXY_UPSTREAM_FAILED`. */
export function validateChoices(role: Role, url: string, body: unknown, onePart: boolean): void {
  const { choices } = (body ?? {}) as { choices?: unknown };
  if (!Array.isArray(choices) || choices.length === 0)
    throw badAnswer(role, url, "answered 200 without choices");
  if (!choices.every(isObject))
    throw badAnswer(role, url, "answered 200 with a choice that is not an object");
  if (onePart && choices.length > 1)
    throw badAnswer(role, url, `answered 200 with ${choices.length} choices where one was requested`);
}

/** Checks the choices of one event of a part's stream, which may have none. Errors: `KV_PROXY_UPSTREAM_FAILED`. */
export function validateStreamedChoices(url: string, choices: readonly unknown[]): void {
  const other = choices.find((choice) => !isObject(choice) || (choice.index ?? 0) !== 0);
  if (other !== undefined || choices.length > 1)
    throw badAnswer("decode", url, "streamed more than the one choice that was requested");
}

function isObject(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
