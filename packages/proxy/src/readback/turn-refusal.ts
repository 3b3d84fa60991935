import { type GenerationRequest, writtenIds } from "@kv/fleet/front-end";
import type { Part } from "../legs/client-request.js";

/**
 * Why a turn does not use the KV of the turn before, or why its own KV is not kept for the next
 * one. `api`: the Responses and the Messages API answer no token ids. `copies`: it is one of
 * several prompts or copies. `images`: a message has parts other than text. `prompt`: its prompt
 * has another form than one text or one list of token ids, or the answer repeats some of it.
 * `no-ids`: the ids of its prompt are not known. `no-match`: no kept turn is a begin of it.
 * `no-prefill`: no P that fits is there. `engine`: D was restarted, or left, or its engine id is
 * another's too. `failed`: P could not read it. `short`: it has fewer tokens than P computes
 * anyway. `ids`: D's answer does not tell the ids of all tokens. `shape`: its KV is of a kind for
 * which reading back is not proven. `capacity`: the size of D's cache is not known. `budget`: it is
 * larger than what turns may hold at D.
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

/** Why neither the turn before nor this one is used; undefined where they may be. */
export function turnRefusal({ isSplit, request }: Part): Refusal | undefined {
  const { endpoint, fields, promptFields } = request;
  if (endpoint !== "/v1/completions" && endpoint !== "/v1/chat/completions") return "api";
  if (isSplit === true || (fields.n != null && fields.n !== 1)) return "copies";
  if (promptFields !== "none" || fields.echo === true || fields.truncate_prompt_tokens != null)
    return "prompt";
  if (endpoint === "/v1/chat/completions")
    return hasOnlyText(fields.messages) ? undefined : "images";
  const isOne = typeof fields.prompt === "string" || writtenIds(request) !== undefined;
  return isOne && fields.prompt_embeds == null ? undefined : "prompt";
}

/**
 * What must be equal, besides the ids, for two turns to share KV. A LoRA adapter is named as the
 * model.
 */
export function scopeOf({ fields }: GenerationRequest): readonly unknown[] {
  return [fields.model ?? null, fields.cache_salt ?? null];
}

/**
 * Whether all messages are text: vLLM takes no ids for others, and their KV depends on more than
 * ids.
 */
function hasOnlyText(messages: unknown): boolean {
  if (!Array.isArray(messages)) return false;
  return (messages as readonly ({ readonly content?: unknown } | null)[]).every((message) => {
    const content = message?.content;
    if (content == null || typeof content === "string") return true;
    return (
      Array.isArray(content) &&
      (content as readonly ({ readonly type?: unknown } | null)[]).every(
        (part) => part?.type === "text",
      )
    );
  });
}
