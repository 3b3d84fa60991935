import type { Tokenizer } from "./tokenizer.js";

const INCOMPLETE = "\ufffd";

/**
 * Decodes tokens that arrive one by one. It decodes a window of the last tokens twice, without and with the new one, and returns the
 * difference: decoding everything for each token would be quadratic, and a single token loses its leading space. A character whose
 * bytes are spread over several tokens is withheld until it is complete.
 */
export class TextStream {
  readonly #tokenizer: Pick<Tokenizer, "decode">;
  readonly #tokens: number[] = [];
  /** Start of the window. */
  #from = 0;
  /** Tokens whose text has been returned. */
  #returned = 0;

  constructor(tokenizer: Pick<Tokenizer, "decode">) {
    this.#tokenizer = tokenizer;
  }

  /** Adds a token and returns the new complete text; empty while a character is incomplete. */
  push(token: number): string {
    this.#tokens.push(token);
    const added = this.#newText();
    if (added === "" || added.endsWith(INCOMPLETE)) return "";
    this.#from = this.#returned;
    this.#returned = this.#tokens.length;
    return added;
  }

  /** Returns the text that was withheld. */
  end(): string {
    return this.#returned === this.#tokens.length ? "" : this.#newText();
  }

  #newText(): string {
    const before = this.#tokenizer.decode(this.#tokens.slice(this.#from, this.#returned));
    return this.#tokenizer.decode(this.#tokens.slice(this.#from)).slice(before.length);
  }
}
