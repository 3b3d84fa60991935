import { type GenerationRequest, writtenIds } from "@kv/fleet/front-end";
import type { Part } from "../legs/client-request.js";

/**
 * Why a turn does not use the previous turn's KV, or its own KV is not kept. `api`: the Responses
 * and Messages APIs answer no token ids. `copies`: one of several prompts or copies. `images`: a
 * message holds more than text. `prompt`: not one text or list of ids, or the answer repeats some
 * of it. `no-ids`: its ids are unknown. `no-match`: no kept turn begins it. `no-prefill`: no P
 * fits. `engine`: D restarted, left, or shares its engine id. `failed`: P could not read it.
 * `short`: fewer tokens than P computes anyway. `ids`: D's answer lacks ids. `shape`: reading back
 * is not proven for such KV. `capacity`: the size of D's cache is unknown. `budget`: more than
 * turns may hold at D.
 */
export type Refusal =
  | (
      | "api"
      | "copies"
      | "images"
      | "prompt"
      | "no-ids"
      | "no-match"
      | "no-prefill"
      | "engine"
      | "failed"
    )
  | ("short" | "ids" | "shape" | "capacity" | "budget");

/** Returns undefined where the turn may use and keep KV. */
export function turnRefusal({ isSplit, request }: Part): Refusal | undefined {
  const { endpoint, fields } = request;
  if (endpoint !== "/v1/completions" && endpoint !== "/v1/chat/completions") return "api";
  if (isSplit === true || (fields.n != null && fields.n !== 1)) return "copies";
  if (fields.echo === true || fields.truncate_prompt_tokens != null) return "prompt";
  if (endpoint === "/v1/chat/completions")
    return hasOnlyText(fields.messages) ? undefined : "images";
  const isOne = typeof fields.prompt === "string" || writtenIds(request) !== undefined;
  return isOne && fields.prompt_embeds == null ? undefined : "prompt";
}

/** What besides ids must match for turns to share KV. LoRA adapters are named as models. */
export function scopeOf({ fields }: GenerationRequest): readonly unknown[] {
  return [fields.model ?? null, fields.cache_salt ?? null];
}

/** vLLM takes no ids for other messages, and their KV depends on more than ids. */
function hasOnlyText(messages: unknown): boolean {
  if (!Array.isArray(messages)) return false;
  return messages.every((message: { readonly content?: unknown } | null) => {
    const content = message?.content;
    if (content == null || typeof content === "string") return true;
    return (
      Array.isArray(content) &&
      content.every((part: { readonly type?: unknown } | null) => part?.type === "text")
    );
  });
}
