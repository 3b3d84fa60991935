export interface WordTokenizer {
  encode(text: string): Int32Array;
  decode(tokens: ArrayLike<number>, options?: { skipSpecialTokens?: boolean }): string;
}

/** Words parted by white space, looked up whole; what is not in the vocabulary is the unknown token. */
export function wordTokenizer(options: {
  vocabulary: ReadonlyMap<string, number>;
  unknown: string;
  special: readonly (string | undefined)[];
}): WordTokenizer {
  const { vocabulary, unknown } = options;
  const special = new Set(options.special);
  const words = new Map([...vocabulary].map(([word, token]) => [token, word]));
  const unknownToken = vocabulary.get(unknown) ?? 0;
  return {
    encode: (text) =>
      Int32Array.from(text.split(/\s+/u).filter(Boolean), (word) => vocabulary.get(word) ?? unknownToken),
    decode: (tokens, { skipSpecialTokens = true } = {}) =>
      Array.from(tokens, (token) => words.get(token) ?? unknown)
        .filter((word) => !skipSpecialTokens || !special.has(word))
        .join(" "),
  };
}

/** The vocabulary of the built-in model: token i is the word `t{i}`. */
export function numberedWords(vocabSize: number): Map<string, number> {
  return new Map(Array.from({ length: vocabSize }, (_, token) => [`t${token}`, token]));
}
