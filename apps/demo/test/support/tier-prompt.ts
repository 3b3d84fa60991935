export const BLOCK = 4;
/** Twelve blocks, and two tokens more. */
export const PROMPT = Array.from({ length: 50 }, (_, at) => (at * at * 7 + 31) % 990);
