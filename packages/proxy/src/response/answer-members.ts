import { LEFT_OUT_HEADER } from "@kv/fleet/front-end";
import { asBuffer } from "./event-stream.js";

/**
 * Where a member of an answer comes from when P computed the prompt. `decode`: D, which has it whole. `prefill`: P. `merged`: made of several answers. `dropped`: it names
 * hosts and blocks, so no client gets it. `left-out`: neither has it whole; the header `x-kv-left-out` names it.
 */
export type AnswerMemberUse = "decode" | "prefill" | "merged" | "dropped" | "left-out";

const MEMBERS: Readonly<Record<AnswerMemberUse, string>> = {
  decode:
    "object created model type role choices.text choices.message choices.delta choices.logprobs choices.finish_reason choices.stop_reason choices.token_ids " +
    "choices.weight_versions stop_reason stop_sequence content output output_messages service_tier system_fingerprint metrics created_at incomplete_details status " +
    // D has the prompt's text and tokens, though not its KV.
    "choices.prompt_token_ids prompt_token_ids prompt_text input_messages " +
    // The Responses API repeats the request.
    "instructions metadata parallel_tool_calls temperature tool_choice tools top_p background max_output_tokens max_tool_calls previous_response_id prompt " +
    "prompt_cache_options prompt_cache_key prompt_cache_retention reasoning safety_identifier text top_logprobs truncation user presence_penalty frequency_penalty",
  prefill: "prompt_logprobs choices.prompt_logprobs",
  // The id is the client's; the cached tokens of the usage are P's; with echo, log probabilities are P's and D's.
  merged: "id choices choices.index usage",
  dropped: "kv_transfer_params ec_transfer_params",
  // D has no rows for the prompt, and P none for the answer.
  "left-out": "choices.routed_experts",
};

/** The members of vLLM's answers, 0.31 to 0.33, by path. A test compares them with `fixtures/vllm-api.json`. */
export const ANSWER_MEMBERS: ReadonlyMap<string, AnswerMemberUse> = new Map(
  Object.entries(MEMBERS).flatMap(([use, paths]) =>
    paths.split(" ").map((path) => [path, use as AnswerMemberUse] as const),
  ),
);

type Fields = Readonly<Record<string, unknown>>;

const namesOf = (use: AnswerMemberUse) => MEMBERS[use].split(" ").map((path) => path.replace(/^.*\./, ""));
const DROPPED = namesOf("dropped");
const LEFT_OUT = namesOf("left-out");
/** A part of each dropped name, which hardly any other text has. */
const PART_OF_DROPPED = "_transfer_params";

/** A complete answer without what clients do not get; `leftOut` names what it should have. Undefined where it has nothing of it. */
export function withoutHidden(
  bytes: Buffer,
  body: Fields,
  kvFromPrefill: boolean,
): { readonly held: Buffer; readonly leftOut: Readonly<Record<string, string>> } | undefined {
  const isDropped = DROPPED.some((name) => body[name] != null);
  const choices = Array.isArray(body.choices) ? (body.choices as readonly (Fields | null)[]) : [];
  const leftOut = kvFromPrefill
    ? LEFT_OUT.filter((name) => choices.some((choice) => choice?.[name] != null))
    : [];
  if (!isDropped && leftOut.length === 0) return undefined;
  const held = new ValueEraser(kvFromPrefill).push(bytes);
  return { held, leftOut: leftOut.length === 0 ? {} : { [LEFT_OUT_HEADER]: leftOut.join(", ") } };
}

/** A parsed answer, or an event, without what clients do not get. */
export function hideMembers(body: Fields, kvFromPrefill: boolean): Record<string, unknown> {
  const hidden: Record<string, unknown> = { ...body };
  for (const name of DROPPED) if (hidden[name] != null) hidden[name] = null;
  if (!kvFromPrefill || !Array.isArray(body.choices)) return hidden;
  hidden.choices = (body.choices as readonly Fields[]).map((choice) => ({
    ...choice,
    ...Object.fromEntries(LEFT_OUT.filter((name) => choice[name] != null).map((name) => [name, null])),
  }));
  return hidden;
}

/** Longer than each name, with its quotes and blanks before the colon. */
const TAIL_LENGTH = 64;
const QUOTE = 0x22;
const BACKSLASH = 0x5c;

type Place = "outside" | "before-value" | "in-string" | "in-nested" | "in-literal";

