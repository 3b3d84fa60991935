import type { Tokenizer } from "../model/tokenizer/tokenizer.js";

const INCOMPLETE = "\ufffd";

/**
 * Decodes tokens that arrive one by one. It decodes a window of the last tokens twice, without and
 * with the new one, and returns the difference: decoding everything for each token would be
 * quadratic, and a single token loses its leading space. A character whose bytes are spread over
 * several tokens is withheld until it is complete.
 */
export class TextStream {
  readonly #tokenizer: Pick<Tokenizer, "decode">;
  readonly #tokens: number[] = [];
  #from = 0;
  /** Tokens whose text has been returned. */
  #returned = 0;

  constructor(tokenizer: Pick<Tokenizer, "decode">) {
    this.#tokenizer = tokenizer;
  }

  push(token: number): string {
    this.#tokens.push(token);
    const added = this.#newText();
    if (added === "" || added.endsWith(INCOMPLETE)) return "";
    this.#from = this.#returned;
    this.#returned = this.#tokens.length;
    return added;
  }

  end(): string {
    return this.#returned === this.#tokens.length ? "" : this.#newText();
  }

  #newText(): string {
    const before = this.#tokenizer.decode(this.#tokens.slice(this.#from, this.#returned));
    return this.#tokenizer.decode(this.#tokens.slice(this.#from)).slice(before.length);
  }
}

/**
 * The text of an output, token by token, up to the first stop string, which is not part of it
 * (vLLM: `stop`, without `include_stop_str_in_output`). Text that may be the beginning of a stop
 * string is withheld until that is known.
 */
export class StopText {
  readonly #stops: readonly string[];
  readonly #stream: TextStream;
  #withheld = "";
  #shown = "";
  #stopped: string | undefined;

  constructor(tokenizer: Pick<Tokenizer, "decode">, stops: readonly string[] = []) {
    this.#stops = stops;
    this.#stream = new TextStream(tokenizer);
  }

  get stopped(): string | undefined {
    return this.#stopped;
  }

  get shown(): string {
    return this.#shown;
  }

  push(token: number): string {
    return this.#stopped === undefined ? this.#add(this.#stream.push(token)) : "";
  }

  end(): string {
    if (this.#stopped !== undefined) return "";
    const text = this.#add(this.#stream.end());
    const rest = this.#stopped === undefined ? this.#withheld : "";
    this.#withheld = "";
    this.#shown += rest;
    return text + rest;
  }

  #add(added: string): string {
    const text = this.#withheld + added;
    let end = text.length;
    for (const stop of this.#stops) {
      const at = text.indexOf(stop);
      if (at === -1 || at >= end) continue;
      end = at;
      this.#stopped = stop;
    }
    if (this.#stopped === undefined) end = text.length - this.#possibleBeginning(text);
    this.#withheld = this.#stopped === undefined ? text.slice(end) : "";
    this.#shown += text.slice(0, end);
    return text.slice(0, end);
  }

  /** Characters at the end of a text with which a stop string begins. */
  #possibleBeginning(text: string): number {
    let most = 0;
    for (const stop of this.#stops) {
      for (let length = Math.min(stop.length - 1, text.length); length > most; length--) {
        if (text.endsWith(stop.slice(0, length))) most = length;
      }
    }
    return most;
  }
}

export function stopsOf(stop: string | readonly string[] | null | undefined): readonly string[] {
  if (stop === null || stop === undefined) return [];
  return (typeof stop === "string" ? [stop] : stop).filter((each) => each !== "");
}
