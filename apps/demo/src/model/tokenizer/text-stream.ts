import type { Tokenizer } from "./tokenizer.js";

/** Text of tokens that come one by one. What one token adds may depend on the ones before it. */
export interface TextStream {
  /** The text that is certain now; empty while a character is incomplete. */
  push(token: number): string;
  /** What was held back. */
  end(): string;
}

const incomplete = "\ufffd";

/**
 * Decodes a window of the last tokens twice, without and with the new one, and gives the difference: a whole
 * decode per token would be quadratic, and one token alone loses its leading space. A character whose bytes are
 * spread over tokens is held back until it is complete.
 */
export function textStream(tokenizer: Pick<Tokenizer, "decode">): TextStream {
  const tokens: number[] = [];
  let from = 0;
  let given = 0;

  const difference = (): string => {
    const before = tokenizer.decode(tokens.slice(from, given));
    return tokenizer.decode(tokens.slice(from)).slice(before.length);
  };
  return {
    push(token) {
      tokens.push(token);
      const added = difference();
      if (added === "" || added.endsWith(incomplete)) return "";
      from = given;
      given = tokens.length;
      return added;
    },
    end: () => (given === tokens.length ? "" : difference()),
  };
}
