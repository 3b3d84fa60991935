import type { GenerationRequest } from "@kv/fleet/front-end";
import { shortened } from "@kv/http";
import { KvError } from "@kv/interface";
import { editMembers, rawMember } from "./json-members.js";

/** One prompt and one copy of a client's request, with its place in the merged answer. */
export interface RequestPart {
  readonly request: GenerationRequest;
  /** Index of the prompt. */
  readonly prompt: number;
  /** Index of the copy (`n`). */
  readonly copy: number;
}

/**
 * Splits a request into parts of one prompt and one copy each. A prefill worker answers with the KV parameters of one prompt only, and
 * frees its blocks when the first copy has read them (vLLM 0.33), so each part has legs of its own. Copies have the seeds that vLLM gives
 * them: `seed + copy`. The prompts of a long list are not copied, and the search for them yields after each piece. Errors:
 * `KV_REQUEST_INVALID` above `limit` parts, and for several copies with a seed that is not an integer.
 */
export function* splitRequest(
  request: GenerationRequest,
  limit: number,
  pieceBytes = 256 * 1024,
): Generator<undefined, readonly RequestPart[]> {
  const { fields } = request;
  const list = promptList(request);
  // The Messages API has no copies; vLLM ignores the member.
  const copies = typeof fields.n === "number" && request.endpoint !== "/v1/messages" ? fields.n : 1;
  const count = (list?.values.length ?? 1) * copies;
  if (count === 1 && list === undefined) return [{ request, prompt: 0, copy: 0 }];
  if (count > limit) {
    const message = `the body asks for ${count} answers (prompts times n); the limit is ${limit}`;
    throw new KvError("KV_REQUEST_INVALID", message, {
      hint: "send fewer in one request, or raise limits.parts",
    });
  }
  const seed = copies > 1 ? seedOf(request) : undefined;
  const replaced = [
    ...(list === undefined ? [] : [list.field]),
    ...(copies > 1 ? ["n"] : []),
    ...(seed === undefined ? [] : ["seed"]),
  ];
  // Edited once, and not for each part: the text may be long, and the parts many.
  const common = editMembers(request.text, { remove: replaced });
  const othersLong = request.long.filter(({ key }) => !replaced.includes(key));
  const longList = request.long.find(({ key }) => key === list?.field)?.value;
  const longPrompts = longList === undefined ? undefined : yield* listElements(longList, pieceBytes);
  const parts: RequestPart[] = [];
  for (let prompt = 0; prompt < (list?.values.length ?? 1); prompt += 1) {
    const changes: Record<string, unknown> = {};
    const members: string[] = [];
    if (list !== undefined) {
      changes[list.field] = list.values[prompt];
      if (longPrompts === undefined) members.push(`"${list.field}":${JSON.stringify(list.values[prompt])}`);
    }
    const value = longPrompts?.[prompt];
    const long =
      list === undefined || value === undefined ? othersLong : [...othersLong, { key: list.field, value }];
    if (copies > 1) {
      changes.n = 1;
      members.push('"n":1');
    }
    const fields = { ...request.fields, ...changes };
    for (let copy = 0; copy < copies; copy += 1) {
      const own = seed === undefined ? members : [...members, `"seed":${seed + BigInt(copy)}`];
      parts.push({ request: { ...request, fields, text: withMembers(common, own), long }, prompt, copy });
    }
  }
  return parts;
}

const QUOTE = 0x22;
const BACKSLASH = 0x5c;

/** The elements of a JSON list, as they are written. Yields after each piece. `list` must be valid. */
function* listElements(list: Uint8Array, pieceBytes: number): Generator<undefined, Uint8Array[]> {
  const elements: Uint8Array[] = [];
  let depth = 0;
  let isString = false;
  let start = 1;
  let pieceEnd = pieceBytes;
  for (let at = 0; at < list.length; at += 1) {
    if (at >= pieceEnd) {
      pieceEnd = at + pieceBytes;
      yield;
    }
    const byte = list[at];
    if (isString) {
      if (byte === BACKSLASH) at += 1;
      else if (byte === QUOTE) isString = false;
    } else if (byte === QUOTE) isString = true;
    else if (byte === 0x5b || byte === 0x7b) depth += 1;
    else if (byte === 0x2c || byte === 0x5d || byte === 0x7d) {
      if (depth === 1 && byte !== 0x7d) {
        elements.push(list.subarray(start, at));
        start = at + 1;
      }
      if (byte !== 0x2c) depth -= 1;
    }
  }
  return elements;
}

/** The text of an object with further members at its end. */
function withMembers(text: string, members: readonly string[]): string {
  const before = text.slice(0, -1);
  return `${before}${before === "{" ? "" : ","}${members.join(",")}}`;
}

/**
 * The seed of the first copy, from its text: it may be larger than 2^53. vLLM also accepts 1.0 and "1" as integers; unchanged, they would give all
 * copies the same seed.
 */
function seedOf(request: GenerationRequest): bigint | undefined {
  const isLong = request.long.some(({ key }) => key === "seed");
  const seed = isLong ? "too long" : rawMember(request.text, "seed");
  if (seed === undefined || seed === "null") return undefined;
  if (/^-?[0-9]{1,40}$/.test(seed)) return BigInt(seed);
  const message = `seed is ${shortened(seed)}; with n above 1 it must be an integer of at most 40 digits`;
  throw new KvError("KV_REQUEST_INVALID", message, {
    hint: "write it in digits, without quotes and without a fraction",
    details: { param: "seed" },
  });
}

/** The member that holds several prompts; undefined for one prompt, which may be a list of token ids. */
function promptList({ endpoint, fields }: GenerationRequest) {
  if (endpoint !== "/v1/completions") return undefined;
  for (const field of ["prompt", "prompt_embeds"]) {
    const values: unknown = fields[field];
    if (Array.isArray(values) && values.length > 1 && typeof values[0] !== "number") return { field, values };
  }
  return undefined;
}
