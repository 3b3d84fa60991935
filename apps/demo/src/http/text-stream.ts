import type { Tokenizer } from "../model/tokenizer/tokenizer.js";

const INCOMPLETE = "\ufffd";

/**
 * Decodes tokens that arrive one by one: a window of the last tokens without and with the new one,
 * as a single token loses its leading space. A character whose bytes are spread over several tokens
 * is withheld until it is complete.
 */
export class TextStream {
  readonly #tokenizer: Pick<Tokenizer, "decode">;
  readonly #tokens: number[] = [];
  #from = 0;
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
