import { asBuffer } from "./event-stream.js";
import type { Usage } from "./sum-usage.js";

/** The tokens of the prompt that P had cached; undefined where P did not say so. */
export type CachedTokens = () => Promise<number | undefined>;

type Fields = Record<string, unknown>;

/**
 * A usage with P's cached tokens. In push, D counts all that it got from P as cached: vLLM tells it P's number with the KV parameters of pull alone. Where P's number is not known,
 * there is none.
 */
export function withCachedTokens(usage: Usage, cached: number | undefined): Usage {
  const changed = { ...usage };
  if (isObject(usage.prompt_tokens_details))
    changed.prompt_tokens_details = { ...usage.prompt_tokens_details, cached_tokens: cached ?? null };
  // Its clients want a number.
  if (isObject(usage.input_tokens_details))
    changed.input_tokens_details = { ...usage.input_tokens_details, cached_tokens: cached ?? 0 };
  const { cache_read_input_tokens: read, input_tokens: input } = usage;
  if (typeof read === "number" && typeof input === "number") {
    // In the Messages API, the input tokens are those that were not cached.
    changed.cache_read_input_tokens = cached ?? 0;
    changed.input_tokens = Math.max(0, input + read - (cached ?? 0));
  }
  return changed;
}

function isObject(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** A complete answer, or the data of an event. */
function withUsageOf(body: Fields, cached: number | undefined): Fields {
  const changed = { ...body };
  if (isObject(body.usage)) changed.usage = withCachedTokens(body.usage, cached);
  for (const inside of ["response", "message"]) {
    const object = body[inside];
    if (isObject(object) && isObject(object.usage))
      changed[inside] = { ...object, usage: withCachedTokens(object.usage, cached) };
  }
  return changed;
}

/** Members that only a usage with cached tokens has. */
const MARKS = ["_tokens_details", "cache_read_input_tokens"];
const NOTHING = Buffer.alloc(0);
const LF = 0x0a;

/** A complete answer with P's cached tokens. Asks for them only where the answer has a usage with them. */
export async function answerWithCachedTokens(bytes: Buffer, cachedTokens: CachedTokens): Promise<Buffer> {
  if (!MARKS.some((mark) => bytes.includes(mark))) return bytes;
  const body = JSON.parse(bytes.toString()) as Fields;
  return Buffer.from(JSON.stringify(withUsageOf(body, await cachedTokens())));
}

/** Puts P's cached tokens into the events of a stream. A line leaves when it has ended. */
export class StreamedCachedTokens {
  readonly #cachedTokens: CachedTokens;
  #line: Buffer = NOTHING;

  constructor(cachedTokens: CachedTokens) {
    this.#cachedTokens = cachedTokens;
  }

  /** Bytes of the line that has not ended. */
  get heldBytes(): number {
    return this.#line.length;
  }

  /** Returns the lines that end in this chunk. */
  push(chunk: Uint8Array): Buffer | Promise<Buffer> {
    const given = asBuffer(chunk);
    const bytes = this.#line.length === 0 ? given : Buffer.concat([this.#line, given]);
    const end = bytes.lastIndexOf(LF) + 1;
    this.#line = bytes.subarray(end);
    return this.#changed(bytes.subarray(0, end));
  }

  /** The last bytes of the stream. Returns them with the line that was held. */
  whole(last: Buffer): Buffer | Promise<Buffer> {
    const bytes = this.#line.length === 0 ? last : Buffer.concat([this.#line, last]);
    this.#line = NOTHING;
    return this.#changed(bytes);
  }

  #changed(bytes: Buffer): Buffer | Promise<Buffer> {
    return MARKS.some((mark) => bytes.includes(mark)) ? this.#edited(bytes.toString()) : bytes;
  }

  async #edited(text: string): Promise<Buffer> {
    const cached = await this.#cachedTokens();
    return Buffer.from(
      text.replace(/^(data:\s*)(\{.*\})/gm, (line, field: string, data: string) => {
        if (!MARKS.some((mark) => data.includes(mark))) return line;
        return field + JSON.stringify(withUsageOf(JSON.parse(data) as Fields, cached));
      }),
    );
  }
}
