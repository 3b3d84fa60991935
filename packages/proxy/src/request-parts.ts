import { KvError } from "@kv/interface";
import { editMembers, rawMember } from "./json-members.js";
import type { GenerationRequest } from "./request-body.js";

/** A piece of a client's request with one prompt and one copy, and where its answer belongs. */
export interface RequestPart {
  readonly request: GenerationRequest;
  readonly prompt: number;
  readonly copy: number;
}

/**
 * Splits several prompts and several copies. A prefill worker answers with the parameters of one prompt only, and frees its blocks
 * when the first copy has read them (vLLM 0.33); so each gets legs of its own. Copies are seeded as vLLM seeds them: `seed + copy`.
 * Errors: `KV_REQUEST_INVALID` above `limit` parts, and for a seed of several copies that is not written as an integer.
 */
export function partsOf(request: GenerationRequest, limit: number): readonly RequestPart[] {
  const { fields } = request;
  const list = promptList(request);
  const copies = typeof fields.n === "number" ? fields.n : 1;
  const count = (list?.values.length ?? 1) * copies;
  if (count === 1 && list === undefined) return [{ request, prompt: 0, copy: 0 }];
  if (count > limit) {
    const message = `the body asks for ${count} answers (prompts times n), and the proxy takes ${limit} at most`;
    throw new KvError("KV_REQUEST_INVALID", message, {
      hint: "send fewer in one request, or raise limits.parts",
    });
  }
  const parts: RequestPart[] = [];
  for (let prompt = 0; prompt < (list?.values.length ?? 1); prompt += 1) {
    for (let copy = 0; copy < copies; copy += 1) {
      const change: Record<string, unknown> = {};
      if (list !== undefined) change[list.field] = list.values[prompt];
      if (copies > 1) change.n = 1;
      const part = changed(request, change);
      parts.push({ request: copy > 0 ? seeded(part, copy) : part, prompt, copy });
    }
  }
  return parts;
}

function changed(request: GenerationRequest, change: Readonly<Record<string, unknown>>): GenerationRequest {
  const set = Object.fromEntries(Object.entries(change).map(([key, value]) => [key, JSON.stringify(value)]));
  return {
    ...request,
    fields: { ...request.fields, ...change },
    text: editMembers(request.text, { set }),
  };
}

/**
 * As text, since a seed may be larger than a double holds. vLLM also takes 1.0 and "1" for an integer; left as they are, they would give
 * all copies one seed.
 */
function seeded(request: GenerationRequest, copy: number): GenerationRequest {
  const seed = rawMember(request.text, "seed");
  if (seed === undefined || seed === "null") return request;
  if (!/^-?[0-9]+$/.test(seed)) {
    throw new KvError("KV_REQUEST_INVALID", `seed is ${seed}; with n above 1 it must be a whole number`, {
      hint: "write it in digits, without quotes and fraction",
      details: { param: "seed" },
    });
  }
  return {
    ...request,
    text: editMembers(request.text, { set: { seed: String(BigInt(seed) + BigInt(copy)) } }),
  };
}

/** The field that holds more than one prompt; one prompt, a list of token ids included, stays as it is. */
function promptList({ endpoint, fields }: GenerationRequest) {
  if (endpoint !== "/v1/completions") return undefined;
  for (const field of ["prompt", "prompt_embeds"]) {
    const values: unknown = fields[field];
    if (Array.isArray(values) && values.length > 1 && typeof values[0] !== "number") return { field, values };
  }
  return undefined;
}
