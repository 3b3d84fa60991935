import { badAnswer } from "./bad-answer.js";
import type { Endpoint } from "./endpoint.js";
import type { Role } from "./upstream.js";

type Fields = Readonly<Record<string, unknown>>;

/**
 * The choices of a whole answer under status 200. A part has one prompt and one copy, so one choice; a request that went to an
 * instance as it is has one or more. Errors: `KV_PROXY_UPSTREAM_FAILED`.
 */
export function choicesOf(role: Role, url: string, body: unknown, part: boolean): readonly Fields[] {
  const { choices } = (body ?? {}) as { choices?: unknown };
  if (!Array.isArray(choices) || choices.length === 0)
    throw badAnswer(role, url, "answered 200 without choices");
  if (!choices.every(isObject))
    throw badAnswer(role, url, "answered 200 with a choice that is not an object");
  if (part && choices.length > 1)
    throw badAnswer(role, url, `answered 200 with ${choices.length} choices where one was asked for`);
  return choices;
}

/** The same for one event of a stream, which may hold none: usage, for one. */
export function refuseForeignChoices(url: string, choices: readonly unknown[]): void {
  const foreign = choices.find((choice) => !isObject(choice) || (choice.index ?? 0) !== 0);
  if (foreign !== undefined || choices.length > 1)
    throw badAnswer("decode", url, "streamed more than the one choice that was asked for");
}

/** That an answer of the endpoint under status 200 is one. A response may be empty of output, as one that thought until its limit. */
export function refuseNoAnswer(
  endpoint: Endpoint,
  role: Role,
  url: string,
  body: unknown,
  part: boolean,
): void {
  if (endpoint !== "/v1/responses") choicesOf(role, url, body, part);
  else if (!Array.isArray((body as Fields | null)?.output))
    throw badAnswer(role, url, "answered 200 without output");
}

function isObject(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