/** Writes `null` for the values of the members that clients do not get, in JSON or in events of JSON, wherever the chunks end. Quotes inside of strings are escaped, so no string matches. */
export class ValueEraser {
  readonly #names: RegExp;
  readonly #parts: readonly string[];
  #place: Place = "outside";
  #depth = 0;
  #isString = false;
  #isEscaped = false;
  /** The end of the line that has not ended: a name may go on in the next chunk. */
  #tail = "";

  /** `kvFromPrefill`: the members that neither P nor D has whole are erased too. */
  constructor(kvFromPrefill: boolean) {
    const names = kvFromPrefill ? [...DROPPED, ...LEFT_OUT] : DROPPED;
    this.#parts = kvFromPrefill ? [PART_OF_DROPPED, ...LEFT_OUT] : [PART_OF_DROPPED];
    this.#names = new RegExp(`"(?:${names.join("|")})"\\s*:`, "g");
  }

  /** `text`: the chunk, a character for each byte. */
  push(chunk: Uint8Array, text = asBuffer(chunk).toString("latin1")): Buffer {
    const bytes = asBuffer(chunk);
    if (this.#place === "outside" && this.#tail === "" && !this.#parts.some((part) => text.includes(part))) {
      this.#keepTail(text);
      return bytes;
    }
    const kept: Buffer[] = [];
    let at = 0;
    while (at < text.length) {
      const from = at;
      if (this.#place === "outside") {
        at = this.#endOfName(text, from);
        kept.push(bytes.subarray(from, at));
        if (at < text.length || this.#place !== "outside") continue;
        this.#keepTail(this.#tail + text);
      } else {
        const isBefore = this.#place === "before-value";
        at = this.#skip(text, from);
        if (isBefore) kept.push(...this.#begin(text, bytes, from, at));
      }
    }
    return kept.length === 1 && kept[0] !== undefined ? kept[0] : Buffer.concat(kept);
  }

  #keepTail(text: string): void {
    this.#tail = text.endsWith("\n") ? "" : text.slice(-TAIL_LENGTH);
  }

  /** The position behind the next name and its colon; the end of the text where there is none. */
  #endOfName(text: string, from: number): number {
    const before = from === 0 ? this.#tail : "";
    const searched = before + text;
    this.#names.lastIndex = from;
    for (let found = this.#names.exec(searched); found !== null; found = this.#names.exec(searched)) {
      const end = this.#names.lastIndex - before.length;
      // One that ends in the tail was found before.
      if (end <= 0) continue;
      this.#place = "before-value";
      this.#tail = "";
      return end;
    }
    return text.length;
  }

  /** What leaves for the blanks before a value and its begin: the blanks, and `null` for the value. */
  #begin(text: string, bytes: Buffer, from: number, to: number): Buffer[] {
    const blanks = text.slice(from, to).search(/\S/);
    if (blanks === -1) return [bytes.subarray(from, to)];
    // A value that is null stays, and so does its text.
    return [bytes.subarray(from, from + blanks), NULL];
  }

  /** Skips a value. Returns where it ends, or the end of the text. */
  #skip(text: string, from: number): number {
    for (let at = from; at < text.length; at += 1) {
      const code = text.charCodeAt(at);
      switch (this.#place) {
        case "before-value":
          if (code <= 0x20) break;
          this.#place = code === QUOTE ? "in-string" : isOpening(code) ? "in-nested" : "in-literal";
          this.#depth = 1;
          this.#isString = false;
          break;
        case "in-literal":
          if (code !== 0x2c && !isClosing(code) && code > 0x20) break;
          this.#place = "outside";
          return at;
        default:
          if (!this.#endsValue(code)) break;
          this.#place = "outside";
          return at + 1;
      }
    }
    return text.length;
  }

  /** Whether a character of a string, a list or an object is its last. */
  #endsValue(code: number): boolean {
    if (this.#isEscaped) this.#isEscaped = false;
    else if (this.#place === "in-string" || this.#isString) {
      if (code === BACKSLASH) this.#isEscaped = true;
      else if (code === QUOTE) {
        this.#isString = false;
        return this.#place === "in-string";
      }
    } else if (code === QUOTE) this.#isString = true;
    else if (isOpening(code)) this.#depth += 1;
    else if (isClosing(code)) this.#depth -= 1;
    return this.#place === "in-nested" && this.#depth === 0;
  }
}

const NULL = Buffer.from("null");
const isOpening = (code: number) => code === 0x7b || code === 0x5b;
const isClosing = (code: number) => code === 0x7d || code === 0x5d;
